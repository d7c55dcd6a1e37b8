"""The decoding loop: draft a tree, verify it in one pass, commit the accepted path."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec.core import kv_cache, logits_processors, logprobs, modes, shape_checks, trees
from jspec.core.history import extend_history, trim_draft, with_root
from jspec.core.logprobs import Logprobs
from jspec.core.types import (
    Array,
    Draft,
    History,
    Memory,
    MultiMode,
    Params,
    Request,
    Shared,
    Sharing,
    TargetOutput,
    Tree,
    Verdict,
)
from jspec.engine.plan import Plan


@struct.dataclass
class Trace:
    """What was drafted and accepted in each of the first R rounds, for inspection."""

    accepted: Array  # [R, B] int32, -1 where the row did not run
    drafted: Array  # [R, B] int32
    tokens: Array | None  # [R, B, N] int32, -1 where a node is not valid; None: not kept
    parents: Array | None  # [R, B, N] int32


@struct.dataclass
class Stats:
    """Counts of a generation, one row each."""

    rounds: Array  # [B] int32, passes of the target while the row ran
    drafts: Array  # [B] int32, rounds with at least one drafted token
    drafted: Array  # [B] int32, drafted tokens
    accepted: Array  # [B, K+1] int32, how many drafts had 0..K accepted tokens
    trace: Trace | None = None


@struct.dataclass
class DecodeState:
    """What changes every round. Consumed by ``decode``."""

    history: History
    cache: kv_cache.KVCache
    memory: Memory
    done: Array  # [B] bool
    stats: Stats
    round: Array  # [] int32
    logprobs: Logprobs | None = None  # of the tokens of ``history``, where they are wanted


@functools.partial(jax.jit, static_argnames="plan", donate_argnames=("shared", "state"))
def decode(
    plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState, until: Array
) -> tuple[Shared, DecodeState]:
    """Steps until every row is done or ``state.round`` reaches ``until`` (int32 []).

    One ``lax.while_loop`` on the device. ``plan`` is static; ``shared`` and ``state`` are consumed.
    Called again with a larger ``until`` it goes on where it stopped, in the same program.
    """

    turn = functools.partial(_turn, plan, params, request, until)
    body = functools.partial(_looped, plan, turn)
    return lax.while_loop(functools.partial(_running, until), body, (shared, state))


def step(
    plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState
) -> tuple[Shared, DecodeState]:
    """Adds 1 to K+1 tokens to every unfinished row.

    Invariant, on entry and on exit: the caches hold every committed token but the
    last one, which is the root (node 0) of the next draft.
    """
    return _turn(plan, params, request, state.round + 1, shared, state)


def _running(until: Array, carry: tuple[Shared, DecodeState]) -> Array:
    _, state = carry
    return ~state.done.all() & (state.round < until)


def _looped(
    plan: Plan, run: Callable, carry: tuple[Shared, DecodeState]
) -> tuple[Shared, DecodeState]:
    """What ``run`` makes of a loop's carry, in the same form."""
    kept = lambda shared, state: {"memory": state.memory, "shared": shared}
    after = run(*carry)
    shape_checks.check_kept(plan.drafter, kept(*carry), kept(*after))
    return after


def _turn(
    plan: Plan, params: Params, request: Request, until: Array, shared: Shared, state: DecodeState
) -> tuple[Shared, DecodeState]:
    """One round, or where the drafter is ``MultiMode`` all that run in the gear of the next one."""
    if not isinstance(plan.drafter, MultiMode):
        return _round(plan, params, request, shared, state)
    with jax.named_scope("draft"):
        memory, mode = plan.drafter.select_mode(
            params, request, shared, state.memory, state.history
        )
    carry = shared, state.replace(memory=memory)
    for index, drafter in enumerate(plan.drafter.modes):
        own = plan.in_mode(drafter)
        carry = _in_mode(own, params, request, until, mode == index, *carry)
    return carry


def _in_mode(
    plan: Plan,
    params: Params,
    request: Request,
    until: Array,
    wanted: Array,
    shared: Shared,
    state: DecodeState,
) -> tuple[Shared, DecodeState]:
    """Rounds of one gear, if it is ``wanted`` (bool []), until it is not or a row has ended."""
    first, done = state.round, state.done

    def keeps_mode(carry: tuple[Shared, DecodeState]) -> Array:
        shared, state = carry
        more = plan.drafter.keeps_mode(request, shared, state.memory, state.history)
        more &= (state.done == done).all()
        more |= state.round == first  # a turn has a round, or there might never be one
        return wanted & more & _running(until, carry)

    body = functools.partial(_looped, plan, functools.partial(_round, plan, params, request))
    return lax.while_loop(keeps_mode, body, (shared, state))


