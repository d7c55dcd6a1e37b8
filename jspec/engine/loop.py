"""The decoding loop: draft a tree, verify it in one target pass, commit the accepted path."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec.core import kv_cache, logprobs, shape_checks, token_fsm, trees
from jspec.core.history import extend_history, trim_draft, with_root
from jspec.core.logprobs import Logprobs, Scoring
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
from jspec.engine import launches
from jspec.engine.budget import Budget
from jspec.engine.launches import Launch, Profile
from jspec.engine.plan import Pass, Plan, RoundPlan
from jspec.util.promotion import standard_promotion


@struct.dataclass
class DecodeState:
    """Everything that changes in a round. ``decode`` consumes it."""

    history: History
    cache: kv_cache.KVCache
    memory: Memory  # of the drafter
    done: Array  # [B] bool
    round: Array  # [] int32
    # The layers of the caches above, in order, where these have pages: what ``launch`` attaches.
    pools: tuple[Any, ...] = ()

    def attached(self, table: Array | None) -> "DecodeState":
        """Return the state with its pools in the caches; the state itself without a ``table``."""
        if table is None:
            return self
        cache, memory = kv_cache.attach((self.cache, self.memory), self.pools, table)
        return self.replace(cache=cache, memory=memory, pools=())

    def detached(self) -> "DecodeState":
        """Return the state with the layers of its caches in ``pools``."""
        (cache, memory), pools = kv_cache.detach((self.cache, self.memory))
        return self.replace(cache=cache, memory=memory, pools=pools)

    @property
    def num_cached(self) -> Array:
        """The tokens that all caches hold, int32 [B]."""
        caches = kv_cache.caches_of((self.cache, self.memory))
        return functools.reduce(jnp.minimum, (cache.length for cache in caches))


# Of the loop. The last item is None for those who want no results.
Carry = tuple[Shared, DecodeState, Launch | None]


@functools.partial(jax.jit, static_argnames="plan", donate_argnames=("shared", "state"))
@standard_promotion
def decode(
    plan: Plan, params: Params, request: Request, shared: Shared, state: DecodeState, until: Array
) -> tuple[Shared, DecodeState]:
    """Run rounds up to ``until``; see ``jspec.decode``, which also takes it as a Python number."""
    is_running = functools.partial(_is_running, until)
    return _loop(plan, params, request, None, is_running, (shared, state, None))[:2]


@functools.partial(
    jax.jit, static_argnames=("plan", "profile"), donate_argnames=("shared", "state")
)
@standard_promotion
def launch(
    plan: RoundPlan,
    profile: Profile,
    params: Params,
    request: Request,
    shared: Shared,
    state: DecodeState,
    rounds: Array,
    watched: Array,
    table: Array | None = None,
    budget: Budget | None = None,
) -> tuple[Shared, DecodeState, Launch]:
    """Run up to ``rounds`` rounds; return what they did.

    The loop ends as soon as a row of ``watched`` is done, at once if one is done already. So the
    next launch may be dispatched before this one is read: it does nothing while a row is to leave.

    Args:
      plan: static.
      profile: static; ``profile.rounds`` are run at most.
      params: weights.
      request: settings of the rows.
      shared: the drafter's state that outlives calls; consumed.
      state: consumed.
      rounds: int32 [].
      watched: bool [B].
      table: int32 [B, M], the pages of each row in ``state.pools``; None for caches without pages.
      budget: which of the drafted nodes are verified; None for all.
    """
    state = state.attached(table)
    until = state.round + jnp.minimum(rounds, profile.rounds)
    # A row that is done counts 1, and a watched one more than all rows: one sum across chips.
    weights = jnp.where(watched, 1 + len(watched), 1)
    goes_on = lambda state: (state.done * weights).sum() < len(watched)
    is_running = lambda carry: goes_on(carry[1]) & (carry[1].round < until)
    carry = shared, state, launches.empty(profile, plan.drafter, state.history)
    shared, state, ran = _loop(plan, params, request, budget, is_running, carry)
    state = state if table is None else state.detached()
    ran = launches.ended(ran, profile, plan.drafter, state.history, state.done, state.num_cached)
    return shared, state, ran


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
    return _round(plan, params, request, None, (shared, state, None))[:2]


Condition = Callable[[Carry], Array]


def _loop(
    plan: RoundPlan,
    params: Params,
    request: Request,
    budget: Budget | None,
    is_running: Condition,
    carry: Carry,
) -> Carry:
    run = functools.partial(_round, plan, params, request, budget)
    return lax.while_loop(is_running, functools.partial(_same_form, plan, run), carry)


def _is_running(until: Array, carry: Carry) -> Array:
    return ~carry[1].done.all() & (carry[1].round < until)


def _same_form(plan: RoundPlan, run: Callable, carry: Carry) -> Carry:
    """Run one iteration; refuse a drafter whose state changes its shapes or dtypes."""
    of_drafter = lambda shared, state, _: {"memory": state.memory, "shared": shared}
    after = run(carry)
    shape_checks.check_carry(plan.drafter, of_drafter(*carry), of_drafter(*after))
    return after


def _round(
    plan: RoundPlan, params: Params, request: Request, budget: Budget | None, carry: Carry
) -> Carry:
    """Run one round."""
    draft, tree, memory = first_half(plan, params, request, *carry[:2])
    carry = carry[0], carry[1].replace(memory=memory), carry[2]
    return second_half(plan, params, request, budget, carry, draft, tree)


def first_half(
    plan: RoundPlan, params: Params, request: Request, shared: Shared, state: DecodeState
) -> tuple[Draft, Tree, Memory]:
    """Run the first half of a round; return the draft, its tree, and the drafter's memory."""
    batch = state.done.shape[0]

    # Draft N nodes per sequence, root included, parents before children.
    with jax.named_scope("draft"):  # names that profilers show
        proposed = plan.drafter.propose(params, request, shared, state.memory, state.history)
        draft, memory = shape_checks.check_propose(
            plan.drafter, proposed, batch, plan.target.vocab_size
        )
        draft = with_root(draft, state.history)
    tree = trees.broadcast(trees.from_parents(draft.parents, draft.max_depth), batch)
    draft = token_fsm.prune(request.sampling.automaton, state.history, draft, tree)
    draft = token_fsm.force(request.sampling.automaton, state.history, draft)
    return trim_draft(request, state.history, draft, tree, state.done), tree, memory


