"""The choice of a back-end of tree attention, and kernels lowered at the size of real models."""

import functools
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec import ops
from jspec.core import trees
from jspec.core.narrow import LIMITS, Narrow
from jspec.kernels.tree_attention import pallas_gpu, pallas_tpu
from jspec.kernels.tree_attention.shapes import CASES
from tests.kernels.attention import in_8_bits, in_pages, random_case

CUDA_OR_TPU = {"pallas_tpu": ("tpu", "tpu_custom_call"), "pallas_gpu": ("cuda", "mosaic_gpu")}

each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


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
            *arrays[:-3],
            positions=arrays[-3],
            table=arrays[-2],
            sinks=arrays[-1],
            scale=0.1,
            window=case.window,
            soft_cap=case.soft_cap,
            implementation=name,
        )

    arrays = (shape(queries, case.nodes, features), tree, tree, words, cache, cache, *integers)
    sinks = jax.ShapeDtypeStruct((queries,), dtype) if case.has_sinks else None
    arrays = (*arrays, table, sinks)
    platform, call = CUDA_OR_TPU[name]
    lowered = jax.jit(attend).trace(*arrays).lower(lowering_platforms=(platform,))
    assert lowered.as_text().count(call) >= 1
    assert lowered.out_info.shape == (batch, queries, case.nodes, features)


@pytest.mark.parametrize("kernel", CUDA_OR_TPU)
@pytest.mark.parametrize("name", LIMITS)
def test_the_kernels_take_pages_in_8_bits(name, kernel):
    shape, pool = jax.ShapeDtypeStruct, (33, 8, 64, 128)
    node = shape((2, 8, 5, 128), jnp.bfloat16)
    cache = jax.eval_shape(lambda: Narrow.zeros(pool, name, jnp.dtype(jnp.bfloat16)))
    words, length, table = ((2, 5, 1), jnp.uint32), ((2,), jnp.int32), ((2, 16), jnp.int32)
    words, length, table = (shape(*each) for each in (words, length, table))

    def attend(q, node, words, cache, length, table):
        return ops.attention(
            q, node, node, words, cache, cache, length, table=table, implementation=kernel
        )

    q = shape((2, 32, 5, 128), jnp.float32)
    traced = jax.jit(attend).trace(q, node, words, cache, length, table)
    platform, call = CUDA_OR_TPU[kernel]
    assert call in traced.lower(lowering_platforms=(platform,)).as_text()


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
    with pytest.raises(ValueError, match=f"implementation='{name}' .*{message}.*leave it out"):
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
        ({}, 64, 1, "9.0", True),
        ({}, 64, 2, "9.0", True),
        ({}, 32, 1, "9.0", False),
        ({}, None, 2, "9.0", False),
        ({}, None, 1, "8.0", False),
    ],
)
def test_the_gpu_kernel_is_the_default_where_figures_speak_for_it(
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


@pytest.mark.parametrize(
    ("changes", "page", "kind", "is_default"),
    [
        ({}, 64, "TPU v6 lite", True),
        ({"stored": "int8"}, 64, "TPU v6 lite", True),
        ({"stored": "float8_e4m3fn"}, 64, "TPU v6 lite", True),
        ({"stored": "int8"}, 16, "TPU v6 lite", False),
        ({"nodes": 512, "keys": 512}, 16, "TPU7x", True),
        ({"nodes": 1025, "keys": 1025}, 64, "TPU7x", False),
        ({"dtype": np.float32}, 64, "TPU v6 lite", False),
        ({}, None, "TPU v6 lite", False),
        ({}, 64, "TPU v4", False),
    ],
)
def test_the_tpu_kernel_is_the_default_over_pages_where_compiled_bytes_speak_for_it(
    changes, page, kind, is_default, monkeypatch
):
    sizes = dict(heads=4, kv_heads=2, dim=64, nodes=5, keys=5, slots=128, dtype=ml_dtypes.bfloat16)
    stored = changes.get("stored")
    given = {key: value for key, value in changes.items() if key != "stored"}
    arrays, table = random_case(**sizes | given, lengths=[0, 5])[0], None
    if page is not None:
        arrays, table = in_pages(arrays, page)
    if stored is not None:
        arrays = in_8_bits(arrays, stored, jnp.bfloat16)
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setattr(jax, "devices", lambda: [SimpleNamespace(device_kind=kind)])
    arguments = arrays["q"], arrays["tree_k"], arrays["cache_k"], table
    for name, runs in ((None, is_default), ("xla", False)):
        chosen = [each.name for each in ops.backends_for("tree_attention", name, *arguments)]
        assert ("pallas_tpu" in chosen) == runs
        assert chosen[-1] == "xla"


@pytest.mark.parametrize("name", CUDA_OR_TPU)
def test_a_kernel_without_a_cache_is_refused(name):
    arrays, _ = random_case(4, 2, 64, 3, 3, 24, [0, 5])
    alone = arrays | dict(cache_k=None, cache_v=None)
    with pytest.raises(ValueError, match="needs a cache"):
        ops.attention(*alone.values(), scale=1.0, implementation=name)


def test_an_implementation_that_is_not_known_is_refused():
    case, _ = random_case(2, 2, 8, 1, 1, 4, [4])
    with pytest.raises(ValueError, match="implementation='cudnn' is not known"):
        ops.attention(*case.values(), scale=1.0, implementation="cudnn")


def test_a_mask_that_is_not_packed_into_words_is_refused():
    case, _ = random_case(2, 2, 8, 3, 3, 4, [1, 2, 4])
    case["ancestors"] = trees.unpack_bits(case["ancestors"], 3)
    with pytest.raises(ValueError, match=r"ancestors is bool\[3, 3, 3\].*need uint32\[3, 3, 1\]"):
        ops.attention(*case.values(), scale=1.0)


def test_a_window_without_positions_is_refused():
    with pytest.raises(ValueError, match="window=3 needs the positions"):
        ops.attention(*random_case(2, 2, 8, 3, 3, 4, [4])[0].values(), scale=1.0, window=3)
