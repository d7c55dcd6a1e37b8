"""What drafters that guess several tokens ahead are judged by.

Guess k (from 0) made at row i is about the token after t_{i+1+k}. It is laid beside the target's
row j = i + 1 + k, which computed the law of that token: so all guesses about one token lie side by
side, and the target's law is computed once for them.
"""

from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.decoder import Linear
from training.batches import Batch
from training.losses import LOSSES, LossName, overlap_of
from training.objective import loss_chunk, mean_by_chunks, places, take
from training.task import Metrics, Ratio
from training.trainer.settings import bad_option

GuessLoss = LossName | Literal["labels"]  # of ``teach``


class Beside(NamedTuple):
    """What a loss may look at beside the laws, for a stretch of t rows."""

    x: Array  # aligned guesses [B, t, S, D]
    normed: Array  # the target's last hidden states after its norm [B, t, D]
    labels: Array  # int32 [B, t]: t_{j+1}, 0 behind the last


def check_loss(option: str, loss: str) -> None:
    """Refuses what ``teach`` does not know.

    Raises:
      ValueError: naming ``option``.
    """
    if loss not in ("labels", *LOSSES):
        known = ", ".join(("labels", *LOSSES))
        raise bad_option(option, loss, f"choose one of {known}")


def align(outputs: Sequence[Array]) -> Array:
    """Guesses [B, T, D] of each k, by row i, to [B, T, S, D], by j - 1; zeros where none is."""
    length = outputs[0].shape[1]
    shifted = [jnp.pad(x[:, : length - k], ((0, 0), (k, 0), (0, 0))) for k, x in enumerate(outputs)]
    return jnp.stack(shifted, 2)


def row_weights(batch: Batch, steps: int, decay: float) -> Array:
    """float32 [B, T, S]: weight of guess k beside the target's row j, at j - 1.

    A guess counts as much as t_{j+1}, the token that is guessed: so those count that drafting asks
    for, from an answer's first token, guessed behind the prompt, to its last. (The programs of
    EAGLE's authors take the weight of t_{j-1}.) What follows a window's or a document's last token
    is not known, and no guess about it counts.
    """
    length = batch.tokens.shape[1] - 1
    here, learned, weights = batch.segments[:, 1:], guessed_weights(batch)[:, 1:], []
    for step in range(steps):
        start = jnp.pad(batch.segments[:, : length - step], ((0, 0), (step, 0)))
        weights.append(jnp.where(start == here, learned * decay**step, 0.0))
    return jnp.stack(weights, -1)


def guessed_weights(batch: Batch) -> Array:
    """float32 [B, T + 1]: weight of the token whose law the target's row j computed, t_{j+1}."""
    return jnp.pad(batch.label_weights, ((0, 0), (0, 1)))


def target_probs(logits: Array, kept: Array | None, loss: str) -> tuple[Array, Array]:
    """Target's logits [..., V] to log p [..., Vd] and whether a row counts, float32 [...].

    Over a reduced vocabulary, int32 ``kept`` [Vd], the published losses (``ce``, ``kl`` and their
    like) renormalise p, and leave out rows whose likeliest token the drafter does not know; those
    made of the chance of acceptance do neither.
    """
    log_p = jax.nn.log_softmax(logits)
    everywhere = jnp.ones(logits.shape[:-1])
    if kept is None:
        return log_p, everywhere
    part = log_p[..., kept]
    if loss not in ("ce", "kl", "reverse_kl", "jsd"):
        return part, everywhere
    known = part.max(-1) >= log_p.max(-1)
    return jax.nn.log_softmax(part), known.astype(jnp.float32)


