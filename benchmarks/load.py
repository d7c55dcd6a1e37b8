"""Speculation under load: chosen K and verified nodes against every fixed K and plain decoding.

    python -m benchmarks.load [--methods ngram eagle3 draft_model] [--loads 1 8 32] [--out FILE]
    python -m benchmarks.load --target MODEL --heads DIR --questions spec_bench.jsonl

So many users at a time each send a request, and the next one when it is answered. By default the
demo's target is made to generate given texts (``benchmarks.replay``): ``easy`` repeats itself,
``hard`` is random token ids, and ``mixed`` has 64 tokens of each in turn, so that users are in
different ones. With ``--questions`` the model answers them. All contenders run in an engine with a
slot for each user, take turns, and must give the same texts. A run before the first turn compiles,
and learns costs. ``nodes`` are those that the target's matmuls ran over, per token.
"""

import argparse
import collections
import dataclasses
import http
import itertools
import json
import statistics
import time
from collections.abc import Sequence
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

import jspec
from benchmarks import replay
from jspec.api import config
from jspec.api.build import build_plan
from jspec.checkpoints import loading
from jspec.checkpoints.loading import LoadedModel
from jspec.core.types import Params
from jspec.engine import programs
from jspec.engine.engine import Engine
from jspec.engine.pages import PAGE_SIZE, Pool
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.bench import environment
from jspec.tools.bench.questions import read

_RESULTS = Path(__file__).with_name("results")
_DEMO = Path(jspec.__file__).with_name("assets") / "demo"
_KINDS = ("easy", "hard", "mixed")
_REPEATED = 4  # lines of the easy text
_TURN = 64  # tokens of one kind in the mixed text
_LENGTH = 768  # tokens of a text
_ROUNDS = 8  # rounds of a launch: an answer is read every few tokens, as a server does
_METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3},
    "eagle3": {"method": "eagle3", "model": "eagle3"},  # folders in --heads
    "draft_model": {"method": "draft_model", "model": "draft"},
}


@dataclasses.dataclass
class Run:
    """Seconds of a run and of each request, and the nodes that the target's matmuls ran over."""

    seconds: float
    latencies: list[float]
    texts: dict[int, list[int]]
    num_passed: int

    @property
    def num_tokens(self) -> int:
        """Tokens of all answers."""
        return sum(map(len, self.texts.values()))

    @property
    def speed(self) -> float:
        """Tokens a second."""
        return self.num_tokens / self.seconds


