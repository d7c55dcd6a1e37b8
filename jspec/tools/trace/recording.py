"""What every round of a generation shows, kept on the device where the drafter learns the verdict.

The loop is the shipped one: it runs a plan whose drafter hands everything on to the plan's own, and
keeps in its memory what the round drafted, how likely it was and how it was judged. All of it is
computed from the very logits and noise that the round ran with.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import verify
from jspec.api.outputs import Transcript
from jspec.core import logits_processors, modes, sampling, token_fsm, trees
from jspec.core.branches import Branches
from jspec.core.types import (
    Array,
    Draft,
    Drafter,
    History,
    MultiMode,
    Params,
    Request,
    Shared,
    TargetOutput,
    Verdict,
)
from jspec.engine.batch import Batch, advance, read, start
from jspec.engine.loop import on_finished
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.util.buckets import bucket
from jspec.verify.nodes import Nodes, one_hot, take

LIKELIEST = 3  # tokens named beside each node


@struct.dataclass
class Seen:
    """One round of every row. Whatever belongs to a node that is not valid means nothing."""

    tokens: Array  # [B, N] int32
    parents: Array  # [B, N] int32, the root is its own
    valid: Array  # [B, N] bool
    path: Array  # [B, K+1] int32 nodes, by the rule: the text may end before
    num_emitted: Array  # [B] int32, by the rule
    next_token: Array  # [B] int32, behind the path
    next_p: Array  # [B] float32, of that token by the target's law
    p: Array  # [B, N] float32, of the node's token by the target's law behind its parent
    q: Array  # [B, N] float32, by the law that it was drawn from; NaN: it was not drawn
    chance: Array  # [B, N] float32, of acceptance when it was judged; NaN: not judged by such
    uniforms: Array  # [B, N] float32; NaN: no coin is tossed
    draws: Array  # [B, N] int32, what the target draws behind the node; -1: it draws one token only
    likeliest: Array  # [B, N, LIKELIEST] int32 tokens behind the node
    likeliest_p: Array  # [B, N, LIKELIEST] float32


@struct.dataclass
class Kept:
    """The memory of a ``Recorder``."""

    inner: Any
    grammar: Array | None  # [B] int32, states as the round began; None where there are no grammars
    seen: Seen


@dataclasses.dataclass(frozen=True)
class Recorder:
    """A drafter in place of ``inner`` that keeps in its memory what the last round showed."""

    inner: Drafter
    rule: verify.Rule  # as it runs on these drafts
    noise: str = "own"  # what ``inner`` has was decided before

    max_depth = property(lambda self: self.inner.max_depth)
    tree_size = property(lambda self: self.inner.tree_size)
    capture_layers = property(lambda self: self.inner.capture_layers)
    proposal = property(lambda self: self.inner.proposal)

    def init(self, params: Params, request: Request, capacity: int) -> Kept:
        """The inner drafter's memory, and room for a round."""
        batch = request.max_length.shape[0]
        zeros = lambda dtype, *shape: jnp.zeros((batch, *shape), dtype)
        nodes = lambda dtype, *shape: zeros(dtype, self.tree_size, *shape)
        none = Seen(
            tokens=nodes(jnp.int32),
            parents=nodes(jnp.int32),
            valid=nodes(bool),
            path=zeros(jnp.int32, self.max_depth + 1),
            num_emitted=zeros(jnp.int32),
            next_token=zeros(jnp.int32),
            next_p=zeros(jnp.float32),
            p=nodes(jnp.float32),
            q=nodes(jnp.float32),
            chance=nodes(jnp.float32),
            uniforms=nodes(jnp.float32),
            draws=nodes(jnp.int32),
            likeliest=nodes(jnp.int32, LIKELIEST),
            likeliest_p=nodes(jnp.float32, LIKELIEST),
        )
        inner = self.inner.init(params, request, capacity)
        return Kept(inner, token_fsm.first_state(request.sampling.automaton), none)

    def prefill(self, params, memory: Kept, tokens, features, start, valid) -> Kept:
        """The inner drafter's."""
        inner = self.inner.prefill(params, memory.inner, tokens, features, start, valid)
        return memory.replace(inner=inner)

    def propose(
        self, params: Params, request: Request, shared: Shared, memory: Kept, history: History
    ) -> tuple[Draft, Kept]:
        """The inner drafter's."""
        draft, inner = self.inner.propose(params, request, shared, memory.inner, history)
        return draft, memory.replace(inner=inner, grammar=history.state)

    def update(
        self,
        params: Params,
        request: Request,
        shared: Shared,
        memory: Kept,
        history: History,
        draft: Draft,
        verdict: Verdict,
        out: TargetOutput,
    ) -> tuple[Kept, Shared]:
        """The inner drafter's, and what there is to see."""
        inner, shared = self.inner.update(
            params, request, shared, memory.inner, history, draft, verdict, out
        )
        before = History(history.tokens, history.length - verdict.num_emitted, memory.grammar)
        seen = _seen(self.rule, self.proposal, request, before, draft, out.logits)
        seen = jax.tree.map(modes.padded, seen, memory.seen)
        return Kept(inner, history.state, seen), shared


