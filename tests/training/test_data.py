import collections
import json

import numpy as np
import pytest
from transformers import AutoTokenizer

from training import data
from training.data.tokenizer import END_OF_TEXT

HELD_OUT, MARK = "secret", "xylophone"


def test_held_out_modules_never_appear_in_training_windows(corpus):
    windows = data.Windows(corpus.train, length=32)
    text = corpus.tokenizer.decode(np.concatenate([windows[i].tokens for i in range(len(windows))]))
    assert "alpha_red" in text and MARK not in text
    assert MARK in corpus.tokenizer.decode(np.asarray(corpus.holdout))
    assert HELD_OUT not in corpus.description["train_modules"]


def test_a_copy_of_a_held_out_file_is_dropped_wherever_it_lies(sources, tmp_path):
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "innocent.py").write_text((sources / f"{HELD_OUT}.py").read_text() + "\nextra = 1\n")
    documents = data.find_documents([str(folder), str(sources)], first=[HELD_OUT])
    assert sorted(document.module for document in documents) == ["alpha", "beta", HELD_OUT]


def test_tables_tests_and_licence_headers_of_packages_are_left_out(tmp_path, capsys):
    body = "\n".join(f"def function_{word}(): return None" for word in "abcdefghijklmnopqrstuvwxyz")
    package = tmp_path / "wordy"
    (package / "tests").mkdir(parents=True)
    (package / "kept.py").write_text("# Copyright 1999 Nobody\n# All wrongs reserved\n\n" + body)
    (package / "table.py").write_text("ROWS = [\n" + "  12345, 67890, 13579,\n" * 40 + "]\n")
    (package / "tests" / "helper.py").write_text(body.replace("function", "other"))
    (documents,) = data.find_documents(["package:wordy"], [str(tmp_path)])
    assert documents.module == "kept" and documents.text == body
    message = capsys.readouterr().err
    assert message == "left out of the data: 1 named as tests, tables or copies, 1 tables\n"


FOLDER = {
    "notes/today.md": "# Licence\n\nshort\n",
    "russian.txt": "Съешь же ещё этих мягких французских булок\n" * 20,
    "tests/numbers.txt": "31415926535\t8979323846\n" * 30,
    "data/line.py": "x = '" + "word " * 200 + "'\n",
    "data/again.py": "x = '" + "word " * 200 + "'\n",
    "long.rst": "a line of a long text\n" * 12_000,
}


@pytest.fixture
def folder(tmp_path):
    """A folder of files that the cleaning of packages would leave out."""
    folder = tmp_path / "texts"
    for name, text in FOLDER.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    return folder


def test_a_folder_is_taken_whole_and_other_files_are_counted(folder, capsys):
    find = lambda: data.find_documents([str(folder)], left_out=left_out)
    left_out = collections.Counter()
    assert sorted(document.text for document in find()) == sorted(FOLDER.values())
    assert not left_out and not capsys.readouterr().err
    (folder / ".git").mkdir()
    (folder / ".git" / "log.txt").write_text("words\n")
    (folder / "table.csv").write_text("1,2\n")
    (folder / "latin.txt").write_bytes("grüße\n".encode("latin-1"))
    (folder / "empty.txt").write_text("\n")
    assert len(find()) == len(FOLDER)
    assert left_out == {"hidden": 1, "*.csv": 1, "not UTF-8": 1, "empty": 1}
    message = capsys.readouterr().err
    assert message.startswith("left out of the data: 1 ") and "1 *.csv" in message
    assert message.count("\n") == 1


def test_a_corpus_of_an_earlier_version_is_not_taken_for_the_whole_folder(folder, tmp_path):
    (folder / "table.csv").write_text("1,2\n")
    build = lambda: data.prepare(tmp_path / "corpus", [str(folder)], ["notes"], vocab_size=300)
    made = build().description
    assert made["left_out"] == {"*.csv": 1} and made["train"]["files"] == len(FOLDER) - 1
    assert made["request"].pop("files") == "whole"
    made["train"]["files"] = 1  # as earlier versions kept
    (tmp_path / "corpus" / "corpus.json").write_text(json.dumps(made))
    assert build().description["train"]["files"] == len(FOLDER) - 1


