"""The benchmark that takes a round apart: every operation finds its part."""

import pytest

from benchmarks import round_profile
from benchmarks.round_profile import Work
from jspec import Plan
from jspec.engine.batch import SequenceParams
from tests import tiny


@pytest.fixture(scope="module")
def found():
    plan = Plan(tiny.TARGET, tiny.DRAFT)
    return round_profile.profile(
        plan, tiny.params(), SequenceParams(tiny.prompts()[1], 24, 0.8, seed=1)
    )


def test_the_time_of_a_round_is_split_by_part_and_nearly_none_is_left_over(found):
    spent = {}
    for kind in found["work"]:
        spent[kind["part"]] = spent.get(kind["part"], 0) + kind["us"]
    assert all(spent[part] > 0 for part in ("draft", "target", "accept", "commit"))
    assert spent.get("loop", 0) < 0.2 * sum(spent.values())
    assert found["round_us"] > 0 and found["rounds"] > 0


def test_matrix_products_of_a_pass_are_found_in_attention_and_mlp(found):
    for layer in ("attention", "mlp"):
        [products] = [
            kind
            for kind in found["work"]
            if (kind["part"], kind["layer"], kind["multiplies"]) == ("target", layer, True)
        ]
        assert products["us"] > 0 and products["operations"] >= 2 * tiny.TARGET.config.num_layers


def test_an_operation_without_a_place_belongs_to_the_one_before():
    program = "\n\n".join(
        [
            "HloModule jit_decode",
            "%fused (x: f32[2]) -> f32[2] {\n  ROOT %dot.1 = f32[2] dot(%x, %x)\n}",
            "%body (x: f32[2]) -> f32[2] {\n"
            '  %add.1 = f32[2] add(%x, %x), metadata={op_name="jit(decode)/while/target/mlp/add"}\n'
            "  %product = f32[2] fusion(%add.1), kind=kCustom, calls=%fused\n"
            "  ROOT %again = f32[2] while(%product)\n}",
        ]
    )
    work = round_profile.works(program)
    assert work["add.1"] == Work("target", "mlp", False)
    assert work["product"] == Work("target", "mlp", True)
    assert "again" not in work
