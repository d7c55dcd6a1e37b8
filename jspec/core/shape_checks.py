"""Checks of the arrays that targets, drafters and rules return in a round.

They read types, shapes and dtypes only, while a round is traced. Compiled programs pay nothing.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Array, Draft, Drafter, Memory, Shared, Target, TargetOutput
from jspec.util.messages import kind_of, shown


def check_propose(
    drafter: Drafter, proposed: tuple[Draft, Memory], batch: int, vocab_size: int
) -> tuple[Draft, Memory]:
    """Return the result of ``propose``; raise ValueError if it is no (draft, memory) that fits."""
    name = f"{type(drafter).__name__}.propose"
    if not isinstance(proposed, tuple) or len(proposed) != 2 or not isinstance(proposed[0], Draft):
        raise ValueError(f"{name} must return (jspec.Draft, memory), not {_kinds(proposed)}.")
    draft, _ = proposed
    nodes = (batch, drafter.tree_size)
    check = functools.partial(_check_array, name, nodes)
    check("tokens", draft.tokens, nodes, jnp.integer)
    check("valid", draft.valid, nodes, jnp.bool_)
    shape = nodes if np.ndim(draft.parents) == 2 else nodes[1:]
    if not isinstance(draft.parents, np.ndarray) and (
        len(shape) == 1 or not isinstance(draft.parents, jax.Array)
    ):
        raise ValueError(
            f"{name} gave parents as {kind_of(draft.parents)}; give a static NumPy array [N] for "
            "all rows, as from jspec.core.trees.chain, or an array [B, N]."
        )
    check("parents", draft.parents, shape, jnp.integer)
    if draft.sampled is not None:
        check("sampled", draft.sampled, nodes, jnp.bool_)
    if draft.logits is not None:
        width = vocab_size if draft.draft_to_target is None else len(draft.draft_to_target)
        rows = min((*jnp.shape(draft.logits)[1:2], nodes[1]))  # trailing rows may be missing
        check("logits", draft.logits, (batch, rows, width), jnp.floating)
    _check_distributions(name, drafter, draft)
    if draft.max_depth != drafter.max_depth:
        raise ValueError(
            f"{name} drafted with max_depth={draft.max_depth}, but the drafter has "
            f"max_depth={drafter.max_depth}; pass that to Draft(max_depth=...)."
        )
    _check_order(name, draft.parents, draft.max_depth)
    return proposed


def _check_distributions(name: str, drafter: Drafter, draft: Draft) -> None:
    if draft.logits is not None and drafter.proposal == "deterministic":
        raise ValueError(
            f"{name} recorded logits, but the drafter has proposal='deterministic', by which "
            "nothing is drawn; declare how it draws, as in proposal = 'chain'."
        )
    if draft.logits is None and draft.sampled is not None:
        raise ValueError(
            f"{name} marks drawn nodes in sampled, but gives no logits, their distributions; give "
            "both or neither."
        )


def _check_order(name: str, parents: Array | np.ndarray, max_depth: int) -> None:
    """Check static parents; dynamic ones cannot be read while tracing."""
    for row in np.atleast_2d(parents) if isinstance(parents, np.ndarray) else ():
        depth = [0]
        for node, parent in enumerate(row[1:].tolist(), 1):
            if not 0 <= parent < node:
                raise ValueError(
                    f"{name} gave parents={shown(row.tolist(), 60)}, where node {node} does not "
                    "follow its parent; number nodes from the root down."
                )
            depth.append(depth[parent] + 1)
        if max(depth) > max_depth:
            raise ValueError(
                f"{name} gave parents={shown(row.tolist(), 60)}, {max(depth)} deep, but the "
                f"drafter has max_depth={max_depth}."
            )


def check_captured(capture_layers: tuple[int, ...], num_layers: int, name: str = "") -> None:
    """Raise ValueError if hidden-state indices exceed ``num_layers``; ``name`` is the drafter's."""
    if max(capture_layers, default=0) > num_layers:
        raise ValueError(
            f"{name and f'{name}.'}capture_layers={capture_layers!r} must be at most {num_layers}, "
            "the layers of the target."
        )


def check_forward(
    target: Target, out: TargetOutput, nodes: tuple[int, int], cache: Any, layers: tuple[int, ...]
) -> TargetOutput:
    """Return the output of ``forward`` over ``nodes`` (B, N); raise ValueError if it is invalid.

    It must have the hidden states of ``layers``, and cache entries that fit ``cache``.
    """
    name = f"{type(target).__name__}.forward"
    if not isinstance(out, TargetOutput):
        raise ValueError(f"{name} must return a jspec.core.types.TargetOutput, not {_kinds(out)}.")
    _check_array(name, nodes, "logits", out.logits, (*nodes, target.vocab_size), jnp.floating)
    if len(out.features) != len(layers):
        raise ValueError(
            f"{name} gave {len(out.features)} features, but the drafter reads "
            f"capture_layers={layers}: one [B, N, D] of each."
        )
    for index, feature in enumerate(out.features):
        shape = (*nodes, *jnp.shape(feature)[-1:])
        _check_array(name, nodes, f"features[{index}]", feature, shape, jnp.floating)
    _check_entries(name, nodes, out.tree_kv, cache.layers)
    return out


