"""Reasoning is split from answers, streamed and whole, and is separated from calls of tools."""

import itertools

import openai
import pytest

from jspec.cli import server_options
from jspec.server import readers
from tests.server import live
from tests.server.live import NAME
from tests.server.test_openai_client import MESSAGES, TOOLS
from tests.server.test_streams import joined, of_whole

CALL = '<tool_call>{"name": "put", "arguments": {"a": 1}}</tool_call>'


@pytest.fixture(scope="module")
def reasoning(llm):
    options = dict(tool_parser="hermes", reasoning_parser="qwen3")
    with live.running(llm, **options) as server, server.client() as client:
        yield client


def read(name, is_open, text, cuts=()):
    reader, made = readers.REASONING[name](is_open), ["", ""]
    for begin, end in itertools.pairwise([0, *cuts, len(text)]):
        made = [
            old + new for old, new in zip(made, reader.feed(text[begin:end], False), strict=True)
        ]
    return tuple(old + new for old, new in zip(made, reader.feed("", True), strict=True))


@pytest.mark.parametrize(
    ("name", "is_open", "text", "want"),
    [
        ("deepseek_r1", True, "why\n</think>\n\nyes", ("why\n", "\n\nyes")),
        ("deepseek_r1", True, " <think>\nwhy</think>yes </think>", ("\nwhy", "yes </think>")),
        ("deepseek_r1", True, "why </thin", ("why </thin", "")),
        ("deepseek_r1", True, "<thin", ("<thin", "")),
        ("deepseek_r1", True, f"a {CALL}", (f"a {CALL}", "")),
        ("deepseek_r1", False, " yes <think>", ("", " yes <think>")),
        ("deepseek_r1", False, "<think>why</think>yes", ("why", "yes")),
        ("qwen3", True, f"why{CALL}", ("why", CALL)),
        ("qwen3", True, "<think></think>yes", ("", "yes")),
        ("qwen3", False, "yes", ("", "yes")),
        ("qwen3", False, "", ("", "")),
    ],
)
def test_reasoning_does_not_depend_on_the_pieces(name, is_open, text, want):
    assert read(name, is_open, text) == want
    for cut in range(1, len(text)):
        assert read(name, is_open, text, [cut]) == want
    assert read(name, is_open, text, range(1, len(text))) == want


@pytest.mark.parametrize(
    ("name", "prompt", "variables", "want"),
    [
        ("deepseek_r1", "<|Assistant|><think>\n", {}, True),
        ("deepseek_r1", "<|Assistant|>", {}, True),
        ("deepseek_r1", "a <think>b</think> c<|Assistant|>", {}, True),
        ("qwen3", "<|im_start|>assistant\n<think>\n\n</think>\n\n", {}, False),
        ("qwen3", "<|im_start|>assistant\n", {"enable_thinking": False}, False),
        ("qwen3", "<|im_start|>assistant\n", {}, True),
    ],
)
def test_the_prompt_says_where_reasoning_begins(name, prompt, variables, want):
    assert readers.REASONING[name].begins_after(prompt, variables) is want


def written(text, **options):
    """Return a request whose answer is a text."""
    body = options.pop("extra_body", {}) | {"structured_outputs": {"choice": [text]}}
    options = dict(model=NAME, messages=MESSAGES, max_tokens=100) | options
    return options | {"extra_body": body}


@pytest.mark.parametrize("n", [1, 2])
def test_an_answer_has_its_reasoning_apart(reasoning, llm, n):
    options = written("<think>why</think>\n\nyes", n=n, logprobs=True)
    whole = reasoning.chat.completions.create(**options)
    assert of_whole(whole) == {index: ("\n\nyes", "why", [], ["stop"]) for index in range(n)}
    counted = {"include_usage": True}
    chunks = list(reasoning.chat.completions.create(**options, stream=True, stream_options=counted))
    assert joined(chunks) == of_whole(whole)
    size = len(llm.get_tokenizer().encode("why"))
    for usage in (whole.usage, chunks[-1].usage):
        assert usage.completion_tokens_details.reasoning_tokens == pytest.approx(size * n, abs=n)
    scored = [c.choices[0].logprobs for c in chunks if c.choices and c.choices[0].logprobs]
    assert sum(len(each.content) for each in scored) == whole.usage.completion_tokens