@dataclasses.dataclass(frozen=True)
class MultiModeRecorder(Recorder):
    """The same for a drafter of several gears."""

    rules: tuple[verify.Rule, ...] = ()  # of each gear

    @property
    def modes(self) -> tuple[Recorder, ...]:
        """The inner ones, each looked at."""
        return tuple(map(RecorderMode, self.inner.modes, self.rules))

    def select_mode(self, params, request, shared, memory: Kept, history):
        """The inner drafter's."""
        inner, mode = self.inner.select_mode(params, request, shared, memory.inner, history)
        return memory.replace(inner=inner), mode


@dataclasses.dataclass(frozen=True)
class RecorderMode(Recorder):
    """A gear of a ``MultiModeRecorder``."""

    def keeps_mode(self, request, shared, memory: Kept, history) -> Array:
        """The inner gear's."""
        return self.inner.keeps_mode(request, shared, memory.inner, history)


def recorder(plan: Plan) -> Recorder:
    """What stands in place of the plan's drafter."""
    if not isinstance(plan.drafter, MultiMode):
        return Recorder(plan.drafter, plan.effective_rule)
    rules = tuple(plan.in_mode(mode).effective_rule for mode in plan.drafter.modes)
    return MultiModeRecorder(plan.drafter, plan.effective_rule, rules=rules)


def record(
    plan: Plan,
    params: Params,
    row: SequenceParams,
    transcript: Transcript,
    shared: Shared,
    price: Callable[[Plan, Params, Batch], Shared],
) -> tuple[list[Seen], Shared]:
    """Generates one row, round by round, and brings every round to the host.

    Args:
      plan: target, drafter and rule.
      params: weights.
      row: what to continue.
      transcript: takes in the text, and may end it.
      shared: what the drafter keeps for all calls; it stays as it is.
      price: gives ``shared`` the costs of a batch's rounds where the plan chooses by costs.

    Raises:
      ValueError: the row does not fit the model.
    """
    # A stop string is cut by what the rounds emitted.
    plan = dataclasses.replace(plan, record_rounds=bucket(row.max_tokens), record_nodes=False)
    looking = dataclasses.replace(plan, drafter=recorder(plan))
    # Rounds consume a copy: a trace that is interrupted teaches nothing, and nothing is lost.
    batch = start(looking, params, [row]).replace(shared=jax.tree.map(jnp.copy, shared))
    batch = batch.replace(shared=price(plan, params, _unwatched(batch)))
    seen, was_cut = [], False
    while not transcript.finish_reason:
        batch = advance(looking, params, batch, 1)
        seen.append(jax.tree.map(lambda x: x[0], jax.device_get(batch.state.memory.seen)))
        was_cut = transcript.read(read(batch)[0])
    if was_cut:
        return seen, on_finished(plan, batch.shared, _unwatched(batch).state)
    return seen, batch.shared


def _unwatched(batch: Batch) -> Batch:
    """The batch as the plan's own drafter knows it."""
    return batch.replace(state=batch.state.replace(memory=batch.state.memory.inner))


def _seen(
    rule: verify.Rule,
    proposal: str,
    request: Request,
    history: History,
    draft: Draft,
    logits: Array,
) -> Seen:
    """A round by its draft and the target's raw ``logits`` [B, N, V]; ``history`` is before it."""
    settings, count = request.sampling, draft.tokens.shape[1]
    tree = trees.broadcast(trees.from_parents(draft.parents, draft.max_depth), len(logits))
    tree = jax.tree.map(jnp.asarray, tree)  # static ones are NumPy's, which no loop can index
    # As the rule has it: what the loop handed on may be clipped where the text ends.
    verdict = verify.verify(rule, proposal, request, draft, tree, logits, history)
    branches = Branches.of_draft(history, draft, tree)
    logits = logits_processors.apply(logits, settings.processors, branches)
    # Greedy rows have a law, too, before the likeliest is taken: that of temperature 1.
    processed = sampling.process_logits(logits, sampling.greedy_at_one(settings))
    distribution = jax.nn.softmax(processed, -1)  # [B, N, V]
    rows = jnp.arange(len(distribution))[:, None]
    top, ids = lax.top_k(distribution, LIKELIEST)
    end = take(verdict.path, verdict.num_emitted - 1)

    draws = jnp.full(draft.tokens.shape, -1, jnp.int32)
    uniforms = jnp.full(draft.tokens.shape, jnp.nan, jnp.float32)
    chance = uniforms
    nodes = Nodes(processed, draft, tree, uniforms, proposal)
    if rule.randomness == "target" or (settings.greedy and rule.greedy_is_match):
        positions = history.length[:, None] + tree.depth
        cool = sampling.process_logits(logits, settings)
        draws = sampling.draw_target(cool, settings, request.keys, positions)
    elif rule.randomness == "round":
        root = history.length - 1
        uniforms = sampling.round_noise(request.keys, root, sampling.ACCEPT, count)[..., 0]
        if rule.name == "rejection":
            chance = _chances(nodes, verdict)
    return Seen(
        tokens=draft.tokens,
        parents=tree.parents,
        valid=draft.valid,
        path=verdict.path,
        num_emitted=verdict.num_emitted,
        next_token=verdict.next_token,
        next_p=take(take(distribution, end), verdict.next_token).astype(jnp.float32),
        p=distribution[rows, tree.parents, draft.tokens].astype(jnp.float32),
        q=_drawn_with(nodes).astype(jnp.float32),
        chance=chance.astype(jnp.float32),
        uniforms=uniforms,
        draws=draws,
        likeliest=ids,
        likeliest_p=top.astype(jnp.float32),
    )


