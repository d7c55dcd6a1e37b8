"""Drafters with a network: what they draft in every round, against torch, and their programs."""

import re
from typing import Any, NamedTuple

import jax
import numpy as np
import pytest

from jspec.core.types import Params
from jspec.engine import functional as host
from jspec.engine import loop
from jspec.engine.plan import Plan
from tests import shipped, tiny
from tests.drafters import dflashes, heads, hydras, mtps, rounds, speculators

PATHS = dict(tree=((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 2, 0)))
DYNAMIC = dict(num_speculative_tokens=3, tree="eagle2", tree_size=8, tree_top_k=3)


def chain(depth):
    return dict(num_speculative_tokens=depth)


class Case(NamedTuple):
    """A tiny head with its tree."""

    module: Any
    name: str
    settings: dict
    trained: bool = False
    least: int = 0  # accepted tokens, so that features of accepted paths are tested too
    rows: int = 2
    slow: bool = False


HEADS = {
    "eagle-chain": ("eagle", chain(4)),
    "eagle-paths": ("eagle", PATHS),
    "eagle3-chain": ("eagle3", chain(4)),
    "eagle3-long": ("eagle3", chain(8)),
    "eagle3-eagle2": ("eagle3", DYNAMIC | dict(tree_size=14, tree_top_k=4)),
    "medusa-chain": ("medusa", chain(3)),
    "medusa-paths": ("medusa", dict(tree=((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0)))),
    "medusa-best": ("medusa", dict(num_speculative_tokens=3, tree="best_first", tree_size=9)),
}
# Wide enough that random weights get something accepted.
WIDE = dict(num_speculative_tokens=3, tree="best_first", tree_size=33)
DEEP = dict(tree=(*PATHS["tree"], (0, 2, 0, 0)))
CASES = {
    **{f"{case} random": Case(heads, *HEADS[case]) for case in HEADS},
    **{f"{case} trained": Case(heads, *HEADS[case], trained=True, least=26) for case in HEADS},
    "hydra-paths": Case(hydras, "mlp", PATHS, True, 16),
    "hydra-prefix": Case(hydras, "prefix", chain(6), True, 16),
    "hydra-prefix-eagle2": Case(hydras, "prefix", DYNAMIC, True, 16),
    "mlp as deep as it is trained for": Case(speculators, "untied", {}, True, 16),
    "mlp less deep": Case(speculators, "untied", chain(2), True, 16),
    "mlp-stages used again": Case(speculators, "tied", chain(4), True, 16),
    "mlp-paths": Case(speculators, "untied", PATHS, True, 16),
    "lstm": Case(speculators, "lstm", {}, True, 16),
    "lstm-eagle2": Case(
        speculators, "lstm", dict(tree="eagle2", tree_size=10, tree_top_k=3), True, 16
    ),
    "mtp-one": Case(mtps, "one", chain(6), True, 21),
    "mtp-two raw": Case(mtps, "two raw", DEEP),
    "mtp-raw": Case(mtps, "raw", DEEP, slow=True),
    "mtp-two": Case(mtps, "two", chain(4), slow=True),
    "dflash-best first": Case(dflashes, "dflash", WIDE, least=12),
    "dflash-chain": Case(dflashes, "dflash", chain(4), slow=True),
    "dflash-paths": Case(dflashes, "sliding", PATHS, slow=True),
    "dflash-from anchor": Case(dflashes, "reduced", chain(4), slow=True),
    "dspark-eagle2": Case(dflashes, "gated", DYNAMIC, rows=1),
    "dspark-chain": Case(dflashes, "vanilla", chain(4), rows=1, slow=True),
    "dspark-paths": Case(dflashes, "rnn", PATHS, rows=1, slow=True),
}


def slow_if(slow, *case):
    """Return a case of a test, marked slow or not."""
    return pytest.param(*case, marks=[pytest.mark.slow] * slow)


@pytest.mark.parametrize("case", [slow_if(case.slow, name) for name, case in CASES.items()])
def test_every_round_drafts_and_accepts_what_torch_does(case):
    pytest.importorskip("torch")
    module, name, settings, trained, least, rows, _ = CASES[case]
    drafter = module.drafter(name, **settings, draft_sample_method="greedy")
    weights = module.trained_params(name) if trained else module.random_params(name)
    params = Params(tiny.params().target, weights)
    in_torch = module.in_torch(drafter, name, weights)
    assert rounds.compare_all(drafter, params, in_torch, rows) >= least


SAMPLED = [
    *((hydras, name, config.num_heads) for name, config in hydras.CONFIGS.items()),
    *((speculators, name, None) for name in speculators.CONFIGS),
    *((dflashes, name, 3) for name in dflashes.CONFIGS),
]
SLOW = ("dflash", "reduced", "vanilla", "gated")


@pytest.mark.parametrize(
    ("module", "name", "depth"), [slow_if(case[1] in SLOW, *case) for case in SAMPLED]
)
def test_recorded_distributions_equal_those_of_torch(module, name, depth):
    pytest.importorskip("torch")
    drafter, weights = module.drafter(name, depth), module.random_params(name)
    prompt = tiny.prompts((9,))[0]
    draft, _ = rounds.draft_after(drafter, Params(tiny.params().target, weights), prompt)
    root, *drafted = np.asarray(draft.tokens[0]).tolist()
    assert root == prompt[-1]
    assert draft.parents.tolist() == list(range(-1, drafter.max_depth))
    log_probs = module.in_torch(drafter, name, weights)(prompt)
    expected = [log_probs(len(prompt) - 1, drafted[:depth]) for depth in range(len(drafted))]
    # A head with a vocabulary of its own gives the other tokens no probability.
    expected = np.stack([x[np.isfinite(x)] for x in expected])
    rounds.assert_same_distributions(draft.logits[0, :-1], expected)


@pytest.mark.parametrize(
    ("module", "name", "settings"),
    [
        (heads, "eagle", chain(8)),
        (heads, "eagle", dict(num_speculative_tokens=2, tree="eagle2", tree_size=6, tree_top_k=3)),
        (heads, "eagle", dict(num_speculative_tokens=2, tree="sampled", tree_size=6, tree_top_k=3)),
        (hydras, "prefix", chain(2)),
        pytest.param(dflashes, "dflash", chain(2), marks=pytest.mark.slow),
    ],
)
def test_the_loop_copies_neither_the_targets_cache_nor_the_heads(module, name, settings):
    plan = Plan(tiny.TARGET, module.drafter(name, **settings))
    params = Params(tiny.params().target, module.random_params(name))
    rows = [host.SequenceParams(row.prompt, max_tokens=9, temperature=0.9) for row in rounds.ROWS]
    batch = host.start(plan, params, rows)
    compiled = shipped.compiled(
        loop.decode.lower(plan, params, batch.request, (), batch.state, np.int32(9))
    )
    memory = batch.state.memory
    layers = (batch.state.cache.layers, getattr(memory, "cache", memory).layers)
    for shape in {leaf.shape for leaf in jax.tree.leaves(layers)}:
        dims = ",".join(map(str, shape))
        copies = re.findall(rf"f32\[{dims}\]\S* copy(?:-start)?\(", compiled.as_text())
        assert not copies, f"{len(copies)} copies of a cache of shape {shape}"
    donated = sum(leaf.nbytes for leaf in jax.tree.leaves(layers))
    assert compiled.memory_analysis().alias_size_in_bytes >= donated
