"""Acceptance statistics under vLLM's names.

Two means differ where a drafter sometimes proposes nothing, as n-gram lookup does.
``mean_acceptance_length`` is vLLM's: tokens per round with a draft, bonus token included, so 1.0 is
no gain. ``tokens_per_pass`` divides by every pass of the target, and bounds the speed-up.
"""

import dataclasses
import itertools
from typing import Any

import numpy as np

from jspec.engine.answers import Answer


@dataclasses.dataclass(frozen=True)
class Counts:
    """Counts of drafted and accepted tokens over any number of texts; ``+`` joins two."""

    accepted: tuple[int, ...]  # number of drafts with 0, 1, ... K accepted tokens
    num_draft_tokens: int = 0
    num_passes: int = 0  # passes of the target, with or without a draft
    num_tokens: int = 0  # generated

    @classmethod
    def none(cls, max_depth: int) -> "Counts":
        """Return zero counts, for drafts of up to ``max_depth`` tokens."""
        return cls((0,) * (max_depth + 1))

    @classmethod
    def of(cls, answer: Answer) -> "Counts":
        """Return the counts of one text."""
        accepted = tuple(int(count) for count in answer.accepted)
        return cls(accepted, answer.drafted, answer.rounds, len(answer.tokens))

    def __add__(self, other: "Counts") -> "Counts":
        return Counts(
            # Drafts of one text may have been shorter.
            tuple(map(sum, itertools.zip_longest(self.accepted, other.accepted, fillvalue=0))),
            self.num_draft_tokens + other.num_draft_tokens,
            self.num_passes + other.num_passes,
            self.num_tokens + other.num_tokens,
        )

    @property
    def num_drafts(self) -> int:
        """Rounds with a draft."""
        return sum(self.accepted)

    @property
    def num_accepted_tokens(self) -> int:
        """Accepted draft tokens, without bonus tokens."""
        return sum(length * count for length, count in enumerate(self.accepted))

    @property
    def num_accepted_tokens_per_pos(self) -> tuple[int, ...]:
        """Numbers of drafts whose 1st, 2nd, ... Kth token was accepted."""
        return tuple(sum(self.accepted[depth:]) for depth in range(1, len(self.accepted)))

    @property
    def acceptance_per_pos(self) -> tuple[float, ...]:
        """Unconditional acceptance: the share of all drafts whose ith token was accepted."""
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


def request_stats(answer: Answer, detailed: bool = False) -> dict[str, Any]:
    """Return vLLM's ``speculative_decoding_stats`` of one text, and ``tokens_per_pass``.

    ``detailed`` adds lists with one entry per pass of the target, with or without a draft. The sum
    and the length of ``per_step_accepted`` add up to the number of tokens.

    * ``per_step_accepted``: accepted draft tokens, without the bonus token;
    * ``per_step_drafted``: number of drafted tokens;
    * ``per_step_drafted_token_ids``: drafted tokens, in node order;
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
    """Return the recorded rounds as lists; ``tokens`` and ``parents`` are -1 for invalid nodes."""
    ids, all_parents = [], []
    for drafted, above in zip(tokens[:, 1:], parents[:, 1:], strict=True):
        nodes = np.flatnonzero(drafted >= 0) + 1
        index_of = {0: -1} | {int(node): index for index, node in enumerate(nodes)}
        ids.append(drafted[nodes - 1].tolist())
        all_parents.append([index_of[int(parent)] for parent in above[nodes - 1]])
    steps = {
        "per_step_accepted": accepted.tolist(),
        "per_step_drafted": [len(step) for step in ids],
        "per_step_drafted_token_ids": ids,
    }
    is_chain = all(step == list(range(-1, len(step) - 1)) for step in all_parents)
    return steps if is_chain else steps | {"per_step_parents": all_parents}


@dataclasses.dataclass(frozen=True)
class Metric:
    """An entry of ``LLM.get_metrics``."""

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
    """Numbers that only grow, one per draft position."""

    values: list[int]


def entries(counts: Counts, seconds: float, labels: dict[str, str]) -> list[Metric]:
    """Return the counts under vLLM's names, and the tokens per second."""
    name, rate = "vllm:spec_decode_num_{}".format, counts.tokens_per_second(seconds)
    return [
        Counter(name("drafts"), labels, counts.num_drafts),
        Counter(name("draft_tokens"), labels, counts.num_draft_tokens),
        Counter(name("accepted_tokens"), labels, counts.num_accepted_tokens),
        Vector(name("accepted_tokens_per_pos"), labels, list(counts.num_accepted_tokens_per_pos)),
        Counter("vllm:generation_tokens", labels, counts.num_tokens),
        Gauge("vllm:avg_generation_throughput_toks_per_s", labels, rate),
    ]
