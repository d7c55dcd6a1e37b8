"""The results that a launch of the loop brings to the host."""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core import logprobs, shape_checks, trees
from jspec.core.logprobs import Logprobs, Scoring
from jspec.core.types import Array, Draft, History, Params, Sampling, Tree, Verdict
from jspec.engine.plan import Plan


@struct.dataclass
class Nodes:
    """The drafted trees of R rounds."""

    tokens: Array  # [R, B, N] int32, -1 where a node is not valid
    parents: Array  # [R, B, N] int32


@struct.dataclass
class Launch:
    """The results of up to R rounds: one small transfer.

    The tokens of a row are ``tokens[:length - start]``.
    """

    start: Array  # [B] int32, length of the history before the launch
    rounds: Array  # [] int32, rounds that ran
    accepted: Array  # [R, B] int32, accepted draft tokens; -1 where the row did not run
    proposed: Array  # [R, B] int32, drafted tokens before the verification budget
    drafted: Array  # [R, B] int32, drafted tokens that were verified
    passed: Array  # [R] int32, nodes that the target's matmuls ran over
    nodes: Nodes | None  # None: not asked for
    logprobs: Logprobs | None  # scores of ``tokens``; None: not asked for
    # The last four are None until the loop has ended.
    tokens: Array | None = None  # [B, R * (K+1)] int32
    length: Array | None = None  # [B] int32, of the history
    done: Array | None = None  # [B] bool
    num_cached: Array | None = None  # [B] int32, tokens that all caches hold
    # [R, B, K+1, D], hidden states of each of ``capture_layers`` at the root and the accepted
    # nodes: the first accepted + 1 of a round are valid. Each predicted the token after it.
    features: tuple[Array, ...] = ()
    capture_layers: tuple[int, ...] = struct.field(pytree_node=False, default=())

    def scored_as(self, scoring: Scoring | None) -> "Launch":
        """Return the launch with the scores that a sequence asked for, which may be fewer."""
        if scoring is None or self.logprobs is None:
            return self.replace(logprobs=None)
        return self.replace(logprobs=self.logprobs.likeliest(scoring.count))


def empty(
    history: History,
    *,
    rounds: int,
    max_depth: int,
    num_nodes: int | None = None,
    scoring: Scoring | None = None,
    captured: Mapping[int, jax.ShapeDtypeStruct] | None = None,
) -> Launch:
    """Return a launch before its first round.

    Args:
      history: before it.
      rounds: R, most rounds.
      max_depth: K.
      num_nodes: N, to record the drafted trees; None for no record.
      scoring: how tokens are scored; None for no scores.
      captured: shapes [..., D] of the hidden states to bring, by layer; None for none.
    """
    batch = history.length.shape[0]
    unset = lambda *shape: jnp.full((rounds, batch, *shape), -1, jnp.int32)
    nodes = None if num_nodes is None else Nodes(unset(num_nodes), unset(num_nodes))
    size = rounds * (max_depth + 1)
    scores = None if scoring is None else scoring.empty(batch, size)
    passed = jnp.zeros(rounds, jnp.int32)
    captured = captured or {}
    return Launch(
        history.length,
        jnp.int32(0),
        unset(),
        unset(),
        unset(),
        passed,
        nodes,
        scores,
        features=tuple(
            jnp.zeros((rounds, batch, max_depth + 1, like.shape[-1]), like.dtype)
            for like in captured.values()
        ),
        capture_layers=tuple(captured),
    )


def shapes_of_captured(
    plan: Plan, params: Params, layers: tuple[int, ...]
) -> dict[int, jax.ShapeDtypeStruct]:
    """Return the shapes [1, 1, D] of the hidden states of ``layers``, for one node.

    Raises:
      ValueError: the target has no such layer.
    """
    if not layers:
        return {}

    def run(params: Params) -> tuple[Array, ...]:
        tokens, cache = jnp.zeros((1, 1), jnp.int32), plan.target.init_cache(1, 1)
        tree = trees.chain_tree(1, 1)
        out = plan.target.forward(params.target, tokens, tree, cache, layers)
        return shape_checks.check_forward(plan.target, out, (1, 1), cache, layers).features

    return dict(zip(layers, jax.eval_shape(run, params), strict=True))


def score(
    launch: Launch,
    settings: Sampling,
    history: History,
    draft: Draft,
    tree: Tree,
    verdict: Verdict,
    logits: Array,
) -> Launch:
    """Add the scores of the tokens that a verdict emits after ``history``, if asked for.

    ``logits`` [B, N, V] are the target's raw logits. The verdict is the rule's own: a row that ends
    within it overwrites nothing.
    """
    if launch.logprobs is None:
        return launch
    old = launch.logprobs
    scoring = Scoring(old.count, mode=old.mode)
    new = logprobs.of_emitted(scoring, settings, history, draft, tree, verdict, logits)
    return launch.replace(logprobs=logprobs.write(old, new, history.length - launch.start))


def record(
    launch: Launch,
    proposed: Draft,
    draft: Draft,
    tree: Tree,
    verdict: Verdict,
    passed: Array,
    captured: tuple[Array, ...],
) -> Launch:
    """Add a round; ``verdict`` is clipped at the ends of texts.

    ``proposed`` is the draft before the verification budget, and ``draft`` after it. ``captured``
    are the hidden states [B, N, D] of the launch's ``capture_layers``.
    """
    ran = verdict.num_emitted > 0
    count = lambda part: jnp.where(ran, part.valid[:, 1:].sum(1, dtype=jnp.int32), 0)
    put = lambda buffer, values: buffer.at[launch.rounds].set(values, mode="drop")
    nodes = launch.nodes
    if nodes is not None:
        valid = draft.valid & ran[:, None]
        ids = put(nodes.tokens, jnp.where(valid, draft.tokens, -1))
        nodes = Nodes(ids, put(nodes.parents, jnp.where(valid, tree.parents, -1)))
    return launch.replace(
        rounds=launch.rounds + 1,
        accepted=put(launch.accepted, verdict.num_emitted - 1),
        proposed=put(launch.proposed, count(proposed)),
        drafted=put(launch.drafted, count(draft)),
        passed=put(launch.passed, passed),
        nodes=nodes,
        features=tuple(
            put(buffer, jnp.take_along_axis(hidden, verdict.path[..., None], 1))
            for buffer, hidden in zip(launch.features, captured, strict=True)
        ),
    )


def ended(
    launch: Launch, max_depth: int, history: History, done: Array, num_cached: Array
) -> Launch:
    """Return the launch with the tokens that its rounds, of K = ``max_depth``, added."""
    size = len(launch.accepted) * (max_depth + 1)
    positions = launch.start[:, None] + jnp.arange(size)
    tokens = jnp.take_along_axis(history.tokens, positions, 1, mode="promise_in_bounds")
    return launch.replace(tokens=tokens, length=history.length, done=done, num_cached=num_cached)
