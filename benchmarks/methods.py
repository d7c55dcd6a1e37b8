"""Every drafting method on the demo target: acceptance, cost of a round and speed.

    python -m benchmarks.methods [--head medusa=RUN/export ...] [--out FILE.json]

``--head`` names a method, or one of ``HEADS``.

The workloads come from source files that the demo was not trained on. ``completion`` and ``prose``
are sampled at temperature 1 after a piece of code and after a docstring. ``editing`` (the code
again, with two names changed, a line dropped and a line doubled) and ``repetitive`` (four lines
repeated) are given texts that the target is made to generate, see ``benchmarks.replay``. Requests
run one at a time, so that ``suffix`` knows earlier answers. All methods take turns.
"""

import argparse
import dataclasses
import http
import importlib
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table

import jspec
from benchmarks import replay, workload
from jspec.api import config
from jspec.api.build import build_plan
from jspec.checkpoints import loading
from jspec.core import trees
from jspec.core.history import root_token
from jspec.core.types import Draft, Params
from jspec.engine import programs
from jspec.engine.functional import Batch, advance, start
from jspec.engine.loop import init_shared
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.bench import environment
from jspec.tools.bench.timing import Contender, Sample, race, ratios, spread

_DEMO = Path(jspec.__file__).with_name("assets") / "demo"
_RESULTS = Path(__file__).with_name("results")
_PROSE = ("argparse", "heapq", "statistics", "http.client", "json")
_REPEATED = 4  # lines of a text that repeats itself
_LOG_WIDTH = 160


# Heads whose names in the table are not those of a method.
HEADS = {
    "eagle1": {"method": "eagle"},
    "pard": {"method": "draft_model", "parallel_drafting": True},
    "p_eagle": {"method": "eagle3", "parallel_drafting": True},
}


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and the answer if it is given."""

    prompt: list[int]
    answer: list[int] | None = None


def workloads(tokenizer: Any, count: int, prompt: int, answer: int) -> dict[str, list[Request]]:
    """Return ``count`` requests of each kind, in token ids."""
    encode = lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    code = workload.source_prompts(tokenizer, count, prompt)
    given = workload.edits(tokenizer, count, prompt, answer)
    prose = [encode(importlib.import_module(name).__doc__)[:prompt] for name in _PROSE]
    return {
        "completion": [Request(piece) for piece in code],
        "prose": [Request(prose[index % len(prose)]) for index in range(count)],
        "editing": [Request(*pair) for pair in given],
        "repetitive": list(constants(tokenizer, count, prompt, answer)),
    }


def constants(tokenizer: Any, count: int, prompt: int, answer: int) -> Iterator[Request]:
    """Yield requests of four repeated lines, which start at a different line of their table."""
    lines = [
        f"    {status.name} = {status.value}, {status.phrase!r}\n" for status in http.HTTPStatus
    ]
    for index in range(count):
        first = 7 * index % (len(lines) - _REPEATED)
        text = "".join(lines[first : first + _REPEATED] * 20)
        ids = tokenizer.encode(text, add_special_tokens=False)
        yield Request(ids[:prompt], ids[prompt : prompt + answer])


@dataclasses.dataclass(frozen=True)
class Idle(jspec.NoDrafter):
    """A drafter of ``tree_size`` invalid nodes, to time the target's pass alone."""

    tree_size: int = 1

    max_depth = property(lambda self: self.tree_size - 1)

    def propose(self, params, request, shared, memory, history):
        """Return the root and invalid nodes."""
        root = root_token(history)[:, None]
        draft = jnp.pad(root, ((0, 0), (0, self.max_depth)))
        valid = jnp.broadcast_to(jnp.arange(self.tree_size) == 0, draft.shape)
        chain = trees.chain(self.max_depth)
        return Draft(draft, chain, valid, max_depth=self.max_depth), memory


def configs(num_tokens: int, heads: dict[str, str]) -> dict[str, dict | None]:
    """Return the configs by their names in the table."""
    neural = {"num_speculative_tokens": num_tokens}
    eagle = {"method": "eagle3", "model": _DEMO / "eagle3"} | neural
    suffix = {"method": "suffix"}
    return {
        "none": None,
        "ngram": {"method": "ngram", "num_speculative_tokens": 12},
        "suffix": suffix,
        "token_recycling": {"method": "token_recycling", "tree_size": 16, "tree_top_k": 4} | neural,
        "draft_model": {"method": "draft_model", "model": _DEMO / "draft"} | neural,
        "eagle3": eagle,
        **{
            name: HEADS.get(name, {"method": name}) | {"model": path} | neural
            for name, path in heads.items()
        },
        "hybrid, merge": {"method": "hybrid", "parts": [suffix, eagle]},
        "hybrid, choose": {"method": "hybrid", "parts": [suffix, eagle], "combine": "choose"},
    }


