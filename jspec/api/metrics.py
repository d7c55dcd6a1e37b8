"""Acceptance statistics under the names that vLLM's users know.

Two means are easily confused. ``mean_acceptance_length`` is vLLM's: tokens emitted by a round that
had a draft, the bonus token included, so 1.0 is no gain. ``tokens_per_pass`` divides by every pass
of the target, those without a draft included: it bounds the speed-up. They differ where a drafter
sometimes proposes nothing, as n-gram lookup does.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from jspec.engine.batch import Answer


@dataclasses.dataclass(frozen=True)
class Counts:
    """What was drafted and accepted, over any number of rows; ``+`` joins two.

    Attributes:
      accepted: how many drafts had 0, 1, ... K tokens accepted.
      num_draft_tokens: drafted tokens.
      num_passes: passes of the target, those without a draft included.
      num_tokens: tokens generated.
    """

    accepted: tuple[int, ...]
    num_draft_tokens: int = 0
    num_passes: int = 0
    num_tokens: int = 0

    @classmethod
    def none(cls, max_depth: int) -> "Counts":
        """Nothing yet, for drafts of up to ``max_depth`` tokens."""
        return cls((0,) * (max_depth + 1))

    @classmethod
    def of(cls, answer: Answer) -> "Counts":
        """The counts of one row."""
        accepted = tuple(int(count) for count in answer.accepted)
        return cls(accepted, answer.drafted, answer.rounds, len(answer.tokens))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            tuple(a + b for a, b in zip(self.accepted, other.accepted, strict=True)),
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_passes + other.num_passes,
            self.num_tokens + other.num_tokens,
        )

    @property
    def num_drafts(self) -> int:
        """Rounds that had a draft."""
        return sum(self.accepted)

    @property
    def num_accepted_tokens(self) -> int:
        """Drafted tokens that were accepted; bonus tokens do not count."""
        return sum(length * count for length, count in enumerate(self.accepted))

    @property
    def num_accepted_tokens_per_pos(self) -> tuple[int, ...]:
        """How many drafts had their 1st, 2nd, ... Kth token accepted."""
        return tuple(sum(self.accepted[depth:]) for depth in range(1, len(self.accepted)))

    @property
    def acceptance_per_pos(self) -> tuple[float, ...]:
        """Unconditional acceptance: of all drafts, the share whose ith token was accepted."""
        return tuple(_ratio(n, self.num_drafts) for n in self.num_accepted_tokens_per_pos)

    @property
    def mean_acceptance_length(self) -> float:
        """1 + accepted tokens / drafts."""
        return 1 + _ratio(self.num_accepted_tokens, self.num_drafts)

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted / drafted tokens. Longer drafts lower it even where they help."""
        return _ratio(self.num_accepted_tokens, self.num_draft_tokens)

    @property
    def tokens_per_pass(self) -> float:
        """Tokens / passes of the target."""
        return _ratio(self.num_tokens, self.num_passes)

    def tokens_per_second(self, seconds: float) -> float:
        """Tokens / the seconds they took."""
        return _ratio(self.num_tokens, seconds)


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def mbsu(acceptance_length: float, cost_ratio: float, num_speculative_tokens: int) -> float:
    """Memory-bound speed-up: tau / (c * gamma + 1).

    A round costs gamma passes of the drafter and one of the target, (c * gamma + 1) target passes,
    and emits tau tokens. So a free drafter (c = 0) gives tau, and the figure never exceeds tau.

    A widely copied form multiplies by c: c * tau / (c * gamma + 1). It is wrong for c = draft /
    target, where it says that a free drafter gives nothing. It comes from the equal form
    r * tau / (gamma + r) with r = target / draft = 1 / c, with the two ratios mixed up.

    Args:
      acceptance_length: tau, mean tokens a pass of the target, bonus included.
      cost_ratio: c, the time of one pass of the drafter over that of the target (their sizes,
        where both are bound by memory).
      num_speculative_tokens: gamma.

    Raises:
      ValueError: an argument is out of range.

    >>> round(mbsu(2.3, 0.0164, 3), 2)
    2.19
    """
    if acceptance_length < 1:
        raise ValueError(
            f"acceptance_length={acceptance_length} must be at least 1: count the bonus token."
        )
    if cost_ratio < 0 or num_speculative_tokens < 0:
        raise ValueError(
            f"cost_ratio={cost_ratio} and num_speculative_tokens={num_speculative_tokens} must not "
            "be negative."
        )
    return acceptance_length / (cost_ratio * num_speculative_tokens + 1)


