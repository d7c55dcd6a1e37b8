"""The time of a round on a CPU, by part of the round and kind of work.

    python -m benchmarks.round_profile [--temperature 0.8] [--out FILE.json]

Decodes with the demo's models under JAX's profiler. Every XLA operation is an event with the name
of its instruction, and the compiled program maps instructions to source scopes. Profiled rounds are
slower than others, so both times are printed; shares are those of profiled rounds. The cache of
compiled programs stays off, because its programs contain the scopes of older sources.
"""

import argparse
import collections
import dataclasses
import json
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

import jspec
from benchmarks import workload
from jspec.api import build, config
from jspec.checkpoints import loading
from jspec.core.types import Params
from jspec.engine.functional import Batch, advance, start
from jspec.engine.loop import init_shared, launch
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.bench import environment

_DEMO = Path(jspec.__file__).with_name("assets") / "demo"
_RESULTS = Path(__file__).with_name("results")
_PARTS = ("draft", "target", "accept", "commit")
_LAYERS = ("attention", "mlp")
_CONTROL = ("while", "conditional", "call")  # their events contain those of their bodies
_REPEATS = 6

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = .*? ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"calls=%([\w.\-]+)")
_SCOPES = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Work:
    """The purpose of an instruction.

    Attributes:
      part: of the round, one of ``_PARTS``, or "loop".
      layer: of a network, one of ``_LAYERS``, or "" outside its blocks.
      multiplies: whether it is a matrix product.
    """

    part: str
    layer: str
    multiplies: bool


def works(program: str) -> dict[str, Work]:
    """Return the purpose of each instruction by name, except those that run other instructions."""
    computations: dict[str, list[str]] = {}
    for block in re.split(r"\n\n", program):
        head, *lines = block.strip("\n").split("\n")
        computations[head.removeprefix("ENTRY ").lstrip("%").split(" ")[0]] = lines
    work = {}
    for lines in computations.values():
        scopes = _first_scopes(lines)
        for line in lines:
            match = _INSTRUCTION.match(line)
            if not match:
                continue
            called = _CALLED.search(line)
            inner = computations.get(called[1], []) if called else []
            # Products lose their scope when XLA calls a library; they follow their operands.
            scopes = _first_scopes([line, *inner]) or scopes
            if match[2] not in _CONTROL:
                multiplies = any(" dot(" in each for each in [line, *inner])
                work[match[1]] = _work(scopes, multiplies)
    return work


def _first_scopes(lines: Sequence[str]) -> tuple[str, ...]:
    """Return the scopes of the first instruction that is in any part of a round."""
    for match in filter(None, map(_SCOPES.search, lines)):
        scopes = tuple(match[1].split("/"))
        if not {*_PARTS}.isdisjoint(scopes):
            return scopes
    return ()


def _work(scopes: tuple[str, ...], multiplies: bool) -> Work:
    named = lambda known: next((scope for scope in scopes if scope in known), "")
    return Work(named(_PARTS) or "loop", named(_LAYERS), multiplies)


def microseconds(work: dict[str, Work], run: Callable[[], None]) -> dict[Work, tuple[float, int]]:
    """Profile ``run``; return time and number of operations of each kind of work."""
    totals: dict[Work, list] = collections.defaultdict(lambda: [0.0, 0])
    options = jax.profiler.ProfileOptions()
    options.host_tracer_level, options.python_tracer_level = 3, 0
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder, profiler_options=options):
            run()
        [file] = Path(folder).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    for event in (event for plane in data.planes for line in plane.lines for event in line.events):
        if event.name in work:
            total = totals[work[event.name]]
            total[0] += event.duration_ns / 1e3
            total[1] += 1
    return {kind: tuple(total) for kind, total in totals.items()}


def profile(plan: Plan, params: Params, row: SequenceParams) -> dict:
    """Return microseconds of a round without the profiler, and by kind of work with it."""

    def begun() -> Batch:
        batch = start(plan, params, [row]).replace(shared=init_shared(plan))
        return jax.block_until_ready(batch)

    batch = begun()
    nobody = np.zeros(batch.state.done.shape, bool)
    inputs = params, batch.request, batch.shared, batch.state, np.int32(1), nobody
    program = launch.lower(plan, batch.profile, *inputs)
    work = works(program.compile().as_text())
    seconds = []
    for _ in range(_REPEATS):
        batch = begun()
        begin = time.perf_counter()
        batch = jax.block_until_ready(advance(plan, params, batch))
        seconds.append(time.perf_counter() - begin)
    [answer] = batch.answers
    batch = begun()
    spent = microseconds(work, lambda: jax.block_until_ready(advance(plan, params, batch)))
    return {
        "rounds": answer.rounds,
        "tokens_per_round": len(answer.tokens) / answer.rounds,
        "round_us": 1e6 * min(seconds) / answer.rounds,
        "work": [
            dataclasses.asdict(kind)
            | {"us": total / answer.rounds, "operations": count / answer.rounds}
            for kind, (total, count) in spent.items()
        ],
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="a round's time by part")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--temperature", type=float, default=0.8)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--out", type=Path, default=_RESULTS / "round_profile.json")
    arguments = parser.parse_args()
    results = environment.describe() | {"profiles": []}
    for dtype in arguments.dtypes:
        target = loading.load(_DEMO / "target", dtype)
        [prompt] = workload.source_prompts(target.tokenizer, 1, 128)
        row = SequenceParams(
            prompt, arguments.max_tokens, temperature=arguments.temperature, seed=1
        )
        for name, given in _configs().items():
            made = build.build_plan(target, config.read(given), dtype=dtype)
            results["profiles"].append(
                {"name": name, "dtype": dtype} | profile(made.plan, made.params, row)
            )
    arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    Console(width=140).print(table(results["profiles"]))


def _configs() -> dict[str, dict | None]:
    common = {"num_speculative_tokens": 4}
    return {
        "none": None,
        "draft_model": common | {"model": str(_DEMO / "draft")},
        "eagle3": common | {"method": "eagle3", "model": str(_DEMO / "eagle3")},
    }


def table(profiles: Sequence[dict]) -> Table:
    """Return the microseconds of a profiled round by part."""
    shown = Table(
        title="a round, microseconds",
        caption="products: matrix products, with weights or with the caches. rest: norms, "
        "rotations, softmax, sampling, copies. profiled: the sum of the parts, under the profiler.",
    )
    shown.add_column("method", no_wrap=True)
    for name in ("tokens", "round", "profiled", *_PARTS, "loop", "products", "rest", "operations"):
        shown.add_column(name, justify="right")
    for each in profiles:
        sums = lambda keep, each=each: sum(kind["us"] for kind in each["work"] if keep(kind))
        parts = [sums(lambda kind, p=part: kind["part"] == p) for part in (*_PARTS, "loop")]
        products = sums(lambda kind: kind["multiplies"])
        figures = (each["round_us"], sum(parts), *parts, products, sum(parts) - products)
        shown.add_row(
            f"{each['name']} {each['dtype']}",
            f"{each['tokens_per_round']:.2f}",
            *(f"{figure:.0f}" for figure in figures),
            f"{sum(kind['operations'] for kind in each['work']):.0f}",
        )
    return shown


if __name__ == "__main__":
    main()
