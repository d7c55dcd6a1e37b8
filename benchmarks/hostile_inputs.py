"""Requests that harm a server which is not careful, for ``benchmarks.serve_hostile``."""

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

PATH = "/v1/completions"
_PLAIN = {"prompt": "def add(", "max_tokens": 8, "temperature": 0}


@dataclasses.dataclass(frozen=True)
class Hostile:
    """Requests of one kind.

    Attributes:
      name: in the table.
      bodies: makes the bodies.
      together: whether they are sent at the same time.
      seconds: after these the client leaves; None for the limit of the benchmark.
      leaves_stream: whether the client leaves after the first event of a stream.
    """

    name: str
    bodies: Callable[[], list[bytes]]
    together: bool = True
    seconds: float | None = None
    leaves_stream: bool = False


def _bodies(*changes: dict[str, Any]) -> Callable[[], list[bytes]]:
    return lambda: [json.dumps(_PLAIN | each).encode() for each in changes]


def _grammar(name: str, **grammar: Any) -> Hostile:
    return Hostile(name, _bodies({"structured_outputs": grammar}))


def _doubling_schema(depth: int) -> dict[str, Any]:
    """Return a schema whose objects refer twice to the next one, so many deep."""
    deeper = lambda index: {"$ref": f"#/$defs/d{index + 1}"}
    definitions = {
        f"d{index}": {
            "type": "object",
            "properties": {"a": deeper(index), "b": deeper(index)},
            "required": ["a", "b"],
        }
        for index in range(depth)
    }
    definitions[f"d{depth}"] = {"type": "string"}
    return {"$defs": definitions, "$ref": "#/$defs/d0"}


def _of_grammars() -> Iterator[Hostile]:
    doubling = {"structured_outputs": {"json": _doubling_schema(30)}}
    twice = _bodies(doubling, doubling)
    yield Hostile("schema of 30 doubling references, twice", twice, together=False, seconds=5)
    yield _grammar("then a plain schema", json={"type": "object", "properties": {"a": {}}})
    yield _grammar("regex (.{1,500}){1,500}", regex="(.{1,500}){1,500}")
    yield _grammar("regex ((a{1,50}){1,50}){1,50}", regex="((a{1,50}){1,50}){1,50}")
    yield _grammar("regex [0-9]{100000}", regex="[0-9]{100000}")
    yield _grammar("minLength 1e9", json={"type": "string", "minLength": 10**9})
    yield _grammar("minItems 1e9", json={"type": "array", "items": {}, "minItems": 10**9})
    yield _grammar("enum of 50,000", json={"enum": [f"value {n}" for n in range(50_000)]})


def features() -> list[Hostile]:
    """Return harmless requests that use what compiles when it is first asked for."""
    recursive = {"type": "object", "properties": {"a": {"$ref": "#"}}}
    return [
        Hostile("logit_bias", _bodies({"logit_bias": {"5": 1.0}})),
        _grammar("a regex", regex="[a-c]{2,6}"),
        _grammar("a schema", json={"type": "object", "properties": {"a": {"type": "integer"}}}),
        _grammar("a schema that contains itself", json=recursive),
    ]


def inputs(vocab_size: int) -> list[Hostile]:
    """Return all inputs, for a model with a vocabulary of some size."""
    text = {"prompt": "a " * 3_900_000}
    bias = {"logit_bias": {str(token): 0.5 for token in range(vocab_size)}}
    short = {"bad_words": [f"w{n}" for n in range(2000)]}
    stream = {"stream": True, "max_tokens": 200, "ignore_eos": True}
    return [
        Hostile("stop string of 1,000,000", _bodies({"stop": ["q" * 1_000_000]})),
        Hostile("ten stop strings of 700 kB", _bodies({"stop": ["q" * 700_000] * 10})),
        Hostile("100,000 stop strings", _bodies({"stop": [f"q{n}" for n in range(100_000)]})),
        Hostile("100,000 stop_token_ids", _bodies({"stop_token_ids": [*range(100_000)]})),
        Hostile("logit_bias over the vocabulary", _bodies(bias)),
        Hostile("2,000 bad_words", _bodies(short)),
        Hostile("a bad word of 2,000 tokens", _bodies({"bad_words": ["a b " * 1000]})),
        Hostile("1,000,000 prompts", _bodies({"prompt": [[5]] * 1_000_000})),
        Hostile("six bodies of 8 MB", lambda: _bodies(text)() * 6),
        Hostile("2,000 prompts, n = 1,000", _bodies({"prompt": ["a"] * 2000, "n": 1000})),
        Hostile("2,000,000 wrong items", _bodies({"prompt": [{}] * 2_000_000})),
        Hostile("priority of a wrong type", _bodies({"priority": "x"}, {"priority": 10**30})),
        Hostile("priority null", _bodies({"priority": None})),
        Hostile("8 clients leave a stream", lambda: _bodies(stream)() * 8, leaves_stream=True),
        *_of_grammars(),
        Hostile("nothing, at the end", list),
    ]
