"""Dtypes of KV caches by vLLM's names."""

from typing import Any

# Their names here; None is jspec's choice.
NAMES = {
    "auto": None,
    "bfloat16": "bfloat16",
    "float32": "float32",
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "int8": "int8",
}
KNOWN = f"one of {', '.join(map(repr, NAMES))}"


def is_known(value: Any) -> bool:
    """Return whether a value is one of the names."""
    return isinstance(value, str) and value in NAMES
