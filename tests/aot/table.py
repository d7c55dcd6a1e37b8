"""The regression table of compiled programs' figures."""

import json
from pathlib import Path

PATH = Path(__file__).with_name("table.json")
# Allowed growth of temporaries: compilers are not deterministic to the byte.
_GROWTH, _SLACK = 1.05, 2**16

Figures = dict[str, int]


def load() -> dict:
    """Return ``{"jax": version, "devices": {"v6e x1": {program: figures}}}``."""
    return json.loads(PATH.read_text()) if PATH.exists() else {"jax": None, "devices": {}}


def save(version: str, rows: dict[str, dict[str, Figures]]) -> None:
    """Replace the rows of the devices in ``rows``; drop those of another JAX."""
    table = load()
    devices = (table["devices"] if table["jax"] == version else {}) | rows
    PATH.write_text(
        json.dumps({"jax": version, "devices": devices}, indent=1, sort_keys=True) + "\n"
    )


def regressions(expected: Figures | None, figures: Figures) -> list[str]:
    """Return a description of every figure that is worse than expected."""
    if expected is None:
        return ["has no row in the table; add it with --write"]
    worse = []
    for name in sorted(expected.keys() | figures.keys()):
        before, now = expected.get(name, 0), figures.get(name, 0)
        limit = before * _GROWTH + _SLACK if name == "temp_bytes" else before
        if now > limit:
            worse.append(f"{name} rose from {before:,} to {now:,}")
    return worse
