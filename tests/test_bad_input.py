"""Bad input of ``LLM``: one line with the value and the remedy, before any compilation."""

import dataclasses
import inspect
import json
import re
import shutil

import numpy as np
import pytest
import tokenizers
from transformers import PreTrainedTokenizerBase

import jspec
from jspec import SamplingParams
from jspec.api import prompts
from jspec.engine.engine import Engine
from jspec.engine.loop import launch
from tests import llm_fixtures

NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def paths(root):
    return llm_fixtures.checkpoints(root)


@pytest.fixture(scope="module")
def llm(root):
    return llm_fixtures.llm(root, "none")


@pytest.fixture(autouse=True)
def nothing_is_compiled():
    """Every error is raised before the first compilation."""
    before = launch._cache_size()
    yield
    assert launch._cache_size() == before


def complaint(call, *arguments, **settings):
    with pytest.raises(ValueError) as error:
        call(*arguments, **settings)
    message = str(error.value)
    assert message and "\n" not in message
    return message


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("", "prompt 0 is empty; give at least one token"),
        (["fine", ""], "prompt 1 is empty"),
        ({"prompt_token_ids": []}, "prompt 0 is empty"),
        (["fine", "caf\udce9"], "half of a surrogate pair; it must be text that UTF-8 can encode"),
        ([{"prompt": "fine"}, {}], "prompt 1 is {}; it must be text, {'prompt': text}"),
        (
            {"promt": "x"},
            "prompt 0 has the key 'promt'; known are prompt, prompt_token_ids, cache_salt; did "
            "you mean 'prompt'?",
        ),
        ({"prompt": 5}, "prompt 0 is 5; its 'prompt' must be text"),
        ([1, 2, 3], "is a list of numbers; give token ids as {'prompt_token_ids': [...]}"),
        (["fine", 5], "prompt 1 is 5; it must be"),
        (["fine", [1, "a"]], "prompt 1 holds 'a' among its prompt_token_ids"),
        (7, "prompts=7 must be text"),
        (b"bytes", "prompts=b'bytes' must be text"),
        ({"prompt_token_ids": [1, "a"]}, "prompt 0 holds 'a' among its prompt_token_ids"),
        ({"prompt_token_ids": [1.0]}, "prompt 0 holds 1.0 among"),
        ({"prompt_token_ids": 3.5}, "prompt 0 holds 3.5 among"),
        ({"prompt_token_ids": np.array([1.5])}, "prompt 0 holds 1.5 among"),
        ({"prompt_token_ids": np.array([True])}, "prompt 0 holds True among"),
        ({"prompt_token_ids": np.array([[1, 2]])}, "prompt 0 holds [1, 2] among"),
        ({"prompt_token_ids": "text"}, "prompt 0 holds 't' among"),
        (
            {"prompt_token_ids": [1, 320]},
            "prompt 0 holds token id 320, outside the vocabulary of "
            "320 tokens; was it made by another tokenizer?",
        ),
        ([{"prompt_token_ids": [1]}, {"prompt_token_ids": [-1]}], "prompt 1 holds token id -1"),
        (
            {"prompt_token_ids": [1] * 256},
            "prompt 0 has 256 tokens, but max_model_len=256 must "
            "hold it and at least one more; shorten it",
        ),
    ],
)
def test_a_prompt_that_cannot_run_is_named(llm, given, message):
    assert message in complaint(llm.generate, given)
    assert message in complaint(llm.stream, given)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (
            [SamplingParams()],
            "The lengths of prompts and params must be the same: 2 prompts and 1 sampling_params.",
        ),
        ({"temperature": 0}, "sampling_params must be a SamplingParams, or a list of one a prompt"),
        ([None, None], "sampling_params must be"),
    ],
)
def test_sampling_params_that_do_not_fit_the_prompts_are_refused(llm, params, message):
    assert message in complaint(llm.generate, ["one", "two"], params)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"logprobs": 21}, "Requested logprobs of 21, which is greater than max allowed: 20"),
        (
            {"prompt_logprobs": -1},
            "Requested prompt_logprobs of -1, the whole vocabulary of 320, "
            "which is greater than max allowed: 20; ask for fewer, or raise LLM(max_logprobs=...).",
        ),
    ],
)
def test_more_logprobs_than_the_limit_are_refused(llm, params, message):
    assert message in complaint(llm.generate, "one", SamplingParams(**params))


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        ("hi", "messages must be a list of {'role': ..., 'content': ...}"),
        ([], "messages must be a list"),
        ([{"content": "hi"}], "the chat template refuses the messages"),
    ],
)
def test_invalid_conversations_are_refused(llm, messages, message):
    assert message in complaint(llm.chat, messages)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        (["a"], "chat_template_kwargs=['a'] must be a dict of the template's variables by name"),
        ({1: 2}, "chat_template_kwargs={1: 2} must be a dict"),
        ({"add_generation_prompt": False}, "give it there, as add_generation_prompt=..."),
        ({"chat_template": "x"}, "chat_template_kwargs has 'chat_template', which is an argument"),
        ({"conversation": []}, "give it there, as messages=..."),
        ({"messages": []}, "give it there, as messages=..."),
        ({"tokenize": True}, "chat_template_kwargs has 'tokenize', which is of making token ids"),
        ({"truncation": True, "max_length": 1}, "has 'truncation'"),
        ({"return_dict": True}, "has 'return_dict'"),
        ({"continue_final_message": True}, "continue_final_message and add_generation_prompt are"),
    ],
)
def test_names_that_are_no_template_variable_are_refused(llm, variables, message):
    chat = [{"role": "user", "content": "hi"}]
    assert message in complaint(llm.chat, chat, chat_template_kwargs=variables)


