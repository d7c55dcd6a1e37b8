"""Calls of tools are found in texts, however the texts are cut."""

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.server import readers
from jspec.server.errors import RequestError
from jspec.server.readers import forced
from jspec.server.readers.calls import joined
from jspec.server.tool_calls import use_of

CALL = '{"name": "add", "arguments": {"x": 1}}'
LLAMA = '{"name": "add", "parameters": {"x": 1}}'
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]
SCHEMAS = {
    "add": {
        "type": "object",
        "properties": {
            "x": {"type": "integer"},
            "text": {"type": "string"},
            "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
            "inner": {"$ref": "#/$defs/Inner"},
        },
        "$defs": {"Inner": {"type": "object", "properties": {"ok": {"type": "boolean"}}}},
    }
}
BAR = "\uff5c"


def deepseek(word):
    return f"<{BAR}{word.replace('_', chr(0x2581))}{BAR}>"


def deepseek_call(arguments):
    begin, sep, end = map(deepseek, ("tool_call_begin", "tool_sep", "tool_call_end"))
    return f"{begin}function{sep}add\n```json\n{arguments}\n```{end}"


def qwen(**parameters):
    inner = "".join(
        f"<parameter={key}>\n{text}\n</parameter>\n" for key, text in parameters.items()
    )
    return f"<tool_call>\n<function=add>\n{inner}</function>\n</tool_call>"


def read(make, text, cuts=()):
    """Feed a text in pieces; return its content and (name, arguments) of its calls."""
    reader, content, deltas = make(), "", []
    for begin, end in itertools.pairwise([0, *sorted(cuts), len(text)]):
        more, new = reader.feed(text[begin:end], False)
        content, deltas = content + more, deltas + new
    more, new = reader.feed("", True)
    calls = joined(deltas + new)
    assert len({call.id for call in calls}) == len(calls)
    return content + more, [(call.name, call.arguments) for call in calls]


