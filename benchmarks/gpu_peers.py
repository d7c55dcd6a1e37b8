"""jspec beside transformers on one device, with the same random weights of an 8B model's shape.

    python -m benchmarks.gpu_peers [--config 8b] [--peer PYTHON] [--out FILE.json]

jspec is ``LLM`` with its defaults, plain and with ``ngram``. transformers decodes with a static
cache and torch.compile, and by prompt lookup, which it has for one sequence alone. PYTHON has
torch for the device. Every program is a process. They take turns if the device has memory for
both, else one runs after the other (``interleaved`` in the results).

Prompts are random tokens that repeat, another prompt for every call. A random model accepts hardly
any draft, so drafting shows its costs here and not its gains. ``ms_per_token`` is of a sequence, by
the difference of a short and a long answer, without the prompt. All answers are greedy.
"""

import argparse
import contextlib
import dataclasses
import functools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks import rounds
from jspec.checkpoints import checkpoint
from jspec.models import decoder
from jspec.tools.bench import files, timing
from jspec.tools.bench.peer import PeerError, Worker
from jspec.tools.bench.timing import Contender, Sample

_SCRIPT = Path(__file__).parent / "peers" / "random_weights_worker.py"
_SHAPES = {"8b": "Llama-3.1-8B", "tiny": "tiny"}
_MODES = {"jspec": ("plain", "ngram"), "transformers": ("eager", "compiled", "prompt_lookup")}
_DRAFTING = ("ngram", "prompt_lookup")
_K = {"num_speculative_tokens": 4, "ngram_max": 3}
_SHORT = 4  # tokens of the answer that is subtracted
_SHARE = 0.45  # share of the device's memory for JAX, if torch has the rest
_ROOM = 2.6  # times the weights: two models with their caches and workspaces
_FINDS_TORCH = """
import sys
from importlib.util import find_spec
sys.exit(None in map(find_spec, ("torch", "transformers")))
"""
# In a process that ends, since the device admits the workers only after it.
_FACTS = """
import json
from benchmarks import rounds
from jspec.tools.bench import environment
print(json.dumps(environment.describe("benchmarks.gpu_peers") | {"room": rounds.room()}))
"""


