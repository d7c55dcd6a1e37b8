"""Statistics that compare counts with a distribution."""

import numpy as np


def bias(observed: np.ndarray, probs: np.ndarray, tokens: np.ndarray) -> float:
    """Return how far the count of ``tokens`` (bool [V]) is off, in units of 5 standard errors.

    In a large vocabulary chi-square merges most bins; a single test of all counts sees more then.
    """
    count, p = observed.sum(), probs[tokens].sum()
    error = (count * p * (1 - p)) ** 0.5
    return float(abs(observed[tokens].sum() - count * p) / (5 * error)) if error > 1 else 0.0


def excess(observed: np.ndarray, probs: np.ndarray) -> float:
    """Return chi-square above its mean, relative to the tolerance: from 1 on ``probs`` is refuted.

    Bins that expect fewer than 5 are merged. The tolerance is ``10 sqrt(2 df)`` above ``df``, as in
    vLLM's tests, so that an exact rule almost never fails. The result is infinite if a count has
    probability 0.
    """
    if observed[probs == 0].sum() > 0:
        return float("inf")
    expected = observed.sum() * probs
    large = expected >= 5
    if 0 < expected[~large].sum() < 5 and large.any():  # merge one more bin
        large[np.argmin(np.where(large, expected, np.inf))] = False
    merge = lambda x: np.append(x[large], x[~large].sum())
    observed, expected = merge(observed), merge(expected)
    possible = expected > 0  # the merged bin is empty where every bin is large
    observed, expected = observed[possible], expected[possible]
    statistic = ((observed - expected) ** 2 / expected).sum()
    df = max(len(expected) - 1, 1)
    return float((statistic - df) / (10 * (2 * df) ** 0.5))
