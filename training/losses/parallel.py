"""Losses of drafters that guess several tokens in one pass."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jspec.core.types import Array
from training.losses.chunks import mean_by_chunks
from training.losses.distances import LossName, overlap_of
from training.losses.unrolled import target_probs
from training.slots import Slots
from training.task import Metrics, Ratio

# score(log p, log q, labels) -> values of a chunk of guesses, [B, t] each; one is named "loss"
Score = Callable[[Array, Array, Array], dict[str, Array]]


def judge(
    x: Array,
    matrix: Any,
    logits_of: Callable[[Array, Any], Array],
    *,
    slots: Slots,
    states: Array,
    labels: Array,
    target_logits: Callable[[Array], Array],
    vocabulary: Array | None = None,
    loss: LossName,
    score: Score,
) -> Metrics:
    """Return means over all B * M guesses, computed in chunks; ``loss`` can be differentiated.

    Args:
      x: inputs of the output matrix, [B, M, D]; differentiated.
      matrix: pytree of output matrices; differentiated.
      logits_of: maps x [B, t, D] and ``matrix`` to logits [B, t, Vd].
      slots: the guesses.
      states: the target's last hidden states after its norm, [B, R, D].
      labels: int32 [B, R], the token behind each of the target's rows.
      target_logits: maps rows of ``states`` to the target's logits [B, t, V].
      vocabulary: int32 [Vd], ascending, if it is reduced.
      loss: name of the distance in ``score``; see ``target_probs``.
      score: values of a guess; ``loss`` is multiplied by the weight of the guess.

    Returns:
      ``loss``; as ``Ratio`` over the guesses that count all other values of ``score``, and
      ``accepted_k``, the mean probability that the guess at depth k is accepted.
    """
    depths = np.broadcast_to(slots.depths, slots.anchors.shape)
    last = int(slots.depths.max())

    def measure(x: Array, matrix: Any, fixed: Any) -> Metrics:
        states, labels, weight, depth = fixed
        log_q = jax.nn.log_softmax(logits_of(x, matrix))
        log_p, known = target_probs(target_logits(states), vocabulary, loss)
        counts = (weight > 0) * known
        values = score(log_p, log_q, labels)
        means = {"loss": weight * known * values.pop("loss")}
        means |= {name: Ratio(counts * value, counts) for name, value in values.items()}
        alpha = jax.lax.stop_gradient(overlap_of(log_p, log_q))
        for k in range(last + 1):
            here = ((depth == k) & (weight > 0)).astype(alpha.dtype)
            means[f"accepted_{k}"] = Ratio(here * alpha, here)
        return means

    fixed = slots.of_judges(states), slots.of_judges(labels), slots.weights, depths
    return mean_by_chunks(measure, x, matrix, jax.lax.stop_gradient(fixed))
