"""What the kernels of the devices share: laws as scalars of a row, and weights computed from them.

A law over V tokens is never stored. A few scalars of a row, ``Distribution``, give the target's probability
of any token from its raw logit, and ``Refusal`` steps turn it into what is left of the law after
drafted tokens were refused. Kernels evaluate ``weights`` over blocks of a row and keep only sums.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax

Array = jax.Array

ORDINAL_BITS = 32
SIGN_AND_EXPONENT_BITS = 9  # of a float32
INFINITY_BITS = 0x7F800000


class Filters(NamedTuple):
    """How each row warps its logits, [R] each; ``names`` lists the warps that exist."""

    temperature: Array  # float32, 0 is greedy
    min_p: Array  # float32, 0 is off
    top_k: Array  # int32, 0 is off
    top_p: Array  # float32, 1 is off
    names: tuple[str, ...]


class Proposal(NamedTuple):
    """A drafted tree: the fields of ``jspec.core.types.Draft`` that are judged, over target ids."""

    tokens: Array  # int32 [B, N]
    parents: Array  # int32 [B, N], the root is its own parent
    valid: Array  # bool [B, N]
    sampled: Array  # bool [B, N]: drawn from the parent's row of ``logits``
    logits: Array | None  # [B, N, V]; None: nothing was drawn


class Form(NamedTuple):
    """What is known of a draft and its rule when tracing."""

    rule: str  # "rejection", "block" on a chain, or "traversal": block on a tree
    max_depth: int
    max_children: int  # of a node
    replaced: bool = False  # siblings were drawn with replacement
    mixed: bool = False  # a node may have drawn children and point masses


class Distribution(NamedTuple):
    """The target's warped law at R rows, [R] each."""

    temperature: Array  # float32; 1 in a greedy row
    floor: Array  # float32: raw logits below it have no weight
    peak: Array  # float32: the greatest raw logit, from which all are counted: see ``weights``
    log_total: Array  # float32: log of the sum of exp over the warped logits of those that have
    only: Array  # int32: the one token of a greedy row, -1 in others


class Refusal(NamedTuple):
    """A step at R rows, [R] each: weights U become ``max(scale U - share q, 0)`` off ``dropped``.

    So is q, from the next step on. Scale 1, share 0 and no token dropped leave both as they were.
    """

    scale: Array  # float32
    share: Array  # float32, of the draft's law q
    dropped: Array  # int32 token, -1 for none; ``from_q_alone`` of one that stays in U


def from_q_alone(token: Array) -> Array:
    """What ``Refusal.dropped`` is for a token that only q loses; and what it was made of."""
    return -2 - token


class DraftDistribution(NamedTuple):
    """The law that drafted tokens were drawn from, at R rows."""

    peak: Array  # [R] float32: the greatest of the row, from which all are counted
    log_total: Array  # [R] float32: log of the sum of exp over the row
    absent: tuple[Array, ...] = ()  # int32 [R] each: tokens it was deprived of, -1 for none


def weights(
    x: Array,
    y: Array | None,
    token: Array,
    distribution: Distribution,
    draft_probs: DraftDistribution | None,
    steps: Sequence[Refusal] = (),
) -> tuple[Array, Array, Array]:
    """What the steps leave of the target's probabilities, without and with the last one; and q.

    Arguments broadcast against each other.

    Args:
      x: raw logits of the target.
      y: log-weights of the draft's law, or None without one.
      token: int32 ids of the entries of ``x``.
      law: of their rows.
      draft_law: of their rows, None without one.
      steps: in order.

    Returns:
      float32 each. The last is q without its absent tokens and without those dropped, not
      renormalised; zeros if there is no draft.
    """
    x = x.astype(jnp.float32)
    # Never where x is NaN. Raw logits are compared: a quotient may be rounded in several ways. And
    # they are counted from the peak before anything else: a great quotient has no digits left for
    # the total, nor twice the same last digit.
    processed = (x - distribution.peak) / distribution.temperature
    spread = jnp.where(x >= distribution.floor, jnp.exp(processed - distribution.log_total), 0.0)
    point = jnp.where(token == distribution.only, 1.0, 0.0)
    left = before = jnp.where(jnp.broadcast_to(distribution.only, token.shape) < 0, spread, point)
    q = jnp.zeros_like(left)
    if y is not None:
        q = jnp.exp(y.astype(jnp.float32) - draft_probs.peak - draft_probs.log_total)
        for absent in draft_probs.absent:
            q = jnp.where(token == absent, 0.0, q)
    for scale, share, dropped in steps:
        before, left = left, left * scale
        if y is not None:
            left = jnp.maximum(left - share * q, 0.0)
            out = jnp.where(dropped < -1, from_q_alone(dropped), dropped)
            q = jnp.where(token == out, 0.0, q)
        left = jnp.where(token == dropped, 0.0, left)
    return before, left, q