def _round(
    plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState
) -> tuple[Shared, DecodeState]:
    """One round of a drafter of one kind."""
    # Draft N nodes a row, root included, parents before children.
    with jax.named_scope("draft"):  # names that profilers show
        proposed = plan.drafter.propose(params, request, shared, state.memory, state.history)
        draft, memory = shape_checks.check_proposed(
            plan.drafter, proposed, state.done.shape[0], plan.target.vocab_size
        )
        draft = with_root(draft, state.history)
    tree = trees.from_parents(draft.parents, draft.max_depth)
    tree = trees.broadcast(tree, state.done.shape[0])
    draft = logits_processors.prune(request.sampling.processors, state.history, draft, tree)
    draft = logits_processors.force(request.sampling.processors, state.history, draft)
    draft = trim_draft(request, state.history, draft, tree, state.done)

    # Verify all nodes in one pass of the target. Rows that are done emit nothing.
    out, verdict = _verify(plan, params, request, state, draft, tree)
    verdict = verdict.hold(state.done)

    scores = state.logprobs
    if scores is not None:
        scores = logprobs.record(
            scores, request.sampling, state.history, draft, tree, verdict, out.logits
        )

    # Commit the accepted path and forget the rest.
    with jax.named_scope("commit"):
        history, verdict, ended = extend_history(request, state.history, draft, verdict)
        learned = plan.drafter.update(params, request, shared, memory, history, draft, verdict, out)
        memory, shared = shape_checks.check_learned(plan.drafter, learned)
        cache = kv_cache.commit(state.cache, out.tree_kv, verdict)
    return shared, DecodeState(
        history=history,
        cache=cache,
        memory=memory,
        done=state.done | ended,
        stats=record(state.stats, state.round, draft, tree, verdict),
        round=state.round + 1,
        logprobs=scores,
    )


def init_shared(plan: Plan) -> Shared:
    """What the drafter keeps for all calls, as it is before the first: () if there is nothing."""
    return plan.drafter.init_shared() if isinstance(plan.drafter, Sharing) else ()


def on_finished(plan: Plan, shared: Shared, state: DecodeState) -> Shared:
    """Hands the drafter the rows that were ended from outside and will run no more.

    ``shared`` is consumed. Rows that ended by themselves were handed over in that round.
    """
    return _on_finished(plan, shared, state) if isinstance(plan.drafter, Sharing) else shared


@functools.partial(jax.jit, static_argnames="plan", donate_argnames="shared")
def _on_finished(plan: Plan, shared: Shared, state: DecodeState) -> Shared:
    return plan.drafter.on_finished(shared, state.memory, state.history)


@functools.partial(jax.jit, static_argnames="plan", donate_argnames=("cache", "memory", "scores"))
def prefill(
    plan: Plan,
    params: Params,
    cache: kv_cache.KVCache,
    memory: Memory,
    chunk: Array,
    start: Array,
    valid: Array,
    scores: Logprobs | None = None,
) -> tuple[kv_cache.KVCache, Memory, Logprobs | None]:
    """Takes a chunk of the prompt into the caches of target and drafter.

    ``cache``, ``memory`` and ``scores`` are consumed. A prompt is taken in but for its last token,
    which is the root of the first round.

    Args:
      plan: static.
      params: weights.
      cache: of the target, holding the first ``start`` tokens of every row that is not exhausted.
      memory: of the drafter.
      chunk: int32 [B, C+1], C tokens and one of look-ahead.
      start: int32 [], position of the chunk's first token.
      valid: int32 [B], how many of the C tokens each row takes in.
      scores: given back with the C tokens behind the chunk's first. None: not wanted.
    """
    batch, size = chunk.shape[0], chunk.shape[1] - 1
    tree = trees.broadcast(trees.from_parents(trees.chain(size - 1), size - 1), batch)
    out = _forward(plan, params, chunk[:, :-1], tree, cache)
    rows = jnp.broadcast_to(jnp.arange(size), (batch, size))
    prefilled = plan.drafter.prefill(params, memory, chunk, out.features, start, valid)
    forms = {"memory": memory}, {"memory": prefilled}
    shape_checks.check_kept(plan.drafter, *forms, prompt=True)
    if scores is not None:
        fresh = logprobs.score(out.logits, chunk[:, 1:], scores.count, scores.mode)
        scores = logprobs.write(scores, fresh, jnp.broadcast_to(start + 1, (batch,)))
    return kv_cache.append(cache, out.tree_kv, rows, valid), prefilled, scores


