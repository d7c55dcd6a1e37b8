"""``jspec certify`` of drafters: honest ones pass, and every misreported draw is caught."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core import sampling, trees
from jspec.core.history import root_token
from jspec.core.types import Draft, Params
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.tools.certify import drafts
from jspec.tools.certify.watching import CONDITIONS
from tests.fakes import ToyTarget, TreeTableDrafter, by_mass, table
from tests.verify import test_mutations as mutations

V, K = 16, 3
TARGET = ToyTarget(V)
PARAMS = Params(table(0, V, V), table(1, V, V))
ROWS = [SequenceParams((token,), temperature=1.0) for token in (1, 5, 9)]
NUM_DRAFTS = 2048


def findings(drafter, rule="rejection", params=PARAMS, **settings):
    """Return the findings about a drafter."""
    plan = Plan(TARGET, drafter, rule)
    settings = {"num_drafts": NUM_DRAFTS} | settings
    return list(drafts(plan, params, ROWS, **settings))


def failures(drafter, **settings):
    """Return the subjects and notes of failed findings in one text."""
    return " | ".join(
        f"{x.subject}: {x.note}" for x in findings(drafter, **settings) if not x.passed
    )


# --------------------------------------------------------------------------- chains and mistakes


def as_is(distribution):
    return distribution


def own_noise(keys, root, count):
    return sampling.round_noise(keys, root, sampling.DRAFT, count)


def all_nodes(drafted, distributions):
    return jnp.ones(drafted.shape, bool)


def tidy(draft):
    return draft


@dataclasses.dataclass(frozen=True)
class Chain(jspec.NoDrafter):
    """Draws a chain from the table ``params.drafter``; every step can be a mistake."""

    drawn_from: Callable = as_is
    recorded: Callable = as_is
    noise_of: Callable = own_noise
    draw: Callable = sampling.draw
    keeps: Callable = all_nodes
    altered: Callable = tidy

    proposal = "chain"
    max_depth = K
    tree_size = K + 1

    def propose(self, params, request, shared, memory, history):
        uniforms = self.noise_of(request.keys, history.length - 1, K)
        drafted, distributions = [root_token(history)], []
        for i in range(K):
            distributions.append(
                sampling.process_logits(params.drafter[drafted[-1]], request.sampling)
            )
            drafted.append(self.draw(self.drawn_from(distributions[-1]), uniforms[:, i]))
        distributions = jnp.stack([*distributions, jnp.zeros_like(distributions[0])], 1)
        drafted = jnp.stack(drafted, 1)
        likely = jnp.cumprod(self.keeps(drafted[:, 1:], distributions), 1).astype(bool)
        valid = jnp.pad(likely, ((0, 0), (1, 0)), constant_values=True)
        draft = Draft(
            jnp.where(valid, drafted, 0),
            trees.chain(K),
            valid,
            self.recorded(distributions),
            max_depth=K,
        )
        return self.altered(draft), memory


def certain(distribution):
    return jnp.where(jnp.arange(V) == sampling.argmax(distribution)[:, None], 0.0, -jnp.inf)


def cool(distribution):
    return distribution / 0.7


def three_likeliest(distribution):
    return jnp.where(
        distribution >= jax.lax.top_k(distribution, 3)[0][..., -1:], distribution, -jnp.inf
    )


def flat(distribution):
    return jnp.where(jnp.arange(V) < V - 1, distribution, distribution - 1.5)


def one_node_late(distributions):
    return jnp.roll(distributions, 1, 1)


def rounded(distributions):
    return distributions.astype(jnp.bfloat16)


def likely(drafted, distributions):
    chance = jnp.take_along_axis(jax.nn.softmax(distributions[:, :-1], -1), drafted[..., None], 2)[
        ..., 0
    ]
    return chance > 0.1


def likely_so_far(drafted, distributions):
    """Keep an unlikely token, and then stop: dropped tokens have no influence."""
    return jnp.pad(likely(drafted, distributions), ((0, 0), (1, 0)), constant_values=True)[:, :-1]


def noise_for(purpose):
    return lambda keys, root, count: sampling.round_noise(keys, root, purpose, count)


def residual_noise(keys, root, count):
    """Use the noise of the token after the draft for the draft's first node."""
    return (
        own_noise(keys, root, count)
        .at[:, 0]
        .set(sampling.round_noise(keys, root, sampling.RESIDUAL, 1)[:, 0])
    )


def noise_of_positions(keys, root, count):
    return jnp.stack([own_noise(keys, root + i, 1)[:, 0] for i in range(count)], 1)


def noise_of_rows(keys, root, count):
    return own_noise(keys, jnp.zeros_like(root), count)


def one_uniform(keys, root, count):
    return jnp.repeat(own_noise(keys, root, 1), count, 1)


