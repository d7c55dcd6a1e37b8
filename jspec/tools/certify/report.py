"""The report of a certificate: findings, each a measurement with its limit."""

import dataclasses
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jspec.util import atomic_files


@dataclasses.dataclass(frozen=True)
class Finding:
    """One measurement."""

    check: str  # "distribution", "chi-square", "drafter", "text" or "engine"
    subject: str  # the measured thing, in words
    measured: float  # larger is worse; NaN is a failure
    limit: float  # ``measured`` must stay below it
    note: str = ""  # further information, such as the worst case

    @property
    def passed(self) -> bool:
        """True if the measurement is below its limit."""
        return self.measured < self.limit

    def as_dict(self) -> dict[str, Any]:
        """Return the fields and the verdict, for JSON."""
        fields = dataclasses.asdict(self) | {"passed": self.passed}
        return {name: _plain(value) for name, value in fields.items()}


@dataclasses.dataclass(frozen=True)
class Report:
    """All findings of a certificate, in the order in which they were made."""

    findings: tuple[Finding, ...]  # at least one
    setting: dict[str, str]  # the certified configuration and the device: names and values
    remarks: tuple[str, ...] = ()  # checks that were left out or replaced, and why

    @property
    def passed(self) -> bool:
        """True if every finding passed."""
        return not self.failures

    @property
    def failures(self) -> tuple[Finding, ...]:
        """The findings that did not pass."""
        return tuple(finding for finding in self.findings if not finding.passed)

    def as_dict(self) -> dict[str, Any]:
        """Return everything, for JSON."""
        return {
            "passed": self.passed,
            "setting": self.setting,
            "remarks": list(self.remarks),
            "findings": [finding.as_dict() for finding in self.findings],
        }

    def save(self, path: str | os.PathLike) -> None:
        """Write ``as_dict`` as JSON, atomically."""
        atomic_files.write(Path(path), json.dumps(self.as_dict(), indent=2).encode() + b"\n")


def worst(findings: Iterable[Finding]) -> Finding:
    """Return the finding with the largest ratio to its limit; NaN counts as infinite."""

    def ratio(each: Finding) -> float:
        is_nan = each.measured != each.measured
        return float("inf") if is_nan else each.measured / each.limit

    return max(findings, key=ratio)


def raised(error: Exception) -> str:
    """Return the words of a note on an exception of the user's code."""
    return f"it raises {type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _plain(value: Any) -> Any:
    """The value, or its name where JSON has none: NaN and infinity."""
    finite = not isinstance(value, float) or -float("inf") < value < float("inf")
    return value if finite else str(value)
