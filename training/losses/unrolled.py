"""Losses of drafters that guess one token after another.

Guess k (from 0) made at row i predicts the token after t_{i+1+k}. It is aligned with the target's
row j = i + 1 + k, which computed the distribution of that token. So all guesses about one token lie
side by side, and the target's distribution is computed once for them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models.layers import Linear, affine
from training.attention import causal
from training.batches import Batch
from training.losses.chunks import columns, loss_chunk, mean_by_chunks, take
from training.losses.distances import LOSSES, GuessLoss, overlap_of
from training.task import Metrics, Ratio

Values = Callable[[Array, Array, Array, Array], Array]


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


def unroll(
    run: Callable[..., Array],
    params: Any,
    embedded: Array,
    features: Array,
    batch: Batch,
    *,
    steps: int,
    layers: int,
    windows: tuple[int | None, ...] = (),
    through_steps: bool,
    remat: bool,
) -> list[Array]:
    """Return the outputs [B, T, D] of a network at each step on its own outputs.

    At step k, row i reads the output of step k - 1 (at step 0 its feature) and the true token
    t_{i+1+k}. It stands at position i + k and attends to the step-0 rows up to i and to its own
    later rows. Rows are in the order of step 0.

    ``run`` maps (step, params, tokens [B, T, D], features, positions, attend) to outputs.
    ``embedded`` [B, T + 1, D] are the tokens of the window, ``features`` are [B, T, D]. ``layers``
    counts those with keys of their own, ``windows`` are their sliding windows; () for none.
    Without ``through_steps`` no gradient flows from a step into the one before. ``remat`` computes
    a step again in the backward pass.
    """
    length = features.shape[1]
    segments, positions = batch.segments[:, :length], batch.positions[:, :length]

    def step_of(step: int, params, tokens: Array, features: Array, entries):
        entries = [list(layer) for layer in entries]  # keys and values of all steps

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            entries[layer].append((k, v))
            (keys, values), *later = entries[layer]
            window = windows[layer] if windows else None
            return causal(q, keys, values, segments=segments, window=window, later=later)

        return run(step, params, tokens, features, positions + step, attend), entries

    step_of = jax.checkpoint(step_of, static_argnums=0) if remat else step_of
    outputs, entries = [], [[] for _ in range(layers)]
    for step in range(steps):
        tokens = jnp.pad(embedded[:, step + 1 :], ((0, 0), (0, step), (0, 0)))
        features, entries = step_of(step, params, tokens, features, entries)
        outputs.append(features)
        features = features if through_steps else jax.lax.stop_gradient(features)
    return outputs


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
    values: Values | None = None,
) -> Metrics:
    """Return means over all B * T rows, computed in chunks; ``loss`` can be differentiated.

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
      values: the loss of every guess [B, t, S], if it is more than ``loss``; given log p
        [B, t, 1, Vd], log q [B, t, S, Vd] and the chunk's rows of ``x`` and ``normed``.

    Returns:
      ``loss``, and as ``Ratio`` ``accepted_k``, the mean probability that guess k is accepted.
    """
    steps = x.shape[2]

    def logits_of(x: Array, outputs: tuple[Array, ...], biases: tuple[Array, ...]) -> Array:
        outputs = outputs or (target_output,)
        if len(outputs) < steps:
            return linear(x, outputs[0])
        rows = zip(jnp.unstack(x, axis=2), outputs, biases or (None,) * steps, strict=True)
        return jnp.stack([affine(*row, linear) for row in rows], 2)

    def of_labels(log_q: Array, labels: Array) -> Array:
        column, known = columns(labels, vocabulary)
        column = jnp.broadcast_to(column[:, :, None], log_q.shape[:-1])
        return -take(log_q, column) * known[:, :, None]

    def score(x: Array, matrices: Any, fixed: Any) -> Metrics:
        normed, weight, labels = fixed
        log_q = jax.nn.log_softmax(logits_of(x, *matrices))
        log_p, counts = target_probs(linear(normed, target_output), vocabulary, loss)
        log_p = log_p[:, :, None]
        if values is not None:
            value = values(log_p, log_q, x, normed)
        else:
            value = of_labels(log_q, labels) if loss == "labels" else LOSSES[loss](log_p, log_q)
        alpha = jax.lax.stop_gradient(overlap_of(log_p, log_q))
        means = {"loss": (weight * counts[:, :, None] * value).sum(-1)}
        for step in range(steps):
            here = (weight[..., step] > 0).astype(alpha.dtype)
            means[f"accepted_{step}"] = Ratio(here * alpha[..., step], here)
        return means

    labels = jnp.pad(batch.tokens[:, 2:], ((0, 0), (0, 1)))  # t_{j+1}, 0 behind the last
    fixed = jax.lax.stop_gradient((normed[:, 1:], row_weights(batch, steps, decay), labels))
    return mean_by_chunks(score, x, (outputs, biases), fixed, rows=max(loss_chunk() // steps, 1))
