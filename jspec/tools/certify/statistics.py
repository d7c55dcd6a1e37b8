"""Counts beside laws."""

import numpy as np


def lean(observed: np.ndarray, distribution: np.ndarray, some: np.ndarray) -> float:
    """How far the count of ``some`` tokens [V] is off, in units of 5 standard errors.

    Where a vocabulary is large most bins are merged: one question of all counts sees more then.
    """
    count, p = observed.sum(), distribution[some].sum()
    error = (count * p * (1 - p)) ** 0.5
    return float(abs(observed[some].sum() - count * p) / (5 * error)) if error > 1 else 0.0


def excess(observed: np.ndarray, distribution: np.ndarray) -> float:
    """Chi-square above its mean, in units of what is allowed: from 1 on the law is refused.

    Bins that expect fewer than 5 are merged; allowed are ``10 sqrt(2 df)`` above ``df``, as in
    vLLM's tests, so that what is exact all but never fails. Infinite where something was counted
    that has no probability.
    """
    if observed[distribution == 0].sum() > 0:
        return float("inf")
    expected = observed.sum() * distribution
    large = expected >= 5
    if 0 < expected[~large].sum() < 5 and large.any():  # too few still: one more joins them
        large[np.argmin(np.where(large, expected, np.inf))] = False
    merge = lambda x: np.append(x[large], x[~large].sum())
    observed, expected = merge(observed), merge(expected)
    possible = expected > 0  # nothing is left to merge where every bin is large
    observed, expected = observed[possible], expected[possible]
    statistic = ((observed - expected) ** 2 / expected).sum()
    df = max(len(expected) - 1, 1)
    return float((statistic - df) / (10 * (2 * df) ** 0.5))
