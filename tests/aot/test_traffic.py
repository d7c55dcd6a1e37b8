"""The bytes of a round, counted in a small program; and the table of the roofline."""

import dataclasses
import math

import pytest

from jspec.kernels.tree_attention import defaults
from tests.aot import measure, roofline, traffic
from tests.aot.traffic import Caches

MATRIX, POOL, PAGES = 64 * 32 * 2, 9 * 2 * 8 * 4 * 2, 4 * 2 * 8 * 4 * 2
ROUND = """HloModule launch

%reading (a: bf16[4,32], b: bf16[9,2,8,4], c: s32[4]) -> bf16[4,2,8,4] {
  %a = bf16[4,32]{1,0} parameter(0)
  %b = bf16[9,2,8,4]{3,2,1,0} parameter(1)
  %c = s32[4]{0} parameter(2)
  ROOT %gather.1 = bf16[4,2,8,4]{3,2,1,0} gather(%b, %c), slice_sizes={1,2,8,4}
}

%writing (a: bf16[9,2,8,4], b: bf16[1,2,8,4], c: s32[]) -> bf16[9,2,8,4] {
  %a = bf16[9,2,8,4]{3,2,1,0} parameter(0)
  %b = bf16[1,2,8,4]{3,2,1,0} parameter(1)
  %c = s32[] parameter(2)
  ROOT %put = bf16[9,2,8,4]{3,2,1,0} dynamic-update-slice(%a, %b, %c, %c, %c, /*index=5*/%c)
}

%block (carry: CARRY) -> CARRY {
  %carry = CARRY parameter(0)
  %index = s32[] get-tuple-element(%carry), index=0
  %pool = bf16[9,2,8,4]{3,2,1,0} get-tuple-element(%carry), index=1
  %x = bf16[4,32]{1,0:S(1)} get-tuple-element(%carry), index=2
  %ids = s32[4]{0:S(1)} get-tuple-element(%carry), index=3
  %taken = bf16[4,2,8,4]{3,2,1,0} fusion(%x, %pool, %ids), kind=kLoop, calls=%reading
  ROOT %next = CARRY tuple(%index, %pool, %x, %ids)
}

%before (carry: CARRY) -> pred[] {
  %carry = CARRY parameter(0)
  %index = s32[] get-tuple-element(%carry), index=0
  ROOT %less = pred[] compare(%index, %index), direction=LT
}

%round (state: STATE) -> STATE {
  %state = STATE parameter(0)
  %weight = bf16[64,32]{1,0} get-tuple-element(%state), index=0
  %pool = bf16[9,2,8,4]{3,2,1,0} get-tuple-element(%state), index=1
  %zero = s32[] constant(0)
  %near = (bf16[64,32]{1,0:S(1)}, bf16[64,32]{1,0}, u32[]) copy-start(%weight)
  %here = bf16[64,32]{1,0:S(1)} copy-done(%near)
  %x = bf16[4,64]{1,0:S(1)} constant({...})
  %ids = s32[4]{0:S(1)} constant({...})
  %product = bf16[4,32]{1,0:S(1)} dot(%x, %here), lhs_contracting_dims={1}
  %sum = bf16[4,32]{1,0:S(1)} all-reduce(%product), to_apply=%before
  %new = bf16[1,2,8,4]{3,2,1,0:S(1)} constant({...})
  %given = CARRY tuple(%zero, %pool, %sum, %ids)
  %blocks = CARRY while(%given), condition=%before, body=%block
  %written = bf16[9,2,8,4]{3,2,1,0} fusion(%pool, %new, %zero), kind=kLoop, calls=%writing
  ROOT %after = STATE tuple(%weight, %written)
}

%goes_on (state: STATE) -> pred[] {
  %state = STATE parameter(0)
  ROOT %yes = pred[] constant(true)
}

ENTRY %main (weight: bf16[64,32], pool: bf16[9,2,8,4]) -> STATE {
  %weight = bf16[64,32]{1,0} parameter(0)
  %pool = bf16[9,2,8,4]{3,2,1,0} parameter(1)
  %relaid = bf16[64,32]{0,1} copy(%weight)
  %first = STATE tuple(%relaid, %pool)
  ROOT %loop = STATE while(%first), condition=%goes_on, body=%round
}
"""
for name, arrays in {
    "CARRY": "(s32[], bf16[9,2,8,4]{3,2,1,0}, bf16[4,32]{1,0}, s32[4]{0})",
    "STATE": "(bf16[64,32]{1,0}, bf16[9,2,8,4]{3,2,1,0})",
}.items():
    ROUND = ROUND.replace(name, arrays)
TWO_ROWS = Caches(page_shape=(2, 8, 4), rows=2, context=64)


def read(text, caches=TWO_ROWS):
    return traffic.read(text, caches, frozenset({(64, 32)}))


