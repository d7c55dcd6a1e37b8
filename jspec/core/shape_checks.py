"""What targets, drafters and rules must give in a round: a mistake is told by its name.

All of it looks at types, shapes and dtypes alone, while a round is traced: compiled programs pay
nothing for it.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Array, Draft, Memory, Rounds, Shared, Target, TargetOutput
from jspec.util.messages import kind_of, shown


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
    shape = nodes if np.ndim(draft.parents) == 2 else nodes[1:]
    if not isinstance(draft.parents, np.ndarray) and (
        len(shape) == 1 or not isinstance(draft.parents, jax.Array)
    ):
        raise ValueError(
            f"{name} gave parents as {kind_of(draft.parents)}; parents of all rows are static: a "
            "NumPy array [N], as of jspec.topology.chain, or else an array [B, N]."
        )
    check("parents", draft.parents, shape, jnp.integer)
    if draft.sampled is not None:
        check("sampled", draft.sampled, nodes, jnp.bool_)
    if draft.logits is not None:
        width = vocab_size if draft.draft_to_target is None else len(draft.draft_to_target)
        rows = min((*jnp.shape(draft.logits)[1:2], nodes[1]))  # the last may be missing
        check("logits", draft.logits, (batch, rows, width), jnp.floating)
    _check_distribution(name, drafter, draft)
    if draft.max_depth != drafter.max_depth:
        raise ValueError(
            f"{name} drafted with max_depth={draft.max_depth}, but the drafter has "
            f"max_depth={drafter.max_depth}; give Draft(max_depth=...) that one."
        )
    _check_order(name, draft.parents, draft.max_depth)
    return proposed


def check_scored(
    target: Target,
    out: TargetOutput,
    nodes: tuple[int, int],
    cache: Any,
    capture_layers: tuple[int, ...],
) -> TargetOutput:
    """What ``forward`` gave, if it may be.

    Args:
      target: that gave it.
      out: its output.
      nodes: B and N.
      cache: of the target, whose entries say what those of the nodes are like.
      capture_layers: of the drafter.

    Raises:
      ValueError: it is no ``TargetOutput`` of these nodes, lacks hidden states, or has entries that
        the cache cannot take.
    """
    name = f"{type(target).__name__}.forward"
    if not isinstance(out, TargetOutput):
        raise ValueError(f"{name} must return a jspec.types.TargetOutput, not {_kinds(out)}.")
    _check_array(name, nodes, "logits", out.logits, (*nodes, target.vocab_size), jnp.floating)
    if len(out.features) != len(capture_layers):
        raise ValueError(
            f"{name} gave {len(out.features)} features, but the drafter captures "
            f"capture_layers={capture_layers}: one [B, N, D] of each."
        )
    for index, feature in enumerate(out.features):
        shape = (*nodes, *jnp.shape(feature)[-1:])
        _check_array(name, nodes, f"features[{index}]", feature, shape, jnp.floating)
    _check_entries(name, nodes, out.tree_kv, cache.layers)
    return out


def _check_entries(
    name: str, nodes: tuple[int, int], given: tuple[Any, ...], layers: tuple[Any, ...]
) -> None:
    """Refuses what ``kv.append`` would not write, or write wrongly: one slot in place of N."""
    if jax.tree.structure(given) != jax.tree.structure(layers):
        raise ValueError(
            f"{name} gave tree_kv={_kinds(given)} for a cache of layers={_kinds(layers)}; give an "
            "entry of the cache's own kind for each layer."
        )
    held = jax.tree.leaves(layers)
    for (path, leaf), like in zip(jax.tree_util.tree_leaves_with_path(given), held, strict=True):
        wanted = (*like.shape[:2], nodes[1], *like.shape[3:])
        if jnp.shape(leaf) != wanted:
            raise ValueError(
                f"{name} gave tree_kv{jax.tree_util.keystr(path)} of shape "
                f"{list(jnp.shape(leaf))} in place of {list(wanted)}: as the cache's, with a slot "
                f"for each of the N={nodes[1]} nodes."
            )


def check_judged(
    rule: str, judged: tuple[Array, ...], draft: Draft, next_logits: tuple[int, int] | None
) -> tuple[Array, Array, Array]:
    """What a rule's walk gave, if it may be.

    Args:
      rule: its name.
      judged: path, number of accepted nodes, and the logits of the token after them.
      draft: that was judged.
      next_logits: their shape; None where nobody reads them.

    Raises:
      ValueError: it is something else.
    """
    name = f"the walk of rule {rule!r}"
    if not isinstance(judged, tuple) or len(judged) != 3:
        raise ValueError(
            f"{name} must return (path, num_accepted, next_logits), not {_kinds(judged)}."
        )
    batch = len(draft.tokens)
    check = functools.partial(_check_array, name, draft.tokens.shape)
    check("path", judged[0], (batch, draft.max_depth + 1), jnp.integer)
    check("num_accepted", judged[1], (batch,), jnp.integer)
    if next_logits is not None:
        check("next_logits", judged[2], next_logits, jnp.floating)
    return judged


def check_learned(drafter: Rounds, learned: tuple[Memory, Shared]) -> tuple[Memory, Shared]:
    """What ``update`` gave, if it may be.

    Raises:
      ValueError: it is not a memory and what is shared.
    """
    name = f"{type(drafter).__name__}.update"
    if not isinstance(learned, tuple) or len(learned) != 2:
        raise ValueError(f"{name} must return (memory, shared), not {_kinds(learned)}.")
    return learned


def check_kept(
    drafter: Rounds, before: dict[str, Any], after: dict[str, Any], prompt: bool = False
) -> None:
    """Refuses what cannot go round a loop, as its form changes.

    Args:
      drafter: whose round it was.
      before: memory and what is shared, by name, as the round began.
      after: as it ended.
      prompt: whether it was no round, but a part of the prompt that was taken in.

    Raises:
      ValueError: their structures, shapes or dtypes differ.
    """
    old, new = (dict(jax.tree_util.tree_leaves_with_path(tree)) for tree in (before, after))
    changed = functools.partial(_changed, drafter, prompt)
    if old.keys() != new.keys():
        raise changed(", ".join(map(_name, new)), ", ".join(map(_name, old)))
    for path, leaf in old.items():
        kinds = [(jnp.shape(x), x.dtype) for x in map(jnp.asarray, (leaf, new[path]))]
        if kinds[0] != kinds[1]:
            was, became = (f"{_name(path)} of {dtype}{list(shape)}" for shape, dtype in kinds)
            raise changed(became, was)
    forms = [jax.tree.structure(tree) for tree in (after, before)]
    if forms[0] != forms[1]:  # the same arrays, or none, in other containers
        raise changed(*map(str, forms))


def _changed(drafter: Rounds, prompt: bool, became: str, was: str) -> ValueError:
    name = type(drafter).__name__
    where = f"{name}.absorb" if prompt else f"a round of {name}"
    return ValueError(
        f"{where} ends with {became or 'nothing'}, but began with {was or 'nothing'}; "
        f"{'absorb' if prompt else 'propose and update'} must hand on what init allocated in its "
        "form."
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
            f"{name} gave {field} of {dtype}{list(found)} in place of {wanted}{list(shape)}: there "
            f"are B={nodes[0]} rows of N={nodes[1]} nodes, the root included."
        )


def _check_distribution(name: str, drafter: Rounds, draft: Draft) -> None:
    """Refuses laws that nobody would read, and nodes that were drawn from none."""
    if draft.logits is not None and drafter.proposal == "point":
        raise ValueError(
            f"{name} recorded logits, the laws that its drafts were drawn from, but the drafter "
            "has proposal='point', by which nothing is drawn; say how, as in proposal = 'chain'."
        )
    if draft.logits is None and draft.sampled is not None:
        raise ValueError(
            f"{name} says by sampled which nodes were drawn, but gives no logits, their laws; give "
            "both or neither."
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
