"""Distributions as scalars of a row, and weights computed from them: shared by all devices.

A distribution over V tokens is never stored. ``TargetDistribution`` gives the probability of any
token from its raw logit. ``Refusal`` steps turn it into the residual after drafted tokens were
refused. Kernels evaluate ``weights`` over blocks of a row and keep only sums.
"""

import abc
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

ORDINAL_BITS = 32
SIGN_AND_EXPONENT_BITS = 9  # bits of a float32
INFINITY_BITS = 0x7F800000


class Filters(NamedTuple):
    """Sampling filters of each row, [R] each; ``names`` lists those in use."""

    temperature: Array  # float32, 0 is greedy
    min_p: Array  # float32, 0 is off
    top_k: Array  # int32, 0 is off
    top_p: Array  # float32, 1 is off
    names: tuple[str, ...]


class Proposal(NamedTuple):
    """A drafted tree: the judged fields of ``jspec.core.types.Draft``, over target ids."""

    tokens: Array  # int32 [B, N]
    parents: Array  # int32 [B, N], the root is its own parent
    valid: Array  # bool [B, N]
    sampled: Array  # bool [B, N]: drawn from the parent's row of ``logits``
    logits: Array | None  # [B, N, V]; None: nothing was drawn


class Form(NamedTuple):
    """Static properties of a draft and its rule."""

    rule: str  # "rejection" or "block"
    max_depth: int
    max_children: int  # most children of a node, at least 1
    mixed: bool = False  # a node may have drawn and deterministic children


class TargetDistribution(NamedTuple):
    """The target's processed distribution at R rows, [R] each."""

    temperature: Array  # float32; 1 in a greedy row
    floor: Array  # float32: smaller raw logits have no weight
    peak: Array  # float32: the largest raw logit, subtracted from all: see ``weights``
    log_total: Array  # float32: log of the sum of exp over the processed logits above the floor
    only: Array  # int32: the one token of a greedy row, -1 in others


class DraftDistribution(NamedTuple):
    """The distribution that drafted tokens were drawn from, at R rows."""

    peak: Array  # [R] float32: the largest log-weight of the row, subtracted from all
    log_total: Array  # [R] float32: log of the sum of exp over the row
    absent: tuple[Array, ...] = ()  # int32 [R] each: removed tokens, -1 for none


class Refusal(NamedTuple):
    """A step at R rows, [R] each: p becomes ``max(scale p - share q, 0)`` without ``dropped``.

    q loses the dropped token from the next step on. With scale 1, share 0 and none
    dropped, both stay unchanged.
    """

    scale: Array  # float32
    share: Array  # float32, factor on the draft's q
    dropped: Array  # int32 token, -1 for none; ``from_q_alone`` of a token that stays in p


def from_q_alone(token: Array) -> Array:
    """Encode a token that only q loses as ``Refusal.dropped``, or decode it: an involution."""
    return -2 - token


def weights(
    x: Array,
    y: Array | None,
    token: Array,
    target: TargetDistribution,
    draft: DraftDistribution | None,
    refusals: Sequence[Refusal] = (),
) -> tuple[Array, Array, Array]:
    """Return the residual of p before the last refusal, the residual after it, and q; float32.

    Arguments broadcast against each other. ``x`` are raw logits of the target, ``y`` log-weights of
    the draft (None without one) and ``token`` their int32 ids. q lacks absent and dropped tokens
    and is not renormalised; it is 0 without a draft.
    """
    x = x.astype(jnp.float32)
    # The floor compares raw logits, because a quotient may be rounded in several ways; it excludes
    # NaN. The peak is subtracted before the division: a large quotient has no digits left for the
    # total, and its last digit may vary.
    processed = (x - target.peak) / target.temperature
    p = jnp.where(x >= target.floor, jnp.exp(processed - target.log_total), 0.0)
    one_hot = jnp.where(token == target.only, 1.0, 0.0)
    after = before = jnp.where(jnp.broadcast_to(target.only, token.shape) < 0, p, one_hot)
    q = jnp.zeros_like(after)
    if y is not None:
        q = jnp.exp(y.astype(jnp.float32) - draft.peak - draft.log_total)
        for absent in draft.absent:
            q = jnp.where(token == absent, 0.0, q)
    for scale, share, dropped in refusals:
        before, after = after, after * scale
        if y is not None:
            after = jnp.maximum(after - share * q, 0.0)
            from_q = jnp.where(dropped < -1, from_q_alone(dropped), dropped)
            q = jnp.where(token == from_q, 0.0, q)
        after = jnp.where(token == dropped, 0.0, after)
    return before, after, q


