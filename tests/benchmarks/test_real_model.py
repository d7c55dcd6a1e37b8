"""The benchmark of a real model: its tables' figures, and peers that fail."""

import dataclasses
import json
import sys
from pathlib import Path

import pytest

import jspec
from benchmarks import real_model
from benchmarks.peers.contenders import KINDS, Kind, Peers, Start
from jspec.checkpoints import loading
from jspec.tools.bench.contenders import PLAIN
from jspec.tools.bench.questions import Request
from jspec.tools.bench.settings import Settings
from tests.benchmarks import peer_that_answers

DEMO = Path(jspec.__file__).parent / "assets" / "demo"
DRAFT = {"method": "draft_model", "model": str(DEMO / "draft"), "num_speculative_tokens": 2}
TOKENS = 8


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """Return what a run wrote."""
    folder = tmp_path_factory.mktemp("real_model")
    asked = [
        {"category": "writing", "turns": ["def add(x, y):", "def sub(x, y):"]},
        {"category": "stem", "turns": ["import os"]},
        {"category": "qa", "turns": ["class Fox:"]},
    ]
    questions = folder / "questions.jsonl"
    questions.write_text("\n".join(map(json.dumps, asked)))
    modes = {"plain": None, **dict.fromkeys(["ngram", "absent", "mortal"], "ngram")}
    fake = Kind(
        Path(peer_that_answers.__file__), modes, lambda start: [start.mode, str(start.threads)]
    )
    words = f"""--questions {questions} --model {DEMO / "target"} --methods ngram
        --peer vllm={sys.executable} --batch-size 1 --temperature 0 --max-tokens {TOKENS}
        --num-questions 2 --repeats 2 --patience 0 --dtype float32 --quantization int8
        --out {folder / "out.json"}"""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(KINDS, "vllm", fake)
        assert real_model.main(words.split()) == 0
    return json.loads((folder / "out.json").read_text())


def test_a_table_holds_our_methods_and_the_peers_that_ran(results):
    ours, lookup, *quantised, plain, drafted = (row["name"] for row in results["rows"])
    assert ours == "autoregressive" and lookup.startswith("ngram, K=4")
    assert quantised == [f"int8, {ours}", f"int8, {lookup}"]
    assert (plain, drafted) == ("vllm", "vllm, ngram")
    assert results["questions"] == {"multi-turn chat": 3, "QA": 1}  # a turn is a prompt


def test_methods_run_once_more_with_quantised_weights(results):
    *whole, plain, lookup = (row for row in results["rows"] if "memory_bytes" in row)
    for row in (plain, lookup):
        assert row["quantization"] == "int8" and row["texts_equal_to_plain"] == row["texts"] == 4
        assert row["memory_bytes"]["target"] < whole[0]["memory_bytes"]["target"]
    assert not any("quantization" in row for row in whole)


def test_figures_of_a_peer_are_those_that_it_answered(results):
    plain, lookup = (_row(results, name) for name in ("vllm", "vllm, ngram"))
    for row in (plain, lookup):
        assert row["config"]["threads"] == 2 and row["texts"] == 4
        assert row["tokens_per_second"]["median"] == pytest.approx(1000)
        tried = row["config"]["tokens_per_second_by_threads"]
        assert tried == pytest.approx({"1": 500, "2": 1000})
        relative = row["speedup"]["median"] * row["ours_over_theirs"]["median"]
        own = _row(results, row["ours"])["speedup"]["median"]
        assert relative == pytest.approx(own, rel=0.5)
    assert plain["ours"] == "autoregressive" and lookup["ours"].startswith("ngram")
    assert "acceptance_length" not in plain and lookup["acceptance_length"] == 2
    assert lookup["categories"]["QA"]["acceptance_length"] == 2
    assert plain["texts_equal_to_plain"] == 0 and plain["mean_first_difference"] < TOKENS
    assert results["peers"] == {"vllm": {"fake": "1"}}


def test_a_peer_that_fails_is_named_and_loses_nothing_else(results):
    assert "vllm, absent failed (ImportError: no such package)" in results["peer"]
    assert "vllm, mortal failed (the peer ended with status 3)" in results["peer"]
    assert not results["interrupted"]
    assert all(len(row["seconds"]) == 2 for row in results["rows"])
    assert any("vllm, absent failed" in note for note in real_model.notes(results))


