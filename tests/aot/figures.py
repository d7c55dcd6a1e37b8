"""Figures of a compiled program: temporaries, collectives, and copies of a cache."""

import collections
import re
from collections.abc import Iterator
from typing import NamedTuple

COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_UPDATES = ("dynamic-update-slice", "scatter")
_AS_GIVEN = ("parameter", "bitcast", *_UPDATES)
_OPERAND = re.compile(r"%?([\w.\-]+)")
# Operations that pass an array on, or update it in place.
_NO_COPY = {
    "parameter",
    "get-tuple-element",
    "tuple",
    "while",
    "conditional",
    "bitcast",
    "call",
    "dynamic-update-slice",
    "scatter",
    "optimization-barrier",
    "copy-done",
    "async-done",
    "async-update",
}
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([\w.\-]+) = (.+?) ([\w\-]+)\((.*)$")
_ARRAY = re.compile(r"\b[a-z]\w*\[([\d,]*)\]")
_CALLED = re.compile(r"calls=%?([\w.\-]+)")
_FAST_MEMORY = "S(1)"  # in a TPU's layout: the compiler may hold small arrays there, as a cache


class Instruction(NamedTuple):
    """A line of optimised HLO."""

    entry: bool  # True for the program itself, False for a loop or branch in it
    inside: str  # name of its computation
    root: bool  # True for the result of its computation
    name: str
    result: str
    operation: str
    rest: str


def read(compiled, cache_shapes: tuple[tuple[int, ...], ...] = ()) -> dict:
    """Return the figures of a program; ``cache_shapes`` are those of its caches on one device."""
    lines = list(instructions(compiled.as_text()))
    figures = {"temp_bytes": compiled.memory_analysis().temp_size_in_bytes}
    counts = collections.Counter(line.operation.removesuffix("-start") for line in lines)
    figures |= {name: counts[name] for name in COLLECTIVES if counts[name]}
    if cache_shapes:
        copies = cache_copies(lines, cache_shapes)
        figures["cache_copies_in_loop"] = sum(not line.entry for line in copies)
        figures["cache_copies_once"] = sum(line.entry for line in copies)
    return figures


def instructions(text: str) -> Iterator[Instruction]:
    """Yield the instructions of a module, in order."""
    entry, inside = False, ""
    for line in text.splitlines():
        if head := _COMPUTATION.match(line):
            entry, inside = bool(head[1]), head[2]
        elif match := _INSTRUCTION.match(line):
            yield Instruction(entry, inside, bool(match[1]), *match.groups()[1:])


def cache_copies(
    lines: list[Instruction], cache_shapes: tuple[tuple[int, ...], ...]
) -> list[Instruction]:
    """Return the instructions that write a copy of a cache, not an update in place.

    The copy may be transposed or reshaped: it has as many elements, and the slots are an axis.
    """
    fused = {_CALLED.search(line.rest)[1] for line in lines if line.operation == "fusion"}
    by_computation = collections.defaultdict(list)
    for line in lines:
        by_computation[line.inside].append(line)

    def is_cache(dims: list[int]) -> bool:
        return any(_product(dims) == _product(shape) and shape[2] in dims for shape in cache_shapes)

    def holds_cache(line: Instruction) -> bool:
        if _FAST_MEMORY in line.result:  # on its way to fast memory or back
            return False
        arrays = _ARRAY.findall(line.result)
        return any(is_cache([int(size) for size in dims.split(",") if size]) for dims in arrays)

    def updates_in_place(line: Instruction) -> bool:
        """True for a fusion that writes into its operand, not into a new array."""
        if line.operation != "fusion":
            return False
        body = {each.name: each for each in by_computation[_CALLED.search(line.rest)[1]]}
        targets = [
            _OPERAND.match(each.rest)[1] for each in body.values() if each.operation in _UPDATES
        ]
        return bool(targets) and all(body[name].operation in _AS_GIVEN for name in targets)

    return [
        line
        for line in lines
        if line.inside not in fused
        and line.operation not in _NO_COPY
        and holds_cache(line)
        and not updates_in_place(line)
    ]


def _product(sizes) -> int:
    product = 1
    for size in sizes:
        product *= size
    return product