def second_half(
    plan: RoundPlan,
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
    out, verdict, passed = _verify(plan, params, request, state, draft, tree)
    verdict = verdict.replace(num_emitted=jnp.where(state.done, 0, verdict.num_emitted))
    if ran is not None:
        judged = draft, tree, verdict, out.logits
        ran = launches.score(ran, request.sampling, state.history, *judged)

    # Commit the accepted path and drop the rest.
    with jax.named_scope("commit"):
        history, verdict, ended = extend_history(request, state.history, draft, verdict)
        updated = plan.drafter.update(
            Round(
                params=params,
                request=request,
                shared=shared,
                memory=state.memory,
                history=history,
                draft=draft,
                verdict=verdict,
                out=out,
            )
        )
        memory, shared = shape_checks.check_update(plan.drafter, updated)
        cache = kv_cache.commit(state.cache, out.tree_kv, verdict)
    ran = None if ran is None else launches.record(ran, proposed, draft, tree, verdict, passed)
    done = state.done | ended
    return shared, DecodeState(history, cache, memory, done, state.round + 1), ran


def _verify(
    plan: RoundPlan, params: Params, request: Request, state: DecodeState, draft: Draft, tree: Tree
) -> tuple[TargetOutput, Verdict, Array]:
    """Run target and rule in the smallest pass that holds every valid node of unfinished rows.

    Return the number of nodes that its matmuls ran over too, int32 []. Branches may read the cache
    for free. None may return it, which would copy it.
    """
    batch, listed = draft.tokens.shape[0], draft.valid & ~state.done[:, None]
    passes, programs = plan.passes(batch), plan.programs(batch)

    def in_pass(sizes: Sequence[Pass]) -> Callable:
        def run() -> tuple[TargetOutput, Verdict]:
            with jax.named_scope("target"):
                nodes, part, out = run_pass(plan, sizes, params, state.cache, draft, tree, listed)
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
    plan: RoundPlan,
    sizes: Sequence[Pass],
    params: Params,
    cache: kv_cache.KVCache,
    draft: Draft,
    tree: Tree,
    listed: Array,
) -> tuple[Draft, Tree, TargetOutput]:
    """Run the target on the first nodes of a draft; return draft and tree cut so.

    In packed passes, matmuls run over the nodes of ``listed`` (bool [B, N]) alone, in the smallest
    of ``sizes``, which have one number of nodes.
    """
    count, totals = sizes[-1].nodes, [size.total for size in sizes]
    nodes, part = _first_nodes(draft, count), trees.first_nodes(tree, count)
    is_list = totals[0] < len(listed) * count
    packing = packing_of(listed[:, :count], totals) if is_list else None
    return nodes, part, _forward(plan, params, nodes.tokens, part, cache, packing)


