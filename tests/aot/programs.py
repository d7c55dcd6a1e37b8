"""The programs to compile ahead of time: kernels at real sizes, and entire decode loops."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jspec import ops
from jspec.core.filters import FILTERS
from jspec.core.narrow import Narrow
from jspec.core.types import Params, Request, Sampling
from jspec.drafters import DraftModel, Eagle, Medusa
from jspec.engine import pages, slots
from jspec.engine.budget import Budget
from jspec.engine.loop import DecodeState, init_shared, launch, prefill
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.kernels.grouped_matmul.shapes import CASES as EXPERTS
from jspec.kernels.quantized_matmul.shapes import CASES as MATRICES
from jspec.kernels.quantized_matmul.shapes import Case
from jspec.kernels.rejection_sampling.shapes import CASES as DRAFTS
from jspec.kernels.tree_attention.shapes import CASES
from jspec.models import decoder
from jspec.models.batch_invariant import BatchInvariantDecoder
from jspec.models.blocks.delta_rule import DeltaRule
from jspec.models.heads import eagle, medusa
from tests import networks
from tests.kernels import drafts

BATCH, CAPACITY = 8, 1040  # sizes of the loops
CHUNK = 256  # tokens of a prefill
KERNEL_BATCH, KERNEL_SLOTS = 2, 4112
PAGES, PAGE_SIZE = BATCH * 17 + 3, 64  # no array but a pool has as many pages
PLATFORMS = {"tpu": "tpu", "cuda": "gpu"}  # JAX's names of backends
EXPERT_KERNELS = {"tpu": "xla", "cuda": "pallas_gpu"}
PAGED = ("draft_model", "eagle3, drawn tree", "static tree")
ACCELERATOR = dict(cache_dtype="bfloat16", activation_dtype="bfloat16")

# Two layers compile fast, and show every error between layers.
TARGET = networks.build(
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1536,
    num_layers=2,
    num_heads=12,
    num_kv_heads=4,
    head_dim=128,
    max_positions=2048,
    **ACCELERATOR,
)
DRAFT = networks.build(
    vocab_size=32000,
    hidden_size=256,
    intermediate_size=768,
    num_layers=1,
    num_heads=4,
    num_kv_heads=2,
    head_dim=128,
    max_positions=2048,
    **ACCELERATOR,
)
# A layer with the states of Qwen3.5, 2 MiB a row, before one of gated attention.
RECURRENT = dataclasses.replace(
    TARGET,
    layers=(
        dataclasses.replace(TARGET.layers[0], mixer=DeltaRule(32, 16, key_dim=128, head_dim=128)),
        dataclasses.replace(
            TARGET.layers[1], mixer=dataclasses.replace(TARGET.layers[1].mixer, gated=True)
        ),
    ),
)
# The same kinds of layers in a draft model, 1 MiB a row.
RECURRENT_DRAFT = networks.changed(DRAFT, num_layers=2)
RECURRENT_DRAFT = dataclasses.replace(
    RECURRENT_DRAFT,
    layers=(
        dataclasses.replace(
            RECURRENT_DRAFT.layers[0], mixer=DeltaRule(16, 8, key_dim=128, head_dim=128)
        ),
        RECURRENT_DRAFT.layers[1],
    ),
)
MEDUSA = medusa.MedusaConfig(
    num_heads=4,
    num_layers=1,
    hidden_size=512,
    vocab_size=32000,
    target_vocab_size=32000,
    capture_layers=(2,),
    num_outputs=4,
    activation_dtype="bfloat16",
)
EAGLE = eagle.EagleConfig(
    network=networks.changed(TARGET, num_layers=1, vocab_size=8000, num_heads=8, num_kv_heads=2),
    generation=3,
    capture_layers=(0, 1, 2),
    target_hidden_size=512,
    target_vocab_size=32000,
    separate_head=True,
)


class Program(NamedTuple):
    """A program to compile."""

    trace: Callable[[Any], Any]  # maps a function of ``placing`` to a jax.stages.Traced
    cache_shapes: tuple[tuple[int, ...], ...] = ()


def placing(devices: list, batch: int) -> Callable[[Any], Any]:
    """Return a function that puts abstract arrays on ``devices``, the batch axis sharded.

    It takes a pytree, and whether the pytree holds weights, which are replicated.
    """
    mesh = Mesh(np.array(devices), ("batch",), axis_types=(AxisType.Auto,))

    def put(tree: Any, *, weights: bool = False) -> Any:
        def one(leaf):
            sharded = not weights and leaf.shape[:1] == (batch,)
            spec = PartitionSpec("batch") if sharded else PartitionSpec()
            sharding = NamedSharding(mesh, spec)
            return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)

        return jax.tree.map(one, tree)

    return put


def programs(platform: str, num_devices: int) -> dict[str, Program]:
    """Return all programs of a platform by name. Kernels are compiled for one device."""
    programs_by_name = {}
    kernel, dtypes = {
        "tpu": ("pallas_tpu", ("bfloat16", "float32")),
        "cuda": ("pallas_gpu", ("bfloat16",)),
    }[platform]
    if num_devices == 1:
        for name in CASES:
            for dtype in dtypes:
                program = functools.partial(attention, name, kernel, dtype)
                programs_by_name[f"tree_attention, {name}, {dtype}"] = Program(program)
                program = functools.partial(program, pages=True)
                programs_by_name[f"tree_attention, {name}, {dtype}, pages"] = Program(program)
        program = functools.partial(
            attention, "a chain of 4", kernel, "bfloat16", pages=True, stored="int8"
        )
        programs_by_name["tree_attention, a chain of 4, int8, pages"] = Program(program)
        for name, case in DRAFTS.items():
            program = functools.partial(drafts.trace, case, KERNEL_BATCH, kernel)
            programs_by_name[f"rejection_sampling, {name}"] = Program(program)
        for name, case in EXPERTS.items():
            implementation = kernel if case.groups else EXPERT_KERNELS[platform]
            program = functools.partial(grouped_matmul, name, implementation)
            programs_by_name[f"grouped_matmul, {name}"] = Program(program)
        for name, case in MATRICES.items():
            # XLA reads those of one group as they are stored, and TPUs have no kernel for others.
            if platform == "tpu" and not case.is_scaled:
                continue
            program = functools.partial(quantized_matmul, case, kernel)
            programs_by_name[f"quantized_matmul, {name}"] = Program(program)
    loops = {f"decode, {name}": plan for name, plan in plans(platform, None).items()}
    paged = {}
    if num_devices == 1:
        paged = {f"decode, {name}, pages": plans(platform, None)[name] for name in PAGED}
        plan_by_name = recurrent(platform, pages=True)
        paged |= {f"decode, recurrent, {x}, pages": plan for x, plan in plan_by_name.items()}
    deterministic = Plan(
        BatchInvariantDecoder(TARGET),
        DraftModel(DRAFT, 7),
        "coupled",
        platform=PLATFORMS[platform],
    )
    loops["decode, draft_model, deterministic"] = deterministic
    if num_devices == 1:
        loops |= {f"decode, recurrent, {x}": plan for x, plan in recurrent(platform).items()}
        with_kernels = plans(platform, kernel)
        for name in ("draft_model", "eagle3, drawn tree"):
            loops[f"decode, {name}, {kernel}"] = with_kernels[name]
    for name, plan in loops.items():
        programs_by_name[name] = Program(
            functools.partial(loop, plan), _cache_shapes(plan, num_devices)
        )
    pools = lambda plan: tuple(
        (PAGES, shape[1], PAGE_SIZE, shape[3]) for shape in _cache_shapes(plan, 1)
    )
    for name, plan in paged.items():
        programs_by_name[name] = Program(functools.partial(loop, plan, pages=True), pools(plan))
    if num_devices == 1:
        plan = plans(platform, None)["draft_model"]
        prompts = {"": _cache_shapes(plan, 1), ", pages": pools(plan)}
        for name, shapes in prompts.items():
            program = functools.partial(prompt, plan, pages=bool(name))
            programs_by_name[f"prefill, draft_model{name}"] = Program(program, shapes)
    return programs_by_name


def attention(
    name: str,
    implementation: str,
    dtype: str,
    put: Callable[[Any], Any],
    *,
    pages: bool = False,
    stored: str | None = None,
) -> Any:
    """Trace a case of the kernel tests, over a long cache, contiguous or in pages.

    ``stored`` is the format of a cache in 8 bits.
    """
    case = CASES[name]
    queries, kv_heads, features = case.heads
    array = lambda *shape, dtype=dtype: jax.ShapeDtypeStruct((KERNEL_BATCH, *shape), dtype)
    tree, cache = array(kv_heads, case.keys, features), array(kv_heads, KERNEL_SLOTS, features)
    words = array(case.nodes, -(-case.keys // 32), dtype="uint32")
    table, most = None, KERNEL_SLOTS // PAGE_SIZE
    if pages:
        shape = KERNEL_BATCH * most + 1, kv_heads, PAGE_SIZE, features
        cache, table = jax.ShapeDtypeStruct(shape, dtype), array(most, dtype="int32")
    if stored is not None:
        cache = jax.eval_shape(lambda: Narrow.zeros(cache.shape, stored, jnp.dtype(dtype)))
    arrays = (
        array(queries, case.nodes, features),
        tree,
        tree,
        words,
        cache,
        cache,
        array(dtype="int32"),
        array(case.nodes, dtype="int32"),
        table,
        jax.ShapeDtypeStruct((queries,), dtype) if case.has_sinks else None,
    )

    def attend(*arrays):
        return ops.attention(
            *arrays[:-3],
            positions=arrays[-3],
            table=arrays[-2],
            sinks=arrays[-1],
            scale=0.1,
            window=case.window,
            soft_cap=case.soft_cap,
            implementation=implementation,
        )

    return jax.jit(attend).trace(*put(arrays))


def grouped_matmul(name: str, implementation: str, put: Callable[[Any], Any]) -> Any:
    """Trace a case of the kernel tests."""
    arrays = EXPERTS[name].arrays(-2 if implementation == "pallas_tpu" else -1)
    multiply = functools.partial(ops.grouped_matmul, implementation=implementation)
    return jax.jit(multiply).trace(*put(arrays, weights=True))


def quantized_matmul(case: Case, implementation: str, put: Callable[[Any], Any]) -> Any:
    """Trace a case of the kernel tests, with its matrix as the kernel takes it."""
    arrays = case.arrays(-1 if implementation == "pallas_gpu" else -2)
    multiply = functools.partial(
        ops.quantized_matmul, offset=case.offset, implementation=implementation
    )
    return jax.jit(multiply).trace(*put(arrays, weights=True))


def plans(platform: str, implementation: str | None) -> dict[str, Plan]:
    """Return the decode loops, with kernels of attention and of rejection sampling.

    A sampled chain of a small model, Medusa's published static tree, and an EAGLE-3 head over a
    reduced vocabulary: a chain, a drawn tree under rule ``block``, EAGLE-2's dynamic tree, and a
    chain of adaptive length with its verification budget.
    """
    with_kernel = lambda config: dataclasses.replace(config, attention=implementation)
    target = decoder.Decoder(with_kernel(TARGET))
    chain = DraftModel(with_kernel(DRAFT), 7)
    tree = Medusa(MEDUSA, target, tree="medusa_mc_sim_7b_63", draft_sample_method="greedy")
    head = dataclasses.replace(EAGLE, network=with_kernel(EAGLE.network))
    drawn = dict(tree="sampled", tree_size=16, tree_depth=5, tree_top_k=4)
    dynamic = dict(tree="eagle2", tree_size=32, tree_depth=5, tree_top_k=8)
    judged = dict(sampling_backend=implementation)
    plan = functools.partial(Plan, platform=PLATFORMS[platform])
    return {
        "draft_model": plan(target, chain),
        "static tree": plan(target, tree),
        "eagle3, chain": plan(target, Eagle(head, target, 7), "rejection", **judged),
        "eagle3, drawn tree": plan(target, Eagle(head, target, **drawn), "block", **judged),
        "eagle3, dynamic tree": plan(target, Eagle(head, target, **dynamic)),
        "eagle3, adaptive": plan(target, Eagle(head, target, 7), lengths=(0, 3, 7)),
    }


def recurrent(platform: str, *, pages: bool = False) -> dict[str, Plan]:
    """Return decode loops of a target with states; a copy of one would be a temporary.

    A tree takes the compiler of TPUs four minutes.
    """
    target, plan = decoder.Decoder(RECURRENT), functools.partial(Plan, platform=PLATFORMS[platform])
    chain = {"chain": plan(target, DraftModel(DRAFT, 4))}
    if pages:
        return chain | {"recurrent draft": plan(target, DraftModel(RECURRENT_DRAFT, 4))}
    if platform == "tpu":
        return chain
    tree = Medusa(MEDUSA, target, tree="medusa_mc_sim_7b_63", draft_sample_method="greedy")
    return chain | {"static tree": plan(target, tree)}


def prompt(plan: Plan, put: Callable[[Any], Any], *, pages: bool = False) -> Any:
    """Trace a prefill of a chunk of ``CHUNK`` tokens, over contiguous caches or pages."""
    params, request = _params(plan), jax.eval_shape(_request)
    state = jax.eval_shape(functools.partial(_state, plan), params)
    tables = None
    if pages:
        tables = (jax.ShapeDtypeStruct((BATCH, PAGES // BATCH), jnp.int32),)
        state = jax.eval_shape(functools.partial(_over_pages, plan, params, request), state)
    column = jax.ShapeDtypeStruct((BATCH,), jnp.int32)
    chunk = jax.ShapeDtypeStruct((BATCH, CHUNK + 1), jnp.int32)
    ready = jax.ShapeDtypeStruct((BATCH,), bool)
    given = put((state, chunk, column, column, ready))
    return prefill.trace(plan, put(params, weights=True), *given, tables=put(tables))


def loop(plan: Plan, put: Callable[[Any], Any], *, pages: bool = False) -> Any:
    """Trace a launch of the loop of a plan, sampled, over contiguous caches or pages."""
    params = _params(plan)
    request, shared = jax.eval_shape(_request), jax.eval_shape(lambda: init_shared(plan))
    state = jax.eval_shape(functools.partial(_state, plan, keeps=pages), params)
    rounds, watched = jax.ShapeDtypeStruct((), jnp.int32), jax.ShapeDtypeStruct((BATCH,), bool)
    tables = None
    if pages:
        tables = (jax.ShapeDtypeStruct((BATCH, PAGES // BATCH), jnp.int32),)
        state = jax.eval_shape(functools.partial(_over_pages, plan, params, request), state)
    weights, rest = put(params, weights=True), (request, shared, state, rounds, watched, tables)
    if plan.lengths:
        length = plan.max_depth
        rest = (*rest, jax.eval_shape(functools.partial(_budget, plan.at_length(length))))
        plan = plan.at_length(length)
    return launch.trace(plan, Profile(), weights, *map(put, rest))


def _params(plan: Plan) -> Params:
    """Return the shapes of the weights."""
    narrow, key = dict(dtype=jnp.bfloat16), jax.random.key(0)
    networks = {DraftModel: decoder, Medusa: medusa, Eagle: eagle}
    init = networks[type(plan.drafter)].init_params
    return jax.eval_shape(
        lambda: Params(
            decoder.init_params(key, plan.target.config, **narrow),
            init(key, plan.drafter.config, **narrow),
        )
    )


def _budget(plan: Plan) -> Budget:
    return Budget(jnp.zeros((BATCH,), jnp.float32), jnp.zeros(len(plan.passes(BATCH)), jnp.float32))


def _request() -> Request:
    column = lambda dtype: jnp.zeros((BATCH,), dtype)
    values = {name: column(entry.dtype) for name, entry in FILTERS.items()}
    sampling = Sampling(values, names=("temperature",))
    keys = jax.vmap(jax.random.key)(jnp.arange(BATCH))
    return Request(keys, sampling, jnp.zeros((BATCH, 1), jnp.int32), column(jnp.int32))


def _state(plan: Plan, params: Params, *, keeps: bool = False) -> DecodeState:
    return slots.allocate(plan, params, BATCH, CAPACITY, has_pages=False, keeps=keeps)


def _over_pages(plan: Plan, params: Params, request: Request, state: DecodeState) -> DecodeState:
    """Return the state with pools in place of the layers of its caches."""
    caches = pages.shapes_of(plan, params, PAGE_SIZE)
    return state.detached().replace(pools=pages.allocate(caches, (PAGES,), PAGE_SIZE))


def _cache_shapes(plan: Plan, num_devices: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of the target's and the drafter's cache buffers on one device."""
    drafter, target = plan.drafter, plan.target
    slots = jax.eval_shape(lambda: target.init_cache(BATCH, CAPACITY)).layers[-1].k.shape[2]
    caches = [(target.config, slots)]
    if isinstance(drafter, DraftModel):
        caches.append((drafter.config, CAPACITY))
    if isinstance(drafter, Eagle):
        caches.append((drafter.config.network, CAPACITY))
    mixers = [(model.layers[-1].mixer, slots) for model, slots in caches]
    return tuple(
        (BATCH // num_devices, mixer.num_kv_heads, slots, mixer.head_dim) for mixer, slots in mixers
    )
