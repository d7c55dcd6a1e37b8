"""Tests of malformed JSON lines in training data, and of resuming from damaged answers."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.hostile.junk import anything, few, nested, refused
from training import generate_data
from training.data import readers
from training.data.ledger import Ledger
from training.data.records import FORMATS, PAIRS, TURNS

KEYS = st.sampled_from(
    [
        "text",
        "prompt",
        "key",
        "system",
        "input",
        "tools",
        "turns",
        *TURNS,
        *(key for pair in PAIRS for key in pair),
        "prompt_token_ids",
        "token_ids",
    ]
)
TURN = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "x"]), "content": st.text(max_size=4)},
    optional={
        "weight": st.sampled_from([0, 1]) | anything(),
        "reasoning_content": st.text(max_size=4) | anything(),
        "tool_calls": st.lists(st.fixed_dictionaries({"function": anything()})) | anything(),
        "tool_call_id": anything(),
    },
)
VALUE = st.text(max_size=4) | st.lists(TURN, max_size=2) | st.lists(st.integers(-1, 9)) | anything()
LINE = st.dictionaries(KEYS, VALUE, max_size=3) | anything()


def as_bytes(line):
    try:
        return json.dumps(line).encode()
    except (TypeError, ValueError, RecursionError):
        return b"["


def records(path, data_format="auto", bad_lines=0):
    """Return all records of a file."""
    (source,), _ = readers.find([str(path)], readers.SourceSettings(data_format=data_format))
    return [record for _, record in source.read(Ledger(bad_lines))]


@few(200)
@given(
    lines=st.lists(LINE.map(as_bytes) | st.binary(max_size=30), min_size=1, max_size=3),
    data_format=st.sampled_from(("auto", *FORMATS)),
    limit=st.integers(0, 3),
    suffix=st.sampled_from([".jsonl", ".json", ".txt"]),
)
def test_lines_are_read_counted_as_bad_or_raise(
    tmp_path_factory, lines, data_format, limit, suffix
):
    path = tmp_path_factory.getbasetemp() / f"lines{suffix}"
    path.write_bytes(b"\n".join(lines))
    refused(records, path, data_format, limit)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 200_000,
        b'{"text":' * 100_000,
        b"\0" * 1000,
        b"\xff\xfe{}",
        b'{"text": "\xff"}',
        b'{"text": "a"}\n' + b'{"text": ' + b"9" * 5000 + b"}",
        b'{"token_ids": [1' + b"0" * 40 + b"]}",
        b'[{"text": "a"}',
        json.dumps({"text": nested(900, lambda inner: [inner])}).encode(),
        b'{"text": "' + b"x" * 5_000_000,
    ],
    ids=lambda content: repr(content[:20]),
)
@pytest.mark.parametrize("suffix", [".jsonl", ".json"])
def test_files_without_json_lines_raise(tmp_path, content, suffix):
    path = tmp_path / f"x{suffix}"
    path.write_bytes(content)
    assert refused(records, path)


COMPLETE = [
    {"key": "a", "turn": 0, "turns": 2},
    {"key": "a", "turn": 1, "turns": 2},
    {"key": "b", "turn": 0, "turns": 1},
]


@few(100)
@given(cut=st.integers(0, 200), planted=st.none() | LINE.map(as_bytes) | st.binary(max_size=9))
def test_a_run_resumes_after_the_last_complete_answer(tmp_path_factory, cut, planted):
    path = tmp_path_factory.getbasetemp() / "answers.jsonl"
    complete = b"".join(json.dumps(line).encode() + b"\n" for line in COMPLETE)
    inserted = b"" if planted is None else b"\n" + planted + b"\n"
    path.write_bytes(complete[:cut] + inserted + complete)
    results = []
    if (
        refused(lambda: results.append(generate_data._complete_answers(path)), names=("damaged",))
        is None
    ):
        done, size = results[0]
        assert done <= {"a", "b"} and size <= path.stat().st_size
