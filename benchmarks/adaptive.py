"""Adaptive draft lengths against every fixed length and plain decoding.

    python -m benchmarks.adaptive [--method ngram] [--kinds hard] [--out FILE.json]

The target is made to generate given texts, see ``benchmarks.replay``: ``easy`` repeats itself,
``hard`` is random token ids, and ``alternating`` has 64 tokens of each in turn. There are several
texts of each kind, because a single one may be lucky. Costs are measured once before the clock
starts, as ``LLM`` does. All contenders take turns, a kind at a time. A repeat is all texts of
a kind. A
ratio is the geometric mean over the repeats, with the interval of that mean.
"""

import argparse
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import scipy.stats
from rich.console import Console
from rich.table import Table

import jspec
from benchmarks import replay
from benchmarks.methods import Request, Runner, constants
from jspec.api import config
from jspec.api.build import build_plan
from jspec.engine import costs as engine_costs
from jspec.engine import loading
from jspec.engine.batch import start
from jspec.engine.loop import init_shared
from jspec.engine.sequences import SequenceParams
from jspec.tools.bench import environment
from jspec.tools.bench.timing import Contender, joined, race, ratios

_DEMO = Path(jspec.__file__).with_name("assets") / "demo"
_RESULTS = Path(__file__).with_name("results")
_KINDS = ("easy", "hard", "alternating")
_TURN = 64  # tokens of one kind in the alternating text


def texts(tokenizer, count: int, prompt: int, answer: int) -> dict[str, list[Request]]:
    """Return ``count`` requests of each kind."""
    rng = np.random.default_rng(0)
    easy = list(constants(tokenizer, count, prompt, answer))
    noise = rng.integers(4, tokenizer.vocab_size, (count, answer))
    hard = [Request(one.prompt, ids.tolist()) for one, ids in zip(easy, noise, strict=True)]
    first = np.arange(answer) // _TURN % 2 == 0
    mixed = [
        Request(one.prompt, np.where(first, one.answer, other.answer).tolist())
        for one, other in zip(easy, hard, strict=True)
    ]
    return dict(zip(_KINDS, (easy, hard, mixed), strict=True))


def settings(method: str, lengths: list[int]) -> dict[str, dict | None]:
    """Return the contenders by name: fixed lengths, where 0 is plain decoding, and adaptive."""
    model = {"model": _DEMO / "draft"} if method == "draft_model" else {}
    model = {"model": _DEMO / "eagle3"} if method == "eagle3" else model
    longest = {"method": method, "num_speculative_tokens": lengths[-1], **model}
    fixed = {f"K={k}": longest | {"num_speculative_tokens": k} for k in lengths if k}
    return {"K=0": None, **fixed, "adaptive": longest | {"adaptive_length": lengths}}


def measure(arguments: argparse.Namespace, name: str, requests: list[Request]) -> list[dict]:
    """Return a row for each contender."""
    target = loading.load(_DEMO / "target", arguments.dtype)
    field, costs = [], None
    for label, asked in settings(arguments.method, arguments.lengths).items():
        made = build_plan(target, config.read(asked), dtype=arguments.dtype)
        shared = _measured(made, requests[0]) if label == "adaptive" else None
        if shared is not None:
            costs = (shared.seconds / shared.seconds[0]).round(3).tolist()
        runs = [Runner(made.plan, made.params, [one], 0, 0.0, shared) for one in requests]
        for run in runs:  # compiles
            run()
        run_all = lambda runs=runs: joined([run() for run in runs])
        field.append(Contender(label, run_all, limit=arguments.quiet))
    race(field, arguments.repeats, arguments.patience)
    *fixed, adaptive = field
    best = min(fixed, key=lambda each: np.mean([sample.seconds for sample in each.usable]))
    return [
        {
            "text": name,
            "contender": each.name,
            "acceptance_length": round(each.samples[0].num_tokens / each.samples[0].passes, 3),
            "best_fixed": best.name,
            "costs_believed": costs if each is adaptive else None,
            "ratio_to_best_fixed": _ratio(adaptive, best),
            "ratio_to_plain": _ratio(each, fixed[0]),
            **each.summary(),
        }
        for each in field
    ]


