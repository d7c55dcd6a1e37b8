"""The program of a child process: compiles grammars, one task after another; no JAX.

A frame is the length of a line of JSON (8 bytes), the line, and the arrays that it lists. A task
has an ``operation`` and its arguments. The reply has a ``result`` and arrays, or an ``error``.
"""

import contextlib
import json
import math
import os
import signal
import sys
from collections.abc import Mapping
from typing import Any, BinaryIO

import llguidance
import numpy as np

from jspec.grammar import limits, sources, tables
from jspec.grammar.tables import Vocabulary

try:
    import resource
except ImportError:  # Windows has none; the time limit of the parent is all there is
    resource = None

Arrays = Mapping[str, np.ndarray]


def write(stream: BinaryIO, header: dict[str, Any], arrays: Arrays) -> None:
    """Write a frame."""
    listed = [(name, part.dtype.str, part.size) for name, part in arrays.items()]
    line = json.dumps({**header, "arrays": listed}).encode()
    stream.write(len(line).to_bytes(8, "little") + line)
    for part in arrays.values():
        stream.write(np.ascontiguousarray(part).data)
    stream.flush()


def read(stream: BinaryIO) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Return the header and the arrays of a frame; raise EOFError at the end."""
    header = json.loads(_read(stream, int.from_bytes(_read(stream, 8), "little")))
    arrays = {}
    for name, kind, size in header.pop("arrays"):
        kind = np.dtype(kind)
        arrays[name] = np.frombuffer(_read(stream, size * kind.itemsize), kind)
    return header, arrays


def _read(stream: BinaryIO, size: int) -> bytes:
    data = stream.read(size)
    if len(data) < size:
        raise EOFError
    return data


class _Child:
    """The state of the process: the vocabulary that it was given last."""

    def __init__(self) -> None:
        self._vocabulary: Vocabulary | None = None
        self._tokenizer: llguidance.LLTokenizer | None = None

    def run(self, header: dict[str, Any], arrays: Arrays) -> tuple[Any, Arrays]:
        """Run a task; return its result and its arrays."""
        match header:
            case {"operation": "vocabulary", "size": size}:
                self._vocabulary, self._tokenizer = Vocabulary(**arrays, size=size), None
            case {"operation": "pattern", "schema": text}:
                return sources.pattern_of_schema(text), {}
            case {"operation": "source", "kind": kind, "value": value}:
                return sources.source_of(kind, value), {}
            case {"operation": "compiled", "pattern": pattern, "most": most}:
                return None, tables.compiled(pattern, self._vocabulary, tables.Most(*most))
            case {"operation": "followed", "source": source}:
                return self._stop_reason(source), {}
        return None, {}

    def _stop_reason(self, source: str) -> str | None:
        """Return why a grammar allows nothing; None if it allows something."""
        if self._tokenizer is None:
            self._tokenizer = _tokenizer(self._vocabulary)
        matcher = llguidance.LLMatcher(self._tokenizer, source, limits=sources.parser_limits())
        matcher.compute_bitmask()
        ended = matcher.is_error() or matcher.is_stopped()
        return matcher.stop_reason() if ended else None


def _tokenizer(vocabulary: Vocabulary) -> llguidance.LLTokenizer:
    """Return a tokenizer with the spellings of a vocabulary, for the cost of its masks alone."""
    wrapped = llguidance.TokenizerWrapper(_Spelled(vocabulary))
    ends = vocabulary.ends.tolist()
    return llguidance.LLTokenizer(wrapped, n_vocab=vocabulary.size, eos_token=ends)


class _Spelled:
    """A vocabulary as llguidance reads one; it splits texts into any tokens that spell them."""

    def __init__(self, vocabulary: Vocabulary):
        self.bos_token_id, self.eos_token_id = None, int(vocabulary.ends[0])
        self.tokens = [b"<%d>" % token for token in range(vocabulary.size)]
        data, begin, ids = vocabulary.text.tobytes(), 0, iter(vocabulary.ids.tolist())
        self._id_of: dict[bytes, int] = {}
        for length, count in zip(vocabulary.lengths, vocabulary.counts, strict=True):
            spelling = data[begin : begin + length]
            begin += length
            for token in [next(ids) for _ in range(count)]:
                self.tokens[token] = spelling
                self._id_of[spelling] = token
        spelled = set(vocabulary.ids.tolist())
        self.special_token_ids = [id for id in range(vocabulary.size) if id not in spelled]

    def __call__(self, text: str) -> list[int]:
        if not isinstance(text, str):  # bytes, which llguidance tries once
            raise TypeError(f"text={text!r} must be a str.")
        tokens, data = [], text.encode()
        while data:
            sizes = range(min(len(data), 32), 0, -1)
            size = next((size for size in sizes if data[:size] in self._id_of), 0)
            tokens += [self._id_of[data[:size]]] if size else []
            data = data[max(size, 1) :]
        return tokens


def _bound(seconds: float) -> None:
    """Let this process use so many more seconds of a processor, and no more memory than allowed."""
    if resource is None:
        return
    used = resource.getrusage(resource.RUSAGE_SELF)
    most = math.ceil(used.ru_utime + used.ru_stime + seconds)
    bounds = (resource.RLIMIT_CPU, most), (resource.RLIMIT_AS, limits.MEMORY)
    for kind, bound in (*bounds, (resource.RLIMIT_CORE, 0)):
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (bound, resource.getrlimit(kind)[1]))


def main() -> None:
    """Answer tasks from stdin until it ends."""
    stdin, stdout = sys.stdin.buffer, os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # what libraries print is no reply
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # A terminal sends it; the parent decides.
    child = _Child()
    with contextlib.suppress(EOFError):
        while True:
            header, arrays = read(stdin)
            _bound(header.pop("seconds"))
            try:
                result, arrays = child.run(header, arrays)
            except (ValueError, RecursionError) as error:
                write(stdout, {"error": str(error)}, {})
            else:
                write(stdout, {"result": result}, arrays)
