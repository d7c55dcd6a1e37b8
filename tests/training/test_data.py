import numpy as np
import pytest
from transformers import AutoTokenizer

from training import data
from training.data.tokenizer import END_OF_TEXT

HELD_OUT, MARK = "secret", "xylophone"


def test_held_out_modules_never_appear_in_training_windows(corpus):
    windows = data.Windows(corpus.train, length=32)
    text = corpus.tokenizer.decode(
        np.concatenate([windows.batch(s, 4) for s in range(200)]).ravel()
    )
    assert "alpha_red" in text and MARK not in text
    assert MARK in corpus.tokenizer.decode(np.asarray(corpus.holdout))
    assert HELD_OUT not in corpus.description["train_modules"]


def test_a_copy_of_a_held_out_file_is_dropped_wherever_it_lies(sources, tmp_path):
    folder = tmp_path / "more"
    folder.mkdir()
    (folder / "innocent.py").write_text((sources / f"{HELD_OUT}.py").read_text() + "\nextra = 1\n")
    found = data.find_documents([str(folder), str(sources)], first=[HELD_OUT])
    assert sorted(document.module for document in found) == ["alpha", "beta", HELD_OUT]


def test_tables_tests_and_licence_headers_are_left_out(tmp_path):
    body = "\n".join(f"def function_{word}(): return None" for word in "abcdefghijklmnopqrstuvwxyz")
    (tmp_path / "kept.py").write_text("# Copyright 1999 Nobody\n# All wrongs reserved\n\n" + body)
    (tmp_path / "table.py").write_text("ROWS = [\n" + "  12345, 67890, 13579,\n" * 40 + "]\n")
    (tmp_path / "tests").mkdir()
    (tmp_path / "tests" / "helper.py").write_text(body.replace("function", "other"))
    (found,) = data.find_documents([str(tmp_path)])
    assert found.module == "kept" and found.text == body


def test_each_epoch_visits_every_window_once_and_in_its_own_order():
    windows = data.Windows(np.arange(32 * 10 + 1, dtype=np.uint16), length=32, seed=3)
    starts = [windows.batch(step, 5)[:, 0] for step in range(4)]
    first, second = np.concatenate(starts[:2]), np.concatenate(starts[2:])
    assert sorted(first) == sorted(second) == [32 * i for i in range(10)]
    assert first.tolist() != second.tolist()
    across = windows.batch(1, 7)[:, 0]  # rows 7 to 13: three of this epoch, four of the next
    assert across.tolist() == [*first[7:], *second[:4]]


def test_cut_windows_keep_every_input_and_its_target():
    windows = data.Windows(np.arange(65, dtype=np.uint16), length=32).batch(0, 2)
    parts = data.cut(windows, 8)
    assert parts.shape == (8, 9)
    pairs = lambda rows: set(zip(rows[:, :-1].ravel(), rows[:, 1:].ravel(), strict=True))
    assert pairs(parts) == pairs(windows)
    assert np.array_equal(data.cut(windows, 32), windows)


def test_no_source_gives_more_text_than_its_cap(sources, tmp_path):
    corpus = data.prepare(
        tmp_path, [str(sources)], [HELD_OUT], vocab_size=300, source_megabytes=0.004
    )
    assert 0 < corpus.description["train"]["bytes"] <= 4000


def test_the_corpus_is_built_once_and_again_only_for_another_request(sources, tmp_path):
    build = lambda vocab: data.prepare(tmp_path, [str(sources)], [HELD_OUT], vocab_size=vocab)
    build(300)
    stamp = (tmp_path / "train.bin").stat().st_mtime_ns
    build(300)
    assert (tmp_path / "train.bin").stat().st_mtime_ns == stamp
    build(301)
    assert (tmp_path / "train.bin").stat().st_mtime_ns > stamp


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
