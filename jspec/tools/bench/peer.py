"""Other programs as contenders: the client of workers such as ``peer_transformers``."""

import contextlib
import dataclasses
import importlib.util
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.api import config
from jspec.tools.bench.contenders import Case, of_categories
from jspec.tools.bench.questions import Request
from jspec.tools.bench.timing import ContenderError, Sample
from jspec.util.messages import shown

MODES = {
    "eager": "transformers",
    "assisted": "transformers, assisted",
    "prompt_lookup": "transformers, prompt lookup",
}
_SCRIPT = Path(__file__).with_name("peer_transformers.py")


class PeerError(ContenderError):
    """A failed call of the worker."""


class Worker:
    """A worker process that answers requests line by line; a context manager.

    A call blocks until the worker has answered, so the two processes never compute at once.
    ``peer_transformers`` documents the protocol; ``info`` is the worker's first reply.
    """

    def __init__(self, python: str | Path, script: Path, *options: str):
        # -E: PYTHONPATH and similar settings are for this process.
        command = [str(python), "-E", str(script), *options]
        # In its own session: Ctrl-C goes to this process, which then ends the worker.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            self.info = self._read()
        except BaseException:  # Ctrl-C too, while it loads
            self.close()
            raise

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, mode: str, prompts: list[list[int]], **settings: Any) -> dict:
        """Make one call; ``peer_transformers`` documents the settings and the reply."""
        request = {"mode": mode, "prompts": prompts, **settings}
        with contextlib.suppress(BrokenPipeError):  # the read raises then
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """End the worker and its own processes, whatever they do."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGTERM)
        self._process.communicate()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"the peer ended with status {self._process.wait()}")
        try:
            answer = json.loads(line)
        except ValueError:
            raise PeerError(f"the peer answered {shown(line)}, which is not JSON") from None
        if not answer.pop("ok"):
            raise PeerError(answer["error"])
        return answer


class Peer(Worker):
    """A worker with transformers and its loaded models."""

    def __init__(self, model: str | Path, draft: str | Path | None = None, dtype: str = "float32"):
        options = ["--model", str(model), "--dtype", dtype]
        options += ["--draft", str(draft)] if draft else []
        super().__init__(sys.executable, _SCRIPT, *options)


@dataclasses.dataclass(eq=False)
class Theirs:
    """A peer as a contender."""

    peer: Worker  # its target is loaded
    mode: str  # one of the worker's, such as ``MODES``
    case: Case  # the settings
    requests: dict[str, list[Request]]  # by category
    settings: dict[str, Any]  # settings of speculative modes, in the worker's protocol
    eos_token_ids: tuple[int, ...]  # ids that end an answer
    makes_batches: bool = False  # whether the worker takes all requests and batches them itself
    counterpart: str = ""  # the contender of jspec that does the same; "" for none
    # target passes and tokens by category, if the worker counts them
    counts: dict[str, Sample] = dataclasses.field(default_factory=dict)

    def __call__(self, **more: Any) -> Sample:
        """Answer all requests; seconds are those inside the worker.

        ``more`` is for the worker too. If it counts the passes of a call, the sample has them.
        """
        return of_categories(
            {name: self._category(some, more) for name, some in self.requests.items()}
        )

    def _category(self, requests: list[Request], more: dict[str, Any]) -> Sample:
        total = Sample(0.0, 0.0, [[] for _ in requests])
        ordered = sorted(range(len(requests)), key=lambda i: len(requests[i].token_ids))
        size = len(requests) if self.makes_batches else self.case.batch_size
        given = {"threads": os.cpu_count()} | self.settings | more
        for first in range(0, len(ordered), size):
            group = ordered[first : first + size]
            answer = self.peer.generate(
                self.mode,
                [list(requests[index].token_ids) for index in group],
                max_new_tokens=self.case.max_tokens,
                temperature=self.case.temperature,
                seed=self.case.seed + first,
                eos_token_ids=list(self.eos_token_ids),
                **given,
            )
            total.seconds += answer["seconds"]
            total.cpu_seconds += answer["cpu_seconds"]
            if answer.get("passes") is not None:
                total.passes = (total.passes or 0) + answer["passes"]
            for index, tokens in zip(group, answer["tokens"], strict=True):
                total.tokens[index] = tokens
        return total


def settings_of(mode: str, configs: Sequence[Mapping[str, Any]]) -> dict[str, int] | None:
    """Return a mode's settings from the first config that does the same; None without one."""
    method = {"assisted": "draft_model", "prompt_lookup": "ngram"}.get(mode)
    if method is None:
        return {}
    given = next((each for each in configs if each.get("method") == method), None)
    if given is None:
        return None
    ours = config.read(given).settings
    same = {"num_speculative_tokens": ours["num_speculative_tokens"]}
    return same | ({"ngram_max": ours["prompt_lookup_max"]} if method == "ngram" else {})


def refusal(model: Any, dtype: str) -> str | None:
    """Return why transformers cannot run the target in ``dtype``; None if it can."""
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    if not isinstance(model, str | os.PathLike) or not Path(model).is_dir():
        return "the model is not a local directory"
    return None if dtype in ("float32", "bfloat16") else f"it is not measured in {dtype}"
