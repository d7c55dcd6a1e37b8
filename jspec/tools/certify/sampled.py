"""The check "chi-square": token counts of the compiled rule, at any vocabulary size."""

import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import sampling, trees
from jspec.core.types import Array, Draft, History, Request, Sampling
from jspec.engine.profile import Profile, request_of
from jspec.engine.sequences import SequenceParams
from jspec.tools.certify import kernels
from jspec.tools.certify.conditionals import softmax
from jspec.tools.certify.exact import changed, check_names, rule_of
from jspec.tools.certify.report import Finding, worst
from jspec.tools.certify.statistics import bias, excess
from jspec.verify import Rule, check_backend, verify

DEPTH = 3
VOCAB_SIZE = 16  # the default: a large vocabulary hides small biases
_MOST_ROWS, _FEWEST_ROWS = 100_000, 1024
_ELEMENTS = 2**25  # logits that are judged in all
_ELEMENTS_AT_ONCE = 2**22
_ELEMENTS_INTERPRETED = 2**17  # The interpreter takes a millisecond for eight rows of logits.
_TREES = {
    "chain": tuple(trees.chain(DEPTH).tolist()),
    "without_replacement": (-1, 0, 0, 1, 1, 2, 2),
    "deterministic": tuple(trees.chain(DEPTH).tolist()),
}


def chi_squares(
    rule: str | Rule,
    vocab_size: int = VOCAB_SIZE,
    *,
    seed: int = 0,
    backend: str | None = None,
    **filters: float,
) -> Iterator[Finding]:
    """Yield ``chi_square`` of drawn chains and trees, or of deterministic drafts."""
    rule = rule_of(rule)
    drawn = [each for each in ("chain", "without_replacement") if each in rule.exact_for]
    for proposal in drawn or ["deterministic"]:
        yield chi_square(
            rule, proposal, vocab_size=vocab_size, seed=seed, backend=backend, **filters
        )


def chi_square(
    rule: str | Rule,
    proposal: str = "chain",
    *,
    vocab_size: int = VOCAB_SIZE,
    seed: int = 0,
    backend: str | None = None,
    **filters: float,
) -> Finding:
    """Run rounds of the jitted rule, noise included, and count the tokens of each position.

    Logits are synthetic. The drafter's logits are the negated target's in one half of the rounds,
    which is the worst drafter; in the other half they are close, so that long drafts are accepted.

    Args:
      rule: a name in ``RULES``, a ``Rule``, or the dotted path of one.
      proposal: "chain", "without_replacement" (a binary tree) or "deterministic".
      vocab_size: V. A budget of 2**25 logits sets the number of rounds, from a thousand to a
        hundred thousand. Few rounds count in two bins: tokens that are drafted too often, the rest.
      seed: of the logits and of all noise.
      backend: that judges, as the ``sampling_backend`` of ``LLM``; it is interpreted on a device
        that does not run it, with fewer rounds.
      **filters: temperature (0.8 by default), top_k, top_p and min_p, as in ``SamplingParams``.

    Raises:
      ValueError: an argument is out of range.
    """
    rule = rule_of(rule)
    if proposal not in _TREES:
        known = ", ".join(map(repr, _TREES))
        raise ValueError(f"proposal={proposal!r} cannot be drawn here; use one of {known}.")
    if not isinstance(vocab_size, int) or vocab_size < 2:
        raise ValueError(f"vocab_size={vocab_size!r} must be a whole number of at least 2.")
    check_names(filters)
    filters = {"temperature": 0.8} | filters
    row = SequenceParams((0,), **filters)
    settings = request_of([row], Profile().grown([row]), vocab_size)[0].sampling
    rng = np.random.default_rng(seed)
    target = rng.normal(size=vocab_size) * (1 if vocab_size <= 64 else 2.5)
    near = target + 0.7 * rng.normal(size=vocab_size)
    check_backend(rule, backend)
    if not kernels.judges(backend, proposal):
        backend = None
    here = kernels.on_device(backend)
    judge = _Judge(
        rule.for_proposal(proposal),
        proposal,
        rule.shares_noise,
        backend=here,
        interpreted=here != backend,
    )
    finding = worst(
        each
        for half, drafter in enumerate((-target, near))
        for each in _findings(judge, target, drafter, settings, 2 * seed + half)
    )
    name = rule.name if backend is None else f"{rule.name} by {backend}"
    words = [name, f"{proposal} drafts", f"V={vocab_size}", *changed(filters)]
    return Finding("chi-square", ", ".join(words), finding.measured, 1.0, finding.note)


@dataclasses.dataclass(frozen=True)
class _Judge:
    """A rule and how its drafts are made, for the program of a round."""

    rule: Rule
    proposal: str
    shares_noise: bool
    backend: str | None
    interpreted: bool

    @property
    def parents(self) -> tuple[int, ...]:
        """The tree of its drafts."""
        return _TREES[self.proposal]


