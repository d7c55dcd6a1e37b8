"""A server under load: wrong and missing texts, pages and memory that leak, and latencies.

    python -m benchmarks.serve_load [--requests 1000] [--at-once 64] [--model MODEL] [--out FILE]

The server is a process of its own on loopback. Of the requests, 10 % are malformed, 10 % leave at a
random moment, and 10 % have a grammar; temperatures, seeds, lengths, penalties, streams and numbers
of texts are mixed. Afterwards each request runs alone, and must have the same text. With
``--memory-requests`` as many more requests follow, and the resident memory of the server is read
before and after them.
"""

import argparse
import asyncio
import contextlib
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO

import httpx
import numpy as np
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from rich.table import Table

from jspec.checkpoints import installed
from jspec.tools.bench import environment

_RESULTS = Path(__file__).with_name("results")
_WORDS = [
    "def",
    "class",
    "return",
    "import",
    "for",
    "while",
    "if",
    "else",
    "self",
    "print",
    "range",
    "len",
    "open",
    "read",
    "list",
    "dict",
]
_GRAMMARS = (
    {"regex": "[a-c]{2,6} = [0-9]{1,4}"},
    {"choice": ["yes", "no", "maybe"]},
    {"json": {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}},
)
_MALFORMED = (
    {"temperature": -1},
    {"max_tokens": "x"},
    {"prompt": []},
    {"n": 0},
    {"structured_outputs": {"regex": "("}},
    {"logit_bias": {"x": 1}},
)


