"""Mixtures of experts: a router selects k of E gated MLPs for each token and weighs them.

A router scores every expert by a sigmoid (DeepSeek-V3, arXiv 2412.19437, section 2.1.2), a softmax
(Mixtral, arXiv 2401.04088, section 2), or sparsemixer (PhiMoE, arXiv 2409.12136). The k experts
with the highest score plus bias run, weighted by their scores; the bias only balances the load.
With groups of experts, only experts of the best groups are eligible; a group's score is the sum of
its best experts.

In speculation few tokens meet many experts: 8 nodes of 4 rows with 8 of 256 experts each are 256
pairs. The implementations avoid reading unselected experts and copying weights per token.

  * On a CPU, a loop over blocks of a few tokens that share an expert. Each iteration reads one
    expert in place, so an expert is read once per block and unselected experts never.
  * Elsewhere ``ops.grouped_matmul`` over tokens sorted by expert: one instruction on TPUs, and a
    kernel on GPUs (kernels/grouped_matmul), because XLA multiplies every token with every expert
    there. A loop would cost a GPU more, because each iteration waits for the host. Kernels on both
    take quantised experts as they are stored; XLA multiplies them out.
"""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax
from jax.sharding import PartitionSpec

from jspec import ops, sharding
from jspec.core import quantized
from jspec.core.types import Array
from jspec.core.weights import Weight, as_array, matrix_of
from jspec.models.blocks.arithmetic import normal
from jspec.models.blocks.block import FeedForward, Pass
from jspec.models.blocks.mlp import GatedMlp, GatedMlpParams, gate
from jspec.models.blocks.tensors import Tensor, matrix, vector

_LEAST_BLOCK, _LARGEST_BLOCK = 4, 64  # tokens per expert that a CPU multiplies at once


@dataclasses.dataclass(frozen=True)
class ExpertNames:
    """Names of a mixture's tensors in checkpoints, below that of its layer."""

    router: str = "mlp.gate"
    bias: str = "mlp.gate.e_score_correction_bias"
    experts: str = "mlp.experts"
    parts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    shared: str = "mlp.shared_experts"
    shared_gate: str = "mlp.shared_expert_gate"
    fused: str | None = None  # see ``Tensor``; one tensor then has gate and up of all experts


@dataclasses.dataclass(frozen=True)
class ClampedSwiglu:
    """The activation of gpt-oss: gate * sigmoid(alpha * gate) * (up + 1).

    The gate is at most ``limit``, and the absolute value of up too. Gate and up are columns in
    turn, 2j and 2j + 1.
    """

    alpha: float
    limit: float

    def __call__(self, columns: Array) -> Array:
        """Return the product [..., F] of columns [..., 2F]."""
        pairs = columns.reshape(*columns.shape[:-1], -1, 2)
        gate = jnp.minimum(pairs[..., 0], self.limit)
        up = jnp.clip(pairs[..., 1], -self.limit, self.limit)
        return gate * jax.nn.sigmoid(self.alpha * gate) * (up + 1)


