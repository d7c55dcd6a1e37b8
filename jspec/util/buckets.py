"""Sizes that arrays are rounded up to, so that calls of similar size share a program."""

SMALLEST = 64


def bucket(size: int, smallest: int = SMALLEST) -> int:
    """The next power of two, from ``smallest`` on.

    >>> bucket(70), bucket(3), bucket(3, 1)
    (128, 64, 4)
    """
    found = smallest
    while found < size:
        found *= 2
    return found