def request_stats(answer: Answer, detailed: bool = False) -> dict[str, Any]:
    """vLLM's ``speculative_decoding_stats`` of one row, and ``tokens_per_pass``.

    ``detailed`` adds, with one entry a pass of the target in order (passes without a draft
    included, so that ``sum(per_step_accepted) + len(per_step_accepted)`` is the number of tokens):

    * ``per_step_accepted``: drafted tokens accepted, bonus not counted;
    * ``per_step_drafted``: how many were drafted;
    * ``per_step_drafted_token_ids``: which, in node order;
    * ``per_step_parents``: for drafts that are not chains, the parent of each drafted node: -1 for
      the root, else an index into the step's ``per_step_drafted_token_ids``.
    """
    counts = Counts.of(answer)
    stats: dict[str, Any] = {
        "mean_acceptance_length": counts.mean_acceptance_length,
        "draft_acceptance_rate": counts.draft_acceptance_rate,
        "acceptance_histogram": {str(n): c for n, c in enumerate(counts.accepted) if c},
        "num_spec_steps": counts.num_drafts,
        "num_accepted_draft_tokens": counts.num_accepted_tokens,
        "num_draft_tokens": counts.num_draft_tokens,
        "num_spec_tokens": len(counts.accepted) - 1,
        "tokens_per_pass": counts.tokens_per_pass,
    }
    return stats | _steps(*answer.trace) if detailed else stats


def _steps(accepted: np.ndarray, tokens: np.ndarray, parents: np.ndarray) -> dict[str, Any]:
    """The recorded rounds as lists. ``tokens`` and ``parents`` are -1 where a node is not valid."""
    ids, ups = [], []
    for row, above in zip(tokens[:, 1:], parents[:, 1:], strict=True):
        nodes = np.flatnonzero(row >= 0) + 1
        rank = {0: -1} | {int(node): index for index, node in enumerate(nodes)}
        ids.append(row[nodes - 1].tolist())
        ups.append([rank[int(up)] for up in above[nodes - 1]])
    steps = {
        "per_step_accepted": accepted.tolist(),
        "per_step_drafted": [len(step) for step in ids],
        "per_step_drafted_token_ids": ids,
    }
    is_chain = all(step == list(range(-1, len(step) - 1)) for step in ups)
    return steps if is_chain else steps | {"per_step_parents": ups}


def cut(answer: Answer, num_tokens: int) -> Answer:
    """The answer that would have been, had the row ended after ``num_tokens`` of its tokens.

    Needs the steps of every round. The round in which the last token was emitted counts as clipped,
    as the device does it at a stop token.
    """
    accepted, drafted = answer.steps
    ends = np.cumsum(accepted + 1)  # tokens emitted by the end of each round
    rounds = int(np.searchsorted(ends, num_tokens)) + 1
    accepted = accepted[:rounds].copy()
    accepted[-1] -= ends[rounds - 1] - num_tokens
    drafted = drafted[:rounds]
    nodes = () if answer.trace is None else answer.trace[1:]
    return dataclasses.replace(
        answer,
        tokens=answer.tokens[:num_tokens],
        rounds=rounds,
        drafts=int((drafted > 0).sum()),
        drafted=int(drafted.sum()),
        accepted=np.bincount(accepted[drafted > 0], minlength=len(answer.accepted)),
        steps=(accepted, drafted),
        trace=(accepted, *(part[:rounds] for part in nodes)) if nodes else None,
        logprobs=answer.logprobs and answer.logprobs.first(num_tokens),
    )


@dataclasses.dataclass(frozen=True)
class Metric:
    """One entry of ``LLM.get_metrics``."""

    name: str
    labels: dict[str, str]


@dataclasses.dataclass(frozen=True)
class Counter(Metric):
    """A number that only grows."""

    value: int


@dataclasses.dataclass(frozen=True)
class Gauge(Metric):
    """A number that goes up and down."""

    value: float


@dataclasses.dataclass(frozen=True)
class Vector(Metric):
    """Numbers that only grow, one for each drafted position."""

    values: list[int]


def entries(counts: Counts, seconds: float, labels: dict[str, str]) -> list[Metric]:
    """The counts as vLLM's counters, and the tokens a second of the ``seconds`` they took."""
    name = "vllm:spec_decode_num_{}".format
    return [
        Counter(name("drafts"), labels, counts.num_drafts),
        Counter(name("draft_tokens"), labels, counts.num_draft_tokens),
        Counter(name("accepted_tokens"), labels, counts.num_accepted_tokens),
        Vector(name("accepted_tokens_per_pos"), labels, list(counts.num_accepted_tokens_per_pos)),
        Counter("vllm:generation_tokens", labels, counts.num_tokens),
        Gauge(
            "vllm:avg_generation_throughput_toks_per_s",
            labels,
            counts.tokens_per_second(seconds),
        ),
    ]


def log_line(counts: Counts, seconds: float) -> str:
    """vLLM's log line for what was counted in ``seconds``."""
    rates: Sequence[str] = [f"{rate:.3f}" for rate in counts.acceptance_per_pos]
    return (
        f"SpecDecoding metrics: Mean acceptance length: {counts.mean_acceptance_length:.2f}, "
        f"Accepted throughput: {_ratio(counts.num_accepted_tokens, seconds):.2f} tokens/s, "
        f"Drafted throughput: {_ratio(counts.num_draft_tokens, seconds):.2f} tokens/s, "
        f"Accepted: {counts.num_accepted_tokens} tokens, "
        f"Drafted: {counts.num_draft_tokens} tokens, "
        f"Per-position acceptance rate: {', '.join(rates)}, "
        f"Avg Draft acceptance rate: {100 * counts.draft_acceptance_rate:.1f}%"
    )
