"""Losses of drafters that guess one token after another.

Guess k (from 0) made at row i predicts the token after t_{i+1+k}. It is aligned with the target's
row j = i + 1 + k, which computed the distribution of that token. So all guesses about one token lie
side by side, and the target's distribution is computed once for them.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models.layers import Linear, affine
from training.batches import Batch
from training.errors import bad_option
from training.losses.chunks import columns, loss_chunk, mean_by_chunks, take
from training.losses.distances import LOSSES, GuessLoss, overlap_of
from training.task import Metrics, Ratio


class Rows(NamedTuple):
    """Inputs of a loss beside the two distributions, for a chunk of t rows."""

    x: Array  # aligned guesses [B, t, S, D]
    normed: Array  # the target's last hidden states after its norm [B, t, D]
    labels: Array  # int32 [B, t]: t_{j+1}, 0 behind the last


def check_loss(option: str, loss: str) -> None:
    """Raise OptionError for a loss that ``distil`` does not have."""
    if loss not in ("labels", *LOSSES):
        raise bad_option(option, loss, f"choose one of {', '.join(('labels', *LOSSES))}")


def align(outputs: Sequence[Array]) -> Array:
    """Align guesses [B, T, D] of each k, by row i, to [B, T, S, D], by j - 1; pad with zeros."""
    length = outputs[0].shape[1]
    shifted = [jnp.pad(x[:, : length - k], ((0, 0), (k, 0), (0, 0))) for k, x in enumerate(outputs)]
    return jnp.stack(shifted, 2)


def row_weights(batch: Batch, steps: int, decay: float) -> Array:
    """Return float32 [B, T, S]: weight of guess k beside the target's row j, at j - 1.

    A guess has the weight of t_{j+1}, the token that it predicts. So the guesses count that
    drafting needs: from the first token of an answer, guessed behind the prompt, to its last. (The
    programs of EAGLE's authors take the weight of t_{j-1}.) Guesses behind the last token of a
    window or document have no label and do not count.
    """
    length = batch.tokens.shape[1] - 1
    here, learned, weights = batch.segments[:, 1:], guessed_weights(batch)[:, 1:], []
    for step in range(steps):
        start = jnp.pad(batch.segments[:, : length - step], ((0, 0), (step, 0)))
        weights.append(jnp.where(start == here, learned * decay**step, 0.0))
    return jnp.stack(weights, -1)


def guessed_weights(batch: Batch) -> Array:
    """Return float32 [B, T + 1]: weight of t_{j+1}, whose distribution the target's row j has."""
    return jnp.pad(batch.label_weights, ((0, 0), (0, 1)))


def target_probs(logits: Array, vocabulary: Array | None, loss: str) -> tuple[Array, Array]:
    """Return log p [..., Vd] of the target's logits [..., V], and float32 [...] masks of rows.

    Over a reduced vocabulary int32 [Vd], the losses ``ce``, ``kl``, ``reverse_kl`` and ``jsd``
    renormalise p and drop rows whose likeliest token is not in the vocabulary. The other losses,
    which train the probability of acceptance, do neither.
    """
    log_p = jax.nn.log_softmax(logits)
    everywhere = jnp.ones(logits.shape[:-1])
    if vocabulary is None:
        return log_p, everywhere
    part = log_p[..., vocabulary]
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
    values: Callable[[Array, Array, Rows], Array],
    normed: Array,
    batch: Batch,
    weights: Array,
) -> Metrics:
    """Return means over all B * T rows, computed in chunks; ``loss`` can be differentiated.

    Args:
      x: aligned guesses [B, T, S, D], differentiated.
      matrix: pytree of output matrices, differentiated.
      logits_of: maps x [B, t, S, D] and ``matrix`` to the drafter's logits [B, t, S, Vd].
      distribution: maps the target's normed hidden states [B, t, D] to log p [B, t, Vd] and a mask
        of the rows that count [B, t].
      values: maps log p [B, t, 1, Vd], log q [B, t, S, Vd] and ``Rows`` to the loss of every guess
        [B, t, S].
      normed: the target's last hidden states after its norm [B, T + 1, D].
      batch: windows.
      weights: [B, T, S], as of ``row_weights``.

    Returns:
      ``loss``, and as ``Ratio`` ``accepted_k``, the mean probability that guess k is accepted.
    """
    steps = weights.shape[-1]
    labels = jnp.pad(batch.tokens[:, 2:], ((0, 0), (0, 1)))

    def score(x: Array, matrix: Any, fixed: Any) -> Metrics:
        normed, weight, labels = fixed
        log_q = jax.nn.log_softmax(logits_of(x, matrix))
        log_p, counts = distribution(normed)
        log_p = log_p[:, :, None]
        value = values(log_p, log_q, Rows(x, normed, labels))
        alpha = jax.lax.stop_gradient(overlap_of(log_p, log_q))
        means = {"loss": (weight * counts[:, :, None] * value).sum(-1)}
        for step in range(steps):
            here = (weight[..., step] > 0).astype(alpha.dtype)
            means[f"accepted_{step}"] = Ratio(here * alpha[..., step], here)
        return means

    fixed = jax.lax.stop_gradient((normed[:, 1:], weights, labels))
    return mean_by_chunks(score, x, matrix, fixed, rows=max(loss_chunk() // steps, 1))


def distil(
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
    vocabulary: Array | None = None,
) -> Metrics:
    """Judge guesses by the text or by the target's distribution; see ``judge``.

    Args:
      x: aligned guesses [B, T, S, D], differentiated.
      outputs: output matrices [D, Vd], differentiated: one a guess, one for all, or none for the
        target's.
      biases: [Vd] of each output, differentiated, or none.
      loss: labels (cross-entropy with the text) or a distance in ``LOSSES``.
      decay: weight of a guess relative to the one before.
      linear: multiplies matrices.
      target_output: the target's output matrix [D, V].
      normed: the target's last hidden states after its norm [B, T + 1, D].
      batch: windows.
      vocabulary: int32 [Vd], ascending, if it is reduced.
    """
    steps = x.shape[2]

    def logits_of(x: Array, matrices: tuple[tuple[Array, ...], tuple[Array, ...]]) -> Array:
        outputs, biases = matrices[0] or (target_output,), matrices[1]
        if len(outputs) < steps:
            return linear(x, outputs[0])
        rows = zip(jnp.unstack(x, axis=2), outputs, biases or (None,) * steps, strict=True)
        return jnp.stack([affine(*row, linear) for row in rows], 2)

    def values(log_p: Array, log_q: Array, rows: Rows) -> Array:
        if loss != "labels":
            return LOSSES[loss](log_p, log_q)
        column, known = columns(rows.labels, vocabulary)
        column = jnp.broadcast_to(column[:, :, None], log_q.shape[:-1])
        return -take(log_q, column) * known[:, :, None]

    return judge(
        x,
        (outputs, biases),
        logits_of,
        distribution=lambda normed: target_probs(linear(normed, target_output), vocabulary, loss),
        values=values,
        normed=normed,
        batch=batch,
        weights=row_weights(batch, steps, decay),
    )
