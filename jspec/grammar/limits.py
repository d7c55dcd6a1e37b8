"""The limits of ``structured_outputs``, which are checked before any work.

Checks cost about the length of a setting. What passes them is compiled in a child process, within
``SECONDS`` and ``MEMORY``: a short pattern may have a huge automaton.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

MOST_BYTES = 1 << 20  # bytes of a schema, a pattern, a grammar, or all choices together
MOST_LEVELS = 400  # brackets inside each other in a schema, about two a subschema
MOST_REFERENCES = 4000  # ``$ref`` in a schema
MOST_ENTRIES = 20_000  # entries of one enum, or of a choice
MOST_PROPERTIES = 5000  # properties of one object; llguidance's work grows with the square
# A text can never become longer than this in time; an automaton has no more states either.
MOST_REPEATS = 50_000  # repeats of a pattern's parts, nested ones multiplied; minLength, minItems
MOST_PATTERN_BYTES = 1 << 17  # bytes of a pattern that a request writes
MOST_NESTED = 200  # groups inside each other in a pattern; Rust's regex has 250

# Limits of one grammar in a child process. A schema of 100 kB and an enum of 5,000 entries take two
# seconds at 49,152 tokens; what needs more is followed by the host, where the host can.
SECONDS = 10  # processor time of an automaton
FOLLOWED_SECONDS = 3  # processor time of a grammar that the host follows, which it builds again
VOCABULARY_SECONDS = 60  # processor time to receive a vocabulary
WAIT_SECONDS = 30  # time on a clock, on a busy machine
MEMORY = 3 << 30  # bytes of address space; libraries take a third

MOST_STATES, MOST_TRANSITIONS = 50_000, 1 << 24  # sizes of an automaton
MOST_PARTS = 50_000  # subschemas of an automaton, with references written out
MOST_EXPANDED = 8 << 20  # bytes of the pattern that a schema becomes
# Limits of one mask of a grammar that the host follows, in llguidance's units: a few milliseconds.
MASK_FUEL, MASK_ITEMS = 100_000, 50_000

_LEAST = ("minLength", "minItems", "minProperties")
_VALUES = frozenset({"enum", "const", "default", "examples"})  # no subschemas


def check(kind: str, value: Any) -> None:
    """Raise ValueError if a ``structured_outputs`` setting is larger than a limit.

    Args:
      kind: one of ``automata.KINDS``.
      value: the setting.
    """
    if kind == "choice":
        _check_count("len(choice)", len(value), MOST_ENTRIES)
        _check_count("characters of choice", sum(map(len, value)), MOST_BYTES)
    elif kind in ("json", "structural_tag"):
        _check_json(kind, value)
    elif kind == "regex":
        _check_pattern(kind, value)
    elif kind == "grammar":
        _check_count(f"len({kind})", len(value), MOST_BYTES)


def _check_count(named: str, count: int | float, most: int) -> None:
    if count > most:
        raise ValueError(
            f"structured_outputs has {named}={count}, and may have at most {most}; make it smaller."
        )


def _check_json(kind: str, value: str | Mapping) -> None:
    try:
        text = value if isinstance(value, str) else json.dumps(value)
        _check_count(f"len({kind})", len(text), MOST_BYTES)
        schema = json.loads(text)
    except RecursionError:
        raise ValueError(
            f"structured_outputs has more levels of {kind} than can be read, and may have at most "
            f"{MOST_LEVELS}; make it smaller."
        ) from None
    except (ValueError, TypeError) as error:
        if "structured_outputs" in str(error):
            raise
        return  # the reader of schemas has the better error
    references, stack = 0, [(schema, 1)]
    while stack:
        node, depth = stack.pop()
        _check_count(f"levels of {kind}", depth, MOST_LEVELS)
        if isinstance(node, list):
            stack += [(part, depth + 1) for part in node if isinstance(part, list | dict)]
        else:
            references += _checked_schema(node) if isinstance(node, dict) else 0
            stack += [
                (part, depth + 1)
                for name, part in (node.items() if isinstance(node, dict) else ())
                if name not in _VALUES and isinstance(part, list | dict)
            ]
    _check_count("references ($ref)", references, MOST_REFERENCES)


def _checked_schema(schema: Mapping) -> bool:
    """Check the sizes of one subschema, or of a map of them; return whether it is a reference."""
    if isinstance(schema.get("enum"), list):
        _check_count("len(enum)", len(schema["enum"]), MOST_ENTRIES)
    if isinstance(schema.get("properties"), dict):
        _check_count("len(properties)", len(schema["properties"]), MOST_PROPERTIES)
    for name in _LEAST:
        if isinstance(schema.get(name), int | float):
            _check_count(name, schema[name], MOST_REPEATS)
    if isinstance(schema.get("pattern"), str):
        _check_pattern("pattern", schema["pattern"])
    return isinstance(schema.get("$ref"), str)


_PARTS = re.compile(r"\\.|\{(\d{0,10})(?:,(\d{0,10}))?\}|.", re.DOTALL)


def _check_pattern(named: str, pattern: str) -> None:
    """Check the size of a pattern when its repeats are written out.

    A repeat of more digits than any that passes is left to the compiler, which refuses it.
    """
    _check_count(f"len({named})", len(pattern), MOST_PATTERN_BYTES)
    groups = [[0, 0]]  # sizes of each open group without its last part, and of its last part
    set_begin = -1  # where the open set in brackets begins, after "[" or "[^"
    for part in _PARTS.finditer(pattern):
        text = part[0]
        if set_begin >= 0:
            if text == "]" and part.start() > set_begin:
                set_begin = -1
        elif text == "[":
            set_begin = part.end() + pattern.startswith("^", part.end())
            groups[-1] = [sum(groups[-1]), 1]
        elif text == "(":
            groups.append([0, 0])
            _check_count(f"levels of groups of {named}", len(groups) - 1, MOST_NESTED)
        elif text == ")" and len(groups) > 1:
            inner = sum(groups.pop())
            groups[-1] = [sum(groups[-1]), inner]
        elif part[1] or part[2]:
            groups[-1][1] *= max(int(part[1] or 0), int(part[2] or 0), 1)
        elif text not in "*+?|":
            groups[-1] = [sum(groups[-1]), 1]
        _check_count(f"parts of {named} with repeats", sum(groups[-1]), MOST_REPEATS)