def test_windows_hold_every_input_and_its_target_once():
    windows = data.Windows(np.arange(32 * 10 + 5, dtype=np.uint16), length=32)
    rows = [windows[i] for i in range(len(windows))]
    pairs = np.concatenate([np.stack([row.tokens[:-1], row.tokens[1:]], 1) for row in rows])
    assert pairs.tolist() == [[i, i + 1] for i in range(320)]
    for row in rows:
        assert (row.segments == 1).all() and (row.weights == 1).all()
        assert (row.tokens.dtype, row.segments.dtype, row.weights.dtype) == (
            np.int32,
            np.int32,
            np.float32,
        )


def test_no_source_gives_more_text_than_its_cap(sources, tmp_path, capsys):
    corpus = data.prepare(
        tmp_path, [str(sources)], [HELD_OUT], vocab_size=300, source_megabytes=0.004
    )
    assert 0 < corpus.description["train"]["bytes"] <= 4000
    assert corpus.description["left_out"] == {"beyond --source-megabytes": 1}
    assert "left out of the data: 1 beyond --source-megabytes" in capsys.readouterr().err


def test_the_corpus_is_built_once_and_again_only_for_another_request(sources, tmp_path):
    build = lambda vocab: data.prepare(tmp_path, [str(sources)], [HELD_OUT], vocab_size=vocab)
    build(300)
    stamp = (tmp_path / "train.bin").stat().st_mtime_ns
    build(300)
    assert (tmp_path / "train.bin").stat().st_mtime_ns == stamp
    build(301)
    assert (tmp_path / "train.bin").stat().st_mtime_ns > stamp


def test_a_corpus_whose_rebuilding_was_interrupted_is_built_anew(sources, tmp_path, monkeypatch):
    build = lambda vocab: data.prepare(tmp_path, [str(sources)], [HELD_OUT], vocab_size=vocab)
    whole = build(300).train.tolist()

    def interrupted(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr("training.data.corpus._write_tokens", interrupted)
        build(301)
    (tmp_path / "train.bin").write_bytes(b"")
    assert build(300).train.tolist() == whole


def test_the_tokenizer_loads_in_transformers_and_keeps_every_byte(corpus):
    tokenizer = AutoTokenizer.from_pretrained(corpus.directory / "tokenizer")
    text = "def f(x):\n\n        return x  # \t naïve → 12345\r\n"
    ids = tokenizer(text).input_ids
    assert tokenizer.decode(ids) == text and len(tokenizer) == 300
    assert tokenizer.eos_token == tokenizer.bos_token == END_OF_TEXT
    assert len([i for i in ids if tokenizer.decode([i]).strip().isdigit()]) == 5
    assert tokenizer(END_OF_TEXT).input_ids == [tokenizer.eos_token_id]


@pytest.mark.parametrize(
    ("sources", "holdout", "message"),
    [
        (["/no/such/folder"], [], "'/no/such/folder' matches no file; give an existing"),
        (["package:nosuchpackage"], [], "'package:nosuchpackage' is not installed; install it"),
        (["package:chex"], ["flax"], r"holdout \['flax'\] is in no --data source; name"),
        (["package:chex"], ["chex"], "leaves no text to train on; name fewer"),
    ],
)
def test_a_source_or_holdout_that_cannot_work_is_named(tmp_path, sources, holdout, message):
    with pytest.raises(ValueError, match=message):
        data.prepare(tmp_path, sources, holdout, vocab_size=300)


def test_windows_longer_than_the_data_are_refused():
    with pytest.raises(ValueError, match="length 32 is longer than the 20 tokens"):
        data.Windows(np.zeros(20, np.uint16), length=32)