@dataclasses.dataclass(frozen=True)
class Experts(FeedForward):
    """A mixture of experts; static and hashable."""

    num_experts: int  # E
    experts_per_token: int  # k
    intermediate_size: int  # F, width of an expert
    shared_size: int = 0  # width of the shared expert, which every token uses; 0 for none
    num_groups: int = 1
    groups_per_token: int = 1  # groups whose experts are eligible
    normalise: bool = True  # divide the k weights by their sum
    scale: float = 1.0  # factor on the weights
    column_parts: int = 1  # see ``GatedMlp``
    expert_parallel: bool = False  # Devices have some experts each, not a part of every expert.
    scoring: Literal["sigmoid", "softmax", "sparsemixer"] = "sigmoid"
    tolerance: float = 0.0  # Sparsemixer takes logits as close if they differ by so much.
    selection_bias: bool = True  # The scores that select have a bias, those that weigh have none.
    router_bias: bool = False
    best_of_group: int = 2  # experts whose scores add up to that of their group
    weighs_inputs: bool = False  # The weights are factors on the inputs, not on the outputs.
    expert_bias: bool = False
    shared_gate: bool = False  # A sigmoid of one more projection weighs the shared expert.
    names: ExpertNames = ExpertNames()
    activation: str = "silu"  # see ``GatedMlp``
    matmul: str | None = None  # implementation of ops.grouped_matmul; None for the device's default
    swiglu: ClampedSwiglu | None = None  # instead of silu(gate) * up

    title = "experts"

    def __post_init__(self):
        in_group = self.num_experts // self.num_groups
        if self.num_experts % self.num_groups or in_group < self.best_of_group:
            raise ValueError(
                f"{self.num_experts} experts do not make {self.num_groups} groups of "
                f"{self.best_of_group} or more."
            )
        eligible = self.groups_per_token * in_group
        if self.groups_per_token > self.num_groups or self.experts_per_token > eligible:
            raise ValueError(
                f"{self.experts_per_token} experts a token do not fit into {self.groups_per_token} "
                f"of {self.num_groups} groups of {in_group}."
            )
        if self.scoring == "sparsemixer" and self.experts_per_token != 2:
            raise ValueError(
                f"sparsemixer selects 2 experts, but {self.experts_per_token} are set."
            )

    @property
    def dense_size(self) -> int:
        """See ``FeedForward``; without a shared expert, the width of all that a token uses."""
        return self.shared_size or self.experts_per_token * self.intermediate_size

    @property
    def shared(self) -> GatedMlp | None:
        """The shared expert."""
        if not self.shared_size:
            return None
        return GatedMlp(
            self.shared_size,
            column_parts=self.column_parts,
            activation=self.activation,
        )

    def init(
        self, keys: Array, hidden: int, dtype: jnp.dtype, shrink: float = 1.0
    ) -> "ExpertsParams":
        """See ``FeedForward``."""
        routed = jax.random.split(jax.random.fold_in(keys[0], 1), 3)
        experts, wide = self.num_experts, self.intermediate_size
        zeros = functools.partial(jnp.zeros, dtype=dtype)
        return ExpertsParams(
            shared=self.shared and self.shared.init(keys, hidden, dtype, shrink),
            router=normal(routed[0], (hidden, experts), dtype),
            gate_up=normal(routed[1], (experts, hidden, 2 * wide), dtype),
            down=normal(routed[2], (experts, wide, hidden), dtype, shrink),
            bias=jnp.zeros((experts,), jnp.float32) if self.selection_bias else None,
            router_bias=zeros((experts,)) if self.router_bias else None,
            gate_up_bias=zeros((experts, 2 * wide)) if self.expert_bias else None,
            down_bias=zeros((experts, hidden)) if self.expert_bias else None,
            shared_gate=zeros((hidden, 1)) if self.shared_gate else None,
        )

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        """See ``FeedForward``."""
        names, count = self.names, self.num_experts
        tensors = [matrix("router", (names.router,), (count,), hidden), *self._stacks(hidden)]
        if self.router_bias:
            tensors.append(vector("router_bias", (names.router,), (count,), "bias"))
        if self.shared is not None:
            tensors += self.shared.tensors(hidden, "shared.", names.shared)
        if self.shared_gate:
            tensors.append(matrix("shared_gate", (names.shared_gate,), (1,), hidden))
        if self.selection_bias:
            module, _, kind = names.bias.rpartition(".")
            tensors.append(vector("bias", (module,), (count,), kind, float32=True))
        return tuple(tensors)

    def _stacks(self, hidden: int) -> list[Tensor]:
        """Return the arrays of all experts."""
        names, wide, count = self.names, self.intermediate_size, self.num_experts
        columns = {"stack": count, "divided": "experts" if self.expert_parallel else "outputs"}
        rows = {"stack": count, "divided": "experts" if self.expert_parallel else "inputs"}
        whole = {"stack": count, "divided": "experts" if self.expert_parallel else None}
        if names.fused:
            kinds = "gate_up_proj", "down_proj", "gate_up_proj_bias", "down_proj_bias"
            gate_up, down, sizes = (names.experts,), (names.experts,), (2 * wide,)
            fused = {"fused": names.fused}
            columns |= fused | ({"unit": 2} if self.swiglu else {"sections": (wide, wide)})
            rows, whole = rows | fused, whole | fused
        else:
            kinds = "weight", "weight", "bias", "bias"
            experts = [f"{names.experts}.{index}" for index in range(count)]
            gate_up = [f"{expert}.{part}" for expert in experts for part in names.parts[:2]]
            down = [f"{expert}.{names.parts[2]}" for expert in experts]
            sizes = (wide,) * len(gate_up)
        outputs = (hidden,) * len(down)
        stacks = [
            matrix("gate_up", gate_up, sizes, hidden, kinds[0], **columns),
            matrix("down", down, outputs, wide, kinds[1], **rows),
        ]
        if self.expert_bias:
            stacks.append(vector("gate_up_bias", gate_up, sizes, kinds[2], **columns))
            stacks.append(vector("down_bias", down, outputs, kinds[3], **whole))
        return stacks

    def divides(self, ways: int) -> bool:
        """See ``Mixer``."""
        routed = self.num_experts if self.expert_parallel else self.intermediate_size
        return routed % ways == self.shared_size % ways == 0

    def split(self, ways: int) -> "Experts":
        """See ``Mixer``."""
        return dataclasses.replace(self, column_parts=ways)

    def apply(self, params: "ExpertsParams", x: Array, run: Pass) -> Array:
        """See ``FeedForward``."""
        shared = None
        if params.shared is not None:
            shared = self.shared.apply(params.shared, x, run)
        if params.shared_gate is not None:
            shared = shared * jax.nn.sigmoid(run.linear(x, params.shared_gate))
        count = None if run.packing is None else run.packing.count
        mixed = mixture(params, self, x, count=count)
        return mixed if shared is None else mixed + shared


