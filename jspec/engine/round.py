"""One round: draft a tree, verify it in one target pass, commit the accepted path."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec import sharding
from jspec.core import entries, kv_cache, paging, shape_checks, token_fsm, trees
from jspec.core.history import extend_history, root_alone, trim_draft, with_root
from jspec.core.packing import Packing, packing_of
from jspec.core.types import (
    Array,
    Draft,
    History,
    Memory,
    Params,
    Request,
    Round,
    Shared,
    TargetOutput,
    Tree,
    Verdict,
)
from jspec.engine import backlog, launches
from jspec.engine.budget import Budget
from jspec.engine.launches import Launch
from jspec.engine.plan import Pass, Plan
from jspec.util.promotion import standard_promotion


@struct.dataclass
class DecodeState:
    """Everything that changes in a round. ``decode`` consumes it."""

    history: History
    cache: kv_cache.KVCache
    memory: Memory  # the drafter's memory
    done: Array  # [B] bool
    round: Array  # [] int32
    # Features that the drafter misses while K = 0; None if it never pauses (``engine.backlog``).
    missed: backlog.Waiting | None = None
    # The pools of the caches above, in order, where these have pages: what ``launch`` attaches.
    pools: tuple[Any, ...] = ()

    def attached(self, tables: tuple[Array, ...] | None) -> "DecodeState":
        """Return the state with its pools in the caches; the state itself without ``tables``."""
        if tables is None:
            return self
        cache, memory = paging.attach((self.cache, self.memory), self.pools, tables)
        return self.replace(cache=cache, memory=memory, pools=())

    def detached(self) -> "DecodeState":
        """Return the state with the pages of its caches in ``pools``."""
        (cache, memory), pools = paging.detach((self.cache, self.memory))
        return self.replace(cache=cache, memory=memory, pools=pools)

    def settled(self, tables: tuple[Array, ...] | None = None) -> "DecodeState":
        """Return the state as it lies between programs; ``tables`` as of ``attached``."""
        return entries.settled(self if tables is None else self.detached())

    @property
    def num_cached(self) -> Array:
        """The tokens that all caches hold, int32 [B]."""
        caches = paging.caches_of((self.cache, self.memory))
        return functools.reduce(jnp.minimum, (cache.length for cache in caches))


# Of the loop. The last item is None where no results are recorded.
Carry = tuple[Shared, DecodeState, Launch | None]


@functools.partial(jax.jit, static_argnames="plan")
@standard_promotion
def step(
    plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState
) -> tuple[Shared, DecodeState]:
    """Add 1 to K+1 tokens to every unfinished sequence.

    One program, compiled at the first call with a plan and shapes. Unlike ``decode`` it consumes
    nothing, so old states stay valid; ``jax.jit`` with ``donate_argnames`` saves the copy.

    Invariant, on entry and on exit: the caches hold every committed token except the last one,
    which is the root (node 0) of the next draft.
    """
    shared, state, _ = run_round(plan, params, request, None, (shared, state, None))
    return sharding.whole(shared), state.settled()


def run_round(
    plan: Plan, params: Params, request: Request, budget: Budget | None, carry: Carry
) -> Carry:
    """Run one round."""
    draft, tree, memory = first_half(plan, params, request, *carry[:2])
    carry = carry[0], carry[1].replace(memory=memory), carry[2]
    return second_half(plan, params, request, budget, carry, draft, tree)


def first_half(
    plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState
) -> tuple[Draft, Tree, Memory]:
    """Draft N nodes a sequence, the root first; return draft, tree, and the drafter's memory."""
    with jax.named_scope("draft"):  # names that profilers show
        draft, memory = _propose(plan, params, request, shared, state)
        draft = with_root(draft, state.history)
    tree = trees.broadcast(trees.from_parents(draft.parents, draft.max_depth), len(state.done))
    automaton = request.sampling.automaton
    if automaton is not None:
        draft = token_fsm.prune(automaton, state.history, draft, tree)
        draft = token_fsm.force(automaton, state.history, draft)
    return trim_draft(request, state.history, draft, tree, state.done), tree, memory


def _propose(
    plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState
) -> tuple[Draft, Memory]:
    """Return the draft, and the memory of a drafter that has caught up with the text."""
    memory, drafter = state.memory, plan.drafting
    if state.missed is not None and (drafter is not None or state.missed):
        memory = backlog.catch_up(
            plan.drafter,
            params,
            memory,
            waiting=state.missed,
            history=state.history,
            drafts=drafter is not None,
        )
    if drafter is None:
        return root_alone(state.history), memory
    proposed = drafter.propose(params, request, shared, memory, state.history)
    batch, vocab_size = state.done.shape[0], plan.target.vocab_size
    return shape_checks.check_propose(drafter, proposed, batch, vocab_size)


def second_half(
    plan: Plan,
    params: Params,
    request: Request,
    budget: Budget | None,
    carry: Carry,
    draft: Draft,
    tree: Tree,
) -> Carry:
    """Run the second half of a round: verify a draft, and commit what is accepted."""
    (shared, state, ran), proposed = carry, draft
    if budget is not None:
        draft = budget.cut(plan.passes(state.done.shape[0]), draft, tree, state.done)

    # Verify all nodes in one pass of the target. Finished sequences emit nothing.
    more = () if ran is None else ran.capture_layers
    out, verdict, passed = _verify(plan, params, request, state, draft, tree, more)
    count = len(plan.drafter.capture_layers)
    out, captured = out.replace(features=out.features[:count]), out.features[count:]
    verdict = verdict.replace(num_emitted=jnp.where(state.done, 0, verdict.num_emitted))
    if ran is not None:
        ran = launches.score(ran, request.sampling, state.history, draft, tree, verdict, out.logits)

    # Commit the accepted path and drop the rest.
    with jax.named_scope("commit"):
        history, verdict, ended = extend_history(request, state.history, draft, verdict)
        finished = Round(
            params=params,
            request=request,
            shared=shared,
            memory=state.memory,
            history=history,
            draft=draft,
            verdict=verdict,
            out=out,
        )
        memory, shared, missed = _update(plan, finished, state.missed)
        cache = kv_cache.commit(state.cache, out.tree_kv, verdict)
    if ran is not None:
        ran = launches.record(ran, proposed, draft, tree, verdict, passed, captured)
    state = state.replace(
        history=history,
        cache=cache,
        memory=memory,
        done=state.done | ended,
        round=state.round + 1,
        missed=missed,
    )
    return shared, state, ran


