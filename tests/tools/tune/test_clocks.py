"""The seconds that a launch needs to start count for no repetition."""

import pytest

from jspec.tools.tune.clocks import beyond


def test_a_repetition_is_the_difference_between_many_and_one():
    start, each, launches = 5.0, 0.5, 3
    short = (launches * (start + each), launches)
    long = (launches * (start + 13 * each), launches * 13)
    assert beyond(short, long) == pytest.approx(each)


def test_a_disturbed_short_launch_makes_no_repetition_free():
    assert beyond((100.0, 1), (26.0, 14)) == 0.5


def test_without_further_repetitions_the_whole_launch_counts():
    assert beyond((3.0, 2), (2.0, 2)) == 1.0
