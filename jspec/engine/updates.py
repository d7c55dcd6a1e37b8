"""Weights and shared state of an engine, replaced between two steps, as in a training run."""

from typing import Any

import jax

from jspec.core import validation
from jspec.core.types import Array, Params


def replace_params(engine: Any, params: Params) -> None:
    """Replace the weights of an ``Engine`` between two steps; nothing is compiled again.

    Sequences that run go on, as after vLLM's ``update_weights``: they are preempted, and their
    texts so far are prefilled again with the new weights. The prefix cache is emptied. The
    drafter's shared state stays, since it consists of texts.

    Raises:
      ValueError: the weights belong to another model, or differ from the old ones in structure,
        shape or dtype. Nothing has changed then.
    """
    validation.check_params(engine.plan.target, engine.plan.drafter, params)
    _check_like(engine.params, params)
    while engine.preempt():  # the first call reads the launch in flight, which may end texts
        pass
    engine.runner.worker.put_params(params)
    if engine.pool is not None:
        engine.pool.blocks.clear_cache()


def replace_shared(engine: Any, shared: Any) -> None:
    """Replace the drafter's state that outlives calls; the engine consumes the new one."""
    engine.runner.put_shared(shared)


def _check_like(old: Params, new: Params) -> None:
    """Raise ValueError for weights that cannot take the place of the old ones."""
    before, after = (dict(jax.tree.leaves_with_path(params)) for params in (old, new))
    for path in (*before, *after):
        kinds = [_kind(leaves.get(path)) for leaves in (before, after)]
        if kinds[0] != kinds[1]:
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is {kinds[1]}, but the engine has {kinds[0]}; "
                "give weights of the same structure, shapes and dtypes, or make another engine."
            )
    validation.check_on_host("params", new)
    for path, leaf in after.items():
        if isinstance(leaf, jax.Array) and not (
            leaf.is_fully_addressable or leaf.is_fully_replicated
        ):
            raise ValueError(
                f"params{jax.tree_util.keystr(path)} is divided among devices of other processes; "
                "give whole arrays."
            )


def _kind(leaf: Array | None) -> str:
    return "missing" if leaf is None else f"{leaf.dtype}{list(leaf.shape)}"
