"""``custom_class``: the user's own drafter, by the dotted path of its class.

The class is a frozen dataclass that inherits from ``jspec.Drafter``. Its fields are its config
keys. jspec fills in ``target`` and ``vocab_size`` if the config does not. A drafter with
weights defines ``load_params``, which jspec calls once, after it loads the target's weights. The
other methods get the result as ``params.drafter``. A field of the class can hold the path of the
weights.
"""

import dataclasses
import inspect
import os
from collections.abc import Mapping
from typing import Any

from jspec import verify
from jspec.api.config.keys import CUSTOM_CLASS, KEYS, RULE_KEYS
from jspec.core import shape_checks, validation
from jspec.core.types import Drafter
from jspec.models.decoder import Decoder
from jspec.util.messages import did_you_mean, shown
from jspec.util.values import imported

_FILLED_IN = ("target", "vocab_size")
# Keys that jspec reads and never passes to the class.
_OURS = {
    "method",
    "model",
    "rejection_sample_method",
    "draft_tensor_parallel_size",
    "adaptive_length",
    "enable_adaptive_verification",
    "num_speculative_tokens_per_batch_size",
    *RULE_KEYS,
}
_DECLARED = ("max_depth", "tree_size", "proposal")  # the members without a default
_METHODS = ("init", "prefill", "propose", "update", "init_shared", "on_finished")
_METHODS += ("check_params", "load_params")


def is_custom(given: Mapping[str, Any]) -> bool:
    """Return whether the method is ``custom_class``, or left out and the model a dotted path.

    A directory of that name is a model, not a class.
    """
    if given.get("method") is not None:
        return given["method"] == CUSTOM_CLASS
    path = given.get("model")
    if not isinstance(path, str) or "." not in path or os.path.exists(path):
        return False
    return all(part.isidentifier() for part in path.split("."))


def find(path: Any) -> type:
    """Return the drafter class at a dotted path; raise one ValueError that names all its faults."""
    if not isinstance(path, str) or "." not in path:
        raise ValueError(
            f"method={CUSTOM_CLASS!r} needs as 'model' the dotted path of a class, such as "
            f"'my_package.my_module.MyDrafter'; got {shown(path)}."
        )
    drafter = imported("model", path)
    if not isinstance(drafter, type):
        raise ValueError(f"model={shown(path)} is {type(drafter).__name__!r}, not a class.")
    _check_class(drafter)
    return drafter


def settings(drafter: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that the class takes, with tuples for lists, so that it can be hashed.

    Raise ValueError for keys that are unknown, and for required ones that are missing.
    """
    fields = {field.name: field for field in _fields(drafter)}
    takes = [name for name in fields if name not in _FILLED_IN]
    chosen = {}
    for name, value in given.items():
        if name in fields:
            if value is not None or name not in KEYS:
                chosen[name] = _frozen(value)
        elif name not in _OURS and not (name in KEYS and KEYS[name].is_default(value)):
            raise ValueError(
                f"speculative_config: {drafter.__name__} takes no {shown(name)}; it takes "
                f"{', '.join(map(repr, takes)) or 'no settings'}{did_you_mean(name, takes)}"
            )
    missing = [name for name in takes if name not in chosen and _is_required(fields[name])]
    if missing:
        raise ValueError(
            f"speculative_config: {drafter.__name__} needs {', '.join(map(repr, missing))}; give "
            f"{'it' if len(missing) == 1 else 'them'} as keys."
        )
    return chosen


def _is_required(field: dataclasses.Field) -> bool:
    return field.default is field.default_factory is dataclasses.MISSING


def build(
    drafter: type, chosen: Mapping[str, Any], target: Decoder, rule: str | verify.Rule
) -> Drafter:
    """Return the drafter for ``target``.

    Raises:
      ValueError: a member has an invalid value, the drafter cannot be hashed, or it cannot share
        the target's noise though the rule needs that.
    """
    names = {field.name for field in _fields(drafter)}
    filled = {"target": target, "vocab_size": target.vocab_size}
    built = drafter(**{name: filled[name] for name in names & filled.keys()} | dict(chosen))
    validation.check_drafter(built)
    shape_checks.check_captured(built.capture_layers, target.config.num_layers, drafter.__name__)
    if (verify.RULES[rule] if isinstance(rule, str) else rule).shares_noise:
        validation.sharing_noise(built)  # raises if the drafter cannot
    return built


def _check_class(drafter: type) -> None:
    """Raise one error that lists every fault of a class."""
    name = drafter.__name__
    if not issubclass(drafter, Drafter):
        raise ValueError(
            f"{name} is no jspec.Drafter; inherit from jspec.Drafter, or from jspec.NoDrafter and "
            "its defaults."
        )
    if not dataclasses.is_dataclass(drafter) or not drafter.__dataclass_params__.frozen:
        raise ValueError(
            f"{name} must be a frozen dataclass, so that plans with equal settings share their "
            "compiled programs; decorate it with @dataclasses.dataclass(frozen=True)."
        )
    fields = {field.name for field in dataclasses.fields(drafter)}
    absent = [
        member for member in _DECLARED if member not in fields and not hasattr(drafter, member)
    ]
    wrong = [f"no {member!r}" for member in absent]
    wrong += [f"no method {method!r}" for method in sorted(drafter.__abstractmethods__)]
    meant = "has the name of a key with another meaning"
    wrong += [f"the field {member!r} {meant}" for member in sorted(_OURS & fields)]
    wrong += [_complaint(drafter, member) for member in _METHODS]
    wrong = [fault for fault in wrong if fault]
    if wrong:
        raise ValueError(
            f"{name} cannot draft: {'; '.join(wrong)}. See jspec.Drafter, or inherit from "
            "jspec.NoDrafter, which has all members."
        )


def _complaint(drafter: type, method: str) -> str | None:
    """Return the fault of a method, or None."""
    member = inspect.getattr_static(drafter, method)
    names = list(inspect.signature(getattr(Drafter, method)).parameters)
    call = f"{method}({', '.join(names)})"
    if not inspect.isfunction(member):
        return f"{method!r} is no plain method {call}"
    try:
        inspect.signature(member).bind(*names)
    except TypeError:
        return f"{method!r} does not take the arguments of {call}"
    return None


def _fields(drafter: type) -> list[dataclasses.Field]:
    """Return the fields of the constructor, without ``noise``, which ``Plan`` sets."""
    fields = dataclasses.fields(drafter)
    return [field for field in fields if field.init and field.name != "noise"]


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
