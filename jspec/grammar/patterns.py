"""Patterns of JSON schemas, rewritten to match the JSON spelling of the strings that they match.

A schema's ``pattern`` is a regular expression of ECMA-262 over the *value* of a string, and may
match anywhere in it. Generated text holds the spelling, in which quotes, backslashes and control
characters are escaped.
"""

import re
from collections.abc import Iterable
from re import _constants as kinds
from re import _parser as parser
from typing import Any

_LAST = 0x10FFFF
_SURROGATES = (0xD800, 0xDFFF)
_SHORT = {0x22: '"', 0x5C: "\\\\", 8: "b", 9: "t", 10: "n", 12: "f", 13: "r"}
_DIGITS = [(0x30, 0x39)]
_WORD = [(0x30, 0x39), (0x41, 0x5A), (0x5F, 0x5F), (0x61, 0x7A)]
_SPACES = [(9, 13), (0x20, 0x20), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A)]
_SPACES += [(0x2028, 0x2029), (0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]
_SPACES += [(0xFEFF, 0xFEFF)]
_LINE_ENDS = [(10, 10), (13, 13), (0x2028, 0x2029)]

Ranges = list[tuple[int, int]]  # code points, ends included


def spelled(pattern: str) -> str:
    """Return a regular expression for the JSON spellings, without quotes, of matching strings.

    Raises:
      ValueError: the pattern is no regular expression, or has a part that no automaton can follow.
    """
    try:
        tree = parser.parse(pattern, re.ASCII)
    except (re.error, OverflowError, RecursionError) as error:
        raise ValueError(f"the pattern {pattern!r} is no regular expression: {error}") from None
    branches = _branches(tree)
    return "|".join(_anchored(list(branch), pattern) for branch in branches)


def _branches(tree: Iterable) -> list:
    """Return the alternatives of a whole pattern."""
    items = list(tree)
    if len(items) == 1 and items[0][0] is kinds.BRANCH:
        return items[0][1][1]
    return [items]


def _anchored(items: list, pattern: str) -> str:
    """Spell one alternative; without an anchor, anything may stand at that end."""
    anything = f"(?:{_set(_not([]))})*"
    begins = items[:1] == [(kinds.AT, kinds.AT_BEGINNING)]
    items = items[begins:]
    ends = items[-1:] == [(kinds.AT, kinds.AT_END)]
    items = items[: len(items) - ends]
    inner = _sequence(items, pattern)
    return f"(?:{'' if begins else anything}{inner}{'' if ends else anything})"


def _sequence(items: Iterable, pattern: str) -> str:
    return "".join(_item(kind, value, pattern) for kind, value in items)


def _item(kind: Any, value: Any, pattern: str) -> str:
    if kind is kinds.LITERAL:
        return _set([(value, value)])
    if kind is kinds.NOT_LITERAL:
        return _set(_not([(value, value)]))
    if kind is kinds.ANY:
        return _set(_not(_LINE_ENDS))
    if kind is kinds.IN:
        return _set(_members(value, pattern))
    if kind is kinds.BRANCH:
        return f"(?:{'|'.join(_sequence(branch, pattern) for branch in value[1])})"
    if kind is kinds.SUBPATTERN and not (value[1] or value[2]):
        return f"(?:{_sequence(value[3], pattern)})"
    if kind in (kinds.MAX_REPEAT, kinds.MIN_REPEAT):
        least, most, inner = value
        times = f"{{{least},{'' if most is kinds.MAXREPEAT else most}}}"
        return f"(?:{_sequence(inner, pattern)}){times}"
    name = str(kind).lower().replace("_", " ")
    raise ValueError(f"the pattern {pattern!r} has a part ({name}) that is not followed")


def _members(items: Iterable, pattern: str) -> Ranges:
    """Return the code points of a set in brackets, or of an escape such as ``\\\\d``."""
    ranges: Ranges = []
    items = list(items)
    negated = items[:1] == [(kinds.NEGATE, None)]
    for kind, value in items[negated:]:
        if kind is kinds.LITERAL:
            ranges.append((value, value))
        elif kind is kinds.RANGE:
            ranges.append(value)
        elif kind is kinds.CATEGORY and value in _CATEGORIES:
            ranges += _CATEGORIES[value]
        else:
            raise ValueError(f"the pattern {pattern!r} has a set that is not followed")
    return _not(ranges) if negated else ranges


def _not(ranges: Ranges) -> Ranges:
    """Return the other code points; halves of surrogate pairs are in no text."""
    others, start = [], 0
    for first, last in sorted([*ranges, _SURROGATES]):
        if first > start:
            others.append((start, first - 1))
        start = max(start, last + 1)
    return [*others, (start, _LAST)] if start <= _LAST else others


_CATEGORIES = {
    kinds.CATEGORY_DIGIT: _DIGITS,
    kinds.CATEGORY_NOT_DIGIT: _not(_DIGITS),
    kinds.CATEGORY_WORD: _WORD,
    kinds.CATEGORY_NOT_WORD: _not(_WORD),
    kinds.CATEGORY_SPACE: _SPACES,
    kinds.CATEGORY_NOT_SPACE: _not(_SPACES),
}


def _set(ranges: Ranges) -> str:
    """Return an expression for the spelling of one character of a set."""
    contains = lambda code: any(first <= code <= last for first, last in ranges)
    plain = _not([*_not(ranges), (0, 0x1F), (0x22, 0x22), (0x5C, 0x5C)])
    spans = "".join(rf"\x{{{first:x}}}-\x{{{last:x}}}" for first, last in plain)
    options = [f"[{spans}]"] if plain else []
    options += [rf"\\{letter}" for code, letter in _SHORT.items() if contains(code)]
    options += [rf"\\u{code:04x}" for code in range(32) if contains(code) and code not in _SHORT]
    if not options:
        raise ValueError("a pattern has an empty set of characters")
    return options[0] if len(options) == 1 else f"(?:{'|'.join(options)})"
