"""Calls of tools are found in texts, however the texts are cut."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.server import tools
from jspec.server.errors import RequestError

CALL = '{"name": "add", "arguments": {"x": 1}}'
HERMES = f"Sure.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>"
LLAMA = '{"name": "add", "parameters": {"x": 1}}'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


def read(reader, text, cuts=()):
    """Feed a text in pieces; return its content and (name, arguments) of its calls."""
    edges = [0, *sorted(cuts), len(text)]
    content, calls = "", []
    for begin, end in itertools.pairwise(edges):
        more, new = reader.feed(text[begin:end], False)
        content, calls = content + more, calls + new
    more, new = reader.feed("", True)
    return content + more, [(call.name, json.loads(call.arguments)) for call in calls + new]


@given(st.sets(st.integers(1, len(HERMES) - 1)))
def test_calls_of_hermes_do_not_depend_on_the_pieces(cuts):
    content, calls = read(tools.Hermes(), HERMES, cuts)
    assert content.strip() == "Sure." and calls == [("add", {"x": 1})] * 2


@pytest.mark.parametrize(
    "text",
    ["no call", "a < b <tool", "<tool_call>not json</tool_call> x", "<tool_call>[1]</tool_call>"],
)
def test_a_text_without_a_call_of_hermes_is_content(text):
    for cut in range(1, len(text)):
        assert read(tools.Hermes(), text, [cut]) == (text, [])


def test_a_call_of_hermes_may_end_with_the_text():
    assert read(tools.Hermes(), f"<tool_call>{CALL}")[1] == [("add", {"x": 1})]


@given(st.sets(st.integers(1, len(LLAMA) - 1)))
def test_calls_of_llama_do_not_depend_on_the_pieces(cuts):
    assert read(tools.Llama(), LLAMA, cuts) == ("", [("add", {"x": 1})])


def test_several_calls_of_llama_are_found():
    text = f"<|python_tag|>{LLAMA}; {LLAMA}"
    assert read(tools.Llama(), text) == ("", [("add", {"x": 1})] * 2)


@pytest.mark.parametrize("text", ["hello", "{ not json }", '{"a": 1}'])
def test_a_text_without_a_call_of_llama_is_content(text):
    for cut in range(1, len(text)):
        assert read(tools.Llama(), text, [cut]) == (text, [])


def test_a_parser_is_found_in_the_chat_template():
    assert tools.parser_for("... <tool_call> ...") == "hermes"
    assert tools.parser_for("<|python_tag|>") == "llama3_json"
    assert tools.parser_for("{{ messages }}") is tools.parser_for(None) is None


def test_auto_needs_a_parser_and_none_needs_nothing():
    options = dict(is_parallel=True, parser=None)
    with pytest.raises(RequestError, match="--tool-call-parser"):
        tools.use_of(TOOLS, None, **options)
    assert tools.use_of(TOOLS, "none", **options).reader is None
    assert tools.use_of(None, None, **options).reader is None
    with pytest.raises(RequestError, match="must be"):
        tools.use_of(TOOLS, {"type": "function", "function": {"name": "sub"}}, **options)
