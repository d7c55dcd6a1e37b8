"""The loss of a decoder on windows of tokens, shaped for speed on a CPU as on an accelerator.

Three pieces that a plain implementation gets slow on a CPU: a bfloat16 linear whose three matmuls
all take XLA's AMX path, causal attention in blocks of queries, and a cross-entropy that never holds
the logits of more than one chunk of tokens.
"""

import dataclasses
import functools as ft
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint

from jspec.models import decoder
from jspec.models.decoder import DecoderConfig, DecoderParams
from jspec.types import Array

QUERY_BLOCK = 64  # queries of one block of causal attention
LOSS_CHUNK = 1024  # tokens whose logits exist at a time


@jax.custom_vjp
def linear_bfloat16(x: Array, weight: Array) -> Array:
    """x [..., M] by weight [M, N]: bfloat16 factors, float32 sums and result."""
    return _matmul_bfloat16(x, weight)[0]


def _matmul_bfloat16(x: Array, weight: Array):
    rows = x.reshape(-1, x.shape[-1]).astype(jnp.bfloat16)  # 2-D: batched forms miss the AMX path
    weight = weight.astype(jnp.bfloat16)
    out = jnp.matmul(rows, weight, preferred_element_type=jnp.float32)
    return out.reshape(*x.shape[:-1], weight.shape[1]), (rows, weight)


