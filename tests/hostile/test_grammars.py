"""Tests that exploding or contradictory grammars raise in bounded time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec import SamplingParams
from jspec.checkpoints import checkpoint
from jspec.grammar import automata, limits, outputs
from jspec.util.messages import shown
from tests import llm_fixtures
from tests.hostile.junk import anything, few, nested, refused

END = frozenset({0})


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    llm_fixtures.write_tokenizer(directory)
    return checkpoint.load_tokenizer(directory)


@pytest.fixture
def soon(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.1)


@pytest.mark.parametrize(
    "pattern",
    [
        "((((a{1,50}){1,50}){1,50}){1,50})",
        "(a|b)*a(a|b){40}",
        "(" * 5000 + "a" + ")" * 5000,
        "(",
        ")",
        "[",
        "a{2,1}",
        r"(a)\1",
        "(?=a)b",
        r"\bfoo",
        "^a$",
        "(?x) a # comment",
        r"[^\x00-\x{10FFFF}]",
        "a\0b",  # NUL ends texts internally
        "|".join(["a"] * 9) + "|(",
    ],
    ids=lambda pattern: pattern[:30],
)
def test_huge_or_invalid_patterns_raise(tokenizer, soon, pattern):
    assert "structured_outputs" in refused(automata.compiled, pattern, tokenizer, END, 320)


@pytest.mark.parametrize("kind", ["regex", "choice", "json"])
def test_lone_surrogates_raise(kind):
    value = {"regex": "\ud800", "choice": ["\ud800"], "json": '"\ud800"'}[kind]
    message = refused(SamplingParams, structured_outputs={kind: value})
    assert "structured_outputs" in message or "schema" in message


@pytest.mark.parametrize("pattern", ["[^a]b", "[^,]+,", ".b", "(.|\n)x", r"[\x00-\x7f]b"])
def test_a_text_ends_only_at_a_full_match(tokenizer, pattern):
    """These classes match NUL, which ends texts internally."""
    rules = automata.compiled(pattern, tokenizer, END, 320)
    begin, end = rules.first[rules.start], rules.first[rules.start + 1]
    assert 0 not in rules.tokens[begin:end]


DEEP = nested(100, lambda inner: {"type": "array", "items": inner or {"type": "string"}})
WIDE = {"type": "object", "properties": {f"k{i}": {"type": "string"} for i in range(3000)}}


@pytest.mark.parametrize(
    "schema",
    [
        "[" * 100_000,
        "{",
        "",
        "7",
        "[]",
        "true",
        {"not": {}},
        {"$ref": "#/$defs/a"},
        {"$ref": "http://localhost:9/x.json"},
        {"$ref": "file:///etc/passwd"},
        {"type": "string", "minLength": 9, "maxLength": 3},
        {"type": "nothing"},
        {"const": float("nan")},
        {"enum": []},
        {"a": {1, 2}},
        nested(5000, lambda inner: {"items": inner}),
    ],
    ids=lambda schema: shown(schema, 30),
)
def test_huge_or_invalid_schemas_raise(soon, schema):
    assert refused(SamplingParams, structured_outputs={"json": schema})


@pytest.mark.parametrize("schema", [DEEP, WIDE], ids=["deep", "wide"])
def test_huge_schemas_are_followed_on_the_host(soon, tokenizer, schema):
    assert "cannot be followed" in refused(automata.pattern_of, {"json": schema})
    grammar = outputs.resolved({"json": schema}, tokenizer, END, 320)
    assert grammar.keys() == {"followed_grammar"}


def test_a_schema_that_allows_nothing_is_refused(tokenizer):
    message = refused(outputs.resolved, {"json": {"$ref": "#"}}, tokenizer, END, 320)
    assert "the JSON schema cannot be followed: it allows nothing" in message


def test_too_many_states_raise(tokenizer, monkeypatch):
    monkeypatch.setattr(limits, "MOST_STATES", 500)
    pattern = automata.pattern_of({"json": {"enum": list(range(5000))}})
    assert "states" in refused(automata.compiled, pattern, tokenizer, END, 320)


def test_too_many_transitions_raise(tokenizer, monkeypatch):
    monkeypatch.setattr(limits, "MOST_TRANSITIONS", 1000)
    message = refused(automata.compiled, ".{0,100}", tokenizer, END, 320)
    assert "transitions" in message and "at most 50000 states and 1000" in message


SCHEMA = st.recursive(
    st.sampled_from([{"type": "string"}, {"type": "null"}, {"enum": [1, "a"]}, {"$ref": "#"}, {}])
    | anything(),
    lambda inner: (
        st.builds(lambda a: {"type": "array", "items": a, "maxItems": 2}, inner)
        | st.builds(lambda a: {"anyOf": a}, st.lists(inner, max_size=3))
        | st.builds(
            lambda names: {"type": "object", "properties": names, "required": [*names]},
            st.dictionaries(st.text(max_size=3), inner, max_size=2),
        )
    ),
    max_leaves=4,
)


@few(15)
@given(SCHEMA)
def test_random_schemas_are_compiled_or_raise(schema):
    refused(SamplingParams, structured_outputs={"json": schema}, names=("schema", "outputs"))


@few(10)
@given(st.text(st.sampled_from(r"ab.*+?()[]{}|^$\\d1,9:=!<>-P{}x"), min_size=1, max_size=12))
def test_random_patterns_are_compiled_or_raise(tokenizer, pattern):
    refused(automata.compiled, pattern, tokenizer, END, 320, names=("structured_outputs",))
