"""Losses and metrics of the guesses of a parallel drafter, each beside the law of its token."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jspec.core.types import Array
from training.losses import overlap_of
from training.objective import mean_by_chunks
from training.slots import Slots
from training.task import Metrics, Ratio

# score(log p, log q, labels) -> values of a stretch of guesses, [B, t] each; "loss" among them
Score = Callable[[Array, Array, Array], dict[str, Array]]


def judge(
    x: Array,
    matrix: Any,
    logits_of: Callable[[Array, Any], Array],
    *,
    slots: Slots,
    truth: Array,
    labels: Array,
    distribution: Callable[[Array], tuple[Array, Array]],
    score: Score,
) -> Metrics:
    """Means over all B * M guesses, a stretch at a time; ``loss`` can be differentiated.

    Args:
      x: what stands before the output matrix, [B, M, D]; differentiated.
      matrix: pytree of output matrices; differentiated.
      logits_of: maps x [B, t, D] and ``matrix`` to logits [B, t, Vd].
      slots: the guesses.
      truth: the target's last hidden states after its norm, [B, R, D].
      labels: int32 [B, R], the token behind each of the target's rows.
      law: maps rows of ``truth`` to log p [B, t, Vd] and whether a guess counts [B, t].
      score: what is measured of a guess; ``loss`` is weighted by the guess's weight.

    Returns:
      ``loss`` by weight; as ``Ratio`` all else of ``score`` and ``accepted_k``, the mean chance
      that the guess at depth k is accepted, over the guesses that count.
    """
    depths = np.broadcast_to(slots.depths, slots.anchors.shape)
    last = int(slots.depths.max())

    def measure(x: Array, matrix: Any, given: Any) -> dict[str, Array]:
        truth, labels, weight, depth = given
        log_q = jax.nn.log_softmax(logits_of(x, matrix))
        log_p, known = distribution(truth)
        counts = (weight > 0) * known
        found = {
            name: (weight * known if name == "loss" else counts) * value
            for name, value in score(log_p, log_q, labels).items()
        }
        alpha = jax.lax.stop_gradient(overlap_of(log_p, log_q))
        for k in range(last + 1):
            here = (depth == k) & (weight > 0)
            found |= {f"accepted_{k}": here * alpha, f"rows_{k}": here * 1.0}
        return found | {"counts": counts}

    given = jax.lax.stop_gradient(
        (slots.of_judges(truth), slots.of_judges(labels), slots.weights, depths)
    )
    means = mean_by_chunks(measure, x, matrix, given)
    counts = {f"accepted_{k}": means.pop(f"rows_{k}") for k in range(last + 1)}
    every = means.pop("counts")
    others = [name for name in means if name != "loss"]
    return means | {name: Ratio(means[name], counts.get(name, every)) for name in others}
