"""``python -m tests.aot.roofline``: bytes of memory that a round of a large model moves.

It compiles launches over pages, as ``LLM`` runs them, for devices that are not there, with 2 and 4
layers, and extrapolates to all. The figures are compared with ``roofline.json``, which may only get
better; ``--write`` renews them there and in docs/tpu_and_gpu.md. Exits with 1 if a cell is worse.
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path

import jax

from tests.aot.cells import TABLE
from tests.aot.devices import DEVICES, lines_of

PATH = Path(__file__).with_name("roofline.json")
PAGE = Path(__file__).parents[2] / "docs" / "tpu_and_gpu.md"
# Figures that may only fall, and the growth that compilers may cause by chance.
_COMPARED = {
    "ratio": 0.01,
    "collectives": 0,
    "weight_copies": 0.01,
    "cache_copies": 0,
    "temporaries": 0.02,
}
_HEAD = (
    "| device | launch | GB a round | over minimum | collectives | weights copied | caches copied "
    "| temporaries | memory, GB | compile of 4 layers, s |"
)


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.aot.roofline", description=__doc__.partition("\n\n")[2]
    )
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--only", default="", help="cells whose name has these words")
    parser.add_argument("--timeout", type=float, default=600, help="seconds per cell")
    parser.add_argument("--write", action="store_true", help="write the figures into the table")
    arguments = parser.parse_args()
    table, failures = load(), []
    if table["jax"] != jax.__version__:
        print(f"The table is of JAX {table['jax']}, not {jax.__version__}: nothing is compared.")
        table = {"jax": jax.__version__, "devices": {}}
    is_new = arguments.write or not table["devices"]
    chosen = [cell for cell in TABLE if cell.device in arguments.devices]
    for cell in (cell for cell in chosen if arguments.only in cell.name):
        device, fields = cell.device, json.dumps(dataclasses.asdict(cell))
        for line in lines_of("tests.aot.measure", fields, timeout=arguments.timeout):
            rows = table["devices"].setdefault(device, {})
            name, figures = line["program"], line.get("figures")
            if figures is None:
                problems = [line["error"].splitlines()[0]]
            else:
                problems = [] if is_new else regressions(rows.get(name), figures)
                rows[name] = figures
            failures += [f"{device}: {name} {problem}" for problem in problems]
            print(device, "WORSE" if problems else "ok", name, figures, *problems, flush=True)
        if arguments.write:
            save(table)
    print(*failures, sep="\n", file=sys.stderr)
    return 1 if failures else 0


def load() -> dict:
    """Return ``{"jax": version, "devices": {"v6e": {cell: figures}}}``."""
    return json.loads(PATH.read_text())


def save(table: dict) -> None:
    """Write the table, in order, and its lines in the docs."""
    devices = {name: dict(sorted(rows.items())) for name, rows in sorted(table["devices"].items())}
    table = {**table, "devices": devices}
    PATH.write_text(json.dumps(table, indent=1) + "\n")
    text = PAGE.read_text()
    PAGE.write_text(text.replace(shown(text), markdown(table)))


def regressions(expected: dict | None, figures: dict) -> list[str]:
    """Return a description of every figure that is worse than expected."""
    if expected is None:
        return ["has no row in the table; add it with --write"]
    return [
        f"{name} rose from {expected[name]:,} to {figures[name]:,}"
        for name, slack in _COMPARED.items()
        if figures[name] > expected[name] + slack
    ]


def markdown(table: dict) -> str:
    """Return the lines of the docs."""
    lines = [_HEAD, "|" + "---|" * _HEAD.count(" | ") + "---|"]
    for device, rows in table["devices"].items():
        for name, row in rows.items():
            facts = (
                f"{row['gigabytes']:.1f}",
                f"{row['ratio']:.2f}",
                f"{row['collectives']}",
                f"{100 * row['weight_copies']:.0f} %",
                f"{row['cache_copies']}",
                f"{row['temporaries']:.3f}",
                f"{row['memory']:.0f}",
                f"{row['seconds']}",
            )
            lines.append(" | ".join((f"| {device}", name, *facts)) + " |")
    return "\n".join(lines)


def shown(page: str) -> str:
    """Return the lines of the table in a page."""
    return page[page.index(_HEAD) :].partition("\n\n")[0].rstrip("\n")


if __name__ == "__main__":
    sys.exit(main())