@struct.dataclass
class ExpertsParams:
    """Weights of a mixture; None for those that it lacks."""

    shared: GatedMlpParams | None  # the shared expert
    router: Array  # [D, E]
    gate_up: Array  # [E, D, 2F]
    down: Array  # [E, F, D]
    bias: Array | None  # [E] float32, added to the scores to select experts
    router_bias: Array | None = None  # [E]
    gate_up_bias: Array | None = None  # [E, 2F]
    down_bias: Array | None = None  # [E, D]
    shared_gate: Array | None = None  # [D, 1]


class _Pairs(NamedTuple):
    """Tokens, and the pairs of a token and an expert, sorted by expert."""

    x: Array  # [T, D]
    token: Array  # int32 [P]
    weight: Array  # [P]
    sizes: Array  # int32 [E], pairs of each expert; those behind the last pair have none


class _Stacks(NamedTuple):
    """The weights of all experts, or of those of a device; as in ``ExpertsParams``."""

    gate_up: Array | Weight
    down: Array | Weight
    gate_up_bias: Array | None
    down_bias: Array | None

    def by_columns(self) -> "_Stacks":
        """Return how devices divide the widths of all experts."""
        inner, bias = PartitionSpec(None, sharding.TENSOR), self.gate_up_bias is not None
        return _Stacks(
            gate_up=PartitionSpec(None, None, sharding.TENSOR),
            down=inner,
            gate_up_bias=inner if bias else None,
            down_bias=PartitionSpec() if bias else None,
        )


