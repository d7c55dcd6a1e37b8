"""Tree attention: every back-end is the reference, which is the attention of JAX.

The TPU interpreter simulates memory and DMA and catches races and accesses out of bounds; the GPU
interpreter runs where JAX has one.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jspec import ops
from jspec.core import trees
from jspec.core.narrow import LIMITS
from jspec.core.weights import Transposed
from jspec.kernels.tree_attention import cpu_sizes, pallas_gpu, pallas_tpu, reference, xla, xla_cpu
from jspec.kernels.tree_attention.shapes import CASES
from tests.kernels.attention import in_8_bits, in_pages, random_case

SLOTS = 112
LENGTHS = (0, 61, SLOTS)  # an empty cache, an odd length, a full cache
HEADS_TESTED = 2  # key heads are independent of each other
CLOSE = dict(rtol=2e-5, atol=5e-6)

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
gpu = functools.partial(
    pytest.param,
    pallas_gpu,
    marks=pytest.mark.skipif(
        not hasattr(plgpu, "InterpretGPUParams"), reason="this JAX interprets no Mosaic GPU kernel"
    ),
)


def run(module, arrays, options, **settings):
    """Run the form of a module, traced anew: tests change its constants."""
    options = in_place(options)
    attend = getattr(module.tree_attention, "__wrapped__", module.tree_attention)
    arrays = {name: jnp.asarray(x) for name, x in arrays.items()}
    return jax.jit(functools.partial(attend, **options, **settings))(*arrays.values())


def expected(arrays, options):
    return reference.tree_attention(*map(jnp.asarray, arrays.values()), **in_place(options))


def in_place(options):
    """Return options of ``ops.attention`` as kernels take them."""
    sinks = options.get("sinks")
    return options if sinks is None else options | dict(sinks=sinks[None, :, None, None])


def arguments_of(case, dtype):
    """Return the arrays and options of a case, and the rows of each key head."""
    heads = case.heads
    kv_heads = min(heads.keys, HEADS_TESTED)
    group = heads.queries // heads.keys
    arrays, options = random_case(
        group * kv_heads,
        kv_heads,
        heads.features,
        case.nodes,
        case.keys,
        SLOTS,
        LENGTHS,
        dtype=dtype,
        window=case.window,
        has_sinks=case.has_sinks,
    )
    options |= dict(scale=heads.features**-0.5, soft_cap=case.soft_cap)
    return arrays, options, group * case.nodes


def small_case(slots, window=None, lengths=None, seed=0, **changes):
    """Return arrays and options of four query heads over two of keys."""
    sizes = dict(heads=4, kv_heads=2, dim=8, nodes=5, keys=5) | changes
    lengths = [0, slots // 3, slots] if lengths is None else lengths
    arrays, options = random_case(**sizes, slots=slots, lengths=lengths, window=window, seed=seed)
    return arrays, options | dict(scale=0.3)


def in_bits(paged):
    return paged | {name: paged[name].view(np.uint16) for name in ("cache_k", "cache_v")}


def tpu_races():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races.races_found


def gpu_races():
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    return gpu_callbacks.get_races().races_found


def simulated():
    """Return an interpreter with NaN in fresh memory, bounds checks and race detection."""
    return pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
    )


# ------------------------------------------------------------------------------- the reference


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("page", [None, 8])
def test_the_reference_is_the_attention_of_jax(page, window):
    arrays, options = small_case(21, window)
    keys, values = (
        jnp.concatenate([arrays[f"cache_{x}"], arrays[f"tree_{x}"]], 2).swapaxes(1, 2) for x in "kv"
    )
    slots = np.arange(21)
    prefix = np.broadcast_to(slots < arrays["length"][:, None, None], (3, 5, 21))
    if window is not None:
        prefix = prefix & (slots > options["positions"][:, :, None] - window)
    mask = np.concatenate([prefix, trees.unpack_bits(arrays["ancestors"], 5)], -1)
    by_jax = jax.nn.dot_product_attention(
        arrays["q"].swapaxes(1, 2), keys, values, mask=mask[:, None], scale=0.3
    )
    if page is not None:
        arrays, options["table"] = in_pages(arrays, page)
    np.testing.assert_allclose(expected(arrays, options), by_jax.swapaxes(1, 2), **CLOSE)


def test_a_soft_cap_bends_the_scores_before_they_are_masked():
    arrays, options = small_case(21)
    scores = np.einsum("bhnd,bhsd->bhns", arrays["q"], np.repeat(arrays["tree_k"], 2, 1)) * 0.3
    seen = trees.unpack_bits(arrays["ancestors"], 5)[:, None]
    weights = jax.nn.softmax(jnp.where(seen, 1.5 * np.tanh(scores / 1.5), -np.inf))
    alone = arrays | dict(cache_k=None, cache_v=None)
    result = reference.tree_attention(*alone.values(), **options, soft_cap=1.5)
    by_hand = np.einsum("bhns,bhsd->bhnd", weights, np.repeat(arrays["tree_v"], 2, 1))
    np.testing.assert_allclose(result, by_hand, **CLOSE)


# ------------------------------------------------------------------------------ every back-end


@each_case
@pytest.mark.parametrize("page", [None, 16])
@pytest.mark.parametrize(
    ("module", "constants"),
    [
        (xla, {}),
        (xla, dict(WHOLE=0, BLOCK=48)),  # blocks that do not divide the cache
        (xla_cpu, {}),
        (xla_cpu, dict(WHOLE=0, WHOLE_SCORES=0, FEW_NODES=0, MANY_NODES_SLOTS=48)),
        (xla_cpu, dict(WHOLE=0, WHOLE_SHARE=0.6)),
    ],
    ids=["xla", "xla in blocks", "xla_cpu", "xla_cpu in blocks", "xla_cpu whole or in blocks"],
)
def test_the_forms_of_xla_are_the_reference(module, constants, page, case, monkeypatch):
    for name, value in constants.items():
        monkeypatch.setattr(module if hasattr(module, name) else cpu_sizes, name, value)
    arrays, options, _ = arguments_of(case, np.float32)
    result = expected(arrays, options)
    if page is not None:
        arrays, options["table"] = in_pages(arrays, page)
    np.testing.assert_allclose(run(module, arrays, options), result, **CLOSE)


@each_case
@pytest.mark.parametrize("page", [None, 24, 128])
def test_the_kernel_for_tpu_is_the_reference(page, case):
    arrays, options, rows = arguments_of(case, np.float32)
    result = expected(arrays, options)
    chosen = pallas_tpu.choose_blocks(len(LENGTHS), HEADS_TESTED, rows, SLOTS)
    # Blocks that do not divide the cache, and several tiles of many rows.
    blocks = dataclasses.replace(
        chosen, rows=min(chosen.rows, 256), slots=48, splits=case.splits or chosen.splits
    )
    if page is not None:
        arrays, options["table"] = in_pages(arrays, page)
    by_kernel = run(pallas_tpu, arrays, options, blocks=blocks, interpret=simulated())
    np.testing.assert_allclose(by_kernel, result, **CLOSE)
    assert not tpu_races()


@each_case
@pytest.mark.parametrize(("module", "page"), [gpu(None), gpu(64), gpu(128)])
def test_the_kernel_for_hopper_is_the_reference(module, page, case):
    arrays, options, _ = arguments_of(case, ml_dtypes.bfloat16)
    result = expected(arrays, options)
    if page is not None:
        arrays, options["table"] = in_pages(arrays, page)
    blocks = module.Blocks(case.splits or 1, weights_in_registers=False)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    by_kernel = run(module, arrays, options, blocks=blocks, interpret=interpret)
    np.testing.assert_allclose(by_kernel, result, atol=1e-2)
    assert not gpu_races()


@pytest.mark.parametrize(("module", "page"), [gpu(None), gpu(64)])
@pytest.mark.parametrize("name", LIMITS)
def test_the_kernel_for_hopper_widens_a_cache_in_8_bits(name, module, page):
    lengths = [0, 100, 190]
    arrays, options = random_case(4, 2, 32, 9, 9, 192, lengths, dtype=ml_dtypes.bfloat16)
    if page is not None:
        arrays, options["table"] = in_pages(arrays, page)
    arrays = in_8_bits(arrays, name, jnp.bfloat16)
    blocks = module.Blocks(2, weights_in_registers=False)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    attend = functools.partial(module.tree_attention.__wrapped__, **options, scale=0.3)
    attend = functools.partial(attend, blocks=blocks, interpret=interpret)
    result = jax.jit(attend)(*arrays.values())
    by_reference = reference.tree_attention(*arrays.values(), **options, scale=0.3)
    np.testing.assert_allclose(result, by_reference, atol=1e-2)
    assert not gpu_races()


@pytest.mark.parametrize(
    ("module", "settings"), [(xla, {}), (xla_cpu, {}), (pallas_tpu, dict(interpret=True))]
)
def test_narrow_keys_and_values_are_accumulated_in_float32(module, settings):
    arrays, options, _ = arguments_of(CASES["a chain of 4"], ml_dtypes.bfloat16)
    result = run(module, arrays, options, **settings)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, expected(arrays, options), atol=1e-2)


def test_the_simulation_detects_a_race():
    def reads_too_early(source, out, buffer, semaphore):
        copy = pltpu.make_async_copy(source, buffer, semaphore)
        copy.start()
        out[...] = buffer[...]
        copy.wait()

    x = jnp.ones((8, 128))
    kernel = pl.pallas_call(
        reads_too_early,
        out_shape=x,
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)],
        scratch_shapes=[pltpu.VMEM(x.shape, x.dtype), pltpu.SemaphoreType.DMA],
        interpret=simulated(),
    )
    try:
        kernel(x).block_until_ready()
    except jax.errors.JaxRuntimeError as error:  # since JAX 0.12; earlier versions record it
        assert "RACE DETECTED" in str(error)
    else:
        assert tpu_races()


def test_a_window_past_all_that_is_committed_reads_nothing_outside_of_the_cache():
    arrays, options = small_case(16, window=1, heads=2, kv_heads=1, nodes=2, keys=2)
    result = run(pallas_tpu, arrays, options, interpret=simulated())
    np.testing.assert_allclose(result, expected(arrays, options), **CLOSE)


# ------------------------------------------------------------------------------- forms for a CPU


@pytest.mark.parametrize("window", [None, 50, 300])
@pytest.mark.parametrize("longest", [90, 200, 201, 400])
def test_a_long_cache_is_read_in_blocks_or_whole_to_the_same_result(longest, window):
    arrays, options = small_case(400, window, [0, 70, longest], nodes=3, keys=3)
    np.testing.assert_allclose(run(xla_cpu, arrays, options), expected(arrays, options), **CLOSE)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("count", [3, 6, 8])
def test_sequences_with_many_keys_attend_in_groups_to_the_same_result(count, window, monkeypatch):
    arrays, options = small_case(21, window, [0, 7, 21, 3, 20, 1, 9, 14][:count])
    monkeypatch.setattr(cpu_sizes, "WHOLE_BYTES", 0)
    monkeypatch.setattr(cpu_sizes, "GROUP_BYTES", 3 * arrays["cache_k"][0].nbytes)
    assert cpu_sizes.group_of(arrays["cache_k"]) == {3: 3, 6: 3, 8: 2}[count]
    monkeypatch.setattr(cpu_sizes, "GROUP_BYTES", 1)
    assert cpu_sizes.group_of(arrays["cache_k"]) == {3: 3, 6: 3, 8: 2}[count]  # never one
    assert cpu_sizes.differs(arrays["q"], arrays["tree_k"], arrays["cache_k"]) == (count > 3)
    np.testing.assert_allclose(run(xla_cpu, arrays, options), expected(arrays, options), **CLOSE)


@pytest.mark.parametrize("nodes", [5, 65])
def test_bits_are_widened_for_few_nodes_and_queries_are_rounded_for_many(nodes):
    arrays, options = small_case(21, nodes=nodes, keys=nodes, dtype=ml_dtypes.bfloat16)
    arrays["q"] = np.random.default_rng(1).standard_normal(arrays["q"].shape).astype(np.float32)
    paged, options["table"] = in_pages(arrays, 8)
    error = run(xla_cpu, in_bits(paged), options) - expected(in_bits(paged), options)
    assert np.abs(error).max() < 2e-6 if nodes <= xla_cpu.FEW_NODES else True
    assert nodes <= xla_cpu.FEW_NODES or 1e-4 < np.abs(error).max() < 2e-2
    np.testing.assert_array_equal(expected(in_bits(paged), options), expected(paged, options))
    np.testing.assert_allclose(
        run(xla, in_bits(paged), options), expected(paged, options), atol=2e-2
    )


def test_a_sequence_attends_to_its_pages_as_it_does_alone_to_the_bit():
    arrays, options = small_case(40, 12, [40, 0, 7, 21, 33])
    arrays, table = in_pages(arrays, 8)
    positions = options["positions"]
    together = ops.attention(
        *arrays.values(), table=table, scale=0.3, window=12, positions=positions
    )
    for row in range(5):
        mine = [x if len(x) != 5 else x[row : row + 1] for x in arrays.values()]
        alone = ops.attention(
            *map(jnp.asarray, mine),
            table=table[row : row + 1],
            scale=0.3,
            window=12,
            positions=positions[row : row + 1],
        )
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("window", [None, 12])
def test_a_row_of_which_only_the_first_node_is_used_reads_its_pages_as_a_row_of_one_node(window):
    arrays, options = small_case(40, window, [40, 0, 7, 21, 33])
    arrays["ancestors"] = trees.pack_bits(np.broadcast_to(np.tri(5, dtype=bool), (5, 5, 5)))
    arrays, options["table"] = in_pages(arrays, 8)
    first_only = jnp.array([True, False, True, False, True])
    every = run(xla_cpu, arrays, options)
    result = run(xla_cpu, arrays, options, first_only=first_only)
    np.testing.assert_array_equal(result[~first_only], every[~first_only])
    np.testing.assert_allclose(result[:, :, 0], every[:, :, 0], **CLOSE)
    # Their other nodes attend to the tree alone.
    alone = run(xla_cpu, arrays | dict(length=np.zeros(5, np.int32)), options)
    np.testing.assert_array_equal(result[first_only][:, :, 1:], alone[first_only][:, :, 1:])


@pytest.mark.parametrize("page", [None, 8])
@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "nodes", "parts"), [(4, 2, 96, 3), (2, 2, 128, 4)])
def test_a_cpu_reads_a_long_prompt_in_parts(
    heads, kv_heads, nodes, parts, window, page, monkeypatch
):
    monkeypatch.setattr(cpu_sizes, "PART_NODES", 32)
    assert cpu_sizes.parts_of(nodes, nodes) == parts
    arrays, options = small_case(
        70, window, heads=heads, kv_heads=kv_heads, nodes=nodes, keys=nodes
    )
    earlier = np.random.default_rng(2).random((3, nodes, nodes)) < 0.3
    arrays["ancestors"] = trees.pack_bits(np.tril(earlier, -1) | np.eye(nodes, dtype=bool))
    result = expected(arrays, options)
    if page is not None:
        arrays, options["table"] = in_pages(arrays, page)
    np.testing.assert_allclose(run(xla_cpu, arrays, options), result, **CLOSE)


def test_scores_of_many_nodes_over_a_long_cache_are_never_held_all_at_once():
    arrays, options = small_case(8192, lengths=[8192], nodes=256, keys=256)
    attend = jax.jit(functools.partial(ops.attention, **options))
    taken = attend.lower(*arrays.values()).compile().memory_analysis().temp_size_in_bytes
    assert taken < 4 * arrays["q"][..., 0].size * 8192


def test_without_a_cache_the_tree_attends_to_itself():
    arrays, options = small_case(1)
    arrays["length"][:] = 0
    alone = arrays | dict(cache_k=None, cache_v=None)
    for name in (None, "xla", "reference"):
        result = ops.attention(*alone.values(), **options, implementation=name)
        np.testing.assert_allclose(result, expected(arrays, options), **CLOSE)


def test_a_linear_of_narrow_weights_gives_a_row_the_same_result_at_any_count():
    rng = np.random.default_rng(0)
    weight = jnp.array(rng.standard_normal((64, 96)), jnp.bfloat16)
    x = jnp.array(rng.standard_normal((9, 64)), jnp.float32)
    full = ops.linear(x, weight)
    for count in (1, 2, 3, 5):
        np.testing.assert_allclose(
            ops.linear(x[:count], weight), full[:count], rtol=1e-5, atol=1e-5
        )
    np.testing.assert_allclose(ops.linear(x, weight.T, transposed=True), full, rtol=1e-5, atol=1e-5)


def test_a_weight_that_is_stored_transposed_is_the_same_weight_and_rows_are_equal_to_the_bit():
    rng = np.random.default_rng(0)
    weight = jnp.array(rng.standard_normal((64, 96)), jnp.bfloat16)
    x = jnp.array(rng.standard_normal((70, 64)), jnp.float32)
    stored = Transposed(weight.T)
    assert (stored.shape, stored.dtype) == (weight.shape, weight.dtype)
    full = ops.linear(x, stored)
    np.testing.assert_allclose(full, ops.linear(x, weight), rtol=1e-5, atol=1e-5)
    back = ops.linear(full, stored, transposed=True)
    np.testing.assert_allclose(
        back, ops.linear(full, weight, transposed=True), rtol=1e-4, atol=1e-3
    )
    for count in (1, 3, 8, 33):
        np.testing.assert_array_equal(ops.linear(x[:count], stored), full[:count])
