"""Mixtures of experts of DeepSeek-V3 (arXiv 2412.19437, section 2.1.2) and GLM-4.5.

A router gives each token a score in (0, 1) for every expert. The k experts with the highest score
plus bias run, weighted by their scores; the bias only balances the load. With groups of experts,
only experts of the best groups are eligible; a group's score is the sum of its two best experts.

In speculation few tokens meet many experts: 8 nodes of 4 rows with 8 of 256 experts each are 256
pairs. The implementations avoid reading unselected experts and copying weights per token.

  * On a CPU, a loop over blocks of a few tokens that share an expert. Each iteration reads one
    expert in place, so an expert is read once per block and unselected experts never.
  * Elsewhere ``lax.ragged_dot`` over tokens sorted by expert, one instruction on TPUs. On GPUs (and
    CPUs) XLA multiplies every token with every expert and masks the rest. That costs nothing while
    a pass selects most experts and reading them dominates, but is slow with hundreds of experts. A
    loop would cost a GPU more, because each iteration waits for the host.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import ops, sharding
from jspec.core.types import Array
from jspec.core.weights import as_array, matrix_of
from jspec.models.blocks.arithmetic import normal
from jspec.models.blocks.block import FeedForward, Pass
from jspec.models.blocks.mlp import GatedMlp, GatedMlpParams, gate, gated
from jspec.models.blocks.tensors import Tensor, matrix, vector

_LEAST_BLOCK, _LARGEST_BLOCK = 4, 64  # tokens per expert that a CPU multiplies at once


@dataclasses.dataclass(frozen=True)
class Experts(FeedForward):
    """A mixture of experts; static and hashable."""

    num_experts: int  # E
    experts_per_token: int  # k
    intermediate_size: int  # F, width of an expert
    shared_size: int  # width of the shared expert, which every token uses
    num_groups: int = 1
    groups_per_token: int = 1  # groups whose experts are eligible
    normalise: bool = True  # divide the k weights by their sum
    scale: float = 1.0  # factor on the weights
    column_parts: int = 1  # see ``GatedMlp``
    expert_parallel: bool = False  # Devices have some experts each, not a part of every expert.

    title = "experts"

    def __post_init__(self):
        in_group = self.num_experts // self.num_groups
        if self.num_experts % self.num_groups or in_group < 2:
            raise ValueError(
                f"{self.num_experts} experts do not make {self.num_groups} groups of two or more."
            )
        eligible = self.groups_per_token * in_group
        if self.groups_per_token > self.num_groups or self.experts_per_token > eligible:
            raise ValueError(
                f"{self.experts_per_token} experts a token do not fit into {self.groups_per_token} "
                f"of {self.num_groups} groups of {in_group}."
            )

    @property
    def dense_size(self) -> int:
        """See ``FeedForward``."""
        return self.shared_size

    @property
    def shared(self) -> GatedMlp:
        """The shared expert."""
        return GatedMlp(self.shared_size, column_parts=self.column_parts)

    def init(
        self, keys: Array, hidden: int, dtype: jnp.dtype, shrink: float = 1.0
    ) -> "ExpertsParams":
        """See ``FeedForward``."""
        routed = jax.random.split(jax.random.fold_in(keys[0], 1), 3)
        experts, wide = self.num_experts, self.intermediate_size
        return ExpertsParams(
            shared=self.shared.init(keys, hidden, dtype, shrink),
            router=normal(routed[0], (hidden, experts), dtype),
            gate_up=normal(routed[1], (experts, hidden, 2 * wide), dtype),
            down=normal(routed[2], (experts, wide, hidden), dtype, shrink),
            bias=jnp.zeros((experts,), jnp.float32),
        )

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        """See ``FeedForward``."""
        wide, count = self.intermediate_size, self.num_experts
        experts = [f"mlp.experts.{index}" for index in range(count)]
        gate_up = [f"{expert}.{part}_proj" for expert in experts for part in ("gate", "up")]
        down = [f"{expert}.down_proj" for expert in experts]
        bias = "e_score_correction_bias"
        divided = ("experts",) * 2 if self.expert_parallel else ("outputs", "inputs")
        return (
            matrix("router", ("mlp.gate",), (count,), hidden),
            matrix(
                "gate_up", gate_up, (wide,) * len(gate_up), hidden, stack=count, divided=divided[0]
            ),
            matrix("down", down, (hidden,) * count, wide, stack=count, divided=divided[1]),
            *self.shared.tensors(hidden, "shared.", "mlp.shared_experts"),
            vector("bias", ("mlp.gate",), (count,), bias, float32=True),
        )

    def divides(self, ways: int) -> bool:
        """See ``Mixer``."""
        shared = self.num_experts if self.expert_parallel else self.intermediate_size
        return shared % ways == self.shared_size % ways == 0

    def split(self, ways: int) -> "Experts":
        """See ``Mixer``."""
        return dataclasses.replace(self, column_parts=ways)

    def apply(self, params: "ExpertsParams", x: Array, run: Pass) -> Array:
        """See ``FeedForward``."""
        shared = gated(params.shared, x, run.linear, self.column_parts)
        count = None if run.packing is None else run.packing.count
        return mixture(params, self, x, count=count) + shared


@struct.dataclass
class ExpertsParams:
    """Weights of a mixture."""

    shared: GatedMlpParams  # the shared expert
    router: Array  # [D, E]
    gate_up: Array  # [E, D, 2F]
    down: Array  # [E, F, D]
    bias: Array  # [E] float32, added to the scores to select experts


def route(params: ExpertsParams, config: Experts, x: Array) -> tuple[Array, Array]:
    """Return the experts int32 [T, k] of tokens x [T, D] and their weights [T, k] in float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    scores = jax.nn.sigmoid(ops.linear(x.astype(wide), as_array(params.router).astype(wide)))
    eligible = scores + params.bias.astype(wide)
    if config.num_groups > 1:
        groups = eligible.reshape(len(x), config.num_groups, -1)
        best = lax.top_k(groups, 2)[0].sum(-1)
        selected = lax.top_k(best, config.groups_per_token)[1]
        mask = (jnp.arange(config.num_groups) == selected[..., None]).any(1)
        eligible = jnp.where(mask[..., None], groups, -jnp.inf).reshape(scores.shape)
    experts = lax.top_k(eligible, config.experts_per_token)[1]
    weights = jnp.take_along_axis(scores, experts, 1)
    if config.normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return experts, weights * config.scale


