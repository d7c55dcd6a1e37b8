"""The cells of the roofline table: launches of large models over pages, as ``LLM`` runs them."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format
from jax.sharding import (
    AxisType,
    Mesh,
    NamedSharding,
    PartitionSpec,
    Sharding,
    SingleDeviceSharding,
)

from jspec.core import entries
from jspec.core.quantized import SCHEMES, Factors, Scheme, is_multiplied_out, quantize
from jspec.core.types import Params
from jspec.core.weights import Transposed, Weight, size_of
from jspec.drafters import Eagle
from jspec.drafters.none import NoDrafter
from jspec.engine import pages, slots
from jspec.engine.loop import init_shared, launch
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile, request_of
from jspec.kernels.tree_attention.pallas_gpu import MAX_FEATURES
from jspec.models import decoder, layouts, partition
from jspec.models.blocks.delta_rule import DeltaRule
from jspec.models.blocks.mlp import GatedMlp
from jspec.models.heads import eagle
from jspec.models.quantised import as_divided, for_kernel
from jspec.sharding import TENSOR
from jspec.sharding import mesh as mesh_lib
from jspec.sharding.placement import Placement
from jspec.util.cache_dtypes import NAMES
from tests import networks
from tests.aot.models import MODELS
from tests.aot.programs import PLATFORMS

MAX_MODEL_LEN = 16384  # Tokens that the table of pages has room for, in each row.
DRAFT_VOCABULARY = 32000  # as of the published EAGLE-3 heads
KERNELS = {"tpu": "pallas_tpu", "cuda": "pallas_gpu"}
EXPERT_KERNELS = {"tpu": "xla", "cuda": "pallas_gpu"}


@dataclasses.dataclass(frozen=True)
class Cell:
    """A launch of a server whose rows all have the same number of committed tokens."""

    device: str
    model: str
    batch: int
    context: int
    nodes: int  # N; 1 for no drafter, else an EAGLE-3 head and a chain of N - 1
    sampled: bool = False
    tp: int = 1
    draft_tp: int = 1
    attention: str = "xla"  # or "kernel", the Pallas kernel of the device
    kv_cache_dtype: str = "auto"  # Numbers of the target's cache; the drafter's are bfloat16.
    quantization: str | None = None  # Matrices of the target have it.
    layouts: bool = False  # weights in the layouts of ``models.layouts``, not in the default ones

    @property
    def name(self) -> str:
        """The key in the table, below the device's."""
        sampled = "sampled" if self.sampled else "greedy"
        tokens = f"{self.context // 1024}k"
        words = (self.model, f"B {self.batch}", tokens, f"N {self.nodes}", sampled, self.attention)
        tp, laid = [f"TP {self.tp}"] * (self.tp > 1), ["layouts"] * self.layouts
        draft_tp = [f"draft TP {self.draft_tp}"] * (self.draft_tp > 1)
        cache = [self.kv_cache_dtype] * (self.kv_cache_dtype != "auto")
        weights = [f"{self.quantization} weights"] * (self.quantization is not None)
        return ", ".join((*words, *weights, *cache, *tp, *draft_tp, *laid))

    def num_pages(self, window: int | None = None) -> int:
        """Return the pages that hold what all rows see, and the null page."""
        tokens = min(self.context, (window or self.context) + pages.PAGE_SIZE)
        return self.batch * -(-(tokens + self.nodes) // pages.PAGE_SIZE) + 1


# The blocks of GGUF, too, and those of gpt-oss, in which experts alone are.
_MXFP4 = "mxfp4"
_SCHEMES = SCHEMES | {
    "q4_0": Scheme("q4_0", "int4", 8.0, (32,)),
    "q4_1": Scheme("q4_1", "uint4", 15.0, (32,)),
    "q4_k": Scheme("q4_k", "uint4", 15.0, (32,)),
    "q6_k": Scheme("q6_k", "int8", 32.0, (16,)),
    _MXFP4: Scheme(_MXFP4, "float4_e2m1fn", 6.0, (32,)),
}
_BLOCKS = ("q4_1", "q4_k", "q6_k")  # kinds that have minima or outer factors
_SUPERBLOCK = 256  # numbers
_8B = Cell("", "llama-8b", 8, 2048, 5, attention="kernel")


def _cells(device: str, *changes: dict[str, Any]) -> tuple[Cell, ...]:
    """Return cells of a device, each a change of ``_8B``."""
    return tuple(dataclasses.replace(_8B, device=device, **change) for change in changes)


_XLA, _PLAIN, _ONE = {"attention": "xla"}, {"nodes": 1}, {"batch": 1}
_MOE, _HYBRID = {"model": "qwen3-30b-a3b"}, {"model": "qwen3.5-35b-a3b"}
_NARROW = _MOE | {"quantization": "int4"}, {"model": "gpt-oss-20b", "quantization": _MXFP4}
_LONG, _LAID, _70B = {"batch": 32, "context": 8192}, {"layouts": True}, {"model": "llama-70b"}
_PARTS = {"tp": 4} | _LAID, {"tp": 8, "draft_tp": 8} | _LAID
TABLE = (
    *_cells(
        "v6e",
        _ONE | _PLAIN | _XLA,
        _ONE | _PLAIN,
        _ONE | _XLA,
        _ONE,
        _PLAIN | _XLA,
        _XLA,
        {},
        *({"kv_cache_dtype": name} for name in ("fp8", "int8")),
        *({"quantization": name} for name in ("fp8", "int8", "int4", "q4_0", "q4_1", "q4_k")),
        {"quantization": "int4", "batch": 16},
        _LAID,
        _LONG | _LAID,
        *_PARTS,
        _70B | {"tp": 8} | _LAID,
        *(_MOE | change for change in (_ONE | _PLAIN, _ONE, {})),
        *(_HYBRID | change for change in (_ONE, {})),
        *(model | change for model in _NARROW for change in (_ONE, {})),
    ),
    *_cells("v5e", _XLA, {}, *_PARTS),
    *_cells(
        "tpu7x",
        _XLA | _LAID,
        {},
        _LAID,
        *_PARTS,
        *(_70B | {"tp": tp} | _LAID for tp in (4, 8)),
    ),
    *_cells(
        "h200",
        _ONE | _PLAIN | _XLA,
        _ONE | _PLAIN,
        _ONE | _XLA,
        _ONE,
        _PLAIN | _XLA,
        _PLAIN,
        _XLA,
        {},
        _LONG | _XLA,
        _LONG,
        {"nodes": 16},
        {"sampled": True},
        {"kv_cache_dtype": "fp8"} | _XLA,
        *({"kv_cache_dtype": name} for name in ("fp8", "int8")),
        *({"quantization": name} for name in ("fp8", "int8", "int4", "q4_0", *_BLOCKS)),
        {"model": "gemma-27b", "context": 8192},
        _70B,
        *({"tp": tp} for tp in (4, 8)),
        *(model | {"tp": 4, "quantization": "int4"} for model in ({}, _70B)),
        *(_70B | {"tp": tp} for tp in (4, 8)),
        *({"tp": tp, "draft_tp": tp} for tp in (4, 8)),
        *(_MOE | change for change in (_ONE | _PLAIN, _ONE | _XLA, _ONE, _XLA, {}, {"tp": 4})),
        *(_HYBRID | change for change in (_ONE, {})),
        *(model | change for model in _NARROW for change in (_ONE, {})),
    ),
)


class Placing:
    """Puts abstract arrays on described devices, weights in their layouts if ``layouts``."""

    def __init__(self, devices: list, *, layouts: bool):
        self.mesh, self._count = None, len(devices)
        self._kind = devices[0].device_kind if layouts else ""
        self._whole = SingleDeviceSharding(devices[0])
        if len(devices) > 1:
            self.mesh = Mesh(np.array(devices), (TENSOR,), axis_types=(AxisType.Auto,))
            self._whole = NamedSharding(self.mesh, PartitionSpec())

    def whole(self, tree: Any) -> Any:
        """Put arrays on every device."""
        return jax.tree.map(lambda leaf: _on(leaf, self._whole), tree)

    def state(self, tree: Any) -> Any:
        """Put a state or pools on the devices, the entries of the target by heads."""
        if self.mesh is None:
            return self.whole(tree)
        with mesh_lib.on(self.mesh):
            return entries.settled(tree)

    def weights(self, params: Params, plan: Plan, cell: Cell) -> Params:
        """Put weights on the devices, in parts as ``cell`` has them."""
        rules = {}
        if cell.tp > 1:
            rules["target"] = partition.rules(plan.target.config, cell.tp)
        if cell.draft_tp > 1:
            rules["drafter"] = partition.draft_rules(plan.drafter.config, cell.draft_tp)

        def one(path, leaf):
            keys = partition.path_of(path)
            place, whose = self._whole, rules.get(keys[0], {})
            if keys[1:] in whose:
                place = NamedSharding(self.mesh, whose[keys[1:]].spec)
            if isinstance(leaf, Weight):
                if self.mesh is None:
                    return self.whole(leaf)
                leaf, placement = as_divided(leaf, Placement(place))
                return jax.tree.map(lambda x: _on(x, placement.of_part(x.shape, 2).sharding), leaf)
            layout = layouts.of(self._kind, keys, self._count) if leaf.ndim == 2 else None
            return _on(leaf, place if layout is None else Format(layout, place))

        return jax.tree_util.tree_map_with_path(one, params, is_leaf=partition.is_array)


def _on(leaf: Any, place: Sharding | Format) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=place)


