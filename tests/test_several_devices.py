"""Tensor parallelism: the texts of one device, and few collectives."""

import pytest

import jspec
from jspec.models import partition
from tests import eight_devices, on_a_mesh, tiny

LAYERS = on_a_mesh.STANDARD.num_layers


@pytest.fixture(scope="module")
def few():
    return eight_devices.printed("tests.on_a_mesh", "few")


def check_texts(lines, expected):
    cases = [line for line in lines if "case" in line]
    assert [tuple(line["case"]) for line in cases] == expected
    for line in cases:
        assert line["several"] == line["one"], line["case"]
        assert len(line["one"]) == 4 and all(len(text) == 40 for text in line["one"])


def test_texts_of_several_devices_are_those_of_one(few):
    check_texts(few, on_a_mesh.FEW)


@pytest.mark.slow
def test_texts_of_several_devices_are_those_of_one_for_more_methods_and_layers():
    others = eight_devices.printed("tests.on_a_mesh", "others")
    check_texts(others, on_a_mesh.OTHERS)
    check_programs(others)


@pytest.mark.parametrize(("size", "method"), on_a_mesh.COUNTED)
def test_a_round_has_two_all_reduces_a_layer_and_few_more(few, size, method):
    (counted,) = [line["collectives"] for line in few if line.get("counted") == [size, method]]
    assert set(counted) == {"all-reduce"}
    more = 6 if method == "none" else 6 * on_a_mesh.CHAIN["num_speculative_tokens"] + 6
    # Each of the sizes of a pass has the all-reduces behind attention.
    assert 2 * LAYERS <= counted["all-reduce"] <= 2 * LAYERS + more


def check_programs(lines):
    counted = [line["compiled"] for line in lines if "warm" in line]
    assert counted and all(programs == {"ahead": [], "again": []} for programs in counted)


def test_what_is_compiled_ahead_on_several_devices_is_what_runs(few):
    check_programs(few)


def test_logits_that_are_drawn_from_with_every_filter_are_not_gathered(few):
    (counted,) = [line["collectives"] for line in few if line.get("counted") == "sampled"]
    assert set(counted) == {"all-reduce"}


def test_a_number_of_devices_that_divides_no_heads_is_refused_with_those_that_work():
    words = (
        r"tensor_parallel_size=3 does not divide the 8 heads, 2 key heads and MLPs of this model; "
        r"it works with 2, 4, 8\."
    )
    with pytest.raises(ValueError, match=words):
        partition.split(on_a_mesh.STANDARD, 3)


def test_a_drafter_is_whole_on_every_device_or_split_as_the_target_is():
    given = {"method": "ngram", "num_speculative_tokens": 4, "draft_tensor_parallel_size": 2}
    words = (
        r"draft_tensor_parallel_size=2 cannot be other value than 1 or .* tensor_parallel_size=4"
    )
    with pytest.raises(ValueError, match=words):
        jspec.LLM("no/such/model", given, tensor_parallel_size=4)
    with pytest.raises(ValueError, match="draft_tensor_parallel_size=4 does not divide the heads"):
        partition.split_draft(tiny.DRAFT_CONFIG, 4)


def test_experts_of_a_model_without_any_are_refused():
    with pytest.raises(ValueError, match="enable_expert_parallel=True, but the model has no exp"):
        partition.by_experts(on_a_mesh.STANDARD)


def test_more_devices_than_there_are_are_refused_before_anything_is_loaded():
    with pytest.raises(ValueError, match="tensor_parallel_size=512 needs 512 devices, but JAX has"):
        jspec.LLM("no/such/model", tensor_parallel_size=512)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("deterministic", True),
        ("sampling_backend", "reference"),
    ],
)
def test_what_works_on_one_device_alone_is_refused_on_several(name, value):
    with pytest.raises(ValueError, match=f"{name}={value!r} works on one device, but tensor"):
        jspec.LLM("no/such/model", tensor_parallel_size=2, **{name: value})


def test_joined_columns_come_in_parts_of_whole_heads():
    tiny_qkv = tiny.TARGET.config.layers[0].mixer.tensors(32)[0]
    assert tiny_qkv.shapes == ((32, 32), (16, 32), (16, 32))
    halves = tiny_qkv.parts(2).reshape(2, 32)
    assert halves[0].tolist() == [*range(16), *range(32, 40), *range(48, 56)]
    assert halves[1].tolist() == [*range(16, 32), *range(40, 48), *range(56, 64)]
    quarters = tiny_qkv.parts(4).reshape(4, 24)  # two devices share each key head
    assert quarters[1].tolist() == [*range(8, 16), *range(32, 40), *range(48, 56)]
