"""The loss of guesses about the target's next tokens, and their probability of acceptance."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Array
from jspec.models.blocks.arithmetic import Linear, affine
from training.losses.chunks import columns, loss_chunk, mean_by_chunks, take
from training.losses.distances import LOSSES, GuessLoss, overlap_of
from training.networks.forward import Frozen, head_of
from training.trainer.task import Metrics, Ratio

# Maps log p [B, t, 1, Vd], log q [B, t, S, Vd], rows of x and of states, and labels [B, t, 1] to
# values of the guesses [B, t, S]; one is named "loss".
Values = Callable[[Array, Array, Array, Array, Array], dict[str, Array]]


class Rows(NamedTuple):
    """Rows of the target, and the S guesses beside each of them about the token behind it."""

    states: Array  # [B, R, D], the target's last hidden states after its norm
    labels: Array  # int32 [B, R], the tokens behind the rows
    weights: Array  # float32 [B, R, S], a weight for each guess
    # int32 [S] or [R, S], the k of each guess; None if there is one a row, without a number
    depths: np.ndarray | None
    # If given, a reduced vocabulary needs no other logits: float32 and int32 [B, R], log of the
    # sum of the exponentials of the target's logits, and the token with the largest.
    log_total: Array | None = None
    likeliest: Array | None = None


def target_probs(
    rows: Rows, output: Array, vocabulary: Array | None, loss: str, linear: Linear, size: int | None
) -> tuple[Array, Array]:
    """Return the target's log p [..., Vd] of rows, and float32 [...] masks of rows.

    ``output`` [D, V] is the target's output matrix, or [D, Vd] if the rows hold their totals.
    ``size`` counts the tokens of a padded vocabulary; None for all.

    Over a reduced vocabulary int32 [Vd], the losses ``ce``, ``kl``, ``reverse_kl`` and ``jsd``
    renormalise p and drop rows whose likeliest token is not in the vocabulary. The other losses,
    which train the probability of acceptance, do neither.
    """
    logits = linear(rows.states, output)[..., :size]
    if vocabulary is None:
        return jax.nn.log_softmax(logits), jnp.ones(logits.shape[:-1])
    if rows.log_total is None:
        log_p = jax.nn.log_softmax(logits)
        part = log_p[..., vocabulary]
        known = part.max(-1) >= log_p.max(-1)
    else:
        part = logits - rows.log_total[..., None]
        known = columns(rows.likeliest, vocabulary)[1]
    if loss not in ("ce", "kl", "reverse_kl", "jsd"):
        return part, jnp.ones(part.shape[:-1])
    return jax.nn.log_softmax(part), known.astype(jnp.float32)


def judge(
    x: Array,
    rows: Rows,
    outputs: tuple[Array, ...],
    biases: tuple[Array, ...] = (),
    *,
    frozen: Frozen,
    linear: Linear,
    loss: GuessLoss,
    values: Values | None = None,
    vocab_size: int | None = None,
) -> Metrics:
    """Return means over all B * R rows, computed in chunks; ``loss`` can be differentiated.

    Args:
      x: inputs of the output matrix [B, R, S, D], differentiated.
      rows: the target's, beside ``x``.
      outputs: output matrices [D, Vd], differentiated: one a guess, one for all, or none for the
        target's.
      biases: [Vd] of each output, differentiated, or none.
      frozen: the target, and the draft vocabulary if it is reduced.
      linear: multiplies matrices.
      loss: labels (cross-entropy with the text) or a distance in ``LOSSES``.
      values: the loss of every guess, if it is more than ``loss``, and other values.
      vocab_size: tokens that count, if a vocabulary is padded; None for all.

    Returns:
      ``loss``; as ``Ratio`` over the guesses that count all other ``values``, and ``accepted_k``,
      the mean probability that guess k is accepted (``accepted`` without numbers).
    """
    steps, vocabulary, target_output = x.shape[2], frozen.draft_to_target, head_of(frozen.target)
    if rows.depths is None:
        depths, names = np.int32(0), ["accepted"]
    else:
        depths, names = rows.depths, [f"accepted_{k}" for k in range(int(rows.depths.max()) + 1)]

    def logits_of(x: Array, outputs: tuple[Array, ...], biases: tuple[Array, ...]) -> Array:
        outputs = outputs or (target_output,)
        if len(outputs) < steps:
            return linear(x, outputs[0])
        each = zip(jnp.unstack(x, axis=2), outputs, biases or (None,) * steps, strict=True)
        return jnp.stack([affine(*guess, linear) for guess in each], 2)

    def plain_loss(log_p: Array, log_q: Array, labels: Array) -> Array:
        if loss != "labels":
            return LOSSES[loss](log_p, log_q)
        column, known = columns(labels, vocabulary)
        return -take(log_q, jnp.broadcast_to(column, log_q.shape[:-1])) * known

    reduced = vocabulary is not None and rows.log_total is not None
    judging = target_output[:, vocabulary] if reduced else target_output

    def score(x: Array, matrices: Any, fixed: Rows) -> Metrics:
        states, labels, weight, depth, *_ = fixed
        log_q = jax.nn.log_softmax(logits_of(x, *matrices)[..., :vocab_size])
        probs = target_probs(fixed, judging, vocabulary, loss, linear, vocab_size)
        log_p, known = (part[:, :, None] for part in probs)
        if values is None:
            scores = {"loss": plain_loss(log_p, log_q, labels[..., None])}
        else:
            scores = values(log_p, log_q, x, states, labels[..., None])
        means = {"loss": (weight * known * scores.pop("loss")).sum(-1)}
        counts = (weight > 0) * known
        for name, value in scores.items():
            means[name] = Ratio((counts * value).sum(-1), counts.sum(-1))
        alpha = jax.lax.stop_gradient(overlap_of(log_p, log_q))
        for k, name in enumerate(names):
            here = ((depth == k) & (weight > 0)).astype(alpha.dtype)
            means[name] = Ratio((here * alpha).sum(-1), here.sum(-1))
        return means

    rows = rows._replace(depths=np.broadcast_to(depths, rows.weights.shape))
    fixed, chunk = jax.lax.stop_gradient(rows), max(loss_chunk() // steps, 1)
    return mean_by_chunks(score, x, (outputs, biases), fixed, rows=chunk)
