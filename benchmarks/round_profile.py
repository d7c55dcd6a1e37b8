"""Where a round's time goes on a CPU, by part of the round and kind of work.

    python -m benchmarks.round_profile [--temperature 0.8] [--out FILE.json]

Decodes with the demo's models under jax's profiler. Every operation of XLA's is an event with the
name of its instruction, whose place in the source is in the compiled program. A round that is
watched is slower than one that is not, so both are printed: shares are of the former. The cache of
compiled programs stays off, as those in it keep the names of the sources they were made from.
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
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

import jspec
from benchmarks import workload
from jspec.api import build, config
from jspec.core.types import Params
from jspec.engine import loading
from jspec.engine.batch import Batch, SequenceParams, advance, read, start
from jspec.engine.loop import decode, init_shared
from jspec.engine.plan import Plan
from jspec.tools.bench import environment

_DEMO = Path(jspec.__file__).with_name("assets") / "demo"
_RESULTS = Path(__file__).with_name("results")
_PARTS = ("draft", "target", "accept", "commit")
_LAYERS = ("attention", "mlp")
_CONTROL = ("while", "conditional", "call")  # their events hold those of what they run
_FOREVER = jnp.int32(2**30)
_REPEATS = 6

_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%(\S+) = .*? ([a-z][\w\-]*)\(")
_CALLED = re.compile(r"calls=%([\w.\-]+)")
_PLACE = re.compile(r'op_name="([^"]*)"')


@dataclasses.dataclass(frozen=True)
class Work:
    """What an instruction is for.

    Attributes:
      part: of the round, one of ``_PARTS``, or "loop".
      layer: of a network, one of ``_LAYERS``, or "" for what is around its blocks.
      multiplies: whether it is a matrix product.
    """

    part: str
    layer: str
    multiplies: bool


def works(program: str) -> dict[str, Work]:
    """What every instruction of a scheduled program is for, but those that run others, by name."""
    computations: dict[str, list[str]] = {}
    for block in re.split(r"\n\n", program):
        head, *lines = block.strip("\n").split("\n")
        computations[head.removeprefix("ENTRY ").lstrip("%").split(" ")[0]] = lines
    found = {}
    for lines in computations.values():
        place = _first_place(lines)
        for line in lines:
            match = _INSTRUCTION.match(line)
            if not match:
                continue
            called = _CALLED.search(line)
            inner = computations.get(called[1], []) if called else []
            # Products lose their place when XLA hands them to a library; they are computed after
            # what they multiply.
            place = _first_place([line, *inner]) or place
            if match[2] not in _CONTROL:
                multiplies = any(" dot(" in each for each in [line, *inner])
                found[match[1]] = _work(place, multiplies)
    return found


def _first_place(lines: Sequence[str]) -> tuple[str, ...]:
    """The scopes of the first of some instructions that is in any part of a round."""
    for match in filter(None, map(_PLACE.search, lines)):
        scopes = tuple(match[1].split("/"))
        if not {*_PARTS}.isdisjoint(scopes):
            return scopes
    return ()


def _work(place: tuple[str, ...], multiplies: bool) -> Work:
    named = lambda known: next((scope for scope in place if scope in known), "")
    return Work(named(_PARTS) or "loop", named(_LAYERS), multiplies)


def microseconds(work: dict[str, Work], run: Callable[[], None]) -> dict[Work, tuple[float, int]]:
    """Time and number of operations of each kind of work in ``run``, which is profiled."""
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
    """Microseconds of a round, unwatched and, by kind of work, watched."""

    def begun() -> Batch:
        batch = start(plan, params, [row]).replace(shared=init_shared(plan))
        return jax.block_until_ready(batch)

    batch = begun()
    program = decode.lower(plan, params, batch.request, batch.shared, batch.state, _FOREVER)
    work = works(program.compile().as_text())
    seconds = []
    for _ in range(_REPEATS):
        batch = begun()
        begin = time.perf_counter()
        batch = jax.block_until_ready(advance(plan, params, batch))
        seconds.append(time.perf_counter() - begin)
    [answer] = read(batch)
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
        row = SequenceParams(prompt, arguments.max_tokens, arguments.temperature, seed=1)
        for name, given in _configs().items():
            made = build.assemble(target, config.read(given), dtype=dtype)
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
    """Microseconds of a watched round by part."""
    shown = Table(
        title="a round, microseconds",
        caption="products: matrix products, with weights or with the caches. rest: norms, "
        "rotations, softmax, sampling, copies. watched: by part, under the profiler.",
    )
    shown.add_column("method", no_wrap=True)
    for name in ("tokens", "round", "watched", *_PARTS, "loop", "products", "rest", "operations"):
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