def _matmul_bfloat16_back(saved, grad: Array):
    rows, weight = saved
    grad_rows = grad.reshape(-1, grad.shape[-1]).astype(jnp.bfloat16)
    grad_x = jax.lax.dot_general(
        grad_rows, weight, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return grad_x.reshape(*grad.shape[:-1], rows.shape[1]), _weight_grad(rows, grad_rows)


def _weight_grad(rows: Array, grad_rows: Array) -> Array:
    """rows [R, M] transposed by grad_rows [R, N] -> [M, N].

    The transpose is materialised, since a contraction over rows is five times slower on a CPU.
    """
    transposed = with_layout_constraint(rows.T, Layout((0, 1)))
    out = jnp.matmul(transposed, grad_rows, preferred_element_type=jnp.float32)
    # A caller that transposes the result (a tied head) must not get that folded into the matmul:
    # XLA's CPU backend has no such bfloat16 kernel and fails when it runs.
    return with_layout_constraint(out, Layout((0, 1)))


linear_bfloat16.defvjp(_matmul_bfloat16, _matmul_bfloat16_back)


def linear_float32(x: Array, weight: Array) -> Array:
    """x [..., M] by weight [M, N] in float32."""
    return x @ weight


LINEARS = {"bfloat16": linear_bfloat16, "float32": linear_float32}


def causal_attention(layer: int, q: Array, k: Array, v: Array) -> Array:
    """Causal attention of q [B, H, T, D] over k, v [B, Hkv, T, D] -> [B, H, T, D], in any layer.

    A block of queries sees only the keys up to its end, so nearly half of the square is never
    computed; each block is recomputed in the backward pass instead of being kept.
    """
    del layer
    batch, heads, length, width = q.shape
    groups = heads // k.shape[1]
    q = q.reshape(batch, k.shape[1], groups, length, width) * width**-0.5
    blocks = []
    for start in range(0, length, QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, length)
        blocks.append(_attend_block(start, q[..., start:end, :], k[..., :end, :], v[..., :end, :]))
    return jnp.concatenate(blocks, axis=-2).reshape(batch, heads, length, width)


@ft.partial(jax.checkpoint, static_argnums=0)
def _attend_block(start: int, q: Array, k: Array, v: Array) -> Array:
    """Queries [B, Hkv, G, Q, D] at positions ``start`` on, over all keys up to their end."""
    batch, kv_heads, groups, queries, width = q.shape
    rows = q.reshape(batch, kv_heads, groups * queries, width)
    scores = jnp.einsum("bhqd,bhkd->bhqk", rows, k)
    scores = scores.reshape(batch, kv_heads, groups, queries, -1)
    visible = jnp.arange(k.shape[2]) <= start + jnp.arange(queries)[:, None]
    scores = jnp.where(visible, scores, -1e30)
    weights = jnp.exp(scores - jax.lax.stop_gradient(scores.max(-1, keepdims=True)))
    mixed = jnp.einsum("bhqk,bhkd->bhqd", weights.reshape(batch, kv_heads, groups * queries, -1), v)
    return mixed.reshape(q.shape) / weights.sum(-1, keepdims=True)  # one pass less than softmax


def hidden_states(
    params: DecoderParams, config: DecoderConfig, tokens: Array, compute: str
) -> Array:
    """Normed last hidden states [B, T, D] of tokens [B, T], each row from position 0."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = decoder.embed(params, config, tokens)
    x, _ = decoder.trunk(
        params, config, x, positions, causal_attention, linear=LINEARS[compute]
    )  # fmt: skip
    return decoder.rms_norm(x, params.norm, config.norm_eps)


def head_of(params: DecoderParams) -> Array:
    """The output matrix [D, V], tied or not."""
    return params.embedding.T if params.head is None else params.head


def next_token_loss(
    params: DecoderParams, config: DecoderConfig, windows: Array, compute: str
) -> tuple[Array, dict[str, Array]]:
    """Mean cross-entropy of windows [B, T + 1] in nats a token, and it again as a metric."""
    x = hidden_states(params, config, windows[:, :-1], compute)

    def score(x: Array, head: Array, targets: Array) -> dict[str, Array]:
        log_p = jax.nn.log_softmax(LINEARS[compute](x, head))
        return {"loss": -_take(log_p, targets)}

    means = mean_by_chunks(score, _flat(x), head_of(params), _flat(windows[:, 1:]))
    return means["loss"], means


DISTANCES = ("kl", "overlap")


@dataclasses.dataclass(frozen=True)
class Teacher:
    """Settings of distillation: the teacher's sizes, and how the two losses are mixed."""

    config: DecoderConfig
    weight: float  # of the distance from the teacher; the next-token loss has the rest
    distance: str = "kl"  # or "overlap": -log of the chance that a drafted token is accepted


def distillation_loss(
    params: DecoderParams,
    config: DecoderConfig,
    windows: Array,
    compute: str,
    teacher: Teacher,
    teacher_params: DecoderParams,
) -> tuple[Array, dict[str, Array]]:
    """The distance from the teacher mixed with the next-token loss, over windows [B, T + 1].

    Metrics: ``loss`` (next token), ``kl``, and ``overlap`` = sum of min(p, q), which is the chance
    that speculative sampling accepts a token that the student drafts (arXiv 2211.17192, section 3).
    """
    x = hidden_states(params, config, windows[:, :-1], compute)
    taught = jax.lax.stop_gradient(
        hidden_states(teacher_params, teacher.config, windows[:, :-1], compute)
    )
    teacher_head = head_of(teacher_params)

    def score(x: Array, head: Array, given: tuple[Array, Array]) -> dict[str, Array]:
        targets, taught = given
        log_q = jax.nn.log_softmax(LINEARS[compute](x, head))
        log_p = jax.nn.log_softmax(LINEARS[compute](taught, teacher_head))
        p = jnp.exp(log_p)
        loss, kl = -_take(log_q, targets), jnp.sum(p * (log_p - log_q), -1)
        overlap = jnp.sum(jnp.minimum(p, jnp.exp(log_q)), -1)
        distance = kl if teacher.distance == "kl" else -jnp.log(overlap)
        mixed = teacher.weight * distance + (1 - teacher.weight) * loss
        return {"objective": mixed, "loss": loss, "kl": kl, "overlap": overlap}

    given = (_flat(windows[:, 1:]), _flat(taught))
    means = mean_by_chunks(score, _flat(x), head_of(params), given, objective="objective")
    return means.pop("objective"), means


def mean_by_chunks(
    score: Callable[[Array, Array, Any], dict[str, Array]],
    x: Array,
    head: Array,
    given: Any,
    objective: str = "loss",
) -> dict[str, Array]:
    """Means over rows of ``score(x, head, given)``, a chunk of rows at a time.

    ``score`` maps x [C, D], head [D, V] and the chunk's rows of the pytree ``given`` to values [C].
    Only ``objective`` may be differentiated, by ``x`` and ``head``: its gradient is taken on the
    way forward, chunk by chunk, so logits are computed once and never kept.
    """
    rows = x.shape[0]
    chunk = next(size for size in range(min(LOSS_CHUNK, rows), 0, -1) if rows % size == 0)

    def chunked(x):
        split = lambda a: a.reshape(rows // chunk, chunk, *a.shape[1:])
        return jax.tree.map(split, (x, given))

    def chunk_sums(x, head, given):
        sums = {name: value.sum() / rows for name, value in score(x, head, given).items()}
        return sums[objective], sums

    def forward(x, head):
        parts = jax.lax.map(lambda part: chunk_sums(part[0], head, part[1])[1], chunked(x))
        return jax.tree.map(lambda value: value.sum(0), parts)

    def forward_with_grads(x, head):
        def body(grad_head, part):
            grad_of = jax.grad(chunk_sums, argnums=(0, 1), has_aux=True)
            (grad_x, extra), sums = grad_of(part[0], head, part[1])
            return grad_head + extra, (grad_x, sums)

        grad_head, (grad_x, parts) = jax.lax.scan(body, jnp.zeros_like(head), chunked(x))
        sums = jax.tree.map(lambda value: value.sum(0), parts)
        return sums, (grad_x.reshape(x.shape), grad_head)

    def backward(grads, cotangents):
        return jax.tree.map(lambda grad: grad * cotangents[objective], grads)

    means = jax.custom_vjp(forward)
    means.defvjp(forward_with_grads, backward)
    return means(x, head)


def _flat(array: Array) -> Array:
    """[B, T, ...] to [B * T, ...]."""
    return array.reshape(-1, *array.shape[2:])


def _take(log_p: Array, targets: Array) -> Array:
    return jnp.take_along_axis(log_p, targets[:, None], axis=-1)[:, 0]
