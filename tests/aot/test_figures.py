"""Figures of compiled programs, and their regressions."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from tests.aot import figures, table

SHAPE = (2, 3, 41, 5)  # shape of a cache


def compiled(body):
    """Compile a loop that carries a donated cache through ``body``."""

    def loop(cache, turns):
        return lax.fori_loop(0, turns, lambda index, cache: body(cache, index), cache)

    cache = jax.ShapeDtypeStruct(SHAPE, jnp.float32)
    return jax.jit(loop, donate_argnums=0).lower(cache, jnp.int32(3)).compile()


def write(cache, index):
    row = jnp.full((2, 3, 1, 5), index, cache.dtype)
    return lax.dynamic_update_slice(cache, row, (0, 0, index, 0))


def test_a_write_in_place_is_no_copy_of_a_cache():
    result = figures.read(compiled(write), (SHAPE,))
    assert result["cache_copies_in_loop"] == result["cache_copies_once"] == 0


@pytest.mark.parametrize(
    "body",
    [
        lambda cache, index: write(jnp.flip(cache, 2), index),
        lambda cache, index: write(cache.astype(jnp.bfloat16), index).astype(jnp.float32),
    ],
    ids=["reversed", "through another dtype"],
)
def test_a_cache_that_is_written_anew_is_counted(body):
    assert figures.read(compiled(body), (SHAPE,))["cache_copies_in_loop"] > 0


def test_an_array_of_another_size_is_not_taken_for_a_cache():
    body = lambda cache, index: write(jnp.flip(cache, 2), index)
    assert figures.read(compiled(body), ((2, 3, 42, 5),))["cache_copies_in_loop"] == 0


def test_figures_that_rise_are_worse_and_those_that_fall_are_not():
    before = {"temp_bytes": 10**7, "all-reduce": 2}
    assert table.regressions(before, {"temp_bytes": 10**7 + 1000, "all-reduce": 1}) == []
    assert table.regressions(before, before | {"temp_bytes": 2 * 10**7}) == [
        "temp_bytes rose from 10,000,000 to 20,000,000"
    ]
    assert table.regressions(before, before | {"all-gather": 1}) == ["all-gather rose from 0 to 1"]
    assert "--write" in table.regressions(None, before)[0]
