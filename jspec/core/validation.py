"""Checks of targets, drafters and their weights, when a plan is built and when a batch starts.

``shape_checks`` checks the arrays that they return in a round.
"""

import dataclasses
from typing import Any, get_args

import jax

from jspec.core.types import Drafter, Params, Proposal, Target
from jspec.util.messages import kind_of, shown
from jspec.util.values import is_whole


def check_target(target: Target) -> None:
    """Raise ValueError for what is no ``Target``, is not hashable, or lacks a size."""
    hint = "pass one, such as jspec.load(...).target, or inherit from jspec.Target"
    if hasattr(target, "target") and hasattr(target, "params"):
        hint = "pass its .target, and its .params as the weights"
    _check_kind_of("target", target, Target, hint)
    _check_declared(target, "vocab_size", "max_positions")


def check_drafter(drafter: Drafter) -> None:
    """Raise ValueError as ``check_target`` does, and if a member has an invalid value."""
    hint = (
        "pass one, such as jspec.NGram(4, 2, 5); a class of yours inherits from jspec.Drafter, or "
        "from jspec.NoDrafter and its defaults"
    )
    if isinstance(drafter, str):
        hint = "names are for jspec.LLM's speculative_config; pass jspec.NGram(4, 2, 5) or another"
    elif hasattr(drafter, "target") or hasattr(drafter, "forward"):
        hint = (
            "a model drafts by jspec.DraftModel(model.config, num_speculative_tokens), with its "
            "weights as drafter_params"
        )
    _check_kind_of("drafter", drafter, Drafter, hint)
    _check_declared(drafter, "max_depth", "tree_size", "proposal")
    least = drafter.max_depth + 1 if is_whole(drafter.max_depth) else 1
    layers, proposals = drafter.capture_layers, get_args(Proposal)
    indices = isinstance(layers, tuple) and all(is_whole(layer, 0) for layer in layers)
    size = f"a whole number of at least {least}, root included"
    for member, is_valid, expected in (
        ("max_depth", is_whole(drafter.max_depth, 0), "a whole number of at least 0"),
        ("tree_size", is_whole(drafter.tree_size, least), size),
        ("capture_layers", indices, "a tuple of hidden_states indices, () for none"),
        ("proposal", drafter.proposal in proposals, f"one of {', '.join(map(repr, proposals))}"),
        ("noise", drafter.noise in ("own", "target"), "'own' or 'target'"),
    ):
        if not is_valid:
            value = shown(getattr(drafter, member))
            raise ValueError(f"{type(drafter).__name__}.{member}={value} must be {expected}.")


def check_lengths(
    drafter: Drafter, lengths: tuple[int, ...], batch_sizes: tuple[tuple[int, int, int], ...]
) -> None:
    """Refuse a choice of K that the drafter cannot follow."""
    if not lengths and not batch_sizes:
        return
    name, most = type(drafter).__name__, drafter.max_depth
    fields = {field.name for field in dataclasses.fields(drafter)}
    is_chain = drafter.tree_size == most + 1
    if "num_speculative_tokens" not in fields or not is_chain or most < 1:
        raise ValueError(
            f"drafter={name} must draft chains of num_speculative_tokens; use a chain, or a "
            "fixed length."
        )
    if list(lengths) != sorted(set(lengths)) or lengths[-1:] != (most,):
        raise ValueError(f"lengths={lengths} must ascend to {most}, the drafter's K.")
    if lengths[0] < 0:
        raise ValueError(f"lengths={lengths} must be at least 0.")
    for least, last, length in batch_sizes:
        if not 1 <= least <= last or length not in lengths:
            raise ValueError(
                f"batch_sizes={batch_sizes} must be of 1 or more rows and of one of the lengths "
                f"{lengths}, unlike ({least}, {last}, {length})."
            )


def sharing_noise(drafter: Drafter) -> Drafter:
    """Return the drafter with ``noise="target"``; unchanged if it is deterministic.

    Raises:
      ValueError: the drafter draws, but has no field ``noise``.
    """
    if drafter.proposal == "deterministic":
        return drafter
    name, is_dataclass = type(drafter).__name__, dataclasses.is_dataclass(drafter)
    fields = dataclasses.fields(drafter) if is_dataclass else ()
    if not any(field.name == "noise" and field.init for field in fields):
        raise ValueError(
            f"rule='coupled' needs drafts that are drawn with the target's noise, but {name} has "
            "no field noise: Literal['own', 'target'] = 'own'; add it to the frozen dataclass, "
            "and draw with jspec.core.sampling.draw_target if it is 'target'."
        )
    return dataclasses.replace(drafter, noise="target")


def _check_kind_of(role: str, value: Any, base: type, hint: str) -> None:
    if isinstance(value, type):
        raise ValueError(
            f"{role}={value.__name__} is a class; pass an instance of it, {value.__name__}(...)."
        )
    if not isinstance(value, base):
        raise ValueError(f"{role}={shown(value, 60)} is no jspec.{base.__name__}; {hint}.")
    check_hashable(role, value)


def _check_declared(value: Target | Drafter, *members: str) -> None:
    missing = [name for name in members if not hasattr(value, name)]
    if missing:
        raise ValueError(
            f"{type(value).__name__} has no {', '.join(missing)}; declare it in the class, as a "
            "constant, a field or a property."
        )


def check_hashable(role: str, value: Any) -> None:
    """Raise ValueError if a part of a plan is not hashable."""
    try:
        hash(value)
    except TypeError as error:
        raise ValueError(
            f"{role}={type(value).__name__} must be hashable, because it keys compiled programs: "
            f"{error}; make it a frozen dataclass with tuples and frozensets as settings."
        ) from None


def check_params(target: Target, drafter: Drafter, params: Params) -> None:
    """Raise ValueError if ``params`` is not a ``jspec.Params`` of the target and the drafter."""
    if not isinstance(params, Params):
        raise ValueError(
            f"params is {kind_of(params)}; pass jspec.Params(target, drafter): the weights of both."
        )
    check_on_host("params", params)
    check_weights(target, params.target)
    check_weights(drafter, params.drafter)


def check_on_host(name: str, values: Any) -> None:
    """Raise ValueError if ``values`` of the argument ``name`` are traced, as inside ``jax.jit``."""
    if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(values)):
        raise ValueError(
            f"{name} holds traced arrays, but generate runs on the host; use jspec.decode inside "
            "jax.jit."
        )


def check_weights(owner: Target | Drafter, weights: Any) -> None:
    """Raise ValueError if the ``check_params`` of ``owner`` refuses the weights."""
    try:
        owner.check_params(weights)
    except ValueError as error:
        raise ValueError(f"the weights do not fit {type(owner).__name__}: {error}") from None


def check_kind(weights: Any, *kinds: type) -> None:
    """Raise ValueError if ``weights`` is not an instance of ``kinds``."""
    if not isinstance(weights, kinds):
        names = " or ".join(kind.__name__ for kind in kinds)
        raise ValueError(f"pass {names}, not {'None' if weights is None else kind_of(weights)}.")


def check_config(config: Any) -> None:
    """Raise ValueError if a model is passed in place of its config."""
    if hasattr(config, "config"):
        raise ValueError(f"config={shown(config, 60)} is {kind_of(config)}; pass its .config.")
