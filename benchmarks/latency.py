"""jspec against transformers in one run, on the same weights, prompts and K.

    python -m benchmarks.latency [--model DIR --draft DIR] [--out benchmarks/results/latency.json]

Prints a table of methods, batches, temperatures and dtypes with ratios, the cost of a target pass
over N nodes, and ``draft_model`` by K; writes them as JSON with device, versions and commit. Both
sides are timed from token ids to token ids, warmed up, in turns; see ``jspec.tools.bench.timing``.
"""

import argparse
import dataclasses
import json
import os
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

import jspec
from benchmarks import compare, curve, report, workload
from benchmarks.compare import Setting
from benchmarks.contenders import Ours, Theirs
from benchmarks.workload import Case
from jspec.checkpoints import checkpoint
from jspec.engine import programs
from jspec.tools.bench import environment
from jspec.tools.bench.peer import Peer

_RESULTS = Path(__file__).with_name("results")
_DEMO = Path(jspec.__file__).with_name("assets") / "demo"
_WIDTHS = range(1, 17)
_LOG_WIDTH = 160


def main() -> None:
    """Run the command line."""
    arguments = _parser().parse_args()
    console = Console()
    if not console.is_terminal:  # a log or a pipe, in which nothing is cut off
        console = Console(width=_LOG_WIDTH)
    programs.keep_compiled_programs()
    setting = _setting(arguments)
    results = environment.describe() | _describe(setting) | {"rows": [], "curves": {}, "sweep": []}
    with Progress(console=console, transient=True) as progress:
        for dtype in arguments.dtypes:
            ours = Ours(arguments.model, arguments.draft, dtype)
            results["curves"][dtype] = _curve(ours)
            for row in _rows(arguments, setting, ours, dtype, progress):
                results["rows"].append(row)
                progress.console.print(report.line(row))
                _write(arguments.out, results)
            for row in _sweep(arguments, setting, ours, dtype, results["curves"][dtype], progress):
                results["sweep"].append(row)
    results["load_average_after"] = os.getloadavg()
    _write(arguments.out, results)
    if results["rows"]:
        console.print(report.latency_table(results["rows"], results))
    console.print(report.curve_table(results["curves"]))
    if results["sweep"]:
        console.print(report.sweep_table(results["sweep"]))
    console.print(f"wrote {arguments.out}; load average {os.getloadavg()[0]:.1f}")


def _describe(setting: Setting) -> dict:
    """Return the setting with a fingerprint of its prompts."""
    numbers = dataclasses.asdict(setting)
    prompts = numbers.pop("prompts")
    return {
        "setting": numbers,
        "prompts": {
            "sha256": workload.fingerprint(prompts),
            "count": len(prompts),
            "tokens_each": len(prompts[0]),
        },
    }


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="jspec against transformers on torch CPU")
    parser.add_argument("--model", type=Path, default=_DEMO / "target")
    parser.add_argument("--draft", type=Path, default=_DEMO / "draft")
    parser.add_argument("--out", type=Path, default=_RESULTS / "latency.json")
    parser.add_argument("--methods", nargs="*", default=workload.METHODS, choices=workload.METHODS)
    parser.add_argument("--batches", type=int, nargs="+", default=(1, 8))
    parser.add_argument("--temperatures", type=float, nargs="+", default=(0.0, 0.8))
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--num-speculative-tokens", type=int, default=4, metavar="K")
    parser.add_argument("--sweep", type=int, nargs="*", default=(1, 2, 3, 4, 6), metavar="K")
    parser.add_argument("--sweep-temperature", type=float, default=0.8)
    parser.add_argument("--ngram-max", type=int, default=3)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--patience", type=int, default=5, help="further rounds to find quiet")
    parser.add_argument("--quiet", type=float, default=0.1, help="cores others may use meanwhile")
    parser.add_argument("--random-prompts", action="store_true", help="for random weights")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=(1, 2), help="peer: the best of these counts"
    )
    parser.add_argument(
        "--cpp-wrapper", action="store_true", help="peer: compile with inductor's C++ wrapper"
    )
    return parser


