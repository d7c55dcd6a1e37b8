"""Every program, command, config and name in the README and in docs/ works.

Embedded models replace the ids of models, and names that a page leaves open are defined here.
"""

import ast
import functools
import json
import os
import pkgutil
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from markdown_it import MarkdownIt

import jspec
from jspec.api import config
from jspec.cli import main
from jspec.core import types
from jspec.drafters import METHODS, PARALLEL
from jspec.engine.functional import SequenceParams
from jspec.engine.plan import Plan
from tests import tiny
from tests.server import live

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEMO = "jspec/assets/demo"
STAND_INS = {
    "Qwen/Qwen3-8B": f"{DEMO}/target",
    "Qwen/Qwen3-0.6B": f"{DEMO}/draft",
    "HEAD": f"{DEMO}/eagle3",
    "…": f"{DEMO}/eagle3",
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": f"{DEMO}/eagle3",
}
CHATS = "meta-llama/Llama-3.1-8B-Instruct"  # replaced by the embedded target and a template
SERVER = "http://localhost:8000"  # replaced by a server of the tests
# They take seconds to minutes, and have their own tests.
LONG = ("certify", "bench", "trace", "tune", "serve")


def blocks(language):
    """Return a parameter for every fenced block of a language; "" is a block without one."""
    return [
        pytest.param(token.content, id=f"{page.name}:{token.map[0] + 1}")
        for page in PAGES
        for token in MarkdownIt().parse(page.read_text(encoding="utf-8"))
        if token.type == "fence" and token.info == language
    ]


def test_the_reference_has_every_public_name_and_method():
    """The page has docstrings, and ``jspec.core.types`` as a whole."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", page, re.MULTILINE))
    names = {name.rpartition(".")[2] for name in shown} | set(vars(types)) | {"METHODS", "RULES"}
    classes = {*METHODS.values(), *PARALLEL.values()}
    assert {*jspec.__all__, *(drafter.__name__ for drafter in classes)} - names == set()
    assert {"`jspec.METHODS`", "`jspec.RULES`"} <= set(re.findall(r"`[\w.]+`", page))


def is_config(text):
    """Return whether a block has nothing but ``speculative_config``s."""
    body = ast.parse(text).body
    return all(isinstance(line, ast.Expr) and isinstance(line.value, ast.Dict) for line in body)


def programs(select):
    return [block for block in blocks("python") if select(block.values[0])]


@pytest.mark.parametrize("text", programs(is_config))
def test_every_config_on_a_page_works(text):
    for statement in ast.parse(text).body:
        values = ast.literal_eval(statement.value)
        if values.get("method") == "custom_class":
            values["model"] = "jspec.drafters.NGram"
        config.read(values)


@functools.cache
def open_names():
    """Return the names that pages leave open: a model, and a plan with its sequences."""
    return {
        "jspec": jspec,
        "target": tiny.TARGET,
        "model": f"{DEMO}/target",
        "speculative_config": {"method": "ngram", "num_speculative_tokens": 4},
        "plan": Plan(tiny.TARGET, tiny.DRAFT, "coupled"),
        "params": tiny.params(),
        "rows": [SequenceParams(prompt, 12, temperature=0.8) for prompt in tiny.prompts()],
    }


def is_long(text):
    return any(word in text for word in ("certify", "trace", "tuning"))


def with_a_template(directory):
    """Write the embedded target with a chat template."""
    shutil.copytree(ROOT / DEMO / "target", directory)
    file = directory / "tokenizer_config.json"
    template = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return str(directory)


@pytest.fixture(scope="module")
def server(root):
    with live.running(live.llm(root)) as server:
        yield server


def run(text, tmp_path, monkeypatch):
    if CHATS in text:
        text = text.replace(f'"{CHATS}"', repr(with_a_template(tmp_path / "chats")))
    named = {name: model for name, model in STAND_INS.items() if f'"{name}"' in text}
    if list(named) == ["Qwen/Qwen3-8B"]:  # without a head, a smaller target will do
        named = dict.fromkeys(named, f"{DEMO}/draft")
    for name, model in named.items():
        text = text.replace(f'"{name}"', f'"{model}"')
    text = text.replace('"certificate.json"', repr(str(tmp_path / "certificate.json")))
    monkeypatch.chdir(ROOT)
    names = dict(open_names())
    exec(compile(text, "<documentation>", "exec"), names)
    return names


def runs(text):
    return not is_config(text)


@pytest.mark.parametrize("text", programs(lambda text: not is_config(text) and not is_long(text)))
def test_every_program_on_a_page_runs(text, tmp_path, monkeypatch, capsys, request):
    if SERVER in text:
        text = text.replace(SERVER, request.getfixturevalue("server").url)
    names = run(text, tmp_path, monkeypatch)
    if "print(" in text:
        assert capsys.readouterr().out.strip()
    assert len(names) > len(open_names())


@pytest.mark.slow
@pytest.mark.parametrize("text", programs(lambda text: not is_config(text) and is_long(text)))
def test_every_long_program_on_a_page_runs(text, tmp_path, monkeypatch):
    run(text, tmp_path, monkeypatch)


def commands():
    """Return a parameter for every command line that starts with jspec."""
    params = []
    for block in blocks(""):
        text = re.sub(r"\\\n\s*", "", block.values[0])
        lines = [line for line in text.splitlines() if line.startswith("jspec ")]
        params += [pytest.param(line, id=f"{block.id}, {line.split()[1]}") for line in lines]
    return params


@pytest.mark.parametrize("line", commands())
def test_every_command_on_a_page_parses(line):
    words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(main.app)
    command = group.get_command(None, words[0])
    command.make_context(words[0], words[1:])


def short_commands():
    return [line for line in commands() if line.values[0].split()[1] not in LONG]


@pytest.mark.parametrize("line", short_commands())
def test_every_short_command_on_a_page_runs(line, tmp_path, monkeypatch, capsys):
    words = [STAND_INS.get(word, word) for word in shlex.split(line, comments=True)]
    words = [os.path.join(tmp_path, word) if word.endswith(".html") else word for word in words]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as exit_info:
        main.main()
    assert exit_info.value.code == 0 and capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name)
def test_every_dotted_name_on_a_page_imports(page):
    text = page.read_text(encoding="utf-8")
    names = set(re.findall(r"(?<![\w/.])(?:jspec|training|benchmarks)(?:\.\w+)+", text))
    for name in names:
        if not name.endswith((".py", ".json", ".html", ".md")):
            pkgutil.resolve_name(name)


def test_the_reading_guide_lists_the_files_that_a_traced_round_of_eagle_3_enters():
    text = (ROOT / "docs" / "reading_guide.md").read_text(encoding="utf-8")
    table = re.findall(r"^\| \[.*\]\(\.\./(.*)\) \| (\d+) \|", text, re.MULTILINE)
    lines = [(ROOT / file).read_text(encoding="utf-8").count("\n") for file, _ in table]
    command = [sys.executable, "-m", "tests.entered"]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    entered = dict(line.split(maxsplit=1) for line in run.stdout.splitlines())
    assert {file for file, _ in table} == entered.keys()
    assert len(table) <= 35 and sum(lines) <= 5850
    # Small edits need no new numbers.
    assert [int(number) for _, number in table] == pytest.approx(lines, rel=0.1)


def test_the_map_has_every_folder_and_every_module_of_core_and_engine():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    folders = {path.parent.name for path in (ROOT / "jspec").glob("**/__init__.py")}
    assert folders <= set(re.findall(r"(\w+)/", text))
    rooms = [(ROOT / "jspec" / room).glob("[!_]*.py") for room in ("core", "engine")]
    modules = {path.name for room in rooms for path in room}
    listed = set(re.findall(r"^    (\w+\.py) ", text, re.MULTILINE))
    assert modules <= listed <= {path.name for path in (ROOT / "jspec").glob("**/*.py")}


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "docs", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "reference.html").read_text(encoding="utf-8")
    assert all(f'id="jspec.{name}"' in reference for name in ("LLM", "Plan", "certify", "decode"))
    # Markup that Sphinx did not resolve.
    assert not any(mark in reference for mark in ("``", "&lt;function", "Bases: "))


def test_the_readme_has_at_most_150_lines():
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("\n") <= 150


def test_every_file_that_a_page_links_to_exists():
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "training" / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"


def table(page, cells):
    """Return the rows of the page's tables with so many cells of measured pairs, by first cell."""
    pair = r"\d+\.\d\d \(\d+\.\d\d\)"
    rows = {}
    for line in (ROOT / page).read_text(encoding="utf-8").splitlines():
        if line.startswith("| `") and len(pairs := re.findall(pair, line)) == cells:
            rows[line.split("|")[1].strip()] = pairs
    return rows