def judge(
    x: Array,
    matrix: Any,
    logits_of: Callable[[Array, Any], Array],
    *,
    distribution: Callable[[Array], tuple[Array, Array]],
    values: Callable[[Array, Array, Beside], Array],
    normed: Array,
    batch: Batch,
    weights: Array,
) -> Metrics:
    """Means over all B * T rows, a stretch at a time; ``loss`` can be differentiated.

    Args:
      x: aligned guesses [B, T, S, D], differentiated.
      matrix: pytree of output matrices, differentiated.
      logits_of: maps x [B, t, S, D] and ``matrix`` to the drafter's logits [B, t, S, Vd].
      law: maps the target's normed hidden states [B, t, D] to log p [B, t, Vd] and whether a row
        counts [B, t].
      values: maps log p [B, t, 1, Vd], log q [B, t, S, Vd] and what stands beside them to the loss
        of every guess [B, t, S].
      normed: the target's last hidden states after its norm [B, T + 1, D].
      batch: windows.
      weights: [B, T, S], as of ``row_weights``.

    Returns:
      ``loss``, and ``accepted_k``: a ``Ratio``, the mean chance that guess k is accepted over the
      rows that count.
    """
    steps = weights.shape[-1]
    labels = jnp.pad(batch.tokens[:, 2:], ((0, 0), (0, 1)))

    def score(x: Array, matrix: Any, given: Any) -> dict[str, Array]:
        normed, weight, labels = given
        log_q = jax.nn.log_softmax(logits_of(x, matrix))
        log_p, counts = distribution(normed)
        log_p = log_p[:, :, None]
        value = values(log_p, log_q, Beside(x, normed, labels))
        alpha = jax.lax.stop_gradient(overlap_of(log_p, log_q))
        means = {"loss": (weight * counts[:, :, None] * value).sum(-1)}
        for step in range(steps):
            here = (weight[..., step] > 0).astype(alpha.dtype)
            means |= {f"accepted_{step}": here * alpha[..., step], f"rows_{step}": here}
        return means

    given = jax.lax.stop_gradient((normed[:, 1:], weights, labels))
    means = mean_by_chunks(score, x, matrix, given, rows=max(loss_chunk() // steps, 1))
    for step in range(steps):
        means[f"accepted_{step}"] = Ratio(means[f"accepted_{step}"], means.pop(f"rows_{step}"))
    return means


def teach(
    x: Array,
    outputs: tuple[Array, ...],
    biases: tuple[Array, ...] = (),
    *,
    loss: GuessLoss,
    decay: float,
    linear: Linear,
    target_output: Array,
    normed: Array,
    batch: Batch,
    kept: Array | None = None,
) -> Metrics:
    """``judge`` of guesses that learn from the text, or from the target's law.

    Args:
      x: aligned guesses [B, T, S, D], differentiated.
      outputs: output matrices [D, Vd], differentiated: one each, one for all, or none where the
        target's serves.
      biases: [Vd] of each output, differentiated, or none.
      loss: labels (cross-entropy with the text) or a distance in ``LOSSES``.
      decay: weight of a guess relative to the one before.
      linear: multiplies matrices.
      target_output: the target's output matrix [D, V].
      normed: the target's last hidden states after its norm [B, T + 1, D].
      batch: windows.
      kept: int32 [Vd], ascending, where the guesses know only some tokens.
    """
    steps = x.shape[2]

    def logits_of(x: Array, matrices: tuple[tuple[Array, ...], tuple[Array, ...]]) -> Array:
        outputs, biases = matrices[0] or (target_output,), matrices[1]
        if len(outputs) < steps:
            return linear(x, outputs[0])
        rows = zip(jnp.unstack(x, axis=2), outputs, biases or (None,) * steps, strict=True)
        return jnp.stack([decoder.affine(*row, linear) for row in rows], 2)

    def values(log_p: Array, log_q: Array, beside: Beside) -> Array:
        if loss != "labels":
            return LOSSES[loss](log_p, log_q)
        place, known = places(beside.labels, kept)
        place = jnp.broadcast_to(place[:, :, None], log_q.shape[:-1])
        return -take(log_q, place) * known[:, :, None]

    return judge(
        x,
        (outputs, biases),
        logits_of,
        distribution=lambda normed: target_probs(linear(normed, target_output), kept, loss),
        values=values,
        normed=normed,
        batch=batch,
        weights=row_weights(batch, steps, decay),
    )
