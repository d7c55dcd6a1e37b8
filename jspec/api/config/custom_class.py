"""``custom_class``: a drafter of the user's own, named by the dotted path of its class.

The class is what every method is: a frozen dataclass with the members of ``jspec.core.types.Drafter``,
whose fields are its config keys. Two of them, ``target`` and ``vocab_size``, are filled in where
the config does not give them. A drafter with weights has one method besides,

    def load_params(self, target_params) -> a pytree of arrays

which is called once, after the target's weights are loaded; what it returns is handed to its other
methods as ``params.drafter``. Where the weights lie is for a field of its own to say.
"""

import dataclasses
import inspect
import os
import pkgutil
from collections.abc import Mapping
from typing import Any, Protocol, get_type_hints, runtime_checkable

from jspec import verify
from jspec.api.config.keys import CUSTOM_CLASS, KEYS, RULE_KEYS
from jspec.core import validation
from jspec.core.types import Drafter, Sharing
from jspec.drafters.adaptive.drafter import Adaptive
from jspec.models.decoder import Decoder
from jspec.util.messages import did_you_mean, shown

_FILLED_IN = ("target", "vocab_size")
# Keys that are read here and never by the class.
_OURS = {
    "method",
    "model",
    "rejection_sample_method",
    "draft_tensor_parallel_size",
    "adaptive_length",
    "num_speculative_tokens_per_batch_size",
    *sum(RULE_KEYS.values(), ()),
}
_SETTINGS = tuple(get_type_hints(Drafter))  # those it inherits, too
_METHODS = ("init", "prefill", "propose", "update")
_SHARING = ("init_shared", "on_finished")


@runtime_checkable
class LoadsParams(Protocol):
    """What a drafter of the user's own has besides, if it has weights."""

    def load_params(self, target_params: Any) -> Any:
        """The weights, a pytree of arrays."""


def is_asked_for(given: Mapping[str, Any]) -> bool:
    """Whether the method is ``custom_class``, or left out and the model a dotted path, as in vLLM.

    A directory of that name is a model, not a class.
    """
    if given.get("method") is not None:
        return given["method"] == CUSTOM_CLASS
    path = given.get("model")
    if not isinstance(path, str) or "." not in path or os.path.exists(path):
        return False
    return all(part.isidentifier() for part in path.split("."))


def find(path: Any) -> type:
    """Imports the class at a dotted path and checks that it is one of drafters.

    Raises:
      ValueError: there is none, or members of ``jspec.core.types.Drafter`` are missing or take other
        arguments; all of them are named.
    """
    if not isinstance(path, str) or "." not in path:
        raise ValueError(
            f"method={CUSTOM_CLASS!r} needs as 'model' the dotted path of a class, such as "
            f"'my_package.my_module.MyDrafter'; got {shown(path)}."
        )
    try:
        found = pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"model={shown(path)} cannot be imported: {str(error)[:200]}. Is the package "
            "installed, or its folder on PYTHONPATH?"
        ) from error
    if not isinstance(found, type):
        raise ValueError(f"model={shown(path)} is {type(found).__name__!r}, not a class.")
    _check_class(found)
    return found


def settings(drafter: type, given: Mapping[str, Any]) -> dict[str, Any]:
    """The keys that the class takes, lists as tuples, so that the drafter can be hashed.

    Raises:
      ValueError: a key is unknown to the class, or one that it needs is not given.
    """
    fields = {field.name: field for field in _fields(drafter)}
    takes = [name for name in fields if name not in _FILLED_IN]
    chosen = {}
    for name, value in given.items():
        if name in fields:
            if value is not None or name not in KEYS:
                chosen[name] = _frozen(value)
        elif name not in _OURS and not (name in KEYS and KEYS[name].asks_nothing(value)):
            raise ValueError(
                f"speculative_config: {drafter.__name__} takes no {shown(name)}; it takes "
                f"{', '.join(map(repr, takes)) or 'no settings'}{did_you_mean(name, takes)}"
            )
    missing = [
        name
        for name, field in fields.items()
        if field.default is dataclasses.MISSING
        and field.default_factory is dataclasses.MISSING
        and name not in chosen
        and name not in _FILLED_IN
    ]
    if missing:
        raise ValueError(
            f"speculative_config: {drafter.__name__} needs {', '.join(map(repr, missing))}; give "
            f"{'it' if len(missing) == 1 else 'them'} as keys."
        )
    return chosen