def _measured(made, request: Request):
    """Return the shared state with the costs of rounds on this machine."""
    text = jnp.zeros((1, 1024), jnp.int32)
    plan, params = replay.replaying(made.plan, made.params, text)
    row = SequenceParams(tuple(request.prompt), max_tokens=len(request.answer))
    batch = start(plan, params, [row]).replace(shared=init_shared(plan))
    return jax.device_get(engine_costs.calibrate(plan, params, batch))


def _ratio(one: Contender, other: Contender) -> list[float | None]:
    """Return the geometric mean of the speed ratios of undisturbed repeats, and its 95 % interval.

    The interval is None for a single repeat.
    """
    logs = -np.log(ratios(one, other))
    mean = round(float(np.exp(logs.mean())), 3)
    if len(logs) < 2:
        return [mean, None, None]
    spread = scipy.stats.sem(logs) * scipy.stats.t.ppf(0.975, len(logs) - 1)
    return [mean, *np.exp(logs.mean() + np.array([-spread, spread])).round(3).tolist()]


def table(rows: list[dict]) -> Table:
    """Return the rows as a table."""
    shown = Table(
        title="speed relative to plain decoding, and of adaptive relative to the best fixed K"
    )
    for name in ("text", "contender", "tau", "x plain", "95 %", "x best fixed", "95 %"):
        shown.add_column(name, justify="left" if name in ("text", "contender") else "right")
    for row in rows:
        plain, best = _shown(row["ratio_to_plain"]), _shown(row["ratio_to_best_fixed"])
        beside = (f"{best[0]} ({row['best_fixed']})", best[1])
        is_adaptive = row["contender"] == "adaptive"
        shown.add_row(
            row["text"],
            row["contender"],
            f"{row['acceptance_length']:.2f}",
            *plain,
            *(beside if is_adaptive else ("", "")),
        )
    return shown


def _shown(ratio: list[float | None]) -> tuple[str, str]:
    """Format a ratio and its interval."""
    mean, low, high = ratio
    return f"{mean:.3f}", "-" if low is None else f"{low:.3f} - {high:.3f}"


def _others(arguments: argparse.Namespace) -> list[dict]:
    """Return the earlier rows of kinds of text that are not measured now."""
    if not arguments.out.exists():
        return []
    before = json.loads(arguments.out.read_text())
    if before["method"] != arguments.method:
        return []
    return [row for row in before["rows"] if row["text"] not in arguments.kinds]


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="adaptive draft lengths against fixed ones")
    parser.add_argument("--out", type=Path, help="default: benchmarks/results/adaptive_METHOD.json")
    parser.add_argument("--method", default="ngram", choices=("ngram", "draft_model", "eagle3"))
    parser.add_argument("--lengths", type=int, nargs="+", default=[0, 2, 4, 8])
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--texts", type=int, default=4, help="texts of a kind")
    parser.add_argument(
        "--kinds",
        nargs="+",
        choices=_KINDS,
        default=_KINDS,
        help="rows of other kinds stay in --out",
    )
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--answer-tokens", type=int, default=512)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--patience", type=int, default=5)
    parser.add_argument("--quiet", type=float, default=0.1)
    arguments = parser.parse_args()
    arguments.out = arguments.out or _RESULTS / f"adaptive_{arguments.method}.json"
    loading.keep_compiled_programs()
    tokenizer = loading.load(_DEMO / "target").tokenizer
    now = environment.describe()
    results = now | {"method": arguments.method, "rows": _others(arguments)}
    sizes = arguments.texts, arguments.prompt_tokens, arguments.answer_tokens
    for name, requests in texts(tokenizer, *sizes).items():
        if name not in arguments.kinds:
            continue
        rows = measure(arguments, name, requests)
        results["rows"] += [row | {"time": now["time"], "commit": now["commit"]} for row in rows]
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    Console(width=120).print(table(results["rows"]))


if __name__ == "__main__":
    main()