def of_each_row(*parents):
    """Return traced parents of every row: static ones out of order are refused at once."""
    rows = lambda draft: jnp.tile(jnp.array(parents, jnp.int32), (len(draft.tokens), 1))
    return lambda draft: draft.replace(parents=rows(draft))


DISTRIBUTION, REPLAY, NOISE = "follow the recorded", "the record gives", "are independent of"
# Classic mistakes and violations of ``Draft``, each with the finding that must fail.
WRONG_CHAINS = {
    "the argmax is drafted, a soft distribution recorded": (Chain(certain), DISTRIBUTION),
    "drafted at temperature 0.7, recorded at 1": (Chain(cool), DISTRIBUTION),
    "drafted under top-k, recorded without": (Chain(three_likeliest), DISTRIBUTION),
    "drafted without top-k, recorded under it": (Chain(recorded=three_likeliest), CONDITIONS[8]),
    "the distribution of another context is recorded": (
        Chain(recorded=one_node_late),
        DISTRIBUTION,
    ),
    "a token is drawn too seldom": (Chain(flat), DISTRIBUTION),
    "drafted tokens of small probability are dropped": (Chain(keeps=likely), DISTRIBUTION),
    "bfloat16 is recorded of float32 draws": (Chain(recorded=rounded), REPLAY),
    "the residual reuses the draft's noise": (Chain(noise_of=residual_noise), NOISE),
    "acceptance reuses the draft's noise": (
        Chain(noise_of=noise_for(sampling.ACCEPT), draw=by_mass),
        NOISE,
    ),
    "noise is keyed by position": (Chain(noise_of=noise_of_positions), NOISE),
    "every round has the noise of the first": (Chain(noise_of=noise_of_rows), NOISE),
    "all nodes of a draft share their noise": (Chain(noise_of=one_uniform), NOISE),
    "the recorded distribution is NaN": (Chain(recorded=jnp.log), CONDITIONS[7]),
    "the root is another token": (
        Chain(altered=lambda x: x.replace(tokens=x.tokens.at[:, 0].add(1))),
        CONDITIONS[0],
    ),
    "a token is outside the vocabulary": (
        Chain(altered=lambda x: x.replace(tokens=x.tokens + V)),
        CONDITIONS[1],
    ),
    "a child precedes its parent": (Chain(altered=of_each_row(-1, 2, 0, 2)), CONDITIONS[2]),
    "a node outlives its parent": (
        Chain(altered=lambda x: x.replace(valid=x.valid.at[:, 1].set(False))),
        CONDITIONS[3],
    ),
    "a chain has siblings": (
        Chain(altered=lambda x: x.replace(parents=np.array([-1, 0, 0, 1], np.int32))),
        CONDITIONS[6],
    ),
}
FAST_CHAINS = (
    "drafted at temperature 0.7, recorded at 1",
    "bfloat16 is recorded of float32 draws",
    "the residual reuses the draft's noise",
)


def slow_but(fast, every):
    return [*fast, *(pytest.param(x, marks=pytest.mark.slow) for x in every if x not in fast)]


@pytest.mark.parametrize("mistake", slow_but(FAST_CHAINS, WRONG_CHAINS))
def test_a_chain_that_is_off_is_caught(mistake):
    drafter, words = WRONG_CHAINS[mistake]
    assert words in failures(drafter)


@pytest.mark.parametrize(
    "drafter", [Chain(keeps=likely_so_far), pytest.param(Chain(), marks=pytest.mark.slow)]
)
def test_an_honest_chain_that_stops_early_passes(drafter):
    every = findings(drafter)
    assert all(each.passed for each in every)
    assert [
        words in each.subject
        for words, each in zip(("well formed", DISTRIBUTION, REPLAY, NOISE), every, strict=True)
    ] == [True] * 4


@pytest.mark.slow
def test_a_drafter_with_foreign_noise_is_compared_by_counts_alone():
    foreign = lambda keys, root, count: sampling.round_noise(keys, root, 77, count)
    every = findings(Chain(noise_of=foreign))
    assert all(each.passed for each in every)
    assert not any(REPLAY in each.subject for each in every)
    assert DISTRIBUTION in failures(Chain(cool, noise_of=foreign))


# ----------------------------------------------------------------------------- trees and mistakes


