"""Recorded acceptance by depth and rank is that of the distributions."""

import jax.numpy as jnp
import numpy as np

from jspec.core import static_trees
from jspec.core.types import Params
from jspec.engine.functional import generate_sequences
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.tune import acceptance
from tests import tiny
from tests.fakes import ToyTarget, TreeTableDrafter

P, Q = (0.5, 0.3, 0.2), (0.2, 0.5, 0.3)  # golden numbers: every draft is accepted alike
BUSH = static_trees.from_choices([(0,), (1,), (0, 0), (0, 1)])


def test_acceptance_by_rank_follows_from_the_distributions():
    """The first child is accepted with 1 - TV(p, q), both together as draws without replacement."""
    rows = [SequenceParams((0,), 400, temperature=1.0, seed=seed) for seed in range(8)]
    distributions = [
        jnp.log(jnp.tile(jnp.array(distribution, jnp.float32), (3, 1))) for distribution in (P, Q)
    ]
    plan = Plan(ToyTarget(3), TreeTableDrafter(BUSH.max_depth, parents=BUSH.parents))
    answers = generate_sequences(plan, Params(*distributions), rows, profile=tiny.NODES)
    paths = [path for answer in answers for path in acceptance.paths_of(answer, BUSH)]
    counts = acceptance.count(paths, BUSH)
    exact = np.array([[0.7, 0.108571], [0.7, 0.108571]])
    assert counts.tried[0, 0] == counts.tried[0, 1] > 1000 and counts.tried[1, 0] > 700
    assert np.abs(counts.chances - exact).max() < 0.04