def _drawn_with(nodes: Nodes) -> Array:
    """The probability with which each node was drawn, given its siblings; NaN for others: [B, N].

    One node a row at a time, so that no second [B, N, V] is held.
    """
    draft, index = nodes.draft, jnp.arange(nodes.draft.tokens.shape[1])
    if draft.logits is None or nodes.proposal == "deterministic":
        return jnp.full(draft.tokens.shape, jnp.nan)
    rows = jnp.arange(len(draft.tokens))[:, None]

    def one(node: Array) -> Array:
        parent = nodes.tree.parents[:, node]
        q, _ = nodes.draft_probs(parent)
        before = nodes.children(parent) & nodes.draft.drawn & (index < node)
        q = q.at[rows, jnp.where(before, draft.tokens, q.shape[1])].set(0, mode="drop")
        return take(q, draft.tokens[:, node]) / q.sum(-1)

    drawn = nodes.draft.drawn & (index > 0)
    return jnp.where(drawn, jnp.moveaxis(lax.map(one, index), 0, 1), jnp.nan)


@struct.dataclass
class _Judging:
    """Where each row stands among the children that were judged."""

    p: Array  # [B, V], the target's law behind a node of the path, or what refusals left of it
    q: Array  # [B, V], weights of the law of the next child drawn
    q_mass: Array  # [B]
    waiting: Array  # [B, N] bool, children of that node that are not judged yet
    chance: Array  # [B, N], NaN where not judged


def _chances(nodes: Nodes, verdict: Verdict) -> Array:
    """min(1, p / q) of every child that rejection sampling judged, as things stood: [B, N].

    The walk of ``jspec.verify.rejection``, down the path that it took: what it found on its way.
    """
    count = nodes.draft.tokens.shape[1]
    depth = jnp.arange(verdict.path.shape[1])
    is_said = (depth > 0) & (depth < verdict.num_emitted[:, None])
    ids = jnp.where(is_said, verdict.path, count)
    accepted = (ids[:, :, None] == jnp.arange(count)).any(1)  # [B, N]

    def at(node: Array, chance: Array) -> _Judging:
        return _Judging(
            nodes.target_probs(node), *nodes.draft_probs(node), nodes.children(node), chance
        )

    def judge(state: _Judging) -> _Judging:
        exists, child = state.waiting.any(1), nodes.first(state.waiting)
        token, is_child = take(nodes.draft.tokens, child), one_hot(child, count)
        at_p, at_q = take(state.p, token), take(state.q, token)
        at_p, at_q = nodes.odds(child, at_p, at_q, state.q_mass)
        here = is_child & exists[:, None]
        chance = jnp.where(here, jnp.minimum(1, at_p / at_q)[:, None], state.chance)
        rest = nodes.residual(child, state.p, state.q, state.q_mass)
        mass = rest.sum(-1, keepdims=True)
        rest = jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1), state.p)
        drops = one_hot(token, state.q.shape[1]) & nodes.drops(child)[:, None]
        q = jnp.where(drops, 0, state.q)
        refused = _Judging(rest, q, q.sum(-1), state.waiting & ~is_child, chance)
        goes_down = take(accepted, child)
        pick = lambda down, stay: jnp.where(
            goes_down.reshape(-1, *[1] * (stay.ndim - 1)), down, stay
        )
        after = jax.tree.map(pick, at(child, chance), refused)
        return jax.tree.map(
            lambda new, old: jnp.where(exists.reshape(-1, *[1] * (old.ndim - 1)), new, old),
            after,
            state,
        )

    root = jnp.zeros_like(nodes.tree.parents[:, 0])
    start = at(root, jnp.full(nodes.draft.tokens.shape, jnp.nan, nodes.processed.dtype))
    return lax.while_loop(lambda state: state.waiting.any(), judge, start).chance
