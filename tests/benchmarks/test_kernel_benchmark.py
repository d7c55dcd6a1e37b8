"""The benchmark of kernels sees a wrong one, and one that does not run ends no other's row."""

import argparse
import functools
import json
import sys

import jax.numpy as jnp
import pytest

from benchmarks import kernels, products
from benchmarks.kernels import LIMITS, XLA
from jspec.kernels.grouped_matmul.shapes import Case
from jspec.kernels.quantized_matmul.shapes import Case as Matrix

SETTINGS = argparse.Namespace(
    operations=["tree_attention", "rejection_sampling"],
    batch=[3],
    lengths=[1024],
    pages=[64],
    dtype="bfloat16",
    cases=["a step over a side buffer", "a chain of 1"],
    repeats=1,
    seconds=None,
)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    monkeypatch.setattr(kernels, "STEPS", 1)
    monkeypatch.setattr(kernels, "MOST_COPIES", 2)
    monkeypatch.setattr(kernels, "bandwidth", lambda: 1e9)


def row_of(operation, beside=None, **others):
    """The row of a contest whose kernel is ``beside``, or XLA with ``others`` as its arrays."""
    [contest] = kernels.OPERATIONS[operation](SETTINGS)
    xla = contest.contenders[XLA]
    if beside is None:
        others = {name: change(xla.keywords[name]) for name, change in others.items()}
        beside = functools.partial(xla.func, *xla.args, **(xla.keywords | others))
    contest = contest._replace(contenders={XLA: xla, "pallas": beside})
    return kernels.measured(contest, 1, 1e9)


def test_attention_in_another_precision_is_well_and_over_half_of_the_cache_is_not():
    single = lambda arrays: jnp.asarray(arrays, jnp.float32)
    wide = row_of(
        "tree_attention",
        q=single,
        nudge=single,
        tree=lambda pair: tuple(map(single, pair)),
        caches=lambda caches: [tuple(map(single, pair)) for pair in caches],
    )
    assert wide["well"] and 0 < wide["difference"] < LIMITS["tree_attention"] / 2
    half = row_of("tree_attention", length=lambda length: length // 2)
    assert not half["well"] and half["difference"] > 5 * LIMITS["tree_attention"]
    blind = row_of("tree_attention", q=lambda q: 0 * q)
    assert not blind["well"]


def test_products_with_other_experts_are_not_well(monkeypatch):
    monkeypatch.setattr(products, "EXPERTS", {"a chain of 1": Case(4, 32, 64, rows=9)})
    same = row_of("grouped_matmul", weights=lambda weights: weights.astype(jnp.float32))
    assert same["well"] and same["floor"] > 0
    other = row_of("grouped_matmul", sizes=lambda sizes: sizes[::-1])
    assert not other["well"]


def test_the_kernel_is_interpreted_on_a_cpu_and_other_groups_are_not_well(monkeypatch):
    monkeypatch.setattr(products, "MATRICES", {"a chain of 1": Matrix("int4", 256, 512, 4, 5)})
    [contest] = products.quantized_matmul(SETTINGS)
    assert list(contest.contenders) == [XLA, products.INTERPRETED]
    same = kernels.measured(contest, 1, 1e9)
    assert same["well"] and same["difference"] < 1e-4
    other = row_of(
        "quantized_matmul",
        matrices=lambda matrices: [
            (values, scales[:, ::-1], *others) for values, scales, *others in matrices
        ],
    )
    assert not other["well"]


def test_verdicts_by_other_uniforms_are_not_well():
    [contest] = kernels.rejection_sampling(SETTINGS)
    xla = contest.contenders[XLA]
    same = row_of("rejection_sampling", xla)
    assert same["well"] and same["difference"] == 0
    case, implementation, rounds, uniform = xla.args
    others = functools.partial(xla.func, case, implementation, rounds, (uniform + 0.5) % 1)
    assert row_of("rejection_sampling", others)["difference"] > LIMITS["rejection_sampling"]


@pytest.mark.parametrize("operation", SETTINGS.operations)
def test_a_kernel_that_does_not_run_or_gives_no_number_is_an_error_of_its_row(operation):
    def refused():
        raise NotImplementedError("no such instruction\nand more")

    row = row_of(operation, refused)
    assert row["errors"] == {"pallas": "NotImplementedError: no such instruction"}
    assert list(row["seconds"]) == [XLA] and not row["well"]
    row = row_of(operation, lambda: jnp.full((2, 2), jnp.nan))
    assert row["errors"] == {"pallas": "returns NaN or infinity"} and not row["well"]
    assert "NaN or infinity" in str(kernels.table([row]).columns[-1]._cells)


def test_rows_are_written_one_by_one_and_none_is_begun_too_late(tmp_path, monkeypatch):
    out, counts, measured = tmp_path / "rows.json", [], kernels.measured

    def seen(*arguments):
        counts.append(len(json.loads(out.read_text())["rows"]) if out.exists() else 0)
        return measured(*arguments)

    monkeypatch.setattr(kernels, "measured", seen)
    words = ["--batch", "1", "2", "--cases", "a chain of 1", "--pages", "0", "--repeats", "1"]
    words += ["--json", str(out)]
    monkeypatch.setattr(sys, "argv", ["kernels", *words])
    kernels.main()
    assert counts == [0, 1] and json.loads(out.read_text())["asked"] == 2
    late = argparse.Namespace(**vars(SETTINGS) | {"seconds": 1e-9})
    assert list(kernels.rows(late)) == []
