"""Every drafting method with every tree, under every rule, for greedy, sampled and mixed batches.

For all of them: texts equal plain decoding if they are greedy, or if drafts are deterministic or
share the target's noise (unless the rule is lossy even then); texts do not depend on neighbours;
and counts add up. ``make test-more`` runs a cover of all pairs of (method, tree, rule,
temperatures), ``make conformance`` the full product.
"""

import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.api import config
from jspec.api.config.keys import CUSTOM_CLASS
from jspec.core.types import Params
from jspec.drafters import (
    METHODS,
    DraftModel,
    Hybrid,
    ParallelDraftModel,
    ParallelEagle,
    Suffix,
    TokenRecycling,
)
from jspec.drafters.draft_model.language_model import translating
from jspec.engine import functional as host
from jspec.engine import loop, slots
from jspec.engine.engine import Engine
from jspec.engine.plan import Plan
from jspec.models import decoder
from jspec.verify import RULES, synthetic
from tests import tiny
from tests.drafters import dflashes, heads, hydras, mtps, peagle, speculators

TREES = {
    "chain": dict(num_speculative_tokens=3),
    "greedy chain": dict(num_speculative_tokens=3, draft_sample_method="greedy"),
    "eagle2": dict(num_speculative_tokens=3, tree="eagle2", tree_size=9, tree_top_k=3),
    "sampled": dict(num_speculative_tokens=3, tree="sampled", tree_size=8),
    "top plus one": dict(
        num_speculative_tokens=3, tree="sampled", tree_size=8, draft_sample_method="top_plus_one"
    ),
    "paths": dict(tree=((0,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0))),
}


def _head(method):
    trees = {
        name: settings for name, settings in TREES.items() if (method, name) != ("medusa", "eagle2")
    }
    return {
        name: (heads.drafter(method, **settings), functools.partial(heads.random_params, method))
        for name, settings in trees.items()
    }


def _speculators():
    """Speculators with shared weights, with separate ones and with an LSTM, a tree each."""
    names = {
        "chain": "untied",
        "greedy chain": "lstm",
        "eagle2": "lstm",
        "sampled": "tied scaled",
        "top plus one": "tied scaled",
        "paths": "untied",
    }
    settings = TREES | {"chain": {}, "sampled": dict(tree="sampled", tree_size=8, tree_top_k=3)}
    return {
        tree: (
            speculators.drafter(name, **settings[tree]),
            functools.partial(speculators.random_params, name),
        )
        for tree, name in names.items()
    }


def _hydra():
    """Heads with and without a prefix layer, in turn."""
    return {
        tree: (hydras.drafter(name, **settings), functools.partial(hydras.random_params, name))
        for (tree, settings), name in zip(TREES.items(), ("mlp", "prefix") * 3, strict=True)
    }


def _dflash():
    """A head that knows few tokens and drafts from the root on, and one with sliding layers."""
    names = {"sampled": "reduced"}
    best = dict(num_speculative_tokens=3, tree="best_first", tree_size=8)
    cases = {tree: (name, TREES[tree]) for tree, name in names.items()}
    return {
        tree: (dflashes.drafter(name, **settings), functools.partial(dflashes.random_params, name))
        for tree, (name, settings) in (cases | {"best first": ("sliding", best)}).items()
    }


def _mtp():
    """One module that hands on what its norm gives, or what its block does, two of either."""
    names = {
        "chain": "one",
        "greedy chain": "two raw",
        "eagle2": "raw",
        "sampled": "two",
        "top plus one": "one",
        "paths": "raw",
    }
    two = {
        "greedy chain": dict(num_speculative_tokens=2, draft_sample_method="greedy"),
        "sampled": dict(num_speculative_tokens=2, tree="sampled", tree_size=7),
    }
    return {
        tree: (
            mtps.drafter(name, **(TREES | two)[tree]),
            functools.partial(mtps.random_params, name),
        )
        for tree, name in names.items()
    }


def _dspark():
    """A head with a plain Markov bias, and one that hands a state from slot to slot."""
    names = {"chain": "vanilla", "eagle2": "rnn"}
    return {
        tree: (
            dflashes.drafter(name, **TREES[tree]),
            functools.partial(dflashes.random_params, name),
        )
        for tree, name in names.items()
    }


def _draft():
    return tiny.params().drafter


def _custom():
    """A drafter of a user's, found by its dotted path."""
    given = {"model": "tests.drafters.custom.Successor", "num_speculative_tokens": 3, "table": ""}
    drafter = config.read(given).drafter(None, tiny.TARGET)
    rng = np.random.default_rng(7)
    return drafter, lambda: jnp.asarray(rng.normal(0, 2, (tiny.VOCAB, tiny.VOCAB)), jnp.float32)


