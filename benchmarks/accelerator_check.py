"""A check of speed and correctness on an accelerator: ``scripts/accelerator_check.sh``.

    python -m benchmarks.accelerator_check [--out accelerator_check.json] [--only STEP ...]

The steps compare kernels with XLA, time rounds of an 8B model's shape in ``LLM`` and beside
transformers, and run ``jspec certify``. Each step is a process with a time limit, so a step that
hangs or crashes is a line of the table. Results are printed and written after each step. A second
run repeats only failed steps, unless the device, the versions or the commit changed. ``--tiny``
tries the check itself, with small sizes and on a CPU too.

This process never touches the device: a TPU admits one process at a time.
"""

import argparse
import dataclasses
import importlib.util
import json
import os
import re
import shlex
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
_SAME = ("device", "versions", "commit")  # earlier results are valid only for the same values
_TAIL = 20_000  # characters of a failure's output in the results
_TOTAL = 590.0  # seconds that all steps may take together
_LEAST_SECONDS = 10.0  # in which no step ends
_DEVICE_SECONDS = 90.0  # to find a device
_DESCRIBE = (
    "import json; from jspec.tools.bench import environment; "
    "print(json.dumps(environment.describe('benchmarks.accelerator_check')))"
)
# For steps of correctness alone: with tuned programs, 70 s were too few for one on an H200.
_QUICK_COMPILE = "--xla_gpu_autotune_level=0"
_PLATFORMS = {"gpu": "cuda", "tpu": "tpu"}  # JAX's names of the platforms
# The line of a traceback with the error; JAX appends notes after it.
_CAUSE = re.compile(r"^[\w.]*(?:Error|Exception|Exit)\b.*", re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Step:
    """A command that writes JSON.

    Attributes:
      command: words; ``{out}`` stands for the JSON file that it writes.
      seconds: time limit.
      judge: maps its JSON to (success, summary).
      flags: of XLA.
      tiny: more options, with which it tries small sizes.
    """

    command: tuple[str, ...]
    seconds: float
    judge: Callable[[Any], tuple[bool, str]]
    flags: str = ""
    tiny: str = ""


def _kernels(results: dict) -> tuple[bool, str]:
    rows, words = results["rows"], [f"{len(results['rows'])} of {results['asked']} cases"]
    apart = [row["difference"] for row in rows if row["difference"] is not None]
    if apart:
        words.append(f"differ by {max(apart):.1e} at most")
    pairs = [list(row["seconds"].values()) for row in rows if not row["cached"]]
    pairs = [pair for pair in pairs if len(pair) > 1]
    if pairs:
        faster = sum(kernel < xla for xla, kernel in pairs)
        words.append(f"kernels beat XLA in {faster} of {len(pairs)} past the cache")
    if results["no_kernels"]:
        words.append(results["no_kernels"])
    wrong = [row for row in rows if not row["well"]]
    if wrong:
        errors = [f"{name} {error}" for name, error in wrong[0]["errors"].items()]
        reason = "; ".join(errors) or f"differs by {wrong[0]['difference']:.1e}"
        words.append(f"{len(wrong)} wrong, {wrong[0]['case']}: {reason}")
    return bool(rows) and not wrong, "; ".join(words)


def _certificate(results: dict) -> tuple[bool, str]:
    failed = sum(not each["passed"] for each in results["findings"])
    return results["passed"], f"{len(results['findings'])} findings, {failed} failed"


def _rounds(results: dict) -> tuple[bool, str]:
    words = [
        f"{row['slots']} of {row['context']} tokens {row['ms_per_round']:.2f} ms"
        f" ({row['times_minimum']:.2f} of the minimum)"
        for row in results["rows"]
    ]
    return bool(words), "; ".join(words)


def _peers(results: dict) -> tuple[bool, str]:
    failed = [
        f"{name}: {each['failed']}"
        for name, each in results["programs"].items()
        if "failed" in each
    ]
    words = [
        f"{row['program']} {row['mode']}, batch {row['batch']}: "
        + (row.get("failed") or f"{row['ms_per_token']:.2f} ms a token")
        for row in results["rows"]
    ]
    well = bool(words) and not failed and not any("failed" in row for row in results["rows"])
    return well, "; ".join(failed + words)


def _passes(results: dict) -> tuple[bool, str]:
    return bool(results["rows"]), f"{len(results['rows'])} rows"


def _certify(*more: str) -> tuple[str, ...]:
    return _PYTHON, "-m", "jspec", "certify", *more, "--json", "{out}"


def _compare(operation: str, seconds: int, options: str, tiny: str) -> Step:
    start = f"-m benchmarks.kernels --operations {operation} --repeats 3 --seconds {seconds - 20}"
    return Step(_words(f"{start} {options} --json {{out}}"), seconds, _kernels, tiny=tiny)


def _rounds_of_llm(seconds: int, options: str, flags: str = "") -> Step:
    start = f"-m benchmarks.rounds --llm --methods none --repeats 3 --seconds {seconds - 40}"
    tiny = "--shape tiny --layers 1 --slots 1 2 --prompt-tokens 40 --max-tokens 16 --repeats 1"
    return Step(_words(f"{start} {options} --out {{out}}"), seconds, _rounds, flags, tiny)


def _words(options: str) -> tuple[str, ...]:
    return _PYTHON, *shlex.split(options)


# Figures come before certificates, and the most important cases first: a slow compiler leaves no
# time for the last.
_FEW_LAYERS = "--layers 8 --slots 1 --prompt-tokens 1000"
STEPS = {
    "attention over pages": _compare(
        "tree_attention",
        75,
        "--pages 64 --batch 1 8 --lengths 8192 --cases 'a chain of 4' 'one node' 'a tree of 61' "
        "'a window and a soft cap' '80 features'",
        tiny="--batch 1 --lengths 256 --cases 'one node' --repeats 1",
    ),
    "rounds": _rounds_of_llm(150, "--slots 1 8 32 --prompt-tokens 1000 8000"),
    "peers": Step(
        _words("-m benchmarks.gpu_peers --peer {peer} --seconds 110 --out {out}"),
        160,
        _peers,
        tiny="--config tiny --dtype float32 --batch 1 2 --prompt-tokens 40 --max-tokens 12 "
        "--repeats 1",
    ),
    "command buffers": _rounds_of_llm(45, _FEW_LAYERS),
    "no command buffers": _rounds_of_llm(45, _FEW_LAYERS, "--xla_gpu_enable_command_buffer="),
    "command buffers around loops": _rounds_of_llm(
        45, _FEW_LAYERS, "--xla_gpu_enable_command_buffer=+WHILE,+CONDITIONAL"
    ),
    "sampling": _compare(
        "rejection_sampling",
        45,
        "--batch 8 --cases 'a chain of 8' 'a tree of 64' 'a chain of 5 under block' "
        "'a chain of 4 over an odd vocabulary' 'a tree of 8 under block'",
        tiny="--batch 1 --cases 'a chain of 1' --repeats 1",
    ),
    "rules": Step(_certify(), 50, _certificate),
    "demo, float32": Step(
        _certify("--model", _MODEL, "--speculative-config", _SPEC, "--dtype", "float32"),
        120,
        _certificate,
        _QUICK_COMPILE,
    ),
    "demo, bfloat16": Step(
        _certify("--model", _MODEL, "--speculative-config", _SPEC, "--dtype", "bfloat16"),
        90,
        _certificate,
        _QUICK_COMPILE,
    ),
    "products": _compare(
        "grouped_matmul quantized_matmul",
        75,
        "",
        tiny="--cases 'Llama-3.1-8B, int4, qkv' 'Llama-3.1-8B, Q4_0, out' --repeats 1",
    ),
    "verifying": Step(
        _words(
            "-m benchmarks.rounds --fit --nodes 1 2 4 8 16 32 64 --prompt-tokens 8192 --out {out}"
        ),
        85,
        _passes,
        tiny="--shape tiny --slots 1 --nodes 1 8 --prompt-tokens 64 --repeats 1",
    ),
}


class NoAccelerator(RuntimeError):
    """JAX finds only a CPU, or nothing."""


def device(on_cpu: bool = False) -> dict[str, Any]:
    """Return device, versions and commit, from a process that ends before this returns.

    Raises:
      NoAccelerator: with JAX's message, unless a CPU is accepted, ``on_cpu``.
    """
    words = (_PYTHON, "-c", _DESCRIBE)
    try:
        ran = subprocess.run(words, capture_output=True, text=True, timeout=_DEVICE_SECONDS)
    except subprocess.TimeoutExpired:
        raise NoAccelerator(f"no device answered in {_DEVICE_SECONDS:.0f} s") from None
    if ran.returncode:
        raise NoAccelerator(_cause(ran.stderr))
    results = json.loads(ran.stdout.strip().splitlines()[-1])
    platform = results["device"]["platform"]
    if platform not in _PLATFORMS and not (on_cpu and platform == "cpu"):
        raise NoAccelerator(f"JAX finds the {platform} alone. {ran.stderr.strip()}".strip())
    return results


def _cause(output: str) -> str:
    """Return the line of an output that names the error."""
    causes = _CAUSE.findall(output) or output.strip().splitlines()[-1:]
    return causes[-1] if causes else "it printed nothing"


def _environment(platform: str, flags: str) -> dict[str, str]:
    """Return a step's environment, in which JAX does not silently fall back to the CPU."""
    asked = f"{_PLATFORMS[platform]},cpu" if platform in _PLATFORMS else platform
    flags = f"{os.environ.get('XLA_FLAGS', '')} {flags}".strip()
    named = {"JAX_PLATFORMS": asked, "JAX_TRACEBACK_FILTERING": "off", "XLA_FLAGS": flags}
    return os.environ | named


def _written(out: Path) -> Any:
    """Return the JSON that a step wrote; None if it is missing or truncated."""
    try:
        return json.loads(out.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None


def run(step: Step, limit: float, platform: str) -> dict[str, Any]:
    """Run a step for at most ``limit`` seconds; return success, summary, seconds and results."""
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
                env=_environment(platform, step.flags),
            )
            status, output = ran.returncode, ran.stdout
        except subprocess.TimeoutExpired as error:
            status, output = "timeout", (error.stdout or b"").decode(errors="replace")
        seconds = round(time.perf_counter() - begin, 1)
        results = _written(out)
    if results is None:
        words = f"took more than {limit:.0f} s" if status == "timeout" else _cause(output)
        return {"well": False, "words": words[:300], "seconds": seconds, "output": output[-_TAIL:]}
    well, words = step.judge(results)
    if status == "timeout":
        words += f"; stopped after {limit:.0f} s"
    return {
        "well": well and status in (0, "timeout"),
        "words": words,
        "seconds": seconds,
        "results": results,
    }


def check(
    out: Path, names: list[str], steps: dict[str, Step], results: dict[str, Any], console: Console
) -> dict[str, Any]:
    """Run the steps that have no valid earlier result; write the results after each.

    ``results`` is the result of ``device``.
    """
    end = time.perf_counter() + _TOTAL
    results = results | {"steps": {}}
    before = _written(out) or {}
    known = results["commit"] is not None and not results["uncommitted_changes"]
    if known and all(before.get(key) == results[key] for key in _SAME):
        results["steps"] = {k: v for k, v in before["steps"].items() if v["well"]}
    for name in names:
        if name in results["steps"]:
            console.print(f"{name}: done before")
            continue
        left = end - time.perf_counter()
        if left < _LEAST_SECONDS:
            console.print(f"{name}: not begun after {_TOTAL:.0f} s; run the check again")
            continue
        limit = min(steps[name].seconds, left)
        with console.status(f"{name}, {limit:.0f} s at most"):
            done = run(steps[name], limit, results["device"]["platform"])
        results["steps"][name] = done
        verdict = "well" if done["well"] else "NOT WELL"
        console.print(f"{name}: {verdict}, {done['seconds']:.0f} s. {done['words']}", markup=False)
        files.write_json(results, out)
    return results


def steps_of(names: list[str], peer: str, tiny: bool) -> dict[str, Step]:
    """Return the steps by name, with the Python that has torch, and small sizes if ``tiny``."""
    steps = {name: STEPS[name] for name in STEPS if name in names}
    for name, step in steps.items():
        words = (peer if word == "{peer}" else word for word in step.command)
        more = shlex.split(step.tiny) if tiny else ()
        steps[name] = dataclasses.replace(step, command=(*words, *more))
    return steps


def table(results: dict[str, Any]) -> Table:
    """Return the results as a table."""
    device = results["device"]
    shown = Table(title=f"{device['kind']}, jax {results['versions']['jax']}", title_justify="left")
    for heading in ("step", "", "result", "seconds"):
        shown.add_column(heading, justify="right" if heading == "seconds" else "left")
    for name, step in results["steps"].items():
        verdict = "[green]well[/]" if step["well"] else "[bold red]NOT WELL[/]"
        shown.add_row(name, verdict, step["words"], f"{step['seconds']:.0f}")
    return shown


def main() -> int:
    """Run the command line; return 1 if a step failed."""
    parser = argparse.ArgumentParser(
        prog="scripts/accelerator_check.sh", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--out", type=Path, default=Path("accelerator_check.json"))
    parser.add_argument("--only", nargs="+", choices=STEPS, default=list(STEPS))
    parser.add_argument("--peer", help="Python with torch and transformers; this one if left out")
    parser.add_argument("--tiny", action="store_true", help="try the check itself, also on a CPU")
    arguments = parser.parse_args()
    console = Console()
    if arguments.peer is None and importlib.util.find_spec("torch") is None:
        console.print("peers: left out, since torch is not installed; --peer PYTHON names another")
        arguments.only = [name for name in arguments.only if name != "peers"]
    steps = steps_of(arguments.only, arguments.peer or _PYTHON, arguments.tiny)
    # A signal, such as a lost connection, also ends the running step.
    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) != signal.SIG_IGN:  # as under nohup
            signal.signal(number, lambda number, _: sys.exit(128 + number))
    try:
        results = check(arguments.out, list(steps), steps, device(arguments.tiny), console)
    except NoAccelerator as error:
        console.print(f"there is no GPU or TPU to check: {error}", markup=False)
        return 2
    except KeyboardInterrupt:
        console.print(f"interrupted; {arguments.out} holds what was done. Run it again to go on.")
        return 130
    console.print(table(results))
    console.print(f"wrote {arguments.out}: please send it back")
    return 0 if all(results["steps"].get(name, {}).get("well") for name in steps) else 1


if __name__ == "__main__":
    sys.exit(main())
