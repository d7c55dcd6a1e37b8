"""A record of every round, computed on the device in the drafter's update.

The loop is the normal one. It runs a plan whose drafter wraps the plan's own, and stores in its
memory the draft of the round, its probabilities and the verdict. All values come from the logits
and the noise of the round itself.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from jspec import verify
from jspec.api.outputs import Transcript
from jspec.core import logits_processors, sampling, token_fsm, trees
from jspec.core.branches import Branches
from jspec.core.history import root_alone
from jspec.core.types import Array, Draft, Drafter, History, Params, Round, Shared
from jspec.drafters.base import modes
from jspec.engine.functional import Batch, advance, cancel, start
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.verify.nodes import Nodes, take
from jspec.verify.siblings import chances

LIKELIEST = 3  # tokens listed for each node


@struct.dataclass
class Record:
    """One round of every row; values at invalid nodes are undefined."""

    tokens: Array  # [B, N] int32
    parents: Array  # [B, N] int32, the root is its own
    valid: Array  # [B, N] bool
    path: Array  # [B, K+1] int32 nodes, from the rule: the text may end earlier
    num_emitted: Array  # [B] int32, from the rule
    next_token: Array  # [B] int32, after the path
    next_p: Array  # [B] float32, the target's probability of that token
    p: Array  # [B, N] float32, the target's probability of the node's token after its parent
    q: Array  # [B, N] float32, the probability that it was drawn with; NaN: not drawn
    chance: Array  # [B, N] float32, min(1, p / q) when judged; NaN: not judged by rejection
    uniforms: Array  # [B, N] float32; NaN: the rule has no uniforms
    draws: Array  # [B, N] int32, the target's draw after the node; -1: the rule has no draws
    likeliest: Array  # [B, N, LIKELIEST] int32 tokens after the node
    likeliest_p: Array  # [B, N, LIKELIEST] float32


@struct.dataclass
class RecorderMemory:
    """The memory of a ``Recorder``."""

    inner: Any
    grammar: Array | None  # [B] int32, states before the round; None without grammars
    record: Record


@dataclasses.dataclass(frozen=True)
class Recorder(Drafter):
    """A drafter that wraps ``inner`` and stores a record of the last round in its memory."""

    inner: Drafter
    rounds: Drafter | None  # ``inner`` at the K of the trace, on its memory; None for K = 0
    rule: verify.Rule  # judges these drafts
    noise: str = "own"  # the noise of ``inner`` is set already

    max_depth = property(lambda self: self.rounds.max_depth if self.rounds else 0)
    tree_size = property(lambda self: self.rounds.tree_size if self.rounds else 1)
    capture_layers = property(lambda self: self.inner.capture_layers)
    reads_pages = property(lambda self: self.inner.reads_pages)
    lookahead = property(lambda self: self.inner.lookahead)
    proposal = property(lambda self: self.rounds.proposal if self.rounds else "deterministic")

    def init(self, params, request, capacity: int) -> RecorderMemory:
        """Allocate the inner drafter's memory and an empty record."""
        batch = request.max_length.shape[0]
        zeros = lambda dtype, *shape: jnp.zeros((batch, *shape), dtype)
        nodes = lambda dtype, *shape: zeros(dtype, self.tree_size, *shape)
        empty = Record(
            **{name: nodes(jnp.int32) for name in ("tokens", "parents", "draws")},
            **{name: nodes(jnp.float32) for name in ("p", "q", "chance", "uniforms")},
            **{name: zeros(jnp.int32) for name in ("num_emitted", "next_token")},
            valid=nodes(bool),
            path=zeros(jnp.int32, self.max_depth + 1),
            next_p=zeros(jnp.float32),
            likeliest=nodes(jnp.int32, LIKELIEST),
            likeliest_p=nodes(jnp.float32, LIKELIEST),
        )
        inner = self.inner.init(params, request, capacity)
        grammar = token_fsm.first_state(request.sampling.automaton)
        return RecorderMemory(inner, grammar, empty)

    def prefill(self, params, memory: RecorderMemory, tokens, features, start, valid):
        """Prefill the inner drafter."""
        inner = self.inner.prefill(params, memory.inner, tokens, features, start, valid)
        return memory.replace(inner=inner)

    def propose(self, params, request, shared, memory: RecorderMemory, history):
        """Draft with the inner drafter."""
        memory = memory.replace(grammar=history.state)
        if self.rounds is None:
            return root_alone(history), memory
        draft, inner = self.rounds.propose(params, request, shared, memory.inner, history)
        return draft, memory.replace(inner=inner)

    def update(self, round: Round):
        """Update the inner drafter, and record the round."""
        memory: RecorderMemory = round.memory
        drafter = self.rounds or self.inner
        inner, shared = drafter.update(round.replace(memory=memory.inner))
        history = round.history
        length = history.length - round.verdict.num_emitted
        before = History(history.tokens, length, memory.grammar)
        record = _record(
            self.rule, self.proposal, round.request, before, round.draft, round.out.logits
        )
        record = jax.tree.map(modes.padded, record, memory.record)
        return RecorderMemory(inner, history.state, record), shared


