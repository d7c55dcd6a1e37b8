"""The mask token of parallel drafters in config.json."""

from collections.abc import Mapping, Sequence
from typing import Any

from jspec.util.messages import shown

# vLLM reads the first two, for PARD and P-EAGLE; speculators and SpecForge write the third.
SERVED = ("pard_token", "ptd_token_id")
KEYS = (*SERVED, "mask_token_id")


def mask_token_id(raw: Mapping[str, Any], keys: Sequence[str] = KEYS) -> int | None:
    """Return the mask token under any of ``keys``, or None."""
    tokens = {key: raw[key] for key in keys if raw.get(key) is not None}
    for key, token in tokens.items():
        if type(token) is not int or token < 0:
            kind = "a token id, a whole number from 0 on"
            raise ValueError(f"{key} must be {kind}, got {shown(token)}")
    if len(set(tokens.values())) > 1:
        named = ", ".join(f"{key}={shown(value, 40)}" for key, value in tokens.items())
        raise ValueError(f"config.json names several mask tokens ({named}); leave one")
    return next(iter(tokens.values()), None)
