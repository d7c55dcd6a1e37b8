"""A new drafting method: draft the token that most often followed the last one, K times.

python examples/write_a_drafter.py [checkpoint directory]
"""

import dataclasses
import sys

import jax
import jax.numpy as jnp

import jspec
from jspec.core import trees
from jspec.core.history import root_token
from jspec.models import decoder
from jspec.models.blocks import attention, mlp


@dataclasses.dataclass(frozen=True)
class Bigram(jspec.NoDrafter):
    """Draft a chain of bigrams. It keeps no memory and reads no hidden states, like its base."""

    num_speculative_tokens: int
    vocab_size: int

    proposal = "deterministic"  # nothing is sampled, so there are no distributions to record
    max_depth = property(lambda self: self.num_speculative_tokens)
    tree_size = property(lambda self: self.num_speculative_tokens + 1)  # the root is a node too

    def propose(self, params, request, shared, memory, history):
        """Return a chain of K tokens a row under the last committed one."""
        drafted, valid = [root_token(history)], [history.length > 0]
        for _ in range(self.max_depth):
            token, seen = jax.vmap(self.follow)(history.tokens, history.length, drafted[-1])
            drafted.append(token)
            valid.append(valid[-1] & seen)
        drafted, valid = jnp.stack(drafted, 1), jnp.stack(valid, 1)
        parents = trees.chain(self.max_depth)
        return jspec.Draft(drafted, parents, valid, max_depth=self.max_depth), memory

    def follow(self, row, length, token):
        """Return the most frequent successor of ``token`` in a row, and whether it has one."""
        hits = (row[:-1] == token) & (jnp.arange(row.size - 1) < length - 1)
        counts = jnp.zeros(self.vocab_size, jnp.int32).at[row[1:]].add(hits)
        return counts.argmax().astype(jnp.int32), hits.any()


if len(sys.argv) > 1:
    loaded = jspec.load(sys.argv[1])
    target, params = loaded.target, loaded.params
else:  # a small model with random weights; its text soon runs in circles
    layer = decoder.Layer(attention.Attention(4, 2, head_dim=16), mlp.GatedMlp(128))
    target = decoder.Decoder(decoder.DecoderConfig(128, 64, (layer, layer), max_positions=512))
    params = decoder.init_params(jax.random.key(0), target.config)
prompts, limit = [[1, 2, 3], [4, 5]], {"max_new_tokens": 100}
plain = jspec.generate(target, params, prompts, **limit)
drafted = jspec.generate(target, params, prompts, drafter=Bigram(4, target.vocab_size), **limit)
for a, b in zip(plain, drafted, strict=True):
    print("same text:", jnp.array_equal(a.tokens, b.tokens))
    print(f"tokens a pass: {a.acceptance_length:.2f} plain, {b.acceptance_length:.2f} drafted")