class Masses(NamedTuple):
    """Sums of ``weights`` at M rows over S segments of the vocabulary, [M, S] each."""

    before: Array  # p before the last refusal
    after: Array  # p after it
    draft: Array  # q without absent and dropped tokens


def pack(
    target: TargetDistribution, draft: DraftDistribution | None, refusals: Sequence[Refusal]
) -> tuple[list[Array], list[Array]]:
    """Return the scalars that ``weights`` needs, as float32 and int32 columns."""
    floats = [target.temperature, target.floor, target.peak, target.log_total]
    ints = [target.only]
    if draft is not None:
        floats += [draft.peak, draft.log_total]
        ints += draft.absent
    floats += [x for refusal in refusals for x in (refusal.scale, refusal.share)]
    return floats, ints + [refusal.dropped for refusal in refusals]


def unpack(
    floats: Sequence[Array], ints: Sequence[Array], drafted: bool, absent: int
) -> tuple[TargetDistribution, DraftDistribution | None, list[Refusal]]:
    """Return the arguments of ``pack``."""
    draft = DraftDistribution(*floats[4:6], tuple(ints[1 : 1 + absent])) if drafted else None
    rest = floats[6 if drafted else 4 :]
    refusals = map(Refusal, rest[::2], rest[1::2], ints[1 + absent :])
    return TargetDistribution(*floats[:4], ints[0]), draft, list(refusals)


class Blocks(NamedTuple):
    """Sizes of the work."""

    chunk: int  # tokens of a row at a time
    segment: int  # tokens per mass
    pass_bits: int  # bits of a threshold that one pass over the rows decides


class Row(abc.ABC):
    """Rows of logits as a kernel reads them: block by block, reduced to scalars."""

    def __init__(self, ref, blocks: Blocks):
        self.ref, self.vocab = ref, ref.shape[1]
        self.chunk, self.pass_bits = blocks.chunk, blocks.pass_bits
        self.mantissa_bits = jnp.finfo(ref.dtype).nmant  # explicit, of the stored logits

    @abc.abstractmethod
    def fold(self, term: Callable, join: Callable, reduce: Callable) -> list[Array]:
        """Fold the values that ``term`` computes from float32 logits and int32 token ids.

        ``join`` combines blocks, ``reduce`` the entries of a block.
        """

    @abc.abstractmethod
    def as_float(self, bits: Array) -> Array:
        """Return the float32 with the bits of an int32 scalar."""

    def sums(self, term: Callable) -> list[Array]:
        """Sum each of the values that ``term`` computes from logits."""
        return self.fold(lambda x, _: term(x), jnp.add, jnp.sum)

    def least(self, term: Callable) -> Array:
        """Return the minimum of ``term`` over logits and token ids."""
        return self.fold(lambda x, token: [term(x, token)], jnp.minimum, jnp.min)[0]


