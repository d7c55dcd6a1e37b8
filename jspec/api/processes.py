"""An ``LLM`` whose target is split among the devices of several processes, on one host or more.

The first one has the scheduler, takes requests and returns answers. The others run what its workers
run. All of them must be started alike.
"""

import contextlib
import dataclasses
import hashlib
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jspec import sharding
from jspec.api.build import Build
from jspec.api.engine_args import EngineArgs
from jspec.core.types import Params
from jspec.engine.compilation import Compilation
from jspec.engine.loop import init_shared
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.worker import Worker
from jspec.sharding import mesh as mesh_lib
from jspec.sharding import processes
from jspec.sharding.channel import Channel
from jspec.util.messages import shown

_OWN = ("coordinator", "process_id")  # arguments that differ from process to process


def join(args: EngineArgs) -> Channel | None:
    """Return the channel to the other processes; None for one process.

    Raises:
      ValueError: the processes do not find each other, or were started with other arguments.
    """
    if args.coordinator is None:
        return None
    try:
        if not jax.distributed.is_initialized():
            processes.start(args.coordinator, args.num_processes, args.process_id)
    except RuntimeError as error:  # they did not come, or JAX has used its devices before
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"coordinator={shown(args.coordinator)}: {reason}") from None
    if jax.process_count() == 1:
        return None
    named = args.coordinator != "auto"
    channel = processes.connect(args.coordinator.rpartition(":")[0] if named else None)
    with channel.together():
        channel.check_same(_arguments(args))
        if args.data_parallel_size > 1:
            raise ValueError(
                f"data_parallel_size={args.data_parallel_size} needs one process, but there are "
                f"{channel.count}; start a server for each engine, and a load balancer in front of "
                "them (docs/scaling.md)."
            )
        if args.tensor_parallel_size != jax.device_count():
            raise ValueError(
                f"tensor_parallel_size={args.tensor_parallel_size} must be the number of devices "
                f"of all {channel.count} processes, which is {jax.device_count()}."
            )
    return channel


def together(channel: Channel | None) -> contextlib.AbstractContextManager:
    """Return a context that bad input in one process ends in all."""
    return contextlib.nullcontext() if channel is None else channel.together()


def check_model(channel: Channel | None, plan: Plan, params: Params) -> None:
    """Raise ValueError, in all processes, if they do not run the same models."""
    if channel is not None:
        shapes = jax.tree.map(lambda leaf: (leaf.shape, str(leaf.dtype)), params)
        text = re.sub(r" at 0x[0-9a-f]+", "", repr((plan, shapes)))
        digest = hashlib.sha256(text.encode()).hexdigest()[:12]
        channel.check_same({"model": f"one whose sizes have the digest {digest}"})


def making_pools(
    channel: Channel | None, make_pool: Callable[[Params], Pool | None], num_tokens: int
) -> Callable[[Params], Pool | None]:
    """Return ``make_pool`` for all processes, of whose pools none will grow.

    They have all pages at once, as many as each process can have: later one of them might lack
    memory alone. The devices are connected too, which waits for no process that compiles.
    """
    if channel is None:
        return make_pool

    def make(params: Params) -> Pool | None:
        ones = np.ones(jax.device_count(), np.float32)
        jax.block_until_ready(jax.jit(sharding.summed, static_argnums=0)(jnp.sum, ones))
        with channel.together():
            pool = make_pool(params)
        if pool is not None:
            every = channel.gather([kind.most for kind in pool.blocks.kinds])
            for kind, mosts in zip(pool.blocks.kinds, zip(*every, strict=True), strict=True):
                kind.most = min(mosts)
            pool.fix(pool.blocks.pages_of(num_tokens) + 1)
        return pool

    return make


def follow(
    channel: Channel,
    mesh: Mesh,
    build: Build,
    make_pool: Callable[[Params], Pool | None],
    num_slots: int,
) -> NoReturn:
    """Run what the first process runs, until it ends; then raise SystemExit."""
    with mesh_lib.on(mesh):
        plan, pool = build.plan, make_pool(build.params)
        worker = Worker(plan, build.params, shared=init_shared(plan), pool=pool)
        compilation = Compilation(
            worker, num_slots=num_slots, capacity=build.max_model_len, mesh=mesh
        )
        raise SystemExit(channel.follow(worker, pool, compilation))


def _arguments(args: EngineArgs) -> dict[str, str]:
    """Return what all processes must have in common, by name, for people to read."""
    given = {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}
    versions = {f"the version of {name}": metadata.version(name) for name in ("jax", "jaxlib")}
    versions["the version of jspec"] = metadata.version("jspec-decoding")
    platform = {"the kind of devices": jax.devices()[0].device_kind}
    common = {name: _text(value) for name, value in given.items() if name not in _OWN}
    return {**versions, **platform, **common}


def _text(value: Any) -> str:
    """Return a value as text; objects by their types, as they may name addresses."""
    if isinstance(value, dict):
        return shown({key: _text(each) for key, each in sorted(value.items())}, 200)
    is_plain = value is None or isinstance(value, str | int | float | tuple | list)
    return repr(value) if is_plain else type(value).__name__
