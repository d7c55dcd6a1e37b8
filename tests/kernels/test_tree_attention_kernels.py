"""The kernels of tree attention over the shapes of real models, on any machine.

Interpreted, they must equal a dense softmax in NumPy. The TPU interpreter simulates memory and DMA
and catches races and accesses out of bounds; the GPU interpreter runs where JAX has one. Lowered,
they must pass every check that needs no device.
"""

import dataclasses
import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.experimental.pallas import tpu as pltpu

from jspec import ops
from jspec.kernels.tree_attention import pallas_gpu, pallas_tpu
from jspec.kernels.tree_attention.shapes import CASES
from tests.kernels.attention import dense, in_pages, random_case

SLOTS = 112
LENGTHS = (0, 61, SLOTS)  # an empty cache, an odd length, a full cache
KERNELS = {"pallas_tpu": pallas_tpu, "pallas_gpu": pallas_gpu}
CUDA_OR_TPU = {"pallas_tpu": ("tpu", "tpu_custom_call"), "pallas_gpu": ("cuda", "mosaic_gpu")}
HEADS_TESTED = 2  # key heads are independent of each other

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
needs_gpu_interpreter = pytest.mark.skipif(
    not hasattr(plgpu, "InterpretGPUParams"), reason="this JAX cannot interpret Mosaic GPU kernels"
)


def arguments_of(case, dtype):
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
    )
    options |= dict(scale=heads.features**-0.5, soft_cap=case.soft_cap)
    return arrays, options, group * case.nodes


def run(kernel, arrays, options, **settings):
    return jax.jit(functools.partial(kernel.tree_attention, **options, **settings))(
        *arrays.values()
    )


def tpu_races():
    from jax._src.pallas.mosaic.interpret import interpret_pallas_call

    return interpret_pallas_call.races.races_found


def simulated():
    """Return an interpreter with NaN in fresh memory, bounds checks and race detection."""
    return pltpu.InterpretParams(
        detect_races=True, out_of_bounds_reads="raise", uninitialized_memory="nan"
    )


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


@each_case
def test_the_tpu_kernel_is_a_dense_softmax(case):
    arrays, options, rows = arguments_of(case, np.float32)
    chosen = pallas_tpu.choose_blocks(len(LENGTHS), HEADS_TESTED, rows, SLOTS)
    # Blocks that do not divide the cache, and several tiles of many rows.
    blocks = dataclasses.replace(
        chosen, rows=min(chosen.rows, 256), slots=48, splits=case.splits or chosen.splits
    )
    result = run(pallas_tpu, arrays, options, blocks=blocks, interpret=simulated())
    np.testing.assert_allclose(result, dense(**arrays, **options), rtol=2e-5, atol=5e-6)
    assert not tpu_races()


@pytest.mark.parametrize("page", [16, 24, 112, 128])
@each_case
def test_the_tpu_kernel_reads_pages(case, page):
    arrays, options, rows = arguments_of(case, np.float32)
    chosen = pallas_tpu.choose_blocks(len(LENGTHS), HEADS_TESTED, rows, SLOTS)
    blocks = dataclasses.replace(chosen, slots=48, splits=case.splits or chosen.splits)
    paged, table = in_pages(arrays, page)
    settings = dict(blocks=blocks, interpret=simulated(), table=table)
    result = run(pallas_tpu, paged, options, **settings)
    np.testing.assert_allclose(result, dense(**arrays, **options), rtol=2e-5, atol=5e-6)
    assert not tpu_races()


def test_the_tpu_kernel_accumulates_narrow_keys_and_values_in_float32():
    arrays, options, _ = arguments_of(CASES["a chain of 4"], ml_dtypes.bfloat16)
    result = run(pallas_tpu, arrays, options, interpret=True)
    assert result.dtype == jnp.float32
    np.testing.assert_allclose(result, dense(**arrays, **options), atol=1e-2)


def test_a_window_past_all_that_is_committed_reads_nothing_outside_of_the_cache():
    slots = 16
    arrays, options = random_case(2, 1, 8, 2, 2, slots, [3, slots], window=1)
    result = run(pallas_tpu, arrays, options | dict(scale=0.3), interpret=simulated())
    np.testing.assert_allclose(result, dense(**arrays, **options, scale=0.3), rtol=2e-5, atol=5e-6)


@needs_gpu_interpreter
@each_case
def test_the_gpu_kernel_is_a_dense_softmax(case):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    arrays, options, _ = arguments_of(case, ml_dtypes.bfloat16)
    blocks = pallas_gpu.Blocks(case.splits or 1, weights_in_registers=False)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    result = run(pallas_gpu, arrays, options, blocks=blocks, interpret=interpret)
    np.testing.assert_allclose(result, dense(**arrays, **options), atol=1e-2)
    assert not gpu_callbacks.get_races().races_found


@needs_gpu_interpreter
@each_case
@pytest.mark.parametrize("page", [64, 128])
def test_the_gpu_kernel_reads_pages(case, page):
    from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks

    arrays, options, _ = arguments_of(case, ml_dtypes.bfloat16)
    paged, table = in_pages(arrays, page)
    blocks = pallas_gpu.Blocks(case.splits or 1, weights_in_registers=False)
    interpret = plgpu.InterpretGPUParams(detect_races=True)
    settings = dict(blocks=blocks, interpret=interpret, table=table)
    result = run(pallas_gpu, paged, options, **settings)
    np.testing.assert_allclose(result, dense(**arrays, **options), atol=1e-2)
    assert not gpu_callbacks.get_races().races_found


