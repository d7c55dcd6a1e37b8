"""Print the files that tracing a round of EAGLE-3 enters: their lines, and those of the functions.

python -m tests.entered
"""

import ast
import collections
import sys
from pathlib import Path

from jspec.core.types import Params
from jspec.engine import functional, round
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from tests import tiny
from tests.drafters import heads

ROOT = Path(__file__).resolve().parents[1]


def functions_of_a_round() -> dict[Path, set[int]]:
    """Return the files of jspec and its kernels, and the first lines of the functions called.

    JAX traces nothing twice, so this is complete only in a new process.
    """
    plan = Plan(tiny.TARGET, heads.drafter("eagle3", 4))
    params = Params(tiny.params().target, heads.random_params("eagle3"))
    rows = [SequenceParams((1,), 8, temperature=0.7)]  # nothing to prefill
    batch, entered = functional.start(plan, params, rows), collections.defaultdict(set)

    def enter(frame, event, argument):
        if event == "call":
            entered[Path(frame.f_code.co_filename)].add(frame.f_code.co_firstlineno)

    try:
        sys.setprofile(enter)
        round.step.trace(plan, params, batch.request, batch.shared, batch.state)
    finally:
        sys.setprofile(None)
    folders = ROOT / "jspec", ROOT / "kernels"
    return {path: lines for path, lines in entered.items() if set(folders) & set(path.parents)}


def lines_within(path: Path, called: set[int]) -> int:
    """Return the number of lines of the functions that begin at the ``called`` lines."""
    within: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.FunctionDef | ast.Lambda):
            decorators = node.decorator_list if isinstance(node, ast.FunctionDef) else []
            first = min(each.lineno for each in (node, *decorators))
            if called & {first, node.lineno}:
                within.update(range(first, node.end_lineno + 1))
    return len(within)


if __name__ == "__main__":
    for path, called in sorted(functions_of_a_round().items()):
        lines = path.read_text(encoding="utf-8").count("\n")
        print(path.relative_to(ROOT).as_posix(), lines, lines_within(path, called))