class Masses(NamedTuple):
    """Sums of ``weights`` at M rows over S segments of the vocabulary, [M, S] each."""

    before: Array  # the target's, without the last step
    after: Array  # with it
    draft: Array  # q off the tokens that are absent or dropped


def pack(
    distribution: Distribution, draft_probs: DraftDistribution | None, steps: Sequence[Refusal]
) -> tuple[list[Array], list[Array]]:
    """What ``weights`` is told of rows, as float32 and as int32 columns."""
    floats, ints = (
        [distribution.temperature, distribution.floor, distribution.peak, distribution.log_total],
        [distribution.only],
    )
    if draft_probs is not None:
        floats += [draft_probs.peak, draft_probs.log_total]
        ints += draft_probs.absent
    floats += [x for step in steps for x in (step.scale, step.share)]
    return floats, ints + [step.dropped for step in steps]


def unpack(
    floats: Sequence[Array], ints: Sequence[Array], drafted: bool, absent: int
) -> tuple[Distribution, DraftDistribution | None, list[Refusal]]:
    """What ``pack`` was given."""
    draft_probs = DraftDistribution(*floats[4:6], tuple(ints[1 : 1 + absent])) if drafted else None
    of_steps = floats[6 if drafted else 4 :]
    steps = map(Refusal, of_steps[::2], of_steps[1::2], ints[1 + absent :])
    return Distribution(*floats[:4], ints[0]), draft_probs, list(steps)


class Row(Protocol):
    """Rows of logits as a kernel reads them: block by block, folded to scalars."""

    vocab: int
    mantissa_bits: int  # explicit, of the dtype that the logits are stored in
    pass_bits: int  # of a threshold, decided in one pass over the rows

    def sums(self, term: Callable) -> list[Array]:
        """Sums over the vocabulary, of each value that ``term`` makes of float32 logits."""

    def greatest(self, term: Callable) -> Array:
        """The greatest of what ``term`` makes of float32 logits."""

    def least(self, term: Callable) -> Array:
        """The least of what ``term`` makes of float32 logits and int32 token ids."""

    def as_float(self, bits: Array) -> Array:
        """The float32 of an int32 scalar's bits."""


def measure(row: Row, filters: Filters | None) -> tuple[Array, Array, Array, Array]:
    """(floor, peak, log_total, first token of the greatest logit) of rows; ``filters`` None for none.

    Warps apply in the order of ``jspec.core.sampling``: temperature, min_p, top-k, top-p; what ties with
    the last token kept is kept. Thresholds are searched, not sorted for.
    """
    names = () if filters is None else filters.names
    finite = lambda x: jnp.where(x == x, x, -jnp.inf)
    peak = row.greatest(finite)
    first = row.least(lambda x, token: jnp.where(finite(x) == peak, token, row.vocab - 1))
    # Of a shape, not like another array: where batches are cut, JAX >= 0.11 does not lower those.
    temperature = jnp.full(peak.shape, 1.0, jnp.float32)
    if filters is not None:
        temperature = jnp.where(filters.temperature > 0, filters.temperature, 1.0)
    peak = jnp.where(peak > -jnp.inf, peak, 0.0)
    floor = jnp.full(peak.shape, -jnp.inf, jnp.float32)
    if "min_p" in names:
        limit = peak / temperature + jnp.log(filters.min_p)
        floor = row.least(lambda x, _: jnp.where(x / temperature >= limit, x, jnp.inf))
    if "top_k" in names:
        count = lambda limits: row.sums(
            lambda x: [jnp.where(x >= limit, 1.0, 0.0) for limit in limits]
        )
        wanted = jnp.where(filters.top_k > 0, filters.top_k, row.vocab)
        wanted = jnp.clip(wanted, 1, row.vocab).astype(jnp.float32)
        floor = jnp.maximum(floor, search(row, count, wanted))
    kept = lambda x, limit: jnp.where(x >= limit, jnp.exp((x - peak) / temperature), 0.0)
    (total,) = row.sums(lambda x: [kept(x, floor)])
    if "top_p" in names:
        mass = lambda limits: row.sums(
            lambda x: [kept(x, jnp.maximum(floor, limit)) for limit in limits]
        )
        last = search(row, mass, filters.top_p * total)
        floor = jnp.where(filters.top_p < 1, jnp.maximum(floor, last), floor)
        (total,) = row.sums(lambda x: [kept(x, floor)])
    log_total = jnp.log(jnp.where(total > 0, total, 1.0))
    return floor, peak, log_total, first


