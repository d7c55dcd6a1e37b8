"""The figures of ``jspec bench`` come from real runs, and every output file holds them."""

import html.parser
import json
import os
import sys
from pathlib import Path

import pytest

import jspec
from jspec.checkpoints import checkpoint
from jspec.cli import bench as bench_command
from jspec.cli import main
from jspec.tools.bench import chart, files, names, report
from jspec.tools.bench.contenders import Case, Ours
from jspec.tools.bench.peer import PeerError, Worker
from jspec.tools.bench.questions import Question, Request
from jspec.tools.bench.run import CaseTable, bench
from jspec.tools.bench.settings import Settings
from jspec.util import atomic_files
from tests import browser, llm_fixtures

QUESTIONS = [
    Question("code", ("def add(x, y):\n",), is_chat=False),
    Question("fox", ("the quick brown fox",), is_chat=False),
    Question("fox", ("the lazy dog. the lazy",), is_chat=False),
]
ABOUT = {
    "device": {"kind": "cpu", "cpu": "one <of> them", "cores": 2},
    "time": "now",
    "versions": {"jax": "0"},
}


def settings(both, **changes):
    draft = {"model": both["draft"], "num_speculative_tokens": 3}
    common = {"configs": (draft,), "max_tokens": 17, "repeats": 2, "patience": 0}
    return Settings(**(common | {"peers": False} | changes))


@pytest.fixture(scope="module")
def results(root):
    both = llm_fixtures.loaded(root)
    steps = []
    results_ = bench(both["target"], QUESTIONS, settings(both), on_step=steps.append)
    assert steps[0] == "loading" and any("compiling draft, K=3" in step for step in steps)
    return ABOUT | results_


def test_the_figures_of_a_row_agree_with_each_other(results):
    plain, drafted = results["rows"]
    assert [plain["name"], drafted["name"]] == ["autoregressive", "draft, K=3"]
    assert results["questions"] == {"code": 1, "fox": 2} and results["left_out"] == 0
    assert plain["speedup"] == {"median": 1.0, "least": 1.0, "most": 1.0}
    assert plain["acceptance_length"] == 1 and plain["acceptance_per_position"] == []
    speed, ratio = drafted["tokens_per_second"], drafted["speedup"]
    assert 0 < speed["least"] <= speed["median"] <= speed["most"]
    assert 0 < ratio["least"] <= ratio["median"] <= ratio["most"]
    assert len(drafted["seconds"]) == 2 and drafted["texts_equal_to_plain"] == drafted["texts"] == 3
    first, second, third = drafted["acceptance_per_position"]
    assert 1 >= first >= second >= third >= 0 and drafted["acceptance_length"] >= 1
    parts, memory = drafted["split_ms"], drafted["memory_bytes"]
    assert min(parts.values()) >= 0 and min(parts["round"], parts["target"]) > 0
    assert memory["peak"] > memory["target"] > memory["drafter"] > 0


def test_texts_of_two_rounds_are_timed_by_part_too(root):
    """Longer texts skip their first two rounds; these have no others."""
    both = llm_fixtures.loaded(root)
    short = settings(both, configs=({"method": "none"},), max_tokens=2, repeats=1)
    for row in bench(both["target"], QUESTIONS[:1], short)["rows"]:
        parts = row["split_ms"]
        assert parts["target"] > 0
        assert sum(parts[name] for name in report.PARTS) == pytest.approx(parts["round"])


def test_acceptance_is_counted_by_category(root, results):
    """The expected value comes from a generation of the same requests."""
    both = llm_fixtures.loaded(root)
    llm = llm_fixtures.llm(root, "draft_model")
    params = llm_fixtures.jspec.SamplingParams(max_tokens=17, temperature=0.0, seed=0)
    row = results["rows"][1]
    for name in ("code", "fox"):
        prompts = [
            {"prompt_token_ids": both["target"].tokenizer.encode(question.turns[0])}
            for question in QUESTIONS
            if question.category == name
        ]
        texts = [output.outputs[0] for output in llm.generate(prompts, params)]
        tokens = sum(len(text.token_ids) for text in texts)
        accepted = sum(
            text.speculative_decoding_stats["num_accepted_draft_tokens"] for text in texts
        )
        expected = tokens / (tokens - accepted)
        assert row["categories"][name]["acceptance_length"] == pytest.approx(expected)
        assert row["categories"][name]["questions"] == len(prompts)


