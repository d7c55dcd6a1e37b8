"""Weights in the layouts that a device reads, with a table for the CPU that real ones lack."""

import logging
import types

import jax
import numpy as np
import pytest
from jax.experimental.layout import Layout
from jax.sharding import AxisType

import jspec
from jspec.checkpoints import loading
from jspec.models import layouts, partition
from jspec.sharding import TENSOR
from tests import llm_fixtures

COLUMNS = Layout((1, 0))
SETTINGS = jspec.SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)


@pytest.fixture
def table(monkeypatch):
    rows = {}
    monkeypatch.setattr(layouts, "LAYOUTS", {"cpu": rows})
    layouts.takes.cache_clear()
    yield rows
    layouts.takes.cache_clear()


@pytest.fixture
def target(root):
    return llm_fixtures.checkpoints(root)["target"]


def orders(params):
    """Return the order of axes, major first, of every array, by its path."""
    leaves = jax.tree.leaves_with_path(params)
    return {jax.tree_util.keystr(path): x.format.layout.major_to_minor for path, x in leaves}


def test_matrices_have_the_layouts_of_the_table_and_texts_stay(target, table):
    plain = jspec.LLM(target, dtype="bfloat16", max_num_seqs=2, max_model_len=64)
    table["qkv"] = COLUMNS
    layouts.takes.cache_clear()
    for model in (target, loading.load(target, "bfloat16")):  # read, and in memory
        laid = jspec.LLM(model, dtype="bfloat16", max_num_seqs=2, max_model_len=64)
        found = orders(laid.build.params.target)
        columns = [name for name, order in found.items() if order == (1, 0)]
        assert columns == [name for name in found if name.endswith(".qkv")] != []
        texts = [llm.generate(["the quick"], SETTINGS)[0].outputs[0] for llm in (plain, laid)]
        assert texts[0].token_ids == texts[1].token_ids
    laid.update_params(jax.tree.map(np.asarray, laid.build.params.target))
    assert orders(laid.build.params.target) == found


def test_the_first_row_without_a_name_is_for_all_other_matrices(table):
    table.update({"embedding": Layout((0, 1)), "": COLUMNS})
    assert layouts.of("cpu", ("layers", 0, "mixer", "output")) == COLUMNS
    assert layouts.of("cpu", ("embedding",)) == Layout((0, 1))
    assert layouts.of("gpu", ("embedding",)) is None


def test_float32_weights_keep_the_default_layout(target, table):
    table[""] = COLUMNS
    placements = partition.placements({}, None)
    params = loading.load(target, "float32", placements).params
    assert (1, 0) not in orders(params).values()
    np.testing.assert_array_equal(params.embedding, loading.load(target).params.embedding)


@pytest.mark.parametrize("has_mesh", [False, True])
def test_a_device_that_refuses_a_layout_keeps_its_own_with_one_line(has_mesh, table, caplog):
    table["qkv"] = Layout((0, 1, 2))
    mesh = jax.make_mesh((1,), (TENSOR,), (AxisType.Auto,)) if has_mesh else None
    with caplog.at_level(logging.WARNING, logger="jspec"):
        for _ in range(2):
            placement = partition.placements({}, mesh)
            assert (placement(("qkv",)).layout if has_mesh else placement) is None
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("cpu takes no layouts, so launches copy weights: ")


@pytest.mark.parametrize("num_devices", [1, 4])
def test_several_7x_take_no_tiles_of_sixteen_rows(num_devices):
    """XLA makes tiles of 8 of them when it divides a program, and JAX raises then."""
    found = layouts.of("TPU7x", ("layers", 0, "mixer", "qkv"), num_devices)
    assert found.tiling[0] == (16 if num_devices == 1 else 8, 128)
    assert (layouts.of("TPU7x", ("head",), num_devices) is None) == (num_devices > 1)


def test_several_7x_name_the_option_against_copies_once(monkeypatch, caplog):
    device = types.SimpleNamespace(device_kind="TPU7x")
    sharding = type("Sharding", (), {"device_set": (device,) * 4})()
    monkeypatch.setattr(layouts, "LAYOUTS", {})
    with caplog.at_level(logging.WARNING, logger="jspec"):
        assert [layouts.takes(sharding) for _ in range(2)] == [False, False]
    (line,) = [record.getMessage() for record in caplog.records]
    assert f"LIBTPU_INIT_ARGS={layouts.SMALL_TILES}" in line


def test_devices_without_a_row_load_as_before():
    assert not {"cpu", "NVIDIA H200"} & set(layouts.LAYOUTS)
    assert partition.placements({}, None) is None