def test_every_parameter_of_apply_chat_template_is_known():
    """A new one would silently have no effect."""
    passed = {"tools", "documents", "continue_final_message"}
    parameters = inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters
    ours = {*prompts._CHAT_ARGUMENTS, *prompts._TOKENIZATION, *passed, "self", "kwargs"}
    assert parameters.keys() <= ours


def test_a_tokenizer_without_a_chat_template_is_named(root, paths):
    llm = jspec.LLM(llm_fixtures.loaded(root)["draft"])
    message = complaint(llm.chat, [{"role": "user", "content": "hi"}])
    assert "has no chat template; pass chat_template=, or write the prompt yourself" in message
    assert str(paths["draft"]) in message


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_model_len": 257}, "max_model_len=257 must be a whole number from 1 to 256"),
        ({"max_model_len": 0}, "max_model_len=0 must be a whole number from 1 to 256"),
        ({"tensor_parallel_size": 99}, "tensor_parallel_size=99 needs 99 devices, but JAX has"),
        (
            {"tensor_parallel_size": 50, "data_parallel_size": 2},
            "tensor_parallel_size=50 times data_parallel_size=2 needs 100 devices, but JAX has",
        ),
        ({"data_parallel_size": 0}, "data_parallel_size=0 must be a whole number of at least 1."),
        ({"max_model_length": 8}, "LLM has no 'max_model_length'; did you mean 'max_model_len'?"),
        ({"max_num_seqs": 0}, "max_num_seqs=0 must be a whole number of at least 1."),
        ({"seed": "x"}, "seed='x' must be"),
        ({"seed": -1}, "seed=-1 must be a whole number from 0 to 2**64 - 1"),
        (
            {"seed": None},
            "seed=None must be a whole number from 0 to 2**64 - 1; for other texts "
            "draw one by secrets.randbits(64).",
        ),
        ({"per_request_stats": "all"}, "per_request_stats='all' must be None, 'summary' or"),
        ({"dtype": "int8"}, "dtype 'int8' is not supported; pass one of float32, bfloat16"),
        ({"dtype": 5}, "is not supported; pass one of float32"),
        ({"tokenizer": "no/such/tokenizer/anywhere"}, "tokenizer='no/such/tokenizer/anywhere': "),
        (
            {"tokenizer": tokenizers.Tokenizer(tokenizers.models.BPE())},
            "must be a directory, or a tokenizer of transformers; wrap it: transformers.Pre",
        ),
        ({"speculative_config": {"method": "EAGLE3"}}, "; did you mean 'eagle3'?"),
        ({"speculative_config": {"method": "ngram"}}, "num_speculative_tokens must be provided"),
        ({"speculative_config": NGRAM | {"model_name": "x"}}, "has no key 'model_name'"),
    ],
)
def test_settings_out_of_range_are_named(paths, settings, message):
    assert message in complaint(jspec.LLM, paths["target"], **settings)


def test_a_stream_needs_at_least_one_round_a_slice(llm):
    assert "rounds=0 must be" in complaint(llm.stream, "hi", rounds=0)


@pytest.mark.parametrize("model", ["no/such/model/here", "", 5, None])
def test_a_model_that_is_nowhere_is_named(model):
    assert "model" in complaint(jspec.LLM, model)
    assert "model" in complaint(jspec.load, model)


def test_a_draft_model_that_is_nowhere_is_named(root):
    config = {"model": "no/such/model/here", "num_speculative_tokens": 2}
    message = complaint(jspec.LLM, llm_fixtures.loaded(root)["target"], config)
    assert "'no/such/model/here' is neither a directory nor an id on the hub" in message


def test_settings_are_checked_before_weights_are_read(tmp_path, paths):
    """A checkpoint without its weights would fail later."""
    text = (paths["target"] / "config.json").read_text()
    (tmp_path / "config.json").write_text(text)
    assert "from 1 to 256, the positions" in complaint(jspec.LLM, tmp_path, max_model_len=999)
    draft = {"model": str(tmp_path), "num_speculative_tokens": 2, "max_model_len": 300}
    assert "speculative_max_model_len=300" in complaint(jspec.LLM, tmp_path, draft)
    assert "has none of model.safetensors, " in complaint(jspec.LLM, tmp_path)


