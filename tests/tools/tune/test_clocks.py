"""What a launch takes to get going is nobody's."""

import pytest

from jspec.tools.tune.clocks import beyond


def test_a_repetition_takes_what_many_do_beyond_one():
    start, each, launches = 5.0, 0.5, 3
    one = (launches * (start + each), launches)
    many = (launches * (start + 13 * each), launches * 13)
    assert beyond(one, many) == pytest.approx(each)


def test_a_launch_of_one_that_was_disturbed_makes_no_repetition_free():
    assert beyond((100.0, 1), (26.0, 14)) == 0.5


def test_where_the_first_repetition_ends_everything_a_launch_is_all_there_is():
    assert beyond((3.0, 2), (2.0, 2)) == 1.0
