"""Whether jspec is right and fast on this device: ``scripts/accelerator_check.sh``.

    python -m benchmarks.accelerator_check [--out accelerator_check.json] [--only STEP ...]

Kernels beside the reference, ``jspec certify`` and ``jspec bench`` on the embedded model, and what
verifying costs at an 8B model's shape. Every step is a process with a time limit, so that one that
hangs or crashes is a line of the table; what is known is written after each. Run again, steps that
ended well are not repeated, unless the device, the versions or the commit are others.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jspec import demo
from jspec.bench import environment

_PYTHON = sys.executable
_MODEL, _SPEC = str(demo.ASSETS / "target"), json.dumps(demo.EAGLE3)
_SAME = ("device", "versions", "commit")  # what makes earlier results worth keeping
_TAIL = 2000  # characters of a failure that are kept
_LARGEST_DIFFERENCE = 0.05  # of attention in bfloat16 after 16 passes in a row


@dataclasses.dataclass(frozen=True)
class Step:
    """A command that writes JSON.

    Attributes:
      command: words; ``{out}`` stands for the file that it writes.
      seconds: most that it may take.
      judge: its JSON to (whether all is well, what a person wants to know of it).
    """

    command: tuple[str, ...]
    seconds: float
    judge: Callable[[Any], tuple[bool, str]]


def _kernels(found: dict) -> tuple[bool, str]:
    rows = found["rows"]
    ratios = [list(row["seconds"].values()) for row in rows]
    faster = sum(len(each) > 1 and each[1] < each[0] for each in ratios)
    apart = [row for row in rows if row["operation"] == "tree_attention"]
    worst = max((row["difference"] for row in apart), default=0.0)
    tokens = sum(row["difference"] > 0 for row in rows if row["operation"] == "rejection_sampling")
    words = f"{len(rows)} cases; attention differs by {worst:.1e} at most, {tokens} verdicts differ"
    return worst < _LARGEST_DIFFERENCE, f"{words}; kernels beat XLA in {faster}"


def _certificate(found: dict) -> tuple[bool, str]:
    failed = sum(not each["passed"] for each in found["findings"])
    return found["passed"], f"{len(found['findings'])} findings, {failed} failed"


def _bench(found: dict) -> tuple[bool, str]:
    words = [
        f"{row['name']} {row['tokens_per_second']['median']:.0f} tokens/s"
        f" ({row['speedup']['median']:.2f})"
        for row in found["rows"]
    ]
    return bool(words), "; ".join(words)


def _verify_cost(found: dict) -> tuple[bool, str]:
    return bool(found["rows"]), f"{len(found['rows'])} rows"


def _certify(*more: str) -> tuple[str, ...]:
    return _PYTHON, "-m", "jspec", "certify", *more, "--json", "{out}"


STEPS = {
    "kernels": Step(
        (_PYTHON, "-m", "benchmarks.kernels", "--batch", "1", "8", "--repeats", "3",
         "--json", "{out}"), 170, _kernels),
    "rules": Step(_certify(), 80, _certificate),
    "demo, float32": Step(
        _certify("--model", _MODEL, "--speculative-config", _SPEC, "--dtype", "float32"),
        70, _certificate),
    "demo, bfloat16": Step(
        _certify("--model", _MODEL, "--speculative-config", _SPEC, "--dtype", "bfloat16"),
        70, _certificate),
    "latency": Step(
        (_PYTHON, "-m", "jspec", "bench", "--repeats", "3", "--no-peers", "--json", "{out}"),
        80, _bench),
    "verifying": Step(
        (_PYTHON, "-m", "benchmarks.verify_cost", "--out", "{out}"), 120, _verify_cost),
}  # fmt: skip


def run(step: Step, limit: float) -> dict[str, Any]:
    """Runs a step for at most ``limit`` seconds: its status, words, seconds, and what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        words = [word.format(out=out) if word == "{out}" else word for word in step.command]
        begin = time.perf_counter()
        try:
            ran = subprocess.run(
                words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=limit,
            )  # fmt: skip
            status, said = ran.returncode, ran.stdout
        except subprocess.TimeoutExpired as error:
            status, said = "timeout", (error.stdout or b"").decode(errors="replace")
        seconds = round(time.perf_counter() - begin, 1)
        found = json.loads(out.read_text()) if out.exists() and out.read_text().strip() else None
    if found is None:
        last = (said.strip().splitlines() or ["it said nothing"])[-1]
        words = f"took more than {limit:.0f} s" if status == "timeout" else last
        return {"well": False, "words": words[:300], "seconds": seconds, "said": said[-_TAIL:]}
    well, words = step.judge(found)
    if status == "timeout":
        words += f"; stopped after {limit:.0f} s"
    return {"well": well and status in (0, "timeout"), "words": words, "seconds": seconds,
            "results": found}  # fmt: skip


def check(out: Path, names: list[str], steps: dict[str, Step], console: Console) -> dict[str, Any]:
    """Runs the steps that no earlier run has done; writes after each."""
    found = environment.describe() | {"steps": {}}
    if out.exists():
        before = json.loads(out.read_text())
        if all(before.get(key) == found[key] for key in _SAME):
            found["steps"] = {k: v for k, v in before["steps"].items() if v["well"]}
    for name in names:
        if name in found["steps"]:
            console.print(f"{name}: done before")
            continue
        with console.status(f"{name}, {steps[name].seconds:.0f} s at most"):
            found["steps"][name] = run(steps[name], steps[name].seconds)
        aside = out.with_suffix(".new")
        aside.write_text(json.dumps(found, indent=1) + "\n")
        os.replace(aside, out)
    return found


def table(found: dict[str, Any]) -> Table:
    """For people."""
    device = found["device"]
    shown = Table(title=f"{device['kind']}, jax {found['versions']['jax']}", title_justify="left")
    for heading in ("step", "", "what was found", "seconds"):
        shown.add_column(heading, justify="right" if heading == "seconds" else "left")
    for name, step in found["steps"].items():
        verdict = "[green]well[/]" if step["well"] else "[bold red]NOT WELL[/]"
        shown.add_row(name, verdict, step["words"], f"{step['seconds']:.0f}")
    return shown


def main() -> int:
    """Returns the exit status: 1 where a step did not end well."""
    parser = argparse.ArgumentParser(
        prog="scripts/accelerator_check.sh", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path("accelerator_check.json"))
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))
    arguments = parser.parse_args()
    console = Console()
    try:
        found = check(arguments.out, arguments.only, STEPS, console)
    except KeyboardInterrupt:
        console.print(f"interrupted; {arguments.out} holds what was done. Run it again to go on.")
        return 130
    console.print(table(found))
    console.print(f"wrote {arguments.out}: please send it back")
    return 0 if all(found["steps"][name]["well"] for name in arguments.only) else 1


if __name__ == "__main__":
    sys.exit(main())
