"""The client of the ``peer_transformers`` worker."""

import contextlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

_SCRIPT = Path(__file__).with_name("peer_transformers.py")


class PeerError(RuntimeError):
    """The worker could not do what it was asked."""


class Peer:
    """A worker process with transformers and its loaded models; a context manager.

    A call blocks until the worker has answered, so the two processes never compute at once.
    """

    def __init__(self, model: str | Path, draft: str | Path | None = None, dtype: str = "float32"):
        # -E: PYTHONPATH and its like are of this process.
        command = [sys.executable, "-E", str(_SCRIPT), "--model", str(model), "--dtype", dtype]
        if draft:
            command += ["--draft", str(draft)]
        # Of a session of its own: Ctrl-C is for this process, which then ends the worker.
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.info = self._read()

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def generate(self, mode: str, prompts: list[list[int]], **settings: Any) -> dict:
        """One call; see the protocol in ``peer_transformers`` for settings and the reply."""
        return self._ask(op="generate", mode=mode, prompts=prompts, **settings)

    def close(self) -> None:
        """Ends the worker, whatever it does."""
        self._process.terminate()
        self._process.communicate()

    def _ask(self, **request: Any) -> dict:
        with contextlib.suppress(BrokenPipeError):  # what is read says so
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        return self._read()

    def _read(self) -> dict:
        line = self._process.stdout.readline()
        if not line:
            raise PeerError(f"the peer ended with status {self._process.wait()}")
        answer = json.loads(line)
        if not answer.pop("ok"):
            raise PeerError(answer["error"])
        return answer