def mixture(
    params: ExpertsParams,
    config: Experts,
    x: Array,
    *,
    count: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Return the weighted sum of the selected experts for x [..., D], in float32 (or wider).

    ``count``, int32 [], is the number of leading tokens that experts run for; None for all.
    ``implementation`` forces "blocks" or "ragged"; None is the device's default. "blocks" is not
    differentiable, because its loop has a dynamic length.
    """
    rows = x.reshape(-1, x.shape[-1])
    experts, weights = route(params, config, rows)
    if count is not None:  # no expert has this number, and the sort puts it last
        experts = jnp.where(jnp.arange(len(rows))[:, None] < count, experts, config.num_experts)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=config.num_experts).astype(jnp.int32)
    token, weight = order // config.experts_per_token, weights.reshape(-1)[order]
    parts = 1 if config.expert_parallel else config.column_parts
    forms = {
        name: functools.partial(form, parts)
        for name, form in (("blocks", _by_blocks), ("ragged", _ragged))
    }
    if implementation is not None:
        run = forms[implementation]
    else:
        run = functools.partial(
            lax.platform_dependent, cpu=forms["blocks"], default=forms["ragged"]
        )
    if config.expert_parallel and sharding.num_shards() > 1:
        run_here = functools.partial(_of_device, run)
        weights = params.gate_up, params.down
        out = sharding.summed(run_here, weights, rows, token, weight, sizes)
    else:
        out = run(params.gate_up, params.down, rows, token, weight, sizes)
    return out.reshape(x.shape)


def _of_device(run, gate_up, down, x, token, weight, sizes) -> Array:
    """Run the experts that this device has; their pairs, which are consecutive, come first."""
    count = gate_up.shape[0]
    first = lax.axis_index(sharding.TENSOR) * count
    before = jnp.where(jnp.arange(len(sizes)) < first, sizes, 0).sum()
    token, weight = jnp.roll(token, -before), jnp.roll(weight, -before)
    return run(gate_up, down, x, token, weight, lax.dynamic_slice(sizes, (first,), (count,)))


def _ragged(parts, gate_up, down, x, token, weight, sizes) -> Array:
    """Multiply all (token, expert) pairs, sorted by expert, in two ragged products."""
    precision = lax.Precision.HIGHEST if gate_up.dtype == jnp.float32 else None

    def ragged(rows: Array, weights: Array) -> Array:
        return lax.ragged_dot(
            rows.astype(weights.dtype),
            as_array(weights),
            sizes,
            precision=precision,
            preferred_element_type=jnp.promote_types(weights.dtype, jnp.float32),
        )

    out = ragged(gate(ragged(x[token], gate_up), parts), down)
    return jnp.zeros(x.shape, out.dtype).at[token].add(out * weight[:, None])


def _by_blocks(parts, gate_up, down, x, token, weight, sizes) -> Array:
    """Multiply blocks of pairs of one expert; experts without tokens take no iteration."""
    pairs, experts = len(token), len(sizes)
    share = max(pairs // experts, 1)  # pairs per expert, if all are equally frequent
    block = min(max(1 << (share - 1).bit_length(), _LEAST_BLOCK), _LARGEST_BLOCK)
    turns, end = -(-sizes // block), jnp.cumsum(sizes)
    last_turn = jnp.cumsum(turns)

    def turn(index: Array, total: Array) -> Array:
        expert = jnp.searchsorted(last_turn, index, side="right")
        nth = index - (last_turn[expert] - turns[expert])
        pair = end[expert] - sizes[expert] + nth * block + jnp.arange(block)
        clipped = jnp.minimum(pair, pairs - 1)
        columns = ops.linear(x[token[clipped]], matrix_of(gate_up, expert))
        out = ops.linear(gate(columns, parts), matrix_of(down, expert))
        scale = jnp.where(pair < end[expert], weight[clipped], 0)
        return total.at[token[clipped]].add(out * scale[:, None])

    wide = jnp.promote_types(gate_up.dtype, jnp.float32)
    return lax.fori_loop(0, last_turn[-1], turn, jnp.zeros(x.shape, wide))
