"""Rounds of a rule as it is compiled for users, counted: chi-square at any size of vocabulary."""

import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import sampling, trees
from jspec.core.types import Array, Draft, History, Request, Sampling
from jspec.engine.sequences import SequenceParams, request_of
from jspec.tools.certify.chains import softmax
from jspec.tools.certify.distribution import rule_of
from jspec.tools.certify.report import Finding, worst
from jspec.tools.certify.statistics import excess, lean
from jspec.verify import Rule, verify

DEPTH = 3
VOCAB_SIZE = 16  # where none is given: wide ones hide small biases
MOST_ROWS = 100_000
_FEWEST_ROWS = 1024
_ELEMENTS = 2**25  # logits that are judged in all
_AT_ONCE = 2**22
_TREES = {
    "chain": tuple(trees.chain(DEPTH).tolist()),
    "without_replacement": (-1, 0, 0, 1, 1, 2, 2),
    "point": tuple(trees.chain(DEPTH).tolist()),
}


def chi_squares(
    rule: str | Rule, vocab_size: int = VOCAB_SIZE, **settings: float
) -> Iterator[Finding]:
    """``chi_square`` of drafts drawn as chains and as trees, or of the likeliest tokens."""
    rule = rule_of(rule)
    drawn = [each for each in ("chain", "without_replacement") if each in rule.exact_for]
    for proposal in drawn or ["point"]:
        yield chi_square(rule, proposal, vocab_size=vocab_size, **settings)


