"""What targets, drafters and their weights must be: a mistake is told by its name.

Checked when a plan is built and when a batch starts; what they give is checked in ``round_checks``.
"""

import dataclasses
from collections.abc import Iterable
from typing import Any, get_args

from jspec.core.types import Drafter, MultiMode, Params, Proposal, Target
from jspec.util.messages import kind_of, shown
from jspec.util.values import is_whole

_TARGET = ("vocab_size", "max_positions", "init_cache", "forward")
_DRAFTER = ("max_depth", "tree_size", "capture_layers", "proposal", "noise", "init", "prefill")
_ROUNDS = ("propose", "update")
_MULTI_MODE = ("modes", "select_mode")


def check_target(target: Target) -> None:
    """Refuses what is no target.

    Raises:
      ValueError: it is a class, lacks members, or cannot be hashed.
    """
    hint = "pass a jspec.Target, such as jspec.load(...).target"
    if hasattr(target, "target") and hasattr(target, "params"):
        hint = "pass its .target, and its .params as the weights"
    _check_members("target", target, _TARGET, hint)


def check_drafter(drafter: Drafter) -> None:
    """Refuses what is no drafter.

    Raises:
      ValueError: it is a class, lacks members, cannot be hashed, or declares what none can be.
    """
    hint = "pass a jspec.Drafter, such as jspec.NGram(4, 2, 5)"
    if isinstance(drafter, str):
        hint = f"names are for jspec.LLM's speculative_config; {hint}"
    elif hasattr(drafter, "target") or hasattr(drafter, "forward"):
        hint = (
            "a model drafts by jspec.DraftModel(model.config, num_speculative_tokens), with its "
            "weights as drafter_params"
        )
    more = _MULTI_MODE if isinstance(drafter, MultiMode) else _ROUNDS
    _check_members("drafter", drafter, (*_DRAFTER, *more), hint)
    least = drafter.max_depth + 1 if is_whole(drafter.max_depth) else 1
    layers, distributions = drafter.capture_layers, get_args(Proposal)
    indices = isinstance(layers, tuple) and all(is_whole(layer, 0) for layer in layers)
    for member, holds, wanted in (
        ("max_depth", is_whole(drafter.max_depth, 0), "a whole number of at least 0"),
        (
            "tree_size",
            is_whole(drafter.tree_size, least),
            f"a whole number of at least {least}, root included",
        ),
        ("capture_layers", indices, "a tuple of hidden_states indices, () for none"),
        (
            "proposal",
            drafter.proposal in distributions,
            f"one of {', '.join(map(repr, distributions))}",
        ),
        ("noise", drafter.noise in ("own", "target"), "'own' or 'target'"),
    ):
        if not holds:
            value = shown(getattr(drafter, member))
            raise ValueError(f"{type(drafter).__name__}.{member}={value} must be {wanted}.")


def sharing_noise(drafter: Drafter) -> Drafter:
    """The drafter as it draws with the target's noise, which rule ``coupled`` is for.

    Point masses are not drawn.

    Raises:
      ValueError: it draws, but has no field to be told so.
    """
    if drafter.proposal == "point":
        return drafter
    name, is_dataclass = type(drafter).__name__, dataclasses.is_dataclass(drafter)
    fields = dataclasses.fields(drafter) if is_dataclass else ()
    if not any(field.name == "noise" and field.init for field in fields):
        raise ValueError(
            f"rule='coupled' has drafts drawn with the target's noise, but {name} has no field "
            "noise: Literal['own', 'target'] = 'own' to be told so; add it to the frozen "
            "dataclass, and draw with jspec.sampling.draw_target where it is 'target'."
        )
    return dataclasses.replace(drafter, noise="target")


def _check_members(role: str, given: Any, members: Iterable[str], hint: str) -> None:
    if isinstance(given, type):
        raise ValueError(
            f"{role}={given.__name__} is a class; pass an instance of it, {given.__name__}(...)."
        )
    missing = [name for name in members if not hasattr(given, name)]
    if missing:
        raise ValueError(f"{role}={shown(given, 60)} has no {', '.join(missing)}; {hint}.")
    check_hashable(role, given)


def check_hashable(role: str, given: Any) -> None:
    """Refuses what cannot be part of a plan.

    Raises:
      ValueError: it cannot be hashed.
    """
    try:
        hash(given)
    except TypeError as error:
        raise ValueError(
            f"{role}={type(given).__name__} must be hashable, as it is part of the key of compiled "
            f"programs: {error}; make it a frozen dataclass, its settings tuples and frozensets."
        ) from None


def check_captured(capture_layers: tuple[int, ...], num_layers: int, name: str = "") -> None:
    """Refuses indices of hidden states that a target of ``num_layers`` has not.

    Raises:
      ValueError: there are such in ``capture_layers``, of the drafter ``name``.
    """
    if max(capture_layers, default=0) > num_layers:
        raise ValueError(
            f"{name and f'{name}.'}capture_layers={capture_layers!r} must be at most {num_layers}, "
            "the layers of the target."
        )


def check_params(target: Target, drafter: Drafter, params: Params) -> None:
    """Refuses weights that are not those of target and drafter, where these can tell.

    Raises:
      ValueError: ``params`` is no ``jspec.Params``, or holds other weights.
    """
    if not isinstance(params, Params):
        raise ValueError(
            f"params is {kind_of(params)}; pass jspec.Params(target, drafter): the weights of both."
        )
    check_weights(target, params.target)
    check_weights(drafter, params.drafter)


def check_weights(user: Any, weights: Any) -> None:
    """Refuses weights that are not those of ``user``, which has ``check_params`` if it can tell.

    Raises:
      ValueError: it says that they are not.
    """
    check = getattr(user, "check_params", None)
    if check is None:
        return
    try:
        check(weights)
    except ValueError as error:
        raise ValueError(f"the weights do not fit {type(user).__name__}: {error}") from None


def check_kind(weights: Any, *kinds: type) -> None:
    """Refuses weights that are of none of ``kinds``.

    Raises:
      ValueError: they are not.
    """
    if not isinstance(weights, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"pass {names}, not {'None' if weights is None else kind_of(weights)}.")


def check_config(config: Any) -> None:
    """Refuses a model, or what was loaded of one, where its sizes are wanted.

    Raises:
      ValueError: it has a ``config`` of its own.
    """
    if hasattr(config, "config"):
        raise ValueError(f"config={shown(config, 60)} is {kind_of(config)}; pass its .config.")
