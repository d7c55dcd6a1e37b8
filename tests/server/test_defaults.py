"""Defaults of requests come from generation_config.json, as in vLLM."""

import json

import httpx
import pytest

from jspec.server import defaults
from tests.server import live

GIVEN = {"temperature": 0.6, "top_k": 20, "do_sample": False, "eos_token_id": 0, "max_length": 9}


@pytest.fixture
def directory(tmp_path):
    (tmp_path / "generation_config.json").write_text(json.dumps(GIVEN))
    return tmp_path


def test_settings_of_sampling_are_read_and_others_left_out(llm, directory):
    assert defaults.of(llm, str(directory)) == {"temperature": 0.6, "top_k": 20}
    assert defaults.of(llm, "vllm") == {}


def test_the_operator_overrides_them(llm, directory):
    override = defaults.overriding({"temperature": 0.2, "min_p": 0.1, "max_new_tokens": 9})
    assert defaults.of(llm, str(directory), override) == {
        "temperature": 0.2,
        "top_k": 20,
        "min_p": 0.1,
        "max_new_tokens": 9,
    }
    assert defaults.of(llm, "vllm", override) == override
    assert defaults.overriding({"presence_penalty": 0.5, "top_p": None}) == {
        "presence_penalty": 0.5
    }


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temprature": 1}, "did you mean 'temperature'"),
        ({"eos_token_id": 3}, "it takes temperature"),
        ({"min_p": 2}, "--override-generation-config: min_p=2"),
        ({"max_new_tokens": 2.5}, "max_new_tokens=2.5 must be"),
    ],
)
def test_an_override_that_has_no_meaning_is_refused(given, words):
    with pytest.raises(ValueError, match=words):
        defaults.overriding(given)


def test_a_directory_without_the_file_and_a_bad_value_are_refused(llm, directory, tmp_path_factory):
    with pytest.raises(ValueError, match=r"there is no generation_config\.json"):
        defaults.of(llm, str(tmp_path_factory.mktemp("empty")))
    (directory / "generation_config.json").write_text('{"temperature": -1}')
    with pytest.raises(ValueError, match=r"generation_config\.json: temperature=-1"):
        defaults.of(llm, str(directory))


def test_a_request_has_the_defaults_that_it_does_not_set(llm):
    body = {"prompt": "the quick", "max_tokens": 12, "seed": 4}
    with live.running(llm, defaults={"temperature": 0.0}) as server:
        ask = lambda **more: httpx.post(f"{server.url}/v1/completions", json=body | more).json()
        texts = [
            ask(**more)["choices"][0]["text"]
            for more in ({}, {"temperature": 0}, {"temperature": 1})
        ]
    assert texts[0] == texts[1] != texts[2]
