"""Contenders that take turns under the clock."""

import itertools

from jspec.tools.bench import timing
from jspec.tools.bench.timing import Contender, Sample, joined, race, ratios

ANYTHING = float("inf")  # cores: runs without duration may seem disturbed by any number


def part(log, name, seconds):
    """Return a run that reports so many seconds."""

    def run():
        log.append(name)
        return Sample(seconds, 0.0, [[1, 2]], passes=1)

    return run


def test_samples_add_up():
    whole = joined([Sample(1.0, 0.5, [[1, 2]], passes=1), Sample(2.0, 0.5, [[3]], passes=2)])
    assert (whole.seconds, whole.cpu_seconds, whole.passes) == (3.0, 1.0, 3)
    assert whole.tokens == [[1, 2], [3]] and whole.speed == 1.0


def test_ratios_compare_samples_of_the_same_turn():
    field = [
        Contender(name, part([], name, seconds), limit=ANYTHING)
        for name, seconds in (("a", 1.0), ("b", 4.0))
    ]
    race(field, repeats=2, patience=0)
    assert ratios(*field) == [4.0, 4.0]


def test_all_contenders_repeat_a_turn_in_which_one_was_disturbed(monkeypatch):
    log, busy = [], iter([0.0, 0.0, 0.0, 9.0, *[9.0] * 20])  # before and after each; b is hit
    monkeypatch.setattr(timing, "_busy_seconds", lambda: next(busy))
    field = [Contender(name, part(log, name, 1.0)) for name in "ab"]
    race(field, repeats=1, patience=1)
    assert log == ["a", "b", "b", "a"]
    assert [each.num_quiet for each in field] == [2, 1]


def test_a_race_on_a_busy_machine_ends_with_disturbed_samples(monkeypatch):
    log, busy = [], itertools.count(0.0, 9.0)
    monkeypatch.setattr(timing, "_busy_seconds", lambda: next(busy))
    field = [Contender(name, part(log, name, 1.0)) for name in "ab"]
    race(field, repeats=1, patience=1)
    assert len(log) == 2 * 2 and [len(each.samples) for each in field] == [2, 2]
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
