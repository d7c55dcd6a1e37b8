"""Array sizes rounded up to powers of two, so that similar calls share a compiled program."""

SMALLEST = 64


def bucket(size: int, smallest: int = SMALLEST) -> int:
    """Return the smallest ``smallest * 2 ** i`` that is at least ``size``.

    >>> bucket(70), bucket(3), bucket(3, 1)
    (128, 64, 4)
    """
    rounded = smallest
    while rounded < size:
        rounded *= 2
    return rounded
