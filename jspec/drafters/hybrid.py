"""Two drafters in one: a lookup of earlier text, and a network.

``combine="merge"`` grafts the lookup's draft onto the network's. The target verifies both in one
pass, and a continuation that both share costs its nodes once.

``combine="choose"`` takes one draft for each row and round, by the expected number of accepted
tokens, and skips the network in rounds that need it in no row. The lookup's expectation is its own
score (as in Arctic Inference's hybrid, arXiv 2411.04975) or follows from its length. Both are
corrected by the success of earlier drafts. The choice is made before the network draws, so it does
not depend on the drawn tokens.
"""

import dataclasses
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core import validation
from jspec.core.history import is_ended, root_alone
from jspec.core.types import Array, Draft, Drafter, History, Params, Verdict
from jspec.drafters.base import modes
from jspec.drafters.trees import merge
from jspec.util.messages import shown

_RATE = 0.9  # prior acceptance of a looked-up token
_MEMORY = 0.8  # weight of earlier rounds in a running mean
_NO_SCORE = -1.0  # the lookup has no expectation of its own
_RETURN = 0.02  # share of the way back to the prior, a round in which the lookup is not used


@struct.dataclass
class Trust:
    """Running means of the success of each row's drafts, and the choice of the round."""

    rate: Array  # [B] float32, accepted tokens per expected one, of the lookup
    gain: Array  # [B] float32, accepted tokens of a network's draft
    looked_up: Array  # [B] bool, whether this round's draft is the lookup's
    expected: Array  # [B] float32, the lookup's score, or ``_NO_SCORE``


@struct.dataclass
class HybridMemory:
    """The memories of both drafters."""

    parts: tuple[Any, Any]
    trust: Trust | None  # None unless ``combine="choose"``


@dataclasses.dataclass(frozen=True)
class Hybrid(Drafter):
    """A lookup drafter and another drafter, merged or chosen from.

    ``params.drafter`` and ``shared`` are pairs, one entry for each drafter.

    Attributes:
      parts: the lookup, whose drafts are deterministic and which reads no hidden states; and the
        drafter with a network.
      combine: "merge" or "choose".
      noise: "target" draws with the target's noise (rule ``coupled``).

    Raises:
      ValueError: the two cannot be combined.
    """

    parts: tuple[Drafter, Drafter]
    combine: Literal["merge", "choose"] = "merge"
    noise: Literal["own", "target"] = "own"

    def __post_init__(self):
        if self.combine not in ("merge", "choose"):
            raise ValueError(f"combine={shown(self.combine)} must be 'merge' or 'choose'.")
        if len(self.parts) != 2:
            raise ValueError(
                f"parts must hold two drafters, not {len(self.parts)}; give a lookup and a network."
            )
        names = [type(part).__name__ for part in self.parts]
        first, second = self.parts
        if first.proposal != "deterministic" or first.capture_layers:
            raise ValueError(
                f"parts[0] must be a lookup, which {names[0]} is not; put 'ngram', 'suffix' or "
                "'token_recycling' first."
            )
        mergeable = "deterministic", "chain", "without_replacement"
        if self.combine == "merge" and second.proposal not in mergeable:
            raise ValueError(
                f"combine='merge' is not exact for the {second.proposal!r} drafts of {names[1]}; "
                "use draft_sample_method='probabilistic' or 'greedy', or combine='choose'."
            )
        if self.noise == "target":
            second = validation.sharing_noise(second)
        # A draft may be rejected entirely; a network that pauses has more to catch up with.
        backlog = max(self.max_depth + 1, modes.BACKLOG if self.combine == "choose" else 0)
        object.__setattr__(self, "parts", (first, second.with_backlog(backlog)))

    def check_params(self, params):
        """Refuse weights that are not a pair, one of each drafter."""
        pair = (None, None) if params is None else params
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise ValueError("params.drafter must be a pair, one entry for each of the parts.")
        for part, weights in zip(self.parts, pair, strict=True):
            validation.check_weights(part, weights)

    max_depth = property(lambda self: max(part.max_depth for part in self.parts))
    capture_layers = property(lambda self: self.parts[1].capture_layers)
    reads_pages = property(lambda self: all(part.reads_pages for part in self.parts))

    @property
    def lookahead(self) -> int | None:
        """The larger of both; None if one is None."""
        ahead = [part.lookahead for part in self.parts]
        return None if None in ahead else max(ahead)

    @property
    def tree_size(self) -> int:
        """The nodes of both under one root, or those of the larger draft."""
        first, second = (part.tree_size for part in self.parts)
        return first + second - 1 if self.combine == "merge" else max(first, second)

    @property
    def node_buckets(self) -> tuple[int, ...]:
        """Node counts that get a program of their own: of either draft alone, and of all nodes."""
        of_parts = (size for part in self.parts for size in part.node_buckets)
        return tuple(sorted({1, self.tree_size, *of_parts}))

    @property
    def proposal(self) -> str:
        """The proposal of siblings, some of which may be looked up."""
        proposal = self.parts[1].proposal
        if self.combine == "merge":
            return "deterministic" if proposal == "deterministic" else "deterministic_last"
        is_chain = self.tree_size == self.max_depth + 1
        return "mixed" if proposal == "chain" and not is_chain else proposal

    def init_shared(self) -> Any:
        """Return the shared state of both; () if neither has any."""
        shared = tuple(part.init_shared() for part in self.parts)
        return shared if jax.tree.leaves(shared) else ()

    def on_finished(self, shared: Any, memory: HybridMemory, history: History, rows: Array):
        """Hand ended rows to both."""
        if not shared:
            return memory, shared
        learned = [
            part.on_finished(part_shared, part_memory, history, rows)
            for part, part_shared, part_memory in zip(self.parts, shared, memory.parts, strict=True)
        ]
        parts, shared = zip(*learned, strict=True)
        return memory.replace(parts=parts), shared

    def init(self, params, request, capacity):
        """Initialise both, and the priors of their success."""
        pairs = zip(self.parts, _split(params), strict=True)
        parts = tuple(part.init(part_params, request, capacity) for part, part_params in pairs)
        trust = None
        if self.combine == "choose":
            zeros = jnp.zeros(request.max_length.shape)
            gain = zeros + self.parts[1].max_depth / 2
            trust = Trust(zeros + _RATE, gain, zeros > 0, zeros)
        return HybridMemory(parts, trust)

    def prefill(self, params, memory, tokens, features, start, valid):
        """Hand the prompt to both; only the network reads features."""
        (lookup, network), params = self.parts, _split(params)
        parts = (
            lookup.prefill(params[0], memory.parts[0], tokens, (), start, valid),
            network.prefill(params[1], memory.parts[1], tokens, features, start, valid),
        )
        return memory.replace(parts=parts)

    def propose(self, params, request, shared, memory, history):
        """Return one draft of both, or the better one of each row."""
        lookup, network = self.parts
        (lookup_params, network_params), shared = _split(params), shared or ((), ())
        lookup_draft, lookup_memory = lookup.propose(
            lookup_params, request, shared[0], memory.parts[0], history
        )

        def run_network(network_memory: Any) -> tuple[Draft, Any]:
            return network.propose(network_params, request, shared[1], network_memory, history)

        if self.combine == "merge":
            draft, network_memory = run_network(memory.parts[1])
            parts = lookup_memory, network_memory
            return merge.graft(draft, lookup_draft), memory.replace(parts=parts)
        trust = _chosen(memory.trust, lookup_draft)
        needed = ~trust.looked_up & ~is_ended(request, history)
        proposers = (lambda memory: (root_alone(history), memory)), run_network
        draft, network_memory = modes.switch(
            needed.any().astype(jnp.int32), proposers, memory.parts[1], network_params
        )
        # A network that has not caught up with the text drafts nothing.
        looked_up = trust.looked_up | ~draft.valid[:, 1:].any(1)
        memory = HybridMemory((lookup_memory, network_memory), trust.replace(looked_up=looked_up))
        return merge.choose(lookup_draft, draft, looked_up), memory

    def update(self, round):
        """Hand the verdict to both, and update the running means."""
        (lookup, network), memory = self.parts, round.memory
        params, shared = _split(round.params), round.shared or ((), ())
        of_lookup = round.replace(
            params=params[0],
            shared=shared[0],
            memory=memory.parts[0],
            out=round.out.replace(features=()),
        )
        of_network = round.replace(params=params[1], shared=shared[1], memory=memory.parts[1])
        lookup_memory, lookup_shared = lookup.update(of_lookup)
        network_memory, network_shared = network.update(of_network)
        trust = memory.trust and _updated(memory.trust, round.draft, round.verdict)
        memory = HybridMemory((lookup_memory, network_memory), trust)
        return memory, round.shared and (lookup_shared, network_shared)