class Contender:
    """An engine of one method and K, whose texts may be given."""

    def __init__(self, plan: Plan, params: Params, users: int, capacity: int, text: np.ndarray):
        if text.size:
            plan, params = replay.replaying(plan, params, jnp.asarray(text[None]))
        pages = users * -(-capacity // PAGE_SIZE) + 1
        pool = Pool(plan, params, num_pages=pages, enable_prefix_caching=False)
        self._engine = Engine(plan, params, num_slots=users, capacity=capacity, pool=pool)
        self._users = users

    def run(self, work: Sequence[SequenceParams]) -> Run:
        """Run all requests, one a user at a time."""
        engine, todo = self._engine, collections.deque(enumerate(work))
        running, latencies, texts, passed = {}, [], {}, engine.num_passed
        begin = time.perf_counter()
        while todo or running:
            while todo and len(running) < self._users:
                index, sequence = todo.popleft()
                ticket = engine.submit(sequence, rounds=_ROUNDS)
                running[ticket] = index, time.perf_counter()
            engine.step()
            for ticket in [ticket for ticket in running if ticket.finished]:
                index, sent = running.pop(ticket)
                latencies.append(time.perf_counter() - sent)
                texts[index] = ticket.answer.tokens.tolist()
        seconds = time.perf_counter() - begin
        return Run(seconds, latencies, texts, engine.num_passed - passed)


def given_texts(tokenizer) -> dict[str, np.ndarray]:
    """Return a text of each kind, int32 [T]."""
    lines = [f"    {each.name} = {each.value}, {each.phrase!r}\n" for each in http.HTTPStatus]
    repeated = "".join(lines[:_REPEATED] * 20)
    ids = tokenizer.encode(repeated, add_special_tokens=False, verbose=False)
    easy = np.array(ids[:_LENGTH], np.int32)
    hard = np.random.default_rng(0).integers(4, tokenizer.vocab_size, _LENGTH).astype(np.int32)
    mixed = np.where(np.arange(_LENGTH) // _TURN % 2 == 0, easy, hard)
    return dict(zip(_KINDS, (easy, hard, mixed), strict=True))


def of_text(text: np.ndarray, count: int) -> list[SequenceParams]:
    """Return requests that begin at different positions of a text, of 64 to 192 tokens."""
    random, result = np.random.default_rng(1), []
    for stream in range(count):
        length, tokens = random.integers(32, _LENGTH - 192), int(random.integers(64, 192))
        prompt = tuple(text[:length].tolist())
        result.append(SequenceParams(prompt, max_tokens=tokens, stream=stream))
    return result


def of_questions(path: Path, target: LoadedModel, count: int) -> list[SequenceParams]:
    """Return the first questions of every category in turn, as chats of up to 64 to 192 tokens."""
    random, by_category = np.random.default_rng(1), collections.defaultdict(list)
    for question in read([path]):
        by_category[question.category].append(question.turns[0])
    turns = itertools.chain(*itertools.zip_longest(*by_category.values()))
    prompts, result = itertools.cycle(filter(None, list(turns))), []
    while len(result) < count:
        chat = [{"role": "user", "content": next(prompts)}]
        encoded = target.tokenizer.apply_chat_template(chat, add_generation_prompt=True)
        ids = tuple(getattr(encoded, "input_ids", encoded))
        if len(ids) <= _LENGTH - 192:
            stops, tokens = tuple(loading.text_ends(target)), int(random.integers(64, 192))
            stream = len(result)
            result.append(SequenceParams(ids, tokens, stop_token_ids=stops, stream=stream))
    return result


def configs(arguments: argparse.Namespace, method: str) -> dict[str, dict | None]:
    """Return the contenders by name: plain decoding, fixed K's, and the chosen one."""
    asked, lengths = dict(_METHODS[method]), sorted(arguments.lengths)
    if "model" in asked:
        asked["model"] = str(arguments.heads / asked["model"])
    fixed = {f"K={k}": asked | {"num_speculative_tokens": k} for k in lengths}
    chosen = asked | {"num_speculative_tokens": lengths[-1], "adaptive_length": [0, *lengths]}
    return {"plain": None, **fixed, "chosen": chosen}


def measure(
    arguments: argparse.Namespace, target: LoadedModel, method: str, users: int
) -> list[dict]:
    """Return a row for each kind of text and contender."""
    kinds = given_texts(target.tokenizer)
    if arguments.questions:
        kinds = {arguments.questions.stem: np.zeros(0, np.int32)}
    count, rows = max(arguments.requests, arguments.rounds_of_users * users), []
    plans = {
        name: build_plan(target, config.read(asked), dtype=arguments.dtype)
        for name, asked in configs(arguments, method).items()
    }
    for kind, text in kinds.items():
        work = of_text(text, count) if text.size else []
        work = work or of_questions(arguments.questions, target, count)
        capacity = max(len(each.prompt) + each.max_tokens for each in work)
        field = {
            name: Contender(made.plan, made.params, users, capacity, text)
            for name, made in plans.items()
        }
        runs: dict[str, list[Run]] = {name: [] for name in field}
        for turn in range(arguments.repeats + 1):
            order = list(field.items())[:: -1 if turn % 2 else 1]
            for name, contender in order:
                runs[name].append(contender.run(work))
        expected = runs["plain"][0].texts
        for name, results in runs.items():
            same = statistics.mean(
                run.texts[index] == expected[index] for run in results for index in expected
            )
            assert same == 1 or not text.size, f"{name} gave other texts"
            rows.append(_row(method, users, kind, name, runs, same))
    return rows


def _row(
    method: str, users: int, kind: str, name: str, runs: dict[str, list[Run]], same: float
) -> dict:
    """Return the medians of a contender's turns, and its ratios to others turn by turn."""
    results = {each: turns[1:] for each, turns in runs.items()}  # the first turn compiled
    speed = lambda turns: statistics.median(run.speed for run in turns)
    best = max((each for each in results if each[:2] == "K="), key=lambda x: speed(results[x]))
    ratio = lambda other: round(
        statistics.median(
            one.speed / run.speed for one, run in zip(results[name], results[other], strict=True)
        ),
        3,
    )
    mine = results[name]
    latency = statistics.median(statistics.mean(run.latencies) for run in mine)
    return {
        "method": method,
        "users": users,
        "text": kind,
        "contender": name,
        "tokens_per_second": round(speed(mine), 1),
        "mean_latency": round(latency, 4),
        "ratio_to_plain": ratio("plain"),
        "best_fixed": best,
        "ratio_to_best_fixed": ratio(best),
        "nodes_per_token": round(
            statistics.median(run.num_passed / run.num_tokens for run in mine), 3
        ),
        "same_texts": round(same, 3),
    }


def table(rows: Sequence[dict]) -> Table:
    """Return the chosen contender of every load beside the best fixed K."""
    shown = Table()
    columns = "method", "text", "users", "x plain", "best K", "x plain", "x best K", "nodes", "s"
    for index, name in enumerate(columns):
        shown.add_column(name, justify="left" if index < 2 else "right")
    for row in rows:
        if row["contender"] != "chosen":
            continue
        cell = row["method"], row["users"], row["text"], row["best_fixed"]
        names = "method", "users", "text", "contender"
        [fixed] = [other for other in rows if tuple(other[name] for name in names) == cell]
        shown.add_row(
            row["method"],
            row["text"],
            str(row["users"]),
            f"{row['ratio_to_plain']:.2f}",
            row["best_fixed"],
            f"{fixed['ratio_to_plain']:.2f}",
            f"{row['ratio_to_best_fixed']:.2f}",
            f"{row['nodes_per_token']:.2f}",
            f"{row['mean_latency']:.2f}",
        )
    return shown


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(description="speculation under load")
    parser.add_argument("--target", type=Path, default=_DEMO / "target")
    parser.add_argument("--heads", type=Path, default=_DEMO, help="folder with draft/ and eagle3/")
    parser.add_argument("--questions", type=Path, help="Spec-Bench's file, for a chat model")
    parser.add_argument("--methods", nargs="+", choices=_METHODS, default=list(_METHODS))
    parser.add_argument("--loads", type=int, nargs="+", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--lengths", type=int, nargs="+", default=[2, 4], help="K's")
    parser.add_argument("--requests", type=int, default=12, help="at least")
    parser.add_argument("--rounds-of-users", type=int, default=2, help="requests of each user")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, default=_RESULTS / "load.json")
    arguments = parser.parse_args()
    programs.keep_compiled_programs()
    target = loading.load(arguments.target, arguments.dtype)
    results = environment.describe() | {"rows": []}
    console = Console(width=120)
    for method in arguments.methods:
        for users in arguments.loads:
            rows = measure(arguments, target, method, users)
            results["rows"] += rows
            console.print(table(rows))
            arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    console.print(table(results["rows"]))


if __name__ == "__main__":
    main()
