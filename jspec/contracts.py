"""What targets and drafters are held to: a mistake is told by its name, not by what it breaks.

All of it looks at types, shapes and dtypes alone, when a plan is built, when a batch starts and
when a round is traced. Compiled programs pay nothing for it.
"""

import functools
from collections.abc import Iterable
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checks import is_whole
from jspec.naming import kind_of, shown
from jspec.types import (
    Array,
    Draft,
    Drafter,
    Geared,
    Memory,
    Params,
    Proposal,
    Rounds,
    Shared,
    Target,
)

_TARGET = ("vocab_size", "max_positions", "init_cache", "forward")
_DRAFTER = ("max_depth", "tree_size", "capture_layers", "proposal", "noise", "init", "absorb")
_ROUNDS = ("propose", "update")
_GEARED = ("gears", "shift")


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
    more = _GEARED if isinstance(drafter, Geared) else _ROUNDS
    _check_members("drafter", drafter, (*_DRAFTER, *more), hint)
    least = drafter.max_depth + 1 if is_whole(drafter.max_depth) else 1
    layers, laws = drafter.capture_layers, get_args(Proposal)
    indices = isinstance(layers, tuple) and all(is_whole(layer, 0) for layer in layers)
    for member, holds, wanted in (
        ("max_depth", is_whole(drafter.max_depth, 0), "a whole number of at least 0"),
        ("tree_size", is_whole(drafter.tree_size, least),
         f"a whole number of at least {least}, root included"),
        ("capture_layers", indices, "a tuple of hidden_states indices, () for none"),
        ("proposal", drafter.proposal in laws, f"one of {', '.join(map(repr, laws))}"),
        ("noise", drafter.noise in ("own", "target"), "'own' or 'target'"),
    ):  # fmt: skip
        if not holds:
            value = shown(getattr(drafter, member))
            raise ValueError(f"{type(drafter).__name__}.{member}={value} must be {wanted}.")


def _check_members(role: str, given: Any, members: Iterable[str], hint: str) -> None:
    if isinstance(given, type):
        raise ValueError(
            f"{role}={given.__name__} is a class; pass an instance of it, {given.__name__}(...)."
        )
    missing = [name for name in members if not hasattr(given, name)]
    if missing:
        raise ValueError(f"{role}={shown(given, 60)} has no {', '.join(missing)}; {hint}.")
    try:
        hash(given)
    except TypeError as error:
        raise ValueError(
            f"{role}={type(given).__name__} must be hashable, as it is part of the key of compiled "
            f"programs: {error}; make it a frozen dataclass, its settings tuples and not lists."
        ) from None


# --- Weights -----------------------------------------------------------------------------------


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


# --- Rounds ------------------------------------------------------------------------------------


def check_proposed(
    drafter: Rounds, proposed: tuple[Draft, Memory], batch: int, vocab_size: int
) -> tuple[Draft, Memory]:
    """What ``propose`` gave, if it may be.

    Args:
      drafter: that gave it.
      proposed: the draft and the drafter's memory.
      batch: rows.
      vocab_size: of the target.

    Raises:
      ValueError: it is not a draft of ``tree_size`` nodes a row and a memory.
    """
    name = f"{type(drafter).__name__}.propose"
    if not isinstance(proposed, tuple) or len(proposed) != 2 or not isinstance(proposed[0], Draft):
        raise ValueError(f"{name} must return (jspec.Draft, memory), not {_kinds(proposed)}.")
    draft, _ = proposed
    nodes = (batch, drafter.tree_size)
    check = functools.partial(_check_array, name, nodes)
    check("tokens", draft.tokens, nodes, jnp.integer)
    check("valid", draft.valid, nodes, jnp.bool_)
    shape = nodes if jnp.ndim(draft.parents) == 2 else nodes[1:]
    check("parents", draft.parents, shape, jnp.integer)
    if draft.sampled is not None:
        check("sampled", draft.sampled, nodes, jnp.bool_)
    if draft.logits is not None:
        width = vocab_size if draft.draft_to_target is None else len(draft.draft_to_target)
        rows = min((*jnp.shape(draft.logits)[1:2], nodes[1]))  # the last may be missing
        check("logits", draft.logits, (batch, rows, width), jnp.floating)
    if draft.max_depth != drafter.max_depth:
        raise ValueError(
            f"{name} drafted with max_depth={draft.max_depth}, but the drafter has "
            f"max_depth={drafter.max_depth}; give Draft(max_depth=...) that one."
        )
    _check_order(name, draft.parents, draft.max_depth)
    return proposed


def check_learned(drafter: Rounds, learned: tuple[Memory, Shared]) -> tuple[Memory, Shared]:
    """What ``update`` gave, if it may be.

    Raises:
      ValueError: it is not a memory and what is shared.
    """
    name = f"{type(drafter).__name__}.update"
    if not isinstance(learned, tuple) or len(learned) != 2:
        raise ValueError(f"{name} must return (memory, shared), not {_kinds(learned)}.")
    return learned


def check_kept(drafter: Rounds, before: dict[str, Any], after: dict[str, Any]) -> None:
    """Refuses what cannot go round a loop, as its form changes.

    Args:
      drafter: whose round it was.
      before: memory and what is shared, by name, as the round began.
      after: as it ended.

    Raises:
      ValueError: their structures, shapes or dtypes differ.
    """
    old, new = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (before, after))
    if old.keys() != new.keys():
        raise _changed(drafter, ", ".join(map(_name, new)), ", ".join(map(_name, old)))
    for path, leaf in old.items():
        kinds = [(jnp.shape(x), x.dtype) for x in map(jnp.asarray, (leaf, new[path]))]
        if kinds[0] != kinds[1]:
            was, became = (f"{_name(path)} of {dtype}{list(shape)}" for shape, dtype in kinds)
            raise _changed(drafter, became, was)


def _changed(drafter: Rounds, became: str, was: str) -> ValueError:
    return ValueError(
        f"a round of {type(drafter).__name__} ends with {became or 'nothing'}, but began with "
        f"{was or 'nothing'}; propose and update must hand on what init allocated in its form."
    )


def _name(path: tuple) -> str:
    return path[0].key + jax.tree_util.keystr(path[1:])


def _check_array(
    name: str, nodes: tuple[int, int], field: str, array: Array, shape: tuple[int, ...], kind: type
) -> None:
    found, dtype = jnp.shape(array), jnp.result_type(array)
    if found != shape or not jnp.issubdtype(dtype, kind):
        wanted = {jnp.bool_: "bool", jnp.integer: "int32", jnp.floating: "float32"}[kind]
        raise ValueError(
            f"{name} gave {field} of {dtype}{list(found)}, but they must be {wanted}{list(shape)}: "
            f"B={nodes[0]} rows of N={nodes[1]} nodes (tree_size), the root included."
        )


def _check_order(name: str, parents: Array | np.ndarray, max_depth: int) -> None:
    """Of static parents; those that are drafted cannot be read here."""
    for row in np.atleast_2d(parents) if isinstance(parents, np.ndarray) else ():
        depth = [0]
        for node, parent in enumerate(row[1:].tolist(), 1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"{name} gave parents={shown(row.tolist(), 60)}, where node {node} does not "
                    "stand behind its parent; number nodes from the root down."
                )
            depth.append(depth[parent] + 1)
        if max(depth) > max_depth:
            raise ValueError(
                f"{name} gave parents={shown(row.tolist(), 60)}, {max(depth)} deep, but the "
                f"drafter has max_depth={max_depth}."
            )


def _kinds(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(x).__name__ for x in value)})"
    return kind_of(value)
