"""The report of a run's data: every token of every record is accounted for."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training import words
from training import distill
from training.data import report
from training.data.coverage import coverage
from training.data.packing import pack
from training.data.settings import DataSettings, open_data
from training.data.token_file import TokenFile

DEMO = Path(distill.__file__).parents[1] / "jspec" / "assets" / "demo" / "target"
HOW = ("cut", "truncate", "drop")


@given(
    lengths=st.lists(st.integers(2, 40), min_size=1, max_size=12),
    seed=st.integers(0, 99),
    length=st.integers(1, 24),
    how=st.sampled_from(HOW),
)
def test_every_token_is_learned_context_or_left_out_with_a_reason(lengths, seed, length, how):
    random = np.random.default_rng(seed)
    total, count = sum(lengths), len(lengths)
    ends, learned = np.cumsum(lengths), random.random(total) < random.random()
    learned[ends - 1] = True
    sources = [{"name": "a", "documents": count // 2}, {"name": "b", "documents": -(-count // 2)}]
    file = TokenFile(np.arange(1, total + 1), learned, ends, np.zeros((count, 2)), {}, sources)
    documents = np.flatnonzero(random.random(count) < 0.8)
    try:
        rows = pack(file, documents, length, long_documents=how)
    except ValueError:
        return
    account = coverage(rows, documents, how)
    owner = np.repeat(np.arange(count), lengths)
    mine = np.isin(owner, documents)
    windows = [rows[i] for i in range(len(rows))]
    taken = np.concatenate([row.tokens[row.segments > 0] for row in windows]) - 1
    trained = np.concatenate([row.tokens[row.weights > 0] for row in windows]) - 1
    assert account["tokens"] == mine.sum() and account["labels"] == learned[mine].sum()
    assert account["learned_tokens"] == len(trained)
    left = sum(part["tokens"] for part in account["left_out"].values())
    assert left == mine.sum() - len(taken)
    gone = np.setdiff1d(np.flatnonzero(mine), taken)
    assert account["labels"] == (
        account["learned_tokens"] + account["first_tokens"] + learned[gone].sum()
    )
    assert account["long_documents"] == (np.array(lengths)[documents] > length + 1).sum()
    assert account["without_prompt"] == sum(
        cut_answer(row.tokens[row.segments == number] - 1, learned, ends - lengths, owner)
        for row in windows
        for number in range(1, row.segments.max() + 1)
    )
    for name in ("documents", "tokens", "learned_tokens", "first_tokens", "without_prompt"):
        assert account[name] == sum(source[name] for source in account["by_source"])


def cut_answer(tokens, learned, begins, owner):
    """Return the number of learned tokens of a piece before its first token of a prompt."""
    begin = begins[owner[tokens[0]]]
    if learned[begin] or tokens[0] == begin:
        return 0
    count = 0
    while count < len(tokens) and learned[tokens[count]]:
        count += 1
    return max(count - 1, 0)


def write(path, *lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def opened(tmp_path, *data, **options):
    given = DataSettings(data=data, cache=str(tmp_path / "cache"), **options)
    return open_data(given, words.tokenizer(words.PLAIN), len(words.IDS)), given


LONG, SHORT = {"text": "hi there " * 550}, {"text": "hi there you"}


@pytest.mark.parametrize(
    ("how", "left", "learned"),
    [("drop", 41_819, 5), ("truncate", 40_584, 19 * 64 + 5), ("cut", 0, 19 * (2201 - 34) + 5)],
)
def test_one_line_says_what_becomes_of_long_documents(tmp_path, capsys, how, left, learned):
    path = write(tmp_path / "long.jsonl", *[LONG] * 19, SHORT)
    data, given = opened(tmp_path, path, length=64, long_documents=how)
    account = data.description["train"]["account"]
    assert account["tokens"] == 41_825 and account["long_documents"] == 19
    assert account["learned_tokens"] == learned
    assert sum(part["tokens"] for part in account["left_out"].values()) == left
    capsys.readouterr()
    report.print_summary(data, given)
    (line,) = [line for line in capsys.readouterr().err.splitlines() if "longer than" in line]
    expected = f"19 of 20 documents longer than --length 64 (--long-documents {how})"
    assert expected in line
    share = f"{left:,} of 41,825 tokens ({100 * left / 41_825:.2f} %) are left out"
    assert (share in line) == bool(left)


def test_answers_that_were_cut_from_their_question_are_counted(tmp_path):
    line = {"question": "hi there", "answer": "you " * 40}
    data, given = opened(tmp_path, write(tmp_path / "cut.jsonl", line), length=20)
    account = data.description["train"]["account"]
    assert 0 < account["without_prompt"] < account["learned_tokens"]
    (finding,) = [text for text in report.findings(data.description, given) if "prompt;" in text]
    assert f"{account['without_prompt']} of {account['learned_tokens']} learned tokens" in finding


def test_what_was_refused_or_without_effect_is_reported_for_each_source(tmp_path):
    chat = write(
        tmp_path / "chat.jsonl", {"prompt": "hi", "response": "bye", "id": 3}, {"words": 1}
    )
    text = write(tmp_path / "text.jsonl", {"text": "hi there"})
    data, given = opened(tmp_path, chat, text, max_bad_lines=1)
    assert [source["name"] for source in data.description["read"]] == ["chat.jsonl", "text.jsonl"]
    first, second = data.description["read"]
    assert (first["records"], first["refused"], first["documents"]) == (1, 1, 1)
    assert first["why"][0].startswith("chat.jsonl:2: no known keys among ['words']")
    assert (second["records"], second["refused"], second["unused"]) == (1, 0, {})
    found = list(report.findings(data.description, given))
    assert "chat.jsonl: 1 refused, 1 record read" in found
    assert "chat.jsonl: without effect are the key 'id' (1 record)" in found


def test_examples_mark_the_learned_tokens_of_the_windows(tmp_path):
    chat = write(tmp_path / "chat.jsonl", *[{"prompt": "hi there", "response": "bye"}] * 9)
    data, _ = opened(tmp_path, chat, write(tmp_path / "text.jsonl", {"text": "how are\x1byou"}))
    first, _, last = report.examples(data.train, words.tokenizer(words.PLAIN))
    assert first[0] == "example 1, document 1: 10 tokens, 2 learned"
    assert first[1] == [
        ("<user>hi there<end>\n<assistant>", False),
        ("bye<end>", True),
        ("\n", False),
    ]
    assert last[1][0] == ("how", False) and last[1][1][1]


@pytest.fixture
def target(tmp_path):
    """The demo's target without its weights, and with a chat template."""
    folder = tmp_path / "target"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / name, folder)
    (folder / "chat_template.jinja").write_text(words.PLAIN.replace("<end>", "<|endoftext|>"))
    return str(folder)


