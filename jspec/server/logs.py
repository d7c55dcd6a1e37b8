"""Logs: lines of text or of JSON, each with the id of its request, on standard error."""

import contextlib
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from jspec.server.gate import request_id

FORMATS = ("text", "json")


def install(kind: str) -> None:
    """Write the lines of the server to standard error, as "text" or as "json"."""
    handler = logging.StreamHandler()
    handler.setFormatter(_Json() if kind == "json" else _Text())
    log = logging.getLogger("jspec")
    log.handlers, log.propagate = [handler], False
    log.setLevel(logging.INFO)


@contextlib.contextmanager
def written(write: Callable[[str], None]) -> Iterator[None]:
    """Write the messages of ``LLM`` while it loads."""
    handler = logging.Handler()
    handler.emit = lambda record: write(record.getMessage())
    log = logging.getLogger("jspec.api.llm")
    before = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before)


def write_json(words: str) -> None:
    """Write a line of JSON to standard error, before ``install`` too."""
    record = logging.LogRecord("jspec", logging.INFO, "", 0, words, None, None)
    print(_Json().format(record), file=sys.stderr, flush=True)


def _facts(record: logging.LogRecord) -> dict[str, Any]:
    facts = getattr(record, "facts", {})
    return {k: round(v, 4) if isinstance(v, float) else v for k, v in facts.items()}


class _Text(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return one line, and a traceback below it if there is one."""
        clock = time.strftime("%H:%M:%S", time.localtime(record.created))
        facts = "".join(f" {name}={value}" for name, value in _facts(record).items())
        line = f"{clock} {record.levelname} [{request_id.get()}] {record.getMessage()}{facts}"
        return line + (f"\n{self.formatException(record.exc_info)}" if record.exc_info else "")


class _Json(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """Return one object on a line."""
        line = {
            "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(record.created)),
            "level": record.levelname.lower(),
            "request_id": request_id.get(),
            "message": record.getMessage(),
            **_facts(record),
        }
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line)
