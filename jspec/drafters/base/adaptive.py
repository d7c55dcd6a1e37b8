"""A drafter of chains whose K may change from launch to launch.

A drafter of each K works on the same memory. The engine chooses K before a launch
(``jspec.engine.pacing``), and a launch of length K costs as much as with a drafter of that K. With
K = 0 the target decodes alone, and what a network misses meanwhile waits (``backlog``).
"""

import dataclasses
from typing import Any, Literal

from flax import struct

from jspec.core import validation
from jspec.core.history import root_alone
from jspec.core.types import Array, Drafter, History
from jspec.drafters.base import backlog


@struct.dataclass
class AdaptiveMemory:
    """The drafter's memory, and the features that it misses."""

    inner: Any
    waiting: backlog.Waiting | None  # None unless the drafter misses rounds


@dataclasses.dataclass(frozen=True)
class Adaptive(Drafter):
    """Chains of ``drafter``, of a length that the engine chooses; by itself, of the longest.

    Attributes:
      drafter: of chains, at its largest K.
      lengths: the K's to choose from, ascending; the last is the drafter's own.
      batch_sizes: (least, most, K) of unfinished rows, ends included; other numbers of rows use the
        longest. () to choose by expected tokens a second.
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
    def rests(self) -> bool:
        """True if the drafter misses rounds and must catch up."""
        return self.lengths[0] == 0 and self.drafter.catches_up

    max_depth = property(lambda self: self.drafter.max_depth)
    tree_size = property(lambda self: self.drafter.tree_size)
    capture_layers = property(lambda self: self.drafter.capture_layers)
    reads_pages = property(lambda self: self.drafter.reads_pages)
    lookahead = property(lambda self: self.drafter.lookahead)
    proposal = property(lambda self: self.drafter.proposal)  # a length does not depend on draws
    node_buckets = property(lambda self: self.at_length(self.max_depth).node_buckets)

    def at_length(self, length: int) -> Drafter:
        """Return the rounds of K = ``length``, one of ``lengths``, on this drafter's memory."""
        return Drafting(self, self._of_length(length)) if length else Resting(self)

    def for_rows(self, count: int) -> int:
        """Return the K of ``count`` unfinished rows, by ``batch_sizes``."""
        lengths = (k for least, most, k in self.batch_sizes if least <= count <= most)
        return next(lengths, self.max_depth)

    def init_shared(self) -> Any:
        """Return the drafter's shared state."""
        return self.drafter.init_shared()

    def on_finished(self, shared: Any, memory: AdaptiveMemory, history: History, rows: Array):
        """Hand ended rows to the drafter."""
        inner, shared = self.drafter.on_finished(shared, memory.inner, history, rows)
        return memory.replace(inner=inner), shared

    def init(self, params, request, capacity):
        """Initialise the drafter, and the buffers of what it misses."""
        waiting = None
        if self.rests:
            waiting = backlog.init(self.drafter, params, request.max_length.shape[0])
            capacity += backlog.SIZE  # rows that are written at once
        return AdaptiveMemory(self.drafter.init(params, request, capacity), waiting)

    def prefill(self, params, memory, tokens, features, start, valid):
        """Hand the prompt to the drafter."""
        inner = self.drafter.prefill(params, memory.inner, tokens, features, start, valid)
        return memory.replace(inner=inner)

    def propose(self, params, request, shared, memory, history):
        """Draft a chain of the longest K."""
        longest = self.at_length(self.max_depth)
        return longest.propose(params, request, shared, memory, history)

    def update(self, round):
        """Hand the verdict to the drafter."""
        return self.at_length(self.max_depth).update(round)

    def caught_up(self, params, memory, history, drafts: bool) -> AdaptiveMemory:
        """Return the memory after the missing tokens, if rounds draft or buffers are full."""
        if not self.rests or not (drafts or self.capture_layers):
            return memory
        inputs = self.drafter, params, memory.inner, memory.waiting, history, drafts
        return memory.replace(inner=backlog.catch_up(*inputs))

    def _of_length(self, length: int) -> Drafter:
        """Return the drafter with another K, for the same memory."""
        fields = {field.name for field in dataclasses.fields(self.drafter)}
        unset = dict.fromkeys(fields & {"tree_size", "tree_depth"})  # derived from the longest K
        return dataclasses.replace(self.drafter, num_speculative_tokens=length, **unset)


@dataclasses.dataclass(frozen=True)
class Drafting(Drafter):
    """Rounds of one length: its ``drafter`` on the memory of ``adaptive``."""

    adaptive: Adaptive
    drafter: Drafter

    max_depth = property(lambda self: self.drafter.max_depth)
    tree_size = property(lambda self: self.drafter.tree_size)
    capture_layers = property(lambda self: self.drafter.capture_layers)
    proposal = property(lambda self: self.drafter.proposal)

    @property
    def node_buckets(self) -> tuple[int, ...]:
        """Node counts that get a program of their own; a network always drafts."""
        sizes = self.drafter.node_buckets
        is_network = self.capture_layers or self.drafter.catches_up
        return tuple(size for size in sizes if size > 1 or not is_network)

    def propose(self, params, request, shared, memory, history):
        """Catch up with the text if it must, and return the drafter's draft."""
        memory = self.adaptive.caught_up(params, memory, history, drafts=True)
        draft, inner = self.drafter.propose(params, request, shared, memory.inner, history)
        return draft, memory.replace(inner=inner)

    def update(self, round):
        """Hand the verdict to the drafter."""
        inner, shared = self.drafter.update(round.replace(memory=round.memory.inner))
        return round.memory.replace(inner=inner), shared


@dataclasses.dataclass(frozen=True)
class Resting(Drafter):
    """Rounds of length 0: plain decoding."""

    adaptive: Adaptive

    max_depth, tree_size, node_buckets = 0, 1, (1,)
    proposal = "deterministic"
    capture_layers = property(lambda self: self.adaptive.capture_layers)

    def propose(self, params, request, shared, memory, history):
        """Return the root alone."""
        memory = self.adaptive.caught_up(params, memory, history, drafts=False)
        return root_alone(history), memory

    def update(self, round):
        """Buffer the features that the drafter misses, or update a drafter that misses nothing."""
        drafter, memory, shared = self.adaptive.drafter, round.memory, round.shared
        if not self.adaptive.rests:
            inner, shared = drafter.update(round.replace(memory=memory.inner))
            memory = memory.replace(inner=inner)
        elif self.capture_layers:
            missing = drafter.missing(memory.inner, round.history) - round.verdict.num_emitted
            waiting = backlog.push(memory.waiting, missing, round.out, round.verdict)
            memory = memory.replace(waiting=waiting)
        return memory, shared
