"""Generators of invalid values, and the check that a call rejects them properly.

``make fuzz`` runs ``JSPEC_FUZZ`` times as many examples as the suite, with other random values.
"""

import functools
import math
import os
import time

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

TIMES = int(os.environ.get("JSPEC_FUZZ", "1"))
_SECONDS = 5.0  # limit on the processor time of one call


def few(count: int):
    """Return a decorator of a property that runs ``count`` fixed examples in the suite."""
    return settings(
        max_examples=count * TIMES,
        derandomize=TIMES == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


def nested(depth: int, make):
    """Return ``make`` applied ``depth`` times to None."""
    value = None
    for _ in range(depth):
        value = make(value)
    return value


@functools.cache
def _odd_values() -> tuple:
    return (
        None, True, False, 0, 1, -1, 2, 7, 64, 10**6, 2**31, -(2**31), 2**63, 2**64, 10**12,
        10**400, 10**5000, 0.0, -0.0, 0.5, 1.0, 1.5, 1e-320, 1e308, -1e308, math.nan, math.inf,
        -math.inf, "", " ", "\0", "\n", "a\nb", "é🙂\u2028", "\ud800", "0", "-1", "1e9", "true",
        "x" * 5000, "../" * 40, "/dev/zero", [], [[]], [None], [0], [-1], [1, 1], [[0], [0]],
        [[0], [0, 0], [1]], [[0, 0]], [[-1]], [[True]], [["0"]], [0.5, 0.25], [0.9, 0.8, 0.7],
        [math.nan], [1e400, 1], [[1, 4, 2]], [[1, 2, 3], [2, 3, 4]], [10**30], {}, {"": None},
        {"a": 1}, {"method": "ngram"}, {"1": 1}, {1: 1}, (), (1,), b"", b"\xff", set(), object,
        nested(100_000, lambda value: [value]), nested(100_000, lambda value: {"parts": value}),
        [0] * 100_000, {str(index): index for index in range(10_000)},
    )  # fmt: skip


def anything():
    """Return a strategy of arbitrary JSON values and some other values."""
    odd = _odd_values()  # by index, because hypothesis calls repr and some have none
    leaves = (
        st.integers(0, len(odd) - 1).map(odd.__getitem__)
        | st.integers()
        | st.floats()
        | st.text(max_size=12)
        | st.none()
        | st.booleans()
    )
    return st.recursive(
        leaves,
        lambda inner: (
            st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4)
        ),
        max_leaves=6,
    )


def refused(call, *arguments, names=(), longest=2000, **named) -> str | None:
    """Return the message of the ValueError that a call raises; None if it works.

    The call must be fast. The message must be one short line that contains one of ``names``.
    """
    begin = time.process_time()
    try:
        call(*arguments, **named)
        message = None
    except ValueError as error:
        message = str(error)
        assert message and len(message.splitlines()) == 1, message
        assert len(message) <= longest, f"{len(message)} characters: {message[:500]}"
        assert not names or any(name in message for name in names), message
        message.encode("utf-8", "backslashreplace")
    seconds = time.process_time() - begin
    assert seconds < _SECONDS, f"{seconds} s"
    return message