def _update(
    plan: Plan, round: Round, missed: backlog.Waiting | None
) -> tuple[Memory, Shared, backlog.Waiting | None]:
    """Update the drafter; a network that did not draft buffers the features instead."""
    if plan.drafting is not None or missed is None:
        drafter = plan.drafter if plan.drafting is None else plan.drafting
        return *shape_checks.check_update(drafter, drafter.update(round)), missed
    if missed:
        count = plan.drafter.missing(round.memory, round.history) - round.verdict.num_emitted
        missed = backlog.push(missed, count, round.out, round.verdict)
    return round.memory, round.shared, missed


def _verify(
    plan: Plan,
    params: Params,
    request: Request,
    state: DecodeState,
    draft: Draft,
    tree: Tree,
    more: tuple[int, ...],
) -> tuple[TargetOutput, Verdict, Array]:
    """Run target and rule in the smallest pass that holds every valid node of unfinished rows.

    ``more`` are layers whose hidden states follow those that the drafter reads.
    Return the number of nodes that its matmuls ran over too, int32 []. Branches may read the cache
    for free. None may return it, which would copy it.
    """
    batch, listed = draft.tokens.shape[0], draft.valid & ~state.done[:, None]
    passes, programs = plan.passes(batch), plan.programs(batch)

    def in_pass(sizes: Sequence[Pass]) -> Callable:
        def run() -> tuple[TargetOutput, Verdict]:
            with jax.named_scope("target"):
                nodes, part, out = run_pass(
                    plan, sizes, params, state.cache, draft, tree, listed, more
                )
            with jax.named_scope("accept"):
                verdict = plan.verify(request, nodes, part, out.logits, state.history)
            return _pad(out, verdict, draft.tokens.shape[1], tree.max_depth)

        return run

    index = smallest_pass(passes, listed)
    totals = jnp.array([size.total for size in passes], jnp.int32)
    branch = index if len(programs) > 1 else 0
    return *lax.switch(branch, list(map(in_pass, programs))), totals[index]


def smallest_pass(passes: Sequence[Pass], listed: Array) -> Array:
    """Return the index of the first pass that holds the nodes of ``listed`` (bool [B, N]).

    The index is int32 []. The last pass must hold every draft.
    """
    if len(passes) == 1:
        return jnp.int32(0)
    by_node = listed.sum(0, dtype=jnp.int32)  # one sum across chips
    last = jnp.where(by_node > 0, jnp.arange(len(by_node)), 0).max()
    nodes, totals = (np.array(part, np.int32) for part in list(zip(*passes, strict=True))[:2])
    return jnp.argmax((nodes > last) & (totals >= by_node.sum())).astype(jnp.int32)


def run_pass(
    plan: Plan,
    sizes: Sequence[Pass],
    params: Params,
    cache: kv_cache.KVCache,
    draft: Draft,
    tree: Tree,
    listed: Array,
    more: tuple[int, ...] = (),
) -> tuple[Draft, Tree, TargetOutput]:
    """Run the target on the first nodes of a draft; return draft and tree cut so.

    In packed passes, matmuls run over the nodes of ``listed`` (bool [B, N]) alone, in the smallest
    of ``sizes``, which have one number of nodes.
    """
    count, totals = sizes[-1].nodes, [size.total for size in sizes]
    nodes, part = _first_nodes(draft, count), trees.first_nodes(tree, count)
    is_list = totals[0] < len(listed) * count
    packing = packing_of(listed[:, :count], totals, plan.drafts_always) if is_list else None
    return nodes, part, forward(plan, params, nodes.tokens, part, cache, packing, more)


def forward(
    plan: Plan,
    params: Params,
    tokens: Array,
    tree: Tree,
    cache: kv_cache.KVCache,
    packing: Packing | None = None,
    more: tuple[int, ...] = (),
) -> TargetOutput:
    """Run the target on tokens [B, N]; capture the drafter's layers, and ``more`` after them."""
    layers = (*plan.drafter.capture_layers, *more)
    options = {} if packing is None else {"packing": packing}
    out = plan.target.forward(params.target, tokens, tree, cache, layers, **options)
    return shape_checks.check_forward(plan.target, out, tokens.shape, cache, layers)


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
    """Pad the results of a bucket to the shapes of the largest one."""
    nodes = lambda axis: lambda x: _widen(x, axis, num_nodes)
    out = TargetOutput(
        logits=nodes(1)(out.logits),
        features=jax.tree.map(nodes(1), out.features),
        tree_kv=jax.tree.map(nodes(entries.NODE_AXIS), out.tree_kv),
    )
    return out, verdict.replace(path=_widen(verdict.path, 1, max_depth + 1))


def _widen(x: Array, axis: int, size: int) -> Array:
    """Pad ``x`` with zeros to ``size`` along ``axis``: branches must return equal shapes."""
    missing = [(0, 0)] * x.ndim
    missing[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, missing)
