"""Losses over logits of which only a chunk of rows exists at a time."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models.blocks.arithmetic import Linear
from training.trainer.task import Metrics

Score = Callable[[Any, Any, Any], Metrics]


def loss_chunk() -> int:
    """Return how many rows of logits exist at a time: few on a CPU, so they stay in its cache."""
    return 512 if jax.default_backend() == "cpu" else 8192


def next_token_loss(
    x: Array, head: Array, labels: Array, linear: Linear, weights: Array | None = None
) -> Array:
    """Return the mean weighted cross-entropy of labels [B, T] given states x [B, T, D], in nats."""
    weights = jnp.ones(labels.shape) if weights is None else weights

    def score(x: Array, head: Array, fixed: Any) -> dict[str, Array]:
        labels, weight = fixed
        return {"loss": -weight * take(jax.nn.log_softmax(linear(x, head)), labels)}

    return mean_by_chunks(score, x, head, (labels, weights))["loss"]


def mean_by_chunks(
    score: Score, x: Any, weights: Any, fixed: Any, *, rows: int | None = None
) -> Metrics:
    """Return means over [B, T] of ``score(x, weights, fixed)``, computed a chunk of T at a time.

    The mean named ``loss`` can be differentiated by ``x`` and ``weights``. Its gradient is computed
    in the forward pass, so logits are computed once and never stored. The batch axis stays whole,
    so a batch that is spread over devices does not move.

    Args:
      score: maps a chunk [B, t, ...] of ``x`` and ``fixed`` to values [B, t] or ``Ratio`` of them,
        finite also for rows of zeros, which pad the last chunk.
      x: pytree [B, T, ...].
      weights: pytree, for example the output matrix.
      fixed: pytree [B, T, ...].
      rows: approximate number of rows B * t of a chunk; None for ``loss_chunk()``.
    """
    batch, length = jax.tree.leaves(x)[0].shape[:2]
    count = -(-batch * length // (rows or loss_chunk()))
    size = -(-length // count)
    count = -(-length // size)
    inside = jnp.arange(count * size) < length

    def split(leaf: Array) -> Array:
        padding = [(0, 0), (0, count * size - length)] + [(0, 0)] * (leaf.ndim - 2)
        leaf = jnp.pad(leaf, padding) if count * size > length else leaf
        return jnp.moveaxis(leaf.reshape(batch, count, size, *leaf.shape[2:]), 1, 0)

    def joined(parts, like):
        return jnp.moveaxis(parts, 0, 1).reshape(batch, count * size, *like.shape[2:])[:, :length]

    def sums_of(x, weights, fixed, inside):
        sums = jax.tree.map(
            lambda value: jnp.where(inside, value, 0).sum() / (batch * length),
            score(x, weights, fixed),
        )
        return sums["loss"], sums

    pieces = lambda x: (*jax.tree.map(split, (x, fixed)), inside.reshape(count, size))

    def forward(x, weights):
        parts = jax.lax.map(lambda piece: sums_of(piece[0], weights, *piece[1:])[1], pieces(x))
        return jax.tree.map(lambda value: value.sum(0), parts)

    def forward_with_grads(x, weights):
        def body(total, piece):
            grad_of = jax.grad(sums_of, argnums=(0, 1), has_aux=True)
            (grad_x, extra), sums = grad_of(piece[0], weights, *piece[1:])
            return jax.tree.map(jnp.add, total, extra), (grad_x, sums)

        zeros = jax.tree.map(jnp.zeros_like, weights)
        grad_weights, (grad_x, parts) = jax.lax.scan(body, zeros, pieces(x))
        sums = jax.tree.map(lambda value: value.sum(0), parts)
        return sums, (jax.tree.map(joined, grad_x, x), grad_weights)

    def scaled(grads, cotangents):
        return jax.tree.map(lambda grad: grad * cotangents["loss"], grads)

    means = jax.custom_vjp(forward)
    means.defvjp(forward_with_grads, scaled)
    return means(x, weights)


def take(log_p: Array, ids: Array) -> Array:
    """Return log p [..., V] at ``ids`` [...]."""
    return jnp.take_along_axis(log_p, ids[..., None], axis=-1)[..., 0]


def columns(labels: Array, vocabulary: Array | None) -> tuple[Array, Array]:
    """Return the columns of labels in a reduced vocabulary [Vd], and float32 masks of its members.

    None stands for the full vocabulary.
    """
    if vocabulary is None:
        return labels, jnp.ones(labels.shape)
    column = jnp.minimum(jnp.searchsorted(vocabulary, labels), len(vocabulary) - 1)
    return column, (vocabulary[column] == labels).astype(jnp.float32)
