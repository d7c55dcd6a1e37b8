"""The account of what was read: records taken and refused, and what of them has no effect."""

import dataclasses
import sys
from collections import Counter
from typing import Any

_NAMED = 20  # refused records of a source that are kept by name


@dataclasses.dataclass
class SourceCount:
    """Records of one source."""

    name: str
    records: int = 0  # read, without those refused
    refused: int = 0
    why: list[str] = dataclasses.field(default_factory=list)  # place and reason of the first ones
    # parts of records that change no token, by description, with the number of records
    unused: Counter[str] = dataclasses.field(default_factory=Counter)

    def facts(self) -> dict[str, Any]:
        """Return the counts for JSON."""
        return dataclasses.asdict(self) | {"unused": dict(self.unused.most_common())}


class Ledger:
    """Counts by source; at most ``limit`` records are refused, each with a line on stderr."""

    def __init__(self, limit: int = 0):
        self.limit = limit
        self.sources: list[SourceCount] = []

    @property
    def bad_lines(self) -> int:
        """Refused records of all sources."""
        return sum(source.refused for source in self.sources)

    @property
    def source(self) -> SourceCount:
        """The source that is being read."""
        if not self.sources:
            self.open("")
        return self.sources[-1]

    def open(self, name: str) -> None:
        """Begin a source."""
        self.sources.append(SourceCount(name))

    def refuse(self, where: str, reason: object) -> None:
        """Skip a record, or raise ValueError if it is one too many."""
        source, count = self.source, self.bad_lines + 1
        source.refused += 1
        if count > self.limit:
            raise ValueError(
                f"{where}: {reason}. That is bad line {count}, and --max-bad-lines is "
                f"{self.limit}; mend the data or raise the limit"
            )
        if len(source.why) < _NAMED:
            source.why.append(f"{where}: {reason}")
        print(f"skipped {where}: {reason}", file=sys.stderr)

    def print_unused(self) -> None:
        """Print a line on stderr for each source of which some parts have no effect."""
        for source in self.sources:
            if source.unused:
                print(f"without effect in {source.name}: {listed(source.unused)}", file=sys.stderr)


def listed(unused: Counter[str] | dict[str, int]) -> str:
    """Return what has no effect, with the number of records.

    >>> listed({"the key 'id'": 3})
    "the key 'id' (3 records)"
    """
    parts = Counter(unused).most_common()
    return ", ".join(f"{name} ({count:,} record{'s' * (count > 1)})" for name, count in parts)