def requests(count: int, seed: int) -> list[tuple[str, dict]]:
    """Return (kind, body) of requests; kinds are "plain", "grammar", "leaves" and "malformed"."""
    rng = np.random.default_rng(seed)
    made = []
    for index in range(count):
        share = rng.random()
        body = {
            "prompt": " ".join(rng.choice(_WORDS, int(rng.integers(2, 40)))),
            "max_tokens": int(rng.integers(4, 96)),
            "temperature": float(rng.choice([0.0, 0.0, 0.7, 1.0])),
            "seed": index,
            "stream": bool(rng.random() < 0.5),
        }
        if rng.random() < 0.3:
            body |= {"top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1}
        if body["temperature"] and rng.random() < 0.1:
            body["n"] = 2
        if share < 0.1:
            made.append(("malformed", body | _MALFORMED[index % len(_MALFORMED)]))
        elif share < 0.2:
            long = {"max_tokens": 200, "ignore_eos": True, "stream": True}
            made.append(("leaves", body | long))
        elif share < 0.3:
            made.append(("grammar", body | {"structured_outputs": _GRAMMARS[index % 3]}))
        else:
            made.append(("plain", body))
    return made


class Load:
    """Sends requests, so many at once, and notes answers and times."""

    def __init__(self, url: str, at_once: int, seed: int):
        limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=at_once)
        self._client = httpx.AsyncClient(base_url=url, timeout=600, limits=limits)
        self._at_once, self._rng = at_once, np.random.default_rng(seed)
        self.first: list[float] = []  # seconds to the first text of streams
        self.between: list[float] = []  # and between two of its events
        self.whole: list[float] = []  # seconds of answers that were not streamed

    async def run(self, bodies: list[tuple[str, dict]]) -> list[list[str] | int | None]:
        """Return the texts of each request, its status if that is no 200, or None if it left."""
        answers: list = [None] * len(bodies)
        left = iter(enumerate(bodies))

        async def work() -> None:
            for index, (kind, body) in left:
                answers[index] = await self._one(kind, body)

        await asyncio.gather(*(work() for _ in range(self._at_once)))
        return answers

    async def close(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def _one(self, kind: str, body: dict) -> list[str] | int | None:
        if kind == "leaves":
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(float(self._rng.uniform(0, 0.5))):
                    await self._texts(body)
            return None
        return await self._texts(body)

    async def _texts(self, body: dict) -> list[str] | int:
        begin = time.perf_counter()
        if not body.get("stream"):
            response = await self._client.post("/v1/completions", json=body)
            if response.status_code != 200:
                return response.status_code
            self.whole.append(time.perf_counter() - begin)
            return [choice["text"] for choice in response.json()["choices"]]
        texts = [""] * body.get("n", 1)
        last = None
        async with self._client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                return response.status_code
            async for line in response.aiter_lines():
                if not line.startswith("data: {"):
                    continue
                now = time.perf_counter()
                (self.first if last is None else self.between).append(now - (last or begin))
                last = now
                event = json.loads(line.removeprefix("data: "))
                if "error" in event:
                    return event["error"]["code"]
                (choice,) = event["choices"]
                texts[choice["index"]] += choice["text"]
        return texts


@contextlib.contextmanager
def server(
    model: str, num_slots: int, *more: str, length: int = 512
) -> Iterator[tuple[str, subprocess.Popen]]:
    """Run ``jspec serve``, with ``more`` flags; yield its address and process."""
    drafts = '{"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 3}'
    flags = ["--dtype", "float32", "--port", "0", "--max-num-seqs", str(num_slots)]
    flags += ["--max-model-len", str(length), "--speculative-config", drafts]
    command = [sys.executable, "-m", "jspec", "serve", model, *flags, *more]
    with tempfile.TemporaryFile("w+") as log, subprocess.Popen(command, stderr=log) as process:
        try:
            yield _address(process, log), process
        finally:
            process.terminate()
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def _address(process: subprocess.Popen, log: IO[str]) -> str:
    """Return the address of a server once it answers; raise RuntimeError if it ends."""
    while process.poll() is None:
        log.seek(0)
        if ready := re.search(r"at (http://\S+)/v1 ", log.read()):
            return ready[1]
        time.sleep(0.2)
    log.seek(0)
    raise RuntimeError(f"the server did not start: {log.read()[-500:]}")


def resident(pid: int) -> int:
    """Return the resident memory of a process, in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * 4096


def gauge(url: str, name: str) -> float:
    """Return a metric of the server."""
    families = text_string_to_metric_families(httpx.get(f"{url}/metrics").text)
    return next(s.value for family in families for s in family.samples if s.name == name)


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Return p50, p95 and p99."""
    values = np.percentile(seconds, [50, 95, 99]) if seconds else [0.0] * 3
    return {f"p{p}": round(float(v), 4) for p, v in zip((50, 95, 99), values, strict=True)}


async def measure(url: str, pid: int, options: argparse.Namespace) -> dict:
    """Run the load, each request alone, and the requests that only memory is read for."""
    bodies = requests(options.requests, options.seed)
    load = Load(url, options.at_once, options.seed)
    begin = time.perf_counter()
    answers = await load.run(bodies)
    seconds = time.perf_counter() - begin
    pages = await _idle_pages(url)
    alone = Load(url, 1, options.seed)
    sent = [(kind, body) for kind, body in bodies if kind in ("plain", "grammar")]
    expected = iter(await alone.run(sent))
    wrong = unanswered = accepted_malformed = 0
    for (kind, _), answer in zip(bodies, answers, strict=True):
        if kind in ("plain", "grammar"):
            unanswered += not isinstance(answer, list)
            wrong += answer != next(expected)
        accepted_malformed += kind == "malformed" and answer not in (400, 422)
    memory = await _memory(url, pid, load, options)
    await load.close()
    await alone.close()
    return {
        "requests": len(bodies),
        "at_once": options.at_once,
        "seconds": round(seconds, 1),
        "wrong_texts": wrong,
        "unanswered": unanswered,
        "malformed_that_were_accepted": accepted_malformed,
        "pages_held_at_the_end": pages,
        "first_text_seconds": percentiles(load.first),
        "between_events_seconds": percentiles(load.between),
        "whole_answer_seconds": percentiles(load.whole),
        **memory,
    }


async def _idle_pages(url: str) -> float:
    """Return the pages that are held once nothing runs any more."""
    for _ in range(100):
        if not httpx.get(f"{url}/load").json()["server_load"]:
            break
        await asyncio.sleep(0.1)
    await asyncio.sleep(0.5)
    return gauge(url, "jspec:pages_used")


async def _memory(url: str, pid: int, load: Load, options: argparse.Namespace) -> dict:
    """Return the resident memory after each tenth of ``memory_requests``, in MiB."""
    if not options.memory_requests:
        return {}
    sizes = [resident(pid)]
    for part in range(10):
        bodies = requests(options.memory_requests // 10, options.seed + 1 + part)
        await load.run(bodies)
        sizes.append(resident(pid))
    growth = sizes[-1] / sizes[1] - 1
    return {
        "memory_requests": options.memory_requests,
        "resident_mib": [round(size / 2**20) for size in sizes],
        "growth_after_first_tenth": round(growth, 4),
        "pages_held_at_the_very_end": await _idle_pages(url),
    }


def main() -> None:
    """Measure, print and write the result."""
    parser = argparse.ArgumentParser(description="a server under load")
    parser.add_argument("--requests", type=int, default=1000)
    parser.add_argument("--at-once", type=int, default=64)
    parser.add_argument("--memory-requests", type=int, default=0)
    parser.add_argument("--slots", type=int, default=8)
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=_RESULTS / "serve_load.json")
    options = parser.parse_args()
    model = options.model or str(installed.EMBEDDED / "demo" / "target")
    with server(model, options.slots) as (url, process):
        result = asyncio.run(measure(url, process.pid, options))
    table = Table("", "value")
    for name, value in result.items():
        table.add_row(name, str(value))
    Console().print(table)
    options.out.write_text(json.dumps(environment.describe() | {"result": result}, indent=1) + "\n")


if __name__ == "__main__":
    main()