@dataclasses.dataclass
class Runner:
    """A plan with its weights, which runs all requests of a workload one by one."""

    plan: Plan
    params: Params
    requests: Sequence[Request]
    max_new_tokens: int
    temperature: float
    shared: Any = None  # state at the start of every run; None for an empty one

    def __call__(self) -> Sample:
        """Time decoding; prompts are prefilled before the clock starts."""
        shared = init_shared(self.plan) if self.shared is None else self.shared
        spent, answers = 0.0, []
        cpu = time.process_time()
        for index, request in enumerate(self.requests):
            plan, params, batch = self.begin(request, index, shared)
            begin = time.perf_counter()
            batch = jax.block_until_ready(advance(plan, params, batch))
            spent += time.perf_counter() - begin
            shared = batch.shared
            answers += batch.answers
            if request.answer is not None:
                assert answers[-1].tokens.tolist() == request.answer, "the text was not generated"
        return Sample(
            spent,
            time.process_time() - cpu,
            [answer.tokens.tolist() for answer in answers],
            passes=sum(answer.rounds for answer in answers),
        )

    def begin(
        self, request: Request, index: int = 0, shared: Any = None
    ) -> tuple[Plan, Params, Batch]:
        """Return the plan, the weights and the batch of a request with its prompt prefilled.

        ``index`` selects the random stream; ``shared`` None is the state of every run's start.
        """
        plan, params = self.plan, self.params
        if shared is None:
            shared = init_shared(plan) if self.shared is None else self.shared
        if request.answer is not None:
            text = np.zeros((1, 1024), np.int32)
            whole = request.prompt + request.answer
            text[0, : len(whole)] = whole
            plan, params = replay.replaying(plan, params, jnp.asarray(text))
        size = self.max_new_tokens if request.answer is None else len(request.answer)
        row = SequenceParams(
            tuple(request.prompt),
            max_tokens=size,
            seed=index,
            stream=0,
            temperature=self.temperature if request.answer is None else 0.0,
        )
        batch = start(plan, params, [row]).replace(shared=jax.tree.map(jnp.asarray, shared))
        return plan, params, jax.block_until_ready(batch)


def measure(arguments: argparse.Namespace, name: str, requests: list[Request]) -> list[dict]:
    """Return a row for each method."""
    target = loading.load(_DEMO / "target", arguments.dtype)
    field, plans, first = [], {}, {}
    for method, asked in track(
        configs(arguments.num_speculative_tokens, arguments.heads).items(), name, transient=True
    ):
        made = build_plan(target, config.read(asked), dtype=arguments.dtype)
        plans[method] = made.plan
        runs = {method: (made.plan, made.params)}
        size = made.plan.drafter.tree_size
        idle = f"target alone, N={size}"
        if size > 1 and idle not in first:
            plan = Plan(made.plan.target, Idle(tree_size=size), node_buckets=(size,))
            runs[idle] = plan, Params(made.params.target)
        for label, (plan, params) in runs.items():
            run = Runner(plan, params, requests, arguments.max_new_tokens, arguments.temperature)
            run()
            first[label] = run()
            field.append(Contender(label, run, limit=arguments.quiet))
    race(field, arguments.repeats, arguments.patience)
    by_name = {each.name: each for each in field}
    plain = by_name["none"]
    pass_of = lambda each: statistics.median(s.seconds / s.passes for s in each.usable)
    rows = []
    for method, plan in plans.items():
        each, size = by_name[method], plan.drafter.tree_size
        alone = plain if size == 1 else by_name[f"target alone, N={size}"]
        rows.append(
            {
                "workload": name,
                "method": method,
                "nodes": size,
                "acceptance_length": round(first[method].num_tokens / first[method].passes, 3),
                "distinct_tokens": sum(len(set(row)) for row in first[method].tokens)
                / len(requests),
                "ratio": {end: round(x, 3) for end, x in spread(ratios(each, plain)).items()},
                "round": round(pass_of(each) / pass_of(plain), 3),
                "verifying": round(pass_of(alone) / pass_of(plain), 3),
                **each.summary(),
            }
        )
    return rows


def table(rows: list[dict]) -> Table:
    """Return acceptance length and speed-up of each method by workload."""
    names = list(dict.fromkeys(row["workload"] for row in rows))
    shown = Table(
        title="acceptance length (and speed-up over plain decoding, median of turns)",
        caption="round: the cost of a round in plain passes, and of it the target's pass over N "
        "nodes; the rest is drafting.",
    )
    shown.add_column("method", no_wrap=True)
    for name in (*names, "N", "round"):
        shown.add_column(name, justify="right")
    for method in dict.fromkeys(row["method"] for row in rows):
        by_workload = {row["workload"]: row for row in rows if row["method"] == method}
        first = by_workload[names[0]]
        cells = [
            f"{row['acceptance_length']:.2f} ({row['ratio']['median']:.2f})"
            for row in by_workload.values()
        ]
        shown.add_row(
            method, *cells, str(first["nodes"]), f"{first['round']:.2f}, {first['verifying']:.2f}"
        )
    return shown


def _head(text: str) -> tuple[str, str]:
    method, _, path = text.partition("=")
    if not path:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=DIRECTORY")
    return method, path


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="all drafting methods side by side")
    parser.add_argument("--out", type=Path, default=_RESULTS / "methods.json")
    parser.add_argument("--head", type=_head, action="append", default=[], metavar="NAME=DIR")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--temperature", type=float, default=1.0, help="of sampled texts")
    parser.add_argument("--num-speculative-tokens", type=int, default=4)
    parser.add_argument("--num-prompts", type=int, default=8)
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--max-new-tokens", type=int, default=96)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=int, default=3)
    parser.add_argument("--quiet", type=float, default=0.1)
    arguments = parser.parse_args()
    arguments.heads = dict(arguments.head)
    programs.keep_compiled_programs()
    tokenizer = loading.load(_DEMO / "target").tokenizer
    sizes = arguments.num_prompts, arguments.prompt_tokens, arguments.max_new_tokens
    results = environment.describe() | {"rows": []}
    for name, requests in workloads(tokenizer, *sizes).items():
        results["rows"] += measure(arguments, name, requests)
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(results, indent=1) + "\n")
    console = Console()
    if not console.is_terminal:  # a log or a pipe, in which nothing is cut off
        console = Console(width=_LOG_WIDTH)
    console.print(table(results["rows"]))


if __name__ == "__main__":
    main()
