"""Chains, static and dynamic trees of one EAGLE head, at equal budgets of nodes.

    python -m training.distill_eagle --target jspec/assets/demo/target --data stdlib --output RUN
    python -m benchmarks.tree --head RUN/export [--out benchmarks/results/tree.json]

Prints acceptance length and tokens/s beside autoregression, greedy and sampled. All contenders of a
temperature and dtype take turns; see ``jspec.tools.bench.timing``.
"""

import argparse
import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.progress import track
from rich.table import Table

import jspec
from benchmarks import workload
from benchmarks.compare import Setting, difference
from benchmarks.ours import sample
from jspec import LLM
from jspec.drafters.trees import tree_settings
from jspec.engine import loading
from jspec.tools.bench import environment
from jspec.tools.bench.timing import Contender, race

_DEMO = Path(jspec.__file__).with_name("assets") / "demo"
_RESULTS = Path(__file__).with_name("results")
_LOG_WIDTH = 160
_DEPTH, _TOP_K = 6, 8  # of dynamic and sampled trees, where the budget allows


@dataclasses.dataclass(frozen=True)
class Draft:
    """A kind of draft: its name in the table, and what it adds to ``speculative_config``."""

    name: str
    size: int  # N, the root included
    keys: dict

    @property
    def samples(self) -> bool:
        """Whether it is only of interest at a temperature: greedily, it is the static tree."""
        return "rejection_sample_method" in self.keys


def drafts(size: int) -> Iterator[Draft]:
    """What a budget of ``size`` nodes can be spent on."""
    depth, top_k = min(_DEPTH, size - 1), min(_TOP_K, size - 1)
    static = [list(path) for path in tree_settings.best(size, depth, top_k).paths]
    drawn = {"tree": "sampled", "tree_size": size, "tree_depth": depth, "tree_top_k": top_k}
    yield Draft("chain", size, {"num_speculative_tokens": size - 1})
    yield Draft("static", size, {"tree": static, "draft_sample_method": "greedy"})
    yield Draft("eagle2", size, drawn | {"tree": "eagle2"})
    for rule in ("standard", "block"):
        yield Draft(f"sampled, {rule}", size, drawn | {"rejection_sample_method": rule})


def measure(arguments: argparse.Namespace, dtype: str, temperature: float) -> list[dict]:
    """One row for each draft of each budget, and one for autoregression."""
    target = loading.load(arguments.model, dtype)
    head = loading.load_head(arguments.head, target.config, dtype=dtype)
    method = {"method": "eagle3", "model": head}
    kinds = [None] + [
        draft
        for size in arguments.sizes
        for draft in drafts(size)
        if temperature > 0 or not draft.samples
    ]
    prompts = workload.source_prompts(
        target.tokenizer, arguments.num_prompts, arguments.prompt_tokens
    )
    setting = Setting(
        prompts, arguments.max_new_tokens, arguments.repeats, arguments.patience, arguments.quiet
    )
    field, texts = [], {}
    for kind in track(kinds, f"compiling, {dtype}, T={temperature:g}", transient=True):
        llm = LLM(target, method | kind.keys if kind else None)
        run = lambda llm=llm: sample(llm, 1, temperature, prompts, setting.max_new_tokens, 0)
        run()
        name = f"{kind.name} {kind.size}" if kind else "autoregressive"
        texts[name] = run()
        field.append(Contender(name, run, limit=setting.limit))
    race(field, setting.repeats, setting.patience)
    plain, *_ = field
    return [
        {
            "draft": kind.name if kind else "autoregressive",
            "nodes": kind.size if kind else 1,
            "dtype": dtype,
            "temperature": temperature,
            "acceptance_length": texts[each.name].num_tokens / texts[each.name].passes,
            "distinct_tokens": sum(len(set(row)) for row in texts[each.name].tokens) / len(prompts),
            "equal_to_plain": difference(texts[each.name].tokens, texts[plain.name].tokens),
            "ratio_best": round(each.best / plain.best, 3),
            "ratio_median": round(each.median / plain.median, 3),
            **each.summary(),
        }
        for kind, each in zip(kinds, field, strict=True)
    ]


def table(rows: list[dict]) -> Table:
    """For people."""
    columns = Table(title="drafts of an EAGLE-3 head; x: beside autoregression in the same dtype")
    columns.add_column("draft", no_wrap=True)
    for name in ("nodes", "dtype", "T", "= greedy", "distinct", "tau", "tokens/s", "x", "quiet"):
        columns.add_column(name, justify="right")
    for row in rows:
        greedy = row["temperature"] == 0
        columns.add_row(
            row["draft"],
            str(row["nodes"]),
            row["dtype"],
            f"{row['temperature']:g}",
            ("yes" if row["equal_to_plain"]["equal"] else "no") if greedy else "-",
            f"{row['distinct_tokens']:.0f}",
            f"{row['acceptance_length']:.2f}",
            f"{row['tokens_per_second_best']:.0f}",
            f"{row['ratio_best']:.2f} ({row['ratio_median']:.2f})",
            f"{row['quiet_samples']}:{len(row['seconds'])}",
        )
    return columns


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="trees of an EAGLE head at equal budgets")
    parser.add_argument("--model", type=Path, default=_DEMO / "target")
    parser.add_argument("--head", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=_RESULTS / "tree.json")
    parser.add_argument("--sizes", type=int, nargs="+", default=(5, 9, 16, 32), metavar="N")
    parser.add_argument("--temperatures", type=float, nargs="+", default=(0.0, 1.0))
    parser.add_argument("--dtypes", nargs="+", default=("float32", "bfloat16"))
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--quiet", type=float, default=0.1)
    arguments = parser.parse_args()
    loading.keep_compiled_programs()
    results = environment.describe() | {"rows": []}
    for dtype in arguments.dtypes:
        for temperature in arguments.temperatures:
            results["rows"] += measure(arguments, dtype, temperature)
            arguments.out.parent.mkdir(parents=True, exist_ok=True)
            arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    console = Console()
    if not console.is_terminal:  # a log or a pipe: nothing is cut off there
        console = Console(width=_LOG_WIDTH)
    console.print(table(results["rows"]))


if __name__ == "__main__":
    main()
