"""The acceptance rule that a ``speculative_config`` asks for, with its settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from jspec import verify
from jspec.api.config import checking
from jspec.api.config.keys import RULE_KEYS, RULE_NAMES, RULES_NOT_BUILT
from jspec.util.messages import did_you_mean, shown


def asked_for(values: Mapping[str, Any]) -> str | verify.Rule:
    """The rule; with its settings, where keys have set any.

    Args:
      values: of all keys that work.

    Raises:
      ValueError: it is unknown or not built, or its settings are out of range or another rule's.
    """
    rule = _rule_name(values["rejection_sample_method"])
    for other, names in RULE_KEYS.items():
        if rule != other and any(values[name] is not None for name in names):
            raise ValueError(
                f"{' / '.join(names)} are only valid with rejection_sample_method={other!r}."
            )
    given = [values[name] for name in RULE_KEYS.get(rule, ())]
    for name, value in zip(RULE_KEYS.get(rule, ()), given, strict=True):
        checking.check_real(name, value, listed=name == "synthetic_acceptance_rates")
    if rule == "synthetic":
        # Of a published tree the depth is not known yet: Plan compares it with the rates.
        _check_acceptance(*given, values["num_speculative_tokens"] or values["tree_depth"])
        return verify.synthetic(*given)
    if any(value is not None for value in given):
        default = verify.RULES[rule].walk
        return verify.typical(
            *(
                old if new is None else new
                for old, new in zip(dataclasses.astuple(default), given, strict=True)
            )
        )
    return rule


def _rule_name(name: Any) -> str:
    name = "standard" if name is None else name
    if name in RULES_NOT_BUILT:
        raise ValueError(
            f"rejection_sample_method={name!r} is lossy and not built; use one of "
            f"{', '.join(RULE_NAMES)}."
        )
    if not isinstance(name, str) or name not in RULE_NAMES:
        raise ValueError(
            f"rejection_sample_method={shown(name)} is not known; use one of "
            f"{', '.join(RULE_NAMES)}{did_you_mean(name, RULE_NAMES)}"
        )
    return RULE_NAMES[name]


def _check_acceptance(rates: Sequence[float] | None, length: float | None, depth: Any) -> None:
    """What vLLM says of rates and lengths that do not fit the draft."""
    if depth is None:
        return
    if rates is not None and len(rates) != depth:
        raise ValueError(f"synthetic_acceptance_rates must have length {depth}, got {len(rates)}.")
    if length is not None and not 1 <= length <= depth + 1:
        raise ValueError(f"synthetic_acceptance_length must be in [1, {depth + 1}], got {length}.")
