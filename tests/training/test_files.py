"""Files with damage or odd line ends: every fault has its place, and nothing else is left out."""

import gzip
import json

import pytest

from training.data import readers
from training.data.ledger import Ledger

HALF = "a \ud83d b"  # JSON can hold half of a surrogate pair; UTF-8 cannot


def read(path, limit=0):
    """Return the records of a file, and the account of it."""
    ledger = Ledger(limit)
    (source,), _ = readers.find([str(path)], readers.SourceSettings())
    ledger.open(source.name)
    return [record for _, record in source.read(ledger)], ledger


def text_of(path, limit=0):
    records, ledger = read(path, limit)
    return "".join(record.text for record in records), ledger


@pytest.mark.parametrize("before", [0, 3, 200, 5000])
def test_a_line_that_is_not_utf8_is_named_and_its_neighbours_stay(tmp_path, before, capsys):
    path = tmp_path / "text.txt"
    good = [b"line %d of a good text\n" % number for number in range(before + 100)]
    path.write_bytes(b"".join([*good[:before], b"\xff\xfe bad\n", *good[before:]]))
    text, ledger = text_of(path, limit=1)
    assert text.encode() == b"".join(good)
    assert ledger.bad_lines == 1
    assert f"skipped text.txt:{before + 1}: no UTF-8" in capsys.readouterr().err
    with pytest.raises(ValueError, match=rf"text\.txt:{before + 1}: no UTF-8"):
        read(path)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (b"one\r\ntwo\r\n", "one\ntwo\n"),
        (b"one\rtwo", "one\ntwo"),
        (b"\xef\xbb\xbfone\n", "one\n"),
        ("one\u2028two\x85three\n".encode(), "one\u2028two\x85three\n"),
        (b"one\0two\n\n\n", "one\0two\n\n\n"),
        (b"one\n\ntwo", "one\n\ntwo"),
    ],
)
def test_a_text_stays_whole_whatever_ends_its_lines(tmp_path, content, text):
    (tmp_path / "text.txt").write_bytes(content)
    assert text_of(tmp_path / "text.txt")[0] == text


@pytest.mark.parametrize("name", ["lines.jsonl", "lines.txt"])
@pytest.mark.parametrize(
    "content",
    [
        b'{"text": "one"}\r\n{"text": "two"}\r\n\r\n',
        b'\xef\xbb\xbf{"text": "one"}\n{"text": "two"}',
        b'\n\n{"text": "one"}\n \n{"text": "two"}\n\n',
    ],
)
def test_json_lines_are_read_whatever_ends_them(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    assert text_of(tmp_path / name)[0] == "onetwo"


def test_a_line_separator_inside_a_json_text_ends_no_line(tmp_path):
    lines = [{"text": "one\u2028two\x85three"}, {"text": "four"}]
    path = tmp_path / "lines.jsonl"
    path.write_text("".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines))
    assert [record.text for record in read(path)[0]] == [line["text"] for line in lines]


def test_a_list_behind_a_byte_order_mark_is_read(tmp_path):
    (tmp_path / "list.json").write_bytes(b'\xef\xbb\xbf[{"text": "one"}]')
    assert text_of(tmp_path / "list.json")[0] == "one"


@pytest.mark.parametrize("ending", [b"\n", b"\r\n"])
def test_a_json_line_that_is_not_utf8_is_the_only_one_left_out(tmp_path, ending, capsys):
    lines = [b'{"text": "%d"}' % number for number in range(300)]
    lines.insert(200, b'{"text": "\xff\xfe bad"}')
    (tmp_path / "lines.jsonl").write_bytes(ending.join(lines) + ending)
    records, _ = read(tmp_path / "lines.jsonl", limit=1)
    assert [record.text for record in records] == [str(number) for number in range(300)]
    assert "skipped lines.jsonl:201: no JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "key"),
    [
        ({"text": HALF}, "'text'"),
        ({"text": "whole", "id": HALF}, "'id'"),
        ({HALF: 1, "text": "whole"}, "'a "),
        ({"messages": [{"role": "user", "content": HALF}]}, "'messages'"),
        ({"messages": [{"role": "user", "content": "hi", HALF: "hi"}]}, "'messages'"),
        ({"prompt": "hi", "response": HALF}, "'response'"),
        ({"prompt": "hi", "response": "bye", "tools": [{"name": HALF}]}, "'tools'"),
        ({"token_ids": [1, 2], "key": HALF}, "'key'"),
    ],
)
def test_half_a_surrogate_pair_anywhere_in_a_record_is_a_bad_line(tmp_path, line, key, capsys):
    path = tmp_path / "lines.jsonl"
    path.write_text("\n".join(map(json.dumps, [{"text": "one"}, line, {"text": "two"}])))
    records, ledger = read(path, limit=5)
    assert [record.text for record in records] == ["one", "two"]
    printed = capsys.readouterr().err
    assert f"skipped lines.jsonl:2: {key}" in printed
    assert "half of a surrogate pair" in printed and ledger.bad_lines == 1
    (tmp_path / "list.json").write_text(json.dumps([line]))
    with pytest.raises(ValueError, match=r"list\.json entry 1: .*half of a surrogate pair"):
        read(tmp_path / "list.json")


def test_a_whole_surrogate_pair_is_one_character(tmp_path):
    (tmp_path / "lines.jsonl").write_text(r'{"text": "a \ud83d\ude00 b"}')
    assert text_of(tmp_path / "lines.jsonl")[0] == "a \N{GRINNING FACE} b"


@pytest.mark.parametrize(
    ("content", "remedy"),
    [
        (gzip.compress(b'{"text": "hi"}\n', mtime=0), "it is compressed; unpack it"),
        (b"PAR1\x15\x04\x15\x00\x00", "it is a Parquet file; save it as JSON lines"),
        ("one\ntwo\n".encode("utf-16"), "it is UTF-16; save it as UTF-8"),
    ],
)
def test_a_file_in_another_format_is_refused_with_the_remedy(tmp_path, content, remedy):
    (tmp_path / "data.txt").write_bytes(content)
    with pytest.raises(ValueError, match=rf"'data\.txt' cannot be read: {remedy}"):
        read(tmp_path / "data.txt", limit=1000)
