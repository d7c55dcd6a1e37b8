"""Sampled texts of sequences that arrive together, and of the same ones that arrive one by one.

    python -m benchmarks.arrival [--texts 2000] [--dtype float32] [--out FILE.json]

Prompts that arrive together are prefilled in one program, the others alone or beside running rows,
so logits differ in their last bits. The table counts the texts that part, with the draws of
``jspec.core.sampling`` and with a draw by running sums, and shows what one draw costs.
"""

import argparse
import collections
import json
import statistics
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jspec
from jspec.api import config
from jspec.api.build import build_plan
from jspec.checkpoints import loading
from jspec.core import sampling
from jspec.core.types import Array, Params
from jspec.engine import programs
from jspec.engine.engine import Engine
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.bench import environment

_RESULTS = Path(__file__).with_name("results")
_DEMO = Path(jspec.__file__).with_name("assets") / "demo"
_METHODS = {
    "eagle3": {"method": "eagle3", "model": str(_DEMO / "eagle3")},
    "draft_model": {"method": "draft_model", "model": str(_DEMO / "draft")},
}
_RULES = {"rejection": "standard", "block": "block"}
_NUM_DRAFTED = 4
_ROUNDS = 4  # rounds of a launch: few, so that sequences join in the middle of others
_SHAPE = (40, 49152)  # shape of the log-weights whose draw is timed
_BLOCK = 64


