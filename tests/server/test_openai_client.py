"""OpenAI's own client against a live server: each answer is that of ``LLM``."""

import asyncio
import contextlib
import json

import openai
import pytest

import jspec
from tests.server.live import NAME

PROMPT = "the quick brown"
MESSAGES = [{"role": "user", "content": "def add"}]
SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "maximum": 9, "minimum": 0}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOLS = [{"type": "function", "function": {"name": "put", "parameters": SCHEMA}}]


def expected(llm, prompt=PROMPT, **options):
    (output,) = llm.generate(prompt, jspec.SamplingParams(**options))
    return output


def test_a_completion_is_that_of_generate(llm, client):
    answer = client.completions.create(model=NAME, prompt=PROMPT, max_tokens=20, temperature=0)
    want = expected(llm, max_tokens=20, temperature=0)
    (choice,) = answer.choices
    assert (choice.text, choice.finish_reason) == (want.outputs[0].text, "length")
    assert answer.object == "text_completion" and answer.model == NAME
    counts = answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens
    assert counts == (n := len(want.prompt_token_ids), 20, n + 20)


def test_the_events_of_a_stream_make_the_whole_text(llm, client):
    options = dict(model=NAME, prompt=PROMPT, max_tokens=150, temperature=0.9, seed=3)
    chunks = list(
        client.completions.create(**options, stream=True, stream_options={"include_usage": True})
    )
    want = expected(llm, max_tokens=150, temperature=0.9, seed=3).outputs[0]
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == want.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]][-1] == want.finish_reason
    assert len(chunks) > 3 and all(chunk.usage is None for chunk in chunks[:-1])
    assert not chunks[-1].choices and chunks[-1].usage.completion_tokens == len(want.token_ids)


def test_a_chat_is_that_of_chat(llm, client):
    options = dict(temperature=0.7, seed=5)
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, max_completion_tokens=24, **options
    )
    (want,) = llm.chat(MESSAGES, jspec.SamplingParams(max_tokens=24, **options))
    assert answer.choices[0].message.content == want.outputs[0].text
    assert answer.choices[0].message.role == "assistant"
    assert answer.usage.prompt_tokens == len(want.prompt_token_ids)


def test_a_streamed_chat_begins_with_the_role_and_ends_with_the_reason(llm, client):
    options = dict(temperature=0, max_tokens=24)
    stream = client.chat.completions.create(model=NAME, messages=MESSAGES, stream=True, **options)
    choices = [chunk.choices[0] for chunk in stream]
    (want,) = llm.chat(MESSAGES, jspec.SamplingParams(**options))
    assert choices[0].delta.role == "assistant" and choices[0].delta.content == ""
    assert "".join(each.delta.content for each in choices) == want.outputs[0].text
    assert [each.finish_reason for each in choices if each.finish_reason] == ["length"]


def test_the_first_event_of_a_chat_has_the_ids_of_the_prompt_beside_its_choice(llm, client):
    (want,) = llm.chat(MESSAGES, jspec.SamplingParams(max_tokens=4, temperature=0))
    first, *rest = client.chat.completions.create(
        model=NAME,
        messages=MESSAGES,
        stream=True,
        max_tokens=4,
        temperature=0,
        extra_body={"return_token_ids": True},
    )
    assert first.prompt_token_ids == want.prompt_token_ids
    ids = [token for event in rest for token in event.choices[0].token_ids]
    assert ids == list(want.outputs[0].token_ids)


def test_every_prompt_has_its_n_choices_in_order(llm, client):
    prompts = [PROMPT, "x", llm.get_tokenizer().encode("def add(x")]
    options = dict(n=2, seed=9, max_tokens=12)
    answer = client.completions.create(model=NAME, prompt=prompts[:2], **options)
    want = [
        text.text for prompt in prompts[:2] for text in expected(llm, prompt, **options).outputs
    ]
    assert [choice.text for choice in answer.choices] == want
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    ids = client.completions.create(model=NAME, prompt=prompts[2], **options)
    of_text = client.completions.create(model=NAME, prompt="def add(x", **options)
    assert [choice.text for choice in ids.choices] == [choice.text for choice in of_text.choices]


def test_the_choices_of_a_stream_come_together(client):
    options = dict(model=NAME, prompt=[PROMPT, "x"], max_tokens=12, seed=1, n=2)
    whole = client.completions.create(**options)
    texts = [""] * 4
    for chunk in client.completions.create(**options, stream=True):
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == [choice.text for choice in whole.choices]


def test_a_stop_string_ends_a_text_before_it(llm, client):
    text = expected(llm, max_tokens=40, temperature=0).outputs[0].text
    stop = text[15:18]
    answer = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=40, temperature=0, stop=[stop]
    )
    choice = answer.choices[0]
    assert (choice.text, choice.finish_reason) == (text[: text.index(stop)], "stop")
    assert choice.stop_reason == stop


def test_echo_with_logprobs_scores_the_prompt(llm, client):
    ids = llm.get_tokenizer().encode(PROMPT)
    answer = client.completions.create(
        model=NAME, prompt=[ids], max_tokens=1, logprobs=1, echo=True, temperature=0
    )
    want = expected(llm, max_tokens=1, temperature=0, logprobs=1, prompt_logprobs=1)
    scores = answer.choices[0].logprobs
    known = [
        None if each is None else each[t] for each, t in zip(want.prompt_logprobs, ids, strict=True)
    ]
    assert scores.token_logprobs[0] is None
    assert scores.token_logprobs[1:-1] == pytest.approx([each.logprob for each in known[1:]])
    assert answer.choices[0].text == PROMPT + want.outputs[0].text
    offsets = [sum(map(len, scores.tokens[:i])) for i in range(len(scores.tokens))]
    assert scores.text_offset == offsets
    best = [max(top.values()) for top in scores.top_logprobs[1:]]
    assert all(top >= own for top, own in zip(best, scores.token_logprobs[1:], strict=True))