def chi_square(
    rule: str | Rule,
    proposal: str = "chain",
    *,
    vocab_size: int = VOCAB_SIZE,
    temperature: float = 0.8,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
) -> Finding:
    """Draws rounds with the jitted rule, noise and all, and counts the tokens of each position.

    Logits are synthetic. Half of the drafts come from the worst drafter there is, whose logits are
    the target's, negated; half from one that is nearly right, so that long drafts are accepted.

    Args:
      rule: a name in ``RULES``, a ``Rule``, or the dotted path of one.
      proposal: "chain", "without_replacement" (a binary tree) or "point".
      vocab_size: V; as many rounds run as a budget of 2**25 logits allows, from a thousand to a
        hundred thousand. Few of them count in two bins: what is drafted too often, and the rest.
      temperature: as in ``SamplingParams``.
      top_k: as in ``SamplingParams``.
      top_p: as in ``SamplingParams``.
      min_p: as in ``SamplingParams``.
      seed: of the logits and of all noise.

    Raises:
      ValueError: an argument is out of range.
    """
    rule = rule_of(rule)
    if proposal not in _TREES:
        known = ", ".join(map(repr, _TREES))
        raise ValueError(f"proposal={proposal!r} cannot be drawn here; use one of {known}.")
    if not isinstance(vocab_size, int) or vocab_size < 2:
        raise ValueError(f"vocab_size={vocab_size!r} must be a whole number of at least 2.")
    row = SequenceParams((0,), temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    settings = request_of([row], 1, row.filters, vocab_size)[0].sampling
    rng = np.random.default_rng(seed)
    target = rng.normal(size=vocab_size) * (1 if vocab_size <= 64 else 2.5)
    near = target + 0.7 * rng.normal(size=vocab_size)
    runs = rule.judging(proposal), proposal, rule.shares_noise
    found = worst(
        each
        for part, drafter in enumerate((-target, near))
        for each in _counted(runs, target, drafter, settings, 2 * seed + part)
    )
    subject = f"{rule.name}, {proposal} drafts, V={vocab_size}, temperature={temperature:g}"
    filters = (("top_k", top_k, 0), ("top_p", top_p, 1), ("min_p", min_p, 0))
    subject += "".join(f", {name}={value:g}" for name, value, off in filters if value != off)
    return Finding("chi-square", subject, found.measured, 1.0, found.note)


def _counted(runs, target, drafter, settings: Sampling, seed: int) -> Iterator[Finding]:
    """One finding for each position of a round that enough rounds reached."""
    vocab, nodes = len(target), len(_TREES[runs[1]])
    rows = min(MOST_ROWS, max(_ELEMENTS // (nodes * vocab), _FEWEST_ROWS)) // 2
    at_once = min(rows, max(_AT_ONCE // (nodes * vocab), 16))
    counts = np.zeros((DEPTH + 1, vocab), np.int64)
    for start in range(0, rows, at_once):
        keys = jax.random.split(jax.random.key(seed * rows + start), at_once)
        tokens, length = jax.device_get(
            _round(*runs, jnp.float32(target), jnp.float32(drafter), settings, keys)
        )
        for position in range(DEPTH + 1):
            reached = tokens[length > position, position]
            counts[position] += np.bincount(reached, minlength=vocab)[:vocab]
    both = jnp.float32(np.stack([target, drafter]))
    distribution, drawn_from = softmax(
        np.asarray(jax.jit(sampling.process_logits)(both, settings), np.float64)
    )
    for position, observed in enumerate(counts):
        if observed.sum() > 100:
            note = f"worst at token {position + 1} of a round, {observed.sum()} times"
            # A rule that is wrong says too much, or too little, of what is drafted too often.
            off = max(
                excess(observed, distribution),
                lean(observed, distribution, drawn_from > distribution),
            )
            yield Finding("chi-square", "", off, 1.0, note)


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _round(
    rule: Rule,
    proposal: str,
    shares_noise: bool,
    target: Array,
    drafter: Array,
    settings: Sampling,
    keys: Array,
) -> tuple[Array, Array]:
    """One round of each row after one committed token: tokens [B, K+1] and their number [B]."""
    batch, parents = keys.shape[0], np.array(_TREES[proposal], np.int32)
    spread = lambda x: jnp.broadcast_to(x, (batch,))
    settings = jax.tree.map(lambda x: spread(x[0]), settings)
    request = Request(keys, settings, jnp.full((batch, 1), -1), spread(DEPTH + 2))
    history = History(jnp.zeros((batch, DEPTH + 2), jnp.int32), jnp.ones((batch,), jnp.int32))
    tree = trees.broadcast(trees.from_parents(parents, DEPTH), batch)
    wide = lambda row: jnp.broadcast_to(row, (batch, len(parents), len(row)))
    distribution = sampling.process_logits(wide(drafter), settings)
    recorded = None if proposal == "point" or shares_noise else distribution
    drafted = _drafted(proposal, shares_noise, parents, distribution, request, tree.depth)
    draft = Draft(
        drafted, parents, jnp.ones(drafted.shape, bool), recorded, max_depth=tree.max_depth
    )
    verdict = verify(rule, request, draft, tree, wide(target), history)
    tokens = jnp.take_along_axis(drafted, verdict.path, 1)[:, 1:]
    tokens = jnp.pad(tokens, ((0, 0), (0, DEPTH + 1 - tokens.shape[1])))
    last = jnp.arange(DEPTH + 1) == verdict.num_emitted[:, None] - 1
    return jnp.where(last, verdict.next_token[:, None], tokens), verdict.num_emitted


def _drafted(proposal, shares_noise, parents, distribution, request, depth) -> Array:
    """Tokens [B, N] of a draft: children drawn by Gumbel top-k, or the likeliest."""
    vocab = distribution.shape[-1]
    if shares_noise:
        noise = sampling.target_noise(request.keys, 1 + depth, vocab)
    else:
        noise = sampling.node_noise(
            request.keys,
            jnp.zeros(distribution.shape[:1], jnp.int32),
            jnp.arange(len(parents)),
            vocab,
        )
    scores = distribution if proposal == "point" else distribution + noise
    most = np.bincount(parents[1:]).max()
    best = jax.lax.top_k(scores, int(most))[1]  # [B, N, C]
    columns = [jnp.zeros(distribution.shape[:1], jnp.int32)]
    for node in range(1, len(parents)):
        up = parents[node]
        columns.append(best[:, up, int((parents[1:node] == up).sum())].astype(jnp.int32))
    return jnp.stack(columns, 1)