def test_peers_get_the_weights_in_the_layout_of_hugging_face(monkeypatch):
    starts = []

    def options(start):
        starts.append(start)
        return ["absent", "1"]

    modes = {"draft_model": "draft_model"}
    monkeypatch.setitem(KINDS, "vllm", Kind(Path(peer_that_answers.__file__), modes, options))
    target, about = loading.load(DEMO / "target", "bfloat16"), {}
    settings = Settings((DRAFT,), max_tokens=TOKENS)
    with Peers({"vllm": sys.executable}, [1], settings, target, about) as peers:
        [(name, run)] = peers(settings.cases[0], {})
        [start] = starts
        for folder in (start.target, start.draft):
            assert {"config.json", "tokenizer.json"} <= {path.name for path in folder.iterdir()}
            assert loading.load(folder).params.embedding.dtype == "bfloat16"
    assert name == "vllm, draft model" and start.config == DRAFT | {"model": str(start.draft)}
    assert "no such package" in run.reason and not start.target.exists()


@pytest.mark.parametrize(("forms", "counterpart"), [((), PLAIN), (("gguf",), f"gguf, {PLAIN}")])
def test_llama_cpp_is_compared_with_the_weights_that_it_reads(monkeypatch, forms, counterpart):
    fake = Kind(
        Path(peer_that_answers.__file__),
        {"plain": None},
        lambda start: ["plain", str(start.threads)],
    )
    monkeypatch.setitem(KINDS, "llamacpp", fake)
    target = loading.load(DEMO / "target", "float32")
    settings = Settings((DRAFT,), max_tokens=TOKENS, quantizations=forms)
    asked = {"qa": [Request("qa", (1, 2, 3))]}
    with Peers({"llamacpp": sys.executable}, [1], settings, target, {}) as peers:
        [(name, run)] = peers(settings.cases[0], asked)
        assert (name, run.counterpart) == ("llamacpp", counterpart)


def test_suffix_decoding_of_vllm_knows_no_answers_of_earlier_turns():
    model = Path("model")
    start = Start("suffix", model, None, "model", {"method": "suffix"}, "bfloat16", 2, 1)
    options = KINDS["vllm"].options(start)
    assert json.loads(options[options.index("--config") + 1]) == {
        "method": "suffix",
        "suffix_decoding_max_cached_requests": 0,
    }
    plain = dataclasses.replace(start, mode="plain", config=None)
    assert "--config" not in KINDS["vllm"].options(plain)


def test_a_line_of_the_table_has_a_cell_for_each_head(results):
    [table] = real_model.tables(results)
    heads = [str(column.header) for column in table.columns]
    assert heads[:5] == ["method", "threads", "tokens/s", "x plain", "tau"]
    assert heads[5:7] == ["multi-turn chat", "QA"] and table.row_count == len(results["rows"])
    cells = [str(cell) for cell in table.columns[-1].cells]
    assert len(cells) == table.row_count and sum(cell != "" for cell in cells) == 2


def test_tasks_take_questions_of_each_category_in_turns(tmp_path):
    names = ["writing", "writing", "stem", "stem", "rag", "code"]
    file = tmp_path / "questions.jsonl"
    lines = [{"category": name, "turns": [f"{name} {i}"]} for i, name in enumerate(names)]
    file.write_text("\n".join(map(json.dumps, lines)))
    first = real_model.asked([file], 2)
    assert sorted((each.category, each.turns[0]) for each in first) == [
        ("RAG", "rag 4"),
        ("code", "code 5"),
        ("multi-turn chat", "stem 2"),
        ("multi-turn chat", "writing 0"),
    ]
    assert len(real_model.asked([file])) == len(names)


@pytest.mark.parametrize(
    "words, message",
    [
        ("--peer vllm", "must be NAME=PYTHON"),
        ("--peer sglang=python", "must be NAME=PYTHON"),
        ("--peer vllm=/nowhere", "/nowhere is no interpreter; `make peers` makes one"),
        (f"--peer vllm={sys.executable} --peer vllm={sys.executable}", "names vllm twice"),
        ("--threads 0", "--threads 0 must be at least 1"),
        (f"--out {__file__}/results/a.json", "is a file, not a folder"),
    ],
)
def test_options_that_cannot_work_are_refused_before_any_work(words, message, capsys):
    with pytest.raises(SystemExit):
        real_model.main(["--questions", "some.jsonl", "--model", "some", *words.split()])
    assert message in capsys.readouterr().err


def _row(results, name):
    return next(row for row in results["rows"] if row["name"] == name)
