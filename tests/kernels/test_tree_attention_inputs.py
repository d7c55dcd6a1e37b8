"""Tree attention with sinks, and over caches in 8 bits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import ops
from jspec.core import trees
from jspec.kernels.tree_attention import cpu_sizes, pallas_tpu, xla, xla_cpu
from tests.kernels.attention import in_8_bits, in_pages
from tests.kernels.test_tree_attention import CLOSE, expected, simulated, small_case


@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_a_sink_is_a_key_of_value_zero_that_every_node_sees(soft_cap):
    arrays, options = small_case(64, 9, has_sinks=True, lengths=[0, 20, 59], seed=1)
    options |= dict(soft_cap=soft_cap)
    chain = jnp.broadcast_to(jnp.tri(5, dtype=bool), (3, 5, 5))
    arrays["ancestors"] = trees.pack_bits(chain & ~jnp.tri(5, k=-9, dtype=bool))
    options["positions"] = arrays["length"][:, None] + np.arange(5)
    result = expected(arrays, options)
    keys, values = (
        np.repeat(np.concatenate([arrays[f"cache_{x}"], arrays[f"tree_{x}"]], 2), 2, 1)
        for x in "kv"
    )
    for row, length in enumerate(arrays["length"]):
        for node in range(5):
            seen = np.r_[max(0, length + node - 8) : length, 64 : 64 + node + 1]
            scores = arrays["q"][row, :, node, None] @ keys[row, :, seen].transpose(1, 2, 0) * 0.3
            scores = scores if soft_cap is None else soft_cap * np.tanh(scores / soft_cap)
            weights = np.exp(scores)
            total = weights.sum(-1, keepdims=True) + np.exp(options["sinks"])[:, None, None]
            by_hand = (weights / total) @ values[row, :, seen].swapaxes(0, 1)
            np.testing.assert_allclose(result[row, :, node], by_hand[:, 0], **CLOSE)
    names = ("positions", "window")
    in_order = {name: x for name, x in options.items() if name not in names} | dict(window=9)
    chain = [jnp.asarray(arrays[name]) for name in list(arrays) if name != "ancestors"]
    np.testing.assert_allclose(ops.ordered_attention(*chain, **in_order), result, **CLOSE)


@pytest.mark.parametrize("page", [None, 32])
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (xla, "int8"),
        (xla, "float8_e5m2"),
        (xla_cpu, "int8"),
        (xla_cpu, "float8_e4m3fn"),
        (pallas_tpu, "int8"),
        (pallas_tpu, "float8_e4m3fn"),
        (pallas_tpu, "float8_e5m2"),
    ],
)
def test_a_cache_in_8_bits_is_the_cache_of_its_numbers(module, name, page, monkeypatch):
    monkeypatch.setattr(cpu_sizes, "WHOLE", 0)
    arrays, options = small_case(96, 50, [0, 41, 96])
    arrays = arrays | {x: np.minimum(arrays[x], 9) for x in ("cache_k", "cache_v")}
    if page is not None:
        arrays, options["table"] = in_pages(arrays, page)
    arrays = in_8_bits(arrays, name, np.float32)
    settings = dict(interpret=simulated()) if module is pallas_tpu else {}
    attend = getattr(module.tree_attention, "__wrapped__", module.tree_attention)
    result = jax.jit(functools.partial(attend, **options, **settings))(*arrays.values())
    numbers = arrays | {x: arrays[x].numbers() for x in ("cache_k", "cache_v")}
    np.testing.assert_allclose(result, expected(numbers, options), **CLOSE)


def test_the_kernel_for_tpu_uses_no_scale_past_the_length():
    arrays, options = small_case(96, None, [0, 41, 96])
    arrays = in_8_bits(arrays, "int8", np.float32)
    numbers = arrays | {x: arrays[x].numbers() for x in ("cache_k", "cache_v")}
    result = expected(numbers, options)
    for x in ("cache_k", "cache_v"):
        unused = np.arange(96) >= arrays["length"][:, None, None, None]
        scales = jnp.where(unused, jnp.nan, arrays[x].scales)
        arrays[x] = arrays[x].replace(scales=scales)
    attend = functools.partial(pallas_tpu.tree_attention.__wrapped__, **options)
    by_kernel = jax.jit(functools.partial(attend, interpret=simulated()))(*arrays.values())
    np.testing.assert_allclose(by_kernel, result, **CLOSE)
