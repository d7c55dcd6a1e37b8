"""Batch files in OpenAI's format: each line is a request, and each line of the output its answer.

Answers are appended to ``OUT.partial`` as they come, and the file becomes ``OUT`` at the end. A run
that was killed goes on where it was: a line that was cut in the middle is answered again.
"""

import asyncio
import dataclasses
import json
import os
import uuid
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, BinaryIO

import pydantic
from starlette.responses import Response

from jspec.server import chat, completions, errors, responses, sizes
from jspec.server.errors import RequestError
from jspec.server.fields import ChatFields, CompletionFields, ResponseFields
from jspec.server.serving import Server
from jspec.util import atomic_files, values
from jspec.util.messages import shown

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None

_ENDPOINTS: dict[str, tuple[type[pydantic.BaseModel], Callable[..., Awaitable[Any]]]] = {
    "/v1/completions": (CompletionFields, completions.answer),
    "/v1/chat/completions": (ChatFields, chat.answer),
    "/v1/responses": (ResponseFields, responses.answer),
}


@dataclasses.dataclass(frozen=True)
class Line:
    """A request of a batch file."""

    custom_id: str
    url: str
    body: Any


def read(path: Path) -> list[Line]:
    """Return the requests of a batch file.

    Raises:
      ValueError: the file or a line is malformed, or two lines have the same ``custom_id``.
    """
    try:
        # A line ends at \n alone: JSON strings may hold other characters that end lines elsewhere.
        texts = path.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, ValueError) as error:
        raise ValueError(f"-i {path}: {' '.join(str(error).split())[:200]}") from None
    lines: list[Line] = []
    known: set[str] = set()
    for number, text in enumerate(texts, 1):
        if not text.strip(" \t\r"):
            continue
        try:
            lines.append(_line(text, known))
        except ValueError as error:
            raise ValueError(f"-i {path}, line {number}: {error}") from None
    if not lines:
        raise ValueError(f"-i {path}: the file holds no request.")
    return lines


def _line(text: str, known: set[str]) -> Line:
    given = values.json_of(text)
    if not isinstance(given, dict):
        raise ValueError("a line must be a JSON object.")
    name, url = given.get("custom_id"), given.get("url")
    if not isinstance(name, str) or name in known:
        raise ValueError(f"custom_id={shown(name)} must be text that no other line has.")
    if url not in _ENDPOINTS:
        raise ValueError(f"url={shown(url)} must be one of {', '.join(_ENDPOINTS)}.")
    if given.get("method", "POST") != "POST":
        raise ValueError(f'method={shown(given["method"])} must be "POST".')
    known.add(name)
    return Line(name, url, given.get("body"))


class Output:
    """The answers of a batch, and those that an earlier run wrote.

    Args:
      path: of the whole output. It must not exist.
      lines: the requests.

    Raises:
      ValueError: the output exists, cannot be written, or belongs to another input.
    """

    def __init__(self, path: Path, lines: list[Line]):
        atomic_files.check_output("-o", path)
        if path.exists():
            raise ValueError(f"-o {path} exists already; name another file, or remove it.")
        self._path, self._partial = path, path.with_name(f"{path.name}.partial")
        self._file: BinaryIO = self._partial.open("a+b")
        try:
            _lock(self._file, self._partial)
            self.done = self._known({line.custom_id for line in lines})
        except BaseException:
            self._file.close()
            raise

    def _known(self, ids: set[str]) -> set[str]:
        """Return the ids of whole answers of an earlier run, and cut what is behind them."""
        done, size = set(), 0
        self._file.seek(0)
        for text in self._file:
            name = _id_of(text)
            if name is None:
                break  # the run was killed while it wrote this line
            if name not in ids:
                raise ValueError(
                    f"{self._partial} has answers to another input ({shown(name)}); remove it, or "
                    "name another output."
                )
            done.add(name)
            size += len(text)
        self._file.truncate(size)
        return done

    def write(self, answer: dict[str, Any]) -> None:
        """Append an answer; it is on the disk when this returns."""
        self._file.write(json.dumps(answer).encode() + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self.done.add(answer["custom_id"])

    def close(self) -> None:
        """Close the partial file, which a later run continues."""
        self._file.close()

    def finish(self) -> None:
        """Give the file its name."""
        self.close()
        os.replace(self._partial, self._path)


def _lock(file: BinaryIO, path: Path) -> None:
    """Refuse to write beside another process; the lock ends with the file, or the process."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        raise ValueError(f"another run writes {path}; wait for it, or name another.") from None


def _id_of(text: bytes) -> str | None:
    try:
        return json.loads(text)["custom_id"] if text.endswith(b"\n") else None
    except (ValueError, KeyError, TypeError):
        return None


async def run(
    server: Server,
    lines: list[Line],
    output: Output,
    *,
    num_together: int,
    on_answer: Callable[[], None] = lambda: None,
) -> int:
    """Answer the requests that ``output`` lacks; return the number of those that failed.

    Args:
      server: answers.
      lines: the requests.
      output: takes the answers.
      num_together: most requests at a time.
      on_answer: called after each answer.
    """
    left = iter([line for line in lines if line.custom_id not in output.done])
    num_failed = 0

    async def work() -> None:
        nonlocal num_failed
        for line in left:
            answer = await _answer(server, line)
            num_failed += answer["error"] is not None
            output.write(answer)
            on_answer()

    workers = [asyncio.ensure_future(work()) for _ in range(num_together)]
    try:
        await asyncio.gather(*workers)
    finally:  # an answer could not be written
        for worker in workers:
            worker.cancel()
    return num_failed


async def _answer(server: Server, line: Line) -> dict[str, Any]:
    """Return the line of the output for a request."""
    kind, answer = _ENDPOINTS[line.url]
    status, body, failure = 200, None, None
    try:
        sizes.check(server, line.body)
        fields = kind.model_validate(line.body)
        if fields.stream:
            raise RequestError("stream has no meaning in a batch; leave it out.", param="stream")
        body = await answer(server, fields)
        assert not isinstance(body, Response)
    except pydantic.ValidationError as error:
        failure = errors.of_fields(error.errors())
    except Exception as error:
        failure = errors.of(error)
    if failure is not None:
        status, body = failure.status, failure.body
    response = {"status_code": status, "request_id": uuid.uuid4().hex, "body": body}
    return {
        "id": f"batch_req_{uuid.uuid4().hex}",
        "custom_id": line.custom_id,
        "response": response,
        "error": None if failure is None else failure.body["error"],
    }