def route(params: ExpertsParams, config: Experts, x: Array) -> tuple[Array, Array]:
    """Return the experts int32 [T, k] of tokens x [T, D] and their weights [T, k] in float32."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    logits = ops.linear(x.astype(wide), as_array(params.router).astype(wide))
    if params.router_bias is not None:
        logits = logits + params.router_bias.astype(wide)
    if config.scoring == "sparsemixer":
        return _sparsemixer(logits, config.tolerance)
    scores = (jax.nn.softmax if config.scoring == "softmax" else jax.nn.sigmoid)(logits)
    eligible = scores if params.bias is None else scores + params.bias.astype(wide)
    if config.num_groups > 1:
        groups = eligible.reshape(len(x), config.num_groups, -1)
        best = lax.top_k(groups, config.best_of_group)[0].sum(-1)
        selected = lax.top_k(best, config.groups_per_token)[1]
        mask = (jnp.arange(config.num_groups) == selected[..., None]).any(1)
        eligible = jnp.where(mask[..., None], groups, -jnp.inf).reshape(scores.shape)
    experts = lax.top_k(eligible, config.experts_per_token)[1]
    weights = jnp.take_along_axis(scores, experts, 1)
    if config.normalise:
        weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
    return experts, weights * config.scale


def _sparsemixer(logits: Array, tolerance: float) -> tuple[Array, Array]:
    """Return the two experts with the highest logits, and their weights, as of ``route``.

    A weight is the expert's share in a softmax over the logits close to its own, those of experts
    before it left out.
    """
    experts, weights, rest = [], [], logits
    for _ in range(2):
        best, expert = rest.max(-1, keepdims=True), rest.argmax(-1, keepdims=True)
        below = (best - logits) / jnp.maximum(jnp.abs(logits), best)
        close = jnp.where(below > 2 * tolerance, -jnp.inf, rest)
        experts.append(expert)
        weights.append(jnp.take_along_axis(jax.nn.softmax(close), expert, 1))
        rest = jnp.where(jnp.arange(logits.shape[1]) == expert, -jnp.inf, rest)
    return jnp.concatenate(experts, 1).astype(jnp.int32), jnp.concatenate(weights, 1)


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
    chosen = route(params, config, rows)
    out = combine(params, config, rows, *chosen, count=count, implementation=implementation)
    return out.reshape(x.shape)


def combine(
    params: ExpertsParams,
    config: Experts,
    rows: Array,
    experts: Array,
    weights: Array,
    *,
    count: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Return the ``mixture`` of tokens [T, D], given their experts and weights [T, k]."""
    if count is not None:  # no expert has this number, and the sort puts it last
        experts = jnp.where(jnp.arange(len(rows))[:, None] < count, experts, config.num_experts)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    sizes = jnp.bincount(experts.reshape(-1), length=config.num_experts).astype(jnp.int32)
    token, weight = order // config.experts_per_token, weights.reshape(-1)[order]
    stacks = _Stacks(params.gate_up, params.down, params.gate_up_bias, params.down_bias)
    pairs = _Pairs(rows, token, weight, sizes)
    if sharding.num_shards() == 1:
        return _run(config, implementation, stacks, pairs)
    if config.expert_parallel:
        run_here = functools.partial(_with_experts_here, config, implementation)
        return sharding.summed(run_here, stacks, pairs)
    # XLA splits the products of stored weights, which no kernel takes.
    if isinstance(stacks.gate_up, Weight) or not ops.has_kernel(
        "grouped_matmul", config.matmul, rows, stacks.gate_up, sizes
    ):
        return _run(config, implementation, stacks, pairs)
    run_here = functools.partial(_with_columns_here, config, implementation)
    return sharding.summed(run_here, stacks, pairs, specs=stacks.by_columns())


def _run(config: Experts, implementation: str | None, stacks: _Stacks, pairs: _Pairs) -> Array:
    """Return the sums over pairs [T, D], by an implementation of ``combine``."""
    forms = {
        name: functools.partial(form, config)
        for name, form in (("blocks", _by_blocks), ("ragged", _ragged))
    }
    if implementation is not None:
        return forms[implementation](stacks, *pairs)
    return lax.platform_dependent(stacks, *pairs, cpu=forms["blocks"], default=forms["ragged"])


def _with_columns_here(
    config: Experts, implementation: str | None, stacks: _Stacks, pairs: _Pairs
) -> Array:
    """Run the columns of all experts that this device has; one device adds the last biases."""
    if stacks.down_bias is not None:
        is_first = lax.axis_index(sharding.TENSOR) == 0
        stacks = stacks._replace(down_bias=jnp.where(is_first, stacks.down_bias, 0))
    return _run(dataclasses.replace(config, column_parts=1), implementation, stacks, pairs)