def sizes(result):
    return {each.instruction.name: each.size for each in result.moved}


def test_a_round_reads_a_weight_once_and_of_pages_what_it_gathers():
    # Two pages of 8 slots for each row and turn: 64 tokens take 4 turns.
    turns = 4
    assert sizes(read(ROUND)) == {
        "near": MATRIX,
        "taken": turns * 2 * PAGES,  # read and written
        "written": 2 * 8 * 4 * 2 + 4,  # a page in place, and its number
    }
    assert read(ROUND).uncounted == []


def test_arrays_in_main_memory_are_read_by_every_instruction_that_takes_them():
    text = ROUND.replace(":S(1)", "")
    result = sizes(read(text))
    assert result["product"] == MATRIX + 4 * 64 * 2 + 4 * 32 * 2
    assert result["near"] == 2 * MATRIX


def test_a_kernel_reads_an_array_once_that_it_takes_twice():
    twice = """  %one = bf16[64,32]{1,0} bitcast(%weight)
  %two = bf16[64,32]{1,0} bitcast(%weight)
  %product = bf16[4,32]{1,0:S(1)} custom-call(%x, %one, %two)"""
    (plain,) = (line for line in ROUND.splitlines() if "%product =" in line)
    assert sizes(read(ROUND.replace(plain, twice)))["product"] == MATRIX


@pytest.mark.parametrize(
    ("context", "window", "turns"), [(64, None, 4), (65, None, 5), (64, 16, 1), (60, 16, 2)]
)
def test_attentions_loop_runs_for_the_blocks_that_queries_see(context, window, turns):
    caches = dataclasses.replace(TWO_ROWS, context=context, window=window)
    assert sizes(read(ROUND, caches))["taken"] == turns * 2 * PAGES


def test_loops_of_known_and_unknown_length_are_told_apart():
    known = ROUND.replace(
        "body=%block", 'body=%block, backend_config={"known_trip_count":{"n":"7"}}'
    )
    assert sizes(read(known))["taken"] == 7 * 2 * PAGES
    unknown = ROUND.replace("gather(%b, %c)", "reduce(%b, %c)")
    assert read(unknown).uncounted == ["blocks"]


def test_a_launch_copies_the_weights_that_it_relays():
    assert read(ROUND).weight_copies == MATRIX
    assert read(ROUND.replace("copy(%weight)", "bitcast(%weight)")).weight_copies == 0


def test_collectives_of_a_round_are_counted():
    assert read(ROUND).collectives == {"all-reduce": 1}


def test_two_depths_give_the_figures_of_all_layers():
    plain = [{"bytes": 100 + 10 * depth} for depth in measure.DEPTHS]
    windowed = [{"bytes": 100 + 3 * depth} for depth in measure.DEPTHS]
    of_all = measure.extrapolated({False: plain, True: windowed}, {False: 10, True: 52})
    assert of_all == {"bytes": 100 + 10 * 10 + 3 * 52}


def test_figures_of_the_roofline_may_only_get_better():
    rows, *_ = roofline.load()["devices"].values()
    before = next(iter(rows.values()))
    assert roofline.regressions(before, before) == []
    assert roofline.regressions(before, before | {"ratio": before["ratio"] - 0.5}) == []
    worse = before | {"ratio": before["ratio"] + 0.5, "seconds": 10**6}
    assert [problem.split()[0] for problem in roofline.regressions(before, worse)] == ["ratio"]
    assert "--write" in roofline.regressions(None, before)[0]


@pytest.mark.parametrize(
    ("device", "module", "kind"),
    [
        ("h200", "pallas_gpu", ""),
        ("v6e", "pallas_tpu", "TPU v6 lite"),
        ("v5e", "pallas_tpu", "TPU v5 lite"),
        ("tpu7x", "pallas_tpu", "TPU7x"),
    ],
)
def test_a_kernel_that_is_the_default_over_pages_moves_fewer_bytes_than_xla(device, module, kind):
    assert any(kind in each.kinds for each in defaults.DEFAULTS[module] if each.has_pages)
    rows = roofline.load()["devices"][device]
    pairs = [
        (rows[name.replace(", xla", ", kernel")]["ratio"], row["ratio"])
        for name, row in rows.items()
        if ", xla" in name and name.replace(", xla", ", kernel") in rows
    ]
    assert all(kernel <= xla for kernel, xla in pairs)
    assert any(kernel < 0.8 * xla for kernel, xla in pairs)


def test_the_docs_show_the_table_of_the_roofline():
    assert roofline.shown(roofline.PAGE.read_text()) == roofline.markdown(roofline.load())


def test_no_round_moves_less_than_its_minimum():
    rows = [row for rows in roofline.load()["devices"].values() for row in rows.values()]
    assert rows and all(row["ratio"] > 0.95 and math.isfinite(row["ratio"]) for row in rows)
