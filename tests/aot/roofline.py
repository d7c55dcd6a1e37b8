"""``python -m tests.aot.roofline``: bytes of memory that a round of a large model moves.

It compiles launches over pages, as ``LLM`` runs them, for devices that are not there, with 2 and 4
layers, and extrapolates to all. The figures are compared with ``roofline.json``, which may only get
better; ``--write`` renews them there and in docs/tpu_and_gpu.md. Exits with 1 if a cell is worse.
"""

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import jax

from tests.aot.cells import MODELS, Cell
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
    grid = [
        ("device", str, ("v6e", "h200"), tuple(DEVICES)),
        ("model", str, ("llama-8b",), tuple(MODELS)),
        ("batch", int, (1, 8), (1, 8, 32)),
        ("context", int, (2048,), (2048, 8192)),
        ("nodes", int, (1, 5), (1, 5, 16)),
        ("attention", str, ("xla",), ("xla", "kernel")),
        ("tp", int, (1,), (1,)),  # more with partition rules
    ]
    for name, kind, default, choices in grid:
        parser.add_argument(f"--{name}", nargs="+", type=kind, default=default, choices=choices)
    parser.add_argument("--sampled", action="store_true", help="all settings that are numbers")
    parser.add_argument("--layouts", action="store_true", help="weights as the loop reads them")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds per cell")
    parser.add_argument("--write", action="store_true", help="write the figures into the table")
    arguments = parser.parse_args()
    table, failures = load(), []
    if table["jax"] != jax.__version__:
        print(f"The table is of JAX {table['jax']}, not {jax.__version__}: nothing is compared.")
        table = {"jax": jax.__version__, "devices": {}}
    is_new = arguments.write or not table["devices"]
    for cell in _cells(arguments, [name for name, *_ in grid]):
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


def _cells(arguments: argparse.Namespace, names: list[str]) -> Iterator[Cell]:
    """Yield the cells of the lists of ``arguments`` by ``names``."""
    for values in itertools.product(*(getattr(arguments, name) for name in names)):
        fields = dict(zip(names, values, strict=True))
        yield Cell(**fields, sampled=arguments.sampled, layouts=arguments.layouts)


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