ONE, TWO = [("add", {"x": 1})], [("add", {"x": 1})] * 2
TEXTS = {
    "hermes": [
        (f"Sure.<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>", "Sure.", TWO),
        (f"\n\n<tool_call>{CALL}", "", ONE),
        (f"<tool_call>{CALL}<tool_call>{CALL}</tool_call> end", " end", TWO),
        (f"<tool_call>{CALL} and more", " and more", ONE),
        (f"<tool_call>{CALL}}}</tool_call>", "", ONE),
        ('<tool_call>{"arguments": {"x": 1}, "name": "add"}</tool_call>', "", ONE),
        ('<tool_call>{"name": "add", "arguments": "{\\"x\\": 1}"}</tool_call>', "", ONE),
        (
            '<tool_call>{"id": [1, {"a": "}"}], "n": 1 , "name": "add" }</tool_call>',
            "",
            [("add", {})],
        ),
        (
            '<tool_call>{"name": "f", "arguments": {"a": "}</tool_call>\\\\\\""}}</tool_call>',
            "",
            [("f", {"a": '}</tool_call>\\"'})],
        ),
        ("<tool_call><tool_call>" + CALL + "</tool_call>", "<tool_call>", ONE),
    ],
    "llama3_json": [
        (LLAMA, "", ONE),
        (f"<|python_tag|>{LLAMA}; {LLAMA}", "", TWO),
        (f" {LLAMA}\n", "", ONE),
        (f"{LLAMA}; then", "; then", ONE),
    ],
    "mistral": [
        (f"[TOOL_CALLS] [{CALL}, {CALL}]", "", TWO),
        (f"Sure.[TOOL_CALLS][{CALL}]", "Sure.", ONE),
        (f"[TOOL_CALLS]{CALL}", "", ONE),
        ('[TOOL_CALLS]add[ARGS]{"x": 1}[TOOL_CALLS]add{"x": 1}', "", TWO),
        ('[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{"x": 1}', "", ONE),
    ],
    "qwen3_coder": [
        ("Sure.\n" + qwen(x="1") + "\n" + qwen(x=" 1 "), "Sure.\n", TWO),
        ("<function=add><parameter=x>1</function> end", " end", ONE),
        (qwen(text='a\n"b"\n< c', x="1"), "", [("add", {"text": 'a\n"b"\n< c', "x": 1})]),
        (
            qwen(maybe="null", inner="{'ok': True}", other="5"),
            "",
            [("add", {"maybe": None, "inner": {"ok": True}, "other": "5"})],
        ),
        (qwen(maybe="5", inner="no JSON"), "", [("add", {"maybe": "5", "inner": "no JSON"})]),
        (qwen(text="\n"), "", [("add", {"text": "\n"})]),
        ("<tool_call><function=add></function></tool_call>", "", [("add", {})]),
    ],
    "deepseek_v3": [
        (
            "Sure."
            + deepseek("tool_calls_begin")
            + deepseek_call('{"x": 1}')
            + "\n"
            + deepseek_call('{"x": 1}')
            + deepseek("tool_calls_end"),
            "Sure.",
            TWO,
        ),
    ],
    "pythonic": [
        ("[add(x=1), add(x=1)]", "", TWO),
        (
            "[a.b(s=\"x)],\\\" \", t=['é', (-1.5, None)], u={'k': true})]",
            "",
            [("a.b", {"s": 'x)]," ', "t": ["é", [-1.5, None]], "u": {"k": True}})],
        ),
        ("[add(x=1)] end", " end", ONE),
        ("[run(code='a\nb')]", "", [("run", {"code": "a\nb"})]),
        ("[now()]", "", [("now", {})]),
        ("[add(x=1), add(x=y)]", ", add(x=y)]", ONE),
    ],
}
CONTENT = {
    "hermes": [
        "no call",
        "a < b <tool",
        "<tool_call>not json</tool_call> x",
        " \n ",
        "<tool_call>[1]</tool_call>",
        '<tool_call>{"name": 1}</tool_call>',
        '<tool_call>{"name": "a", "arguments": 5}',
        '<tool_call>{"name"',
    ],
    "llama3_json": [
        "hello",
        "{ not json }",
        '{"a": 1}',
        "<|python",
        '{"name": "a", "parameters": 1}',
    ],
    "mistral": ["a [TOOL", "[TOOL_CALLS] no call", "[TOOL_CALLS][1]", "[TOOL_CALLS]two words{}"],
    "qwen3_coder": ["<tool_call>{}", "a <function=x", "<function=\n>", "1 < 2"],
    "deepseek_v3": [deepseek("tool_call_begin") + "x" + deepseek("tool_call_end"), "<|tool"],
    "pythonic": [
        "hello",
        "[link](to)",
        "[f(a)]",
        "[f(a=b)]",
        "[]",
        "[f(**a)]",
        "[f('",
        "[1, 2]",
        "[f(a=" + "(" * 210 + ")" * 210 + ")]",
    ],
}
ALL = [
    *((name, *each) for name, texts in TEXTS.items() for each in texts),
    *((name, text, text, []) for name, texts in CONTENT.items() for text in texts),
]


@pytest.mark.parametrize(("name", "text", "content", "calls"), ALL)
def test_content_and_calls_do_not_depend_on_the_pieces(name, text, content, calls):
    make = lambda: readers.CALLS[name](SCHEMAS)
    whole = read(make, text)
    assert whole[0] == content
    assert [(called, json.loads(arguments)) for called, arguments in whole[1]] == calls
    assert read(make, text, range(1, len(text))) == whole
    for cut in range(1, len(text)):
        assert read(make, text, [cut]) == whole


@given(st.sampled_from(ALL), st.data())
def test_no_set_of_cuts_changes_a_call(case, data):
    name, text, _, _ = case
    make = lambda: readers.CALLS[name](SCHEMAS)
    cuts = data.draw(st.sets(st.integers(1, max(len(text) - 1, 1))))
    assert read(make, text, cuts) == read(make, text)