@dataclasses.dataclass
class Mode:
    """A way of decoding of a program, for so many sequences at a time."""

    program: str
    mode: str
    worker: Worker
    settings: argparse.Namespace
    batch: int
    calls: int = 0
    texts: list[list[int]] = dataclasses.field(default_factory=list)  # answers of the first call
    tokens_per_pass: float = 1.0
    ms_per_token: list[float] = dataclasses.field(default_factory=list)

    def first(self) -> None:
        """Compile, and count the passes of the target if it drafts."""
        counts = {"count_passes": True} if self.mode in _DRAFTING else {}
        answer = self._call(self.settings.max_tokens, 0, **counts)
        self.texts = answer["tokens"]
        if counts:
            self.tokens_per_pass = sum(map(len, self.texts)) / answer["passes"]
        for tokens in (_SHORT, self.settings.max_tokens):  # torch compiles again at its second call
            self._call(tokens, 1)

    def __call__(self) -> Sample:
        """Time a short and a long answer; return the long one."""
        self.calls += 1
        short = self._call(_SHORT, 2 * self.calls)
        long = self._call(self.settings.max_tokens, 2 * self.calls + 1)
        steps = self.settings.max_tokens - _SHORT
        self.ms_per_token.append(1e3 * (long["seconds"] - short["seconds"]) / steps)
        cpu_seconds = short["cpu_seconds"] + long["cpu_seconds"]
        return Sample(long["seconds"], cpu_seconds, long["tokens"])

    def _call(self, tokens: int, seed: int, **more: Any) -> dict[str, Any]:
        settings = self.settings
        most = rounds.SHAPES[_SHAPES[settings.config]].vocab_size
        half = np.random.default_rng(seed).integers(
            100, most, (self.batch, settings.prompt_tokens // 2)
        )
        prompts = np.tile(half, 2).tolist()
        return self.worker.generate(
            self.mode, prompts, max_new_tokens=tokens, temperature=0.0, **_K, **more
        )


@contextlib.contextmanager
def started(
    programs: Sequence[str], device: str, settings: argparse.Namespace
) -> Iterator[dict[str, Worker | PeerError]]:
    """Start the programs' processes at the same time; yield each, or why it did not start."""
    config = rounds.SHAPES[_SHAPES[settings.config]]
    raw = checkpoint.hf_config(config) | {"dtype": settings.dtype}
    length = settings.prompt_tokens + settings.max_tokens
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        Path(folder, "config.json").write_text(json.dumps(raw), encoding="utf-8")
        options = ["--model", folder, "--length", str(length), "--device", device]
        if len(programs) > 1:
            options += ["--memory-share", str(_SHARE)]

        def start(program: str) -> Worker | PeerError:
            python = settings.peer if program == "transformers" else sys.executable
            try:
                return stack.enter_context(Worker(python, _SCRIPT, "--program", program, *options))
            except PeerError as error:
                return error

        with ThreadPoolExecutor() as pool:
            yield dict(zip(programs, pool.map(start, programs), strict=True))


def measure(
    workers: dict[str, Worker],
    batch: int,
    expected: dict[int, list[list[int]]],
    settings: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Return a row of each way of decoding; ``expected`` gets the first texts of a batch size."""
    modes = [
        Mode(program, mode, worker, settings, batch)
        for program, worker in workers.items()
        for mode in _MODES[program]
        if mode in settings.modes and (batch == 1 or mode != "prompt_lookup")
    ]
    field = [Contender(f"{each.program}, {each.mode}", each) for each in modes]

    def compile_all(program: str) -> None:
        for contender in field:
            if contender.run.program == program:
                try:
                    contender.run.first()
                except PeerError as error:
                    contender.failed = str(error)

    with ThreadPoolExecutor() as pool:
        list(pool.map(compile_all, workers))
    timing.race(field, settings.repeats, patience=0)
    return [_row(each, expected) for each in field]


def _row(contender: Contender, expected: dict[int, list[list[int]]]) -> dict[str, Any]:
    run, batch = contender.run, contender.run.batch
    facts = {"program": run.program, "mode": run.mode, "batch": batch}
    if not contender.samples:
        return facts | {"failed": contender.failed}
    equal = np.array(run.texts) == np.array(expected.setdefault(batch, run.texts))
    return facts | {
        "tokens_per_second": round(contender.median, 2),
        "ms_per_token": round(statistics.median(run.ms_per_token), 4),
        "tokens_per_pass": round(run.tokens_per_pass, 3),
        "equal_tokens": round(float(equal.mean()), 3),  # to the first program's, in bfloat16 too
        "seconds": [round(sample.seconds, 5) for sample in contender.samples],
        "foreign_cores": [sample.foreign for sample in contender.samples],
    }


def groups(room: int, settings: argparse.Namespace) -> list[list[str]]:
    """Return the programs that are on the device at the same time."""
    config = rounds.SHAPES[_SHAPES[settings.config]]
    init = functools.partial(decoder.init_params, config=config, dtype=settings.dtype)
    needed = rounds.size_of(jax.eval_shape(init, jax.random.key(0)))
    fits = settings.together if settings.together is not None else room > _ROOM * needed
    asked = [name for name in _MODES if set(_MODES[name]) & set(settings.modes)]
    return [asked] if fits else [[name] for name in asked]


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the rows as a table."""
    figures = "tokens_per_second", "ms_per_token", "tokens_per_pass", "equal_tokens"
    shown = Table("program", "mode", "batch", *(name.replace("_", " ") for name in figures))
    for row in rows:
        cells = [row[name] for name in ("program", "mode", "batch")]
        cells += [row["failed"]] if "failed" in row else [row[name] for name in figures]
        shown.add_row(*map(str, cells))
    return shown


def facts_of(words: Sequence[str]) -> dict[str, Any]:
    """Return device, free memory, versions, commit and command."""
    command = [sys.executable, "-c", _FACTS, *words]
    ran = subprocess.run(command, capture_output=True, text=True)
    if ran.returncode:
        raise SystemExit(f"no device answered: {ran.stderr.strip().splitlines()[-1]}")
    return json.loads(ran.stdout.splitlines()[-1])


def main(words: Sequence[str] | None = None) -> None:
    """Measure, write the results after every batch size, and print a table."""
    words = sys.argv[1:] if words is None else words
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu_peers", description=__doc__.splitlines()[0]
    )
    parser.add_argument("--config", choices=_SHAPES, default="8b")
    parser.add_argument("--dtype", default="bfloat16", choices=("float32", "bfloat16"))
    parser.add_argument("--peer", default=sys.executable, help="Python with torch, transformers")
    modes = [mode for some in _MODES.values() for mode in some]
    asked = [mode for mode in modes if mode != "eager"]
    parser.add_argument("--modes", nargs="+", choices=modes, default=asked)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--prompt-tokens", type=int, default=512)
    parser.add_argument("--max-tokens", type=int, default=68)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=170, help="begin no batch size after")
    parser.add_argument(
        "--together",
        action=argparse.BooleanOptionalAction,
        help="both programs on the device at a time; by its memory if left out",
    )
    parser.add_argument("--out", type=Path)
    settings = parser.parse_args(words)
    if settings.max_tokens <= _SHORT or settings.prompt_tokens < 2:
        parser.error(f"--max-tokens must be more than {_SHORT}, and --prompt-tokens at least 2.")
    has_peer = set(_MODES["transformers"]) & set(settings.modes)
    if has_peer and subprocess.run([settings.peer, "-c", _FINDS_TORCH]).returncode:
        parser.error(
            f"--peer {settings.peer} has no torch or no transformers; name a Python that has them, "
            "such as .venv-peers/transformers/bin/python of make peers."
        )
    end = time.monotonic() + settings.seconds
    facts = facts_of(words)
    jax.config.update("jax_platforms", "cpu")  # The device is for the workers.
    asked, expected = groups(facts.pop("room"), settings), {}
    device = {"gpu": "cuda"}.get(facts["device"]["platform"], facts["device"]["platform"])
    results = facts | {"interleaved": len(asked) == 1, "programs": {}, "rows": [], "left_out": []}
    for programs in asked:
        with started(programs, device, settings) as entered:
            workers = {name: each for name, each in entered.items() if isinstance(each, Worker)}
            results["programs"] |= {
                name: each.info if name in workers else {"failed": str(each)}
                for name, each in entered.items()
            }
            print(*results["programs"].items(), sep="\n", flush=True)
            for batch in settings.batch:
                if time.monotonic() > end:
                    results["left_out"] += [f"{name}, batch {batch}" for name in workers]
                    continue
                results["rows"] += measure(workers, batch, expected, settings)
                Console(width=120).print(table(results["rows"]))
                if settings.out is not None:
                    files.write_json(results, settings.out)
    if results["left_out"]:
        print(f"left out after --seconds {settings.seconds:g}: {'; '.join(results['left_out'])}")
        if settings.out is not None:
            files.write_json(results, settings.out)


if __name__ == "__main__":
    main()
