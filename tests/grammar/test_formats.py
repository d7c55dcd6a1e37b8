"""Formats of JSON schemas: texts are JSON, and their values are of the format."""

import datetime
import ipaddress
import json
import re
import string
import uuid
from urllib.parse import urlsplit

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.grammar import automata, followed, outputs
from jspec.grammar.followed import Follower
from jspec.grammar.formats import FORMATS
from tests.plain_processors import Spelling

END = frozenset({0})
# Tokens of one character, and some that end a value in their middle.
SPELLED = ("", *string.printable[:95], "00", "-0", "T0", "Z", '"}', '",', "@a", ".c", "://", "a@b")
SIZE = len(SPELLED)


class Encoding(Spelling):
    """A tokenizer that also encodes, as llguidance needs it."""

    def encode(self, text, **_):
        return [SPELLED.index(char) for char in text if char in SPELLED]


def is_date(value):
    return datetime.date.fromisoformat(value).isoformat() == value


def is_time(value):
    parts = re.fullmatch(r"(\d\d:\d\d:\d\d)(\.\d+)?(Z|[+-]\d\d:\d\d)", value)
    datetime.time.fromisoformat(parts[1] + parts[3].replace("Z", "+00:00"))
    return True


def is_date_time(value):
    return is_date(value[:10]) and value[10] == "T" and is_time(value[11:])