def build(
    drafter: type, chosen: Mapping[str, Any], target: Decoder, rule: str | verify.Rule
) -> Drafter:
    """The drafter for ``target``, whose sizes are checked where they cannot be before.

    Raises:
      ValueError: a member has a value that no drafter can have, it cannot be hashed, or it cannot
        draw with the target's noise though the rule wants that.
    """
    names = {field.name for field in _fields(drafter)}
    filled = {"target": target, "vocab_size": target.vocab_size}
    made = drafter(**{name: filled[name] for name in names & filled.keys()} | dict(chosen))
    validation.check_drafter(made)
    validation.check_captured(made.capture_layers, target.config.num_layers, drafter.__name__)
    if (verify.RULES[rule] if isinstance(rule, str) else rule).shares_noise:
        validation.sharing_noise(made)  # raises where it cannot be told
    return made


def params_of(drafter: Drafter, target_params: Any) -> Any:
    """The weights of a drafter of the user's own; None where it has none."""
    own = drafter.drafter if isinstance(drafter, Adaptive) else drafter
    return own.load_params(target_params) if isinstance(own, LoadsParams) else None


def _check_class(drafter: type) -> None:
    """Names everything that is wrong with a class at once."""
    name = drafter.__name__
    if not dataclasses.is_dataclass(drafter) or not drafter.__dataclass_params__.frozen:
        raise ValueError(
            f"{name} must be a frozen dataclass, so that plans with equal settings share their "
            "compiled programs; decorate it with @dataclasses.dataclass(frozen=True)."
        )
    fields = {field.name for field in dataclasses.fields(drafter)}
    wrong = [
        f"no {each!r}" for each in _SETTINGS if each not in fields and not hasattr(drafter, each)
    ]
    wrong += [
        f"the field {each!r} has the name of a key that says something else"
        for each in sorted(_OURS & fields)
    ]
    shares = any(hasattr(drafter, each) for each in _SHARING)
    for protocol, members in (
        (Drafter, _METHODS),
        (Sharing, _SHARING if shares else ()),
        (LoadsParams, ("load_params",) if hasattr(drafter, "load_params") else ()),
    ):
        wrong += filter(None, (_complaint(drafter, protocol, each) for each in members))
    if wrong:
        raise ValueError(
            f"{name} is no drafter: {'; '.join(wrong)}. jspec.types.Drafter says what each member "
            "is; a subclass of jspec.NoDrafter inherits those that it does not change."
        )


def _complaint(drafter: type, protocol: type, method: str) -> str | None:
    """What is wrong with a method, if anything."""
    found = inspect.getattr_static(drafter, method, None)
    if found is None:
        return f"no method {method!r}"
    wanted = list(inspect.signature(getattr(protocol, method)).parameters)
    given = f"{method}({', '.join(wanted)})"
    if not inspect.isfunction(found):
        return f"{method!r} is no plain method {given}"
    try:
        inspect.signature(found).bind(*wanted)
    except TypeError:
        return f"{method!r} does not take the arguments of {given}"
    return None


def _fields(drafter: type) -> list[dataclasses.Field]:
    """What the constructor takes; ``noise`` is set by ``Plan`` alone."""
    fields = dataclasses.fields(drafter)
    return [field for field in fields if field.init and field.name != "noise"]


def _frozen(value: Any) -> Any:
    return tuple(map(_frozen, value)) if isinstance(value, list | tuple) else value