def _forward(
    plan: RoundPlan,
    params: Params,
    tokens: Array,
    tree: Tree,
    cache: kv_cache.KVCache,
    packing: Packing | None = None,
) -> TargetOutput:
    """Run the target on the nodes' tokens [B, N]."""
    layers = plan.drafter.capture_layers
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
        tree_kv=jax.tree.map(nodes(2), out.tree_kv),
    )
    return out, verdict.replace(path=_widen(verdict.path, 1, max_depth + 1))


def _widen(x: Array, axis: int, size: int) -> Array:
    """Pad ``x`` with zeros to ``size`` along ``axis``: branches must return equal shapes."""
    missing = [(0, 0)] * x.ndim
    missing[axis] = (0, size - x.shape[axis])
    return jnp.pad(x, missing)


@functools.partial(jax.jit, static_argnames=("plan", "scoring"), donate_argnames="state")
@standard_promotion
def prefill(
    plan: Plan,
    params: Params,
    state: DecodeState,
    chunk: Array,
    start: Array,
    valid: Array,
    ready: Array,
    rows: Array | None = None,
    scoring: Scoring | None = None,
    table: Array | None = None,
) -> tuple[DecodeState, Logprobs | None]:
    """Prefill chunks of the prompts of Q rows, in the caches of target and drafter.

    A prompt's last token is not prefilled: it is the root of the first round. Between two chunks a
    row is done, and its history ends one token behind what the caches hold.

    Args:
      plan: static.
      params: weights.
      state: consumed; the caches hold the first ``start`` tokens of every prompt that is longer.
      chunk: int32 [Q, C+1], C tokens and one of look-ahead, which the history gets too.
      start: int32 [Q], position of the chunk's first token.
      valid: int32 [Q], number of the C tokens that each row prefills.
      ready: bool [Q], rows whose prompts are complete now. They take part in the next round.
      rows: int32 [Q], distinct; those beyond the batch are padding. None for all rows.
      scoring: static; how to score the C tokens after the chunk's first. None: no scores.
      table: as of ``launch``.
    """
    state = state.attached(table)
    size, batch = chunk.shape[1] - 1, state.done.shape[0]
    whole = state.cache, state.memory
    cache, memory = whole if rows is None else kv_cache.rows_of(whole, rows)
    tree = trees.chain_tree(len(start), size)
    out = _forward(plan, params, chunk[:, :-1], tree, cache)
    prefilled = plan.drafter.prefill(params, memory, chunk, out.features, start, valid)
    shape_checks.check_carry(plan.drafter, {"memory": memory}, {"memory": prefilled}, prompt=True)
    scores = None
    if scoring is not None:
        scores = logprobs.score(out.logits, chunk[:, 1:], scoring.count, scoring.mode)
    part = kv_cache.append_prompt(cache, out.tree_kv, valid), prefilled
    cache, memory = part if rows is None else kv_cache.with_rows(whole, rows, part)
    rows = jnp.arange(batch) if rows is None else rows
    positions = start[:, None] + jnp.arange(size + 1)
    old = state.history
    history = old.replace(
        tokens=old.tokens.at[rows[:, None], positions].set(chunk, mode="drop"),
        length=old.length.at[rows].set(start + valid + 1, mode="drop"),
    )
    done = state.done.at[rows].set(~ready, mode="drop")
    state = state.replace(history=history, cache=cache, memory=memory, done=done)
    return state if table is None else state.detached(), scores


def init_shared(plan: Plan) -> Shared:
    """Return the drafter's state that outlives calls, before the first call; () if it has none."""
    return plan.drafter.init_shared()


@functools.partial(jax.jit, static_argnames="plan", donate_argnames=("shared", "state"))
@standard_promotion
def cancel(
    plan: Plan, request: Request, shared: Shared, state: DecodeState, rows: Array
) -> tuple[Request, Shared, DecodeState]:
    """End ``rows``, bool [B], as at a stop string: their length becomes their limit.

    A drafter with shared state is handed their texts. Consumes ``shared`` and ``state``.
    """
    limit = jnp.where(rows, state.history.length, request.max_length)
    learned = plan.drafter.on_finished(shared, state.memory, state.history, rows)
    memory, shared = shape_checks.check_update(plan.drafter, learned)
    state = state.replace(memory=memory)
    return request.replace(max_length=limit), shared, state.replace(done=state.done | rows)
