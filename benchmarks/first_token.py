"""Seconds from the start of ``jspec generate`` to its first text, with compiled programs kept.

    python -m benchmarks.first_token [--repeats 5] [--out FILE.json]

The first start of each row compiles programs that are not in the user's cache yet, and is printed
separately. If torch is installed, transformers may import it, which takes seconds.
"""

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table

import jspec
from jspec.tools.bench import environment

_DEMO = Path(jspec.__file__).with_name("assets") / "demo"
_RESULTS = Path(__file__).with_name("results")
_PROMPT = "import os"
_CONFIGS = {
    "none": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2},
    "draft_model": {"model": str(_DEMO / "draft"), "num_speculative_tokens": 4},
    "eagle3": {"method": "eagle3", "model": str(_DEMO / "eagle3"), "num_speculative_tokens": 4},
}


def first_text(config: dict | None) -> float:
    """Return the seconds until a new process of ``jspec generate`` writes its first text."""
    words = [sys.executable, "-m", "jspec", "generate", str(_DEMO / "target"), _PROMPT, "--stream"]
    if config is not None:
        words += ["--speculative-config", json.dumps(config)]
    begin = time.perf_counter()
    with subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        first = process.stdout.read(1)
        seconds = time.perf_counter() - begin
        _, errors = process.communicate()
    if not first or process.returncode:
        raise RuntimeError(f"jspec generate failed: {errors.decode()[-500:]}")
    return seconds


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="seconds to the first text")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, default=_RESULTS / "first_token.json")
    arguments = parser.parse_args()
    results = environment.describe() | {"rows": []}
    results["torch_installed"] = importlib.util.find_spec("torch") is not None
    shown = Table(title="seconds to the first text", caption="of a new process, median (least)")
    for name in ("method", "first start", "later starts"):
        shown.add_column(name, justify="left" if name == "method" else "right")
    for name, config in _CONFIGS.items():
        first, *later = (first_text(config) for _ in range(arguments.repeats + 1))
        results["rows"].append({"method": name, "first": first, "later": later})
        median = sorted(later)[len(later) // 2]
        shown.add_row(name, f"{first:.1f}", f"{median:.2f} ({min(later):.2f})")
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    Console().print(shown)


if __name__ == "__main__":
    main()
