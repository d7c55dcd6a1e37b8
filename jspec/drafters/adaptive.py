"""A drafter whose K follows the batch: by a table of batch sizes, or by expected goodput.

Goodput is tokens a second (TurboSpec, arXiv 2406.14066): a round of length K is expected to emit
1 + a + ... + a^K tokens a row, a being the row's running acceptance, and takes what rounds of that
length were measured to take on this machine (``jspec.calibration``), drafting and all. The length
of the best ratio is chosen for the whole batch, 0 among them: then nothing is drafted, and the
target runs on one node. That is only chosen once it is the better one by a margin, and of lengths
that look about as good the last round's is kept. A row that drafts no more is tried again, with the
shortest draft, after a few rounds and after twice as many each time that this was in vain. What
decides was known before the round, so every rule stays exact.
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec import backlog, branching, tokens
from jspec.types import Array, Draft, Drafter, History, Sharing, Verdict

_PRIOR = 0.6  # a before anything is known, as if one token had been tried
_EVIDENCE = 24.0  # drafted tokens that all experience is worth at most
_DOUBT = 0.5  # standard errors above what was seen that drafting must not pay at, to be given up
_LOYALTY = 0.05  # by how much another length must look better: acceptance goes up and down
_FADING = 0.95  # what it is worth after a round without a draft: a text changes
_SOONEST, _LATEST = 4, 128  # rounds without a draft before one is tried again


@struct.dataclass
class Costs:
    """What a round takes at each length; until they are measured, all drafts are as long as K."""

    seconds: Array  # [R] float32, 0: not measured
    # bool []: to be timed, a drafter that found nothing drafts anything, as long as if it had.
    timed: Array
    inner: Any  # what the drafter itself keeps for all calls


@struct.dataclass
class AdaptiveMemory:
    """The drafter's, and how its drafts fared."""

    inner: Any
    waiting: backlog.Waiting | None  # None where no round is sat out
    accepted: Array  # [B] float32, fading sum of accepted tokens
    tried: Array  # [B] float32, of those accepted and those refused
    idle: Array  # [B] int32, rounds since the last draft
    patience: Array  # [B] int32, of them before the next is tried
    chosen: Array  # [] int32, index of the last round's length


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Drafts chains of ``drafter``, of a length chosen anew in every round.

    Attributes:
      drafter: of chains, at its largest K.
      lengths: the K's to choose from, ascending; the last is the drafter's own.
      batch_sizes: (least, most, K) of unfinished rows, ends included; other numbers of rows draft
        the longest. () to choose by expected goodput.
      noise: "target" draws with the target's noise (rule ``coupled``).

    Raises:
      ValueError: a setting is out of range, or the drafter's length cannot be chosen.
    """

    drafter: Drafter
    lengths: tuple[int, ...]
    batch_sizes: tuple[tuple[int, int, int], ...] = ()
    noise: Literal["own", "target"] = "own"

    def __post_init__(self):
        name, most = type(self.drafter).__name__, self.drafter.max_depth
        known = {field.name for field in dataclasses.fields(self.drafter)}
        chain = self.drafter.tree_size == most + 1
        if "num_speculative_tokens" not in known or not chain or most < 1:
            raise ValueError(
                f"the length of {name}'s drafts cannot be chosen by the round: it must draft "
                "chains of num_speculative_tokens."
            )
        if list(self.lengths) != sorted(set(self.lengths)) or self.lengths[-1] != most:
            raise ValueError(f"lengths={self.lengths} must ascend to {most}, the drafter's K.")
        if self.lengths[0] < 0:
            raise ValueError(f"lengths={self.lengths} must be at least 0.")
        for least, last, length in self.batch_sizes:
            if not 1 <= least <= last or length not in self.lengths:
                raise ValueError(
                    f"batch_sizes hold ({least}, {last}, {length}), but must be of 1 or more rows "
                    f"and of one of the lengths {self.lengths}."
                )
        asked = {}
        if self.noise == "target" and self.drafter.proposal != "point":
            asked["noise"] = "target"
        object.__setattr__(self, "drafter", dataclasses.replace(self.drafter, **asked))

    @property
    def by_costs(self) -> bool:
        """Whether ``shared`` holds ``Costs``, by which lengths are chosen; else the drafter's."""
        return not self.batch_sizes

    @property
    def rests(self) -> bool:
        """Whether the drafter misses rounds, and notices."""
        return self.lengths[0] == 0 and isinstance(self.drafter, backlog.Following)

    @property
    def max_depth(self) -> int:
        """K at most."""
        return self.lengths[-1]

    @property
    def tree_size(self) -> int:
        """A chain under the root."""
        return self.max_depth + 1

    @property
    def rungs(self) -> tuple[int, ...]:
        """Node counts of the lengths."""
        own = getattr(self.drafter, "rungs", ())
        return tuple(sorted({1, *own, *(length + 1 for length in self.lengths)}))

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """What the drafter reads."""
        return self.drafter.capture_layers

    @property
    def proposal(self) -> str:
        """The drafter's: its length tells nothing of what is drawn."""
        return self.drafter.proposal

    def init_shared(self) -> Any:
        """The drafter's own, and that nothing was measured."""
        inner = self.drafter.init_shared() if isinstance(self.drafter, Sharing) else ()
        unknown = jnp.zeros(len(self.lengths))
        return Costs(unknown, jnp.array(False), inner) if self.by_costs else inner

    def retire(self, shared: Any, memory: AdaptiveMemory, history: History) -> Any:
        """Hands the drafter the rows that go on no more."""
        if not isinstance(self.drafter, Sharing):
            return shared
        return _with_inner(shared, self.drafter.retire(_inner(shared), memory.inner, history))

    def init(self, params, request, capacity):
        """Nothing known."""
        rows = jnp.zeros(request.max_length.shape)
        waiting = None
        if self.rests:
            target = getattr(self.drafter, "target", None)
            waiting = backlog.init(self.drafter, target, params, len(rows))
            capacity += backlog.SIZE  # as many rows are written at once
        return AdaptiveMemory(
            self.drafter.init(params, request, capacity), waiting, rows + _PRIOR, rows + 1,
            jnp.zeros_like(rows, jnp.int32), jnp.full_like(rows, _SOONEST, jnp.int32),
            jnp.int32(0),
        )  # fmt: skip

    def absorb(self, params, memory, tokens, features, start, valid):
        """Hands the drafter the prompt."""
        inner = self.drafter.absorb(params, memory.inner, tokens, features, start, valid)
        return memory.replace(inner=inner)

    def propose(self, params, request, shared, memory, history):
        """A draft of the chosen length."""
        running = ~tokens.ended(request, history)
        inner = _inner(shared)

        def way(length: int):
            if not length:
                return branching.root_alone(history)
            drafter = self._of_length(length)
            return lambda memory: drafter.propose(params, request, inner, memory, history)

        by = self._by_goodput if self.by_costs else self._by_batch
        chosen = by(shared, memory, running)
        if self.rests:
            caught_up = backlog.catch_up(
                self.drafter, params, memory.inner, memory.waiting, history, chosen > 0
            )
            memory = memory.replace(inner=caught_up)
        ways = [way(length) for length in self.lengths]
        draft, inner = branching.switch(chosen, ways, memory.inner, params)
        if isinstance(shared, Costs) and self.proposal == "point":  # others always find something
            length = jnp.array(self.lengths)[chosen]
            draft = _filled_up(draft, jnp.where(shared.timed & running, length, 0))
        return draft, memory.replace(inner=inner, chosen=chosen)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Hands the drafter the verdict, or keeps it for later, and counts."""
        kept = _inner(shared)
        if self.rests and self.capture_layers:  # an update would run the network
            missing = self.drafter.missing(memory.inner, history) - verdict.num_emitted
            memory = memory.replace(waiting=backlog.push(memory.waiting, missing, out, verdict))
        else:
            inner, kept = self.drafter.update(
                params, request, kept, memory.inner, history, draft, verdict, out
            )
            memory = memory.replace(inner=inner)
        return _counted(memory, draft, verdict), _with_inner(shared, kept)

    def _of_length(self, length: int) -> Drafter:
        """The drafter with a K of its own, on the same memory."""
        known = {field.name for field in dataclasses.fields(self.drafter)}
        own = dict.fromkeys(known & {"tree_size", "tree_depth"})  # the chain's, of the longest
        return dataclasses.replace(self.drafter, num_speculative_tokens=length, **own)

    def _by_batch(self, shared: Any, memory: AdaptiveMemory, running: Array) -> Array:
        """The index of the length for so many rows."""
        count, chosen = running.sum(), jnp.int32(len(self.lengths) - 1)
        for least, most, length in reversed(self.batch_sizes):
            here = (least <= count) & (count <= most)
            chosen = jnp.where(here, self.lengths.index(length), chosen)
        return chosen

    def _by_goodput(self, shared: Any, memory: AdaptiveMemory, running: Array) -> Array:
        """The index of the length that is expected to emit most tokens a second."""
        longest = jnp.int32(len(self.lengths) - 1)
        if shared == ():
            return longest
        measured = (shared.seconds > 0).all()
        seconds = jnp.where(measured, shared.seconds, 1)
        expected, lasting, hoped = self._emitted(_rates(memory), running) / seconds
        kept = jnp.arange(len(self.lengths)) == memory.chosen
        expected *= jnp.where(kept, 1 + _LOYALTY, 1)
        chosen = jnp.argmax(expected)
        if not self.lengths[0]:
            drafts, tries = lasting[1:].max() > lasting[0], hoped[1:].max() > hoped[0]
            chosen = jnp.where(drafts, 1 + jnp.argmax(expected[1:]), jnp.where(tries, 1, 0))
        return jnp.where(measured, chosen, longest).astype(jnp.int32)

    def _emitted(self, rates: Array, running: Array) -> Array:
        """Tokens that a round of each length is expected to emit, all rows together: [A, R].

        ``rates`` [A, B] are what the acceptance of the rows may be.
        """
        powers = rates[..., None] ** np.arange(self.max_depth + 1)  # 1, a, ..., a^K
        emitted = jnp.cumsum(powers, -1)[..., np.array(self.lengths)]
        return jnp.where(running[:, None], emitted, 0).sum(1)


def _rates(memory: AdaptiveMemory) -> Array:
    """Acceptance as seen, as drafting must pay at to go on, and to be tried again: [3, B].

    Who drafts is given up late, as nothing more is learned then: once acceptance a little above the
    one that was seen would not pay. Who does not goes by what is known, until patience ends.
    """
    rate = memory.accepted / memory.tried
    doubt = _DOUBT * jnp.sqrt(rate * (1 - rate) / memory.tried)
    lasting = jnp.where(memory.idle > 0, rate, jnp.minimum(rate + doubt, 1))
    ended = memory.idle >= memory.patience
    return jnp.stack([rate, lasting, jnp.where(ended, jnp.maximum(lasting, _PRIOR), lasting)])


def _counted(memory: AdaptiveMemory, draft: Draft, verdict: Verdict) -> AdaptiveMemory:
    """What became of the round.

    A row whose draft after a pause was refused waits twice as long for the next; one whose draft
    was accepted whole waits no longer than ever.
    """
    accepted = jnp.maximum(verdict.num_emitted - 1, 0)
    length = draft.valid[:, 1:].sum(1)
    drafted = (verdict.num_emitted > 0) & (length > 0)
    more = jnp.where(drafted, accepted, 0), jnp.where(drafted, accepted + (accepted < length), 0)
    sums = memory.accepted + more[0], memory.tried + more[1]
    worth = jnp.minimum(1, _EVIDENCE / sums[1])
    fading = jnp.where(sums[1] > 0.1, _FADING, 1)  # the ratio stays
    keep = jnp.where(drafted, worth, fading)
    patience = jnp.where(accepted == 0, jnp.minimum(2 * memory.patience, _LATEST), memory.patience)
    patience = jnp.where(accepted == length, _SOONEST, patience)
    return memory.replace(
        accepted=keep * sums[0],
        tried=keep * sums[1],
        idle=jnp.where(drafted, 0, memory.idle + 1),
        patience=jnp.where(drafted & (memory.idle > 0), patience, memory.patience),
    )


def _filled_up(draft: Draft, lengths: Array) -> Draft:
    """The chains, where there are none made up to ``lengths`` [B]; 0 leaves a row as it is."""
    nodes = np.arange(draft.tokens.shape[1])
    empty = ~draft.valid[:, 1:].any(1)
    made_up = empty[:, None] & (nodes <= lengths[:, None])
    return draft.replace(valid=draft.valid | made_up)


def _inner(shared: Any) -> Any:
    """What the drafter itself keeps for all calls."""
    return shared.inner if isinstance(shared, Costs) else shared


def _with_inner(shared: Any, inner: Any) -> Any:
    return shared.replace(inner=inner) if isinstance(shared, Costs) else inner