def distribution_of(
    filters: Filters | None, floor: Array, peak: Array, log_total: Array, first: Array
) -> Distribution:
    """The law of rows that were measured."""
    if filters is None:
        return Distribution(jnp.ones_like(floor), floor, peak, log_total, jnp.full_like(first, -1))
    greedy = filters.temperature <= 0
    temperature = jnp.where(greedy, 1.0, filters.temperature)
    return Distribution(temperature, floor, peak, log_total, jnp.where(greedy, first, -1))


def search(row: Row, masses_from: Callable, goal: Array) -> Array:
    """The greatest float32 v for which the mass of all entries >= v reaches ``goal``.

    It is a value of the row: the k-th largest where mass counts and the goal is k, the last token
    that top-p keeps where mass is probability. Floats are in the order of integers made of their
    bits, which are decided from the highest down.

    Args:
      row: whose dtype says how many bits there are to decide.
      masses_from: thresholds, a list of arrays shaped as ``goal``, to the list of their masses.
      goal: positive.

    Returns:
      v, or -inf where not even the whole row reaches the goal.
    """
    values_of_digit = range(1, 2**row.pass_bits)

    def decide(index: Array, ordinal: Array) -> Array:
        unit = jnp.left_shift(jnp.int32(1), ORDINAL_BITS - row.pass_bits * (index + 1))
        limits = [_value(row, ordinal + digit * unit) for digit in values_of_digit]
        for mass in masses_from(limits):  # they fall: as many reach the goal as the digit says
            ordinal = jnp.where(mass >= goal, ordinal + unit, ordinal)
        return ordinal

    passes = -(-(SIGN_AND_EXPONENT_BITS + row.mantissa_bits) // row.pass_bits)
    return _value(row, lax.fori_loop(0, passes, decide, jnp.zeros(goal.shape, jnp.int32)))


def _value(row: Row, ordinal: Array) -> Array:
    """The float32 at a place of their ascending order, whose bits count as unsigned; never NaN."""
    signed = jnp.clip(ordinal ^ jnp.int32(-(2**31)), ~INFINITY_BITS, INFINITY_BITS)
    return row.as_float(signed ^ ((signed >> 31) & jnp.int32(2**31 - 1)))


def wrong_dtype(*arrays: Array | None) -> str | None:
    """Which of these logits no kernel takes, or None."""
    for x in arrays:
        if x is not None and x.dtype not in (jnp.bfloat16, jnp.float16, jnp.float32):
            return f"takes bfloat16, float16 or float32 logits, not {x.dtype}"
    return None


def first_above(values: Array, point: Array) -> tuple[Array, Array]:
    """First index of a positive value whose running sum exceeds ``point`` [M], and the sum before.

    The last index of a positive value of [M, W] where rounding leaves none.
    """
    index = jnp.arange(values.shape[-1], dtype=jnp.int32)
    above = (jnp.cumsum(values, -1) > point[:, None]) & (values > 0)
    last = jnp.where(values > 0, index, 0).max(-1)
    chosen = jnp.minimum(jnp.where(above, index, values.shape[-1]).min(-1), last)
    return chosen, jnp.where(index < chosen[:, None], values, 0.0).sum(-1)
