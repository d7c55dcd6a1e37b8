"""The profile of a round assigns every operation to a part."""

import pytest

from benchmarks import round_profile
from benchmarks.round_profile import Work
from jspec import Plan
from jspec.engine.functional import SequenceParams
from tests import tiny


@pytest.fixture(scope="module")
def results():
    plan = Plan(tiny.TARGET, tiny.DRAFT)
    return round_profile.profile(
        plan, tiny.params(), SequenceParams(tiny.prompts()[1], 24, temperature=0.8, seed=1)
    )


def test_nearly_all_time_of_a_round_belongs_to_a_part(results):
    spent = {}
    for kind in results["work"]:
        spent[kind["part"]] = spent.get(kind["part"], 0) + kind["us"]
    assert all(spent[part] > 0 for part in ("draft", "target", "accept", "commit"))
    assert spent.get("loop", 0) < 0.2 * sum(spent.values())
    assert results["round_us"] > 0 and results["rounds"] > 0


def test_matrix_products_of_a_pass_belong_to_attention_or_mlp(results):
    for layer in ("attention", "mlp"):
        [products] = [
            kind
            for kind in results["work"]
            if (kind["part"], kind["layer"], kind["multiplies"]) == ("target", layer, True)
        ]
        assert products["us"] > 0 and products["operations"] >= 2 * tiny.TARGET.config.num_layers


def test_an_operation_without_a_scope_gets_that_of_the_one_before():
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