def _findings(judge: _Judge, target, drafter, settings: Sampling, seed: int) -> Iterator[Finding]:
    """One finding for each position of a round that enough rounds reached."""
    both = jnp.float32(np.stack([target, drafter]))
    probs, draft_probs = softmax(
        np.asarray(jax.jit(sampling.process_logits)(both, settings), np.float64)
    )
    for position, observed in enumerate(_counts(judge, target, drafter, settings, seed)):
        if observed.sum() > 100:
            note = f"worst at token {position + 1} of a round, {observed.sum()} times"
            # A wrong rule emits too often, or too rarely, the tokens that are drafted too often.
            off = bias(observed, probs, draft_probs > probs)
            yield Finding("chi-square", "", max(excess(observed, probs), off), 1.0, note)


def _counts(judge: _Judge, target, drafter, settings: Sampling, seed: int) -> np.ndarray:
    """Token counts of each position of a round: int64 [DEPTH + 1, V]."""
    vocab, nodes = len(target), len(judge.parents)
    elements = _ELEMENTS_INTERPRETED if judge.interpreted else _ELEMENTS
    rows = min(_MOST_ROWS, max(elements // (nodes * vocab), _FEWEST_ROWS)) // 2
    at_once = min(rows, max(_ELEMENTS_AT_ONCE // (nodes * vocab), 16))
    counts = np.zeros((DEPTH + 1, vocab), np.int64)
    for start in range(0, rows, at_once):
        keys = jax.random.split(jax.random.key(seed * rows + start), at_once)
        emitted = _round(judge, jnp.float32(target), jnp.float32(drafter), settings, keys)
        tokens, length = jax.device_get(emitted)
        for position in range(DEPTH + 1):
            reached = tokens[length > position, position]
            counts[position] += np.bincount(reached, minlength=vocab)[:vocab]
    return counts


@functools.partial(jax.jit, static_argnums=0)
def _round(
    judge: _Judge, target: Array, drafter: Array, settings: Sampling, keys: Array
) -> tuple[Array, Array]:
    """One round of each row after one committed token: tokens [B, K+1] and their number [B]."""
    batch, parents = keys.shape[0], np.array(judge.parents, np.int32)
    spread = lambda x: jnp.broadcast_to(x, (batch,))
    settings = jax.tree.map(lambda x: spread(x[0]), settings)
    request = Request(keys, settings, jnp.full((batch, 1), -1), spread(DEPTH + 2))
    history = History(jnp.zeros((batch, DEPTH + 2), jnp.int32), jnp.ones((batch,), jnp.int32))
    tree = trees.broadcast(trees.from_parents(parents, DEPTH), batch)
    rows = lambda row: jnp.broadcast_to(row, (batch, len(parents), len(row)))
    log_q = sampling.process_logits(rows(drafter), settings)
    recorded = None if judge.proposal == "deterministic" or judge.shares_noise else log_q
    tokens = _drafted(judge, log_q, request, tree.depth)
    valid = jnp.ones(tokens.shape, bool)
    draft = Draft(tokens, parents, valid, recorded, max_depth=tree.max_depth)
    verdict = verify(
        judge.rule,
        judge.proposal,
        request,
        draft,
        tree,
        rows(target),
        history,
        judge.backend,
    )
    tokens = jnp.take_along_axis(tokens, verdict.path, 1)[:, 1:]
    tokens = jnp.pad(tokens, ((0, 0), (0, DEPTH + 1 - tokens.shape[1])))
    last = jnp.arange(DEPTH + 1) == verdict.num_emitted[:, None] - 1
    return jnp.where(last, verdict.next_token[:, None], tokens), verdict.num_emitted


def _drafted(judge: _Judge, log_q: Array, request: Request, depth: Array) -> Array:
    """Tokens [B, N] of a draft: children drawn by Gumbel top-k, or the likeliest."""
    batch, _, vocab = log_q.shape
    root, parents = jnp.zeros((batch,), jnp.int32), np.array(judge.parents)
    if judge.shares_noise:
        noise = sampling.target_noise(request.keys, 1 + depth, vocab)
    else:
        noise = sampling.node_noise(request.keys, root, jnp.arange(len(parents)), vocab)
    scores = log_q if judge.proposal == "deterministic" else log_q + noise
    top = jax.lax.top_k(scores, int(np.bincount(parents[1:]).max()))[1]  # [B, N, C]
    columns = [root]
    for node in range(1, len(parents)):
        up = parents[node]
        rank = int((parents[1:node] == up).sum())
        columns.append(top[:, up, rank].astype(jnp.int32))
    return jnp.stack(columns, 1)