def _setting(arguments: argparse.Namespace) -> Setting:
    count, length = arguments.num_prompts, arguments.prompt_tokens
    if arguments.random_prompts:
        size = json.loads((arguments.model / "config.json").read_text())["vocab_size"]
        prompts = workload.random_prompts(size, count, length)
    else:
        prompts = workload.source_prompts(checkpoint.load_tokenizer(arguments.model), count, length)
    return Setting(
        prompts, arguments.max_new_tokens, arguments.repeats, arguments.patience, arguments.quiet
    )


def _rows(
    arguments, setting: Setting, ours: Ours, dtype: str, progress: Progress
) -> Iterator[dict]:
    """Yield the row of every case of one dtype, against a peer of that dtype."""
    if not arguments.methods:
        return
    cases = list(
        workload.cases(
            arguments.methods,
            arguments.batches,
            arguments.temperatures,
            [dtype],
            arguments.num_speculative_tokens,
            arguments.ngram_max,
        )
    )
    with Peer(arguments.model, arguments.draft, dtype) as peer:
        theirs = Theirs(peer, arguments.threads, arguments.cpp_wrapper)
        reference = compare.references(ours, theirs, setting, dtype)
        for case in _tracked(cases, progress):
            row = compare.run_case(case, ours, theirs, setting, reference)
            _add_gaps(row["ours"], ours, setting, reference)
            yield row


def _sweep(
    arguments, setting: Setting, ours: Ours, dtype: str, costs: dict, progress: Progress
) -> Iterator[dict]:
    """Yield sampled ``draft_model`` at each K against plain decoding, with the bound on gain."""
    temperature = arguments.sweep_temperature
    cases = [Case("draft_model", 1, temperature, dtype, depth) for depth in arguments.sweep]
    for case in _tracked(cases, progress):
        row = compare.run_case(case, ours, None, setting, None)
        depth = case.num_speculative_tokens
        widening = costs["relative"][str(depth + 1)]
        row |= {"widening": widening, "draft_cost": costs["draft_cost"]}
        row["bound"] = curve.speedup_bound(
            row["ours"]["acceptance_length"], widening, costs["draft_cost"], depth
        )
        yield row


def _curve(ours: Ours) -> dict:
    """Return V(N) of the target for N up to 16, and the cost of a draft pass relative to V(1)."""
    seconds = curve.pass_seconds(ours.target.config, ours.target.params, _WIDTHS)
    draft = curve.pass_seconds(ours.draft.config, ours.draft.params, [1])[1]
    return {
        "milliseconds": {str(width): 1e3 * value for width, value in seconds.items()},
        "relative": {str(width): value / seconds[1] for width, value in seconds.items()},
        "draft_cost": draft / seconds[1],
    }


def _add_gaps(facts: dict, ours: Ours, setting: Setting, reference: compare.Reference) -> None:
    """Add the gap of the two best logits where a text differs from plain greedy."""
    for key, expected in (
        ("equal_to_own_greedy", reference.ours),
        ("equal_to_peer_greedy", reference.theirs),
    ):
        if key in facts and not facts[key]["equal"]:
            row, position = facts[key]["row"], facts[key]["position"]
            context = setting.prompts[row] + expected[row][:position]
            facts[key]["gap"] = curve.logit_gap(ours.target.config, ours.target.params, context)


def _tracked(cases: list[Case], progress: Progress) -> Iterator[Case]:
    task = progress.add_task("", total=len(cases))
    for case in cases:
        name = f"{case.method} batch {case.batch} T={case.temperature:g} {case.dtype}"
        progress.update(task, description=name)
        yield case
        progress.advance(task)
    progress.remove_task(task)


def _write(path: Path, results: dict) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
