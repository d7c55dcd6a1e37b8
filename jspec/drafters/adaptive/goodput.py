"""The length of draft that is expected to emit most tokens a second.

Goodput is tokens a second (TurboSpec, arXiv 2406.14066): a round of length K is expected to emit
1 + a + ... + a^K tokens a row, a being the row's running acceptance, and takes what rounds of that
length were measured to take. The length of the best ratio is chosen for the whole batch, 0 among
them: then nothing is drafted. That is only chosen once it is the better one by a margin, and of
lengths that look about as good the last round's is kept. A row that drafts no more is tried again,
with the shortest draft, after a few rounds and after twice as many each time that this was in vain.
What decides was known before the round, so every rule stays exact.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.core.types import Array, Draft, Verdict

_PRIOR = 0.6  # a before anything is known, as if one token had been tried
_EVIDENCE = 24.0  # drafted tokens that all experience is worth at most
_DOUBT = 0.5  # standard errors above what was seen that drafting must not pay at, to be given up
_LOYALTY = 0.05  # by how much another length must look better: acceptance goes up and down
_FADING = 0.95  # what it is worth after a round without a draft: a text changes
_FAINT = 0.1  # tried tokens that fade no more
_SOONEST, _LATEST = 4, 128  # rounds without a draft before one is tried again
_FOREVER = np.int32(2**31 - 1)


@struct.dataclass
class Experience:
    """How the drafts of each row fared."""

    accepted: Array  # [B] float32, fading sum of accepted tokens
    tried: Array  # [B] float32, of those accepted and those refused
    idle: Array  # [B] int32, rounds since the last draft
    patience: Array  # [B] int32, of them before the next is tried


def init(batch: int) -> Experience:
    """Nothing known."""
    return Experience(
        jnp.full(batch, _PRIOR, jnp.float32),
        jnp.ones(batch, jnp.float32),
        jnp.zeros(batch, jnp.int32),
        jnp.full(batch, _SOONEST, jnp.int32),
    )


def learn(known: Experience, draft: Draft, verdict: Verdict) -> Experience:
    """What is known after a round.

    A row whose draft after a pause was refused waits twice as long for the next; one whose draft
    was accepted whole waits no longer than ever.
    """
    accepted = jnp.maximum(verdict.num_emitted - 1, 0)
    length = draft.valid[:, 1:].sum(1)
    drafted = (verdict.num_emitted > 0) & (length > 0)
    tried = known.tried + accepted + (accepted < length)
    worth = jnp.minimum(1, _EVIDENCE / tried)
    patience = jnp.where(accepted == 0, jnp.minimum(2 * known.patience, _LATEST), known.patience)
    patience = jnp.where(accepted == length, _SOONEST, patience)
    idle = rest(known, 1)
    return Experience(
        accepted=jnp.where(drafted, worth * (known.accepted + accepted), idle.accepted),
        tried=jnp.where(drafted, worth * tried, idle.tried),
        idle=jnp.where(drafted, 0, idle.idle),
        patience=jnp.where(drafted & (known.idle > 0), patience, known.patience),
    )


def rest(known: Experience, rounds: Array | int) -> Experience:
    """What is known after ``rounds`` ([] int32) without a draft of any row."""
    keep = jnp.where(known.tried > _FAINT, jnp.float32(_FADING) ** rounds, 1)  # the ratio stays
    return known.replace(
        accepted=keep * known.accepted, tried=keep * known.tried, idle=known.idle + rounds
    )


def best(
    lengths: tuple[int, ...], seconds: Array, known: Experience, running: Array, last: Array
) -> Array:
    """The index [] int32 of the length that is expected to emit most tokens a second.

    Args:
      lengths: ascending; R of them.
      seconds: [R] of a round of each; the longest is chosen until all are known (> 0).
      known: of B rows.
      running: bool [B], the rows that count.
      last: int32 [], index of the last round's length.
    """
    longest = jnp.int32(len(lengths) - 1)
    measured = (seconds > 0).all()
    expected, lasting, hoped = _emitted(lengths, _rates(known), running) / jnp.where(
        measured, seconds, 1
    )
    kept = jnp.arange(len(lengths)) == last
    expected *= jnp.where(kept, 1 + _LOYALTY, 1)
    chosen = jnp.argmax(expected)
    if not lengths[0]:
        drafts, tries = lasting[1:].max() > lasting[0], hoped[1:].max() > hoped[0]
        chosen = jnp.where(drafts, 1 + jnp.argmax(expected[1:]), jnp.where(tries, 1, 0))
    return jnp.where(measured, chosen, longest).astype(jnp.int32)


def pause(known: Experience, running: Array) -> Array:
    """Rounds [] int32, 1 or more, before ``best`` may find that it is time to draft again.

    While nothing is drafted nothing is learned: only a row's patience can end.
    """
    left = known.patience - known.idle
    left = jnp.where(running & (left > 0), left, _FOREVER).min()
    # Where no row seems to run, as prompts may end like texts do, the next round shows.
    return jnp.where(running.any(), left, 1)


def _emitted(lengths: tuple[int, ...], rates: Array, running: Array) -> Array:
    """Tokens that a round of each length is expected to emit, all rows together: [A, R].

    ``rates`` [A, B] are what the acceptance of the rows may be.
    """
    powers = rates[..., None] ** np.arange(lengths[-1] + 1)  # 1, a, ..., a^K
    emitted = jnp.cumsum(powers, -1)[..., np.array(lengths)]
    return jnp.where(running[:, None], emitted, 0).sum(1)


def _rates(known: Experience) -> Array:
    """Acceptance as seen, as drafting must pay at to go on, and to be tried again: [3, B].

    Who drafts is given up late, as nothing more is learned then: once acceptance a little above the
    one that was seen would not pay. Who does not goes by what is known, until patience ends.
    """
    rate = known.accepted / known.tried
    doubt = _DOUBT * jnp.sqrt(rate * (1 - rate) / known.tried)
    lasting = jnp.where(known.idle > 0, rate, jnp.minimum(rate + doubt, 1))
    ended = known.idle >= known.patience
    return jnp.stack([rate, lasting, jnp.where(ended, jnp.maximum(lasting, _PRIOR), lasting)])
