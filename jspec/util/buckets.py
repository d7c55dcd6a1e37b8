"""Array sizes rounded up to powers of two, so that similar calls share a compiled program."""

SMALLEST = 64


def bucket(size: int, smallest: int = SMALLEST, factor: int = 2) -> int:
    """Return the smallest ``smallest * factor ** i`` that is at least ``size``.

    >>> bucket(70), bucket(3), bucket(3, 1), bucket(70, factor=4)
    (128, 64, 4, 256)
    """
    rounded = smallest
    while rounded < size:
        rounded *= factor
    return rounded