def _with_experts_here(
    config: Experts, implementation: str | None, stacks: _Stacks, pairs: _Pairs
) -> Array:
    """Run the experts that this device has; their pairs, which are consecutive, come first."""
    count = stacks.gate_up.shape[0]
    first = lax.axis_index(sharding.TENSOR) * count
    before = jnp.where(jnp.arange(len(pairs.sizes)) < first, pairs.sizes, 0).sum()
    here = _Pairs(
        x=pairs.x,
        token=jnp.roll(pairs.token, -before),
        weight=jnp.roll(pairs.weight, -before),
        sizes=lax.dynamic_slice(pairs.sizes, (first,), (count,)),
    )
    return _run(config, implementation, stacks, here)


def _ragged(config, stacks, x, token, weight, sizes) -> Array:
    """Multiply all (token, expert) pairs, sorted by expert, in two ragged products."""
    rows = x[token]
    if config.weighs_inputs:
        rows, weight = rows * weight[:, None].astype(x.dtype), jnp.ones_like(weight)
    if config.expert_bias:
        # Pairs behind the last expert have zeros as products, but biases are none.
        numbers = jnp.arange(len(token))
        expert = jnp.searchsorted(jnp.cumsum(sizes), numbers, side="right")
        expert = jnp.minimum(expert, len(sizes) - 1)
        weight = jnp.where(numbers < sizes.sum(), weight, 0)

    multiply = functools.partial(ops.grouped_matmul, implementation=config.matmul)

    def ragged(rows: Array, weights: Array | Weight, bias: Array | None) -> Array:
        out = quantized.grouped(rows, weights, sizes, multiply)
        return out if bias is None else out + bias[expert].astype(out.dtype)

    columns = ragged(rows, stacks.gate_up, stacks.gate_up_bias)
    out = ragged(_gated(config, columns), stacks.down, stacks.down_bias)
    return jnp.zeros(x.shape, out.dtype).at[token].add(out * weight[:, None])


def _by_blocks(config, stacks, x, token, weight, sizes) -> Array:
    """Multiply blocks of pairs of one expert; experts without tokens take no iteration."""
    pairs, experts = len(token), len(sizes)
    share = max(pairs // experts, 1)  # pairs per expert, if all are equally frequent
    block = min(max(1 << (share - 1).bit_length(), _LEAST_BLOCK), _LARGEST_BLOCK)
    turns, end = -(-sizes // block), jnp.cumsum(sizes)
    last_turn = jnp.cumsum(turns)

    def product(rows: Array, weights: Array, bias: Array | None, expert: Array) -> Array:
        out = ops.linear(rows, matrix_of(weights, expert))
        return out if bias is None else out + bias[expert].astype(out.dtype)

    def turn(index: Array, total: Array) -> Array:
        expert = jnp.searchsorted(last_turn, index, side="right")
        nth = index - (last_turn[expert] - turns[expert])
        pair = end[expert] - sizes[expert] + nth * block + jnp.arange(block)
        clipped = jnp.minimum(pair, pairs - 1)
        rows = x[token[clipped]]
        if config.weighs_inputs:
            rows = rows * weight[clipped][:, None].astype(x.dtype)
        columns = product(rows, stacks.gate_up, stacks.gate_up_bias, expert)
        out = product(_gated(config, columns), stacks.down, stacks.down_bias, expert)
        is_here = pair < end[expert]
        scale = jnp.where(is_here, jnp.float32(1) if config.weighs_inputs else weight[clipped], 0)
        return total.at[token[clipped]].add(out * scale[:, None])

    wide = jnp.promote_types(stacks.gate_up.dtype, jnp.float32)
    return lax.fori_loop(0, last_turn[-1], turn, jnp.zeros(x.shape, wide))


def _gated(config: Experts, columns: Array) -> Array:
    """Return the inner values [..., F] of an expert, of columns [..., 2F]."""
    if config.swiglu is not None:
        return config.swiglu(columns)
    return gate(columns, 1 if config.expert_parallel else config.column_parts, config.activation)
