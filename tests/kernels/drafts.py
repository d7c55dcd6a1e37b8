"""Random drafts over large vocabularies, drawn in NumPy from the recorded distributions."""

import jax
import jax.numpy as jnp
import numpy as np

from jspec import ops
from jspec.core import trees
from jspec.core.types import Draft, Sampling

PROCESSED = dict(  # four rows of a batch; the second one is greedy
    temperature=[0.8, 0.0, 1.3, 0.6], min_p=[0.0, 0.1, 0.02, 1e-3],
    top_k=[40, 3, 0, 1000], top_p=[1.0, 0.5, 0.9, 0.7],
)  # fmt: skip
TOP_K = 500  # top-k of the drafts


def settings(rows, names):
    """Return the filters of ``rows`` of the batch above."""
    dtypes = dict(temperature=np.float32, min_p=np.float32, top_k=np.int32, top_p=np.float32)
    return Sampling(
        {name: jnp.array(np.array(PROCESSED[name], dtypes[name])[rows]) for name in dtypes},
        names=tuple(names),
    )


def random_draft(case, rows=(0, 1, 2, 3), vocab=None, seed=0):
    """Return (raw target logits [B, N, V], draft, tree, uniforms [B, N], uniform [B, 2]).

    A greedy row of ``PROCESSED`` drafts deterministically, the third row drafts nothing, and the
    last stops halfway.
    """
    rng = np.random.default_rng(seed)
    vocab, nodes = vocab or case.vocab, len(case.parents)
    parents = np.array([-1, *case.parents[1:]], np.int32)
    target = (3 * rng.standard_normal((len(rows), nodes, vocab))).astype(case.logits)
    recorded = target.astype(np.float32) + rng.standard_normal(target.shape).astype(np.float32)
    floor = -np.partition(-recorded, min(TOP_K, vocab - 1), -1)[..., min(TOP_K, vocab - 1), None]
    recorded = np.where(recorded > floor, recorded, -np.inf).astype(case.draft)
    tokens = rng.integers(0, vocab, (len(rows), nodes)).astype(np.int32)
    valid = np.ones(tokens.shape, bool)
    sampled = np.ones(tokens.shape, bool)
    for index, row in enumerate(rows):
        greedy = PROCESSED["temperature"][row] == 0
        for node in range(nodes):
            children = np.flatnonzero(parents == node)
            distribution = _distribution(recorded[index, node])
            drawn, fixed = _children(rng, distribution, len(children), case.proposal, greedy, node)
            tokens[index, children] = [*fixed, *drawn]
            sampled[index, children] = [False] * len(fixed) + [True] * len(drawn)
        valid[index, {2: 1, 3: nodes // 2 + 1}.get(row, nodes) :] = False
    tokens = np.where(valid, tokens, 0)
    mixed = case.proposal in ("mixed", "top_plus_one") or not sampled[valid].all()
    draft = Draft(
        tokens=jnp.array(tokens),
        parents=parents,
        valid=jnp.array(valid),
        logits=jnp.array(recorded),
        sampled=jnp.array(sampled) if mixed else None,
        max_depth=case.depth,
    )
    uniforms, uniform = rng.random(tokens.shape), rng.random((len(rows), 2)) * [1, 2**-24]
    tree = trees.broadcast(trees.from_parents(parents, case.depth), len(rows))
    narrow = lambda x: jnp.array(x, jnp.float32)
    return jnp.array(target), draft, tree, narrow(uniforms), narrow(uniform)


def _distribution(logits):
    wide = logits.astype(np.float64)
    weights = np.exp(wide - wide.max())
    return weights / weights.sum()


def _children(rng, distribution, count, proposal, greedy, node):
    """Return the drawn and the deterministic tokens among the children of one node."""
    if greedy or (proposal == "mixed" and node % 2):
        return [], np.argsort(-distribution)[:count]
    top = np.argsort(-distribution)[: count - 1] if proposal == "top_plus_one" and count else []
    rest = distribution.copy()
    rest[np.array(top, int)] = 0
    drawn = rng.choice(len(distribution), count - len(top), replace=False, p=rest / rest.sum())
    return drawn, top


def trace(case, batch, implementation, put=lambda arrays: arrays):
    """Trace the op at its real size, with abstract arrays that ``put`` places."""
    nodes, vocab = len(case.parents), case.vocab
    parents = np.array([-1, *case.parents[1:]], np.int32)
    array = lambda *shape, dtype="float32": jax.ShapeDtypeStruct((batch, *shape), dtype)
    mixed = case.proposal in ("mixed", "top_plus_one")
    logits = array(nodes, vocab, dtype=case.logits)
    recorded = array(nodes, vocab, dtype=case.draft)
    flags = array(nodes, dtype="bool")
    filters = Sampling(
        dict(temperature=array(), min_p=array(), top_k=array(dtype="int32"), top_p=array()),
        names=case.filters,
    )

    def judge(logits, filters, tokens, valid, recorded, sampled, uniforms, uniform):
        draft = Draft(tokens, parents, valid, recorded, sampled, max_depth=case.depth)
        tree = trees.broadcast(trees.from_parents(parents, case.depth), batch)
        return ops.rejection_sampling(
            logits,
            filters,
            draft,
            tree,
            uniforms,
            uniform,
            rule=case.rule,
            implementation=implementation,
        )

    arrays = (
        logits,
        filters,
        array(nodes, dtype="int32"),
        flags,
        recorded,
        flags if mixed else None,
        array(nodes),
        array(2),
    )
    return jax.jit(judge).trace(*put(arrays))
