"""Targets and drafters whose distributions are known exactly.

Targets (``params.target`` is a table of logits):

* ``ToyTarget``: a token's distribution depends on the token before it. Equal rows: context-free.
* ``PrefixTarget``: the distribution depends on every token of the prefix, read from a real KV
  cache, so a single misplaced, missing or stale slot changes the text.

Deterministic drafters that know the text (``params.drafter`` is a ``Script``: the output of plain
decoding, prompt included):

* ``OracleDrafter``: always right.          * ``NeverRightDrafter``: always wrong.
* ``RandomDrafter``: right half the time.   * ``RandomLengthDrafter``: right, 0 to K tokens long.
* ``ScriptedDrafter``: any of the four, row by row.
* ``BushDrafter``: a tree with at most one right child per node, at a changing rank.
* ``OnePassDrafter``: a tree expanded from logits that peak at the text.

``TableDrafter`` draws a chain from its own table (``params.drafter``, float [V, V]: logits of a
token given the one before it) and records the distributions. ``TreeTableDrafter`` draws a tree.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec.core import kv_cache, sampling, trees
from jspec.core.entries import AttentionKV
from jspec.core.filters import FILTERS
from jspec.core.history import root_token
from jspec.core.types import Array, Draft, Drafter, Params, Sampling, Target, TargetOutput
from jspec.drafters.trees import marginals, tree_settings
from jspec.drafters.trees.drawing import Drawing
from jspec.engine.functional import Answer, advance, start
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile

# ---------------------------------------------------------------------------------------- targets


@dataclasses.dataclass(frozen=True)
class ToyTarget(Target):
    """The logits after a token are its row of ``params`` [V, V]; the cache has no layers."""

    vocab_size: int
    max_positions: int = 4096

    def init_cache(self, batch, capacity):
        return kv_cache.empty(batch, ())

    def forward(self, params, tokens, tree, cache, capture_layers=()):
        return TargetOutput(params[tokens], (), ())

    def embed(self, params, tokens):
        return jax.nn.one_hot(tokens, self.vocab_size)

    def unembed(self, params, hidden):
        return hidden


@dataclasses.dataclass(frozen=True)
class PrefixTarget(ToyTarget):
    """The logits after a node are the row of ``params`` [M, V] at the hash of its prefix.

    The single layer of the cache stores token ids. So the hash is right only if every committed
    token is in its slot, once.
    """

    def init_cache(self, batch, capacity):
        return kv_cache.empty(batch, [AttentionKV.empty(batch, 1, capacity, 1, jnp.int32)])

    def forward(self, params, tokens, tree, cache, capture_layers=()):
        tree = trees.broadcast(tree, tokens.shape[0])
        committed = cache.layers[0].k[:, 0, :, 0]
        slots = jnp.arange(committed.shape[1])
        readable = slots < cache.length[:, None]
        prefix = jnp.where(readable, _mark(committed, slots), 0).sum(1, dtype=jnp.uint32)
        nodes = _mark(tokens, cache.length[:, None] + tree.depth)
        above = trees.unpack_bits(tree.ancestors, tokens.shape[1])
        path = jnp.where(above, nodes[:, None, :], 0).sum(-1, dtype=jnp.uint32)
        row = _scramble(prefix[:, None] + path) % params.shape[0]
        entry = tokens[:, None, :, None]
        return TargetOutput(params[row], (), (AttentionKV(entry, entry),))


def _scramble(x: Array) -> Array:
    """Return a uint32 hash of which every bit depends on every bit of x."""
    x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
    x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
    return x ^ (x >> 16)


def _mark(tokens: Array, positions: Array) -> Array:
    """Return a hash of a token and its position."""
    word = tokens.astype(jnp.uint32) * jnp.uint32(65537) + positions.astype(jnp.uint32)
    return _scramble(word + jnp.uint32(0x9E3779B9))


def table(key: int, rows: int, vocab_size: int, scale: float = 1.5) -> Array:
    """Return random logits [rows, V] for a target or a ``TableDrafter``."""
    return scale * jax.random.normal(jax.random.key(key), (rows, vocab_size))


# --------------------------------------------------------------------------------------- drafters


@dataclasses.dataclass(frozen=True)
class _Chain(Drafter):
    """A drafter of chains of K tokens without a memory."""

    num_speculative_tokens: int
    proposal = "deterministic"

    @property
    def max_depth(self):
        return self.num_speculative_tokens

    @property
    def tree_size(self):
        return self.num_speculative_tokens + 1

    def _draft(self, history, drafted, length=None, logits=None):
        """Return a chain of ``drafted`` [B, K]; the first ``length`` [B] are valid (None: all)."""
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
        """Return 0 to K, by a hash of row key and position, so that no drafted token matters."""
        words = jax.random.key_data(request.keys)[:, -1]
        hashed = _scramble(words + history.length.astype(jnp.uint32))
        return (hashed % (self.num_speculative_tokens + 1)).astype(jnp.int32)


RIGHT, WRONG, RANDOM, RANDOM_LENGTH = range(4)


@struct.dataclass
class Script:
    """The text of plain decoding of each row, and how a ``ScriptedDrafter`` uses it."""

    tokens: Array  # [B, T] int32
    kind: Array  # [B] int32


@dataclasses.dataclass(frozen=True)
class OnePassDrafter(_Chain):
    """A head that predicts the K tokens of a ``Script`` in one pass, expanded to any tree."""

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
        positions = history.length[:, None] + jnp.arange(self.max_depth)
        tokens = jnp.take_along_axis(params.drafter.tokens, positions, 1, mode="clip")
        logits = 9.0 * jax.nn.one_hot(tokens, self.vocab_size)
        drawing = Drawing(request, history, "greedy", "own", self.vocab_size)
        return marginals.grow(drawing, self.draft_tree, logits), memory


@dataclasses.dataclass(frozen=True)
class ScriptedDrafter(_Chain):
    """A drafter from a ``Script``; a wrong token is the right one plus 1.

    ``kind`` is RIGHT, WRONG, RANDOM (each token right with probability a half) or RANDOM_LENGTH
    (right, but 0 to K tokens long) for every row; None takes the script's ``kind`` of each row.
    """

    vocab_size: int = 2
    kind: int | None = None

    def propose(self, params, request, shared, memory, history):
        kind = params.drafter.kind if self.kind is None else jnp.int32(self.kind)
        kind = jnp.broadcast_to(kind, history.length.shape)[:, None]
        positions = history.length[:, None] + jnp.arange(self.num_speculative_tokens)
        answer = jnp.take_along_axis(params.drafter.tokens, positions, 1, mode="clip")
        words = jax.random.key_data(request.keys)[:, -1:]
        heads = _scramble(words + positions.astype(jnp.uint32)) % 2 == 0
        wrong = (kind == WRONG) | (kind == RANDOM) & heads
        drafted = jnp.where(wrong, (answer + 1) % self.vocab_size, answer)
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
    """A drafter of a static tree: siblings are consecutive token ids, at most one of them right.

    ``parents`` as in ``trees``; ``num_speculative_tokens`` is the depth. ``params.drafter`` is a
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


