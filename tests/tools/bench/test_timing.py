"""Contenders that take turns under the clock."""

import itertools

from jspec.tools.bench import timing
from jspec.tools.bench.timing import Contender, Sample, race, ratios

ANYTHING = float("inf")  # cores: runs without duration may seem disturbed by any number


def part(log, name, seconds):
    """Return a run that reports so many seconds."""

    def run():
        log.append(name)
        return Sample(seconds, 0.0, [[1, 2]], passes=1)

    return run


def test_contenders_take_turns_part_by_part_and_parts_add_up():
    log = []
    field = [
        Contender(
            name, [part(log, f"{name}{i}", scale * (1 + i)) for i in range(2)], limit=ANYTHING
        )
        for name, scale in (("a", 1.0), ("b", 4.0))
    ]
    race(field, repeats=2, patience=0)
    # Neither is always first, and equal parts run close together.
    assert log == ["a0", "b0", "b1", "a1", "b0", "a0", "a1", "b1"]
    assert [[s.seconds for s in each.samples] for each in field] == [[3.0, 3.0], [12.0, 12.0]]
    assert field[0].samples[0].passes == 2
    assert field[0].samples[0].tokens == [[1, 2], [1, 2]]
    assert ratios(*field) == [4.0, 4.0]


def test_all_contenders_repeat_a_part_in_which_one_was_disturbed(monkeypatch):
    log, busy = [], iter([0.0, 0.0, 0.0, 9.0, *[9.0] * 20])  # before and after each; b0 is hit
    monkeypatch.setattr(timing, "_busy_seconds", lambda: next(busy))
    field = [Contender(name, [part(log, f"{name}{i}", 1.0) for i in range(2)]) for name in "ab"]
    race(field, repeats=1, patience=1)
    assert log == ["a0", "b0", "a0", "b0", "b1", "a1"]
    assert all(len(each.samples) == 1 and each.samples[0].quiet(each.limit) for each in field)


def test_a_race_on_a_busy_machine_ends_with_disturbed_samples(monkeypatch):
    log, busy = [], itertools.count(0.0, 9.0)
    monkeypatch.setattr(timing, "_busy_seconds", lambda: next(busy))
    field = [Contender(name, [part(log, f"{name}{i}", 1.0) for i in range(2)]) for name in "ab"]
    race(field, repeats=1, patience=1)
    assert len(log) == 2 * (2 + 2 + 2)  # both rounds, and as many further turns as one round has
    assert [len(each.samples) for each in field] == [2, 2]
    assert not any(each.num_quiet for each in field)


def test_a_race_of_no_contenders_ends():
    race([], repeats=3, patience=5)


def test_a_race_ends_once_all_have_undisturbed_samples():
    log = []
    field = [Contender(name, part(log, name, 1.0), limit=ANYTHING) for name in "ab"]
    race(field, repeats=3, patience=5)
    assert log == ["a", "b", "b", "a", "a", "b"]


def test_no_contender_is_always_first_or_always_follows_the_same_one():
    log = []
    field = [Contender(name, part(log, name, 1.0), limit=ANYTHING) for name in "abc"]
    race(field, repeats=6, patience=0)
    rounds = ["".join(log[start : start + 3]) for start in range(0, 18, 3)]
    assert rounds == ["abc", "bca", "cab", "acb", "bac", "cba"]


def test_the_parts_of_a_disturbed_sample_are_disturbed(monkeypatch):
    busy = iter([0.0, 50.0])
    monkeypatch.setattr(timing, "_busy_seconds", lambda: next(busy))
    parts = {name: Sample(1.0, 1.0, tokens=[]) for name in "ab"}
    seen = timing.watched(lambda: Sample(2.0, 2.0, tokens=[], parts=parts))
    assert seen.foreign > 1 and {each.foreign for each in parts.values()} == {seen.foreign}
