"""A server between hostile requests and others: their waits, its memory, and its end.

    python -m benchmarks.serve_hostile [--model MODEL] [--seconds 20] [--out FILE]

The server is a process of its own on loopback. Two clients send plain greedy requests all the time,
and a third asks for /health every 100 ms. What compiles at its first use is used once before.
Meanwhile the inputs of ``benchmarks.hostile_inputs`` are sent one after another. For each the
longest wait of a plain request and of /health is reported, the resident memory of the server and
its children, and the plain texts that were wrong. Then the server gets SIGTERM. Every step is
bounded in time.
"""

import argparse
import concurrent.futures
import contextlib
import itertools
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.markdown import Markdown

from benchmarks import hostile_inputs, serve_load
from benchmarks.hostile_inputs import PATH, Hostile
from jspec.checkpoints import installed
from jspec.tools.bench import environment

_RESULTS = Path(__file__).with_name("results")
_PROMPTS = ("def add(", "import os\n", "class Node:", "for i in range(", "return self", "x = [1, 2")
_HEADERS = {"Content-Type": "application/json"}
_PLAIN_SECONDS = 60  # time of a plain request, until it counts as lost
_RECOVERY_SECONDS = 15  # after an input, for the others to be answered again
_TOTAL_SECONDS = 330  # for all inputs; those left are skipped
_FEATURE_SECONDS = 120  # time of the first use of a feature
_END_SECONDS = 60  # after SIGTERM, until the process is killed
_COLUMNS = ("input", "answer", "plain s", "health s", "MiB before", "MiB after", "plain texts")


class Steady:
    """Calls a function again and again in a thread, and notes the longest call."""

    def __init__(self, call: Callable[[], None], pause: float = 0.0):
        self._call, self._pause = call, pause
        self._begin: float | None = None
        self._longest = 0.0
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._is_over.wait(self._pause):
            self._begin = begin = time.perf_counter()
            self._call()
            self._begin = None
            self._longest = max(self._longest, time.perf_counter() - begin)

    def reset(self) -> None:
        """Leave out the calls that have ended."""
        self._longest = 0.0

    @property
    def longest(self) -> float:
        """Seconds of the longest call, of the one that runs too."""
        begin = self._begin
        return max(self._longest, 0.0 if begin is None else time.perf_counter() - begin)

    @property
    def waiting(self) -> float:
        """Seconds of the call that runs."""
        begin = self._begin
        return 0.0 if begin is None else time.perf_counter() - begin

    def close(self) -> None:
        """End after the call that runs."""
        self._is_over.set()
        self._thread.join(5)


class Others:
    """Clients that a hostile request must not harm."""

    def __init__(self, url: str):
        self._plain = httpx.Client(base_url=url, timeout=_PLAIN_SECONDS)
        self._health = httpx.Client(base_url=url, timeout=_PLAIN_SECONDS)
        self._expected = [self._text(prompt) for prompt in _PROMPTS]
        self._next = itertools.cycle(range(len(_PROMPTS)))
        self.counts = {"right": 0, "wrong": 0, "lost": 0}
        self.plain = [Steady(self._check_text) for _ in range(2)]
        self.health = Steady(self._check_health, 0.1)

    def _text(self, prompt: str) -> str:
        body = {"prompt": prompt, "max_tokens": 24, "temperature": 0}
        return self._plain.post(PATH, json=body).raise_for_status().json()["choices"][0]["text"]

    def _check_text(self) -> None:
        index = next(self._next)
        try:
            kind = "right" if self._text(_PROMPTS[index]) == self._expected[index] else "wrong"
        except (httpx.HTTPError, ValueError):
            kind = "lost"
            time.sleep(0.1)
        self.counts[kind] += 1

    def _check_health(self) -> None:
        with contextlib.suppress(httpx.HTTPError):
            self._health.get("/health")

    def reset(self) -> None:
        """Begin a new window."""
        self.counts = {"right": 0, "wrong": 0, "lost": 0}
        for each in (*self.plain, self.health):
            each.reset()

    def wait_until_answered(self, seconds: float) -> None:
        """Return once all are answered quickly again, or after some seconds."""
        until = time.perf_counter() + seconds
        while time.perf_counter() < until:
            if max(each.waiting for each in (*self.plain, self.health)) < 1:
                return
            time.sleep(0.1)

    def close(self) -> None:
        """End all clients."""
        for each in (*self.plain, self.health):
            each.close()


def send(url: str, body: bytes, seconds: float, leaves_stream: bool = False) -> str:
    """Send a body; return the status and the message in short, or why there is none."""
    try:
        with httpx.Client(base_url=url, timeout=seconds) as client:
            if leaves_stream:
                with client.stream("POST", PATH, content=body, headers=_HEADERS) as response:
                    next(response.iter_lines())
                return "left the stream"
            response = client.post(PATH, content=body, headers=_HEADERS)
    except httpx.TimeoutException:
        return f"no answer in {seconds:g} s"
    except (httpx.HTTPError, StopIteration) as error:
        return type(error).__name__
    if response.status_code == 200:
        return "200"
    return f"{response.status_code} {response.json()['error']['message']}"[:110]


