"""A drafter whose K follows the batch: by a table of batch sizes, or by expected goodput.

Each length is a gear: a drafter of that K on the memory of the longest, with a loop of rounds of
its own (``jspec.core.types.MultiMode``). So a round of length K is the one that a drafter of K alone has,
and one without a draft is plain decoding; only what decides is added. Which length is best is told
in ``jspec.drafters.adaptive.goodput``, what rounds take in ``jspec.engine.costs``.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax.numpy as jnp
from flax import struct

from jspec.core import modes, validation
from jspec.core.history import is_ended
from jspec.core.types import Array, Draft, Drafter, History, Request, Sharing
from jspec.drafters.adaptive import backlog, goodput
from jspec.drafters.trees import tree_settings


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
    known: goodput.Experience
    mode: Array  # [] int32, index of the last round's length
    rest: Array  # [] int32, rounds without a draft before the next choice, if it is to rest
    rested: Array  # [] int32, those that it had


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
        own = dataclasses.replace(self.drafter)
        shares = self.noise == "target"
        object.__setattr__(self, "drafter", validation.sharing_noise(own) if shares else own)

    def check_params(self, params):
        """Refuses weights that are not the drafter's."""
        validation.check_weights(self.drafter, params)

    @property
    def by_costs(self) -> bool:
        """Whether ``shared`` holds ``Costs``, by which lengths are chosen; else the drafter's."""
        return not self.batch_sizes

    @property
    def rests(self) -> bool:
        """Whether the drafter misses rounds, and notices."""
        return self.lengths[0] == 0 and isinstance(self.drafter, backlog.Following)

    @functools.cached_property
    def modes(self) -> tuple["Resting | Drafting", ...]:
        """What runs the rounds of each length."""
        return tuple(
            Drafting(self, self._of_length(length)) if length else Resting(self)
            for length in self.lengths
        )

    @property
    def max_depth(self) -> int:
        """K at most."""
        return self.lengths[-1]

    @property
    def tree_size(self) -> int:
        """A chain under the root."""
        return self.max_depth + 1

    @property
    def node_buckets(self) -> tuple[int, ...]:
        """Node counts of all gears."""
        return tuple(sorted({1, *(size for mode in self.modes for size in mode.node_buckets)}))

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

    def on_finished(self, shared: Any, memory: AdaptiveMemory, history: History) -> Any:
        """Hands the drafter the rows that go on no more."""
        if not isinstance(self.drafter, Sharing):
            return shared
        return _with_inner(shared, self.drafter.on_finished(_inner(shared), memory.inner, history))

    def init(self, params, request, capacity):
        """Nothing known."""
        batch, waiting = request.max_length.shape[0], None
        if self.rests:
            target = getattr(self.drafter, "target", None)
            waiting = backlog.init(self.drafter, target, params, batch)
            capacity += backlog.SIZE  # as many rows are written at once
        inner = self.drafter.init(params, request, capacity)
        none = jnp.int32(0)
        return AdaptiveMemory(
            inner, waiting, goodput.init(batch), mode=none, rest=none, rested=none
        )

    def prefill(self, params, memory, tokens, features, start, valid):
        """Hands the drafter the prompt."""
        inner = self.drafter.prefill(params, memory.inner, tokens, features, start, valid)
        return memory.replace(inner=inner)

    def select_mode(self, params, request, shared, memory, history):
        """The best length, and the drafter level with the text where it is to draft."""
        running = ~is_ended(request, history)
        known = goodput.rest(memory.known, memory.rested)
        memory = memory.replace(known=known, rested=jnp.zeros_like(memory.rested))
        mode = self.chosen(shared, memory, running)
        memory = memory.replace(mode=mode)
        if self.rests:
            drafter, waiting = self.drafter, memory.waiting
            inner = backlog.catch_up(drafter, params, memory.inner, waiting, history, mode > 0)
            memory = memory.replace(inner=inner)
        return memory.replace(rest=self._rest(memory, running, history)), mode

    def chosen(self, shared: Any, memory: AdaptiveMemory, running: Array) -> Array:
        """The index [] int32 of the best length for the rows that are ``running`` [B]."""
        longest = jnp.int32(len(self.lengths) - 1)
        if not self.by_costs:
            count, chosen = running.sum(), longest
            for least, most, length in reversed(self.batch_sizes):
                here = (least <= count) & (count <= most)
                chosen = jnp.where(here, self.lengths.index(length), chosen)
            return chosen
        if shared == ():
            return longest
        return goodput.best(self.lengths, shared.seconds, memory.known, running, memory.mode)

    def _rest(self, memory: AdaptiveMemory, running: Array, history: History) -> Array:
        """How many rounds nothing needs to be chosen for, once there is no draft."""
        rest = goodput.pause(memory.known, running)
        if self.rests and self.capture_layers:
            room = backlog.SIZE - self.drafter.missing(memory.inner, history).max()
            rest = jnp.minimum(rest, room)
        return rest

    def _of_length(self, length: int) -> Drafter:
        """The drafter with a K of its own, on the same memory."""
        known = {field.name for field in dataclasses.fields(self.drafter)}
        own = dict.fromkeys(known & {"tree_size", "tree_depth"})  # the chain's, of the longest
        return dataclasses.replace(self.drafter, num_speculative_tokens=length, **own)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """The gear of one length: its ``drafter`` on the memory of the ``whole``."""

    whole: Adaptive
    drafter: Drafter

    max_depth = property(lambda self: self.drafter.max_depth)
    tree_size = property(lambda self: self.drafter.tree_size)
    capture_layers = property(lambda self: self.drafter.capture_layers)
    proposal = property(lambda self: self.drafter.proposal)

    @property
    def node_buckets(self) -> tuple[int, ...]:
        """Node counts worth a program of their own: a network drafts whenever it is asked to."""
        own = getattr(self.drafter, "node_buckets", tree_settings.node_buckets(self.tree_size))
        is_network = self.capture_layers or isinstance(self.drafter, backlog.Following)
        return tuple(size for size in own if size > 1 or not is_network)

    def keeps_mode(
        self, request: Request, shared: Any, memory: AdaptiveMemory, history: History
    ) -> Array:
        """Whether this length is still the best: bool []."""
        running = ~is_ended(request, history)
        return self.whole.chosen(shared, memory, running) == memory.mode

    def propose(self, params, request, shared, memory, history):
        """The drafter's draft."""
        inner = _inner(shared)
        draft, inner = self.drafter.propose(params, request, inner, memory.inner, history)
        if (
            isinstance(shared, Costs) and self.proposal == "deterministic"
        ):  # others always find something
            draft = _filled_up(draft, shared.timed)
        return draft, memory.replace(inner=inner)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Hands the drafter the verdict, and counts."""
        inner, kept = self.drafter.update(
            params, request, _inner(shared), memory.inner, history, draft, verdict, out
        )
        known = goodput.learn(memory.known, draft, verdict)
        return memory.replace(inner=inner, known=known), _with_inner(shared, kept)


@dataclasses.dataclass(frozen=True)
class Resting:
    """The gear of length 0: plain decoding."""

    whole: Adaptive

    max_depth, tree_size, node_buckets = 0, 1, (1,)
    proposal = "deterministic"
    capture_layers = property(lambda self: self.whole.capture_layers)

    def keeps_mode(
        self, request: Request, shared: Any, memory: AdaptiveMemory, history: History
    ) -> Array:
        """Whether nothing can have changed, and what is missed has room to wait: bool []."""
        return memory.rested < memory.rest

    def propose(self, params, request, shared, memory, history):
        """The root alone."""
        return modes.root_alone(history)(memory)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Keeps what the drafter misses for later."""
        drafter, inner, kept = self.whole.drafter, memory.inner, _inner(shared)
        if not self.whole.rests:
            inner, kept = drafter.update(params, request, kept, inner, history, draft, verdict, out)
            memory = memory.replace(inner=inner)
        elif self.capture_layers:
            missing = drafter.missing(inner, history) - verdict.num_emitted
            memory = memory.replace(waiting=backlog.push(memory.waiting, missing, out, verdict))
        return memory.replace(rested=memory.rested + 1), _with_inner(shared, kept)


def _filled_up(draft: Draft, wanted: Array) -> Draft:
    """The chains; where there are none, and it is ``wanted`` [] bool, of anything."""
    empty = ~draft.valid[:, 1:].any(1)
    return draft.replace(valid=draft.valid | (empty & wanted)[:, None])


def _inner(shared: Any) -> Any:
    """What the drafter itself keeps for all calls."""
    return shared.inner if isinstance(shared, Costs) else shared


def _with_inner(shared: Any, inner: Any) -> Any:
    return shared.replace(inner=inner) if isinstance(shared, Costs) else inner
