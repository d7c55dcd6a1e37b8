"""Calls that are written for vLLM: forms of prompts, and arguments without an effect here."""

import json

import numpy as np
import pytest

import jspec
from jspec.api import config
from tests import llm_fixtures

GREEDY = jspec.SamplingParams(temperature=0, max_tokens=6)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}
TOOL = {"type": "function", "function": {"name": "look", "parameters": {}}}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return llm_fixtures.checkpoints(tmp_path_factory.mktemp("models"))["target"]


@pytest.fixture(scope="module")
def llm(target):
    return jspec.LLM(target)


def complaint(call, *arguments, **keywords):
    with pytest.raises(ValueError) as error:
        call(*arguments, **keywords)
    return str(error.value)


def test_lists_of_token_ids_are_prompts(llm):
    ids = [[1, 2, 3], [4, 5]]
    expected = llm.generate([{"prompt_token_ids": each} for each in ids], GREEDY)
    for prompts in (ids, [np.array(each) for each in ids], [tuple(each) for each in ids]):
        actual = llm.generate(prompts, GREEDY)
        assert [each.prompt_token_ids for each in actual] == ids
        assert [each.outputs[0].text for each in actual] == [e.outputs[0].text for e in expected]
    assert "list of numbers; give token ids as" in complaint(llm.generate, [1, 2, 3], GREEDY)


def test_a_config_may_be_json(target):
    assert config.read(json.dumps(NGRAM)) == config.read(NGRAM)
    message = complaint(jspec.LLM, target, '{"method": "ngram"')
    assert "is text, but not JSON" in message and "give a dict, or JSON such as" in message
    assert "must be a dict" in complaint(jspec.LLM, target, "[1]")


def test_arguments_without_an_effect_are_accepted_and_others_refused_by_name(target):
    jspec.LLM(
        target,
        quantization=None,
        enforce_eager=True,
        trust_remote_code=True,
        compilation_config={"cudagraph_capture_sizes": [1, 2, 4]},
        max_num_batched_tokens=5000,
        distributed_executor_backend="mp",
        async_scheduling=True,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.9,
    )
    for name, value, message in (
        ("trust_remote_code", "yes", "trust_remote_code='yes' is not supported: it is True or"),
        ("tensor_parallel_size", 99, "tensor_parallel_size=99 needs 99 devices, but JAX has"),
        ("tensor_parallel_size", True, "tensor_parallel_size=True must be a whole number of"),
        ("quantization", "awq", "quantization='awq' is not supported"),
        ("enforce_eagr", False, "LLM has no 'enforce_eagr'; did you mean 'enforce_eager'?"),
        ("whatever", 1, "LLM has no 'whatever'; leave it out."),
    ):
        assert message in complaint(jspec.LLM, target, **{name: value})


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("speculative_model", "vLLM before 0.10 called it so, here it is 'model'"),
        (
            "ngram_prompt_lookup_max",
            "vLLM before 0.10 called it so, here it is 'prompt_lookup_max'",
        ),
        ("speculative_num_steps", "SGLang called it so, here it is 'num_speculative_tokens'"),
        ("max_draft_len", "TensorRT-LLM called it so, here it is 'num_speculative_tokens'"),
        ("assistant_model", "transformers called it so, here it is 'model'"),
    ],
)
def test_keys_of_other_engines_are_known_by_name(key, hint):
    assert hint in complaint(config.read, {key: "x"})


def test_every_key_of_another_engine_is_a_key_here():
    named = {hint.split("'")[1] for hint in config.keys.ELSEWHERE.values()}
    assert named <= config.keys.KEYS.keys()
    assert not config.keys.ELSEWHERE.keys() & config.keys.KEYS.keys()


def test_tools_reach_the_template(llm):
    template = "{{ messages[0]['content'] }}{{ tools[0]['function']['name'] }}"
    chat = [{"role": "user", "content": "fox "}]
    options = {"chat_template": template, "tools": [TOOL]}
    [prompt] = llm.chat_prompts(chat, **options)
    assert prompt["prompt"] == "fox look"
    assert llm.chat(chat, GREEDY, **options)[0].prompt == "fox look"
    assert "must be a list of dicts" in complaint(llm.chat, chat, tools="look")
    both = {"tools": [TOOL], "chat_template_kwargs": {"tools": [TOOL]}}
    assert "are both given; keep tools" in complaint(llm.chat, chat, **both)


def test_a_chat_template_may_be_a_file(llm, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("Say {{ messages[0]['content'] }}")
    chat = [{"role": "user", "content": "fox"}]
    for path in (file, str(file)):
        assert llm.chat_prompts(chat, chat_template=path)[0]["prompt"] == "Say fox"
    message = complaint(llm.chat, chat, chat_template=str(tmp_path / "other.jinja"))
    assert "is neither a file nor Jinja with variables in braces; check the path" in message


def test_halves_of_surrogate_pairs_are_one_clear_line(llm):
    message = "half of a surrogate pair"
    assert message in complaint(llm.chat, [{"role": "user", "content": "a\ud83d"}])
    parts = [{"type": "text", "text": "\ud83d"}]
    template = "{{ messages[0]['content'][0]['text'] }}"
    chat = [{"role": "user", "content": parts}]
    assert message in complaint(llm.chat, chat, chat_template=template)
    fox = [{"role": "user", "content": "fox"}]
    assert message in complaint(llm.chat, fox, chat_template="{{ '\ud83d' }}")
    with pytest.raises(ValueError, match=r"bad_words=.* must be text without halves of surrogate"):
        jspec.SamplingParams(bad_words=["\ud83d"])


def test_neutral_arguments_of_calls_are_accepted_and_others_refused_by_name(target, llm):
    [plain] = llm.generate("fox", GREEDY)
    neutral = dict(lora_request=None, priority=None, tokenization_kwargs=None)
    assert llm.generate("fox", GREEDY, **neutral)[0].outputs == plain.outputs
    message = complaint(llm.generate, "fox", GREEDY, lora_request="adapter")
    assert message == (
        "generate: lora_request='adapter' is not supported: merge the adapter into the model."
    )
    message = complaint(llm.generate, "fox", GREEDY, priorty=1)
    assert message == "generate has no 'priorty'; did you mean 'priority'?"
    chat = [{"role": "user", "content": "fox"}]
    options = dict(continue_final_message=False, lora_request=None)
    assert llm.chat(chat, GREEDY, **options)[0].outputs == llm.chat(chat, GREEDY)[0].outputs
    for settings in (
        dict(generation_config=None, logits_processors=None, max_num_seqs=None),
        dict(generation_config="vllm", async_scheduling=True),
    ):
        assert jspec.LLM(target, **settings).max_num_seqs == llm.max_num_seqs
    message = complaint(jspec.LLM, target, generation_config="auto")
    assert "generation_config='auto' is not supported: requests have the values of" in message


def test_an_open_last_message_is_continued(llm):
    chat = [{"role": "user", "content": "fox"}, {"role": "assistant", "content": "jum"}]
    options = dict(continue_final_message=True, add_generation_prompt=False)
    assert llm.chat_prompts(chat, **options)[0]["prompt"].endswith("jum")
    assert "are not compatible" in complaint(llm.chat, chat, continue_final_message=True)


def test_outputs_count_the_tokens_that_the_prefix_cache_had(target):
    llm = jspec.LLM(target, block_size=8)
    prompt = {"prompt_token_ids": [5, 6, 7, 8] * 6}
    counts = [llm.generate(prompt, GREEDY)[0].num_cached_tokens for _ in range(2)]
    assert counts == [0, 16]
