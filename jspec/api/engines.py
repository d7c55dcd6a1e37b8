"""The engines of an ``LLM``, from its arguments."""

import functools
import logging
import os

from jax.sharding import Mesh

from jspec.api import processes
from jspec.api.backends import Backends
from jspec.api.build import Build, build_plan
from jspec.api.config import SpeculativeConfig
from jspec.api.engine_args import EngineArgs
from jspec.checkpoints.loading import LoadedModel
from jspec.core.types import Params
from jspec.engine import memory
from jspec.engine.memory_plan import MemoryPlan, plan_memory
from jspec.engine.pages import PAGE_SIZE
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.engine.replicas import Replicas
from jspec.sharding import mesh as mesh_lib
from jspec.sharding.channel import Channel

_log = logging.getLogger("jspec.api.llm")  # The name in the docs.


def load(
    model: str | os.PathLike | LoadedModel,
    args: EngineArgs,
    speculative: SpeculativeConfig,
    max_num_seqs: int,
) -> tuple[Build, Replicas]:
    """Return the plan and its weights, and its engines."""
    channel = processes.join(args)
    with processes.together(channel):
        meshes = mesh_lib.make_all(args.tensor_parallel_size, args.data_parallel_size)
        build = build_plan(
            model,
            speculative,
            dtype=args.dtype,
            max_model_len=args.max_model_len,
            tokenizer=args.tokenizer,
            deterministic=args.deterministic,
            backends=Backends(
                args.attention_backend,
                args.sampling_backend,
                PAGE_SIZE if args.block_size is None else args.block_size,
                args.kv_cache_dtype,
            ),
            mesh=meshes[0] if args.tensor_parallel_size > 1 else None,
            expert_parallel=args.enable_expert_parallel,
            quantization=args.quantization,
            check=functools.partial(_check, args, speculative, channel, max_num_seqs),
        )
    return build, _replicas_of(args, build, meshes, channel, max_num_seqs)


def _check(
    args: EngineArgs,
    speculative: SpeculativeConfig,
    channel: Channel | None,
    max_num_seqs: int,
    plan: Plan,
    params: Params,
) -> MemoryPlan:
    """Log and return the memory plan, before weights are loaded.

    Raise ValueError if the device has too little memory, or other processes have another model. A
    ``max_model_len`` that was given must fit. Of the model's own limit, a page must.
    """
    processes.check_model(channel, plan, params)
    limit = args.max_model_len
    planned = plan_memory(
        plan,
        params,
        {name: getattr(args, name) for name in memory.SETTINGS},
        memory.this_device(params, args.tensor_parallel_size * args.data_parallel_size),
        max_num_seqs=max_num_seqs,
        max_model_len=plan.target.max_positions if limit is None else limit,
        longest=limit,
        shares_prefixes=args.enable_prefix_caching,
        tensor_parallel_size=args.tensor_parallel_size,
        draft_tensor_parallel_size=speculative.draft_tensor_parallel_size,
    )
    _log.info("%s", planned)
    if planned.least > planned.memory:  # The pool refuses a setting that leaves it no page.
        planned.check()
    return planned


def _replicas_of(
    args: EngineArgs,
    build: Build,
    meshes: list[Mesh | None],
    channel: Channel | None,
    max_num_seqs: int,
) -> Replicas:
    """Return the engines of a build, one on each mesh; only in the first of several processes."""
    num_tokens = max_num_seqs * build.max_model_len
    make_pool = functools.partial(
        memory.pool_if_any,
        build.plan,
        settings={name: getattr(args, name) for name in memory.SETTINGS},
        shares_prefixes=args.enable_prefix_caching,
        num_tokens=num_tokens,
        num_seqs=max_num_seqs,
        reserved=build.memory_plan.workspace if build.memory_plan else 0,
    )
    make_pool = processes.making_pools(channel, make_pool, num_tokens)
    if channel is not None and channel.index:
        processes.follow(channel, meshes[0], build, make_pool, max_num_seqs)
    replicas = Replicas(
        build.plan,
        build.params,
        meshes=meshes,
        make_pool=make_pool,
        num_slots=max_num_seqs,
        capacity=build.max_model_len,
        profile=Profile(nodes=args.per_request_stats == "detailed"),
    )
    if channel is not None:
        (engine,) = replicas.engines
        channel.lead(engine.runner.worker, engine.pool)
    return replicas
