"""A drafter whose K follows the batch: by a table of batch sizes, or by expected goodput.

Each length is a mode (``jspec.core.types.MultiMode``): a drafter of that K on the memory of the
longest, with a loop of rounds of its own. So a round of length K costs as much as with a drafter of
fixed K, and a round without a draft is plain decoding. ``jspec.drafters.adaptive.goodput`` chooses
the length, and ``jspec.engine.costs`` measures the times of rounds.
"""

import dataclasses
import functools
from typing import Any, Literal

import jax.numpy as jnp
from flax import struct

from jspec.core import modes, validation
from jspec.core.history import is_ended
from jspec.core.types import Array, Drafter, History, Sharing
from jspec.drafters.adaptive import backlog, goodput
from jspec.drafters.trees import tree_settings


@struct.dataclass
class Costs:
    """The time of a round of each length; all drafts have the longest until it is measured."""

    seconds: Array  # [R] float32, 0: not measured
    # bool []: a lookup without a match drafts a full chain of any tokens, so that it can be timed.
    timed: Array
    inner: Any  # the drafter's own shared state


@struct.dataclass
class AdaptiveMemory:
    """The drafter's memory, and the success of its drafts."""

    inner: Any
    waiting: backlog.Waiting | None  # None unless the drafter misses rounds
    known: goodput.Experience
    mode: Array  # [] int32, index of the last round's length
    rest: Array  # [] int32, rounds of a pause before the next choice
    rested: Array  # [] int32, rounds of the pause so far


@dataclasses.dataclass(frozen=True)
class Adaptive:
    """Chains of ``drafter``, of a length chosen anew in every round.

    Attributes:
      drafter: of chains, at its largest K.
      lengths: the K's to choose from, ascending; the last is the drafter's own.
      batch_sizes: (least, most, K) of unfinished rows, ends included; other numbers of rows use the
        longest. () to choose by expected goodput.
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
        fields = {field.name for field in dataclasses.fields(self.drafter)}
        is_chain = self.drafter.tree_size == most + 1
        if "num_speculative_tokens" not in fields or not is_chain or most < 1:
            raise ValueError(
                f"drafter={name} must draft chains of num_speculative_tokens; use a chain, or a "
                "fixed length."
            )
        if list(self.lengths) != sorted(set(self.lengths)) or self.lengths[-1] != most:
            raise ValueError(f"lengths={self.lengths} must ascend to {most}, the drafter's K.")
        if self.lengths[0] < 0:
            raise ValueError(f"lengths={self.lengths} must be at least 0.")
        for least, last, length in self.batch_sizes:
            if not 1 <= least <= last or length not in self.lengths:
                raise ValueError(
                    f"batch_sizes={self.batch_sizes} must be of 1 or more rows and of one of the "
                    f"lengths {self.lengths}, unlike ({least}, {last}, {length})."
                )
        drafter = dataclasses.replace(self.drafter)
        if self.noise == "target":
            drafter = validation.sharing_noise(drafter)
        object.__setattr__(self, "drafter", drafter)

    def check_params(self, params):
        """Refuse weights that are not the drafter's."""
        validation.check_weights(self.drafter, params)

    @property
    def by_costs(self) -> bool:
        """True if ``Costs`` in ``shared`` decide the length."""
        return not self.batch_sizes

    @property
    def rests(self) -> bool:
        """True if the drafter misses rounds and must catch up."""
        return self.lengths[0] == 0 and isinstance(self.drafter, backlog.Following)

    @functools.cached_property
    def modes(self) -> tuple["Resting | Drafting", ...]:
        """The mode of each length."""
        return tuple(
            Drafting(self, self._of_length(length)) if length else Resting(self)
            for length in self.lengths
        )

    max_depth = property(lambda self: self.drafter.max_depth)
    tree_size = property(lambda self: self.drafter.tree_size)
    capture_layers = property(lambda self: self.drafter.capture_layers)
    lookahead = property(lambda self: self.drafter.lookahead)
    proposal = property(lambda self: self.drafter.proposal)  # a length does not depend on draws

    @property
    def node_buckets(self) -> tuple[int, ...]:
        """The node counts of all modes."""
        return tuple(sorted({1, *(size for mode in self.modes for size in mode.node_buckets)}))

    def init_shared(self) -> Any:
        """Return the drafter's shared state, and times that are not measured."""
        inner = self.drafter.init_shared() if isinstance(self.drafter, Sharing) else ()
        unknown = jnp.zeros(len(self.lengths))
        return Costs(unknown, jnp.array(False), inner) if self.by_costs else inner

    def on_finished(self, shared: Any, memory: AdaptiveMemory, history: History, rows: Array):
        """Hand ended rows to the drafter."""
        if not isinstance(self.drafter, Sharing):
            return memory, shared
        inputs = _inner(shared), memory.inner, history, rows
        inner, inner_shared = self.drafter.on_finished(*inputs)
        return memory.replace(inner=inner), _with_inner(shared, inner_shared)

    def init(self, params, request, capacity):
        """Initialise the drafter, and the prior of its success."""
        batch, waiting = request.max_length.shape[0], None
        if self.rests:
            waiting = backlog.init(self.drafter, params, batch)
            capacity += backlog.SIZE  # rows that are written at once
        inner = self.drafter.init(params, request, capacity)
        known, zero = goodput.init(batch), jnp.int32(0)
        return AdaptiveMemory(inner, waiting, known, mode=zero, rest=zero, rested=zero)

    def prefill(self, params, memory, tokens, features, start, valid):
        """Hand the prompt to the drafter."""
        inner = self.drafter.prefill(params, memory.inner, tokens, features, start, valid)
        return memory.replace(inner=inner)

    def select_mode(self, params, request, shared, memory, history):
        """Choose the best length; if it drafts, catch up with the text."""
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
        """Return the index [] int32 of the best length for the ``running`` [B] rows."""
        longest = jnp.int32(len(self.lengths) - 1)
        if not self.by_costs:
            count, chosen = running.sum(), longest
            for least, most, length in reversed(self.batch_sizes):
                inside = (least <= count) & (count <= most)
                chosen = jnp.where(inside, self.lengths.index(length), chosen)
            return chosen
        if shared == ():
            return longest
        return goodput.best(self.lengths, shared.seconds, memory.known, running, memory.mode)

    def _rest(self, memory: AdaptiveMemory, running: Array, history: History) -> Array:
        """Return the number of rounds without a draft before the next choice."""
        rest = goodput.pause(memory.known, running)
        if self.rests and self.capture_layers:
            room = backlog.SIZE - self.drafter.missing(memory.inner, history).max()
            rest = jnp.minimum(rest, room)
        return rest

    def _of_length(self, length: int) -> Drafter:
        """Return the drafter with another K, for the same memory."""
        fields = {field.name for field in dataclasses.fields(self.drafter)}
        unset = dict.fromkeys(fields & {"tree_size", "tree_depth"})  # derived from the longest K
        return dataclasses.replace(self.drafter, num_speculative_tokens=length, **unset)