def record(
    plan: Plan,
    params: Params,
    row: SequenceParams,
    transcript: Transcript,
    shared: Shared,
) -> tuple[list[Record], Shared]:
    """Generate one row, and return the record of every round and the drafter's shared state.

    The transcript reads the text, and may end it. ``shared`` is not consumed. A
    drafter of several lengths drafts the longest, or the length of one row.

    Raises:
      ValueError: the row does not fit the model.
    """
    recording = _recording(plan)
    # Rounds consume a copy, so that an interrupted trace leaves ``shared`` intact.
    batch = start(recording, params, [row]).replace(shared=jax.tree.map(jnp.copy, shared))
    records, was_cut = [], False
    while not transcript.finish_reason:
        batch = advance(recording, params, batch, 1)
        records.append(jax.tree.map(lambda x: x[0], jax.device_get(batch.state.memory.record)))
        was_cut = transcript.read(batch.answers[0])
    batch = _unwrapped(batch)
    return records, (cancel(plan, batch, [0]) if was_cut else batch).shared


def _recording(plan: Plan) -> Plan:
    """Return the plan with a recorder as its drafter."""
    rounds = plan.at_length(plan.for_rows(1)) if plan.lengths else plan
    recorder = Recorder(plan.drafter, rounds.drafting, rounds.effective_rule)
    return Plan(plan.target, recorder, recorder.rule)


def _unwrapped(batch: Batch) -> Batch:
    """Return the batch with the memory of the plan's own drafter."""
    return batch.replace(state=batch.state.replace(memory=batch.state.memory.inner))


def _record(
    rule: verify.Rule, proposal: str, request, history: History, draft: Draft, logits: Array
) -> Record:
    """Return the record of a round from the raw ``logits`` [B, N, V] and the history before it."""
    settings, count = request.sampling, draft.tokens.shape[1]
    tree = trees.broadcast(trees.from_parents(draft.parents, draft.max_depth), len(logits))
    tree = jax.tree.map(jnp.asarray, tree)  # a loop cannot index NumPy arrays of static trees
    # The rule's own verdict: the loop clips its copy at the end of the text.
    verdict = verify.verify(rule, proposal, request, draft, tree, logits, history)
    branches = Branches.of_draft(history, draft, tree)
    logits = logits_processors.apply(logits, settings.processors, branches)
    # Greedy rows show the distribution of temperature 1.
    processed = sampling.process_logits(logits, sampling.greedy_at_one(settings))
    distribution = jax.nn.softmax(processed, -1)  # [B, N, V]
    rows = jnp.arange(len(distribution))[:, None]
    top, ids = lax.top_k(distribution, LIKELIEST)
    end = take(verdict.path, verdict.num_emitted - 1)
    p = distribution[rows, tree.parents, draft.tokens]

    draws = jnp.full(draft.tokens.shape, -1, jnp.int32)
    uniforms = jnp.full(draft.tokens.shape, jnp.nan, jnp.float32)
    chance = uniforms
    nodes = Nodes(processed, draft, tree, uniforms, proposal)
    if rule.randomness == "target" or (settings.greedy and rule.greedy_is_match):
        positions = history.length[:, None] + tree.depth
        cooled = sampling.process_logits(logits, settings)
        draws = sampling.draw_target(cooled, settings, request.keys, positions)
    elif rule.randomness == "round":
        root = history.length - 1
        uniforms = sampling.round_noise(request.keys, root, sampling.ACCEPT, count)[..., 0]
        if rule.name == "rejection":
            # The walk of the rule, by uniforms that lead it along the path of the verdict. Rows
            # where every token has probability 0 are replaced, as in the verdict.
            depth = jnp.arange(verdict.path.shape[1])
            on_path = jnp.where(depth < verdict.num_emitted[:, None], verdict.path, count)
            accepted = (on_path[:, :, None] == jnp.arange(count)).any(1)
            finite = jnp.where(jnp.isnan(distribution[..., :1]), 0, processed)
            leading = jnp.where(accepted, -1, jnp.inf)
            chance = chances(dataclasses.replace(nodes, processed=finite, uniforms=leading))
            chance = jnp.where(jnp.isnan(p), jnp.nan, chance)
    return Record(
        tokens=draft.tokens,
        parents=tree.parents,
        valid=draft.valid,
        path=verdict.path,
        num_emitted=verdict.num_emitted,
        next_token=verdict.next_token,
        next_p=take(take(distribution, end), verdict.next_token).astype(jnp.float32),
        p=p.astype(jnp.float32),
        q=_drawn_with(nodes).astype(jnp.float32),
        chance=chance.astype(jnp.float32),
        uniforms=uniforms,
        draws=draws,
        likeliest=ids,
        likeliest_p=top.astype(jnp.float32),
    )


def _drawn_with(nodes: Nodes) -> Array:
    """Return the probability that each node was drawn with, given its siblings, [B, N].

    NaN for nodes that were not drawn. Nodes are processed one by one, without a second [B, N, V].
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