def test_reasoning_may_be_left_out(reasoning):
    options = written("<think>why</think>yes", extra_body={"include_reasoning": False})
    options |= dict(logprobs=True)
    options["extra_body"]["return_token_ids"] = True
    whole = reasoning.chat.completions.create(**options)
    assert of_whole(whole)[0][:2] == ("yes", "")
    assert whole.choices[0].logprobs is None
    assert "token_ids" not in whole.choices[0].model_extra
    assert whole.usage.completion_tokens_details.reasoning_tokens > 0
    chunks = list(reasoning.chat.completions.create(**options, stream=True))
    assert joined(chunks) == of_whole(whole)
    assert all(chunk.choices[0].logprobs is None for chunk in chunks)


@pytest.mark.parametrize("end", ["</think>\n", ""])
def test_calls_are_read_after_reasoning(reasoning, end):
    options = written(f"<think>a {end}{CALL}", tools=TOOLS)
    whole = reasoning.chat.completions.create(**options)
    want = ("", "a ", [["put", '{"a": 1}']], ["tool_calls"])
    assert of_whole(whole) == {0: want} and whole.choices[0].message.content is None
    assert joined(reasoning.chat.completions.create(**options, stream=True)) == {0: want}


def test_a_text_is_reasoning_until_it_ends_there(reasoning):
    options = dict(model=NAME, messages=MESSAGES, max_tokens=8, temperature=0)
    (choice,) = reasoning.chat.completions.create(**options).choices
    assert choice.message.content is None and choice.message.model_extra["reasoning"]
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    (plain,) = reasoning.chat.completions.create(**options, extra_body=off).choices
    assert plain.message.content == choice.message.model_extra["reasoning"]
    assert plain.message.model_extra["reasoning"] is None


def test_a_grammar_leaves_no_room_for_reasoning(reasoning):
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["no"]}}}
    options = dict(model=NAME, messages=MESSAGES, max_tokens=20, response_format=form)
    whole = reasoning.chat.completions.create(**options)
    assert of_whole(whole)[0][:2] == ('"no"', "")
    assert joined(reasoning.chat.completions.create(**options, stream=True)) == of_whole(whole)


def test_a_response_has_an_item_of_reasoning(reasoning):
    options = dict(model=NAME, input="x", max_output_tokens=6, temperature=0)
    whole = reasoning.responses.create(**options)
    (item,) = whole.output
    assert item.type == "reasoning" and item.content[0].text
    assert whole.usage.output_tokens_details.reasoning_tokens == 6
    events = list(reasoning.responses.create(**options, stream=True))
    deltas = [event.delta for event in events if event.type == "response.reasoning_text.delta"]
    assert "".join(deltas) == item.content[0].text == events[-1].response.output[0].content[0].text


def test_reasoning_cannot_be_left_out_unread(client):
    with pytest.raises(openai.BadRequestError, match="--reasoning-parser"):
        client.chat.completions.create(
            model=NAME, messages=MESSAGES, extra_body={"include_reasoning": False}
        )


def test_the_form_of_calls_is_read_from_the_file_of_a_template(llm, tmp_path):
    file = tmp_path / "template.jinja"
    file.write_text("{{ messages[0].content }} <tool_call>")
    template = server_options.template_of(str(file))
    options = dict(model_names=(NAME,), defaults="vllm", tool_parser=None)
    settings = server_options.settings_of(llm, chat_template=template, **options)
    assert (settings.tool_parser, settings.chat_template) == ("hermes", file.read_text())
    file.write_text(" \n")
    with pytest.raises(ValueError, match="--chat-template: chat_template is empty"):
        server_options.template_of(str(file))
