"""What a certificate says: findings, each a measurement beside what is allowed."""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jspec.util import atomic_files


@dataclasses.dataclass(frozen=True)
class Finding:
    """One thing that was measured.

    Attributes:
      check: what was done: "law", "chi-square", "drafter", or "text".
      subject: of what, in words.
      measured: the larger, the worse; NaN is a failure.
      limit: what it must stay below.
      note: what else is to be known, such as where it was worst.
    """

    check: str
    subject: str
    measured: float
    limit: float
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the measurement stays below its limit."""
        return self.measured < self.limit

    def as_dict(self) -> dict[str, Any]:
        """The fields and the verdict, for JSON."""
        fields = dataclasses.asdict(self) | {"passed": self.passed}
        return {name: _plain(value) for name, value in fields.items()}


@dataclasses.dataclass(frozen=True)
class Report:
    """All findings of a certificate, in the order in which they were made.

    Attributes:
      findings: at least one.
      setting: what was certified, and on what: names and values for people and machines.
      remarks: what was left out or done otherwise than asked, and why.
    """

    findings: tuple[Finding, ...]
    setting: dict[str, str]
    remarks: tuple[str, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether every finding did."""
        return all(finding.passed for finding in self.findings)

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that did not pass."""
        return tuple(finding for finding in self.findings if not finding.passed)

    def as_dict(self) -> dict[str, Any]:
        """Everything, for JSON."""
        findings = [finding.as_dict() for finding in self.findings]
        return {
            "passed": self.passed,
            "setting": self.setting,
            "remarks": list(self.remarks),
            "findings": findings,
        }

    def save(self, path: str | os.PathLike) -> None:
        """Writes ``as_dict`` as JSON, whole or not at all."""
        atomic_files.write(Path(path), json.dumps(self.as_dict(), indent=2).encode() + b"\n")


def worst(findings: Iterable[Finding]) -> Finding:
    """The one furthest above its limit, or the least far below it; NaN before all."""
    return max(
        findings,
        key=lambda each: (
            float("inf") if each.measured != each.measured else each.measured / each.limit
        ),
    )


def _plain(value: Any) -> Any:
    """JSON has no NaN and no infinity."""
    finite = not isinstance(value, float) or -float("inf") < value < float("inf")
    return value if finite else str(value)
