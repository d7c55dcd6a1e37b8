"""The distribution of entire texts, over several rounds of the real ``decode``.

One round cannot show noise that a later round uses again. Here six tokens of a Markov chain are
drawn with K = 3, which takes at least two rounds, and all 4**6 texts are counted.
"""

import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jspec.core import sampling
from jspec.core.types import Params
from jspec.engine.plan import Plan
from tests.fakes import TableDrafter, ToyTarget, TreeTableDrafter, by_mass, settings, table
from tests.verify import statistics

V, K = 4, 3
LENGTH = 6  # tokens of the texts of a Markov chain
GOLDEN_LENGTH = 5  # tokens of texts with the golden distribution
GOLDEN_P, GOLDEN_Q = np.array([0.5, 0.3, 0.2, 0]), np.array([0.2, 0.5, 0.3, 0])
BATCH = 50_000  # rows of a run: the same for all, so that runs of a rule share a program


TREE = TreeTableDrafter(2, parents=(-1, 0, 0, 1, 1, 2, 2))


def run(rule, params, num_tokens, drafter=None, *, chunks=1, mutated=False):
    """Return counts of all texts of ``num_tokens`` [V**num_tokens] at temperature 1."""
    drafter = drafter or TableDrafter(K)
    plan = Plan(ToyTarget(V), drafter, rule, node_buckets=(drafter.tree_size,))
    program = statistics.fresh_decode(plan) if mutated else None
    tokens, length = statistics.texts(
        plan, params, settings(BATCH), num_tokens, chunks=chunks, program=program
    )
    assert (length == num_tokens).all()
    return statistics.counts(tokens, V)


def pairs(texts):
    """Yield the marginals of neighbouring tokens of a distribution or of counts [V**n]."""
    cube = texts.reshape((V,) * round(np.log(texts.size) / np.log(V)))
    axes = set(range(cube.ndim))
    for first in range(cube.ndim - 1):
        yield cube.sum(tuple(axes - {first, first + 1})).ravel()


@pytest.mark.parametrize(
    ("rule", "ragged"), [("rejection", True), ("block", False), ("block", True)]
)
def test_texts_of_several_rounds_have_the_targets_distribution(rule, ragged):
    check_markov_texts(rule, TableDrafter(K, ragged=ragged), chunks=2)


@pytest.mark.parametrize("rule", ["match", "coupled"])
def test_texts_drawn_with_the_targets_noise_have_its_distribution(rule):
    check_markov_texts(rule, TableDrafter(K, ragged=True), chunks=1)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_texts_drafted_as_trees_have_the_targets_distribution(rule):
    check_markov_texts(rule, TREE, chunks=1)


def check_markov_texts(rule, drafter, chunks):
    check_texts(rule, drafter, Params(table(0, V, V), table(1, V, V)), chunks)


def check_texts(rule, drafter, params, chunks):
    observed = run(rule, params, LENGTH, drafter, chunks=chunks)
    distribution = scipy.special.softmax(np.asarray(params.target, np.float64), -1)
    distribution = statistics.joint_distribution(distribution, LENGTH)
    assert statistics.excess(observed, distribution) < 1
    floor = statistics.noise_floor(distribution, observed.sum())
    assert statistics.distance(observed, distribution) < 1.1 * floor
    for counted, wanted in zip(pairs(observed), pairs(distribution), strict=True):
        assert statistics.excess(counted, wanted) < 1


# ------------------------------------------------------------------------ noise that serves twice


def golden_texts(rule, noise=None, monkeypatch=None, drafter=None):
    """Return chi-square excess and total variation of golden texts; ``noise`` replaces ours."""
    if noise is not None:
        monkeypatch.setattr(sampling, "round_noise", noise)
    params = Params(
        *(
            jnp.tile(jnp.log(jnp.array(distribution)), (V, 1))
            for distribution in (GOLDEN_P, GOLDEN_Q)
        )
    )
    observed = run(rule, params, GOLDEN_LENGTH, drafter, mutated=noise is not None)
    distribution = statistics.joint_distribution(np.tile(GOLDEN_P, (V, 1)), GOLDEN_LENGTH)
    return statistics.excess(observed, distribution), statistics.distance(observed, distribution)


SHIPPED = sampling.round_noise


def keyed_by_position(keys, root, purpose, count):
    """Key noise by position, a mutation: node i takes the noise of its absolute position."""
    one = lambda rank: SHIPPED(keys, root + rank, purpose, 1)[:, 0]
    return jnp.stack([one(rank) for rank in range(count)], 1)


def reusing(purpose, other):
    """Reuse noise, a mutation: noise for ``purpose`` is that of ``other``."""
    swap = lambda asked: other if asked == purpose else asked
    return lambda keys, root, asked, count: SHIPPED(keys, root, swap(asked), count)


def keyed_by_row(keys, root, purpose, count):
    """Key noise by row, a mutation: every round has the noise of the first."""
    return SHIPPED(keys, jnp.zeros_like(root), purpose, count)


def test_block_with_fresh_noise_every_round_has_the_golden_distribution():
    excess, distance = golden_texts("block")
    assert excess < 1
    assert distance < 0.03


def test_block_with_noise_keyed_by_position_is_caught(monkeypatch):
    excess, distance = golden_texts("block", keyed_by_position, monkeypatch)
    assert excess > 5
    assert distance == pytest.approx(0.101, abs=0.02)


def test_traversal_with_fresh_noise_every_round_has_the_golden_distribution():
    excess, distance = golden_texts("block", drafter=TREE)
    assert excess < 1
    assert distance < 0.03


def test_traversal_with_noise_keyed_by_position_is_caught(monkeypatch):
    excess, distance = golden_texts("block", keyed_by_position, monkeypatch, TREE)
    assert excess > 2
    assert distance > 0.04


@pytest.mark.parametrize(
    ("noise", "drafter"),
    [
        (reusing(sampling.RESIDUAL, sampling.DRAFT), TableDrafter(1)),
        # A draw by races depends on a hash of its uniform, so it may share the uniform.
        (reusing(sampling.ACCEPT, sampling.DRAFT), TableDrafter(2, draw=by_mass)),
        (keyed_by_row, TableDrafter(1)),
    ],
    ids=[
        "the residual reuses the draft's noise",
        "acceptance reuses the draft's noise",
        "every round has the noise of the first",
    ],
)
def test_noise_that_serves_twice_is_caught(noise, drafter, monkeypatch):
    excess, distance = golden_texts("rejection", noise, monkeypatch, drafter)
    assert excess > 10
    assert distance > 0.05
