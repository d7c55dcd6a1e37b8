"""The check of a fresh accelerator machine: a failing step does not affect the others."""

import io
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
    """Return a step that runs a line of Python, where ``out`` is the file to write."""
    line = f"import sys, json; out = sys.argv[1]; {program}"
    return Step(
        (sys.executable, "-c", line, "{out}"),
        seconds,
        lambda results: (results["good"], f"good: {results['good']}"),
    )


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
    steps = check(out, list(STEPS), STEPS, DEVICE, console)["steps"]
    assert {name: each["well"] for name, each in steps.items()} == {
        "good": True,
        "bad": False,
        "crash": False,
        "hang": False,
        "late": True,
    }
    assert steps["crash"]["words"] == "no device" and steps["good"]["results"] == {"good": True}
    assert steps["hang"]["words"] == "took more than 1 s"
    assert steps["late"]["words"] == "good: True; stopped after 2 s"
    assert json.loads(out.read_text())["steps"] == steps
    assert accelerator_check.table(json.loads(out.read_text())).row_count == 5


def test_a_second_run_repeats_only_failed_steps(tmp_path, console, monkeypatch):
    out, names = tmp_path / "check.json", ["good", "bad"]
    before = check(out, names, STEPS, DEVICE, console)
    changed = STEPS | {"good": step("sys.exit(9)"), "bad": step(writing(True))}
    again = check(out, names, changed, DEVICE, console)
    assert again["steps"]["good"] == before["steps"]["good"] and again["steps"]["bad"]["well"]
    for other in ({"commit": "another"}, {"uncommitted_changes": True}, {"commit": None}):
        assert not check(out, ["good"], changed, DEVICE | other, console)["steps"]["good"]["well"]


def test_an_interrupted_check_keeps_finished_steps(tmp_path, console, monkeypatch):
    out, run = tmp_path / "check.json", accelerator_check.run

    def interrupted(one, *limits):
        if one is STEPS["bad"]:
            raise KeyboardInterrupt
        return run(one, *limits)

    monkeypatch.setattr(accelerator_check, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        check(out, ["good", "bad"], STEPS, DEVICE, console)
    assert list(json.loads(out.read_text())["steps"]) == ["good"]


def test_a_truncated_file_is_replaced(tmp_path, console):
    out = tmp_path / "check.json"
    out.write_text('{"steps": {"good"')
    assert check(out, ["good"], STEPS, DEVICE, console)["steps"]["good"]["well"]


def test_the_summary_names_the_error_and_not_the_notes_of_jax():
    raising = step("raise ValueError('no such tile\\n----\\nFor simplicity, frames are gone.')")
    assert accelerator_check.run(raising, 60, "cpu")["words"] == "ValueError: no such tile"


def test_a_step_never_falls_back_to_the_cpu_silently(monkeypatch):
    printing = step("import os; sys.exit(os.environ['JAX_PLATFORMS'])")
    for platform, asked in (("tpu", "tpu,cpu"), ("gpu", "cuda,cpu")):
        assert accelerator_check.run(printing, 60, platform)["words"] == asked
    with pytest.raises(accelerator_check.NoAccelerator, match="JAX finds the cpu alone"):
        accelerator_check.device()
    assert accelerator_check.device(on_cpu=True)["device"]["platform"] == "cpu"
    monkeypatch.setenv("JAX_PLATFORMS", "nothing")
    with pytest.raises(accelerator_check.NoAccelerator, match=r"^RuntimeError: .*nothing"):
        accelerator_check.device(on_cpu=True)


def test_a_terminated_check_leaves_no_step_on_the_device(tmp_path):
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


def test_a_wrong_kernel_fails_the_step():
    row = {
        "case": "a tree",
        "seconds": {"xla": 2.0, "pallas_tpu": 1.0},
        "cached": False,
        "difference": 0.001,
        "errors": {},
        "well": True,
    }
    judge = lambda *rows: accelerator_check.STEPS["attention over pages"].judge(
        {"rows": rows, "asked": 2, "no_kernels": None}
    )
    words = "2 of 2 cases; differ by 1.0e-03 at most; kernels beat XLA in 1 of 1 past the cache"
    assert judge(row, row | {"cached": True}) == (True, words)
    well, words = judge(row, row | {"difference": 0.5, "well": False})
    assert not well and words.endswith("1 wrong, a tree: differs by 5.0e-01")
    broken = {"seconds": {}, "difference": None, "errors": {"pallas_tpu": "E: oh"}, "well": False}
    assert judge(row | broken)[1].endswith("1 wrong, a tree: pallas_tpu E: oh")
    assert judge() == (False, "0 of 2 cases")


def test_the_figures_take_less_than_ten_minutes_and_none_more_than_three():
    names = list(accelerator_check.STEPS)
    figures = [accelerator_check.STEPS[name].seconds for name in names[: names.index("rules")]]
    assert sum(figures) < 590 and max(figures) <= 180
    for each in accelerator_check.STEPS.values():
        assert each.command[-1] == "{out}"


def test_a_step_without_time_is_not_begun_and_a_second_run_has_it(tmp_path, monkeypatch):
    out, console = tmp_path / "check.json", Console(file=io.StringIO())
    with monkeypatch.context() as hurry:
        hurry.setattr(accelerator_check, "_TOTAL", 0.0)
        assert check(out, ["good"], STEPS, DEVICE, console)["steps"] == {}
    assert "good: not begun" in console.file.getvalue()
    assert check(out, ["good"], STEPS, DEVICE, console)["steps"]["good"]["well"]


def test_a_tiny_step_has_more_options_and_peers_the_python_that_is_named():
    steps = accelerator_check.steps_of(["sampling", "peers"], "elsewhere/python", tiny=True)
    assert list(steps) == ["peers", "sampling"]  # in the order of the check
    command = steps["peers"].command
    assert command[command.index("--peer") + 1] == "elsewhere/python"
    assert command[command.index("--config") + 1] == "tiny"
    assert steps["sampling"].command[-4:] == ("--cases", "a chain of 1", "--repeats", "1")


def test_figures_are_summed_up_in_a_line():
    row = {"slots": 8, "context": 1032, "ms_per_round": 5.0, "times_minimum": 1.25}
    judge = accelerator_check.STEPS["rounds"].judge
    assert judge({"rows": [row]}) == (True, "8 of 1032 tokens 5.00 ms (1.25 of the minimum)")
    ours = {"program": "jspec", "mode": "plain", "batch": 1, "ms_per_token": 4.0}
    theirs = {"program": "transformers", "mode": "compiled", "batch": 1, "failed": "no memory"}
    judge = accelerator_check.STEPS["peers"].judge
    assert judge({"programs": {}, "rows": [ours]})[0]
    well, words = judge({"programs": {"jspec": {}}, "rows": [ours, theirs]})
    assert not well and words.endswith("4.00 ms a token; transformers compiled, batch 1: no memory")
