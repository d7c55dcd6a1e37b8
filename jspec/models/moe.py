"""Mixtures of experts as DeepSeek-V3 has them (arXiv 2412.19437, section 2.1.2) and GLM-4.5.

A router gives every token a score in (0, 1) of each expert; the k best, by score plus a bias that
only balances the load, are run and weighed by their scores. With groups of experts, only those of
the best groups stand for choice; a group is as good as its two best experts.

How the experts run depends on the device, because few tokens meet many experts in speculation (8
nodes of 4 rows with 8 of 256 experts each: 256 pairs). What must be avoided is reading experts that
nobody chose, and copying weights for every token.

  * On a CPU, a loop over blocks of a few tokens that share an expert: each turn reads one expert
    where it lies, so an expert is read once for ``block`` tokens and others not at all.
  * Elsewhere ``lax.ragged_dot`` over tokens sorted by expert. TPUs have it as one instruction. For
    GPUs, as for CPUs, XLA makes it a product of every token with every expert, most of them masked:
    no loss while the tokens of a pass choose most of the experts anyway and reading those is what
    costs, but dear with hundreds of experts. A loop, each turn of which waits for the host there,
    would cost a GPU more.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import ops
from jspec.core.types import Array
from jspec.models.layers import normal

_LEAST_BLOCK, _LARGEST_BLOCK = 4, 64  # tokens of one expert that a CPU multiplies at a time


@dataclasses.dataclass(frozen=True)
class MoeConfig:
    """Sizes of a mixture; static and hashable.

    Attributes:
      num_experts: E, of which a token meets ``experts_per_token``.
      experts_per_token: k.
      intermediate_size: F, of an expert.
      shared_size: of the expert that every token meets.
      first_dense: blocks, from the first, that have a plain MLP instead.
      num_groups: groups of experts.
      groups_per_token: groups whose experts stand for choice.
      normalise: whether the k weights are divided by their sum.
      scale: factor on the weights.
    """

    num_experts: int
    experts_per_token: int
    intermediate_size: int
    shared_size: int
    first_dense: int = 0
    num_groups: int = 1
    groups_per_token: int = 1
    normalise: bool = True
    scale: float = 1.0

    def __post_init__(self):
        in_group = self.num_experts // self.num_groups
        if self.num_experts % self.num_groups or in_group < 2:
            raise ValueError(
                f"{self.num_experts} experts do not make {self.num_groups} groups of two or more."
            )
        standing = self.groups_per_token * in_group
        if self.groups_per_token > self.num_groups or self.experts_per_token > standing:
            raise ValueError(
                f"{self.experts_per_token} experts a token do not fit into {self.groups_per_token} "
                f"of {self.num_groups} groups of {in_group}."
            )


@struct.dataclass
class MoeParams:
    """Weights of a mixture, but for the expert that every token meets."""

    router: Array  # [D, E]
    gate_up: Array  # [E, D, 2F]
    down: Array  # [E, F, D]
    bias: Array  # [E] float32, added to the scores when experts are chosen


def init_params(key: Array, moe: MoeConfig, hidden: int, shrink: float, dtype) -> MoeParams:
    """Random weights, as in ``decoder.init_params``."""
    keys, (experts, wide) = jax.random.split(key, 3), (moe.num_experts, moe.intermediate_size)
    return MoeParams(
        router=normal(keys[0], (hidden, experts), dtype),
        gate_up=normal(keys[1], (experts, hidden, 2 * wide), dtype),
        down=normal(keys[2], (experts, wide, hidden), dtype, shrink),
        bias=jnp.zeros((experts,), jnp.float32),
    )


def route(params: MoeParams, moe: MoeConfig, x: Array) -> tuple[Array, Array]:
    """Experts int32 [T, k] of tokens x [T, D], and their weights [T, k] in float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    scores = jax.nn.sigmoid(ops.linear(x.astype(wide), params.router.astype(wide)))
    standing = scores + params.bias.astype(wide)
    if moe.num_groups > 1:
        groups = standing.reshape(len(x), moe.num_groups, -1)
        best = lax.top_k(groups, 2)[0].sum(-1)
        chosen = lax.top_k(best, moe.groups_per_token)[1]
        open_ = (jnp.arange(moe.num_groups) == chosen[..., None]).any(1)
        standing = jnp.where(open_[..., None], groups, -jnp.inf).reshape(scores.shape)
    experts = lax.top_k(standing, moe.experts_per_token)[1]
    weights = jnp.take_along_axis(scores, experts, 1)
    if moe.normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return experts, weights * moe.scale


def mixture(
    params: MoeParams, moe: MoeConfig, x: Array, *, implementation: str | None = None
) -> Array:
    """What the chosen experts make of x [..., D], weighed and added up, in float32 (or wider).

    ``implementation`` forces "blocks" or "ragged"; None takes the device's. "blocks" cannot be
    differentiated: its loop has no fixed length.
    """
    rows = x.reshape(-1, x.shape[-1])
    experts, weights = route(params, moe, rows)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=moe.num_experts).astype(jnp.int32)
    token, weight = order // moe.experts_per_token, weights.reshape(-1)[order]
    arrays = (params.gate_up, params.down, rows, token, weight, sizes)
    if implementation is not None:
        return {"blocks": _by_blocks, "ragged": _at_once}[implementation](*arrays).reshape(x.shape)
    return lax.platform_dependent(*arrays, cpu=_by_blocks, default=_at_once).reshape(x.shape)


def _at_once(gate_up, down, x, token, weight, sizes) -> Array:
    """All (token, expert) pairs, sorted by expert, in two ragged products."""
    precision = lax.Precision.HIGHEST if gate_up.dtype == jnp.float32 else None

    def ragged(rows: Array, weights: Array) -> Array:
        return lax.ragged_dot(
            rows.astype(weights.dtype),
            weights,
            sizes,
            precision=precision,
            preferred_element_type=jnp.promote_types(weights.dtype, jnp.float32),
        )

    gate, up = jnp.split(ragged(x[token], gate_up), 2, -1)
    out = ragged(jax.nn.silu(gate) * up, down)
    return jnp.zeros(x.shape, out.dtype).at[token].add(out * weight[:, None])


def _by_blocks(gate_up, down, x, token, weight, sizes) -> Array:
    """Pairs of one expert, some at a time; experts without tokens take no turn."""
    pairs, experts = len(token), len(sizes)
    share = max(pairs // experts, 1)  # of an expert, if all are chosen alike
    block = min(max(1 << (share - 1).bit_length(), _LEAST_BLOCK), _LARGEST_BLOCK)
    turns, end = -(-sizes // block), jnp.cumsum(sizes)
    last_turn = jnp.cumsum(turns)

    def turn(index: Array, total: Array) -> Array:
        expert = jnp.searchsorted(last_turn, index, side="right")
        nth = index - (last_turn[expert] - turns[expert])
        place = end[expert] - sizes[expert] + nth * block + jnp.arange(block)
        here = jnp.minimum(place, pairs - 1)
        gate, up = jnp.split(ops.linear(x[token[here]], gate_up[expert]), 2, -1)
        out = ops.linear(jax.nn.silu(gate) * up, down[expert])
        share = jnp.where(place < end[expert], weight[here], 0)
        return total.at[token[here]].add(out * share[:, None])

    wide = jnp.promote_types(gate_up.dtype, jnp.float32)
    return lax.fori_loop(0, last_turn[-1], turn, jnp.zeros(x.shape, wide))
