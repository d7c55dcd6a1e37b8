"""KV caches in fp8 and int8: texts depend on no drafter, page, preemption or warm prefix."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec.api.backends import Backends
from jspec.core import kv_cache, trees
from jspec.core.entries import AttentionKV, Commit
from jspec.core.narrow import LIMITS, Narrow
from jspec.core.paging import pool_of
from jspec.core.types import Params
from jspec.drafters import NoDrafter
from jspec.engine.engine import Engine
from jspec.engine.plan import Plan
from jspec.models.blocks.latent_attention import LatentKV
from jspec.models.decoder import Decoder
from tests import eight_devices, on_narrow_caches, tiny
from tests.drafters import dflashes, heads
from tests.engine.test_pages import AMPLE, SCARCE, paged, run, sequences, texts

FORMATS = ("float8_e4m3fn", "float8_e5m2", "int8")
# The largest error of a number, relative to the largest of its vector.
NOISE = {"float8_e4m3fn": 2**-4, "float8_e5m2": 2**-3, "int8": 0.5 / 127}
DRAFTERS = {
    "eagle3": (heads, "eagle3", dict(tree="eagle2", tree_size=9, tree_top_k=3)),
    "dflash": (dflashes, "sliding", dict(tree="best_first", tree_size=8)),
}


def target(name):
    """Return the tiny target with a cache in a format."""
    return Decoder(dataclasses.replace(tiny.TARGET.config, kv_cache_dtype=name))


def narrow(drafter, dtype):
    """Return a drafter whose cache has another format."""
    config = Backends().running(drafter.config, None, dtype)
    return dataclasses.replace(drafter, config=config)


def test_numbers_of_int8_are_the_closest_and_none_is_clipped():
    x = np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32)
    x[0, 0], x[1, 1, 3], x[2, 2] = 0, 1e30, 1e-30
    x[1, 2, 0] = np.nan
    stored = Narrow.of(jnp.asarray(x), "int8", np.dtype(np.float32))
    assert (stored.values.dtype, stored.scales.shape) == (jnp.int8, (3, 5, 1))
    result = np.array(stored.numbers())
    assert np.isnan(result[1, 2]).all()
    x[1, 2], result[1, 2] = 0, 0
    largest = np.abs(x).max(-1, keepdims=True)
    np.testing.assert_allclose(np.abs(result).max(-1), largest[..., 0], rtol=1e-6)
    assert (np.abs(result - x) <= NOISE["int8"] * largest * (1 + 1e-5)).all()


@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_numbers_of_fp8_are_the_closest_and_too_large_ones_the_largest(name):
    x = 30 * np.random.default_rng(0).standard_normal((3, 5, 64)).astype(np.float32)
    x[0, 0], x[1, 1, :3], x[2, 2] = 0, (1e30, -np.inf, np.nan), 1e-3
    stored = Narrow.of(jnp.asarray(x), name, np.dtype(np.float32))
    assert (stored.values.dtype, stored.scales) == (jnp.uint8, None)
    clipped = np.clip(x, -LIMITS[name], LIMITS[name])
    by_ml_dtypes = clipped.astype(getattr(ml_dtypes, name)).astype(np.float32)
    np.testing.assert_array_equal(stored.numbers(), by_ml_dtypes)
    assert by_ml_dtypes[1, 1, 0] == -by_ml_dtypes[1, 1, 1] == LIMITS[name]


def test_an_entry_keeps_its_format_in_a_pool_and_bits_are_one_byte_a_number():
    entry = AttentionKV.empty(2, 2, 8, 16, jnp.float32)
    latent = LatentKV.empty(2, 8, 24, jnp.float32)
    for each in (entry, latent):
        pool = pool_of(each.stored_as("int8"), 5, 4, jnp.bfloat16, in_bits=True)
        assert isinstance(pool.k, Narrow)
        assert (pool.k.values.dtype, pool.k.dtype) == (jnp.int8, jnp.float32)
        assert pool.k.scales.shape == (5, each.k.shape[1], 1, 128)
        plain = pool_of(each.stored_as("float32"), 5, 4, jnp.bfloat16, in_bits=True)
        assert plain.k.dtype == jnp.float32
        assert pool_of(each, 5, 4, jnp.bfloat16, in_bits=True).k.dtype == jnp.uint16


@pytest.mark.parametrize("page", [1, 4, 128, 192])
def test_pages_hold_the_committed_nodes_and_nothing_else_changes(page):
    rng, most = np.random.default_rng(0), -(-32 // page)
    table = jnp.asarray(1 + rng.permutation(3 * most).reshape(3, most), jnp.int32)
    entry = AttentionKV.empty(3, 2, 32, 8, jnp.float32).stored_as("int8")
    pool = pool_of(entry, 3 * most + 2, page, None, in_bits=False)
    expected = np.zeros((3 * most + 2, 2, page, 8), np.float32)
    length = np.array([3, 0, 9])
    append = jax.jit(lambda pool, new, *commit: pool.append(new, Commit(*commit, table)))
    for count in ([7, 0, 2], [1, 5, 9]):
        k, v = jnp.asarray(rng.standard_normal((2, 3, 2, 12, 8)), jnp.float32)
        path, new = jnp.asarray(rng.integers(0, 12, (3, 9))), entry.holding(k, v)
        pool = append(pool, new, path, jnp.asarray(count), jnp.asarray(length))
        for row, slots in enumerate(count):
            for step in range(slots):
                slot = length[row] + step
                place = table[row, slot // page], slice(None), slot % page
                expected[place] = new.k.numbers()[row, :, path[row, step]]
        length = length + count
    np.testing.assert_array_equal(pool.k.numbers(), expected)


@pytest.mark.parametrize("name", FORMATS)
def test_logits_are_those_of_rounded_keys_and_values_however_a_text_is_cut(name):
    tokens = jnp.asarray(np.random.default_rng(0).integers(0, tiny.VOCAB, (2, 24)), jnp.int32)
    params, model = tiny.params().target, target(name)

    def chunks(model, size):
        forward = jax.jit(functools.partial(model.forward, params))
        tree, cache, logits = trees.from_parents(trees.chain(size - 1), size - 1), None, []
        cache = model.init_cache(2, 32)
        every = jnp.broadcast_to(jnp.arange(size), (2, size))
        for first in range(0, 24, size):
            output = forward(tokens[:, first : first + size], tree, cache)
            logits.append(output.logits)
            cache = kv_cache.append(cache, output.tree_kv, every, jnp.full((2,), size))
        return np.concatenate(logits, 1)

    once = chunks(model, 24)
    np.testing.assert_allclose(chunks(model, 4), once, atol=5e-6)
    plain = chunks(tiny.TARGET, 24)
    error, size = np.abs(once - plain).max(), np.abs(plain).max()
    assert 1e-4 * size < error < 2 * NOISE[name] * size  # in two layers


@functools.cache
def expected(name):
    """Return the texts without a drafter, over contiguous caches."""
    plan = Plan(target(name), NoDrafter(), "coupled", node_buckets=(1,))
    engine = Engine(plan, Params(tiny.params().target), num_slots=3, capacity=64, shared=())
    tickets = [engine.submit(row) for row in sequences()]
    while not engine.is_idle:
        engine.step()
    return texts(tickets)


@pytest.mark.parametrize(
    ("name", "method", "draft_dtype"),
    [("float8_e4m3fn", "eagle3", "int8"), ("int8", "dflash", "fp8_e5m2"), ("int8", "eagle3", None)],
)
def test_texts_do_not_depend_on_drafter_pages_prefix_or_preemption(name, method, draft_dtype):
    module, kind, tree = DRAFTERS[method]
    drafter, weights = module.drafter(kind, 3, **tree), module.random_params(kind)
    plan = Plan(
        target(name), narrow(drafter, draft_dtype), "coupled", node_buckets=(drafter.tree_size,)
    )
    params = Params(tiny.params().target, weights)
    engine = paged(plan, params, AMPLE)
    for is_warm in (False, True):
        before = engine.pool.blocks.hits
        assert texts(run(engine, sequences())) == expected(name)
        assert (engine.pool.blocks.hits > before) or not is_warm
    scarce = run(paged(plan, params, SCARCE), sequences(), rounds=2)
    assert sum(ticket.num_preemptions for ticket in scarce) > 0
    assert texts(scarce) == expected(name)


def test_two_devices_with_a_drafter_have_the_texts_of_one_without():
    lines = eight_devices.printed("tests.on_narrow_caches")
    assert len(lines) == len(on_narrow_caches.CASES)
    for line in lines:
        assert line["several"] == line["plain"], line["case"]
        assert all(len(text) == 20 for text in line["plain"])