@each_case
@pytest.mark.parametrize("page", [None, 64])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("pallas_tpu", "float32"), ("pallas_tpu", "bfloat16"), ("pallas_gpu", "bfloat16")],
)
def test_the_kernels_lower_at_the_real_size(case, name, dtype, page):
    (queries, kv_heads, features), batch, slots = case.heads, 2, 4112
    shape = lambda *sizes, dtype=dtype: jax.ShapeDtypeStruct((batch, *sizes), dtype)
    tree, cache = shape(kv_heads, case.keys, features), shape(kv_heads, slots, features)
    table = None
    if page is not None:
        most = slots // page
        cache = jax.ShapeDtypeStruct((batch * most + 1, kv_heads, page, features), dtype)
        table = shape(most, dtype="int32")
    words = shape(case.nodes, -(-case.keys // 32), dtype="uint32")
    integers = shape(dtype="int32"), shape(case.nodes, dtype="int32")

    def attend(*arrays):
        return ops.attention(
            *arrays[:-2],
            positions=arrays[-2],
            table=arrays[-1],
            scale=0.1,
            window=case.window,
            soft_cap=case.soft_cap,
            implementation=name,
        )

    arrays = (shape(queries, case.nodes, features), tree, tree, words, cache, cache, *integers)
    arrays = (*arrays, table)
    platform, call = CUDA_OR_TPU[name]
    lowered = jax.jit(attend).trace(*arrays).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count(call) >= 1
    assert lowered.out_info.shape == (batch, queries, case.nodes, features)


def test_small_batches_share_a_prefix_among_several_programs():
    assert pallas_gpu.choose_blocks(1, 8, 20, 32768).splits == 16
    assert pallas_gpu.choose_blocks(1, 8, 20, 1024).splits == 4  # short splits do not pay
    assert pallas_gpu.choose_blocks(32, 8, 20, 32768).splits == 1
    assert pallas_tpu.choose_blocks(1, 1, 71, 32768).splits == 2
    assert pallas_tpu.choose_blocks(1, 8, 20, 32768).splits == 1


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("pallas_tpu", dict(slots=20), r"multiple of 8 slots, not 20.*allocate some more"),
        ("pallas_tpu", dict(dtype=np.float16), "float32.*not float16 beside float16"),
        ("pallas_tpu", dict(keys=1025), "up to 1024 tree keys, not 1025; feed fewer"),
        ("pallas_gpu", dict(dtype=np.float32), "in bfloat16.*not float32 beside float32"),
        ("pallas_gpu", dict(dim=72), "multiple of 16 features up to 128, not 72; pad them"),
        ("pallas_gpu", dict(dim=256), "up to 128, not 256"),
        ("pallas_gpu", dict(page=32), "pages of a multiple of 64 slots, not 32; choose others"),
    ],
)
def test_what_a_kernel_does_not_take_is_refused_with_a_remedy(name, changes, message):
    sizes = dict(heads=4, kv_heads=2, dim=64, nodes=3, keys=3, slots=24, dtype=ml_dtypes.bfloat16)
    page = changes.get("page")
    given = {key: value for key, value in changes.items() if key != "page"}
    arrays, table = random_case(**sizes | given, lengths=[0, 5])[0], None
    if page is not None:
        arrays, table = in_pages(arrays, page)
    with pytest.raises(ValueError, match=f"implementation='{name}' .*{message}.*'reference' takes"):
        ops.attention(*arrays.values(), scale=1.0, table=table, implementation=name)


def test_the_gpu_kernel_is_for_hopper():
    gpu = lambda capability: SimpleNamespace(compute_capability=capability, device_kind="NVIDIA X")
    assert pallas_gpu.wrong_device(gpu("9.0")) is None
    for other in ("8.0", "10.0"):
        assert f"(Hopper), not {other} (NVIDIA X)" in pallas_gpu.wrong_device(gpu(other))


@pytest.mark.parametrize(
    ("changes", "page", "devices", "capability", "is_default"),
    [
        ({}, None, 1, "9.0", True),
        ({"nodes": 64, "keys": 64}, None, 1, "9.0", True),
        ({"nodes": 65, "keys": 65}, None, 1, "9.0", False),
        ({"dtype": np.float32}, None, 1, "9.0", False),
        ({}, 64, 1, "9.0", False),
        ({}, None, 2, "9.0", False),
        ({}, None, 1, "8.0", False),
    ],
)
def test_the_gpu_kernel_is_the_default_where_it_was_measured_faster(
    changes, page, devices, capability, is_default, monkeypatch
):
    sizes = dict(heads=4, kv_heads=2, dim=64, nodes=5, keys=5, slots=128, dtype=ml_dtypes.bfloat16)
    arrays, table = random_case(**sizes | changes, lengths=[0, 5])[0], None
    if page is not None:
        arrays, table = in_pages(arrays, page)
    gpu = SimpleNamespace(compute_capability=capability, device_kind="NVIDIA X")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu] * devices)
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    traced = jax.jit(functools.partial(ops.attention, scale=0.3, table=table)).trace(
        *map(jnp.array, arrays.values())
    )
    for platform in ("cuda", "cpu"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        assert ("mosaic_gpu" in text) == (is_default and platform == "cuda")


@pytest.mark.parametrize("name", KERNELS)
def test_a_kernel_without_a_cache_is_refused(name):
    arrays, _ = random_case(4, 2, 64, 3, 3, 24, [0, 5])
    alone = arrays | dict(cache_k=None, cache_v=None)
    with pytest.raises(ValueError, match="needs a cache"):
        ops.attention(*alone.values(), scale=1.0, implementation=name)
