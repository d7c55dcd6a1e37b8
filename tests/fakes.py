"""Targets and drafters small enough to know everything about.

Targets (``params.target`` is a table of logits):

* ``ToyTarget``: the law of a token depends on the token before it. Equal rows: context-free.
* ``PrefixTarget``: the law depends on every token of the prefix, read from a real KV cache, so a
  single misplaced, missing or stale slot changes the text.

Drafters that know the answer (``params.drafter`` is the script, int32 [B, T]: the text that plain
decoding gives, prompt included; see ``script``). They are point masses:

* ``OracleDrafter``: always right.          * ``NeverRightDrafter``: always wrong.
* ``RandomDrafter``: right half the time.   * ``RandomLengthDrafter``: right, 0 to K tokens long.
* ``BushDrafter``: a tree with at most one right child a node, at a changing rank.

``TableDrafter`` draws a chain from a table of its own (``params.drafter``, float [V, V], the law of
a token given the one before it) and records the laws it drew from.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from jspec import generate, kv, sampling, tokens, topology
from jspec.types import Array, Draft, Params, Sampling, TargetOutput

# ---------------------------------------------------------------------------------------- targets


@dataclasses.dataclass(frozen=True)
class ToyTarget:
    """The law after a token is a row of ``params`` [V, V]; the cache has a length and no layers."""

    vocab_size: int
    max_positions: int = 4096

    def init_cache(self, batch, capacity):
        return kv.KVCache((), jnp.zeros((batch,), jnp.int32))

    def forward(self, params, tokens, tree, cache, capture_layers=()):
        return TargetOutput(params[tokens], (), ())

    def embed(self, params, tokens):
        return jax.nn.one_hot(tokens, self.vocab_size)

    def unembed(self, params, hidden):
        return hidden


@dataclasses.dataclass(frozen=True)
class PrefixTarget(ToyTarget):
    """The law after a node is the row of ``params`` [M, V] that a hash of its prefix names.

    The one layer of the cache keeps token ids, so the hash is only right if every committed token
    lies in its slot, once.
    """

    def init_cache(self, batch, capacity):
        return kv.allocate(1, batch, 1, capacity, 1, jnp.int32)

    def forward(self, params, tokens, tree, cache, capture_layers=()):
        tree = topology.broadcast(tree, tokens.shape[0])
        committed = cache.layers[0].k[:, 0, :, 0]
        slots = jnp.arange(committed.shape[1])
        held = slots < cache.length[:, None]
        prefix = jnp.where(held, _mark(committed, slots), 0).sum(1, dtype=jnp.uint32)
        nodes = _mark(tokens, cache.length[:, None] + tree.depth)
        above = topology.unpack_bits(tree.ancestors, tokens.shape[1])
        own = jnp.where(above, nodes[:, None, :], 0).sum(-1, dtype=jnp.uint32)
        row = _scramble(prefix[:, None] + own) % params.shape[0]
        entry = tokens[:, None, :, None]
        return TargetOutput(params[row], (), (kv.AttentionKV(entry, entry),))


def _scramble(x: Array) -> Array:
    """A uint32 hash whose every output bit depends on every input bit."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _mark(tokens: Array, positions: Array) -> Array:
    """A number for "this token stands at this position"."""
    word = tokens.astype(jnp.uint32) * jnp.uint32(65537) + positions.astype(jnp.uint32)
    return _scramble(word + jnp.uint32(0x9E3779B9))


def table(key: int, rows: int, vocab_size: int, scale: float = 1.5) -> Array:
    """Random logits [rows, V] for a target or a ``TableDrafter``."""
    return scale * jax.random.normal(jax.random.key(key), (rows, vocab_size))


# --------------------------------------------------------------------------------------- drafters


@dataclasses.dataclass(frozen=True)
class _Chain:
    """What all chains of K tokens without a memory share."""

    num_speculative_tokens: int
    capture_layers = ()
    proposal = "point"
    noise = "own"

    @property
    def max_depth(self):
        return self.num_speculative_tokens

    @property
    def tree_size(self):
        return self.num_speculative_tokens + 1

    def init(self, params, request, capacity):
        return ()

    def absorb(self, params, memory, tokens, features, start, valid):
        return memory

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        return memory, shared

    def _draft(self, history, drafted, length=None, logits=None):
        """A chain of ``drafted`` [B, K], the first ``length`` [B] of them valid (None: all)."""
        valid = jnp.ones(drafted.shape, bool)
        if length is not None:
            valid = jnp.arange(drafted.shape[1]) < length[:, None]
        return Draft(
            tokens=jnp.concatenate(
                [tokens.root(history)[:, None], jnp.where(valid, drafted, 0)], 1
            ),
            parents=topology.chain(self.num_speculative_tokens),
            valid=jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True),
            logits=logits,
            max_depth=self.num_speculative_tokens,
        )

    def _length(self, history):
        """0 to K, by a hash of the position alone: no drafted value has a say."""
        hashed = _scramble(history.length.astype(jnp.uint32))
        return (hashed % (self.num_speculative_tokens + 1)).astype(jnp.int32)


@dataclasses.dataclass(frozen=True)
class OracleDrafter(_Chain):
    """Drafts what the script says: always right."""

    def propose(self, params, request, shared, memory, history):
        return self._draft(history, self._answer(params, history)), memory

    def _answer(self, params, history):
        index = history.length[:, None] + jnp.arange(self.num_speculative_tokens)
        return jnp.take_along_axis(params.drafter, index, 1, mode="clip")


