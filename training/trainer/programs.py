"""The compiled programs of a run: initial state, step, held-out metrics."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.core.types import Array
from training.data.batch import Batch
from training.trainer.mesh import BATCH, shardings, used
from training.trainer.optim import make_optimizer, make_schedule
from training.trainer.settings import TrainerSettings
from training.trainer.task import Task


@struct.dataclass
class TrainState:
    """The state on devices that a step changes."""

    step: Array  # int32 [], number of steps so far
    params: Any  # float32
    optimizer: Any


class Programs(NamedTuple):
    """Jitted functions. ``frozen`` is an argument: constants would be compiled in."""

    layout: TrainState  # shapes, dtypes and shardings
    init: Callable[[Any], TrainState]  # (frozen)
    step: Callable[..., tuple[TrainState, dict]]  # (state, frozen, batch, wishes); donates state
    metrics: Callable[[Any, Any, Batch], dict]  # (params, frozen, batch)
    is_finite: Callable[[TrainState], Array]  # bool []


def make_programs(task: Task, frozen: Any, settings: TrainerSettings, mesh: Mesh) -> Programs:
    """Return the programs of ``task`` on ``mesh``; each is compiled at its first call."""
    optimizer, schedule = make_optimizer(settings), make_schedule(settings)
    weights_key, noise_key = jax.random.split(jax.random.key(settings.seed))

    def init(frozen) -> TrainState:
        params = task.init(weights_key, frozen)
        return TrainState(jnp.int32(0), params, optimizer.init(params))

    shapes = jax.eval_shape(init, frozen)
    state_at, frozen_at = shardings(shapes, mesh), shardings(frozen, mesh)
    everywhere = NamedSharding(mesh, PartitionSpec())
    gradients = _gradients(task, settings.accumulate, mesh, state_at.params, frozen_at)

    def step(state: TrainState, frozen, batch: Batch, wishes: Array | None):
        key = jax.random.fold_in(noise_key, state.step)
        grads, metrics = gradients(state.params, frozen, batch, key)
        metrics |= {"grad_norm": optax.global_norm(grads), "learning_rate": schedule(state.step)}
        if wishes is not None:
            metrics["wish"] = wishes.max()
        updates, optimizer_state = optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        return TrainState(state.step + 1, params, optimizer_state), metrics

    def metrics(params, frozen, batch: Batch) -> dict:
        params, frozen = used(params, state_at.params), used(frozen, frozen_at)
        return task.loss(params, frozen, batch, None)[1]

    def is_finite(state: TrainState) -> Array:
        floats = [x for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)]
        return jnp.stack([jnp.isfinite(x).all() for x in floats]).all()

    return Programs(
        layout=jax.tree.map(
            lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at),
            shapes,
            state_at,
        ),
        init=jax.jit(init, out_shardings=state_at),
        step=jax.jit(step, donate_argnums=0, out_shardings=(state_at, everywhere)),
        metrics=jax.jit(metrics, out_shardings=everywhere),
        is_finite=jax.jit(is_finite, out_shardings=everywhere),
    )


def _gradients(task: Task, parts: int, mesh: Mesh, params_at: Any, frozen_at: Any):
    """Return a function of (params, frozen, batch, key) to means over ``parts`` micro-batches."""

    def loss(params, frozen, batch: Batch, key):
        return task.loss(used(params, params_at), used(frozen, frozen_at), batch, key)

    differentiate = jax.value_and_grad(loss, has_aux=True)
    spread = lambda grads: jax.lax.with_sharding_constraint(grads, params_at)

    def of_part(params, frozen, batch: Batch, key):
        (objective, metrics), grads = differentiate(params, frozen, batch, key)
        return spread(grads), {"objective": objective} | metrics

    def cut(leaf: Array) -> Array:
        # Part i takes every `parts`-th row, so each device only splits its own rows.
        rows = jnp.moveaxis(leaf.reshape(-1, parts, *leaf.shape[1:]), 1, 0)
        spec = PartitionSpec(None, *BATCH)
        return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, spec))

    def over_parts(params, frozen, batch: Batch, key):
        if parts == 1:
            return of_part(params, frozen, batch, key)

        def accumulate(total, part):
            index, batch = part
            grads, metrics = of_part(params, frozen, batch, jax.random.fold_in(key, index))
            return jax.tree.map(jnp.add, total, grads), metrics

        zeros = spread(jax.tree.map(jnp.zeros_like, params))
        pieces = (jnp.arange(parts), jax.tree.map(cut, batch))
        total, metrics = jax.lax.scan(accumulate, zeros, pieces)
        return jax.tree.map(lambda x: x / parts, total), jax.tree.map(jnp.mean, metrics)

    return over_parts
