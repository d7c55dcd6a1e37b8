"""The verdict of a round: run a rule on a draft, and draw the token after the accepted nodes."""

import jax.numpy as jnp

from jspec import ops
from jspec.core import logits_processors, sampling, shape_checks, trees
from jspec.core.branches import Branches
from jspec.core.types import Array, Draft, History, Proposal, Request, Tree, Verdict
from jspec.verify.match import follow, match
from jspec.verify.nodes import take
from jspec.verify.rule import Rule

_HUGE = 1e25  # larger logits are counted from the row's maximum before kernels divide them


def verify(
    rule: Rule,
    proposal: Proposal,
    request: Request,
    draft: Draft,
    tree: Tree,
    logits: Array,
    history: History,
    backend: str | None = None,
) -> Verdict:
    """Judge ``draft`` by the target's raw ``logits`` [B, N, V], by its draws or by uniforms.

    ``backend`` names the kernel of ``ops.rejection_sampling`` that runs instead of the walk, with
    the same verdict up to float32 rounding. None and "xla" run the walk. This is the only place
    where keys become draws and uniforms.
    """
    if request.sampling.processors is not None:
        branches = Branches.of_draft(history, draft, tree)
        logits = logits_processors.apply(logits, request.sampling.processors, branches)
    greedy = request.sampling.greedy
    if rule.randomness == "target" or (greedy and rule.greedy_is_match):
        walk = rule.walk if rule.randomness == "target" else match
        positions = history.length[:, None] + tree.depth  # where the token after each node is drawn
        # Greedy draws need no noise, so all nodes at once are fast.
        if walk is match and not greedy and draft.tokens.shape[1] > 1:
            return _followed(request, draft, tree, logits, positions)
        processed = sampling.process_logits(logits, request.sampling)
        impossible = sampling.no_token(logits, request.sampling)
        draws = sampling.draw_target(processed, request.sampling, request.keys, positions)
        judged = walk(processed, draft, tree, draws, proposal)
        path, num_accepted, _ = shape_checks.check_walk(rule.name, judged, draft, None)
        return _verdict(impossible, path, num_accepted, take(draws, take(path, num_accepted)))
    root = history.length - 1
    count = draft.tokens.shape[1]
    uniforms = sampling.round_noise(request.keys, root, sampling.ACCEPT, count)[..., 0]
    uniform = sampling.round_noise(request.keys, root, sampling.RESIDUAL, 1)[:, 0]
    draft = _without_degenerate(draft, tree)
    if backend not in (None, "xla"):
        logits, impossible = _finite(logits)
        judged = ops.rejection_sampling(
            logits,
            request.sampling,
            draft,
            tree,
            uniforms,
            uniform,
            rule=rule.name,
            implementation=backend,
        )
        return _verdict(impossible, *judged)
    impossible = sampling.no_token(logits, request.sampling)
    processed = sampling.process_logits(logits, request.sampling)
    processed = jnp.where(impossible[..., None], 0, processed)  # its result is never read
    judged = rule.walk(processed, draft, tree, uniforms, proposal)
    shape = len(processed), processed.shape[-1]
    path, num_accepted, next_logits = shape_checks.check_walk(rule.name, judged, draft, shape)
    next_token = sampling.argmax(next_logits) if greedy else sampling.draw(next_logits, uniform)
    return _verdict(impossible, path, num_accepted, next_token)


def _followed(
    request: Request, draft: Draft, tree: Tree, logits: Array, positions: Array
) -> Verdict:
    """Judge by ``match``, with logits processed and tokens drawn at the nodes of the path only."""

    def draw(node: Array) -> Array:
        here, position = take(logits, node)[:, None], take(positions, node)[:, None]
        processed = sampling.process_logits(here, request.sampling)
        draws = sampling.draw_target(processed, request.sampling, request.keys, position)
        return jnp.where(sampling.no_token(here, request.sampling), -1, draws)[:, 0]

    path, num_accepted, next_token = follow(draw, draft, tree)
    num_valid = num_accepted + (next_token >= 0)
    return Verdict(path, num_accepted + 1, jnp.maximum(next_token, 0), num_valid)


def _finite(logits: Array) -> tuple[Array, Array]:
    """Return finite raw logits for kernels, and the nodes where every token is masked [B, N].

    ``sampling.process_logits`` treats NaN and inf in the same way.
    """
    finite = jnp.minimum(jnp.where(jnp.isnan(logits), -jnp.inf, logits), jnp.finfo(logits).max)
    peak = finite.max(-1, keepdims=True)
    huge = peak.astype(jnp.promote_types(peak.dtype, jnp.float32)) > _HUGE
    impossible = jnp.isneginf(peak)
    return jnp.where(impossible, 0, jnp.where(huge, finite - peak, finite)), impossible[..., 0]


def _without_degenerate(draft: Draft, tree: Tree) -> Draft:
    """Drop nodes whose draft distribution is degenerate (-inf or NaN), and their descendants.

    The test looks at distributions only, never at drawn tokens, so every rule stays exact.
    """
    if draft.logits is None:
        return draft
    broken = ~jnp.isfinite(draft.logits.max(-1))  # [B, N]
    dropped = jnp.take_along_axis(broken, tree.parents, 1, mode="promise_in_bounds")
    dropped = dropped.at[:, 0].set(False)
    if draft.sampled is not None:
        dropped &= draft.sampled
    ancestors = trees.unpack_bits(tree.ancestors, dropped.shape[1])  # [B, N, N]
    return draft.replace(
        logits=jnp.where(broken[..., None], 0, draft.logits),
        valid=draft.valid & ~(ancestors & dropped[:, None]).any(-1),
    )


def _verdict(impossible: Array, path: Array, num_accepted: Array, next_token: Array) -> Verdict:
    """A verdict that is valid up to the first ``impossible`` node [B, N] of the path."""
    on_path = jnp.arange(path.shape[1]) <= num_accepted[:, None]
    ends = jnp.take_along_axis(impossible, path, 1, mode="promise_in_bounds") & on_path
    num_valid = jnp.where(ends.any(-1), jnp.argmax(ends, -1), num_accepted + 1).astype(jnp.int32)
    return Verdict(path, num_accepted + 1, next_token, num_valid)