def test_a_sample_starts_without_the_answers_of_the_one_before(root):
    """Within a sample a repeated question takes fewer passes."""
    both = llm_fixtures.loaded(root)
    ids = tuple(both["target"].tokenizer.encode("the quick brown fox"))
    llm = llm_fixtures.jspec.LLM(both["target"], {"method": "suffix"}, max_num_seqs=1)
    once, twice = (
        Ours(llm, Case(1, 0.0, 17), {"fox": [Request("fox", ids)] * count}) for count in (1, 2)
    )
    assert once().passes == once().passes
    assert twice().passes == twice().passes < 2 * once().passes


def test_the_network_of_a_contender_is_opened_once(root, monkeypatch):
    paths, target = llm_fixtures.checkpoints(root), llm_fixtures.loaded(root)["target"]
    load, opened = checkpoint.load_pretrained, []
    monkeypatch.setattr(
        checkpoint, "load_pretrained", lambda path, *a: opened.append(path) or load(path, *a)
    )
    chosen = settings({"draft": str(paths["draft"])})
    table = CaseTable({None: target}, chosen, chosen.cases[0], {}, None)
    assert [name for name, *_ in table._contenders()] == ["autoregressive", "draft, K=3"]
    assert opened == [str(paths["draft"])]


def test_repeated_questions_fill_a_batch(root, monkeypatch):
    both, sizes = llm_fixtures.loaded(root), []
    generate = llm_fixtures.jspec.LLM.generate

    def watched(self, prompts, *arguments):
        sizes.append(len(prompts))
        return generate(self, prompts, *arguments)

    monkeypatch.setattr(llm_fixtures.jspec.LLM, "generate", watched)
    chosen = settings(both, batch_sizes=(2,), repeats=1, configs=({"method": "none"},))
    filled = bench(both["target"], QUESTIONS, chosen)
    assert set(sizes) == {2} and filled["questions"] == {"code": 1, "fox": 2}
    counted = filled["rows"][1]["categories"]["code"]
    assert (counted["questions"], counted["requests"]) == (1, 2)


def test_no_question_is_repeated_if_there_are_enough_for_a_batch(root):
    both = llm_fixtures.loaded(root)
    asked = [*QUESTIONS, Question("fox", ("the fox is",), is_chat=False)]
    suffix = {"method": "suffix", "num_speculative_tokens": 4}
    chosen = settings(both, batch_sizes=(2,), repeats=1, configs=(suffix,))
    plain, drafted = bench(both["target"], asked, chosen)["rows"]
    for row in (plain, drafted):
        counted = row["categories"]["fox"]
        assert (counted["questions"], counted["requests"]) == (3, 3)


class FakePeer:
    """Records its calls, and fails at one mode."""

    def __init__(self, model, draft, dtype):
        self.info = {"transformers": "5", "torch": "2"}
        self.made, self.asked = (model, draft, dtype), []
        FakePeer.last = self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def generate(self, mode, prompts, **given):
        self.asked.append((mode, given))
        if mode == "assisted":
            raise PeerError("the tokenizers differ")
        return {"seconds": 1.0, "cpu_seconds": 1.0, "tokens": [[7] * 17 for _ in prompts]}


def test_the_peer_takes_our_first_settings_and_may_fail_at_a_mode(root, monkeypatch):
    both = llm_fixtures.checkpoints(root)
    monkeypatch.setattr("jspec.tools.bench.peer.Peer", FakePeer)
    monkeypatch.setattr("jspec.tools.bench.peer.refusal", lambda *_: None)
    configs = (
        {"method": "draft_model", "model": str(both["draft"]), "num_speculative_tokens": 2},
        {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 2},
        {"method": "suffix", "num_speculative_tokens": 12},
    )
    chosen = Settings(configs, max_tokens=17, repeats=1, patience=0)
    results = ABOUT | bench(str(both["target"]), QUESTIONS[:1], chosen)
    names = [row["name"] for row in results["rows"]]
    assert names[-2:] == ["transformers", "transformers, prompt lookup"] and len(names) == 6
    assert results["rows"][-1]["config"] == {"num_speculative_tokens": 4, "ngram_max": 2}
    why = "batch 1, greedy: transformers, assisted failed (the tokenizers differ)"
    assert why in results["peer"] and why in report.markdown(results)
    peer = FakePeer.last
    assert peer.made == (str(both["target"]), str(both["draft"]), "float32")
    for mode, given in peer.asked:
        expected = {"assisted": 2, "prompt_lookup": 4, "eager": None}[mode]
        assert given.get("num_speculative_tokens") == expected


