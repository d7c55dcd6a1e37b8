"""JSON schemas: patterns over values, names that JSON escapes, and schemas in themselves."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.grammar import automata, patterns

VALUES = st.text(st.sampled_from('ab"\\\n\t\x01é日🙂 1_'), max_size=6)
PATTERNS = [
    *('^a"b$', "^.{1,6}$", "a|b", "^a|b$", "^(a|b)+$", r"^\d*$", r"\w\s", r"[^a]", '["\\\\]'),
    *("^[a-z]?[^\\x01]$", r"\\", "", "^$", "^(?:ab){0,2}é?", "日|🙂$", r"^\S+$", "[\\n\\t]"),
]


def python(expression):
    """Translate code points from Rust's notation to Python's."""
    return re.sub(r"\\x\{(\w+)\}", lambda match: f"\\U{int(match[1], 16):08x}", expression)


def pattern_of(schema):
    return python(automata.pattern_of({"json": schema}))


@pytest.mark.parametrize("pattern", PATTERNS)
def test_a_pattern_matches_the_spelling_of_the_values_that_it_matches(pattern):
    expression = re.compile(python(patterns.spelled(pattern)))

    @settings(max_examples=200, database=None)
    @given(VALUES)
    def check(value):
        # As in ECMA-262, "$" is only the end, and "." and "\\d" are those of ASCII and lines.
        expected = re.search(pattern.replace("$", r"\Z"), value, re.ASCII) is not None
        spelling = json.dumps(value, ensure_ascii=False)[1:-1]
        assert (expression.fullmatch(spelling) is not None) == expected, value

    check()


@pytest.mark.parametrize(
    ("schema", "valid", "invalid"),
    [
        ({"type": "string", "pattern": '^a"b$'}, r'"a\"b"', '"a"b"'),
        ({"type": "string", "pattern": "^.{1,6}$"}, r'"a\"c"', '"a"c"'),
        ({"type": "string", "pattern": "cat|dog"}, '"a dog"', 'dog"'),
        ({"type": "string", "pattern": "^cat|dog$"}, '"hotdog"', '"scat"'),
        (
            {"properties": {"a": {"type": "string", "pattern": "^[^x]$"}}, "required": ["a"]},
            r'{"a": "\\"}',
            '{"a": """}',
        ),
    ],
)
def test_texts_of_a_pattern_are_json(schema, valid, invalid):
    json.loads(valid)
    assert re.fullmatch(pattern_of(schema), valid)
    assert not re.fullmatch(pattern_of(schema), invalid)


def test_names_of_properties_are_escaped():
    names = ['a"b', "back\\slash", "line\nend", "a.b", "é"]
    schema = {"properties": {name: {"type": "integer"} for name in names}, "required": names}
    text = json.dumps(dict.fromkeys(names, 1), ensure_ascii=False)
    assert re.fullmatch(pattern_of(schema), text)
    assert not re.fullmatch(pattern_of(schema), text.replace("a.b", "axb"))


def test_a_schema_that_contains_itself_is_refused_by_name():
    node = {
        "type": "object",
        "properties": {
            "v": {"type": "integer"},
            "children": {"type": "array", "items": {"$ref": "#/$defs/n"}},
        },
        "required": ["v", "children"],
    }
    message = r"contains itself by \$ref '#/\$defs/n', so its texts have no greatest depth"
    with pytest.raises(ValueError, match=message):
        automata.pattern_of({"json": {"$defs": {"n": node}, "$ref": "#/$defs/n"}})
    with pytest.raises(ValueError, match=r"contains itself by \$ref '#'"):
        automata.pattern_of({"json": {"properties": {"a": {"$ref": "#"}}}})
    twice = {"properties": {"a": {"$ref": "#/$defs/x"}, "b": {"$ref": "#/$defs/x"}}}
    automata.pattern_of({"json": {"$defs": {"x": {"type": "null"}, "unused": node}, **twice}})


@pytest.mark.parametrize(
    ("pattern", "part"),
    [
        ("(?=a)b", "assert"),
        (r"(a)\1", "groupref"),
        (r"a\b", "at"),
        ("a^b", "at"),
        ("(", "is no regular expression"),
        ("[^\\x00-\\U0010ffff]", "an empty set of characters"),
    ],
)
def test_parts_of_a_pattern_that_no_automaton_follows_are_named(pattern, part):
    with pytest.raises(ValueError, match="the JSON schema cannot be followed") as error:
        automata.pattern_of({"json": {"type": "string", "pattern": pattern}})
    assert part in str(error.value)
