"""The stages of a long start are lines where there is no terminal."""

import io
import re
import time

from rich.console import Console

from jspec.cli.stages import Stages


def test_each_long_stage_is_a_line_with_its_seconds():
    written = io.StringIO()
    with Stages(Console(file=written), patience=0.02) as stage:
        for words in ("loading [1]", "compiling: 0 of 2", "compiling: 1 of 2"):
            stage.begin(words)
            time.sleep(0.1)
        stage.begin("quick")
        stage.end("ready")
        stage.note("beside")
        time.sleep(0.05)
    lines = [re.sub(r"\([\d.]+ s\)", "(T)", line) for line in written.getvalue().splitlines()]
    stages = ["loading [1] (T)", "compiling: 0 of 2 (T)", "compiling: 1 of 2 (T)"]
    assert lines == [*stages, "ready (T)", "beside"]


def test_an_error_ends_the_stages_without_a_line():
    lines = []
    try:
        with Stages(Console(file=io.StringIO()), lines.append, patience=0.02) as stage:
            stage.begin("loading")
            raise ValueError
    except ValueError:
        time.sleep(0.05)
    assert lines == []


def test_a_terminal_has_a_spinner():
    written = io.StringIO()
    console = Console(file=written, force_terminal=True, width=80)
    with Stages(console, patience=0.01) as stage:
        stage.begin("loading")
        time.sleep(0.1)
        stage.end("ready")
    assert "loading" in written.getvalue() and "loading (" not in written.getvalue()
