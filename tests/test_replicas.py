"""Data parallelism: engines on devices of their own give the texts of one."""

import pytest

from tests import eight_devices


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("models"))
    one, *several = eight_devices.printed("tests.on_replicas", folder, 1, 4)
    return one, several


def test_texts_of_two_engines_are_those_of_one_on_one_device(cases):
    one, several = cases
    assert [each["tensor"] for each in several] == [1, 4]
    for each in several:
        assert each["texts"] == each["again"] == each["together"] == one["texts"]


def test_each_engine_has_its_arrays_on_devices_of_its_own(cases):
    assert [each["devices"] for each in cases[1]] == [[[0], [1]], [[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_metrics_and_launches_are_those_of_all_engines(cases):
    one, several = cases
    for each in several:
        for name in ("generation_tokens", "prompt_tokens", "prefix_cache_queries"):
            assert each["counted"][f"vllm:{name}"] == one["counted"][f"vllm:{name}"]
        assert each["launches"] >= 4


def test_the_shared_state_of_several_engines_is_not_saved(cases):
    for each in cases[1]:
        assert each["refusal"] == (
            "save_shared writes the state of one engine, but data_parallel_size=2; save it from "
            "an LLM with data_parallel_size=1."
        )