def _foreign():
    """A draft model with every third token of the target's, under other ids."""
    settings = dataclasses.replace(tiny.DRAFT_CONFIG, vocab_size=24)
    shared_ids, target_to_draft = np.arange(0, tiny.VOCAB, 3), np.full(tiny.VOCAB, 23)
    target_to_draft[shared_ids] = np.arange(shared_ids.size)[::-1]
    weights = functools.partial(decoder.init_params, jax.random.key(1), settings)
    return (
        DraftModel(settings, 3, use_heterogeneous_vocab=True),
        lambda: translating(weights(), shared_ids, target_to_draft[shared_ids], target_to_draft),
    )


# A draft model that drafts all tokens in one pass.
_parallel = functools.partial(
    ParallelDraftModel, tiny.DRAFT_CONFIG, tiny.TARGET, mask_token_id=tiny.VOCAB - 1
)
_FEW = dict(
    suffix_decoding_max_tree_depth=6,
    suffix_decoding_max_cached_tokens=64,
    suffix_decoding_max_occurrences=8,
)


def _hybrids():
    """Hybrids that merge or choose, as chains and as trees."""
    draft = lambda: (None, _draft())
    head = lambda: (None, heads.random_params("eagle"))
    recycling = TokenRecycling(tiny.VOCAB, 3, tree_size=8)
    return {
        "chain": (Hybrid((tiny.NGRAM, tiny.DRAFT), "choose"), draft),
        "greedy chain": (Hybrid((tiny.NGRAM, tiny.GREEDY_DRAFT)), draft),
        "merged": (Hybrid((tiny.NGRAM, tiny.DRAFT)), draft),
        "sampled": (Hybrid((recycling, heads.drafter("eagle", **TREES["sampled"]))), head),
        "eagle2": (Hybrid((recycling, heads.drafter("eagle", **TREES["eagle2"])), "choose"), head),
    }


# method: {tree: (drafter, its weights)}. A new method needs an entry here. Among cases that cover
# equally much the first is chosen, so fast ones come first.
DRAFTERS = {
    "none": {"greedy chain": (tiny.NONE, lambda: None)},
    "ngram": {"greedy chain": (tiny.NGRAM, lambda: None)},
    "suffix": {
        "greedy chain": (Suffix(**_FEW), lambda: None),
        "best first": (Suffix(tree="best_first", tree_size=8, **_FEW), lambda: None),
    },
    "token_recycling": {
        "paths": (TokenRecycling(tiny.VOCAB, tree=TREES["paths"]["tree"]), lambda: None),
        "best": (TokenRecycling(tiny.VOCAB, 3, tree_size=8), lambda: None),
    },
    "medusa": _head("medusa"),
    "mlp_speculator": _speculators(),
    "hydra": _hydra(),
    "dflash": _dflash(),
    "dspark": _dspark(),
    "draft_model": {
        "chain": (tiny.DRAFT, _draft),
        "greedy chain": (tiny.GREEDY_DRAFT, _draft),
        "own vocabulary": _foreign(),
        "sampled": (_parallel(**TREES["sampled"]), _draft),
        "best first": (_parallel(num_speculative_tokens=3, tree="best_first", tree_size=9), _draft),
    },
    "eagle": _head("eagle"),
    "eagle3": _head("eagle3")
    | {
        "best first": (
            ParallelEagle(peagle.CONFIG, tiny.TARGET, 3, tree="best_first", tree_size=9),
            peagle.weights,
        )
    },
    "mtp": _mtp(),
    "hybrid": _hybrids(),
    "custom_class": {"chain": _custom()},
}
TEMPERATURES = {"mixed": (0, 1, 0, 0.7), "sampled": (1, 0.7, 1.3, 0.4), "greedy": (0, 0, 0, 0)}
SETTINGS = RULES | {"synthetic": synthetic(length=2.0)}  # a mean that any depth can have
PRODUCT = [
    (method, tree, rule, rows)
    for method, trees in DRAFTERS.items()
    for tree, rule, rows in itertools.product(trees, RULES, TEMPERATURES)
]


def effective(case):
    """The case with its effective rule: rules that coincide on its drafts are one case."""
    method, tree, rule, rows = case
    proposal = DRAFTERS[method][tree][0].proposal
    return method, tree, SETTINGS[rule].for_proposal(proposal).name, rows


