"""A drafter whose K follows the batch: by a table of batch sizes, or by expected goodput.

Goodput is tokens a second (TurboSpec, arXiv 2406.14066): a round of length K is expected to emit
1 + a + ... + a^K tokens a row, a being the row's running acceptance, and takes what rounds of that
length were measured to take on this machine (``jspec.calibration``), drafting and all. The length
of the best ratio is chosen for the whole batch, 0 among them: then nothing is drafted, and the
target runs on one node. What decides was known before the round, so every rule stays exact.
"""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec import branching, tokens
from jspec.types import Array, Drafter, History, Sharing

_PRIOR = 0.7  # a before anything is known
_WEIGHT = 1.0  # drafted tokens that the prior is worth
_MEMORY = 0.9  # of a round that drafted
_FADING = 0.995  # of one that did not: what is known of a text grows old


@struct.dataclass
class Costs:
    """What a round takes at each length; until they are measured, all drafts are as long as K."""

    seconds: Array  # [R] float32, 0: not measured
    inner: Any  # what the drafter itself keeps for all calls


@struct.dataclass
class AdaptiveMemory:
    """The drafter's, and how its drafts fared."""

    inner: Any
    accepted: Array  # [B] float32, fading sum of accepted tokens
    tried: Array  # [B] float32, of those accepted and those refused


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
        if self.lengths[0] == 0 and "backlog" in known:
            asked["backlog"] = branching.BACKLOG
        object.__setattr__(self, "drafter", dataclasses.replace(self.drafter, **asked))

    @property
    def by_costs(self) -> bool:
        """Whether ``shared`` holds ``Costs``, by which lengths are chosen; else the drafter's."""
        return not self.batch_sizes

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
        return tuple(sorted({1, *(length + 1 for length in self.lengths)}))

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
        return Costs(jnp.zeros(len(self.lengths)), inner) if self.by_costs else inner

    def retire(self, shared: Any, memory: AdaptiveMemory, history: History) -> Any:
        """Hands the drafter the rows that go on no more."""
        if not isinstance(self.drafter, Sharing):
            return shared
        return _with_inner(shared, self.drafter.retire(_inner(shared), memory.inner, history))

    def init(self, params, request, capacity):
        """Nothing known."""
        nothing = jnp.zeros(request.max_length.shape)
        return AdaptiveMemory(self.drafter.init(params, request, capacity), nothing, nothing)

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
        ways = [way(length) for length in self.lengths]
        draft, inner = branching.switch(chosen, ways, memory.inner, params)
        return draft, memory.replace(inner=inner)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Hands the drafter the verdict, and counts."""
        inner, kept = self.drafter.update(
            params, request, _inner(shared), memory.inner, history, draft, verdict, out
        )
        accepted = jnp.maximum(verdict.num_emitted - 1, 0)
        length = draft.valid[:, 1:].sum(1)
        drafted = (verdict.num_emitted > 0) & (length > 0)
        keep = jnp.where(drafted, _MEMORY, _FADING)
        counted = lambda old, new: keep * old + jnp.where(drafted, new, 0)
        memory = AdaptiveMemory(
            inner,
            counted(memory.accepted, accepted),
            counted(memory.tried, accepted + (accepted < length)),
        )
        return memory, _with_inner(shared, kept)

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
        rate = (memory.accepted + _WEIGHT * _PRIOR) / (memory.tried + _WEIGHT)
        powers = rate[:, None] ** np.arange(self.max_depth + 1)  # 1, a, ..., a^K
        emitted = jnp.cumsum(powers, 1)[:, np.array(self.lengths)]
        emitted = jnp.where(running[:, None], emitted, 0).sum(0)
        measured = (shared.seconds > 0).all()
        goodput = emitted / jnp.where(measured, shared.seconds, 1)
        return jnp.where(measured, jnp.argmax(goodput), longest).astype(jnp.int32)


def _inner(shared: Any) -> Any:
    """What the drafter itself keeps for all calls."""
    return shared.inner if isinstance(shared, Costs) else shared


def _with_inner(shared: Any, inner: Any) -> Any:
    return shared.replace(inner=inner) if isinstance(shared, Costs) else inner
