"""Seconds of a round, learned from the launches as they run."""

import numpy as np
from scipy.optimize import isotonic_regression

# What is believed before the first measurement: the share of a cost that all kinds of rounds have,
# and what the nodes of the pass and the length of the draft add at most; then their deviations, and
# that of what a kind has alone.
_MEAN = np.array([0.6, 0.3, 0.1])
_DEVIATION, _ALONE = np.array([0.5, 0.2, 0.1]), 0.05
_NOISE = 0.15  # standard deviation of a launch, relative to its seconds: other processes run too
_OUTLIER = 3.0  # standard deviations at which a surprise is cut: a machine may pause
# Shares of the variance before the first measurement that a launch adds, and one that surprises.
_DRIFT, _CHANGE = 1e-3, 0.1
_LEAST = 0.1  # share of an estimate that no hope goes below


class Costs:
    """Estimates of the seconds of a round of each kind.

    A kind is the length of the draft, and the nodes of the target's pass. The estimates are jointly
    normal (a Kalman filter): a launch may mix kinds, and what it took tells about all of them, and
    about similar ones. Kinds with more nodes cost no less.

    Args:
      kinds: (length, nodes) of n kinds, ascending for every length.

    Attributes:
      seconds: the estimates, [n].
    """

    def __init__(self, kinds: list[tuple[int, int]]):
        self.kinds = kinds
        lengths, nodes = np.array(kinds, float).T
        shares = nodes / nodes.max(), lengths / max(lengths.max(), 1)
        self._of_length = [np.flatnonzero(lengths == length) for length in np.unique(lengths)]
        self._features = np.stack([np.ones(len(kinds)), *shares])
        self._shape = _MEAN @ self._features
        scaled = _DEVIATION[:, None] * self._features
        self._prior = scaled.T @ scaled + _ALONE**2 * np.eye(len(kinds))
        self._mean, self._covariance = np.zeros(len(kinds)), np.zeros_like(self._prior)
        self.seconds = self._mean

    @property
    def is_known(self) -> bool:
        """True after the first launch."""
        return bool(self._mean.any())

    @property
    def doubt(self) -> np.ndarray:
        """Standard deviations of ``seconds``, [n]."""
        return np.sqrt(np.diag(self._covariance))

    @property
    def hopeful(self) -> np.ndarray:
        """The seconds if a kind is faster than it is believed to be, [n]."""
        return np.maximum(self.seconds - 2 * self.doubt, _LEAST * self.seconds)

    def learn(self, rounds: np.ndarray, seconds: float) -> bool:
        """Add a launch that took ``seconds`` for so many ``rounds`` of each kind, int [n].

        Return whether it was a surprise: all costs may have changed.
        """
        if not self.is_known:
            self._mean = seconds / (rounds @ self._shape) * self._shape
            self._drift(1)
        self._drift(_DRIFT)
        shares = self._covariance @ rounds
        deviation = np.sqrt(rounds @ shares + (_NOISE * seconds) ** 2)
        surprise, limit = seconds - rounds @ self._mean, _OUTLIER * deviation
        gain = shares / deviation**2
        self._mean = np.maximum(self._mean + gain * np.clip(surprise, -limit, limit), 1e-9)
        self._covariance = self._covariance - np.outer(gain, shares)
        is_surprise = bool(abs(surprise) > limit)
        if is_surprise:
            self._drift(_CHANGE)
        self.seconds = self._ascending()
        return is_surprise

    def _ascending(self) -> np.ndarray:
        ascending = self._mean.copy()
        for kinds in self._of_length:
            weights = 1 / np.diag(self._covariance)[kinds]
            ascending[kinds] = isotonic_regression(ascending[kinds], weights=weights).x
        return ascending

    def _drift(self, share: float) -> None:
        unit = self._mean @ self._shape / (self._shape @ self._shape)
        self._covariance = self._covariance + share * unit**2 * self._prior