class _Strict(html.parser.HTMLParser):
    """Collects open tags, addresses and text of a page."""

    VOID = ("meta", "img", "br")

    def __init__(self):
        super().__init__()
        self.open, self.addresses, self.text = [], [], ""

    def handle_starttag(self, tag, attrs):
        self.addresses += [value for name, value in attrs if name in ("src", "href")]
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_folder_holds_json_markdown_a_picture_and_a_page_that_fetches_nothing(
    results, tmp_path
):
    files.write(results, tmp_path / "out")
    written = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()}
    assert sorted(written) == ["results.html", "results.json", "results.md", "results.png"]
    assert json.loads(written["results.json"])["rows"][1]["name"] == results["rows"][1]["name"]
    assert written["results.png"].startswith(b"\x89PNG")
    text = written["results.md"].decode()
    line = next(line for line in text.splitlines() if line.startswith("| draft, K=3"))
    assert f"| {results['rows'][1]['acceptance_length']:.2f} |" in line
    page = _Strict()
    page.feed(written["results.html"].decode())
    assert page.open == [] and "one <of> them" in page.text
    assert all(address.startswith("data:") for address in page.addresses)
    assert len(list(report.terminal(results))) == 2


def test_no_line_of_the_picture_lies_under_its_frame(monkeypatch, results):
    """The lines are those of a drafter that is always right, and of one that is always wrong."""
    from matplotlib.figure import Figure

    drawn, save = [], Figure.savefig
    monkeypatch.setattr(
        Figure, "savefig", lambda self, *to, **how: (drawn.append(self), save(self, *to, **how))
    )
    rows = [results["rows"][1] | {"acceptance_per_position": [float(at)] * 3} for at in range(2)]
    chart.draw(results | {"rows": rows})
    positions = drawn[0].axes[1]
    least, most = positions.get_ylim()
    assert [least < line.get_ydata()[0] < most for line in positions.lines] == [True, True]