def measure(row: Row, filters: Filters | None) -> tuple[Array, Array, Array, Array]:
    """Return (floor, peak, log_total, first token of the largest logit) of rows.

    Filters apply in the order of ``jspec.core.sampling``: temperature, min_p, top-k, top-p; tokens
    that tie with the last selected one are selected. Thresholds are searched for without sorting.
    ``filters`` is None for a draft's rows.
    """
    names = () if filters is None else filters.names
    finite = lambda x: jnp.where(x == x, x, -jnp.inf)
    (peak,) = row.fold(lambda x, _: [finite(x)], jnp.maximum, jnp.max)
    first = row.least(lambda x, token: jnp.where(finite(x) == peak, token, row.vocab - 1))
    # A shape, not ones_like: JAX >= 0.11 cannot lower the latter where batches are sharded.
    temperature = jnp.full(peak.shape, 1.0, jnp.float32)
    if filters is not None:
        temperature = jnp.where(filters.temperature > 0, filters.temperature, 1.0)
    peak = jnp.where(peak > -jnp.inf, peak, 0.0)
    floor = jnp.full(peak.shape, -jnp.inf, jnp.float32)
    if "min_p" in names:
        limit = peak / temperature + jnp.log(filters.min_p)
        floor = row.least(lambda x, _: jnp.where(x / temperature >= limit, x, jnp.inf))
    if "top_k" in names:

        def counts(limits):
            return row.sums(lambda x: [jnp.where(x >= limit, 1.0, 0.0) for limit in limits])

        top_k = jnp.where(filters.top_k > 0, filters.top_k, row.vocab)
        top_k = jnp.clip(top_k, 1, row.vocab).astype(jnp.float32)
        floor = jnp.maximum(floor, search(row, counts, top_k))
    weight = lambda x, limit: jnp.where(x >= limit, jnp.exp((x - peak) / temperature), 0.0)
    (total,) = row.sums(lambda x: [weight(x, floor)])
    if "top_p" in names:
        least = floor

        def masses(limits):
            return row.sums(lambda x: [weight(x, jnp.maximum(least, limit)) for limit in limits])

        threshold = search(row, masses, filters.top_p * total)
        floor = jnp.where(filters.top_p < 1, jnp.maximum(floor, threshold), floor)
        (total,) = row.sums(lambda x: [weight(x, floor)])
    log_total = jnp.log(jnp.where(total > 0, total, 1.0))
    return floor, peak, log_total, first


def target_distribution(
    filters: Filters | None, floor: Array, peak: Array, log_total: Array, first: Array
) -> TargetDistribution:
    """Return the distribution of rows from the results of ``measure``."""
    if filters is None:
        ones, none = jnp.ones_like(floor), jnp.full_like(first, -1)
        return TargetDistribution(ones, floor, peak, log_total, none)
    greedy = filters.temperature <= 0
    temperature = jnp.where(greedy, 1.0, filters.temperature)
    return TargetDistribution(temperature, floor, peak, log_total, jnp.where(greedy, first, -1))


def search(row: Row, masses_from: Callable, goal: Array) -> Array:
    """Return the largest float32 v for which the mass of all entries >= v reaches ``goal``.

    v is a value of the row: the k-th largest if masses are counts and the goal is k, the last token
    of top-p if masses are probabilities; -inf if the entire row does not reach the goal. Floats are
    ordered like integers made of their bits, and the search decides these from the highest to the
    lowest. ``masses_from`` maps thresholds, a list of arrays shaped as ``goal``, to their masses.
    """
    digits = range(1, 2**row.pass_bits)

    def decide(index: Array, ordinal: Array) -> Array:
        unit = jnp.left_shift(jnp.int32(1), ORDINAL_BITS - row.pass_bits * (index + 1))
        limits = [_value(row, ordinal + digit * unit) for digit in digits]
        for mass in masses_from(limits):  # decreasing: their number at the goal is the digit
            ordinal = jnp.where(mass >= goal, ordinal + unit, ordinal)
        return ordinal

    passes = -(-(SIGN_AND_EXPONENT_BITS + row.mantissa_bits) // row.pass_bits)
    return _value(row, lax.fori_loop(0, passes, decide, jnp.zeros(goal.shape, jnp.int32)))


def _value(row: Row, ordinal: Array) -> Array:
    """The float32 with an (unsigned) ordinal in ascending order; never NaN."""
    signed = jnp.clip(ordinal ^ jnp.int32(-(2**31)), ~INFINITY_BITS, INFINITY_BITS)
    return row.as_float(signed ^ ((signed >> 31) & jnp.int32(2**31 - 1)))


def wrong_dtype(*arrays: Array | None) -> str | None:
    """Return the reason why no kernel takes these logits, or None."""
    for x in arrays:
        if x is not None and x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"takes bfloat16, float16 or float32 logits, not {x.dtype}"
    return None
