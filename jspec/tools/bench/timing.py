"""Timing contenders against each other on a machine that others may be using.

Contenders run in turns, so that a slow minute is everybody's; the best of n says what the code can
do, the median what happened. Disturbance is not fair: OpenMP threads that spin lose far more to a
busy neighbour than XLA's do, so a ratio from a busy machine flatters us. So each sample carries how
many cores other processes kept busy meanwhile; samples that were disturbed are replaced, within
limits, and counted where they stay.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

_JIFFY = 0.01  # seconds of a count in /proc/stat, by the kernel's ABI


@dataclasses.dataclass
class Sample:
    """One timed run.

    Attributes:
      seconds: wall time.
      cpu_seconds: of all threads of the contender.
      tokens: generated ids, one list a row.
      passes: of the target, summed over calls, if counted.
      foreign: mean cores that other processes kept busy; None where that cannot be known.
      parts: the same of each part of the work, by its name.
    """

    seconds: float
    cpu_seconds: float
    tokens: list[list[int]]
    passes: int | None = None
    foreign: float | None = None
    parts: "dict[str, Sample]" = dataclasses.field(default_factory=dict)

    @property
    def num_tokens(self) -> int:
        """Generated tokens, all rows together."""
        return sum(map(len, self.tokens))

    def quiet(self, limit: float) -> bool:
        """Whether others used less than ``limit`` cores meanwhile."""
        return self.foreign is None or self.foreign <= limit


@dataclasses.dataclass
class Contender:
    """Something that can be run under the clock.

    Attributes:
      name: for tables.
      run: what is timed; or its parts, as many for everybody, in any order, which add up to a
        sample: contenders take turns part by part then, and only what was disturbed is run again.
      samples: so far.
      limit: cores that others may use for a sample to be undisturbed.
    """

    name: str
    run: Callable[[], Sample] | Sequence[Callable[[], Sample]]
    samples: list[Sample] = dataclasses.field(default_factory=list)
    limit: float = 0.1

    @property
    def has_quiet(self) -> bool:
        """Whether any sample was undisturbed."""
        return any(sample.quiet(self.limit) for sample in self.samples)

    @property
    def kept(self) -> list[Sample]:
        """The undisturbed samples, or all of them if there are none."""
        return [sample for sample in self.samples if sample.quiet(self.limit)] or self.samples

    @property
    def best(self) -> float:
        """Highest tokens/s."""
        return max(sample.num_tokens / sample.seconds for sample in self.kept)

    @property
    def median(self) -> float:
        """Median tokens/s."""
        return statistics.median(sample.num_tokens / sample.seconds for sample in self.kept)

    def summary(self) -> dict:
        """Figures for the JSON file."""
        return {
            "name": self.name,
            "tokens_per_second_best": round(self.best, 2),
            "tokens_per_second_median": round(self.median, 2),
            "seconds": [round(sample.seconds, 5) for sample in self.samples],
            "cpu_seconds": [round(sample.cpu_seconds, 5) for sample in self.samples],
            "foreign_cores": [sample.foreign for sample in self.samples],
            "quiet_samples": sum(sample.quiet(self.limit) for sample in self.samples),
        }


def race(contenders: Sequence[Contender], repeats: int, patience: int) -> None:
    """Runs all contenders in turns until each has ``repeats`` quiet samples.

    Gives up after ``patience`` further rounds. Every round starts with another contender, and
    nobody always follows the same one. Where samples have parts, as many turns with a part as
    ``patience`` rounds have are run again if anybody was disturbed in them.
    """
    if not contenders:
        return
    whole = callable(contenders[0].run)
    spare = 0 if whole else patience * len(contenders[0].run)
    for round_ in range(repeats + patience):
        waiting = [
            each
            for each in contenders
            if sum(sample.quiet(each.limit) for sample in each.samples) < repeats
        ]
        if not waiting:
            return
        # Everybody runs again: a ratio compares samples of the same minutes.
        if whole:
            for each in _in_turn(contenders, round_):
                each.samples.append(watched(each.run))  # at once: who is interrupted keeps it
        else:
            spare = _by_parts(contenders, round_, spare)


def _by_parts(contenders: Sequence[Contender], round_: int, spare: int) -> int:
    """Adds a sample to each; takes and returns how many disturbed turns may be run again."""
    timed = [[] for _ in contenders]
    for place in range(len(contenders[0].run)):
        while True:
            order = _in_turn(range(len(contenders)), round_ + place)
            turn = {index: watched(contenders[index].run[place]) for index in order}
            quiet = all(sample.quiet(contenders[i].limit) for i, sample in turn.items())
            if quiet or not spare:
                break
            spare -= 1
        for index, sample in turn.items():
            timed[index].append(sample)
    for each, parts in zip(contenders, timed, strict=True):
        each.samples.append(_joined(parts))
    return spare


def _in_turn(things: Sequence, turn: int) -> list:
    """They in the order of a turn: each is the first in turn, then again the other way about.

    So nobody always comes after the same one, which may leave the machine hot and slow.
    """
    count = len(things)
    cycle, first = divmod(turn, count)
    step = -1 if cycle % 2 else 1
    return [things[(first + step * place) % count] for place in range(count)]


def _joined(parts: Sequence[Sample]) -> Sample:
    """The sample that they are parts of."""
    seconds = sum(part.seconds for part in parts)
    foreign = None
    if all(part.foreign is not None for part in parts):
        foreign = round(sum(part.foreign * part.seconds for part in parts) / seconds, 3)
    passes = None
    if all(part.passes is not None for part in parts):
        passes = sum(part.passes for part in parts)
    return Sample(
        seconds,
        sum(part.cpu_seconds for part in parts),
        [tokens for part in parts for tokens in part.tokens],
        passes,
        foreign,
    )


def ratios(each: Contender, plain: Contender) -> list[float]:
    """Speed beside ``plain``, turn by turn; of undisturbed turns, if there are any."""
    pairs = list(zip(each.samples, plain.samples, strict=False))
    quiet = [pair for pair in pairs if all(s.quiet(each.limit) for s in pair)]
    speed = lambda sample: sample.num_tokens / sample.seconds
    return [speed(own) / speed(other) for own, other in quiet or pairs]


def spread(values: Sequence[float]) -> dict[str, float]:
    """Their median and ends."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def watched(run: Callable[[], Sample]) -> Sample:
    """Runs once and notes what other processes used."""
    before, start = _busy_seconds(), time.perf_counter()
    sample = run()
    after, elapsed = _busy_seconds(), time.perf_counter() - start
    if before is not None and after is not None:
        others = max(after - before - sample.cpu_seconds, 0.0)
        for each in (sample, *sample.parts.values()):
            each.foreign = round(others / elapsed, 3)
    return sample


def _busy_seconds() -> float | None:
    """CPU time that all processes of the machine have used, or None where nothing tells."""
    try:
        first = Path("/proc/stat").read_text().split("\n", 1)[0].split()
    except OSError:
        return None
    user, nice, system, _idle, _iowait, irq, softirq, steal = map(int, first[1:9])
    return (user + nice + system + irq + softirq + steal) * _JIFFY