@dataclasses.dataclass(frozen=True)
class Tree(TreeTableDrafter):
    """A drawn tree that is altered before the loop gets it."""

    altered: Callable = tidy
    drawing: str = ""  # how children are drawn, if not by ``proposal``

    def propose(self, params, request, shared, memory, history):
        draft, memory = super().propose(params, request, shared, memory, history)
        return self.altered(draft.replace(sampled=jnp.ones_like(draft.valid))), memory

    def _draw(self, request, position, node, distribution, count):
        if self.drawing == "likeliest":
            return list(jax.lax.top_k(distribution, count)[1].T) if count else []
        draw = functools.partial(super()._draw, request, position, node, distribution)
        if self.drawing == "with replacement":
            nodes = self.tree_size * node + jnp.arange(count)
            noise = sampling.node_noise(request.keys, position, nodes, distribution.shape[-1])
            return list(sampling.argmax(distribution[:, None] + noise).T)
        if (self.drawing or self.proposal) != "deterministic_last":
            return draw(count)
        drawn = draw(min(count, 1))
        ids = jnp.arange(V)
        rest = [jnp.where(ids == token[:, None], -jnp.inf, distribution) for token in drawn]
        return [*drawn, *(sampling.argmax(left) for left in rest[: count - 1])]


def tree(proposal="without_replacement", altered=tidy, drawing="", parents=(-1, 0, 0, 1, 1)):
    return Tree(2, parents=parents, proposal=proposal, altered=altered, drawing=drawing)


def without_unlikely(draft):
    """Drop nodes that are unlikely in their own recorded distribution."""
    distributions = jnp.take_along_axis(
        draft.logits, np.maximum(draft.parents, 0)[None, :, None], 1
    )
    chance = jnp.take_along_axis(jax.nn.softmax(distributions, -1), draft.tokens[..., None], 2)[
        ..., 0
    ]
    likely = (chance > 0.1).at[:, 0].set(True)
    return draft.replace(valid=likely & likely[:, np.maximum(draft.parents, 0)])


def missing_where_the_next_is_low(draft):
    """Drop node 3 if its sibling, node 4, has a low token."""
    return draft.replace(valid=draft.valid.at[:, 3].set(draft.tokens[:, 4] >= V // 4))


def late(draft):
    return draft.replace(logits=jnp.roll(draft.logits, 1, 1))


def last_is_deterministic(draft):
    """Declare the last child of each node deterministic."""
    return draft.replace(
        sampled=jnp.broadcast_to(np.array([0, 1, 0, 1, 0], bool), draft.valid.shape)
    )


WRONG_TREES = {
    "the likeliest children are declared drawn": (tree(drawing="likeliest"), DISTRIBUTION),
    "siblings are drawn with replacement, recorded without": (
        tree(drawing="with replacement"),
        CONDITIONS[5],
    ),
    "children are pruned by their own probability": (tree(altered=without_unlikely), DISTRIBUTION),
    "whether a child exists hangs on its later sibling": (
        tree(altered=missing_where_the_next_is_low),
        NOISE,
    ),
    "recorded distributions are one node late": (tree(altered=late), DISTRIBUTION),
    "a last deterministic child leaves the distribution of the drawn one": (
        tree("mixed", last_is_deterministic, "deterministic_last"),
        DISTRIBUTION,
    ),
}


@pytest.mark.parametrize(
    "mistake", slow_but(("children are pruned by their own probability",), WRONG_TREES)
)
def test_a_tree_that_is_off_is_caught(mistake):
    drafter, words = WRONG_TREES[mistake]
    assert words in failures(drafter)


@pytest.mark.slow
@pytest.mark.parametrize(
    "drafter",
    [tree(), tree("deterministic_last", last_is_deterministic)],
    ids=["without replacement", "deterministic last"],
)
def test_an_honest_tree_passes(drafter):
    assert [each.note for each in findings(drafter) if not each.passed] == []


# The classic mistakes with their measured bias, and the name under which each is planted here or in
# the tests of rules (test_certify.py runs all of WRONG_RULES and WRONG_TREES of test_mutations).
CLASSIC = {
    "top-k children verified with p/q": "the likeliest children are declared drawn",  # .44
    "argmax draft with soft q": "the argmax is drafted, a soft distribution recorded",  # .39
    "sampled tree pruned by own q": "children are pruned by their own probability",  # .20
    "one-hot draft, rejected token not masked": "a refused deterministic node is not masked",  # .19
    "drop low-q token": "drafted tokens of small probability are dropped",  # .09
    "resample from p": "rejection draws again from p",  # .07
    "draft T is not recorded T": "drafted at temperature 0.7, recorded at 1",  # .06
    "same noise for draft and residual": "the residual reuses the draft's noise",  # .013
    "w/o replacement with stale q": "children drawn without replacement are judged by a stale q",
    "bf16 q stored, drawn from float32": "bfloat16 is recorded of float32 draws",  # .002
    "round noise keyed by position": "noise is keyed by position",  # .10 under block
}


def test_every_classic_mistake_is_planted_somewhere():
    planted = WRONG_CHAINS | WRONG_TREES | mutations.WRONG_RULES | mutations.WRONG_TREES
    assert set(CLASSIC.values()) <= planted.keys()
