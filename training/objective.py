"""Losses of a decoder on windows of tokens, that never hold the logits of more than one chunk."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.decoder import DecoderConfig, DecoderParams
from training.attention import attend_within
from training.batches import Batch
from training.linear import LINEARS

# Rows of logits that exist at a time: on a CPU they stay in its cache, elsewhere they fill matmuls.
LOSS_CHUNK = {"cpu": 512}
LOSS_CHUNK_ELSEWHERE = 8192


def loss_chunk() -> int:
    """Rows of logits that exist at a time on the default device."""
    return LOSS_CHUNK.get(jax.default_backend(), LOSS_CHUNK_ELSEWHERE)


def hidden_states(
    params: DecoderParams, config: DecoderConfig, tokens: Array, compute: str, remat: bool = False
) -> Array:
    """Normed last hidden states [B, T, D] of tokens [B, T], each row from position 0."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = decoder.embed(params, config, tokens)
    attend = attend_within(None, config.windows)
    x, _ = decoder.trunk(params, config, x, positions, attend, linear=LINEARS[compute], remat=remat)
    return config.norm(x, params.norm)


def packed_states(
    params: DecoderParams,
    config: DecoderConfig,
    batch: Batch,
    compute: str,
    *,
    capture_layers: tuple[int, ...] = (),
    remat: bool = False,
) -> tuple[tuple[Array, ...], Array]:
    """A decoder over packed windows: the captured hidden states, one [B, T + 1, D] a layer, and the
    last ones after the norm, [B, T + 1, D]."""
    x, captured = decoder.trunk(
        params,
        config,
        decoder.embed(params, config, batch.tokens),
        batch.positions,
        attend_within(batch.segments, config.windows),
        linear=LINEARS[compute],
        capture_layers=capture_layers,
        remat=remat,
    )
    return captured, config.norm(x, params.norm)


def head_of(params: DecoderParams) -> Array:
    """The output matrix [D, V], tied or not."""
    return params.embedding.T if params.head is None else params.head


def feature_scale(params: DecoderParams, config: DecoderConfig) -> Array:
    """How large the target's features are, []: about as large as its last norm's factors."""
    return jnp.sqrt(jnp.mean(config.norm_factor(params.norm) ** 2))


def next_token_loss(
    params: DecoderParams, config: DecoderConfig, windows: Array, compute: str, remat: bool = False
) -> tuple[Array, dict[str, Array]]:
    """Mean cross-entropy of windows [B, T + 1] in nats a token, and it again as a metric."""
    x = hidden_states(params, config, windows[:, :-1], compute, remat)

    def score(x: Array, head: Array, targets: Array) -> dict[str, Array]:
        log_p = jax.nn.log_softmax(LINEARS[compute](x, head))
        return {"loss": -take(log_p, targets)}

    means = mean_by_chunks(score, x, head_of(params), windows[:, 1:])
    return means["loss"], means


def mean_by_chunks(
    score: Callable[[Any, Any, Any], dict[str, Array]],
    x: Any,
    weights: Any,
    given: Any,
    *,
    objective: str = "loss",
    rows: int | None = None,
) -> dict[str, Array]:
    """Means over all of [B, T] of ``score(x, weights, given)``, a stretch of T at a time.

    The batch axis stays whole, so that a batch spread over devices stays where it is.

    Args:
      score: maps the stretch [B, t, ...] of ``x`` and ``given`` to values [B, t], all finite also
        where everything is zero: a last, shorter stretch is padded.
      x: pytree [B, T, ...]; differentiated.
      weights: pytree, the output matrix for one; differentiated.
      given: pytree [B, T, ...]; not differentiated.
      objective: the one mean that may be differentiated. Its gradient is taken on the way forward,
        stretch by stretch, so logits are computed once and never kept.
      rows: B * t, about; None for ``loss_chunk()``.
    """
    batch, length = jax.tree.leaves(x)[0].shape[:2]
    count = -(-batch * length // (rows or loss_chunk()))
    size = -(-length // count)
    count = -(-length // size)
    inside = jnp.arange(count * size) < length

    def stretches(tree):
        def split(leaf):
            padding = [(0, 0), (0, count * size - length)] + [(0, 0)] * (leaf.ndim - 2)
            leaf = jnp.pad(leaf, padding) if count * size > length else leaf
            return jnp.moveaxis(leaf.reshape(batch, count, size, *leaf.shape[2:]), 1, 0)

        return jax.tree.map(split, tree)

    def joined(parts, like):
        return jnp.moveaxis(parts, 0, 1).reshape(batch, count * size, *like.shape[2:])[:, :length]

    def sums_of(x, weights, given, inside):
        values = score(x, weights, given).items()
        sums = {
            name: jnp.where(inside, value, 0).sum() / (batch * length) for name, value in values
        }
        return sums[objective], sums

    def pieces(x):
        return stretches(x), stretches(given), inside.reshape(count, size)

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

    def backward(grads, cotangents):
        return jax.tree.map(lambda grad: grad * cotangents[objective], grads)

    means = jax.custom_vjp(forward)
    means.defvjp(forward_with_grads, backward)
    return means(x, weights)


def take(log_p: Array, targets: Array) -> Array:
    """log p [..., V] of the ids ``targets`` [...]."""
    return jnp.take_along_axis(log_p, targets[..., None], axis=-1)[..., 0]


def places(labels: Array, kept: Array | None) -> tuple[Array, Array]:
    """Columns of the labels among the kept tokens, and whether they are kept, float32."""
    if kept is None:
        return labels, jnp.ones(labels.shape)
    place = jnp.minimum(jnp.searchsorted(kept, labels), len(kept) - 1)
    return place, (kept[place] == labels).astype(jnp.float32)