def run(target, tmp_path, *data, method="medusa", **options):
    given = {"held_out_share": 0.3, "output": tmp_path / "run", "length": 32} | options
    words = [f"--{name.replace('_', '-')}={value}" for name, value in given.items()]
    return distill.main([method, "--target", target, *words, "--data", *data, "--dry-run"])


@pytest.mark.parametrize("method", ["medusa", "eagle"])
def test_a_dry_run_shows_the_data_and_writes_nothing(target, tmp_path, capsys, method):
    lines = [
        {"question": f"question {number % 20}", "answer": f"answer {number}", "id": number}
        for number in range(100)
    ]
    path = write(tmp_path / "data.jsonl", *lines, {"text": "both"})
    before = sorted(tmp_path.rglob("*"))
    assert run(target, tmp_path, path, method=method, max_bad_lines=1) == 0
    assert sorted(tmp_path.rglob("*")) == before
    printed = capsys.readouterr()
    shown = printed.out
    assert "data.jsonl: 100 records read, 1 refused, 100 documents" in shown
    assert "  refused data.jsonl:101: is text, but what came before is chat" in shown
    assert "data.jsonl: without effect are the key 'id' (100 records)" in shown
    table = [line.split() for line in shown.splitlines() if "data.jsonl  " in line]
    assert sum(int(row[1]) for row in table) == 100 and len(table) == 2
    for row in table:
        tokens, *parts = (int(cell.replace(",", "")) for cell in row[2:])
        assert tokens == sum(parts)
    assert "split: 0 of " in shown and "held-out prompts are in training" in shown
    assert shown.count("\nexample ") == 3 and shown.count("⟦answer ") == 3
    assert "\nLearned tokens are in ⟦ ⟧. Nothing was trained or written.\n" in shown


def test_a_terminal_shows_learned_tokens_in_colour(target, tmp_path, capsys, monkeypatch):
    path = write(tmp_path / "data.jsonl", {"question": "one [bold]", "answer": "two [/bold]"})
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes the output for a terminal
    assert run(target, tmp_path, path, held_out_share=0, acceptance_prompts=0) == 0
    shown = capsys.readouterr().out
    assert "\x1b[1;32mtwo [/bold]<|endoftext|>\x1b[0m" in shown and "⟦" not in shown
    assert "one [bold]" in shown and "Learned tokens are green." in shown


def test_a_dry_run_refuses_what_a_run_refuses(target, tmp_path, capsys):
    path = write(tmp_path / "data.jsonl", {"question": "a", "answer": "b"}, {"words": 1})
    assert run(target, tmp_path, path) == 2
    assert "error: data.jsonl:2: no known keys" in capsys.readouterr().err
    assert run(target, tmp_path, path, length=100_000) == 2
    assert "--length 100000 does not work; the target has" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
