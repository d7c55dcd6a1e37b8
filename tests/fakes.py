"""Targets and drafters small enough to know everything about.

Targets (``params.target`` is a table of logits):

* ``ToyTarget``: the law of a token depends on the token before it. Equal rows: context-free.
* ``PrefixTarget``: the law depends on every token of the prefix, read from a real KV cache, so a
  single misplaced, missing or stale slot changes the text.

Drafters that know the answer (``params.drafter`` is a ``Script``: the text that plain decoding
gives, prompt included). They are point masses:

* ``OracleDrafter``: always right.          * ``NeverRightDrafter``: always wrong.
* ``RandomDrafter``: right half the time.   * ``RandomLengthDrafter``: right, 0 to K tokens long.
* ``ScriptedDrafter``: any of the four, row by row.
* ``BushDrafter``: a tree with at most one right child a node, at a changing rank.
* ``OnePassDrafter``: what it knows are logits, of which a tree is grown.

``TableDrafter`` draws a chain from a table of its own (``params.drafter``, float [V, V], the law of
a token given the one before it) and records the laws it drew from. ``TreeTableDrafter`` draws a
tree from it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec.core import kv_cache, sampling, trees
from jspec.core.history import root_token
from jspec.core.types import Array, Draft, Params, Sampling, TargetOutput
from jspec.drafters.trees import marginals, tree_settings
from jspec.drafters.trees.drawing import Drawing
from jspec.engine.batch import Answer, advance, read, start

# ---------------------------------------------------------------------------------------- targets


@dataclasses.dataclass(frozen=True)
class ToyTarget:
    """The law after a token is a row of ``params`` [V, V]; the cache has a length and no layers."""

    vocab_size: int
    max_positions: int = 4096

    def init_cache(self, batch, capacity):
        return kv_cache.KVCache((), jnp.zeros((batch,), jnp.int32))

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
        return kv_cache.allocate(1, batch, 1, capacity, 1, jnp.int32)

    def forward(self, params, tokens, tree, cache, capture_layers=()):
        tree = trees.broadcast(tree, tokens.shape[0])
        committed = cache.layers[0].k[:, 0, :, 0]
        slots = jnp.arange(committed.shape[1])
        held = slots < cache.length[:, None]
        prefix = jnp.where(held, _mark(committed, slots), 0).sum(1, dtype=jnp.uint32)
        nodes = _mark(tokens, cache.length[:, None] + tree.depth)
        above = trees.unpack_bits(tree.ancestors, tokens.shape[1])
        own = jnp.where(above, nodes[:, None, :], 0).sum(-1, dtype=jnp.uint32)
        row = _scramble(prefix[:, None] + own) % params.shape[0]
        entry = tokens[:, None, :, None]
        return TargetOutput(params[row], (), (kv_cache.AttentionKV(entry, entry),))


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

    def prefill(self, params, memory, tokens, features, start, valid):
        return memory

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        return memory, shared

    def _draft(self, history, drafted, length=None, logits=None):
        """A chain of ``drafted`` [B, K], the first ``length`` [B] of them valid (None: all)."""
        valid = jnp.ones(drafted.shape, bool)
        if length is not None:
            valid = jnp.arange(drafted.shape[1]) < length[:, None]
        return Draft(
            tokens=jnp.concatenate([root_token(history)[:, None], jnp.where(valid, drafted, 0)], 1),
            parents=trees.chain(self.num_speculative_tokens),
            valid=jnp.pad(valid, ((0, 0), (1, 0)), constant_values=True),
            logits=logits,
            max_depth=self.num_speculative_tokens,
        )

    def _length(self, request, history):
        """0 to K, by a hash of row key and position: no drafted value has a say."""
        words = jax.random.key_data(request.keys)[:, -1]
        hashed = _scramble(words + history.length.astype(jnp.uint32))
        return (hashed % (self.num_speculative_tokens + 1)).astype(jnp.int32)


RIGHT, WRONG, RANDOM, RANDOM_LENGTH = range(4)


@struct.dataclass
class Script:
    """The text that plain decoding gives each row, and how a ``ScriptedDrafter`` uses it."""

    tokens: Array  # [B, T] int32
    kind: Array  # [B] int32


@dataclasses.dataclass(frozen=True)
class OnePassDrafter(_Chain):
    """A head that guesses all K tokens at once and knows the text of a ``script``, of any tree."""

    vocab_size: int
    tree: str | tuple = "chain"

    @property
    def draft_tree(self):
        size = 2 * self.max_depth + 1 if self.tree == "best_first" else None
        return tree_settings.requested(self.tree, self.num_speculative_tokens, size, None, None)

    @property
    def tree_size(self):
        return self.draft_tree.size

    def propose(self, params, request, shared, memory, history):
        place = history.length[:, None] + jnp.arange(self.max_depth)
        said = jnp.take_along_axis(params.drafter.tokens, place, 1, mode="clip")
        logits = 9.0 * jax.nn.one_hot(said, self.vocab_size)
        drawing = Drawing(request, history, "greedy", "own", self.vocab_size)
        return marginals.grow(drawing, self.draft_tree, logits), memory


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter(_Chain):
    """Drafts from ``params.drafter``, a ``Script``; wrong tokens are the next in the vocabulary.

    ``kind`` is RIGHT, WRONG, RANDOM (each token right with probability a half) or RANDOM_LENGTH
    (right, but 0 to K tokens long) for every row, or None for what the script says of each row.
    """

    vocab_size: int = 2
    kind: int | None = None

    def propose(self, params, request, shared, memory, history):
        kind = params.drafter.kind if self.kind is None else jnp.int32(self.kind)
        kind = jnp.broadcast_to(kind, history.length.shape)[:, None]
        positions = history.length[:, None] + jnp.arange(self.num_speculative_tokens)
        answer = jnp.take_along_axis(params.drafter.tokens, positions, 1, mode="clip")
        words = jax.random.key_data(request.keys)[:, -1:]
        uniform = _scramble(words + positions.astype(jnp.uint32)) % 2 == 0
        off = (kind == WRONG) | (kind == RANDOM) & uniform
        drafted = jnp.where(off, (answer + 1) % self.vocab_size, answer)
        length = jnp.where(
            kind[:, 0] == RANDOM_LENGTH, self._length(request, history), self.max_depth
        )
        return self._draft(history, drafted, length), memory


OracleDrafter = functools.partial(ScriptedDrafter, kind=RIGHT)
NeverRightDrafter = functools.partial(ScriptedDrafter, kind=WRONG)
RandomDrafter = functools.partial(ScriptedDrafter, kind=RANDOM)
RandomLengthDrafter = functools.partial(ScriptedDrafter, kind=RANDOM_LENGTH)


@dataclasses.dataclass(frozen=True)
class BushDrafter(_Chain):
    """A static tree: siblings hold neighbouring tokens, of which at most one is right.

    ``parents`` as in ``topology``; ``num_speculative_tokens`` is its depth. ``params.drafter`` is a
    ``Script``, whose ``kind`` is not used.
    """

    vocab_size: int = 2
    parents: tuple[int, ...] = (-1, 0)

    @property
    def tree_size(self):
        return len(self.parents)

    def propose(self, params, request, shared, memory, history):
        parents = np.array(self.parents, np.int32)
        depth = trees.from_parents(parents, self.max_depth).depth
        ranks = np.array([self.parents[:node].count(up) for node, up in enumerate(self.parents)])
        width = int(ranks.max()) + 1
        positions = history.length[:, None] - 1 + depth
        answer = jnp.take_along_axis(params.drafter.tokens, positions, 1, mode="clip")
        right = (_scramble(positions.astype(jnp.uint32)) % (width + 1)).astype(jnp.int32)
        drafted = (answer + ranks - right) % self.vocab_size
        drafted = drafted.at[:, 0].set(root_token(history))
        valid = jnp.ones_like(drafted, dtype=bool)
        return Draft(drafted, parents, valid, max_depth=self.max_depth), memory


@dataclasses.dataclass(frozen=True)
class TableDrafter(_Chain):
    """Draws a chain from the table ``params.drafter`` [V, V], warped as the target is.

    ``ragged`` cuts chains to 0..K tokens by a hash of the row's key and the position.
    """

    noise: str = "own"
    ragged: bool = False
    proposal = "chain"

    def propose(self, params, request, shared, memory, history):
        count = self.num_speculative_tokens
        uniforms = sampling.round_noise(request.keys, history.length - 1, sampling.DRAFT, count)
        target_draws = self.noise == "target" or request.sampling.greedy

        def draw_one(token, step):
            index, uniform = step
            distribution = sampling.process_logits(params.drafter[token], request.sampling)
            if target_draws:
                place = history.length + index
                token = sampling.draw_target(distribution, request.sampling, request.keys, place)
            else:
                token = sampling.draw(distribution, uniform)
            return token, (token, distribution)

        steps = (jnp.arange(count), jnp.moveaxis(uniforms, 1, 0))
        _, (drafted, distributions) = lax.scan(draw_one, root_token(history), steps)
        leaf = jnp.zeros_like(distributions[:1])
        recorded = (
            None if target_draws else jnp.moveaxis(jnp.concatenate([distributions, leaf]), 0, 1)
        )
        length = self._length(request, history) if self.ragged else None
        return self._draft(history, drafted.T, length, recorded), memory


@dataclasses.dataclass(frozen=True)
class TreeTableDrafter(_Chain):
    """Draws a static tree from the table that ``TableDrafter`` draws from, children in order.

    ``parents`` as in ``topology``; ``num_speculative_tokens`` is its depth. Siblings are drawn
    without replacement, or with it where ``proposal`` is "iid".
    """

    parents: tuple[int, ...] = (-1, 0)
    proposal: str = "without_replacement"

    @property
    def tree_size(self):
        return len(self.parents)

    def propose(self, params, request, shared, memory, history):
        place = history.length - 1
        drafted = [root_token(history)] + [None] * (self.tree_size - 1)
        distributions = []
        for node in range(self.tree_size):
            distribution = sampling.process_logits(params.drafter[drafted[node]], request.sampling)
            distributions.append(distribution)
            family = [child for child, up in enumerate(self.parents) if up == node]
            for child, token in zip(
                family, self._draw(request, place, node, distribution, len(family)), strict=True
            ):
                drafted[child] = token
        drafted = jnp.stack(drafted, 1)
        return Draft(
            tokens=drafted,
            parents=np.array(self.parents, np.int32),
            valid=jnp.ones_like(drafted, dtype=bool),
            logits=jnp.stack(distributions, 1),
            max_depth=self.max_depth,
        ), memory

    def _draw(self, request, place, node, distribution, count):
        if self.proposal == "iid":
            nodes = self.tree_size * node + jnp.arange(count)
            noise = sampling.node_noise(request.keys, place, nodes, distribution.shape[-1])
            return list(sampling.argmax(distribution[:, None] + noise).T)
        noise = sampling.node_noise(request.keys, place, jnp.array([node]), distribution.shape[-1])[
            :, 0
        ]
        return list(lax.top_k(distribution + noise, count)[1].T) if count else []


# ---------------------------------------------------------------------------------------- helpers


def settings(batch, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0) -> Sampling:
    """Sampling settings for ``batch`` rows; each argument is a number or one a row."""
    fill = lambda value, dtype: jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))
    used = {
        "temperature": np.any(np.asarray(temperature) > 0),
        "min_p": np.any(np.asarray(min_p) > 0),
        "top_k": np.any(np.asarray(top_k) > 0),
        "top_p": np.any(np.asarray(top_p) < 1),
    }
    return Sampling(
        fill(temperature, jnp.float32),
        fill(min_p, jnp.float32),
        fill(top_k, jnp.int32),
        fill(top_p, jnp.float32),
        names=tuple(name for name in sampling.FILTERS if used[name]),
    )


def run_rows(plan, params: Params, rows, rounds=None, filters=None) -> list[Answer]:
    """Decodes ``rows`` as one batch, in their order (a script needs to know its rows)."""
    batch = start(plan, params, rows, filters=filters)
    return read(advance(plan, params, batch, rounds))


def script(rows, answers, kind=RIGHT, length=64) -> Script:
    """The script for ``rows``: prompts and answers, in ``length`` slots; ``kind`` for all or each.

    Padded to a power of two rows, as ``start`` pads the batch.
    """
    size = 1
    while size < len(rows):
        size *= 2
    tokens = np.zeros((size, length), np.int32)
    for index, (row, answer) in enumerate(zip(rows, answers, strict=True)):
        text = [*row.prompt, *answer.tokens]
        tokens[index, : len(text)] = text
    kinds = np.zeros(size, np.int32)
    kinds[: len(rows)] = kind
    return Script(jnp.array(tokens), jnp.array(kinds))