def test_a_picture_that_cannot_be_drawn_leaves_nothing_behind(results, tmp_path, monkeypatch):
    def failing(self, file, **_):
        file.write(b"half")
        raise OSError("no memory left")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", failing)
    with pytest.raises(OSError, match="no memory left"):
        files.write(results, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_configs_of_one_method_are_told_apart_by_their_models():
    head = {"method": "eagle3", "num_speculative_tokens": 2}
    alike = [head | {"model": f"/runs/{folder}/export"} for folder in "ab"]
    others = [{"model": "/runs/draft", "num_speculative_tokens": 2}, {"method": "suffix"}]
    assert names.names_of(alike + others) == [
        "eagle3, a/export, K=2",
        "eagle3, b/export, K=2",
        "draft, K=2",
        "suffix",
    ]
    portable = [names.portable(each, alike + others).get("model") for each in alike + others]
    assert portable == ["a/export", "b/export", "draft", None]
    both = [alike[0], alike[1] | {"num_speculative_tokens": 3}]
    assert names.names_of(both) == ["eagle3, K=2", "eagle3, K=3"]
    drafts = [{"model": "/one/draft"}, {"model": "two/draft"}, {"model": "draft"}]
    assert names.names_of(drafts) == ["one/draft", "two/draft", "draft"]


def test_k_applies_to_the_demos_methods_too(monkeypatch, capsys):
    monkeypatch.setattr("jspec.checkpoints.loading.load", None)  # not called
    monkeypatch.setattr("sys.argv", ["jspec", "bench", "-k", "0"])
    with pytest.raises(SystemExit):
        main.main()
    assert "num_speculative_tokens to be greater than zero (0)" in capsys.readouterr().err


def test_names_of_users_are_printed_as_they_are(results, tmp_path, capsys):
    """They hold terminal markup, formulas of matplotlib and names of emojis."""
    name, category = 'draft, corpus="/runs[v2]/$a$_{/:cat:"', "mt[/bench]"
    plain, drafted = results["rows"]
    rows = [
        row
        | {
            "name": row["name"] if row is plain else name,
            "categories": {category: row["categories"]["fox"], "b": row["categories"]["code"]},
        }
        for row in (plain, drafted)
    ]
    renamed = results | {"rows": rows, "questions": {category: 2, "b": 1}, "peer": "at [red]/x"}
    bench_command.finish(renamed, report)
    printed = capsys.readouterr().out
    assert printed.count(name) == 2 and f"{category} (2)" in printed and "at [red]/x" in printed
    files.write(renamed, tmp_path)


@pytest.mark.parametrize("target", ["there.json", "new.json"])
def test_a_link_stays_and_its_target_is_written(tmp_path, target):
    (tmp_path / "there.json").write_text("old")
    (tmp_path / "link.json").symlink_to(target)
    files.write_json({"rows": []}, tmp_path / "link.json")
    assert (tmp_path / "link.json").is_symlink()
    assert json.loads((tmp_path / target).read_text()) == {"rows": []}
    assert {path.name for path in tmp_path.iterdir()} == {"link.json", "there.json", target}


def test_a_pipe_is_written_to_and_not_replaced(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    atomic_files.check_output("--json", tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    files.write_json({"rows": []}, tmp_path / "pipe")
    assert json.loads(os.read(reader, 99)) == {"rows": []} and (tmp_path / "pipe").is_fifo()
    os.close(reader)


@browser.needed
def test_the_page_shows_tables_and_picture_in_a_browser(results, tmp_path):
    files.write(results, tmp_path)
    page = (tmp_path / "results.html").read_text(encoding="utf-8")
    text = browser.seen(page, tmp_path, window="500,800")
    assert text.startswith("jspec bench") and "batch 1, greedy" in text
    row = next(line for line in text.splitlines() if line.startswith("draft, K=3"))
    assert report.cells(results["rows"][1])["acceptance length"] in row.split("\t")
    assert "split_ms" not in text  # the measurements are folded away
    # The picture is drawn, and the page is no wider than the window.
    wide = "document.documentElement.scrollWidth <= innerWidth"
    check = f"document.title = [document.images[0].naturalWidth > 0, {wide}]"
    script = f"<script>addEventListener('load', () => {{ {check} }});</script>"
    assert "<title>true,true</title>" in browser.opened(
        page + script, tmp_path, "--dump-dom", window="500,800"
    )


@pytest.mark.parametrize(
    ("longest", "words"),
    [
        (5000, "max_tokens=5000 leaves no room for a prompt in the 256 tokens of the model"),
        (255, "with max_tokens=255 prompts may have 1 tokens; lower max_tokens, or cut prompts"),
    ],
)
def test_answers_that_leave_prompts_no_room_are_refused(root, longest, words):
    both = llm_fixtures.loaded(root)
    with pytest.raises(ValueError, match=words):
        bench(both["target"], QUESTIONS[:1], settings(both, max_tokens=longest))


def test_a_run_interrupted_before_its_first_sample_writes_nothing(root, monkeypatch):
    def interrupted(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(llm_fixtures.jspec.LLM, "generate", interrupted)
    both, seen = llm_fixtures.loaded(root), []
    stopped = bench(both["target"], QUESTIONS[:1], settings(both), on_case=seen.append)
    assert stopped["interrupted"] and not (seen or stopped["rows"])
    assert not list(report.terminal(ABOUT | stopped))
    assert "The run was interrupted; missing: 1 of 1 tables." in report.notes(ABOUT | stopped)


@pytest.mark.parametrize("last", [5, 8], ids=["in the race", "while parts are timed"])
def test_an_interrupted_run_keeps_its_samples(root, monkeypatch, last):
    """Each run is one call: both contenders warm up once, then take two turns."""
    both, calls = llm_fixtures.loaded(root), []
    generate = llm_fixtures.jspec.LLM.generate

    def interrupted(self, *arguments):
        calls.append(None)
        if len(calls) > last:
            raise KeyboardInterrupt
        return generate(self, *arguments)

    monkeypatch.setattr(llm_fixtures.jspec.LLM, "generate", interrupted)
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
    chosen, seen = settings(both, configs=(config,), batch_sizes=(1, 2)), []
    stopped = bench(both["target"], QUESTIONS[:1] * 2, chosen, on_case=seen.append)
    assert stopped["interrupted"] and seen == [stopped]
    assert [row["batch_size"] for row in stopped["rows"]] == [1, 1]
    assert [len(row["seconds"]) for row in stopped["rows"]] == ([1, 2] if last == 5 else [2, 2])
    missing = "where the time of 2 methods of the last table goes; 1 of 2 tables"
    missing = f"samples of the last table; {missing}" if last == 5 else missing
    line = f"The run was interrupted; missing: {missing}."
    assert line in report.notes(ABOUT | stopped) and line in report.markdown(ABOUT | stopped)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "there is no method to run; name one with --config"),
        (["--config", "{oops"], "--config '{oops' is not JSON"),
        (["--config", '{"method": "ngram", "method": "suffix"}'], "the key 'method' stands twice"),
        (["--config", '{"a":' * 20_000], "is not JSON (nested too deeply)"),
        (["--config", "ngrm", "-k", "3"], "ngrm"),
        (
            ["--config", '{"method": "ngram", "num_speculative_tokens": 4}', "-k", "3"],
            "-k (--num-speculative-tokens) 3 is for configs without num_speculative_tokens",
        ),
        (["--config", "ngram", "-k", "3", "--repeats", "0"], "repeats=0 must be a whole number"),
        (["--config", "ngram", "-k", "3", "--temperature", "-1"], "temperature=-1"),
        (
            ["--config", "ngram", "-k", "3", "--batch-size", "0"],
            "batch_sizes=(0,) must be at least 1",
        ),
        (
            ["--config", "ngram", "-k", "3", *("--batch-size", "2") * 2],
            "batch_sizes=(2, 2) has 2 twice",
        ),
        (
            ["--config", "ngram", "-k", "3", "--temperature", "0", "--temperature", "-0.0"],
            "temperatures=(0.0, -0.0) has -0.0 twice; leave one out",
        ),
        (["--config", "ngram", "-k", "3", "--seed", "-1"], "seed=-1 must be a whole number from 0"),
        (
            ["--config", "ngram", "-k", "3", "--output", "new", "--json", "new"],
            "--json new is the file of --output too",
        ),
        (
            ["--config", "ngram", "-k", "3", "--output", ".", "--json", "results.md"],
            "--json results.md is the file of --output too",
        ),
        (
            ["--config", "ngram", "-k", "3", "--output", ".", "--json", "results.json"],
            "there is no question in the files given",
        ),
        (["--config", "ngram", "-k", "3"], "there is no question in the files given"),
        (
            ["--config", "none", *("--quantization", "int8"), *("--tensor-parallel-size", "2")],
            "quantizations=('int8',) are measured on one device; leave out tensor_parallel_size=2",
        ),
    ],
)
def test_errors_come_before_anything_is_loaded(arguments, words, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["jspec", "bench", "no/such/model", *arguments])
    with pytest.raises(SystemExit) as ended:
        main.main()
    error = capsys.readouterr().err
    assert ended.value.code == 2 and words in error and error.count("\n") == 1


@pytest.mark.parametrize(
    "script, reason",
    [
        ("def load(): raise ImportError('no such package')\nserve(load)", "no such package"),
        ("print('hello')", "answered 'hello.*which is not JSON"),
        ("sys.exit(3)", "ended with status 3"),
    ],
)
def test_a_worker_that_cannot_start_gives_the_reason(script, reason, tmp_path):
    root = Path(jspec.__file__).parents[1]
    begin = f"import sys; sys.path.insert(0, {str(root)!r})\n"
    begin += "from jspec.tools.bench.peer_transformers import serve\n"
    file = tmp_path / "worker.py"
    file.write_text(begin + script)
    with pytest.raises(PeerError, match=reason):
        Worker(sys.executable, file)