class Traced(NamedTuple):
    """A traced launch, and what a round has to read."""

    launch: jax.stages.Traced
    # Bytes on one device: weights once in each pass that needs them, live keys and values once,
    # states twice.
    minimum: int
    weights: int  # bytes of target and drafter on one device
    pools: int  # bytes of the pages and states of all rows on one device
    weight_shapes: frozenset[tuple[int, ...]]  # matrices on one device
    cache_shapes: tuple[tuple[int, ...], ...]  # pools on one device


def plan_of(cell: Cell, platform: str, num_layers: int, *, others: bool = False) -> Plan:
    """Return the plan of a cell with ``num_layers`` of the target's layers."""
    attention = KERNELS[platform] if cell.attention == "kernel" else "xla"
    network = MODELS[cell.model].network(num_layers, others=others)
    if platform == "cuda" and network.layers[-1].mixer.head_dim > MAX_FEATURES:
        attention = "xla"  # as the default of ``LLM`` gives way
    network = dataclasses.replace(network, attention=attention)
    if network.has_experts:
        matmul = EXPERT_KERNELS[platform] if cell.attention == "kernel" else "xla"
        network = network.with_experts(matmul=matmul)
    kept = dataclasses.replace(network, kv_cache_dtype=NAMES[cell.kv_cache_dtype])
    target = decoder.Decoder(partition.split(kept, cell.tp))
    drafter = NoDrafter()
    if cell.nodes > 1:
        block = dict(num_layers=1, windows=(), vocab_size=DRAFT_VOCABULARY, tie_embeddings=False)
        block["mixer"] = dataclasses.replace(network.layers[-1].mixer, gated=False)
        if network.has_experts:  # Published heads of such models have a plain MLP.
            block["feed_forward"] = GatedMlp(network.layers[0].feed_forward.dense_size)
        head = eagle.EagleConfig(
            network=networks.changed(network, **block),
            generation=3,
            capture_layers=(0, 1, num_layers - 1),
            target_hidden_size=network.hidden_size,
            target_vocab_size=network.vocab_size,
            separate_head=True,
        )
        drafter = Eagle(partition.split_draft(head, cell.draft_tp), target, cell.nodes - 1)
    return Plan(target, drafter, packed=True, platform=PLATFORMS[platform])