def by_running_sum(log_weights: Array, uniform: Array) -> Array:
    """Draw by inverse CDF over blocks and then over tokens: what ``sampling.draw`` replaced."""
    vocab = log_weights.shape[-1]
    peak = log_weights.max(-1, keepdims=True)
    weights = jnp.exp(log_weights - jnp.where(jnp.isneginf(peak), 0, peak))
    weights = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK)))
    weights = weights.reshape(-1, -(-vocab // _BLOCK), _BLOCK)
    sums = weights.sum(-1)
    total = sums.sum(-1, keepdims=True)
    total = jnp.where(total > 0, total, 1)
    coarse, fine = uniform.astype(weights.dtype).T
    block, before = _first_above(sums / total, coarse)
    inside = jnp.take_along_axis(weights, block[:, None, None], 1)[:, 0] / total
    token, _ = _first_above(inside, coarse - before + fine)
    return jnp.minimum(block * _BLOCK + token, vocab - 1)


def _first_above(weights: Array, point: Array) -> tuple[Array, Array]:
    running = jnp.cumsum(weights, -1)
    above = (running > point[:, None]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax(jnp.flip(weights > 0, -1), -1)
    index = jnp.where(above.any(-1), jnp.argmax(above, -1), last).astype(jnp.int32)
    taken = lambda x: jnp.take_along_axis(x, index[:, None], -1)[:, 0]
    return index, taken(running) - taken(weights)


def by_all_gumbels(log_weights: Array, uniform: Array) -> Array:
    """Draw by Gumbel-max over all tokens at once."""
    tokens = jnp.broadcast_to(jnp.arange(log_weights.shape[-1]), log_weights.shape)
    return sampling.argmax(log_weights + sampling.token_noise(uniform, tokens))


_DRAWS = {"running sum": by_running_sum, "blocks": sampling.draw}


# ---------------------------------------------------------------------------------------- texts


def sequences(ids: Sequence[int], count: int, num_tokens: int) -> list[SequenceParams]:
    """Return requests with prompts of 4 to 63 tokens, each with noise of its own."""
    random = np.random.default_rng(3)
    result = []
    for stream in range(count):
        length, begin = random.integers(4, 64), random.integers(0, len(ids) - 64)
        prompt = tuple(ids[begin : begin + length])
        result.append(SequenceParams(prompt, num_tokens, temperature=0.8, seed=7, stream=stream))
    return result


def together(
    plan: Plan, params: Params, work: Sequence[SequenceParams], num_slots: int
) -> list[np.ndarray]:
    """Return the texts of groups that fill an idle engine."""
    engine = _engine(plan, params, work, num_slots)
    answers = []
    for first in range(0, len(work), num_slots):
        answers += engine.run(work[first : first + num_slots], rounds=_ROUNDS)
    return [answer.tokens for answer in answers]


def one_by_one(
    plan: Plan, params: Params, work: Sequence[SequenceParams], num_slots: int
) -> list[np.ndarray]:
    """Return the texts of sequences of which one arrives at every step of the engine."""
    engine, todo = _engine(plan, params, work, num_slots), collections.deque(work)
    tickets = []
    while todo or not engine.is_idle:
        if todo and engine.num_running + engine.num_waiting < num_slots:
            tickets.append(engine.submit(todo.popleft(), rounds=_ROUNDS))
        engine.step()
    return [ticket.answer.tokens for ticket in tickets]


def _engine(plan: Plan, params: Params, work: Sequence[SequenceParams], num_slots: int) -> Engine:
    longest = max(len(each.prompt) + each.max_tokens for each in work)
    return Engine(plan, params, num_slots=num_slots, capacity=longest)


def parted(arguments: argparse.Namespace, method: str, rule: str, ids: Sequence[int]) -> dict:
    """Return how many texts differ between the two arrivals, and where they part."""
    target = loading.load(arguments.target, arguments.dtype)
    asked = _METHODS[method] | {"num_speculative_tokens": _NUM_DRAFTED}
    asked |= {"rejection_sample_method": _RULES[rule], "draft_sample_method": "probabilistic"}
    made = build_plan(target, config.read(asked), dtype=arguments.dtype)
    work = sequences(ids, arguments.texts, arguments.tokens)
    begin = time.perf_counter()
    pairs = zip(
        together(made.plan, made.params, work, arguments.slots),
        one_by_one(made.plan, made.params, work, arguments.slots),
        strict=True,
    )
    positions = [position for pair in pairs if (position := first_difference(*pair)) is not None]
    return {
        "method": method,
        "rule": rule,
        "texts": arguments.texts,
        "differ": len(positions),
        "first_differences": sorted(positions),
        "seconds": round(time.perf_counter() - begin, 1),
    }


def first_difference(one: np.ndarray, other: np.ndarray) -> int | None:
    """Return the first position where two texts differ, or None."""
    if np.array_equal(one, other):
        return None
    shorter = min(len(one), len(other))
    differs = np.flatnonzero(one[:shorter] != other[:shorter])
    return int(differs[0]) if differs.size else shorter


# ----------------------------------------------------------------------------------------- cost


def costs(repeats: int) -> list[dict]:
    """Return milliseconds of one draw, by kind; the kinds take turns."""
    random = np.random.default_rng(0)
    log_weights = jnp.array(3 * random.normal(size=_SHAPE), jnp.float32)
    uniform = jnp.array(random.random((_SHAPE[0], 2)) * [1, 2**-24], jnp.float32)
    kinds = _DRAWS | {"all Gumbels": by_all_gumbels}
    draws = {name: jax.jit(draw) for name, draw in kinds.items()}
    samples: dict[str, list[float]] = {name: [] for name in draws}
    for turn in range(repeats + 1):  # the first turn compiles
        for name, program in draws.items():
            samples[name] += [_milliseconds(program, log_weights, uniform)] * bool(turn)
    return [
        {
            "draw": name,
            "median_ms": round(statistics.median(values), 3),
            "least_ms": round(min(values), 3),
        }
        for name, values in samples.items()
    ]


def _milliseconds(program: Callable, *arrays: Array) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(program(*arrays))
    return 1e3 * (time.perf_counter() - begin)


# --------------------------------------------------------------------------------------- report


def text_table(rows: Sequence[dict], dtype: str) -> Table:
    """Return a line for each draw, method and rule."""
    shown = Table(title=f"texts that differ between joint and staggered arrival, {dtype}, T = 0.8")
    for name in ("draw", "method", "rule", "texts", "differ"):
        shown.add_column(name, justify="right" if name in ("texts", "differ") else "left")
    for row in rows:
        shown.add_row(
            row["draw"], row["method"], row["rule"], str(row["texts"]), str(row["differ"])
        )
    return shown


def cost_table(rows: Sequence[dict]) -> Table:
    """Return a line for each kind of draw."""
    shown = Table(title=f"one draw from log-weights [{_SHAPE[0]}, {_SHAPE[1]}]")
    for name in ("draw", "median ms", "least ms"):
        shown.add_column(name, justify="left" if name == "draw" else "right")
    for row in rows:
        shown.add_row(row["draw"], f"{row['median_ms']:.2f}", f"{row['least_ms']:.2f}")
    return shown


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="joint against staggered arrival")
    parser.add_argument("--target", type=Path, default=_DEMO / "target")
    parser.add_argument("--methods", nargs="+", choices=_METHODS, default=list(_METHODS))
    parser.add_argument("--rules", nargs="+", choices=_RULES, default=list(_RULES))
    parser.add_argument("--draws", nargs="+", choices=_DRAWS, default=list(_DRAWS))
    parser.add_argument("--texts", type=int, default=2000, help="of each row")
    parser.add_argument("--tokens", type=int, default=32, help="of each text")
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=30, help="of each draw that is timed")
    parser.add_argument("--out", type=Path, default=_RESULTS / "arrival.json")
    arguments = parser.parse_args()
    programs.keep_compiled_programs()
    text = (_DEMO / "prompt.txt").read_text(encoding="utf-8")
    ids = (loading.load(arguments.target, arguments.dtype).tokenizer.encode(text) * 8)[:500]
    results = environment.describe() | {"dtype": arguments.dtype, "draws": costs(arguments.repeats)}
    results["texts"] = rows = []
    console, shipped = Console(), sampling.draw
    console.print(cost_table(results["draws"]))
    for draw in arguments.draws:
        jax.clear_caches()  # programs are cached by plan, which does not name the draw
        sampling.draw = _DRAWS[draw]
        for method in arguments.methods:
            for rule in arguments.rules:
                rows.append({"draw": draw} | parted(arguments, method, rule, ids))
                console.print(rows[-1])
                arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    sampling.draw = shipped
    console.print(text_table(rows, arguments.dtype))


if __name__ == "__main__":
    main()
