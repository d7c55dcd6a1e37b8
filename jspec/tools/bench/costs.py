"""The time of a generation by part (prefill, drafting, target, accepting, host), and its memory.

The loop is one program on the device, and no clock sees into it. So some rounds run once more, each
part in its own program, on the state that the round began with. The rest of a round, after drafting
and the target's pass, is acceptance and commit. A round that is launched alone takes longer than
one in the loop, so the loop's round is divided in the same proportions.
"""

import functools
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Array, Draft, Params, Request, Shared, Tree
from jspec.engine import round
from jspec.engine.functional import Batch, advance, copied, start
from jspec.engine.loop import DecodeState, init_shared
from jspec.engine.plan import Pass, Plan
from jspec.engine.sequences import SequenceParams
from jspec.sharding import mesh as mesh_lib
from jspec.tools.bench.contenders import Ours
from jspec.util.promotion import standard_promotion

_ROUNDS, _REPEATS = 6, 4  # rounds that are timed; runs of each part, of which the best counts
_WARM_UP = 2  # rounds before them: a drafter may still prefill


def measure(run: Ours) -> dict[str, Any]:
    """Return the milliseconds of each part, and the bytes of weights and states.

    They are those of the first engine. The keys of ``split_ms`` are ``prompt`` (prefill of a
    batch), ``drafting``, ``target`` and ``accepting`` (of a round), ``round`` (of the loop) and
    ``host`` (of a call: checking, padding, reading back).
    """
    with mesh_lib.on(mesh_lib.of(run.llm.build.params)):
        return _measured(run)


def _measured(run: Ours) -> dict[str, Any]:
    case, plan, params = run.case, run.llm.build.plan, run.llm.build.params
    requests = [each for part in run.requests.values() for each in part][: case.batch_size]
    rows = [
        SequenceParams(
            each.token_ids,
            case.max_tokens,
            temperature=case.temperature,
            seed=case.seed + index,
            stream=0,
        )
        for index, each in enumerate(requests)
    ]
    engines = run.llm.runtime.num_engines
    prompts = [{"prompt_token_ids": each.token_ids} for each in requests] * engines
    settings = [case.sampling_params(index, ignore_eos=True) for index in range(len(prompts))]
    prefilled = lambda: start(plan, params, rows).replace(shared=init_shared(plan))
    prompt = _best(prefilled)
    decoding = _best(lambda batch: advance(plan, params, batch), prefilled)
    answers = advance(plan, params, prefilled()).answers
    rounds = max(max(answer.rounds for answer in answers), 1)
    call = _best(lambda _: run.llm.generate(prompts, settings), lambda: run.llm.load_shared(None))
    drafting, target, accepting = _shares(plan, params, prefilled, rounds) * decoding / rounds
    seconds = {
        "prompt": prompt,
        "drafting": drafting,
        "target": target,
        "accepting": accepting,
        "round": decoding / rounds,
        "host": max(call - prompt - decoding, 0.0),
    }
    state = start(plan, params, rows).state
    return {
        "split_ms": {name: 1e3 * float(value) for name, value in seconds.items()},
        "memory_bytes": {
            "target": _bytes(params.target),
            "drafter": _bytes(params.drafter),
            "target_cache": _bytes(state.cache),
            "drafter_state": _bytes(state.memory),
            "peak": _peak_bytes(),
        },
    }


def _shares(plan: Plan, params: Params, prefilled: Callable[[], Batch], rounds: int) -> np.ndarray:
    """Return the shares of drafting, of the target's pass and of the rest in a round.

    Times at least the last of the ``rounds``.
    """
    batch = advance(plan, params, prefilled(), min(_WARM_UP, rounds - 1))
    totals = np.zeros(3)
    for _ in range(_ROUNDS):
        if bool(batch.state.done.all()):
            break
        inputs = plan, params, batch.request, batch.shared, batch.state
        size = plan.passes(len(batch.state.done))[int(_drafted(*inputs)[0])]
        # Each program contains the one before it. The launch is in all of them and cancels out.
        seconds = [
            _best(_launch),
            _best(lambda inputs=inputs: _drafted(*inputs)),
            _best(lambda inputs=inputs, size=size: _logits(size, *inputs)),
            _best(lambda one: advance(plan, params, one, 1), lambda batch=batch: copied(batch)),
        ]
        totals += np.maximum(np.diff(seconds), 0.0)
        batch = advance(plan, params, batch, 1)
    return totals / max(totals.sum(), 1e-12)


@jax.jit
@standard_promotion
def _launch() -> Array:
    return jnp.int32(0)


@functools.partial(jax.jit, static_argnames="plan")
@standard_promotion
def _drafted(
    plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState
) -> Array:
    """Draft; return the index of the pass that the draft takes.

    A sum of the tokens comes second, so that XLA computes them.
    """
    draft, _, listed = _first_half(plan, params, request, shared, state)
    index = round.smallest_pass(plan.passes(len(listed)), listed)
    return jnp.stack([index, jnp.where(listed, draft.tokens, 0).sum()])


@functools.partial(jax.jit, static_argnames=("size", "plan"))
@standard_promotion
def _logits(
    size: Pass, plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState
) -> Array:
    """Draft; return the logits of a pass of that size."""
    drafted = _first_half(plan, params, request, shared, state)
    return round.run_pass(plan, (size,), params, state.cache, *drafted)[-1].logits


def _first_half(
    plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState
) -> tuple[Draft, Tree, Array]:
    """Return a draft, its tree, and the nodes to verify, bool [B, N]."""
    draft, tree, _ = round.first_half(plan, params, request, shared, state)
    return draft, tree, draft.valid & ~state.done[:, None]


def _best(run: Callable, prepare: Callable[[], Any] | None = None) -> float:
    """Return the least seconds of a few runs after one that compiles; ``prepare`` is not timed."""
    seconds = []
    for _ in range(_REPEATS + 1):
        prepared = () if prepare is None else (jax.block_until_ready(prepare()),)
        begin = time.perf_counter()
        jax.block_until_ready(run(*prepared))
        seconds.append(time.perf_counter() - begin)
    return min(seconds[1:])


def _bytes(tree: Any) -> int:
    return sum(getattr(leaf, "nbytes", 0) for leaf in jax.tree.leaves(tree))


def _peak_bytes() -> int:
    """Return the peak memory of the device, or of this process if the device is a CPU."""
    stats = jax.devices()[0].memory_stats()
    if stats and "peak_bytes_in_use" in stats:
        return stats["peak_bytes_in_use"]
    unit = 1 if sys.platform == "darwin" else 1024
    return unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