def is_hostname(value):
    labels = value.split(".")
    shapes = [re.fullmatch(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)", label) for label in labels]
    return all(shapes)


def is_email(value):
    local, domain = value.split("@")
    atoms = all(re.fullmatch(r"[\w!#$%&'*+/=?^`{|}~-]+", atom) for atom in local.split("."))
    return len(local) <= 64 and atoms and is_hostname(domain)


def is_uri(value):
    parts = urlsplit(value)
    port = parts.port  # raises ValueError outside of 0 to 65535
    escapes = re.sub(r"%[0-9A-Fa-f]{2}", "", value)
    plain = not re.search(r"""[\s"<>\\^`{|}%]""", escapes)
    return bool(parts.scheme and (port is None or port >= 0) and plain)


IS_VALID = {
    "date": is_date,
    "time": is_time,
    "date-time": is_date_time,
    "duration": re.compile(
        r"P(?!$)(\d+W|(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+S)?)?)"
    ).fullmatch,
    "email": is_email,
    "hostname": is_hostname,
    "ipv4": ipaddress.IPv4Address,
    "ipv6": ipaddress.IPv6Address,
    "uri": is_uri,
    "uuid": lambda value: str(uuid.UUID(value)) == value.lower(),
}


def test_each_format_has_a_validator():
    assert FORMATS.keys() == IS_VALID.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_values_of_a_format_are_valid(name):
    @settings(max_examples=60, database=None)
    @given(st.from_regex(rf"\A(?:{FORMATS[name]})\Z"))
    def check(value):
        assert IS_VALID[name](value), value
        assert json.dumps(value, ensure_ascii=False) == f'"{value}"'

    check()


GOOD = {
    "date": ["2024-02-29", "0001-01-01", "2000-02-29"],
    "time": ["23:59:59Z", "01:02:03.123456+05:30"],
    "date-time": ["2026-11-29T10:00:00Z", "1999-12-31T23:59:59.5-11:00"],
    "duration": ["P1Y2M3DT4H5M6S", "PT5M", "P2W"],
    "email": ["a.b+c@example.co.uk", f"{'x' * 64}@a", "o'neil@x-y.org"],
    "hostname": ["a", "a-1.example.com", "x" * 63, "a.b.c.d.e.f"],
    "ipv4": ["0.0.0.0", "255.249.1.10"],
    "ipv6": [
        "::",
        "::1",
        "1::",
        "fe80::1:2",
        "1:2:3:4:5:6:7:8",
        "::ffff:1.2.3.4",
        "1:2:3:4:5:6:7::",
    ],
    "uri": [
        "https://a.b:8080/c?d=e#f",
        "urn:isbn:1",
        "http://[::1]/",
        "mailto:a@b.c",
        "ftp://u:p@h/%20",
    ],
    "uuid": ["01234567-89ab-cdef-0123-456789ABCDEF"],
}
BAD = {
    "date": ["2023-02-29", "1900-02-29", "2024-04-31", "0000-01-01", "12024-01-01", "2024-1-1"],
    "time": ["24:00:00Z", "10:00:00", "10:00Z"],
    "date-time": ["2026-11-29 10:00:00Z", "-2026-11-29T10:00:00Z"],
    "duration": ["P", "PT", "P1S", "1Y"],
    "email": ['""@a', "a..b@c", "a@-b", ".a@b", "a@b@c"],
    "hostname": ["-a", "a-", "a..b", "x" * 64, "a_b"],
    "ipv4": ["256.1.1.1", "1.2.3", "01.2.3.4"],
    "ipv6": [":::", "1:2:3:4:5:6:7", "1::2::3", "12345::", "1:2:3:4:5:6:7:8:9"],
    "uri": ["a", "http://a b", "http://a:99999/", "1a:b", 'x:"'],
    "uuid": ["0123456789abcdef0123456789abcdef"],
}


@pytest.mark.parametrize("name", FORMATS)
def test_usual_values_are_of_their_format_and_others_are_not(name):
    expression = re.compile(FORMATS[name])
    for value in GOOD[name]:
        assert expression.fullmatch(value) and IS_VALID[name](value), value
    for value in BAD[name]:
        assert not expression.fullmatch(value), value


def walked(random, allowed_after, stops=('"', '"}')):
    """Return a text drawn token by token; one that may end its value soon does so."""
    text = []
    while True:
        allowed = allowed_after(text)
        if 0 in allowed:
            return "".join(SPELLED[token] for token in text)
        ends = [token for token in allowed if SPELLED[token] in stops]
        choices = ends if ends and random.random() < 0.3 else sorted(allowed)
        text.append(int(random.choice(choices)))
        assert len(text) < 900


def of_automaton(grammar):
    def allowed(text):
        state = grammar.start
        for token in text:
            begin, end = grammar.first[state : state + 2]
            state = grammar.following[begin + list(grammar.tokens[begin:end]).index(token)]
        begin, end = grammar.first[state : state + 2]
        return set(grammar.tokens[begin:end].tolist())

    return allowed


def of_host(grammar):
    follower = Follower(grammar)

    def allowed(text):
        bits = follower.masks(text, np.array([-1]), np.array([-1]), np.ones(1, bool))
        return set(np.flatnonzero(np.unpackbits(bits.view(np.uint8), bitorder="little")).tolist())

    return allowed


@pytest.mark.parametrize("name", FORMATS)
def test_drawn_texts_are_json_of_the_format(name):
    known, random = (Encoding(SPELLED), END, SIZE), np.random.default_rng(0)
    plain = {"type": "string", "format": name}
    inside = {"type": "object", "properties": {"a": plain}, "required": ["a"]}
    beside = {"properties": {"a": plain, "n": {"type": "integer", "minimum": 5}}, "required": ["a"]}
    beside |= {"type": "object", "additionalProperties": False}
    for schema in (plain, inside, beside):
        (grammar,) = outputs.resolved({"json": schema}, *known).values()
        assert isinstance(grammar, followed.FollowedGrammar) == (schema is beside)
        for _ in range(6):
            make = of_host if schema is beside else of_automaton
            value = json.loads(walked(random, make(grammar)))
            assert IS_VALID[name](value["a"] if isinstance(value, dict) else value), value


@pytest.mark.parametrize("type", ["string", ["string", "null"]])
def test_a_format_that_nothing_follows_is_named_where_it_stands(type):
    schema = {
        "type": "object",
        "properties": {
            "a": {"type": type, "format": "uri-reference"},
            "n": {"type": "integer", "minimum": 1},
        },
    }
    with pytest.raises(ValueError, match="followed: 'a' of the schema: Unknown format: uri-ref"):
        outputs.check({"json": schema})


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"not": {}}, 'Unimplemented keys: ["not"]'),
        ({"items": {"not": {}}, "minItems": 2}, "'items' of 'part' of the schema: Unimplemented"),
        ({"type": "string", "pattern": "(", "maxLength": 3}, "error: unclosed group"),
        (
            {"properties": {"x": {"$ref": "#/$defs/y"}}},
            "'x' of 'part' of the schema: Pointer '/$defs/y'",
        ),
        (
            {"$defs": {"y": {"not": {}}}, "properties": {"x": {"$ref": "#/$defs/y"}}},
            "'x' of 'part' of the schema: Unimplemented keys",
        ),
    ],
)
def test_a_refusal_is_that_of_the_way_that_follows_most(schema, words):
    given = {"type": "object", **schema} if "properties" in schema else schema
    beside = {"type": "integer", "minimum": 1}  # what automata do not follow
    whole = {"type": "object", "properties": {"n": beside, "part": given}}
    whole |= {name: given.pop(name) for name in ("$defs",) if name in given}
    with pytest.raises(ValueError, match="the JSON schema cannot be followed") as error:
        outputs.check({"json": whole})
    assert words in str(error.value)


def test_numbers_keep_the_formats_of_their_sizes():
    outputs.check({"json": {"type": "integer", "format": "int32"}})
    assert automata.pattern_of({"json": {"type": ["string", "null"], "format": "date"}})
