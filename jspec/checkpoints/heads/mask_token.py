"""The token that stands for those a parallel drafter has not drafted yet: where files name it."""

from collections.abc import Mapping, Sequence
from typing import Any

from jspec.util.messages import shown

# What vLLM reads, for PARD and P-EAGLE alike, and what speculators and SpecForge write.
SERVED = ("pard_token", "ptd_token_id")
KEYS = (*SERVED, "mask_token_id")


def mask_token_id(raw: Mapping[str, Any], keys: Sequence[str] = KEYS) -> int | None:
    """The mask token that a config.json names under any of ``keys``; None if it names none.

    Raises:
      ValueError: it is no whole number, or the keys name different ones.
    """
    found = {key: raw[key] for key in keys if raw.get(key) is not None}
    for key, value in found.items():
        if type(value) is not int or value < 0:
            raise ValueError(
                f"{key} must be a token id, a whole number from 0 on, got {shown(value)}"
            )
    if len(set(found.values())) > 1:
        named = ", ".join(f"{key}={shown(value, 40)}" for key, value in found.items())
        raise ValueError(f"config.json names several mask tokens ({named}); leave one")
    return next(iter(found.values()), None)
