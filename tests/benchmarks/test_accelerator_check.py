"""The check of a fresh accelerator machine: no step can take the others with it."""

import json
import os
import signal
import subprocess
import sys
import time

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


DEVICE = {
    "device": {"platform": "cpu", "kind": "a chip"},
    "versions": {"jax": "0"},
    "commit": "abc",
    "uncommitted_changes": False,
}
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
    found = check(out, list(STEPS), STEPS, DEVICE, console)["steps"]
    assert {name: each["well"] for name, each in found.items()} == {
        "good": True,
        "bad": False,
        "crash": False,
        "hang": False,
        "late": True,
    }
    assert found["crash"]["words"] == "no device" and found["good"]["results"] == {"good": True}
    assert found["hang"]["words"] == "took more than 1 s"
    assert found["late"]["words"] == "found True; stopped after 2 s"
    assert json.loads(out.read_text())["steps"] == found
    assert accelerator_check.table(json.loads(out.read_text())).row_count == 5


def test_run_again_it_repeats_what_did_not_end_well_alone(tmp_path, console, monkeypatch):
    out, names = tmp_path / "check.json", ["good", "bad"]
    before = check(out, names, STEPS, DEVICE, console)
    changed = STEPS | {"good": step("sys.exit(9)"), "bad": step(writing(True))}
    again = check(out, names, changed, DEVICE, console)
    assert again["steps"]["good"] == before["steps"]["good"] and again["steps"]["bad"]["well"]
    for other in ({"commit": "another"}, {"uncommitted_changes": True}, {"commit": None}):
        assert not check(out, ["good"], changed, DEVICE | other, console)["steps"]["good"]["well"]


def test_an_interrupted_check_keeps_the_steps_before(tmp_path, console, monkeypatch):
    out, run = tmp_path / "check.json", accelerator_check.run

    def interrupted(one, *limits):
        if one is STEPS["bad"]:
            raise KeyboardInterrupt
        return run(one, *limits)

    monkeypatch.setattr(accelerator_check, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check(out, ["good", "bad"], STEPS, DEVICE, console)
    assert list(json.loads(out.read_text())["steps"]) == ["good"]


def test_a_file_that_was_cut_off_is_begun_anew(tmp_path, console):
    out = tmp_path / "check.json"
    out.write_text('{"steps": {"good"')
    assert check(out, ["good"], STEPS, DEVICE, console)["steps"]["good"]["well"]


def test_the_line_that_names_the_cause_is_told_and_not_what_jax_puts_behind_it():
    raising = step("raise ValueError('no such tile\\n----\\nFor simplicity, frames are gone.')")
    assert accelerator_check.run(raising, 60, "cpu")["words"] == "ValueError: no such tile"


def test_a_step_gets_the_device_or_none_and_never_quietly_the_cpu(monkeypatch):
    told = step("import os; sys.exit(os.environ['JAX_PLATFORMS'])")
    for platform, asked in (("tpu", "tpu,cpu"), ("gpu", "cuda,cpu")):
        assert accelerator_check.run(told, 60, platform)["words"] == asked
    with pytest.raises(accelerator_check.NoAccelerator, match="JAX finds the cpu alone"):
        accelerator_check.device()
    assert accelerator_check.device(on_cpu=True)["device"]["platform"] == "cpu"
    monkeypatch.setenv("JAX_PLATFORMS", "nothing")
    with pytest.raises(accelerator_check.NoAccelerator, match=r"^RuntimeError: .*nothing"):
        accelerator_check.device(on_cpu=True)


def test_a_check_that_is_ended_leaves_no_step_on_the_device(tmp_path):
    note = tmp_path / "step"
    sleep = f"import os, time; open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(300)"
    program = (
        "import sys; from benchmarks import accelerator_check as a; "
        f"a.STEPS['rules'] = a.Step((sys.executable, '-c', {sleep!r}), 300, None); "
        f"a.device = lambda on_cpu: {DEVICE!r}; "
        f"sys.argv[1:] = ['--only', 'rules', '--out', {str(tmp_path / 'check.json')!r}]; a.main()"
    )
    begun = subprocess.Popen([sys.executable, "-c", program])
    while not (note.exists() and note.read_text()):
        assert begun.poll() is None
        time.sleep(0.05)
    begun.send_signal(signal.SIGTERM)
    assert begun.wait(30) == 128 + signal.SIGTERM
    with pytest.raises(ProcessLookupError):
        os.kill(int(note.read_text()), 0)


def test_a_machine_without_git_has_no_commit(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    facts = accelerator_check.device(on_cpu=True)
    assert facts["commit"] is None and facts["device"]["platform"] == "cpu"


def test_a_wrong_kernel_is_not_well_whatever_else_is_in_the_table():
    row = {
        "case": "a tree",
        "seconds": {"reference": 2.0, "pallas_tpu": 1.0},
        "cached": False,
        "difference": 0.001,
        "errors": {},
        "well": True,
    }
    judge = lambda *rows: accelerator_check.STEPS["attention"].judge(
        {"rows": rows, "asked": 2, "no_kernels": None}
    )
    words = "2 of 2 cases; differ by 1.0e-03 at most; kernels beat XLA in 1 of 1 past the cache"
    assert judge(row, row | {"cached": True}) == (True, words)
    well, words = judge(row, row | {"difference": 0.5, "well": False})
    assert not well and words.endswith("1 wrong, a tree: differs by 5.0e-01")
    broken = {"seconds": {}, "difference": None, "errors": {"pallas_tpu": "E: oh"}, "well": False}
    assert judge(row | broken)[1].endswith("1 wrong, a tree: pallas_tpu E: oh")
    assert judge() == (False, "0 of 2 cases")


def test_the_shipped_steps_take_less_than_ten_minutes_and_can_be_started():
    assert sum(step.seconds for step in accelerator_check.STEPS.values()) < 590
    for each in accelerator_check.STEPS.values():
        assert each.command[-1] == "{out}"
