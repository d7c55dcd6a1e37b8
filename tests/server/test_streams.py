"""Streams over OpenAI's own client: their chunks are those of the whole answer, each sent once."""

import asyncio
import json

import pytest

from tests.server.live import NAME
from tests.server.test_openai_client import MESSAGES, PROMPT, SCHEMA, TOOLS

COUNTED = {"stream": True, "stream_options": {"include_usage": True}}
NAMED = {"type": "function", "function": {"name": "put"}}


def joined(chunks):
    """Return (content, reasoning, calls, finish reasons) of each choice of a streamed chat."""
    choices = {}
    for chunk in chunks:
        for choice in chunk.choices:
            made = choices.setdefault(choice.index, ["", "", [], []])
            delta = choice.delta
            made[0] += delta.content or ""
            made[1] += (delta.model_extra or {}).get("reasoning") or ""
            for call in delta.tool_calls or ():
                if call.id:
                    assert call.index == len(made[2]) and call.type == "function"
                    made[2].append([call.function.name, ""])
                made[2][call.index][1] += call.function.arguments
            assert not made[3], "a choice that ended has more chunks"
            made[3] += [choice.finish_reason] if choice.finish_reason else []
    return {index: tuple(made) for index, made in choices.items()}


def of_whole(answer):
    """Return what ``joined`` returns, of an answer that is no stream."""
    return {
        choice.index: (
            choice.message.content or "",
            (choice.message.model_extra or {}).get("reasoning") or "",
            [[c.function.name, c.function.arguments] for c in choice.message.tool_calls or ()],
            [choice.finish_reason],
        )
        for choice in answer.choices
    }


def test_each_choice_of_a_chat_ends_once(client):
    # The texts end at different times, and then wait for each other.
    options = dict(model=NAME, messages=MESSAGES, n=3, seed=1, max_tokens=60, stop=["e", "o"])
    chunks = list(client.chat.completions.create(**options, **COUNTED))
    whole = client.chat.completions.create(**options)
    assert joined(chunks) == of_whole(whole)
    assert len({len(each.message.content) for each in whole.choices}) > 1
    assert chunks[-1].usage.completion_tokens == whole.usage.completion_tokens
    assert [chunk.choices[0].delta.role for chunk in chunks[:4]] == ["assistant"] * 3 + [None]


def test_each_choice_of_a_completion_ends_once(client):
    options = dict(model=NAME, prompt=[PROMPT, "x"], n=2, seed=1, max_tokens=60, stop=["e", "o"])
    options |= dict(logprobs=1, extra_body={"return_token_ids": True})
    chunks = list(client.completions.create(**options, **COUNTED))
    whole = client.completions.create(**options)
    for choice in whole.choices:
        pieces = [c.choices[0] for c in chunks if c.choices and c.choices[0].index == choice.index]
        ends = [piece.finish_reason for piece in pieces]
        assert ends == [None] * (len(ends) - 1) + [choice.finish_reason]
        assert [piece.stop_reason for piece in pieces][-1] == choice.stop_reason
        ids = [id for piece in pieces for id in piece.token_ids]
        assert ids == choice.token_ids
        names = [name for piece in pieces for name in piece.logprobs.tokens]
        assert names == choice.logprobs.tokens
    assert chunks[-1].usage == whole.usage


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["any", "named"])
def test_each_choice_has_its_call_once(client, choice):
    options = dict(model=NAME, messages=MESSAGES, tools=TOOLS, tool_choice=choice, n=2, seed=3)
    options |= dict(max_tokens=100, parallel_tool_calls=False)
    streamed = joined(client.chat.completions.create(**options, stream=True))
    assert streamed == of_whole(client.chat.completions.create(**options))
    for content, _, calls, reasons in streamed.values():
        ((name, arguments),) = calls
        assert (content, name) == ("", "put") and json.loads(arguments).keys() == {"a", "b"}
        assert reasons == ["tool_calls" if choice == "required" else "stop"]


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["any", "named"])
def test_the_arguments_of_a_call_come_in_pieces(client, choice):
    schema = {"type": "object", "properties": {"a": {"enum": ["long " * 12]}}}
    tool = {"name": "put", "parameters": schema | {"required": ["a"]}}
    options = dict(model=NAME, messages=MESSAGES, tools=[{"type": "function", "function": tool}])
    options |= dict(tool_choice=choice, max_tokens=120, seed=2, parallel_tool_calls=False)
    chunks = list(client.chat.completions.create(**options, stream=True))
    deltas = [chunk.choices[0].delta for chunk in chunks]
    assert deltas[0].role == "assistant" and not deltas[0].tool_calls
    (first, *rest), (*_, last) = deltas[1:], chunks
    assert (first.tool_calls[0].function.name, first.tool_calls[0].function.arguments) == (
        "put",
        "",
    )
    assert all(delta.tool_calls for delta in rest[:-1]) and rest[0].tool_calls
    for chunk in chunks[1:]:  # none is empty
        assert chunk.choices[0].delta.tool_calls or chunk is last
        assert chunk.choices[0].delta.content is None
    with client.chat.completions.stream(**options) as stream:  # it adds the deltas up itself
        made = stream.get_final_completion().choices[0].message.tool_calls[0].function
    assert [["put", made.arguments]] == joined(chunks)[0][2]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_tokens": 2},
        {"max_tokens": 0},
        {"max_tokens": 2, "logprobs": 1},
        {"max_tokens": 0, "logprobs": 1},
    ],
    ids=str,
)
def test_every_stream_with_echo_has_its_prompt(server, llm, changes):
    prompts = [f"def f{index}(x" for index in range(16)]
    options = dict(model=NAME, echo=True, temperature=0, extra_body={"return_token_ids": True})

    async def answer(client, prompt):
        stream = await client.completions.create(prompt=prompt, stream=True, **options, **changes)
        return [chunk.choices[0] async for chunk in stream]

    async def all_of_them():
        async with server.async_client() as client:
            return await asyncio.gather(*(answer(client, prompt) for prompt in prompts))

    for prompt, pieces in zip(prompts, asyncio.run(all_of_them()), strict=True):
        ids = llm.get_tokenizer().encode(prompt)
        text = "".join(piece.text for piece in pieces)
        assert text == prompt if changes["max_tokens"] == 0 else text.startswith(prompt)
        assert pieces[0].prompt_token_ids == ids
        assert all(piece.prompt_token_ids is None for piece in pieces[1:])
        assert sum(len(piece.token_ids) for piece in pieces) == changes["max_tokens"]
        if "logprobs" in changes:
            names = [name for piece in pieces for name in piece.logprobs.tokens]
            assert len(names) == len(ids) + changes["max_tokens"]
            assert pieces[0].logprobs.token_logprobs[0] is None