def pairs(case):
    """Return all pairs of (index, value) of a case.

    Lossy rules need no pair with a tree. ``synthetic`` ignores drafts and needs none with a method.
    """
    all_pairs = itertools.combinations(enumerate(effective(case)), 2)
    skipped = {(1, 2)} if not SETTINGS[case[2]].lossless else set()
    skipped |= {(0, 2)} if case[2] == "synthetic" else set()
    return {pair for pair in all_pairs if (pair[0][0], pair[1][0]) not in skipped}


def pairwise(product):
    """Choose few cases of the product in which every pair of values occurs."""
    missing, chosen = set().union(*map(pairs, product)), []
    while missing:
        chosen.append(max(product, key=lambda case: len(missing & pairs(case))))
        missing -= pairs(chosen[-1])
    return chosen


COVER = pairwise(PRODUCT)


def rows_of(kind):
    """Sequences of one token, so that nothing is prefilled, and of different lengths."""
    return [
        host.SequenceParams((7 * i + 3,), max_tokens=14 - 4 * i, temperature=temperature, stream=i)
        for i, temperature in enumerate(TEMPERATURES[kind])
    ]


def run(plan, params, rows, shared=()):
    """Run the rows through two slots: the third joins where the first of them ends."""
    return Engine(plan, params, num_slots=2, capacity=16, shared=shared).run(rows)


@functools.cache
def plain(kind):
    """Return the texts of plain decoding, each row alone, without the engine."""
    plan, params = Plan(tiny.TARGET, tiny.NONE, node_buckets=(1,)), tiny.params()
    batches = (host.start(plan, params, [row]) for row in rows_of(kind))
    answers = [host.advance(plan, params, batch).answers[0] for batch in batches]
    return [answer.tokens.tolist() for answer in answers]


def shapes(plan, params, batch, capacity):
    """Return the shapes of the state of a batch."""
    return slots.allocate.eval_shape(plan, params, batch, capacity, has_pages=False)


def check(method, tree, rule, kind):
    drafter, weights = DRAFTERS[method][tree]
    chosen_rule = SETTINGS[rule]
    if rule == "synthetic" and method == "none":
        with pytest.raises(ValueError, match="NoDrafter drafts to depth 0"):
            Plan(tiny.TARGET, drafter, chosen_rule)
        return
    assert drafter.proposal in chosen_rule.exact_for or not chosen_rule.lossless
    plan = Plan(tiny.TARGET, drafter, chosen_rule, node_buckets=(drafter.tree_size,))
    params = Params(tiny.params().target, weights())
    rows = rows_of(kind)
    same = plan.effective_rule.randomness == "target"
    # Lossy texts depend on the drafts, and drafts from shared state depend on neighbours.
    answers = run(plan, params, rows, loop.init_shared(plan) if same else ())
    for row, answer in zip(rows, answers, strict=True):
        assert len(answer.tokens) == row.max_tokens
        accepted = answer.accepted @ np.arange(drafter.max_depth + 1)
        assert len(answer.tokens) == answer.rounds + accepted
        assert accepted <= answer.drafted and answer.drafts == answer.accepted.sum()
    texts = [answer.tokens.tolist() for answer in answers]
    for row, text, expected in zip(rows, texts, plain(kind), strict=True):
        if same or (row.temperature == 0 and chosen_rule.greedy_is_match):
            assert text == expected
    if not same:
        backwards = run(plan, params, rows[::-1])
        assert [answer.tokens.tolist() for answer in backwards[::-1]] == texts


def test_every_leaf_of_the_state_has_the_batch_on_axis_0():
    """A row joins by writing its state along axis 0."""
    for method, trees in DRAFTERS.items():
        for drafter, weights in trees.values():
            plan, params = Plan(tiny.TARGET, drafter), Params(tiny.params().target, weights())
            three, five = (shapes(plan, params, batch, 64) for batch in (3, 5))
            of_batch = three.replace(round=None), five.replace(round=None)
            for leaf, other in zip(*map(jax.tree.leaves, of_batch), strict=True):
                assert (leaf.shape[0], other.shape[0]) == (3, 5), method
                assert leaf.shape[1:] == other.shape[1:], method


def test_every_method_is_covered():
    assert set(DRAFTERS) == {*METHODS, CUSTOM_CLASS}
    assert {case[:2] for case in COVER} == {case[:2] for case in PRODUCT}


@pytest.mark.parametrize("case", COVER, ids="-".join)
def test_a_method_conforms(case):
    check(*case)


@pytest.mark.slow
@pytest.mark.parametrize("case", sorted(set(PRODUCT) - set(COVER)), ids="-".join)
def test_a_method_conforms_in_every_other_combination(case):
    check(*case)
