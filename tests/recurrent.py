"""A target with a recurrent layer, whose cache entry is a state of every row; and its plain text.

h_t = decay * h_{t-1} + embedding[x_t]      y_t = h_t (+ attention over all h)      y_t W
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec import ops
from jspec.core import kv_cache, sampling, trees
from jspec.core.entries import AttentionKV, Entry
from jspec.core.history import root_token
from jspec.core.types import Array, Draft, Drafter, Target, TargetOutput
from tests import fakes

VOCAB, SIZE = 12, 8
DECAY = np.linspace(0.3, 0.95, SIZE, dtype=np.float32)


@struct.dataclass
class Added:
    """Inputs of the recurrence, one for each node."""

    x: Array  # [B, 1, N, D]


@struct.dataclass
class State(Entry):
    """The state of a linear recurrence."""

    h: Array  # [B, D]

    def of_nodes(self, batch: int, count: int) -> Any:
        return Added(jax.ShapeDtypeStruct((batch, 1, count, SIZE), jnp.float32))

    def append(self, new, commit):
        x = jnp.take_along_axis(new.x[:, 0], commit.path[..., None], 1)  # [B, R, D]
        is_committed = jnp.arange(x.shape[1]) < commit.count[:, None]

        def step(index, h):
            return jnp.where(is_committed[:, index, None], DECAY * h + x[:, index], h)

        return State(lax.fori_loop(0, x.shape[1], step, self.h))


@dataclasses.dataclass(frozen=True)
class RecurrentTarget(Target):
    """A recurrence, and one layer of attention behind it if ``attends``."""

    attends: bool
    vocab_size: int = VOCAB
    max_positions: int = 512
    reads_pages = True

    def init_cache(self, batch, capacity):
        layers = [State(jnp.zeros((batch, SIZE)))]
        if self.attends:
            layers.append(AttentionKV.empty(batch, 1, capacity, SIZE, jnp.float32))
        return kv_cache.empty(batch, layers)

    def forward(self, params, tokens, tree, cache, capture_layers=()):
        tree, state = trees.broadcast(tree, len(tokens)), cache.layers[0]
        x, parents = params["embedding"][tokens], jnp.asarray(tree.parents)

        def visit(node, h):
            """Write the state [B, D] behind a node into h [B, N, D]; its parent's is there."""
            above = jnp.take_along_axis(h, parents[:, node, None, None], 1)[:, 0]
            above = jnp.where(node == 0, state.h, above)
            return h.at[:, node].set(DECAY * above + x[:, node])

        y = lax.fori_loop(0, tokens.shape[1], visit, jnp.zeros_like(x))
        new = [Added(x[:, None])]
        if self.attends:
            q, k, v = (y[:, None] @ params[name] for name in "qkv")
            new.append(AttentionKV(k, v))
            entry = cache.layers[1]
            mixed = ops.attention(
                q,
                k,
                v,
                tree.ancestors,
                entry.k,
                entry.v,
                cache.length,
                table=cache.table_of(1),
                scale=SIZE**-0.5,
            )
            y = y + mixed[:, 0]
        return TargetOutput(y @ params["out"], (y,) * len(capture_layers), tuple(new))


@dataclasses.dataclass(frozen=True)
class RecurrentDrafter(Drafter):
    """A draft network without attention, whose memory is a state behind the committed tokens."""

    num_speculative_tokens: int = 3
    proposal = "deterministic"
    reads_pages = True
    max_depth = property(lambda self: self.num_speculative_tokens)
    tree_size = property(lambda self: self.num_speculative_tokens + 1)

    def init(self, params, request, capacity):
        batch = request.max_length.shape[0]
        return kv_cache.empty(batch, [State(jnp.zeros((batch, SIZE)))])

    def prefill(self, params, memory, tokens, features, start, valid):
        return kv_cache.append_prompt(memory, self._read(params, tokens[:, :-1]), valid)

    def propose(self, params, request, shared, memory, history):
        h, tokens = memory.layers[0].h, [root_token(history)]
        for _ in range(self.max_depth):
            h = DECAY * h + params.drafter["embedding"][tokens[-1]]
            tokens.append(jnp.argmax(h @ params.drafter["out"], -1).astype(jnp.int32))
        tokens = jnp.stack(tokens, 1)
        parents = trees.chain(self.max_depth)
        valid = jnp.ones(tokens.shape, bool)
        return Draft(tokens, parents, valid, max_depth=self.max_depth), memory

    def update(self, round):
        nodes = self._read(round.params, round.draft.tokens)
        return kv_cache.commit(round.memory, nodes, round.verdict), round.shared

    def _read(self, params, tokens):
        return (Added(params.drafter["embedding"][tokens][:, None]),)


def init_params(seed: int = 0, vocab_size: int = VOCAB) -> dict[str, Array]:
    """Return random weights."""
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.normal(size=shape).astype(np.float32)
    square = {name: draw(SIZE, SIZE) * SIZE**-0.5 for name in "qkv"}
    return {"embedding": draw(vocab_size, SIZE), "out": draw(SIZE, vocab_size), **square}


class Plain:
    """The recurrence in NumPy, token by token."""

    def __init__(self, target: RecurrentTarget, params: dict[str, Array]):
        self.params = jax.tree.map(np.asarray, params)
        self.attends, self.h, self.past = target.attends, np.zeros(SIZE, np.float32), []

    def feed(self, token: int) -> np.ndarray:
        """Return the logits [V] behind a token."""
        self.h = DECAY * self.h + self.params["embedding"][token]
        self.past.append(self.h)
        y = self.h
        if self.attends:
            q, k, v = (np.array(self.past) @ self.params[name] for name in "qkv")
            scores = k @ q[-1] * SIZE**-0.5
            weights = np.exp(scores - scores.max())
            y = y + weights @ v / weights.sum()
        return y @ self.params["out"]


def plain_text(target: RecurrentTarget, params: dict[str, Array], sequence: Any) -> list[int]:
    """Return the tokens that ``sequence`` has without speculation, a batch, chunks or pages."""
    plain, text = Plain(target, params), list(sequence.prompt)
    settings = fakes.settings(1, temperature=sequence.temperature)
    key = jax.random.fold_in(jax.random.key(sequence.seed), sequence.stream)[None]
    for token in text[:-1]:
        plain.feed(token)
    for _ in range(sequence.max_tokens):
        logits = sampling.process_logits(jnp.asarray(plain.feed(text[-1]))[None], settings)
        text.append(int(sampling.draw_target(logits, settings, key, jnp.array([len(text)]))[0]))
    return text[len(sequence.prompt) :]