def test_tools_may_have_definitions_of_the_same_name(client):
    inner = lambda kind: {"type": "object", "properties": {"v": {"enum": kind}}, "required": ["v"]}
    tool = lambda name, kind: {
        "name": name,
        "parameters": {
            "$defs": {"Inner": inner(kind)},
            "type": "object",
            "properties": {"a": {"$ref": "#/$defs/Inner"}, "b": {"$ref": "#/$defs/Inner"}},
            "required": ["a", "b"],
        },
    }
    values = {"first": ["x", "y"], "second": ["p", "q"]}
    tools = [{"type": "function", "function": tool(*item)} for item in values.items()]
    options = dict(model=NAME, messages=MESSAGES, tools=tools, tool_choice="required", n=3)
    answer = client.chat.completions.create(
        **options, max_tokens=150, seed=5, parallel_tool_calls=False
    )
    for choice in answer.choices:
        function = choice.message.tool_calls[0].function
        given = json.loads(function.arguments)
        assert {given["a"]["v"], given["b"]["v"]} <= set(values[function.name])


@pytest.mark.parametrize("choice", ["required", NAMED], ids=["any", "named"])
def test_a_forced_tool_goes_before_the_form_of_the_answer(client, choice):
    form = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"enum": ["no"]}}}
    options = dict(model=NAME, messages=MESSAGES, tools=TOOLS, tool_choice=choice, max_tokens=100)
    answer = client.chat.completions.create(**options, response_format=form, seed=1)
    arguments = answer.choices[0].message.tool_calls[0].function.arguments
    assert json.loads(arguments).keys() == {"a", "b"}
    responses = dict(name="put", type="function", parameters=SCHEMA)
    choice = choice if choice == "required" else {"type": "function", "name": "put"}
    answer = client.responses.create(
        model=NAME,
        input="x",
        tools=[responses],
        tool_choice=choice,
        text={"format": {"type": "json_schema", "name": "s", "schema": {"enum": ["no"]}}},
        max_output_tokens=100,
    )
    assert [item.type for item in answer.output][-1] == "function_call"


def test_a_streamed_response_has_the_arguments_of_its_call_in_pieces(client):
    tool = dict(name="put", type="function", parameters=SCHEMA)
    options = dict(model=NAME, input="x", tools=[tool], temperature=0, max_output_tokens=100)
    options |= dict(tool_choice={"type": "function", "name": "put"})
    events = list(client.responses.create(**options, stream=True))
    types = [event.type for event in events]
    assert types[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    assert types[-3:-1] == ["response.function_call_arguments.done", "response.output_item.done"]
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    (call,) = events[-1].response.output
    assert "".join(deltas) == call.arguments
    (whole,) = client.responses.create(**options).output
    assert (whole.name, whole.arguments) == (call.name, call.arguments)


def test_each_chunk_may_have_the_usage_of_its_choice(client):
    options = dict(model=NAME, messages=MESSAGES, n=2, seed=1, max_tokens=12, stream=True)
    options |= dict(stream_options={"include_usage": True, "continuous_usage_stats": True})
    *chunks, last = client.chat.completions.create(**options)
    assert [chunk.usage.completion_tokens for chunk in chunks[:2]] == [0, 0]
    ends = [chunk.usage for chunk in chunks if chunk.choices[0].finish_reason]
    assert [usage.completion_tokens for usage in ends] == [12, 12]
    assert last.usage.completion_tokens == 24
    assert {chunk.usage.prompt_tokens for chunk in [*chunks, last]} == {last.usage.prompt_tokens}
