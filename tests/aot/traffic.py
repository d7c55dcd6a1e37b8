"""Bytes of memory that a round of a launch moves, counted in the optimised HLO of its loop.

Each instruction of the loop's body counts its operands and its result, each once. A fusion counts
what it reads of its operands: slices and gathers count the slices, updates in place the update. An
inner loop counts as often as it runs, a conditional its dearest branch. Arrays in a TPU's fast
memory count nothing; copies to them and from them count the other side. A kernel reads the share of
a stack of experts that tokens choose.
"""

import collections
import dataclasses
import math
import re
from typing import NamedTuple

from tests.aot.figures import COLLECTIVES, Instruction, instructions

_BYTES = dict(
    {"pred": 1, "token": 0, "s4": 0.5, "u4": 0.5, "f4e2m1fn": 0.5},
    **{f"f8{kind}": 1 for kind in ("e4m3fn", "e5m2", "e8m0fnu")},
    **{f"{kind}{8 * size}": size for kind in "su" for size in (1, 2, 4, 8)},
    **{"bf16": 2, "f16": 2, "f32": 4, "f64": 8, "c64": 8},
)
_ARRAY = re.compile(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?")
_NAME = re.compile(r"%?([\w.\-]+)$")
_FAST = "S(1)"
_FREE = {
    "parameter",
    "constant",
    "get-tuple-element",
    "tuple",
    "bitcast",
    "after-all",
    "iota",
    "partition-id",
    "replica-id",
    "optimization-barrier",
    "add-dependency",
}
# Custom calls of the compilers that move nothing.
_NO_CALLS = ("AllocateBuffer", "ConcatBitcast", "AssumeGatherIndicesInBound")
_SLICES = ("dynamic-slice", "slice", "gather")
_AS_IS = ("bitcast", "get-tuple-element")  # and the ends of asynchronous operations
_DEPTH = 8  # nested bitcasts and fusions that are followed


@dataclasses.dataclass(frozen=True)
class Caches:
    """The committed text of the rows, which is no part of a program."""

    page_shape: tuple[int, ...]  # heads, slots and features of a page
    rows: int
    context: int  # tokens of each row
    window: int | None = None  # sliding window of all layers

    def turns(self, num_pages: int) -> int:
        """Return the turns of attention's loop, which gathers ``num_pages`` at a time."""
        size = num_pages // self.rows * self.page_shape[1]
        first = max(self.context - self.window, 0) if self.window else 0
        return max(1, -(-self.context // size) - first // size)


class Moved(NamedTuple):
    """The traffic of an instruction in a round."""

    size: int  # bytes, all runs together
    times: int  # runs
    instruction: Instruction


class Traffic(NamedTuple):
    """The traffic of a round, and of the entry computation before it."""

    moved: list[Moved]
    collectives: dict[str, int]
    uncounted: list[str]  # loops of unknown length, counted once
    weight_copies: int  # bytes of weights that a launch copies before its first round

    @property
    def size(self) -> int:
        """Bytes of a round."""
        return sum(each.size for each in self.moved)


def read(
    text: str,
    caches: Caches,
    weight_shapes: frozenset[tuple[int, ...]],
    chosen: float = 1.0,
) -> Traffic:
    """Return the traffic of a launch from its optimised HLO.

    ``chosen`` is the share of experts that its tokens choose; stacks are the weights of three axes.
    """
    lines = list(instructions(text))
    computations = collections.defaultdict(dict)
    for line in lines:
        computations[line.inside][line.name] = line
    (entry,) = {line.inside for line in lines if line.entry}
    stacks = frozenset(shape for shape in weight_shapes if len(shape) == 3)
    program = _Program(dict(computations), caches, stacks, chosen)
    loops = [line for line in computations[entry].values() if line.operation == "while"]
    bodies = [_called(line, "body") for line in loops]
    body = max(bodies, key=lambda name: len(computations[name]), default=entry)
    copies = _weight_copies(computations[entry], weight_shapes)
    moved, collectives, uncounted = program.walk(body, 1)
    return Traffic(moved, dict(collectives), uncounted, copies)


def _weight_copies(entry: dict[str, Instruction], shapes: frozenset[tuple[int, ...]]) -> int:
    """Return the bytes of main memory that instructions over one whole weight write."""
    weights, size = set(), 0
    for line in entry.values():
        dims = [dims for _, dims, _ in _arrays(line.result)]
        if line.operation == "parameter":
            if dims and dims[0] in shapes:
                weights.add(line.name)
        elif line.operation not in ("while", "tuple") and weights & set(_operands(line)):
            (source,) = sorted(weights & set(_operands(line)))[:1]
            count = math.prod(_arrays(entry[source].result)[0][1])
            if not any(math.prod(each) == count for each in dims):
                continue
            weights.add(line.name)
            if line.operation.endswith("-start"):
                # The result holds the operand too. A copy to fast memory is none of the weight.
                is_fast = any(_FAST in layout for _, _, layout in _arrays(line.result))
                size += 0 if is_fast else _count(_arrays(entry[source].result)[0])
            elif line.operation not in _AS_IS and not line.operation.endswith("-done"):
                size += _size(line.result)
    return size


@dataclasses.dataclass(frozen=True)
class _Program:
    computations: dict[str, dict[str, Instruction]]
    caches: Caches
    stacks: frozenset[tuple[int, ...]]
    chosen: float

    def walk(self, name: str, times: int) -> tuple[list[Moved], collections.Counter, list[str]]:
        """Return the traffic of a computation that runs ``times`` in a round."""
        moved, collectives, uncounted = [], collections.Counter(), []

        def add(part):
            moved.extend(part[0])
            collectives.update(part[1])
            uncounted.extend(part[2])

        for line in self.computations[name].values():
            operation = line.operation.removesuffix("-start")
            if line.operation == "while":
                turns = self._turns(line)
                uncounted += [] if turns else [line.name]
                add(self.walk(_called(line, "body"), times * (turns or 1)))
            elif line.operation == "conditional":
                parts = [self.walk(branch, times) for branch in _branches(line)]
                add(max(parts, key=lambda part: sum(each.size for each in part[0])))
            elif operation in ("call", "async"):
                add(self.walk(_called(line, "to_apply") or _called(line, "calls"), times))
            elif operation in COLLECTIVES:
                collectives[operation] += times
            elif size := self._size(line):
                moved.append(Moved(size * times, times, line))
        return moved, collectives, uncounted

    def _turns(self, loop: Instruction) -> int | None:
        """Return how often a loop runs; None if nothing says so."""
        if known := re.search(r"known_trip_count[^\d]{0,20}(\d+)", loop.rest):
            return int(known[1])
        condition = self.computations[_called(loop, "condition")]
        constants = [line for line in condition.values() if line.operation == "constant"]
        (root,) = (line for line in condition.values() if line.root)
        text = root.rest
        if root.operation == "fusion":
            text = "".join(x.rest for x in self.computations[_called(root, "calls")].values())
        if "direction=LT" in text and len(constants) == 1:
            return int(constants[0].rest.split(")")[0])
        pages = [self._gathered(name) for name in self._reached(_called(loop, "body"))]
        return self.caches.turns(max(pages)) if any(pages) else None

    def _gathered(self, name: str) -> int:
        """Return the most pages that an instruction of a computation gathers."""
        page, most = self.caches.page_shape, 0
        body = self.computations[name]
        for line in body.values():
            if line.operation == "gather":
                source = body[_operands(line)[0]]
                if _arrays(source.result)[0][1][-3:] == page:
                    most = max(most, math.prod(_arrays(line.result)[0][1]) // math.prod(page))
        return most

    def _reached(self, name: str) -> set[str]:
        """Return the computations that one calls, itself included."""
        reached, new = set(), {name}
        while new:
            reached |= new
            lines = [line for each in new for line in self.computations[each].values()]
            keys = ("calls", "to_apply", "body", "condition")
            called = {_called(line, key) for line in lines for key in keys}
            new = called.union(*map(_branches, lines)) - reached - {None}
        return reached

    def _size(self, line: Instruction) -> int:
        """Return the bytes that an instruction moves in one run."""
        operation = line.operation
        if operation in _FREE or operation.endswith(("-done", "-update")):
            return 0
        if operation == "custom-call" and any(f'"{name}"' in line.rest for name in _NO_CALLS):
            return 0
        body = self.computations[line.inside]
        types = {name: body[name].result for name in _operands(line) if name in body}
        if operation == "fusion":
            return self._fusion(line, types)
        first = next(iter(types.values()), "")
        if operation.removesuffix("-start") in _SLICES:
            *_, taken = _arrays(line.result)[: 2 if operation.endswith("-start") else 1]
            read = 0 if _FAST in first else _count(taken)
            return read + (0 if _FAST in taken[2] else _count(taken))
        if operation in ("dynamic-update-slice", "scatter"):
            update = list(types.values())[1 if operation == "dynamic-update-slice" else -1]
            return _size(update) + (0 if _FAST in line.result else _all(update))
        if operation == "copy-start":
            return _size(first) + _first(line.result)
        # A kernel reads an array once that it is passed in several forms.
        sources = {_source(body, name): result for name, result in types.items()}
        reads = {name: _size(result) for name, result in sources.items()}
        if operation == "custom-call":
            for name, result in sources.items():
                if _arrays(result) and _arrays(result)[0][1] in self.stacks:
                    reads[name] *= self.chosen
        return round(sum(reads.values())) + self._result(line)

    def _result(self, line: Instruction) -> int:
        """Return the bytes of a result; a library's workspace is none."""
        if line.operation == "custom-call" and "__cublas" in line.rest:
            return _first(line.result)
        return _size(line.result)

    def _fusion(self, line: Instruction, types: dict[str, str]) -> int:
        reads, written = self._fused(_called(line, "calls"))
        size = 0
        for index, name in enumerate(dict.fromkeys(_operands(line))):
            result = types.get(name, "")
            # An operand that is passed twice is read once, by its first parameter.
            size += 0 if _FAST in result and not result.startswith("(") else reads.get(index, 0)
        return size + (min(written, _size(line.result)) if _FAST in line.result else written)

    def _fused(self, name: str) -> tuple[dict[int, int], int]:
        """Return the bytes that a fusion reads of each operand, and those that it writes."""
        body = self.computations[name]
        users = collections.defaultdict(list)
        for line in body.values():
            for index, operand in enumerate(_operands(line)):
                users[operand].append((line, index))

        def touched(line: Instruction, depth: int = 0) -> int:
            whole, size = _all(line.result), 0
            if line.root:
                return whole
            for user, index in users[line.name]:
                if user.operation in _SLICES and index == 0:
                    size += _all(user.result)
                elif user.operation in ("dynamic-update-slice", "scatter") and index == 0:
                    continue
                elif user.operation == "bitcast" and depth < _DEPTH:
                    size += touched(user, depth + 1)
                elif user.operation == "fusion" and depth < _DEPTH:
                    size += self._fused(_called(user, "calls"))[0].get(index, whole)
                else:
                    return whole
            return min(size, whole)

        def written(line: Instruction, depth: int = 0) -> int:
            operands = [body[each] for each in _operands(line) if each in body]
            if line.operation == "tuple":
                return sum(written(each, depth + 1) for each in operands)
            if line.operation == "dynamic-update-slice":
                return _all(operands[1].result)
            if line.operation == "scatter" and len(operands) == 3:
                return _all(operands[2].result)
            if line.operation == "bitcast" and operands and depth < _DEPTH:
                return written(operands[0], depth + 1)
            return 0 if line.operation == "parameter" else _all(line.result)

        parameters = [line for line in body.values() if line.operation == "parameter"]
        reads = {int(line.rest.split(")")[0]): touched(line) for line in parameters}
        (root,) = (line for line in body.values() if line.root)
        return reads, written(root)


def _operands(line: Instruction) -> list[str]:
    """Return the names of the operands."""
    depth, words = 0, [""]
    for letter in line.rest:
        if letter == ")" and depth == 0:
            break
        depth += (letter in "([{") - (letter in ")]}")
        if letter == "," and depth == 0:
            words.append("")
        else:
            words[-1] += letter
    matches = (_NAME.search(word.strip()) for word in words)
    return [match[1] for match in matches if match]


def _source(body: dict[str, Instruction], name: str) -> str:
    """Return the name of the array that a name stands for, behind bitcasts."""
    while name in body and body[name].operation == "bitcast":
        (name,) = _operands(body[name])
    return name


def _called(line: Instruction, key: str) -> str | None:
    match = re.search(rf"\b{key}=%?([\w.\-]+)", line.rest)
    return match and match[1]


def _branches(line: Instruction) -> list[str]:
    if line.operation != "conditional":
        return []
    if match := re.search(r"branch_computations=\{([^}]*)\}", line.rest):
        return [name.strip().lstrip("%") for name in match[1].split(",")]
    return [_called(line, "true_computation"), _called(line, "false_computation")]


def _arrays(result: str) -> list[tuple[str, tuple[int, ...], str]]:
    """Return the (dtype, shape, layout) of the arrays of a result."""
    found = _ARRAY.findall(result)
    return [
        (dtype, tuple(int(size) for size in dims.split(",") if size), layout)
        for dtype, dims, layout in found
        if dtype in _BYTES
    ]


def _count(array: tuple[str, tuple[int, ...], str]) -> int:
    return math.ceil(_BYTES[array[0]] * math.prod(array[1]))


def _all(result: str) -> int:
    """Return the bytes of a result, wherever it lies."""
    return sum(map(_count, _arrays(result)))


def _size(result: str) -> int:
    """Return the bytes of a result that are in main memory."""
    return sum(_count(array) for array in _arrays(result) if _FAST not in array[2])


def _first(result: str) -> int:
    """Return the bytes of the first array of a result, if it is in main memory."""
    return sum(_count(array) for array in _arrays(result)[:1] if _FAST not in array[2])
