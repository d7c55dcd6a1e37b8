"""The regression table: what compiled programs were like, and what has become worse since."""

import json
from pathlib import Path

PATH = Path(__file__).with_name("table.json")
# Bytes of temporaries may grow by so much: compilers are not deterministic to the byte.
_GROWTH, _SLACK = 1.05, 2**16

Figures = dict[str, int]


def load() -> dict:
    """``{"jax": version, "devices": {"v6e x1": {program: figures}}}``."""
    return json.loads(PATH.read_text()) if PATH.exists() else {"jax": None, "devices": {}}


def save(version: str, found: dict[str, dict[str, Figures]]) -> None:
    """Replaces the rows of the devices in ``found``; those of another JAX are dropped."""
    table = load()
    devices = (table["devices"] if table["jax"] == version else {}) | found
    PATH.write_text(
        json.dumps({"jax": version, "devices": devices}, indent=1, sort_keys=True) + "\n"
    )


def regressions(expected: Figures | None, found: Figures) -> list[str]:
    """What is worse than expected, in words; nothing if nothing is."""
    if expected is None:
        return ["has no row in the table; add it with --write"]
    worse = []
    for name in sorted(expected.keys() | found.keys()):
        before, now = expected.get(name, 0), found.get(name, 0)
        limit = before * _GROWTH + _SLACK if name == "temp_bytes" else before
        if now > limit:
            worse.append(f"{name} rose from {before:,} to {now:,}")
    return worse
