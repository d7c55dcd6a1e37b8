"""Two drafters in one: what was said before is looked up, and a network drafts besides.

``combine="merge"`` grafts what was looked up onto the network's draft: the target judges both in
one pass, and a continuation that both have costs its nodes once. ``combine="choose"`` takes one of
the two for each row and round, by how many tokens it is expected to hold, so that a network that no
row wants does not run; what is looked up is judged by its own score (Arctic Inference's hybrid,
``jspec.drafters.suffix.drafter``, arXiv 2411.04975) or its length, and both by what became of the drafts
before. The choice is made before the network draws, so it tells nothing about what will be drawn.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core import modes, validation
from jspec.core.history import is_ended
from jspec.core.types import Array, Draft, Drafter, History, MultiMode, Params, Sharing, Verdict
from jspec.drafters.trees import merge
from jspec.util.messages import shown

_COMBINE = ("merge", "choose")
_RATE = 0.9  # a looked-up token's chance before anything is known of it
_MEMORY = 0.8  # weight of the rounds before in a running mean
_SILENT = -1.0  # no promise was made
_RETURN = 0.02  # how fast trust in what was not asked comes back, a round


@struct.dataclass
class Trust:
    """What became of the drafts of each row, as running means."""

    rate: Array  # [B] float32, of looked-up tokens: accepted of one expected
    gain: Array  # [B] float32, accepted of a draft of the network
    looked_up: Array  # [B] bool, whose draft this round's is
    expected: Array  # [B] float32, accepted tokens that a look-up promised itself, if it said so


@struct.dataclass
class HybridMemory:
    """Of both drafters."""

    parts: tuple[Any, Any]
    trust: Trust | None  # None where none is chosen


@dataclasses.dataclass(frozen=True)
class Hybrid:
    """A drafter of point masses and another, merged or chosen from.

    ``params.drafter`` and ``shared`` are pairs, one of each drafter's.

    Attributes:
      parts: the drafter that looks up, whose drafts are point masses and which reads no hidden
        states; and the one with a network.
      combine: "merge" or "choose".
      noise: "target" draws with the target's noise (rule ``coupled``).

    Raises:
      ValueError: the two cannot be combined.
    """

    parts: tuple[Drafter, Drafter]
    combine: Literal["merge", "choose"] = "merge"
    noise: Literal["own", "target"] = "own"

    def __post_init__(self):
        if self.combine not in _COMBINE:
            raise ValueError(f"combine={shown(self.combine)} must be 'merge' or 'choose'.")
        if len(self.parts) != 2:
            raise ValueError(
                f"parts holds {len(self.parts)} drafters; give two: one that looks up and one "
                "with a network."
            )
        for place, part in zip(("first", "second"), self.parts, strict=True):
            if isinstance(part, MultiMode):
                raise ValueError(
                    f"the {place} of parts chooses its K by the round, which no combination passes "
                    "on; give the drafter itself."
                )
        names = [type(part).__name__ for part in self.parts]
        first, second = self.parts
        if first.proposal != "deterministic" or first.capture_layers:
            raise ValueError(
                f"the first of parts must look up what it drafts, but {names[0]} does not; put "
                "'ngram', 'suffix' or 'token_recycling' first."
            )
        if self.combine == "merge" and second.proposal not in (
            "deterministic",
            "chain",
            "without_replacement",
        ):
            raise ValueError(
                f"combine='merge' is not exact for the {second.proposal!r} drafts of {names[1]}; "
                "have them drawn without replacement ('probabilistic') or not at all ('greedy'), "
                "or use combine='choose'."
            )
        asked = {}
        if self.noise == "target":
            second = validation.sharing_noise(second)
        if getattr(second, "backlog", self._backlog) < self._backlog:
            asked["backlog"] = self._backlog
        object.__setattr__(self, "parts", (first, dataclasses.replace(second, **asked)))

    def check_params(self, params):
        """Refuses weights that are not of the two."""
        pair = (None, None) if params is None else params
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError("pass a pair, one of each of the parts.")
        for part, weights in zip(self.parts, pair, strict=True):
            validation.check_weights(part, weights)

    @property
    def _backlog(self) -> int:
        """Committed tokens that the network must be able to take in at once.

        After a round in which none of its own were accepted: K + 1. After rounds that it sat out:
        enough for it to gain on the text.
        """
        return max(self.max_depth + 1, modes.BACKLOG if self.combine == "choose" else 0)

    @property
    def max_depth(self) -> int:
        """K of the deeper one."""
        return max(part.max_depth for part in self.parts)

    @property
    def tree_size(self) -> int:
        """The nodes of both under one root, or those of the larger."""
        first, second = (part.tree_size for part in self.parts)
        return first + second - 1 if self.combine == "merge" else max(first, second)

    @property
    def node_buckets(self) -> tuple[int, ...]:
        """Node counts worth a program of their own: of either draft where there is no other."""
        own = (getattr(part, "node_buckets", (part.tree_size,)) for part in self.parts)
        return tuple(sorted({1, *(size for sizes in own for size in sizes), self.tree_size}))

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """What the network reads."""
        return self.parts[1].capture_layers

    @property
    def proposal(self) -> str:
        """The law of siblings, some of which may have been looked up."""
        distribution = self.parts[1].proposal
        if self.combine == "merge":
            return "deterministic" if distribution == "deterministic" else "deterministic_last"
        is_chain = self.tree_size == self.max_depth + 1
        return "mixed" if distribution == "chain" and not is_chain else distribution

    def init_shared(self) -> Any:
        """What either keeps for all calls; () where neither does."""
        kept = tuple(part.init_shared() if isinstance(part, Sharing) else () for part in self.parts)
        return kept if jax.tree.leaves(kept) else ()

    def on_finished(self, shared: Any, memory: HybridMemory, history: History) -> Any:
        """Hands both the rows that go on no more."""
        if shared == ():
            return ()
        return tuple(
            part.on_finished(own, remembered, history) if isinstance(part, Sharing) else own
            for part, own, remembered in zip(self.parts, shared, memory.parts, strict=True)
        )

    def init(self, params, request, capacity):
        """Of both; trusting each other alike."""
        parts = tuple(
            part.init(own, request, capacity)
            for part, own in zip(self.parts, _split(params), strict=True)
        )
        trust = None
        if self.combine == "choose":
            rows = jnp.zeros(request.max_length.shape)
            gain = rows + self.parts[1].max_depth / 2
            trust = Trust(rows + _RATE, gain, rows > 0, rows)
        return HybridMemory(parts, trust)

    def prefill(self, params, memory, tokens, features, start, valid):
        """Hands both the prompt."""
        return memory.replace(
            parts=tuple(
                part.prefill(
                    own, remembered, tokens, features if part.capture_layers else (), start, valid
                )
                for part, own, remembered in zip(
                    self.parts, _split(params), memory.parts, strict=True
                )
            )
        )

    def propose(self, params, request, shared, memory, history):
        """One draft of both, or that of the one with the better prospects."""
        (first, second), own, kept = self.parts, _split(params), _split_shared(shared)
        found, looked = first.propose(own[0], request, kept[0], memory.parts[0], history)

        def draft(remembered: Any) -> tuple[Draft, Any]:
            return second.propose(own[1], request, kept[1], remembered, history)

        if self.combine == "merge":
            drafted, remembered = draft(memory.parts[1])
            return merge.graft(drafted, found), memory.replace(parts=(looked, remembered))
        trust = _weighed(memory.trust, found)
        wanted = ~trust.looked_up & ~is_ended(request, history)
        drafted, remembered = modes.switch(
            wanted.any().astype(jnp.int32),
            [modes.root_alone(history), draft],
            memory.parts[1],
            own[1],
        )
        # A network that is still taking in what it missed drafts nothing.
        trust = trust.replace(looked_up=trust.looked_up | ~drafted.valid[:, 1:].any(1))
        memory = HybridMemory((looked, remembered), trust)
        return merge.choose(found, drafted, trust.looked_up), memory

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        """Hands both the verdict; the trust in the one that drafted is its latest success."""
        learned = [
            part.update(
                own,
                request,
                kept,
                remembered,
                history,
                draft,
                verdict,
                out if part.capture_layers else out.replace(features=()),
            )
            for part, own, kept, remembered in zip(
                self.parts, _split(params), _split_shared(shared), memory.parts, strict=True
            )
        ]
        parts, kept = zip(*learned, strict=True)
        trust = memory.trust and _learned(memory.trust, draft, verdict)
        return HybridMemory(parts, trust), () if shared == () else kept


def _split(params: Params) -> tuple[Params, Params]:
    mine = params.drafter or (None, None)
    return Params(params.target, mine[0]), Params(params.target, mine[1])


def _split_shared(shared: Any) -> tuple[Any, Any]:
    return ((), ()) if shared == () else shared


def _weighed(trust: Trust, found: Draft) -> Trust:
    """Which rows take what was ``found``."""
    length = found.valid[:, 1:].sum(1)
    # Of a chain whose every token holds with chance a if those before it do: a + a^2 + ...
    rate = jnp.clip(trust.rate, 0.01, 0.99)
    held = rate * (1 - rate**length) / (1 - rate)
    prospect = held if found.score is None else trust.rate * found.score
    looked_up = (length > 0) & (prospect >= trust.gain)
    expected = jnp.full_like(rate, _SILENT) if found.score is None else found.score
    return trust.replace(looked_up=looked_up, expected=expected)


def _learned(trust: Trust, draft: Draft, verdict: Verdict) -> Trust:
    """What became of the round; what was not asked is trusted a little more again."""
    accepted = jnp.maximum(verdict.num_emitted - 1, 0)
    length = draft.valid[:, 1:].sum(1)
    tried = jnp.maximum(accepted + (accepted < length), 1)
    promised = jnp.where(trust.expected == _SILENT, tried, trust.expected)
    success = jnp.minimum(accepted / jnp.maximum(promised, 0.1), 1.5)
    ran = (verdict.num_emitted > 0) & (length > 0)
    mean = lambda old, new: _MEMORY * old + (1 - _MEMORY) * new
    back = lambda old, rest: old + _RETURN * (rest - old)
    looked_up, asked = ran & trust.looked_up, ran & ~trust.looked_up
    rate = jnp.where(looked_up, mean(trust.rate, success), back(trust.rate, _RATE))
    gain = jnp.where(asked, mean(trust.gain, accepted), trust.gain)
    return trust.replace(rate=rate, gain=gain)
