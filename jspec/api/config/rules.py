"""The acceptance rule of a ``speculative_config``.

Unknown rules raise ValueError, and so do settings that are out of range or another rule's.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from jspec import verify
from jspec.api.config import checking
from jspec.api.config.keys import RULE_NAMES, RULES_NOT_BUILT
from jspec.util.messages import did_you_mean, shown


def asked_for(values: Mapping[str, Any]) -> str | verify.Rule:
    """Return the name of the rule, or the rule itself if it has settings or is the user's own."""
    rule = _rule(values["rejection_sample_method"])
    for other in verify.RULES.values():
        keys = [setting.key for setting in other.settings]
        if rule != other.name and any(values[key] is not None for key in keys):
            raise ValueError(
                f"{' / '.join(keys)} are only valid with rejection_sample_method={other.name!r}."
            )
    if isinstance(rule, verify.Rule) or verify.RULES[rule].make is None:
        return rule
    settings = verify.RULES[rule].settings
    for setting in settings:
        checking.check_real(setting.key, values[setting.key], listed=setting.is_list)
    given = {x.argument: values[x.key] for x in settings if values[x.key] is not None}
    if rule == "synthetic":
        # The depth of a published tree comes later: Plan compares it with the rates.
        depth = values["num_speculative_tokens"] or values["tree_depth"]
        _check_rates(given.get("rates"), given.get("length"), depth)
    made = verify.RULES[rule].make(**given)  # raises where a setting has no default
    return made if given else rule


def _rule(name: Any) -> str | verify.Rule:
    """The name in ``RULES`` that the key's value stands for, or the rule at a dotted path."""
    key, known = "rejection_sample_method", ", ".join(RULE_NAMES)
    name = "standard" if name is None else name
    if name in RULES_NOT_BUILT:
        raise ValueError(f"{key}={name!r} is lossy and not built; use one of {known}.")
    if isinstance(name, str) and name in RULE_NAMES:
        return RULE_NAMES[name]
    if isinstance(name, str) and "." in name:
        return verify.load_rule(name, key)
    raise ValueError(
        f"{key}={shown(name)} is not known; use one of {known}, or the dotted path of a "
        f"jspec.verify.Rule{did_you_mean(name, RULE_NAMES)}"
    )


def _check_rates(rates: Sequence[float] | None, length: float | None, depth: Any) -> None:
    """Raise vLLM's errors for rates and lengths that do not fit the draft."""
    if depth is None:
        return
    if rates is not None and len(rates) != depth:
        raise ValueError(f"synthetic_acceptance_rates must have length {depth}, got {len(rates)}.")
    if length is not None and not 1 <= length <= depth + 1:
        raise ValueError(f"synthetic_acceptance_length must be in [1, {depth + 1}], got {length}.")