def trace(
    cell: Cell, platform: str, num_layers: int, placing: Placing, *, others: bool = False
) -> Traced:
    """Trace a launch of a cell, whose abstract arrays ``placing`` puts on devices."""
    plan = plan_of(cell, platform, num_layers, others=others)
    kernels = _quantized_kernels(cell, platform)
    params = jax.eval_shape(functools.partial(params_of, plan, cell.quantization, kernels))
    profile = Profile().numeric() if cell.sampled else Profile().rounded()
    rows = [None] * cell.batch
    request = slots.with_keys.eval_shape(*request_of(rows, profile, plan.target.vocab_size))
    size = slots.buffer_size(plan, MAX_MODEL_LEN)
    state = slots.allocate.eval_shape(plan, params, cell.batch, size, True, keeps=True)
    caches = pages.shapes_of(plan, params, pages.PAGE_SIZE)
    pool = lambda count: jax.eval_shape(lambda: pages.allocate(caches, (count,), pages.PAGE_SIZE))
    # A kernel takes a whole pool, and reads the pages that its queries see: it has no others here.
    hidden = others and cell.attention == "kernel"
    pools = pool(cell.num_pages(MODELS[cell.model].window if hidden else None))
    table = jax.ShapeDtypeStruct((cell.batch, MAX_MODEL_LEN // pages.PAGE_SIZE), jnp.int32)
    params = placing.weights(params, plan, cell)
    pools = placing.state(pools)
    with mesh_lib.on(placing.mesh):
        traced = launch.trace(
            plan,
            profile,
            params,
            placing.whole(request),
            placing.whole(jax.eval_shape(functools.partial(init_shared, plan))),
            placing.state(state).replace(pools=pools),
            placing.whole(jax.ShapeDtypeStruct((), jnp.int32)),
            placing.whole(jax.ShapeDtypeStruct((cell.batch,), bool)),
            placing.whole((table,)),
        )
    matrices = [leaf for leaf in jax.tree.leaves(params) if leaf.ndim > 1]
    return Traced(
        traced,
        minimum=_minimum(cell, plan, params),
        weights=_bytes(params),
        pools=_bytes(placing.state((pool(cell.num_pages()), state.cache))),
        weight_shapes=frozenset(map(_part, matrices)),
        cache_shapes=tuple({_part(leaf): None for leaf in jax.tree.leaves(pools)}),
    )


def _quantized_kernels(cell: Cell, platform: str) -> dict[int, str]:
    """Return the default kernels of quantised matrices, by their number of axes; 3 of experts."""
    if cell.quantization is None or cell.attention == "xla":
        return {}
    groups, rows = _SCHEMES[cell.quantization].groups, cell.batch * cell.nodes
    of_matrices = platform != "tpu" or (groups and is_multiplied_out(rows, groups[0]))
    return dict.fromkeys((2, 3) if of_matrices else (3,), KERNELS[platform])


def params_of(
    plan: Plan, quantization: str | None = None, kernels: Mapping[int, str] = MappingProxyType({})
) -> Params:
    """Return random weights; ``kernels`` multiply the quantised ones."""
    key, network = jax.random.key(0), plan.target.config
    target = decoder.init_params(key, network, dtype=jnp.bfloat16)
    if quantization is not None:
        is_swapped = "pallas_gpu" in kernels.values()
        made = functools.partial(quantize, scheme=_SCHEMES[quantization], swapped=is_swapped)
        narrow = functools.partial(_narrow, made, kernels, name=quantization)
        layers = jax.tree_util.tree_map_with_path(narrow, target.layers)
        target = target.replace(layers=layers)
    if isinstance(plan.drafter, NoDrafter):
        return Params(target, None)
    return Params(target, eagle.init_params(key, plan.drafter.config, dtype=jnp.bfloat16))


def _narrow(
    made: Callable[..., Weight],
    kernels: Mapping[int, str],
    path: tuple,
    x: jax.Array,
    *,
    name: str,
) -> jax.Array | Weight:
    """Return the array of a layer quantised; in MXFP4, experts alone are."""
    of_stacks = name == _MXFP4
    if x.ndim < 2 + of_stacks or path[-1].name == "router":
        return x
    weight = made(x)
    if of_stacks:  # The scales are powers of two.
        weight = jax.tree.map(_as_powers, weight)
    weight = _in_blocks(weight, name) if name in _BLOCKS else weight
    return for_kernel(weight, kernels[x.ndim]) if x.ndim in kernels else weight


def _as_powers(array: jax.Array) -> jax.Array:
    return array.astype(jnp.float8_e8m0fnu) if array.dtype == jnp.bfloat16 else array


def _in_blocks(weight: Weight, name: str) -> Weight:
    """Return a matrix with the arrays of a kind of blocks of GGUF, whatever their numbers."""
    if isinstance(weight, Transposed):
        return Transposed(_in_blocks(weight.stored, name))
    inner, outer = weight.scales.inner.astype(jnp.float16), None
    if name.endswith("k"):
        count = weight.shape[weight.axis] // _SUPERBLOCK
        outer = jax.lax.slice_in_dim(inner, 0, count, axis=weight.axis)
        inner = inner.astype(jnp.uint8 if name == "q4_k" else jnp.int8)
    factors = Factors(inner, outer)
    if name == "q6_k":
        return weight.replace(scales=factors)
    return weight.replace(scales=factors, minima=factors)


def _minimum(cell: Cell, plan: Plan, params: Params) -> int:
    """Return the bytes that each device has to move in a round.

    A step of the drafter needs the output of the one before, so each reads its block and its
    output matrix. ``fc`` and the embedding's few rows are read once.
    """
    target, drafter = params.target, params.drafter
    network = plan.target.config
    embedding = 0 if network.tie_embeddings else _bytes(target.embedding)
    size = 2 * network.layers[-1].mixer.head_dim
    if cell.kv_cache_dtype != "auto":
        size = size // 2 + 4 * (cell.kv_cache_dtype == "int8")  # 8 bits a number, and a scale
    live = sum(map(_live(cell, size), network.layers)) // cell.tp
    total = _bytes(target) - embedding + live
    stacks = [leaf for leaf in jax.tree.leaves(target) if leaf.ndim == 3]
    total -= round((1 - chosen_share(cell)) * _bytes(stacks))
    if drafter is not None:
        fc = _bytes(drafter.fc)
        of_token = _live(cell, 2 * network.layers[-1].mixer.head_dim)
        live = sum(map(of_token, plan.drafter.config.network.layers)) // cell.draft_tp
        step = _bytes(drafter) - fc + live
        total += fc + plan.max_depth * step
    return total


def chosen_share(cell: Cell) -> float:
    """Return the largest share of experts that the tokens of a round can choose."""
    experts = MODELS[cell.model].sizes.get("feed_forward")
    if experts is None:
        return 1.0
    return min(1, cell.batch * cell.nodes * experts.experts_per_token / experts.num_experts)


def _live(cell: Cell, size: int) -> Callable[[decoder.Layer], int]:
    """Return a function: bytes of the keys and values that the queries of a layer see.

    A key of a token and head takes ``size`` of them. States are read and written.
    """

    def live(layer: decoder.Layer) -> int:
        mixer = layer.mixer
        if isinstance(mixer, DeltaRule):
            return 2 * _bytes(jax.eval_shape(lambda: mixer.entry(cell.batch, 0, jnp.bfloat16)))
        tokens = min(cell.context, mixer.window or cell.context)
        return cell.batch * tokens * 2 * mixer.num_kv_heads * size

    return live


def _part(leaf: Any) -> tuple[int, ...]:
    """Return the shape of an array's part on a device."""
    place = leaf.sharding.sharding if isinstance(leaf.sharding, Format) else leaf.sharding
    return leaf.shape if place is None else place.shard_shape(leaf.shape)


def _bytes(tree: Any) -> int:
    """Return the bytes of arrays on a device."""
    leaves = jax.tree.leaves(tree)
    return sum(size_of(jax.ShapeDtypeStruct(_part(leaf), leaf.dtype)) for leaf in leaves)
