"""The check of a fresh accelerator machine: no step can take the others with it."""

import json
import sys

import pytest
from rich.console import Console

from benchmarks import accelerator_check
from benchmarks.accelerator_check import Step, check


def step(program, seconds=60):
    """A step that runs a line of Python, where ``out`` is the file to write."""
    line = f"import sys, json; out = sys.argv[1]; {program}"
    judged = lambda found: (found["good"], f"found {found['good']}")
    return Step((sys.executable, "-c", line, "{out}"), seconds, judged)


def writing(good):
    return f"json.dump({{'good': {good}}}, open(out, 'w'))"


STEPS = {
    "good": step(writing(True)),
    "bad": step(writing(False)),
    "crash": step("print('no device'); sys.exit(3)"),
    "hang": step("import time; time.sleep(60)", seconds=1),
    "late": step(f"{writing(True)}; import time; time.sleep(60)", seconds=2),
}


@pytest.fixture
def console():
    return Console(file=open("/dev/null", "w"))


def test_a_step_that_fails_crashes_or_hangs_is_a_line_of_the_table(tmp_path, console):
    out = tmp_path / "check.json"
    found = check(out, list(STEPS), STEPS, console)["steps"]
    assert {name: each["well"] for name, each in found.items()} == {
        "good": True, "bad": False, "crash": False, "hang": False, "late": True,
    }  # fmt: skip
    assert found["crash"]["words"] == "no device" and found["good"]["results"] == {"good": True}
    assert found["hang"]["words"] == "took more than 1 s"
    assert found["late"]["words"] == "found True; stopped after 2 s"
    assert json.loads(out.read_text())["steps"] == found
    assert accelerator_check.table(json.loads(out.read_text())).row_count == 5


def test_run_again_it_repeats_what_did_not_end_well_alone(tmp_path, console, monkeypatch):
    out, names = tmp_path / "check.json", ["good", "bad"]
    before = check(out, names, STEPS, console)
    changed = STEPS | {"good": step("sys.exit(9)"), "bad": step(writing(True))}
    again = check(out, names, changed, console)
    assert again["steps"]["good"] == before["steps"]["good"] and again["steps"]["bad"]["well"]
    describe = accelerator_check.environment.describe
    monkeypatch.setattr(
        accelerator_check.environment, "describe", lambda: describe() | {"commit": "another"}
    )
    assert not check(out, names, changed, console)["steps"]["good"]["well"]


def test_an_interrupted_check_keeps_the_steps_before(tmp_path, console, monkeypatch):
    out, run = tmp_path / "check.json", accelerator_check.run

    def interrupted(one, limit):
        if one is STEPS["bad"]:
            raise KeyboardInterrupt
        return run(one, limit)

    monkeypatch.setattr(accelerator_check, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check(out, ["good", "bad"], STEPS, console)
    assert list(json.loads(out.read_text())["steps"]) == ["good"]


def test_the_shipped_steps_take_less_than_ten_minutes_and_can_be_started():
    assert sum(step.seconds for step in accelerator_check.STEPS.values()) < 600
    for each in accelerator_check.STEPS.values():
        assert each.command[-1] == "{out}"