def _verify(
    plan: Plan, params: Params, request: Request, state: DecodeState, draft: Draft, tree: Tree
) -> tuple[TargetOutput, Verdict]:
    """Runs target and rule on the smallest rung of the ladder that holds every valid node.

    Branches read the cache, which is free; none may return it, which would copy it.
    """

    def bucket_of(size: int):
        def run() -> tuple[TargetOutput, Verdict]:
            part, shape = _first_nodes(draft, size), trees.first_nodes(tree, size)
            with jax.named_scope("target"):
                out = _forward(plan, params, part.tokens, shape, state.cache)
            with jax.named_scope("accept"):
                verdict = plan.verify(request, part, shape, out.logits, state.history)
            return _pad(out, verdict, draft.tokens.shape[1], tree.max_depth)

        return run

    if len(plan.node_buckets) == 1:
        return bucket_of(plan.node_buckets[0])()
    last = jnp.where(draft.valid, jnp.arange(draft.valid.shape[1]), 0).max()
    fits = jnp.array(plan.node_buckets) > last
    return lax.switch(jnp.argmax(fits), [bucket_of(size) for size in plan.node_buckets])


def _forward(
    plan: Plan, params: Params, nodes: Array, tree: Tree, cache: kv_cache.KVCache
) -> TargetOutput:
    """The target's pass over ``nodes`` [B, N]."""
    layers = plan.drafter.capture_layers
    out = plan.target.forward(params.target, nodes, tree, cache, layers)
    return shape_checks.check_scored(plan.target, out, nodes.shape, cache, layers)


def _first_nodes(draft: Draft, count: int) -> Draft:
    cut = lambda x: None if x is None else x[:, :count]
    return draft.replace(
        tokens=cut(draft.tokens),
        parents=draft.parents[..., :count],
        valid=cut(draft.valid),
        logits=cut(draft.logits),
        sampled=cut(draft.sampled),
        max_depth=min(draft.max_depth, count - 1),
    )


def _pad(
    out: TargetOutput, verdict: Verdict, num_nodes: int, max_depth: int
) -> tuple[TargetOutput, Verdict]:
    """Brings the results of a smaller rung to the shapes of the largest."""

    nodes = lambda axis: lambda x: modes.widen(x, axis, num_nodes)
    out = TargetOutput(
        logits=nodes(1)(out.logits),
        features=jax.tree.map(nodes(1), out.features),
        tree_kv=jax.tree.map(nodes(2), out.tree_kv),
    )
    return out, verdict.replace(path=modes.widen(verdict.path, 1, max_depth + 1))


def init_stats(plan: Plan, batch: int) -> Stats:
    """Zero counts, and room for the trace that ``plan`` asks for."""
    zeros = lambda *shape: jnp.zeros(shape, jnp.int32)
    trace = None
    if plan.record_rounds:
        none = lambda *nodes: zeros(plan.record_rounds, batch, *nodes) - 1
        of_nodes = lambda: none(plan.drafter.tree_size) if plan.record_nodes else None
        trace = Trace(none(), none(), of_nodes(), of_nodes())
    return Stats(
        zeros(batch), zeros(batch), zeros(batch), zeros(batch, plan.drafter.max_depth + 1), trace
    )


def record(stats: Stats, round_index: Array, draft: Draft, tree: Tree, verdict: Verdict) -> Stats:
    """Counts a round. Rows that were done count nothing."""
    ran = verdict.num_emitted > 0
    num_drafted = draft.valid[:, 1:].sum(1, dtype=jnp.int32)
    drew = ran & (num_drafted > 0)
    num_accepted = jnp.maximum(verdict.num_emitted - 1, 0)
    histogram = num_accepted[:, None] == jnp.arange(stats.accepted.shape[1])
    return Stats(
        rounds=stats.rounds + ran,
        drafts=stats.drafts + drew,
        drafted=stats.drafted + jnp.where(ran, num_drafted, 0),
        accepted=stats.accepted + (histogram & drew[:, None]),
        trace=_record_trace(stats.trace, round_index, draft, tree, ran, num_accepted, num_drafted),
    )


def _record_trace(trace, round_index, draft, tree, ran, num_accepted, num_drafted):
    if trace is None:
        return None
    put = lambda buffer, row: buffer.at[round_index].set(row, mode="drop")
    trace = trace.replace(
        accepted=put(trace.accepted, jnp.where(ran, num_accepted, -1)),
        drafted=put(trace.drafted, num_drafted),
    )
    if trace.tokens is None:
        return trace
    shown = draft.valid & ran[:, None]
    missing = trace.tokens.shape[2] - shown.shape[1]  # a gear's drafts may be smaller
    nodes = lambda x: jnp.pad(jnp.where(shown, x, -1), ((0, 0), (0, missing)), constant_values=-1)
    return trace.replace(
        tokens=put(trace.tokens, nodes(draft.tokens)),
        parents=put(trace.parents, nodes(tree.parents)),
    )
