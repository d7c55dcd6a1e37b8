"""The benchmark of verification: its results, the cases it leaves out, and its lowering."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import verify_cost
from benchmarks.verify_cost import CONFIGS, Case
from jspec.models import decoder
from tests import networks

TINY = ["--shape", "tiny", "--layers", "1", "--lengths", "64", "--repeats", "1", "--patience", "0"]


def run(path, *words):
    verify_cost.main([*TINY, *words, "--out", str(path / "out.json")])
    return json.loads((path / "out.json").read_text())


def test_a_tiny_model_is_measured_on_any_machine(tmp_path, capsys):
    results = run(tmp_path, "--nodes", "1", "8", "--batch", "2")
    of = lambda row: tuple(row[name] for name in ("batch", "length", "nodes", "draft"))
    measured = [(1, "chain"), (8, "chain"), (8, "tree")]
    assert [of(row) for row in results["rows"]] == [(2, 64, *each) for each in measured]
    alone, *_ = (row["milliseconds_best"] for row in results["rows"])
    for row in results["rows"]:
        assert row["milliseconds_best"] > 0
        assert row["ratio_best"] == pytest.approx(row["milliseconds_best"] / alone, rel=0.01)
    assert results["left_out"] == []
    assert {"device", "versions", "commit", "argv"} <= results.keys()
    assert "bar V(8)/V(1) <= 1.10 at batch 1: not measured" in capsys.readouterr().out


def test_a_prefix_that_does_not_fit_is_reported_and_left_out(tmp_path, capsys, monkeypatch):
    one_row = 2 * 2 * 128 * 16 * 4  # keys and values, heads, slots, features, bytes
    monkeypatch.setattr(verify_cost, "room", lambda: 2**19 + one_row)
    results = run(tmp_path, "--nodes", "1", "--batch", "1", "32")
    assert {row["batch"] for row in results["rows"]} == {1}
    assert [(each["batch"], each["length"]) for each in results["left_out"]] == [(32, 64)]
    needed = f"needs {32 * one_row / 1e9:.1f} GB"
    assert f"left out: batch 32, length 64: {needed}" in capsys.readouterr().out


def test_a_program_that_does_not_fit_is_reported_and_left_out(tmp_path, monkeypatch):
    config = networks.changed(CONFIGS["tiny"], num_layers=1)
    cache = verify_cost.size(verify_cost.cache_like(config, 1, 64, 1))
    rooms = iter([2**30, cache])  # for the weights, and for the cache alone
    monkeypatch.setattr(verify_cost, "room", lambda: next(rooms, cache))
    results = run(tmp_path, "--nodes", "1", "--batch", "1")
    assert results["rows"] == []
    assert [each["nodes"] for each in results["left_out"]] == [1]
    assert all("are left" in each["reason"] for each in results["left_out"])


def test_weights_that_do_not_fit_end_the_run(tmp_path, monkeypatch):
    monkeypatch.setattr(verify_cost, "room", lambda: 1000)
    with pytest.raises(SystemExit, match="take fewer --layers"):
        run(tmp_path)


def test_weights_take_at_most_half_of_the_memory(monkeypatch):
    whole, one = CONFIGS["Llama-3.1-8B"], 2 * (4096 * (2 * 4096 + 2 * 1024 + 2) + 3 * 4096 * 14336)
    ends = 2 * (2 * 128256 * 4096 + 4096)
    for room, layers in ((80e9, 32), (2 * (ends + 13 * one), 13), (1e9, 1)):
        monkeypatch.setattr(verify_cost, "room", lambda room=room: room)
        assert verify_cost.fitting(whole, "bfloat16").num_layers == layers


def test_the_bar_is_met_if_all_ratios_of_an_implementation_are_below_it():
    row = dict(draft="chain", batch=1, length=64, nodes=8)
    rows = [
        row | dict(implementation="xla", ratio_best=1.05),
        row | dict(implementation="xla", length=128, ratio_best=1.2),
        row | dict(implementation="pallas_gpu", ratio_best=1.1),
        row | dict(implementation="pallas_gpu", batch=8, ratio_best=2.0),
    ]
    assert [each["met"] for each in verify_cost.bar(rows).values()] == [False, True]
    text = verify_cost.verdict(rows)
    assert "batch 1, xla: not met (1.050 chain at 64, 1.200 chain at 128)" in text
    assert "batch 1, pallas_gpu: met (1.100 chain at 64)" in text
    assert verify_cost.verdict([]).endswith("not measured")


def test_chains_and_trees_have_one_pytree_structure():
    chain, tree = (verify_cost.tree_of(Case("", draft, 2, 0, 16)) for draft in ("chain", "tree"))
    assert jax.tree.structure(chain) == jax.tree.structure(tree)
    np.testing.assert_array_equal(chain.depth, [range(16)] * 2)
    assert tree.depth.max() <= 6
    assert np.bincount(tree.parents[0][1:]).max() > 1


@pytest.mark.parametrize(
    ("implementation", "platform", "call"),
    [("pallas_gpu", "cuda", "mosaic_gpu"), ("pallas_tpu", "tpu", "tpu_custom_call")],
)
def test_the_passes_of_the_large_model_lower_with_a_kernel(implementation, platform, call):
    config = networks.changed(
        CONFIGS["Llama-3.1-8B"], num_layers=2, cache_dtype="bfloat16", activation_dtype="bfloat16"
    )
    params = jax.eval_shape(lambda: decoder.init_params(jax.random.key(0), config, jnp.bfloat16))
    like = verify_cost.cache_like(config, 8, 32768, 64)
    traced = verify_cost.trace_passes(config, implementation, 8, 2, params, like)
    assert call in traced.lower(lowering_platforms=(platform,)).as_text()
