"""Fields of requests that the server does not have: refused where they would change the text."""

import logging

import pytest

from jspec.server import fields
from jspec.server.errors import RequestError

KINDS = {
    fields.CompletionFields: {"prompt": "x"},
    fields.ChatFields: {"messages": [{"role": "user", "content": "x"}]},
    fields.ResponseFields: {"input": "x"},
}
# Fields that clients of OpenAI and of other engines send.
INNOCENT = """user metadata store service_tier safety_identifier verbosity prompt_cache_key speed
seeds steps top top_logprobs max_tool_calls max_prompt_tokens reasoning_effort parallel_tool_calls
stop_words repetition_penalty_range temperature_last dynamic_temperature logit_bias_exp num_ctx
min_temperature mirostat_tau mirostat_eta dry_base xtc_threshold do_sample cache_prompt keep_alive
provider transforms usage options format id_slot n_keep safe_prompt thinking of_next_year"""
OFF = {"typical_p": 1.0, "top_a": 0, "tfs_z": 1, "repeat_penalty": 1, "temprature": None}


@pytest.mark.parametrize(("kind", "body"), KINDS.items())
def test_fields_that_change_no_text_are_accepted(kind, body):
    names = [name for name in INNOCENT.split() if name not in kind.model_fields]
    kind(**body, **dict.fromkeys(names, "x"), **OFF).check()


def test_an_unknown_field_is_warned_of_once(monkeypatch, caplog):
    monkeypatch.setattr(fields, "_warned", set())
    with caplog.at_level(logging.WARNING, "jspec.server.fields"):
        for _ in range(2):
            fields.CompletionFields(prompt="x", user="me", **{"of_next_year": 1}).check()
    assert caplog.messages == ["field of_next_year is unknown, and has no effect"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"temprature": 1}, "did you mean 'temperature'?"),
        ({"min_tokenz": 1}, "did you mean 'min_tokens'?"),
        ({"topP": 1}, "did you mean 'top_p'?"),
        ({"top-k": 1}, "did you mean 'top_k'?"),
        ({"presence_penality": 1}, "did you mean 'presence_penalty'?"),
        ({"stopTokenIds": [1]}, "did you mean 'stop_token_ids'?"),
        ({"top_a": 0.1}, "top_a=0.1 is not supported: the filters are top_k, top_p and min_p."),
        ({"typical_p": 0.9}, "the filters are top_k, top_p and min_p."),
        ({"mirostat": 2}, "the filters are top_k, top_p and min_p."),
        ({"repeat_penalty": 1.1}, "set repetition_penalty."),
        ({"no_repeat_ngram_size": 3}, "set repetition_penalty."),
        ({"max_new_tokens": 9}, "set max_tokens."),
        ({"random_seed": 9}, "set seed."),
        ({"num_beams": 4}, "draw with best_of instead."),
        ({"detokenize": False}, "answers are text"),
        ({"length_penalty": 2}, "it belongs to beam search."),
    ],
    ids=str,
)
@pytest.mark.parametrize(("kind", "body"), KINDS.items())
def test_an_unknown_parameter_of_sampling_is_refused_by_name(kind, body, given, words):
    with pytest.raises(RequestError) as error:
        kind(**body, **given).check()
    assert words in str(error.value) and [error.value.param] == list(given)


def test_every_parameter_of_sampling_is_a_field_of_each_endpoint():
    completions, chats, responses = (set(kind.model_fields) for kind in KINDS)
    assert set(fields.SAMPLING) <= completions & chats
    assert set(fields.SAMPLING) - responses == {"n", "best_of", "prompt_logprobs"}
