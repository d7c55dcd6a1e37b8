"""Timing contenders against each other on a machine with other processes.

Contenders run in turns, so that a slow minute affects all of them. The best of n shows the speed of
the code, the median what happened. Disturbance is not fair: OpenMP threads that spin lose far more
to a busy neighbour than XLA's do. So each sample records how many cores other processes used.
Disturbed samples are repeated, within limits, and counted if they stay.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_JIFFY = 0.01  # seconds of a count in /proc/stat, by the kernel's ABI


class ContenderError(RuntimeError):
    """The reason why a contender cannot go on; the others can."""


@dataclasses.dataclass
class Sample:
    """One timed run."""

    seconds: float  # wall time
    cpu_seconds: float  # processor time of all threads of the contender
    tokens: list[list[int]]  # generated ids, one list a row
    passes: int | None = None  # passes of the target, summed over calls, if counted
    foreign: float | None = None  # mean cores that other processes used; None if unknown
    # the same for each part of the work, by name
    parts: "dict[str, Sample]" = dataclasses.field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Generated tokens of all rows."""
        return sum(map(len, self.tokens))

    @property
    def speed(self) -> float:
        """Tokens/s."""
        return self.num_tokens / self.seconds

    def quiet(self, limit: float) -> bool:
        """Return whether other processes used at most ``limit`` cores."""
        return self.foreign is None or self.foreign <= limit


@dataclasses.dataclass
class Contender:
    """A program to time."""

    name: str  # for tables
    run: Callable[[], Sample]
    samples: list[Sample] = dataclasses.field(default_factory=list)  # so far
    limit: float = 0.1  # cores that others may use in an undisturbed sample
    failed: str = ""  # why it left the race; "" if it did not

    @property
    def num_quiet(self) -> int:
        """Undisturbed samples."""
        return sum(sample.quiet(self.limit) for sample in self.samples)

    @property
    def usable(self) -> list[Sample]:
        """The undisturbed samples, or all of them if there are none."""
        return [sample for sample in self.samples if sample.quiet(self.limit)] or self.samples

    @property
    def speeds(self) -> list[float]:
        """Tokens/s of the usable samples."""
        return [sample.speed for sample in self.usable]

    @property
    def best(self) -> float:
        """Highest tokens/s."""
        return max(self.speeds)

    @property
    def median(self) -> float:
        """Median tokens/s."""
        return statistics.median(self.speeds)

    def summary(self) -> dict:
        """Return the figures for a JSON file."""
        return {
            "name": self.name,
            "tokens_per_second_best": round(self.best, 2),
            "tokens_per_second_median": round(self.median, 2),
            "seconds": [round(sample.seconds, 5) for sample in self.samples],
            "cpu_seconds": [round(sample.cpu_seconds, 5) for sample in self.samples],
            "foreign_cores": [sample.foreign for sample in self.samples],
            "quiet_samples": self.num_quiet,
        }


def race(contenders: Sequence[Contender], repeats: int, patience: int) -> None:
    """Run all contenders in turns until each has ``repeats`` quiet samples.

    At most ``patience`` further rounds replace disturbed samples. All contenders run in them,
    because a ratio compares samples of the same minutes. A contender that raises ContenderError
    leaves the race, with the samples that it has.
    """
    for index in range(repeats + patience):
        if all(each.num_quiet >= repeats or each.failed for each in contenders):
            return
        for each in _in_turn(contenders, index):
            if each.failed:
                continue
            try:
                each.samples.append(watched(each.run))  # at once, so that Ctrl-C loses no sample
            except ContenderError as error:
                each.failed = str(error)


def _in_turn(items: Sequence, turn: int) -> list:
    """Return the items in the order of a turn.

    Each item comes first in turn, then again in the opposite direction. So none always follows the
    same neighbour, which may leave the machine hot and slow.
    """
    cycle, first = divmod(turn, len(items))
    step = -1 if cycle % 2 else 1
    return [items[(first + step * index) % len(items)] for index in range(len(items))]


def joined(parts: Sequence[Sample]) -> Sample:
    """Return the sample that the parts, which are not ``watched`` yet, add up to."""
    seconds = sum(part.seconds for part in parts)
    cpu_seconds = sum(part.cpu_seconds for part in parts)
    tokens = [tokens for part in parts for tokens in part.tokens]
    passes = [part.passes for part in parts]
    return Sample(seconds, cpu_seconds, tokens, None if None in passes else sum(passes))


def ratios(each: Contender, plain: Contender) -> list[float]:
    """Return the speeds relative to ``plain`` turn by turn, of undisturbed turns if any."""
    pairs = list(zip(each.samples, plain.samples, strict=False))
    quiet = [pair for pair in pairs if all(sample.quiet(each.limit) for sample in pair)]
    return [sample.speed / other.speed for sample, other in quiet or pairs]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Return median, least and most."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def watched(run: Callable[[], Sample]) -> Sample:
    """Run once, and record the cores that other processes used."""
    before, start = _busy_seconds(), time.perf_counter()
    sample = run()
    after, elapsed = _busy_seconds(), time.perf_counter() - start
    if before is not None and after is not None:
        others = max(after - before - sample.cpu_seconds, 0.0)
        for each in (sample, *sample.parts.values()):
            each.foreign = round(others / elapsed, 3)
    return sample


def _busy_seconds() -> float | None:
    """Return the CPU time of all processes of the machine; None without /proc/stat."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first[1:9])
    return (user + nice + system + irq + softirq + steal) * _JIFFY
