"""Whether jspec is right and fast on this device: ``scripts/accelerator_check.sh``.

    python -m benchmarks.accelerator_check [--out accelerator_check.json] [--only STEP ...]

Kernels beside the reference, ``jspec certify`` and ``jspec bench`` on the embedded model, and what
verifying costs at an 8B model's shape. Every step is a process with a time limit, so that one that
hangs or crashes is a line of the table; what is known is written after each. Run again, steps that
ended well are not repeated, unless the device, the versions or the commit are others.

This process never touches the device: a TPU lets in one process at a time.
"""

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jspec.cli import demo
from jspec.tools.bench import files

_PYTHON = sys.executable
_MODEL, _SPEC = str(demo.ASSETS / "target"), json.dumps(demo.EAGLE3)
_SAME = ("device", "versions", "commit")  # what makes earlier results worth keeping
_TAIL = 20_000  # characters of a failure that are kept
_TOTAL = 590.0  # seconds that all steps may take together
_DEVICE_SECONDS = 90.0  # for a device to be found
_DESCRIBE = (
    "import json; from jspec.tools.bench import environment; "
    "print(json.dumps(environment.describe('benchmarks.accelerator_check')))"
)
_PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}  # JAX's names, to be asked for
# The line of a traceback that says what happened; JAX puts notes of its own behind it.
_CAUSE = re.compile(r"^[\w.]*(?:Error|Exception|Exit)\b.*", re.MULTILINE)


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
    rows, words = found["rows"], [f"{len(found['rows'])} of {found['asked']} cases"]
    apart = [row["difference"] for row in rows if row["difference"] is not None]
    if apart:
        words.append(f"differ by {max(apart):.1e} at most")
    pairs = [list(row["seconds"].values()) for row in rows if not row["cached"]]
    pairs = [pair for pair in pairs if len(pair) > 1]
    if pairs:
        faster = sum(kernel < reference for reference, kernel in pairs)
        words.append(f"kernels beat XLA in {faster} of {len(pairs)} past the cache")
    if found["no_kernels"]:
        words.append(found["no_kernels"])
    wrong = [row for row in rows if not row["well"]]
    if wrong:
        errors = [f"{name} {said}" for name, said in wrong[0]["errors"].items()]
        said = "; ".join(errors) or f"differs by {wrong[0]['difference']:.1e}"
        words.append(f"{len(wrong)} wrong, {wrong[0]['case']}: {said}")
    return bool(rows) and not wrong, "; ".join(words)


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


def _compare(operation: str, seconds: int, *more: str) -> Step:
    words = ("--operations", operation, "--repeats", "3", "--seconds", f"{seconds - 30}", *more)
    command = (_PYTHON, "-m", "benchmarks.kernels", *words, "--json", "{out}")
    return Step(command, seconds, _kernels)


# The most telling cases of each come first: a slow compiler leaves out the last.
STEPS = {
    "attention": _compare(
        "tree_attention",
        110,
        "--batch",
        "1",
        "8",
        "--lengths",
        "8192",
        "--cases",
        "a chain of 4",
        "a tree of 61",
        "a window and a soft cap",
        "one node",
        "80 features",
    ),
    "sampling": _compare(
        "rejection_sampling",
        110,
        "--batch",
        "8",
        "--cases",
        "a chain of 8",
        "a tree of 64",
        "a chain of 5 as a whole",
        "a tree of 13 with repeats",
        "a chain of 4 over an odd vocabulary",
        "a tree of 8 as a whole",
    ),
    "rules": Step(_certify(), 60, _certificate),
    "demo, float32": Step(
        _certify("--model", _MODEL, "--speculative-config", _SPEC, "--dtype", "float32"),
        70,
        _certificate,
    ),
    "demo, bfloat16": Step(
        _certify("--model", _MODEL, "--speculative-config", _SPEC, "--dtype", "bfloat16"),
        70,
        _certificate,
    ),
    "latency": Step(
        (_PYTHON, "-m", "jspec", "bench", "--repeats", "3", "--no-peers", "--json", "{out}"),
        70,
        _bench,
    ),
    "verifying": Step(
        (
            _PYTHON,
            "-m",
            "benchmarks.verify_cost",
            "--fit",
            "--batch",
            "1",
            "8",
            "--lengths",
            "8192",
            "--out",
            "{out}",
        ),
        90,
        _verify_cost,
    ),
}