def test_models_with_different_vocabularies_are_refused(root, tmp_path):
    both = llm_fixtures.loaded(root)
    llm_fixtures.write_tokenizer(tmp_path)
    content = (tmp_path / "tokenizer.json").read_text()
    vocabulary = json.loads(content)["model"]["vocab"]
    first, second = list(vocabulary)[20:22]
    other = json.loads(content)
    other["model"]["vocab"] |= {first: vocabulary[second], second: vocabulary[first]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(other))
    draft = dataclasses.replace(both["draft"], path=tmp_path)
    message = complaint(jspec.LLM, both["target"], {"model": draft, "num_speculative_tokens": 2})
    assert "should have the same vocabulary size. Target model vocab_size=320. Draft" in message
    assert "Their tokenizers differ first at id 20" in message


def test_without_tokenizers_the_sizes_of_the_vocabularies_decide(root, tmp_path):
    both = llm_fixtures.loaded(root)
    bare = [dataclasses.replace(both[name], path=tmp_path) for name in ("target", "draft")]
    message = complaint(jspec.LLM, bare[0], {"model": bare[1], "num_speculative_tokens": 2})
    assert "Target model vocab_size=320. Draft model vocab_size=312." in message


def test_without_a_tokenizer_text_is_refused_with_the_ways_out(root, tmp_path):
    target = llm_fixtures.loaded(root)["target"]
    (tmp_path / "config.json").write_text(json.dumps(target.raw_config))
    bare = jspec.LLM(dataclasses.replace(target, path=tmp_path))
    assert "has no tokenizer" in complaint(bare.generate, "text")
    message = complaint(bare.generate, {"prompt_token_ids": [1, 2]})
    assert "has no tokenizer" in message and "SamplingParams(detokenize=False)" in message
    assert "has no tokenizer" in complaint(bare.get_tokenizer)


@pytest.mark.parametrize(
    ("token_ids", "message"),
    [
        ([1, 2, 3], "token_ids must be whole numbers [B, T], got int64[3]"),
        ([[1.5]], "token_ids must be whole numbers [B, T], got float64[1, 1]"),
        ([[]], "token_ids must be whole numbers [B, T]"),
        ([[1, 320]], "token_ids hold 320, outside the vocabulary of 320"),
        ([[-1]], "token_ids hold -1, outside"),
        (np.zeros((1, 257), int), "token_ids are 257 long, but the model has 256 positions"),
    ],
)
def test_logits_of_invalid_token_ids_are_refused(root, token_ids, message):
    assert message in complaint(llm_fixtures.loaded(root)["target"].logits, token_ids)


def test_a_long_prompt_is_shown_shortened():
    assert len(complaint(prompts.read, {1: "x" * 500}, list)) < 300
    assert len(complaint(prompts.read, [["x" * 500]], list)) < 300


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("generation_config.json", "{", "generation_config.json is not valid JSON"),
        ("generation_config.json", '{"eos_token_id": -1}', "eos_token_id must be a token id or a"),
        ("generation_config.json", '{"eos_token_id": "0"}', "eos_token_id must be a token id or a"),
    ],
)
def test_end_of_text_ids_are_read_when_the_model_is_loaded(paths, tmp_path, file, content, message):
    shutil.copytree(paths["target"], tmp_path / "model")
    (tmp_path / "model" / file).write_text(content)
    assert message in complaint(jspec.LLM, tmp_path / "model")


def test_files_may_begin_with_a_byte_order_mark(paths, tmp_path):
    shutil.copytree(paths["target"], tmp_path / "model")
    config = tmp_path / "model" / "config.json"
    config.write_text(config.read_text(), encoding="utf-8-sig")
    template = tmp_path / "template.jinja"
    template.write_text("Say {{ messages[0]['content'] }}", encoding="utf-8-sig")
    llm = jspec.LLM(tmp_path / "model")
    chat = [{"role": "user", "content": "fox"}]
    assert llm.chat_prompts(chat, chat_template=template)[0]["prompt"] == "Say fox"


@pytest.mark.parametrize(
    "make",
    [
        lambda: jspec.NGram(True),
        lambda: jspec.NGram(3.0),
        lambda: jspec.NGram(3, prompt_lookup_max=2.5),
        lambda: jspec.METHODS["suffix"](suffix_decoding_max_tree_depth=8.0),
        lambda: jspec.METHODS["suffix"](suffix_decoding_max_cached_requests=True),
        lambda: jspec.METHODS["token_recycling"](vocab_size=64, tree_top_k=2.0),
        lambda: jspec.DraftModel(llm_fixtures.DRAFT, 2.0),
    ],
)
def test_a_count_of_a_drafter_is_a_whole_number(make):
    assert re.search(r"=(True|\d\.\d) must be (a whole number|in \[1, |>= 0)", complaint(make))


def test_an_engine_needs_a_capacity(root):
    target = llm_fixtures.loaded(root)["target"]
    plan = jspec.Plan(target.target, jspec.NoDrafter())
    assert (
        complaint(lambda: Engine(plan, jspec.Params(target.params), num_slots=1, capacity=0))
        == "capacity=0 must be whole and at least 1."
    )
