"""``python -m tests.aot``: compiles for every device, and compares with the table.

Each device and number of chips has a process of its own with a time limit, since a compiler that
crashes or hangs must not end the run. Exits with 1 if a program has become worse.
"""

import argparse
import sys

import jax

from tests.aot import table
from tests.aot.devices import DEVICES, lines_of

CHIPS = (1, 4)


def main() -> int:
    """Run the command; return the exit status."""
    parser = argparse.ArgumentParser(prog="python -m tests.aot", description=__doc__.split("\n")[0])
    parser.add_argument("--devices", nargs="+", choices=DEVICES, default=list(DEVICES))
    parser.add_argument("--chips", nargs="+", type=int, choices=CHIPS, default=CHIPS)
    parser.add_argument("--only", default="", help="programs whose name begins with it")
    parser.add_argument("--timeout", type=float, default=1800, help="seconds per device and chips")
    parser.add_argument("--write", action="store_true", help="write the figures into the table")
    arguments = parser.parse_args()

    known, comparable = table.load(), True
    if known["jax"] not in (None, jax.__version__) and not arguments.write:
        comparable = False
        print(
            f"The table is of JAX {known['jax']}, this is {jax.__version__}: figures are shown, "
            "not compared."
        )
    rows, failures = {}, []
    for device in arguments.devices:
        for chips in arguments.chips:
            target = f"{device} x{chips}"
            before = known["devices"].get(target, {})
            after = rows[target] = dict(before if arguments.only else {})
            for line in lines_of(
                "tests.aot.worker",
                device,
                str(chips),
                arguments.only,
                timeout=arguments.timeout,
            ):
                problems = judge(line, before, arguments.write or not comparable)
                show(target, line, problems)
                failures += [f"{target}: {line['program']} {problem}" for problem in problems]
                if "figures" in line:
                    after[line["program"]] = line["figures"]
            if arguments.write:
                table.save(jax.__version__, rows)
    print(*failures, sep="\n", file=sys.stderr)
    return 1 if failures else 0


def judge(line: dict, before: dict, figures_are_new: bool) -> list[str]:
    """Return the problems of a line, in words."""
    if "error" in line:
        return [line["error"].splitlines()[0]]
    figures = line["figures"]
    if figures.get("cache_copies_in_loop"):
        return [f"copies a cache in the loop, {figures['cache_copies_in_loop']} times"]
    return [] if figures_are_new else table.regressions(before.get(line["program"]), figures)


def show(target: str, line: dict, problems: list[str]) -> None:
    """Print one line for people."""
    figures = dict(line.get("figures", {}))
    size = figures.pop("temp_bytes", None)
    facts = [f"{size / 1e6:.1f} MB of temporaries"] if size is not None else []
    facts += [f"{count} {name}" for name, count in figures.items() if count]
    if "seconds" in line:
        facts.append(f"{line['seconds']:.0f} s")
    mark = "WORSE" if problems else "ok"
    print(f"{target:9} {mark:5} {line['program']}: {', '.join(facts + problems)}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
