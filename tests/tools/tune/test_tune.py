"""``jspec tune`` on tiny models: it writes the fastest config, which loads."""

import json
import shutil

import pytest

import jspec
from jspec.cli import main
from jspec.tools.bench import names
from jspec.tools.bench.questions import Question
from jspec.tools.tune import report, search
from jspec.tools.tune.families import families_of
from jspec.tools.tune.run import tune
from jspec.tools.tune.settings import Settings
from tests import llm_fixtures

QUESTIONS = [
    Question("fox", ("the quick brown fox",), is_chat=False),
    Question("code", ("def add(x, y):\n",), is_chat=False),
]
ABOUT = {
    "device": {"kind": "cpu", "cpu": "one of them", "cores": 2},
    "time": "now",
    "versions": {"jax": "0"},
}


@pytest.fixture(scope="module")
def root(root):
    head = root / "tuned-eagle3"
    if not head.exists():
        llm_fixtures.checkpoints(root)
        llm_fixtures.write_eagle3_head(head)
    return root


def run(monkeypatch, *arguments):
    monkeypatch.setattr("sys.argv", ["jspec", "tune", *map(str, arguments)])
    with pytest.raises(SystemExit) as ended:
        main.main()
    return ended.value.code


def test_the_command_writes_the_fastest_config(root, tmp_path, monkeypatch, capsys):
    """The candidates are the trees of a head, and a lookup of one length."""
    monkeypatch.setattr(search, "_PROMISING", 0.0)  # both are searched, whichever is faster
    questions = tmp_path / "questions.jsonl"
    questions.write_text("".join(json.dumps({"prompt": q.turns[0]}) + "\n" for q in QUESTIONS))
    head = {"method": "eagle3", "model": str(root / "tuned-eagle3")}
    lookup = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 1}
    out, results = tmp_path / "config.json", tmp_path / "results.json"
    code = run(
        monkeypatch,
        root / "target",
        "--config",
        json.dumps(head),
        "--config",
        json.dumps(lookup),
        "--questions",
        questions,
        "--max-speculative-tokens",
        2,
        "--max-tree-size",
        4,
        "--max-tokens",
        17,
        "--repeats",
        1,
        "--quantization",
        "int8",
        "--output",
        out,
        "--json",
        results,
    )
    printed, tuned = capsys.readouterr().out, json.loads(results.read_text())
    assert code == 0
    [batch] = tuned["batches"]
    rows = batch["rows"]
    assert json.loads(out.read_text()) == rows[0]["speculative_config"]
    speeds = [row["tokens_per_second"]["median"] for row in rows]
    assert speeds == sorted(speeds, reverse=True) and {"method": "none"} in [
        row["config"] for row in rows
    ]
    for row in rows:
        assert jspec.LLM(str(root / "target"), row["speculative_config"]).get_metrics()
        assert row["name"] in printed
    measured = [each["name"] for each in batch["candidates"]]
    # The first chain, the shorter one, and the lookup; beside the faster chain, a tree of 4 nodes.
    assert {"eagle3, K=1", "eagle3, K=2", names.name_of(lookup)} <= {*measured}
    assert any(name.startswith("eagle3, tree of 4 nodes") for name in measured)
    assert {row["name"] for row in rows} == {"plain decoding", *measured[:2]}
    assert [line["name"] for line in tuned["acceptance"]] == ["eagle3"]
    assert json.dumps(rows[0]["speculative_config"]) in printed.replace("\n", " ")
    assert "dtype auto, int8 weights, at most 17 tokens" in printed.replace("\n", " ")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--config", '{"method": "eagle3"}'], "needs a 'model'"),
        (["--config", '{"method": "suffix", "tree_top_k": 2}'], "tree_top_k=2 is not used"),
        (["--max-tokens", "4"], "max_tokens=4 must be a whole number of at least 8"),
        (["--max-speculative-tokens", "0"], "max_speculative_tokens=0"),
        (["--max-tree-size", "3"], "max_tree_size=3 must be 0, for chains alone, or at least 4."),
        (["--temperature", "-1"], "temperature=-1"),
        (["--output", "no/such/folder/config.json"], "there is no folder no/such/folder"),
        (["--output", "both.json", "--json", "./both.json"], "is the file of --output too"),
        ([], "there is no question in the files given"),
    ],
)
def test_errors_come_before_anything_is_loaded(arguments, words, monkeypatch, capsys):
    if arguments[:1] == ["--config"]:
        monkeypatch.setattr("jspec.tools.bench.questions.read", lambda *_: QUESTIONS)
    assert run(monkeypatch, "no/such/model", *arguments) == 2
    error = capsys.readouterr().err
    assert words in error and error.count("\n") == 1