@dataclasses.dataclass(frozen=True)
class NeverRightDrafter(OracleDrafter):
    """Drafts the token after the right one: always wrong, always in the vocabulary."""

    vocab_size: int = 2

    def propose(self, params, request, shared, memory, history):
        wrong = (self._answer(params, history) + 1) % self.vocab_size
        return self._draft(history, wrong), memory


@dataclasses.dataclass(frozen=True)
class RandomDrafter(OracleDrafter):
    """Each token is right with probability a half, else the token after the right one."""

    vocab_size: int = 2

    def propose(self, params, request, shared, memory, history):
        answer = self._answer(params, history)
        positions = history.length[:, None] + jnp.arange(self.num_speculative_tokens)
        rows = jnp.arange(answer.shape[0], dtype=jnp.uint32)[:, None]
        off = (_scramble(positions.astype(jnp.uint32) * 8191 + rows) % 2).astype(jnp.int32)
        return self._draft(history, (answer + off) % self.vocab_size), memory


@dataclasses.dataclass(frozen=True)
class RandomLengthDrafter(OracleDrafter):
    """Right, but 0 to K tokens long; the length depends on the position alone."""

    def propose(self, params, request, shared, memory, history):
        drafted = self._answer(params, history)
        return self._draft(history, drafted, self._length(history)), memory


@dataclasses.dataclass(frozen=True)
class BushDrafter(OracleDrafter):
    """A static tree: siblings hold neighbouring tokens, of which at most one is right.

    ``parents`` as in ``topology``; ``num_speculative_tokens`` is its depth.
    """

    parents: tuple[int, ...] = (-1, 0)
    vocab_size: int = 2

    @property
    def tree_size(self):
        return len(self.parents)

    def propose(self, params, request, shared, memory, history):
        tree = topology.from_parents(np.array(self.parents, np.int32), self.max_depth)
        ranks = np.array([self.parents[:node].count(up) for node, up in enumerate(self.parents)])
        width = int(ranks.max()) + 1
        positions = history.length[:, None] - 1 + tree.depth
        answer = jnp.take_along_axis(params.drafter, positions, 1, mode="clip")
        right = (_scramble(positions.astype(jnp.uint32)) % (width + 1)).astype(jnp.int32)
        drafted = ((answer + ranks - right) % self.vocab_size).at[:, 0].set(tokens.root(history))
        draft = Draft(
            tokens=drafted,
            parents=np.array(self.parents, np.int32),
            valid=jnp.ones_like(drafted, dtype=bool),
            max_depth=self.max_depth,
        )
        return draft, memory


@dataclasses.dataclass(frozen=True)
class TableDrafter(_Chain):
    """Draws a chain from the table ``params.drafter`` [V, V], warped as the target is.

    ``ragged`` cuts chains to 0..K tokens by a hash of the position.
    """

    noise: str = "own"
    ragged: bool = False
    proposal = "chain"

    def propose(self, params, request, shared, memory, history):
        count = self.num_speculative_tokens
        coins = sampling.round_noise(
            request.keys, history.length - 1, sampling.DRAFT, count
        )
        token, drafted, laws = tokens.root(history), [], []
        for index in range(count):
            law = sampling.warp(params.drafter[token], request.sampling)
            if self.noise == "target" or request.sampling.greedy:
                token = sampling.draw_target(
                    law, request.sampling, request.keys, history.length + index
                )
            else:
                token = sampling.draw(law, coins[:, index])
            drafted.append(token)
            laws.append(law)
        recorded = jnp.stack([*laws, jnp.zeros_like(laws[0])], 1)
        sampled = self.noise == "own" and not request.sampling.greedy
        draft = self._draft(
            history, jnp.stack(drafted, 1), self._length(history) if self.ragged else None,
            recorded if sampled else None,
        )  # fmt: skip
        return draft, memory


# ---------------------------------------------------------------------------------------- helpers


def settings(batch, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0) -> Sampling:
    """Sampling settings for ``batch`` rows; each argument is a number or one a row."""
    fill = lambda value, dtype: jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))
    used = {
        "temperature": np.any(np.asarray(temperature) > 0), "min_p": np.any(np.asarray(min_p) > 0),
        "top_k": np.any(np.asarray(top_k) > 0), "top_p": np.any(np.asarray(top_p) < 1),
    }  # fmt: skip
    return Sampling(
        fill(temperature, jnp.float32), fill(min_p, jnp.float32),
        fill(top_k, jnp.int32), fill(top_p, jnp.float32),
        names=tuple(name for name in sampling.WARPS if used[name]),
    )  # fmt: skip


def run_rows(plan, params: Params, rows, rounds=None) -> list[generate.Answer]:
    """Decodes ``rows`` as one batch, in their order (a script needs to know its rows)."""
    batch = generate.start(plan, params, rows)
    return generate.read(generate.advance(plan, params, batch, rounds))


def script(rows, answers) -> Array:
    """The script for the scripted drafters: every row's prompt and answer, padded [B, T]."""
    texts = [[*row.prompt, *answer.tokens] for row, answer in zip(rows, answers, strict=True)]
    size = 1
    while size < len(rows):
        size *= 2  # as ``generate.start`` pads the batch
    out = np.zeros((size, max(map(len, texts))), np.int32)
    for index, text in enumerate(texts):
        out[index, : len(text)] = text
    return jnp.array(out)