def measured(file):
    return json.loads((ROOT / "benchmarks/results" / file).read_text())["rows"]


def test_the_readme_shows_the_results_of_the_real_model():
    shown = table("README.md", 4)
    assert len(shown) == 5
    runs = "real_model_one", "real_model_one_sampled", "real_model", "real_model_sampled"
    results = [row for run in runs for row in measured(f"{run}.json")]
    for row, cells in shown.items():
        method = re.match(r"`(\w+)`", row)[1]
        assert cells == [
            f"{result['acceptance_length']:.2f} ({result['speedup']['median']:.2f})"
            for result in results
            if result["config"] and result["config"].get("method") == method
        ]


def test_the_page_of_benchmarks_shows_the_results_of_other_programs():
    text = (ROOT / "docs/bench.md").read_text(encoding="utf-8")
    row = r"^\| (?:jspec|vLLM|transformers|mistral|llama)[^|]*\|(.*)\|$"
    shown = re.findall(row, text, re.MULTILINE)
    speeds = [float(cell) for cells in shown for cell in cells.split("|") if cell.strip()]
    rows = [*measured("real_model_peers.json"), *measured("real_model_gguf.json")]
    results = [row["tokens_per_second"]["median"] for row in rows]
    assert speeds == [round(speed, 1) for speed in results]


def test_the_page_of_methods_shows_the_results_of_the_embedded_model():
    shown = table("docs/choosing_a_method.md", 4)
    names = {
        "`eagle` (EAGLE-1)": "eagle1",
        "`draft_model`, PARD": "pard",
        "`eagle3`, P-EAGLE": "p_eagle",
        "`hybrid` of suffix and eagle3, merged": "hybrid, merge",
        "`hybrid`, chosen": "hybrid, choose",
    }
    assert len(shown) == 16
    for row, cells in shown.items():
        assert cells == [
            f"{result['acceptance_length']:.2f} ({result['ratio']['median']:.2f})"
            for result in measured("methods.json")
            if result["name"] == names.get(row, row.strip("`"))
        ]