def send_all(url: str, hostile: Hostile, bodies: Sequence[bytes], seconds: float) -> str:
    """Send the bodies of an input; return the different answers, "-" without bodies."""
    each = min(seconds, hostile.seconds or seconds)
    workers = len(bodies) if hostile.together else 1
    with concurrent.futures.ThreadPoolExecutor(max(workers, 1)) as threads:
        sent = [
            threads.submit(send, url, body, seconds=each, leaves_stream=hostile.leaves_stream)
            for body in bodies
        ]
    return "; ".join(dict.fromkeys(future.result() for future in sent)) or "-"


def resident(pid: int) -> int:
    """Return the resident memory of a process and its children, in MiB."""
    parents = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(path.parent.name)] = int(path.read_text().rpartition(")")[2].split()[1])
    family, size = {pid}, 0
    while len(family) != size:
        size = len(family)
        family |= {child for child, parent in parents.items() if parent in family}
    total = 0
    for member in family:
        with contextlib.suppress(OSError):
            total += serve_load.resident(member)
    return total >> 20


def measure(
    url: str, pid: int, rows: Sequence[Hostile], seconds: float, pause: float = 3
) -> list[dict]:
    """Return the results of all inputs, and those of no input first.

    Args:
      url: of the server.
      pid: of its process.
      rows: the inputs.
      seconds: after these a client leaves.
      pause: seconds after an input, in which others are watched too; three times as many for none.
    """
    others, results = Others(url), []
    until = time.perf_counter() + _TOTAL_SECONDS
    try:
        for hostile in [Hostile("nothing", list), *rows]:
            if time.perf_counter() > until:
                results.append({"input": hostile.name, "answer": "skipped: no time is left"})
                continue
            bodies, before = hostile.bodies(), resident(pid)
            others.reset()
            answer = send_all(url, hostile, bodies, seconds)
            time.sleep(pause if bodies else 3 * pause)
            others.wait_until_answered(_RECOVERY_SECONDS)
            results.append(
                {
                    "input": hostile.name,
                    "answer": answer,
                    "plain_seconds": round(max(each.longest for each in others.plain), 2),
                    "health_seconds": round(others.health.longest, 2),
                    "mib_before": before,
                    "mib_after": resident(pid),
                    "plain_texts": dict(others.counts),
                }
            )
            print(results[-1], file=sys.stderr, flush=True)
    finally:
        others.close()
    return results


def vocab_size(url: str) -> int:
    """Return the size of the vocabulary, which an error of the server names."""
    answer = httpx.post(f"{url}/detokenize", json={"tokens": [2**31 - 1]}, timeout=60)
    return int(re.search(r"vocabulary of (\d+)", answer.text)[1])


def seconds_to_end(process: subprocess.Popen) -> float | None:
    """Send SIGTERM; return the seconds until the process has ended, None if it did not."""
    begin = time.perf_counter()
    process.terminate()
    try:
        process.wait(_END_SECONDS)
    except subprocess.TimeoutExpired:
        return None
    return round(time.perf_counter() - begin, 1)


def table(rows: Sequence[dict], end: float | None) -> str:
    """Return the results in Markdown; of refusals the status alone."""
    lines = [f"| {' | '.join(_COLUMNS)} |", f"|{'---|' * len(_COLUMNS)}"]
    for row in rows:
        counts = row.get("plain_texts", {})
        equal = f"{counts.get('right', 0)} of {sum(counts.values())} equal" if counts else ""
        names = ("input", "answer", "plain_seconds", "health_seconds", "mib_before", "mib_after")
        shown = row | {"answer": re.sub(r"\b([45]\d\d) .*?(?=; \d{3}|$)", r"\1", row["answer"])}
        cells = [str(shown.get(name, "")).replace("|", "\\|") for name in names]
        lines.append(f"| {' | '.join([*cells, equal])} |")
    words = f"in {end:g} s" if end is not None else f"not in {_END_SECONDS} s"
    return "\n".join(
        [*lines, "", f"After SIGTERM with 10 s for running requests it ended {words}."]
    )


def main() -> None:
    """Measure, print and write the results."""
    parser = argparse.ArgumentParser(description="a server between hostile requests and others")
    parser.add_argument("--model", help="default: the embedded model")
    parser.add_argument("--max-model-len", type=int, default=512)
    parser.add_argument("--seconds", type=float, default=20, help="after these a client leaves")
    parser.add_argument("--only", help="inputs whose names hold this text")
    parser.add_argument("--out", type=Path, default=_RESULTS / "serve_hostile.json")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # the server ends with this process
    model = options.model or str(installed.EMBEDDED / "demo" / "target")
    length = options.max_model_len
    with serve_load.server(model, 8, "--shutdown-timeout", "10", length=length) as (url, process):
        for feature in hostile_inputs.features():
            answer = send_all(url, feature, feature.bodies(), _FEATURE_SECONDS)
            print(f"first use of {feature.name}: {answer}", file=sys.stderr, flush=True)
        rows = hostile_inputs.inputs(vocab_size(url))
        rows = [row for row in rows if not options.only or options.only in row.name]
        results = measure(url, process.pid, rows, options.seconds)
        end = seconds_to_end(process)
    text = table(results, end)
    Console().print(Markdown(text))
    written = environment.describe() | {"result": results, "seconds_to_end": end}
    options.out.write_text(json.dumps(written, indent=1) + "\n")
    os._exit(0)  # clients may still wait for a server that was killed


if __name__ == "__main__":
    main()