def test_echo_without_tokens_has_the_prompt_alone(client):
    answer = client.completions.create(
        model=NAME, prompt=PROMPT, max_tokens=0, echo=True, logprobs=0
    )
    assert answer.choices[0].text == PROMPT and answer.usage.completion_tokens == 0
    assert len(answer.choices[0].logprobs.tokens) == answer.usage.prompt_tokens


def test_the_logprobs_of_a_chat_are_ranked(llm, client):
    options = dict(temperature=0, max_tokens=6)
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, logprobs=True, top_logprobs=3, **options
    )
    (want,) = llm.chat(MESSAGES, jspec.SamplingParams(logprobs=3, **options))
    content = answer.choices[0].logprobs.content
    for entry, token, scores in zip(
        content, want.outputs[0].token_ids, want.outputs[0].logprobs, strict=True
    ):
        assert entry.logprob == pytest.approx(scores[token].logprob)
        assert bytes(entry.bytes).decode("utf-8") == entry.token
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True) and len(values) == 3


def test_a_json_schema_is_followed(client):
    form = {"type": "json_schema", "json_schema": {"name": "pair", "schema": SCHEMA}}
    answer = client.chat.completions.create(
        model=NAME, messages=MESSAGES, response_format=form, max_tokens=60, seed=1
    )
    value = json.loads(answer.choices[0].message.content)
    assert value.keys() == {"a", "b"} and value["b"] in ("x", "y")


@pytest.mark.parametrize(
    "choice", ["required", {"type": "function", "function": {"name": "put"}}], ids=["any", "named"]
)
def test_a_forced_call_of_a_tool_has_valid_arguments(client, choice):
    options = dict(model=NAME, messages=MESSAGES, tools=TOOLS, tool_choice=choice)
    options |= dict(max_tokens=100, seed=2, parallel_tool_calls=False)
    (answer,) = client.chat.completions.create(**options).choices
    (call,) = answer.message.tool_calls
    assert call.function.name == "put" and call.id and answer.message.content is None
    value = json.loads(call.function.arguments)
    assert value.keys() == {"a", "b"} and 0 <= value["a"] <= 9
    assert answer.finish_reason == ("tool_calls" if choice == "required" else "stop")


def test_requests_that_come_together_have_their_own_texts(llm, server):
    texts = [f"def f{index}(x" for index in range(8)]
    options = lambda index: dict(max_tokens=10 + index, temperature=0.5 * (index % 3), seed=index)

    async def all_of_them():
        async with server.async_client() as client:
            create = client.completions.create
            tasks = (create(model=NAME, prompt=t, **options(i)) for i, t in enumerate(texts))
            return await asyncio.gather(*tasks)

    answers = asyncio.run(all_of_them())
    want = [
        expected(llm, text, **options(index)).outputs[0].text for index, text in enumerate(texts)
    ]
    assert [answer.choices[0].text for answer in answers] == want


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_leaves_aborts_its_request(server, stream):
    async def leave():
        async with server.async_client(max_retries=0, timeout=0.3) as client:
            options = dict(
                model=NAME, prompt=PROMPT, max_tokens=150, extra_body={"ignore_eos": True}
            )
            if not stream:
                await client.completions.create(**options, n=100)
                return
            events = await client.completions.create(**options, stream=True)
            async for _ in events:
                await events.close()
                return

    with pytest.raises(openai.APITimeoutError) if not stream else contextlib.nullcontext():
        asyncio.run(leave())
    server.wait_until_idle()


def test_statistics_of_drafts_are_there_when_asked_for(client):
    answer = client.completions.create(
        model=NAME,
        prompt="the the the the the",
        max_tokens=30,
        temperature=0,
        extra_body={"speculative_decoding_stats": True},
    )
    stats = answer.usage.model_extra["speculative_decoding_stats"]
    of_choice = answer.choices[0].model_extra["speculative_decoding_stats"]
    assert stats["num_spec_steps"] == of_choice["num_spec_steps"] > 0
    assert stats["mean_acceptance_length"] == pytest.approx(of_choice["mean_acceptance_length"])


def test_a_response_has_the_text_of_the_chat(client):
    answer = client.responses.create(
        model=NAME, input="def add", instructions="be brief", max_output_tokens=16, temperature=0
    )
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "def add"}]
    chat = client.chat.completions.create(
        model=NAME, messages=messages, max_tokens=16, temperature=0
    )
    assert answer.output_text == chat.choices[0].message.content
    assert answer.status == "incomplete" and answer.usage.output_tokens == 16


def test_a_streamed_response_ends_with_the_whole(client):
    options = dict(model=NAME, input="def add", max_output_tokens=16, temperature=0)
    events = list(client.responses.create(**options, stream=True))
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == client.responses.create(**options).output_text
    assert events[0].type == "response.created" and events[-1].type == "response.incomplete"
    assert [event.sequence_number for event in events] == list(range(len(events)))


def test_the_model_is_listed(llm, client):
    (model,) = client.models.list().data
    assert model.id == NAME and model.model_extra["max_model_len"] == llm.max_model_len
    assert client.models.retrieve(NAME).id == NAME