class NoAccelerator(RuntimeError):
    """What JAX finds is a CPU, or nothing."""


def device(on_cpu: bool = False) -> dict[str, Any]:
    """Device, versions and commit, asked of a process that is gone when this returns.

    Raises:
      NoAccelerator: with what JAX said; not where a CPU will do, ``on_cpu``.
    """
    words = (_PYTHON, "-c", _DESCRIBE)
    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=_DEVICE_SECONDS)
    except subprocess.TimeoutExpired:
        raise NoAccelerator(f"no device answered in {_DEVICE_SECONDS:.0f} s") from None
    if ran.returncode:
        raise NoAccelerator(_cause(ran.stderr))
    found = json.loads(ran.stdout.strip().splitlines()[-1])
    platform = found["device"]["platform"]
    if platform not in _PLATFORMS and not (on_cpu and platform == "cpu"):
        raise NoAccelerator(f"JAX finds the {platform} alone. {ran.stderr.strip()}".strip())
    return found


def _cause(said: str) -> str:
    """The line of an output that says why it ended."""
    causes = _CAUSE.findall(said) or said.strip().splitlines()[-1:]
    return causes[-1] if causes else "it said nothing"


def _environment(platform: str) -> dict[str, str]:
    """For a step: the device or none, never quietly the CPU in its place."""
    asked = f"{_PLATFORMS[platform]},cpu" if platform in _PLATFORMS else platform
    return os.environ | {"JAX_PLATFORMS": asked, "JAX_TRACEBACK_FILTERING": "off"}


def _written(out: Path) -> Any:
    """What a step wrote; None where that is nothing, or cut off."""
    try:
        return json.loads(out.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def run(step: Step, limit: float, platform: str) -> dict[str, Any]:
    """Runs a step for at most ``limit`` seconds: its status, words, seconds, and what it wrote."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "out.json"
        words = [word.format(out=out) if word == "{out}" else word for word in step.command]
        begin = time.perf_counter()
        try:
            ran = subprocess.run(
                words,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=limit,
                env=_environment(platform),
            )
            status, said = ran.returncode, ran.stdout
        except subprocess.TimeoutExpired as error:
            status, said = "timeout", (error.stdout or b"").decode(errors="replace")
        seconds = round(time.perf_counter() - begin, 1)
        found = _written(out)
    if found is None:
        words = f"took more than {limit:.0f} s" if status == "timeout" else _cause(said)
        return {"well": False, "words": words[:300], "seconds": seconds, "said": said[-_TAIL:]}
    well, words = step.judge(found)
    if status == "timeout":
        words += f"; stopped after {limit:.0f} s"
    return {
        "well": well and status in (0, "timeout"),
        "words": words,
        "seconds": seconds,
        "results": found,
    }


def check(
    out: Path, names: list[str], steps: dict[str, Step], found: dict[str, Any], console: Console
) -> dict[str, Any]:
    """Runs the steps that no earlier run has done on this device; writes after each.

    ``found`` is what ``device`` says.
    """
    end = time.perf_counter() + _TOTAL
    found = found | {"steps": {}}
    before = _written(out) or {}
    known = found["commit"] is not None and not found["uncommitted_changes"]
    if known and all(before.get(key) == found[key] for key in _SAME):
        found["steps"] = {k: v for k, v in before["steps"].items() if v["well"]}
    for name in names:
        if name in found["steps"]:
            console.print(f"{name}: done before")
            continue
        limit = max(1.0, min(steps[name].seconds, end - time.perf_counter()))
        with console.status(f"{name}, {limit:.0f} s at most"):
            found["steps"][name] = run(steps[name], limit, found["device"]["platform"])
        files.write_json(found, out)
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
    parser.add_argument("--cpu", action="store_true", help="try the check itself, on a CPU")
    arguments = parser.parse_args()
    console = Console()
    # Ended by a signal, as when a connection is lost: the step that runs ends too.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        found = check(arguments.out, arguments.only, STEPS, device(arguments.cpu), console)
    except NoAccelerator as error:
        console.print(f"there is no GPU or TPU to check: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print(f"interrupted; {arguments.out} holds what was done. Run it again to go on.")
        return 130
    console.print(table(found))
    console.print(f"wrote {arguments.out}: please send it back")
    return 0 if all(found["steps"][name]["well"] for name in arguments.only) else 1


if __name__ == "__main__":
    sys.exit(main())
