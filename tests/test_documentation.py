"""Every block of code in the README and in docs/ does what it says.

What needs a hub or hours is put to the embedded models instead: ids of models are replaced, names
that a page leaves open are given.
"""

import ast
import functools
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import typer
from markdown_it import MarkdownIt

import jspec
from jspec.api import config
from jspec.cli import main
from jspec.core import types
from jspec.drafters import METHODS, PARALLEL
from jspec.engine.batch import SequenceParams
from jspec.engine.plan import Plan
from tests import tiny

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
DEMO = "jspec/assets/demo"
STANDS_FOR = {
    "Qwen/Qwen3-8B": f"{DEMO}/target",
    "Qwen/Qwen3-0.6B": f"{DEMO}/draft",
    "HEAD": f"{DEMO}/eagle3",
    "…": f"{DEMO}/eagle3",
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": f"{DEMO}/eagle3",
}
CHATS = "meta-llama/Llama-3.1-8B-Instruct"  # stands for the target with a template, as it has none
LONG = ("certify", "bench", "trace", "tune")  # seconds to minutes; each has tests of its own


def blocks(language):
    """(page and line, text) of every fenced block of a language; "" for those that name none."""
    return [
        pytest.param(token.content, id=f"{page.name}:{token.map[0] + 1}")
        for page in PAGES
        for token in MarkdownIt().parse(page.read_text(encoding="utf-8"))
        if token.type == "fence" and token.info == language
    ]


def test_the_reference_has_every_public_name_and_method():
    """Their pages are made of docstrings; ``jspec.core.types`` is there as a whole."""
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^\.\. auto\w+:: ([\w.]+)$", page, re.MULTILINE))
    last = {name.rpartition(".")[2] for name in shown} | set(vars(types)) | {"METHODS", "RULES"}
    classes = {*METHODS.values(), *PARALLEL.values()}
    assert {*jspec.__all__, *(each.__name__ for each in classes)} - last == set()
    assert {"`jspec.METHODS`", "`jspec.RULES`"} <= set(re.findall(r"`[\w.]+`", page))


def is_config(text):
    """Whether a block holds ``speculative_config``s and nothing else."""
    body = ast.parse(text).body
    return all(isinstance(each, ast.Expr) and isinstance(each.value, ast.Dict) for each in body)


def of_kind(wanted):
    return [block for block in blocks("python") if wanted(block.values[0])]


@pytest.mark.parametrize("text", of_kind(is_config))
def test_every_config_shown_is_one_that_works(text):
    for statement in ast.parse(text).body:
        shown = ast.literal_eval(statement.value)
        if shown.get("method") == "custom_class":
            shown["model"] = "jspec.drafters.NGram"
        config.read(shown)


@functools.cache
def given():
    """What pages leave open: a model of one's own, and a plan with its rows."""
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
    """The embedded target, to be chatted with."""
    shutil.copytree(ROOT / DEMO / "target", directory)
    file = directory / "tokenizer_config.json"
    template = "{% for message in messages %}# {{ message['content'] }}\n{% endfor %}"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": template}))
    return str(directory)


def run(text, tmp_path, monkeypatch):
    if CHATS in text:
        text = text.replace(f'"{CHATS}"', repr(with_a_template(tmp_path / "chats")))
    for name, other in STANDS_FOR.items():
        text = text.replace(f'"{name}"', f'"{other}"')
    text = text.replace('"certificate.json"', repr(str(tmp_path / "certificate.json")))
    monkeypatch.chdir(ROOT)
    names = dict(given())
    exec(compile(text, "<documentation>", "exec"), names)
    return names


def runs(text):
    return not is_config(text)


@pytest.mark.parametrize("text", of_kind(lambda text: runs(text) and not is_long(text)))
def test_every_program_shown_runs(text, tmp_path, monkeypatch, capsys):
    names = run(text, tmp_path, monkeypatch)
    if "print(" in text:
        assert capsys.readouterr().out.strip()
    assert len(names) > len(given())


@pytest.mark.slow
@pytest.mark.parametrize("text", of_kind(lambda text: runs(text) and is_long(text)))
def test_every_long_program_shown_runs(text, tmp_path, monkeypatch):
    run(text, tmp_path, monkeypatch)


def commands():
    """Every command line that starts with jspec, without its comment."""
    found = []
    for block in blocks(""):
        text = re.sub(r"\\\n\s*", "", block.values[0])
        lines = [line for line in text.splitlines() if line.startswith("jspec ")]
        found += [pytest.param(line, id=f"{block.id}, {line.split()[1]}") for line in lines]
    return found


@pytest.mark.parametrize("line", commands())
def test_every_command_shown_is_understood(line):
    words = shlex.split(line, comments=True)[1:]
    group = typer.main.get_command(main.app)
    command = group.get_command(None, words[0])
    command.make_context(words[0], words[1:])


def runnable():
    return [one for one in commands() if one.values[0].split()[1] not in LONG]


@pytest.mark.parametrize("line", runnable())
def test_every_short_command_shown_runs(line, tmp_path, monkeypatch, capsys):
    words = [STANDS_FOR.get(word, word) for word in shlex.split(line, comments=True)]
    words = [os.path.join(tmp_path, word) if word.endswith(".html") else word for word in words]
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr("sys.argv", [*words[:1], *words[1:]])
    with pytest.raises(SystemExit) as ended:
        main.main()
    assert ended.value.code == 0 and capsys.readouterr().out.strip()


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(tmp_path):
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "-b", "html", "docs", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "reference.html").read_text(encoding="utf-8")
    assert all(f'id="jspec.{name}"' in reference for name in ("LLM", "Plan", "certify", "decode"))
    # Marks that were meant for the reader of the source, or for nobody.
    assert not any(mark in reference for mark in ("``", "&lt;function", "Bases: "))


def test_the_readme_fits_in_a_head_and_names_files_that_exist():
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 150
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} names {target}"


def test_the_two_tables_of_methods_say_the_same():
    rows = lambda page: {
        line.split("|")[1].strip(): [cell.strip() for cell in line.split("|")[2:-1]]
        for line in (ROOT / page).read_text(encoding="utf-8").splitlines()
        if re.match(r"\| `.*\| \d", line)
    }
    short, whole = rows("README.md"), rows("docs/choosing_a_method.md")
    assert len(short) == 16
    for name, cells in short.items():
        assert cells[1:] == whole[name][:3]
    lengths = [float(cell.split()[0]) for cells in short.values() for cell in cells[1:]]
    assert np.min(lengths) >= 1