def _check_entries(
    name: str, nodes: tuple[int, int], entries: tuple[Any, ...], layers: tuple[Any, ...]
) -> None:
    """Check that the entries of a cache can append these; one slot would broadcast to N."""
    expected = tuple(layer.of_nodes(*nodes) for layer in layers)
    if jax.tree.structure(entries) != jax.tree.structure(expected):
        raise ValueError(
            f"{name} gave tree_kv={_kinds(entries)} for a cache of layers={_kinds(layers)}; give "
            f"{_kinds(expected)}: what the entry of each layer appends."
        )
    leaves = jax.tree.leaves(expected)
    for (path, leaf), like in zip(jax.tree.leaves_with_path(entries), leaves, strict=True):
        if jnp.shape(leaf) != like.shape:
            raise ValueError(
                f"{name} gave tree_kv{jax.tree_util.keystr(path)} of shape "
                f"{list(jnp.shape(leaf))} in place of {list(like.shape)}: the cache's shape, with "
                f"a slot for each of the N={nodes[1]} nodes."
            )


def check_walk(
    rule: str, result: tuple[Array, ...], draft: Draft, next_logits: tuple[int, int] | None
) -> tuple[Array, Array, Array]:
    """Return the result of the walk of ``rule``; raise ValueError if it is invalid.

    ``next_logits`` is the expected shape of the third array; None if it is not used.
    """
    name = f"the walk of rule {rule!r}"
    if not isinstance(result, tuple) or len(result) != 3:
        raise ValueError(
            f"{name} must return (path, num_accepted, next_logits), not {_kinds(result)}."
        )
    batch = len(draft.tokens)
    check = functools.partial(_check_array, name, draft.tokens.shape)
    check("path", result[0], (batch, draft.max_depth + 1), jnp.integer)
    check("num_accepted", result[1], (batch,), jnp.integer)
    if next_logits is not None:
        check("next_logits", result[2], next_logits, jnp.floating)
    return result


def check_update(drafter: Drafter, updated: tuple[Memory, Shared]) -> tuple[Memory, Shared]:
    """Return the result of ``update``; raise ValueError unless it is (memory, shared)."""
    if not isinstance(updated, tuple) or len(updated) != 2:
        name = type(drafter).__name__
        raise ValueError(f"{name}.update must return (memory, shared), not {_kinds(updated)}.")
    return updated


def check_carry(
    drafter: Drafter, before: dict[str, Any], after: dict[str, Any], prompt: bool = False
) -> None:
    """Raise ValueError if a round (``prompt``: a prefill) changes structure, shapes or dtypes.

    ``before`` and ``after`` hold the memory and the shared state, by name.
    """

    def error(became: str, was: str) -> ValueError:
        name = type(drafter).__name__
        return ValueError(
            f"{f'{name}.prefill' if prompt else f'a round of {name}'} ends with "
            f"{became or 'nothing'}, but began with {was or 'nothing'}; "
            f"{'prefill' if prompt else 'propose and update'} must return the structure, shapes "
            "and dtypes that init allocated."
        )

    old, new = (dict(jax.tree.leaves_with_path(tree)) for tree in (before, after))
    if old.keys() != new.keys():
        raise error(", ".join(map(_leaf_name, new)), ", ".join(map(_leaf_name, old)))
    for path, leaf in old.items():
        kinds = [(jnp.shape(x), x.dtype) for x in map(jnp.asarray, (leaf, new[path]))]
        if kinds[0] != kinds[1]:
            was, became = (f"{_leaf_name(path)} of {dtype}{list(shape)}" for shape, dtype in kinds)
            raise error(became, was)
    structures = [jax.tree.structure(tree) for tree in (after, before)]
    if structures[0] != structures[1]:  # the same arrays in other containers
        raise error(*map(str, structures))


def _leaf_name(path: tuple) -> str:
    return path[0].key + jax.tree_util.keystr(path[1:])


def _check_array(
    name: str, nodes: tuple[int, int], field: str, array: Array, shape: tuple[int, ...], kind: type
) -> None:
    actual, dtype = jnp.shape(array), jnp.result_type(array)
    if actual != shape or not jnp.issubdtype(dtype, kind):
        expected = {jnp.bool_: "bool", jnp.integer: "int32", jnp.floating: "float32"}[kind]
        raise ValueError(
            f"{name} gave {field} of {dtype}{list(actual)} in place of {expected}{list(shape)}: "
            f"there are B={nodes[0]} rows of N={nodes[1]} nodes, root included."
        )


def _kinds(value: Any) -> str:
    if isinstance(value, tuple):
        return f"({', '.join(type(x).__name__ for x in value)})"
    return kind_of(value)