def test_heads_of_one_method_have_different_names(root, tmp_path):
    """The search may give one head the K that the config of the other has."""
    for folder in ("a/export", "b/export"):
        shutil.copytree(root / "tuned-eagle3", tmp_path / folder)
    heads = [{"method": "eagle3", "model": str(tmp_path / name / "export")} for name in "ab"]
    heads[0]["num_speculative_tokens"] = 2
    settings = Settings((*heads, {"method": "ngram"}), max_speculative_tokens=2, max_tree_size=0)
    families = families_of(llm_fixtures.loaded(root)["target"], settings)
    names_ = [family.name for family in families]
    assert names_ == ["plain decoding", "eagle3, a/export, K=2", "eagle3, b/export", "ngram"]
    assert families[2].chain(2).name == "eagle3, b/export, K=2"


@pytest.mark.parametrize(
    ("speeds", "best", "measured"),
    [
        ((1, 2, 3, 4, 5, 6, 7, 8), 8, {4, 5, 6, 7, 8}),
        ((1, 2, 3, 4, 3, 9, 9, 9), 4, {3, 4, 5}),
        ((7, 6, 5, 4, 4, 4, 4, 4), 1, {1, 2, 3, 4, 5}),
    ],
)
def test_a_line_is_left_as_soon_as_a_step_is_not_faster(root, speeds, best, measured, monkeypatch):
    """The chains of a lookup have these speeds; from K=4 both directions are tried."""
    seen = set()

    def row(self, candidate, *_):
        depth = candidate.tree.max_depth
        seen.add(depth)
        return {"name": candidate.name, "speedup": {"median": speeds[depth - 1]}}

    monkeypatch.setattr(search.Search, "_row", row)
    monkeypatch.setattr(search.Search, "_compiled", lambda _, candidate: candidate)
    monkeypatch.setattr(search, "race", lambda *_: None)
    target = llm_fixtures.loaded(root)["target"]
    settings = Settings(({"method": "ngram"},))
    [plain, family] = families_of(target, settings)
    tried = search.Search([plain, family], {}, [], settings.case(1), settings, print)
    tried._plain_run, tried._turns = None, 1
    tried._climb(family, tried._first(family))
    assert seen == measured and tried._ranked()[0].tree.max_depth == best


def test_a_search_that_ended_at_max_programs_says_so(root):
    lookups = tuple({"method": "ngram", "prompt_lookup_max": most} for most in (1, 2))
    settings = Settings(lookups, max_programs=1, max_tokens=17, repeats=1, patience=0)
    tuned = tune(llm_fixtures.loaded(root)["target"], QUESTIONS[:1], settings)
    [batch] = tuned["batches"]
    assert len(batch["candidates"]) == 1 and len(batch["rows"]) == 2
    note = "batch 1, greedy: an unmeasured candidate may be faster; raise --max-programs."
    assert note in report.notes(ABOUT | tuned)


def test_ctrl_c_keeps_the_finished_batch_sizes(root, monkeypatch):
    """The race ends once every candidate has a sample, and the second batch size never starts."""
    race, seen = search.race, []

    def interrupted(field, repeats, patience):
        race(field, 1, 0)
        if len(field) == 3:  # the best two and plain decoding
            raise KeyboardInterrupt

    monkeypatch.setattr(search, "race", interrupted)
    lookup = {"method": "ngram", "prompt_lookup_max": 1}
    settings = Settings(
        (lookup,),
        batch_sizes=(2, 1),
        max_speculative_tokens=2,
        max_programs=2,
        max_tokens=17,
        repeats=1,
        patience=0,
    )
    target = llm_fixtures.loaded(root)["target"]
    tuned = tune(target, QUESTIONS, settings, on_batch=seen.append)
    assert tuned["interrupted"] and seen == [tuned]
    [batch] = tuned["batches"]
    assert batch["batch_size"] == 2 and len(batch["rows"][0]["seconds"]) == 1
    assert report.output(tuned) == {"2": batch["rows"][0]["speculative_config"]}
    assert any("interrupted" in note for note in report.notes(ABOUT | tuned))

    monkeypatch.setattr(search, "race", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
    tuned = tune(target, QUESTIONS, settings)
    assert tuned["interrupted"] and tuned["batches"] == [] and report.output(tuned) is None
