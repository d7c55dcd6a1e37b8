"""The benchmark of hostile requests reports answers, waits, memory and texts."""

import json
import os
from pathlib import Path

import pytest

from benchmarks import hostile_inputs, serve_hostile
from tests.server import live


@pytest.fixture(scope="module")
def rows(root):
    chosen = ("100,000 stop strings", "8 clients leave a stream")
    llm = live.llm(root)
    with live.running(llm) as server:
        size = serve_hostile.vocab_size(server.url)
        assert size == llm.build.plan.target.vocab_size
        inputs = [each for each in hostile_inputs.inputs(size) if each.name in chosen]
        measured = serve_hostile.measure(server.url, os.getpid(), inputs, 10, pause=1)
    return measured


def test_each_input_has_its_answer_its_waits_and_the_plain_texts(rows):
    assert [row["input"] for row in rows] == [
        "nothing",
        "100,000 stop strings",
        "8 clients leave a stream",
    ]
    assert [row["answer"][:40] for row in rows] == [
        "-",
        "400 stop has 100000 strings, but at most",
        "left the stream",
    ]
    for row in rows:
        assert row["plain_texts"]["right"] > 0
        assert row["plain_texts"]["wrong"] == row["plain_texts"]["lost"] == 0
        assert 0 < row["plain_seconds"] < 30 and 0 <= row["health_seconds"] < 30
        assert row["mib_before"] > 100 and row["mib_after"] > 100
    json.dumps(rows)


def test_the_table_has_a_line_for_each_input(rows):
    lines = serve_hostile.table(rows, 1.5).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == [f"| {row['input']}" for row in rows]
    assert lines[-1].endswith("it ended in 1.5 s.")
    assert serve_hostile.table([], None).endswith("it ended not in 60 s.")


def test_the_table_of_the_docs_is_that_of_the_results():
    root = Path(__file__).parents[2]
    run = json.loads((root / "benchmarks/results/serve_hostile.json").read_text())
    table = serve_hostile.table(run["result"], run["seconds_to_end"])
    assert table in (root / "docs/serving.md").read_text()


def test_all_inputs_are_json_that_is_sent_as_it_is():
    inputs = hostile_inputs.inputs(100)
    assert len({each.name for each in inputs}) == len(inputs)
    small = [
        each for each in inputs if "1,000,000" not in each.name and "2,000,000" not in each.name
    ]
    for each in small:
        assert all(json.loads(body)["prompt"] for body in each.bodies()), each.name
