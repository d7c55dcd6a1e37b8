"""The draft length that is expected to emit the most tokens a second.

Goodput is tokens a second (TurboSpec, arXiv 2406.14066). A round of length K is expected to emit
1 + a + ... + a^K tokens a row, with the row's running acceptance rate a, and takes the measured
time of rounds of that length. The length of the best ratio is chosen for the whole batch. Length 0
drafts nothing; it is chosen only if it is better by a margin, and of nearly equal lengths the last
one is kept. A paused row is retried with the shortest draft after a few rounds, and after twice as
many whenever a retry fails. All of this is known before the round, so every rule stays exact.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.core.types import Array, Draft, Verdict

_PRIOR = 0.6  # acceptance rate before any draft, with the weight of one tried token
_EVIDENCE = 24.0  # most tried tokens that the past counts for
_DOUBT = 0.5  # standard errors above the observed rate at which drafting must not pay, to be paused
_LOYALTY = 0.05  # margin by which another length must be better, as acceptance fluctuates
_FADING = 0.95  # weight of the past after a round without a draft, as a text changes
_FAINT = 0.1  # tried tokens below which the past fades no further
_SOONEST, _LATEST = 4, 128  # bounds of the rounds without a draft before a retry
_FOREVER = np.int32(2**31 - 1)


@struct.dataclass
class Experience:
    """The success of each row's drafts."""

    accepted: Array  # [B] float32, fading sum of accepted tokens
    tried: Array  # [B] float32, fading sum of accepted and rejected tokens
    idle: Array  # [B] int32, rounds since the last draft
    patience: Array  # [B] int32, rounds without a draft before the next retry


def init(batch: int) -> Experience:
    """Return the prior."""
    return Experience(
        jnp.full(batch, _PRIOR, jnp.float32),
        jnp.ones(batch, jnp.float32),
        jnp.zeros(batch, jnp.int32),
        jnp.full(batch, _SOONEST, jnp.int32),
    )


def learn(known: Experience, draft: Draft, verdict: Verdict) -> Experience:
    """Return the experience after a round.

    If the retry of a paused row is rejected entirely, the row's patience doubles. If it is accepted
    entirely, its patience is reset.
    """
    accepted = jnp.maximum(verdict.num_emitted - 1, 0)
    length = draft.valid[:, 1:].sum(1)
    drafted = (verdict.num_emitted > 0) & (length > 0)
    tried = known.tried + accepted + (accepted < length)
    weight = jnp.minimum(1, _EVIDENCE / tried)
    patience = jnp.where(accepted == 0, jnp.minimum(2 * known.patience, _LATEST), known.patience)
    patience = jnp.where(accepted == length, _SOONEST, patience)
    idle = rest(known, 1)
    return Experience(
        accepted=jnp.where(drafted, weight * (known.accepted + accepted), idle.accepted),
        tried=jnp.where(drafted, weight * tried, idle.tried),
        idle=jnp.where(drafted, 0, idle.idle),
        patience=jnp.where(drafted & (known.idle > 0), patience, known.patience),
    )


def rest(known: Experience, rounds: Array | int) -> Experience:
    """Return the experience after ``rounds`` ([] int32) without a draft of any row."""
    # The rate is unchanged.
    keep = jnp.where(known.tried > _FAINT, jnp.float32(_FADING) ** rounds, 1)
    return known.replace(
        accepted=keep * known.accepted, tried=keep * known.tried, idle=known.idle + rounds
    )


def best(
    lengths: tuple[int, ...], seconds: Array, known: Experience, running: Array, last: Array
) -> Array:
    """Return the index [] int32 of the length with the most expected tokens a second.

    Args:
      lengths: ascending; R of them.
      seconds: [R], of a round of each; the longest is chosen until all are measured (> 0).
      known: of B rows.
      running: bool [B], rows that have not ended.
      last: int32 [], index of the last round's length.
    """
    longest = jnp.int32(len(lengths) - 1)
    measured = (seconds > 0).all()
    seconds = jnp.where(measured, seconds, 1)
    expected, lasting, hoped = _emitted(lengths, _rates(known), running) / seconds
    expected *= jnp.where(jnp.arange(len(lengths)) == last, 1 + _LOYALTY, 1)
    chosen = jnp.argmax(expected)
    if not lengths[0]:
        drafts, tries = lasting[1:].max() > lasting[0], hoped[1:].max() > hoped[0]
        chosen = jnp.where(drafts, 1 + jnp.argmax(expected[1:]), jnp.where(tries, 1, 0))
    return jnp.where(measured, chosen, longest).astype(jnp.int32)


def pause(known: Experience, running: Array) -> Array:
    """Return the number of rounds [] int32, 1 or more, before ``best`` may choose to draft again.

    Without drafts the rates do not change, so only the end of a row's patience changes the choice.
    """
    left = known.patience - known.idle
    left = jnp.where(running & (left > 0), left, _FOREVER).min()
    # A prompt may end like a finished text, so no row may seem to run; then check every round.
    return jnp.where(running.any(), left, 1)


def _emitted(lengths: tuple[int, ...], rates: Array, running: Array) -> Array:
    """Return the expected tokens of a round of each length, summed over rows: [A, R].

    ``rates`` [A, B] are acceptance rates under A assumptions.
    """
    powers = rates[..., None] ** np.arange(lengths[-1] + 1)  # 1, a, ..., a^K
    emitted = jnp.cumsum(powers, -1)[..., np.array(lengths)]
    return jnp.where(running[:, None], emitted, 0).sum(1)


def _rates(known: Experience) -> Array:
    """Return three acceptance rates per row: [3, B].

    They are the observed mean, an optimistic bound that keeps a row drafting, and the rate that
    retries a paused row: the prior, if higher, once its patience ends. A row is paused late because
    it learns nothing more then.
    """
    rate = known.accepted / known.tried
    doubt = _DOUBT * jnp.sqrt(rate * (1 - rate) / known.tried)
    lasting = jnp.where(known.idle > 0, rate, jnp.minimum(rate + doubt, 1))
    ended = known.idle >= known.patience
    return jnp.stack([rate, lasting, jnp.where(ended, jnp.maximum(lasting, _PRIOR), lasting)])