def by_mass(log_weights, uniform):
    """Draw by inverse CDF: the token is a function of the uniform that acceptance would read."""
    running = jnp.cumsum(jax.nn.softmax(log_weights, -1), -1)
    return jnp.minimum((running <= uniform[:, :1]).sum(-1), log_weights.shape[-1] - 1)


@dataclasses.dataclass(frozen=True)
class TableDrafter(_Chain):
    """A drafter that samples a chain from ``params.drafter`` [V, V], processed like the target.

    ``ragged`` cuts chains to 0..K tokens by a hash of the row's key and the position. ``draw``
    draws a token with noise of its own.
    """

    noise: str = "own"
    ragged: bool = False
    draw: Callable = sampling.draw
    proposal = "chain"

    def propose(self, params, request, shared, memory, history):
        count = self.num_speculative_tokens
        uniforms = sampling.round_noise(request.keys, history.length - 1, sampling.DRAFT, count)
        target_draws = self.noise == "target" or request.sampling.greedy

        def draw_one(token, step):
            index, uniform = step
            distribution = sampling.process_logits(params.drafter[token], request.sampling)
            if target_draws:
                position = history.length + index
                token = sampling.draw_target(distribution, request.sampling, request.keys, position)
            else:
                token = self.draw(distribution, uniform)
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
    """A drafter that samples a static tree from the table of ``TableDrafter``, children in order.

    ``parents`` as in ``trees``; ``num_speculative_tokens`` is the depth. Siblings are drawn without
    replacement.
    """

    parents: tuple[int, ...] = (-1, 0)
    proposal: str = "without_replacement"

    @property
    def tree_size(self):
        return len(self.parents)

    def propose(self, params, request, shared, memory, history):
        root_position = history.length - 1
        drafted = [root_token(history)] + [None] * (self.tree_size - 1)
        distributions = []
        for node in range(self.tree_size):
            distribution = sampling.process_logits(params.drafter[drafted[node]], request.sampling)
            distributions.append(distribution)
            family = [child for child, up in enumerate(self.parents) if up == node]
            for child, token in zip(
                family,
                self._draw(request, root_position, node, distribution, len(family)),
                strict=True,
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

    def _draw(self, request, root_position, node, distribution, count):
        vocab = distribution.shape[-1]
        noise = sampling.node_noise(request.keys, root_position, jnp.array([node]), vocab)[:, 0]
        return list(lax.top_k(distribution + noise, count)[1].T) if count else []


# ---------------------------------------------------------------------------------------- helpers


def settings(batch, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0) -> Sampling:
    """Return sampling settings of ``batch`` rows; each argument is a number, or one per row."""
    fill = lambda value, dtype: jnp.broadcast_to(jnp.asarray(value, dtype), (batch,))
    used = {
        "temperature": np.any(np.asarray(temperature) > 0),
        "min_p": np.any(np.asarray(min_p) > 0),
        "top_k": np.any(np.asarray(top_k) > 0),
        "top_p": np.any(np.asarray(top_p) < 1),
    }
    values = {"temperature": temperature, "min_p": min_p, "top_k": top_k, "top_p": top_p}
    return Sampling(
        {name: fill(value, FILTERS[name].dtype) for name, value in values.items()},
        names=tuple(name for name in FILTERS if used[name]),
    )


def whole(target, drafter, rule="rejection", **settings) -> Plan:
    """Return a plan that always verifies entire drafts, so that it has one pass to compile."""
    return Plan(target, drafter, rule, node_buckets=(drafter.tree_size,), **settings)


def run_rows(plan, params: Params, rows, rounds=None) -> list[Answer]:
    """Decode ``rows`` as one batch in their order, which a script relies on."""
    batch = start(plan, params, rows, profile=Profile(nodes=True))
    return list(advance(plan, params, batch, rounds).answers)


def script(rows, answers, kind=RIGHT, length=64) -> Script:
    """Return the script of ``rows``: prompts and answers in ``length`` slots; ``kind`` per row.

    The rows are padded to a power of two, like the batch of ``start``.
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