@pytest.mark.parametrize("name", TEXTS)
@given(data=st.data())
def test_a_text_of_tags_in_any_order_is_read_to_its_end(name, data):
    source = "".join(text for text, _, _ in TEXTS[name])
    pieces = st.integers(0, len(source)).flatmap(lambda at: st.just(source[at : at + 14]))
    text = "".join(data.draw(st.lists(pieces, max_size=8)))
    make = lambda: readers.CALLS[name](SCHEMAS)
    assert read(make, text, range(1, len(text))) == read(make, text)


@pytest.mark.parametrize(
    ("name", "text", "early"),
    [
        ("hermes", '<tool_call>{"name": "add", "arguments": {"x": [1, 2', '{"x": [1, 2'),
        ("llama3_json", '{"name": "add", "parameters": {"x": "ab', '{"x": "ab'),
        ("mistral", '[TOOL_CALLS]add[ARGS]{"x": "ab', '{"x": "ab'),
        ("qwen3_coder", "<function=add><parameter=text>one tw", '{"text": "one tw'),
        (
            "deepseek_v3",
            deepseek_call('{"x": [1')[: -len("\n```" + deepseek("tool_call_end"))],
            '{"x": [1',
        ),
    ],
)
def test_arguments_go_on_before_they_are_complete(name, text, early):
    reader = readers.CALLS[name](SCHEMAS)
    content, (first, *rest) = reader.feed(text, False)
    assert (content, first.name, first.arguments, first.index) == ("", "add", "", 0)
    assert "".join(delta.arguments for delta in rest) == early
    assert set(first.body()) == {"index", "id", "type", "function"}
    assert rest[0].body() == {"index": 0, "function": {"arguments": early}}


def test_calls_of_mistral_have_ids_that_its_templates_accept():
    _, deltas = readers.CALLS["mistral"]().feed(f"[TOOL_CALLS][{CALL}]", True)
    assert len(deltas[0].id) == 9 and deltas[0].id.isalnum()
    given = "[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{}"
    assert readers.CALLS["mistral"]().feed(given, True)[1][0].id == "abcdefghi"


@pytest.mark.parametrize(
    ("make", "text", "calls"),
    [
        (lambda: forced.Named("add"), '{"x": 1}', [("add", '{"x": 1}')]),
        (lambda: forced.Named("add"), "", [("add", "")]),
        (forced.Required, f"[{LLAMA},{LLAMA}]", [("add", '{"x": 1}')] * 2),
        (forced.Required, f"[ {LLAMA} ]", [("add", '{"x": 1}')]),
        (
            forced.Required,
            f'[{LLAMA},{{"name":"sub","parameters":{{"y"',
            [("add", '{"x": 1}'), ("sub", '{"y"')],
        ),
    ],
)
def test_a_forced_call_does_not_depend_on_the_pieces(make, text, calls):
    for cut in range(1, len(text)):
        assert read(make, text, [cut]) == ("", calls)
    assert read(make, text, range(1, len(text))) == read(make, text) == ("", calls)


def test_a_parser_is_found_in_the_chat_template():
    shown = {
        "... <tool_call> ...": "hermes",
        "<tool_call><function=a><parameter=b>": "qwen3_coder",
        "<|python_tag|>": "llama3_json",
        "{{ '[TOOL_CALLS]' }}": "mistral",
        deepseek("tool_call_begin") + "```json": "deepseek_v3",
        "[func_name1(params_name1=params_value1)]": "pythonic",
        "{{ messages }}": None,
        None: None,
    }
    assert {template: readers.of_template(template) for template in shown} == shown


def test_auto_needs_a_parser_and_none_needs_nothing():
    options = dict(is_parallel=True, parser=None)
    with pytest.raises(RequestError, match="--tool-call-parser"):
        use_of(TOOLS, None, **options)
    assert use_of(TOOLS, "none", **options).reader is None
    assert use_of(None, None, **options).reader is None
    with pytest.raises(RequestError, match="must be"):
        use_of(TOOLS, {"type": "function", "function": {"name": "sub"}}, **options)