def _split(params: Params) -> tuple[Params, Params]:
    lookup, network = params.drafter or (None, None)
    return Params(params.target, lookup), Params(params.target, network)


def _chosen(trust: Trust, draft: Draft) -> Trust:
    """Choose the rows that use the lookup's ``draft``: those where it is expected to gain more."""
    length = draft.valid[:, 1:].sum(1)
    # A chain whose tokens are each accepted with probability a after the ones before:
    # a + a^2 + ... + a^length tokens.
    rate = jnp.clip(trust.rate, 0.01, 0.99)
    gain, expected = rate * (1 - rate**length) / (1 - rate), jnp.full_like(rate, _NO_SCORE)
    if draft.score is not None:
        gain, expected = trust.rate * draft.score, draft.score
    return trust.replace(looked_up=(length > 0) & (gain >= trust.gain), expected=expected)


def _updated(trust: Trust, draft: Draft, verdict: Verdict) -> Trust:
    """Update the mean of the drafter used; that of an unused lookup returns to its prior."""
    accepted = jnp.maximum(verdict.num_emitted - 1, 0)
    length = draft.valid[:, 1:].sum(1)
    tried = jnp.maximum(accepted + (accepted < length), 1)
    expected = jnp.where(trust.expected == _NO_SCORE, tried, trust.expected)
    success = jnp.minimum(accepted / jnp.maximum(expected, 0.1), 1.5)
    ran = (verdict.num_emitted > 0) & (length > 0)
    mean = lambda old, new: _MEMORY * old + (1 - _MEMORY) * new
    unused = trust.rate + _RETURN * (_RATE - trust.rate)
    rate = jnp.where(ran & trust.looked_up, mean(trust.rate, success), unused)
    gain = jnp.where(ran & ~trust.looked_up, mean(trust.gain, accepted), trust.gain)
    return trust.replace(rate=rate, gain=gain)