@dataclasses.dataclass(frozen=True)
class Drafting:
    """The mode of one length: its ``drafter`` on the memory of ``adaptive``."""

    adaptive: Adaptive
    drafter: Drafter

    max_depth = property(lambda self: self.drafter.max_depth)
    tree_size = property(lambda self: self.drafter.tree_size)
    capture_layers = property(lambda self: self.drafter.capture_layers)
    proposal = property(lambda self: self.drafter.proposal)

    @property
    def node_buckets(self) -> tuple[int, ...]:
        """Node counts that get a program of their own; a network always drafts."""
        sizes = tree_settings.node_buckets(self.drafter)
        is_network = self.capture_layers or isinstance(self.drafter, backlog.Following)
        return tuple(size for size in sizes if size > 1 or not is_network)

    def keeps_mode(self, request, shared, memory, history):
        """Return whether this length is still the best, bool []."""
        running = ~is_ended(request, history)
        return self.adaptive.chosen(shared, memory, running) == memory.mode

    def propose(self, params, request, shared, memory, history):
        """Return the drafter's draft."""
        inner = _inner(shared)
        draft, inner = self.drafter.propose(params, request, inner, memory.inner, history)
        if isinstance(shared, Costs) and self.proposal == "deterministic":
            # A lookup may find nothing. To be timed, it drafts the zeros in its place.
            empty = ~draft.valid[:, 1:].any(1)
            draft = draft.replace(valid=draft.valid | (empty & shared.timed)[:, None])
        return draft, memory.replace(inner=inner)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Hand the verdict to the drafter, and count its success."""
        inner, inner_shared = self.drafter.update(
            params, request, _inner(shared), memory.inner, history, draft, verdict, out
        )
        known = goodput.learn(memory.known, draft, verdict)
        return memory.replace(inner=inner, known=known), _with_inner(shared, inner_shared)


@dataclasses.dataclass(frozen=True)
class Resting:
    """The mode of length 0: plain decoding."""

    adaptive: Adaptive

    max_depth, tree_size, node_buckets = 0, 1, (1,)
    proposal = "deterministic"
    capture_layers = property(lambda self: self.adaptive.capture_layers)

    def keeps_mode(self, request, shared, memory, history):
        """Return whether the pause goes on, bool []."""
        return memory.rested < memory.rest

    def propose(self, params, request, shared, memory, history):
        """Return the root alone."""
        return modes.root_alone(history)(memory)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Buffer the features that the drafter misses, or update a drafter that misses nothing."""
        drafter, inner, inner_shared = self.adaptive.drafter, memory.inner, _inner(shared)
        if not self.adaptive.rests:
            inner, inner_shared = drafter.update(
                params, request, inner_shared, inner, history, draft, verdict, out
            )
            memory = memory.replace(inner=inner)
        elif self.capture_layers:
            missing = drafter.missing(inner, history) - verdict.num_emitted
            memory = memory.replace(waiting=backlog.push(memory.waiting, missing, out, verdict))
        return memory.replace(rested=memory.rested + 1), _with_inner(shared, inner_shared)


def _inner(shared: Any) -> Any:
    """Return the drafter's own shared state."""
    return shared.inner if isinstance(shared, Costs) else shared


def _with_inner(shared: Any, inner: Any) -> Any:
    return shared.replace(inner=inner) if isinstance(shared, Costs) else inner
