"""Hidden states at the accepted nodes of launches, for those who train while they serve."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import trees
from jspec.core.types import Params
from jspec.engine import answers
from jspec.engine import functional as host
from jspec.engine.engine import Engine
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.models import decoder
from tests import tiny
from tests.test_conformance import DRAFTERS

LAYERS = (0, 1, 2)  # the embeddings, the stream between both blocks, and the normed output


def hidden_states(text):
    """Return the hidden states [n, D] of a text, in one pass over it."""
    tokens, cache = jnp.asarray(text)[None], decoder.init_cache(tiny.TARGET.config, 1, 8)
    tree, params = trees.chain_tree(1, len(text)), tiny.params().target
    out = decoder.forward(params, tiny.TARGET.config, tokens, tree, cache, LAYERS)
    return [feature[0] for feature in out.features]


@pytest.mark.parametrize(
    "case", [("none", "greedy chain"), ("draft_model", "chain"), ("eagle3", "paths")], ids="-".join
)
def test_features_of_a_launch_are_the_hidden_states_of_its_text(case):
    """Two slots for four sequences, and few pages: some wait, and some are preempted."""
    drafter, weights = DRAFTERS[case[0]][case[1]]
    plan, params = Plan(tiny.TARGET, drafter, "coupled"), Params(tiny.params().target, weights())
    pool, launches = Pool(plan, params, num_pages=18, page_size=4), []
    engine = Engine(
        plan,
        params,
        num_slots=2,
        capacity=64,
        profile=Profile(rounds=3, capture_layers=LAYERS),
        pool=pool,
        on_launch=launches.append,
    )
    rows = [
        host.SequenceParams(prompt, max_tokens=16, temperature=0.8 * (index % 2))
        for index, prompt in enumerate(tiny.prompts((1, 9, 23, 30)))
    ]
    for row, answer in zip(rows, engine.run(rows), strict=True):
        expected = hidden_states((*row.prompt, *answer.tokens[:-1]))
        for ours, theirs in zip(answer.features, expected, strict=True):
            assert ours.shape == (16, 32)
            np.testing.assert_allclose(ours, theirs[len(row.prompt) - 1 :], rtol=1e-3, atol=1e-3)
    for launch in launches:
        assert {each.shape for each in launch.features} == {(3, 2, drafter.max_depth + 1, 32)}
        assert launch.capture_layers == LAYERS
    assert answers.cut(answer, 5).features[0].shape == (5, 32)


def test_nothing_is_captured_unless_it_is_asked_for():
    launches, plan, params = [], Plan(tiny.TARGET, tiny.NGRAM), tiny.params()
    engine = Engine(plan, params, num_slots=2, capacity=64, on_launch=launches.append)
    [answer] = engine.run([host.SequenceParams((1, 2, 3), max_tokens=4)])
    assert answer.features is None
    assert not jax.tree.leaves([launch.features for launch in launches])


def test_layers_that_a_target_lacks_are_refused_before_any_work():
    settings = dict(num_slots=1, capacity=64, profile=Profile(capture_layers=(3,)))
    with pytest.raises(ValueError, match=r"capture_layers=\(3,\) must be at most 2, the layers"):
        Engine(Plan(tiny.TARGET, tiny.NONE), tiny.params(), **settings)
    for layers in ((-1,), (1, 1), (0.5,)):
        with pytest.raises(ValueError, match="must be distinct whole numbers of at least 0"):
            Profile(capture_layers=layers)
