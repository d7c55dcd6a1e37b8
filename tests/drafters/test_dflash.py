"""DFlash: drafts equal to torch's in every round, distributions, memory and errors."""

import dataclasses
import functools
import re

import jax
import numpy as np
import pytest

from jspec.core.types import Params
from jspec.drafters.dflash import DFlash
from jspec.engine import functional as host
from jspec.engine import loop
from jspec.engine.plan import Plan
from tests import networks, shipped, tiny
from tests.drafters import dflashes, rounds
from tests.drafters.rounds import ROWS, plain, plan_of

# Wide enough that random weights get something accepted.
WIDE = dict(num_speculative_tokens=3, tree="best_first", tree_size=33)
# Head, tree, and the least accepted tokens, so that features of accepted paths are tested too.
CASES = {
    "chain": ("dflash", dict(num_speculative_tokens=4), 0),
    "best first": ("dflash", WIDE, 12),
    "paths": ("sliding", dict(tree=((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 2, 0))), 0),
    "from anchor": ("reduced", dict(num_speculative_tokens=4), 0),
}


def params_of(name):
    return Params(tiny.params().target, dflashes.random_params(name))


@pytest.mark.parametrize(
    "case",
    [
        name if least else pytest.param(name, marks=pytest.mark.slow)
        for name, (_, _, least) in CASES.items()
    ],
)
def test_every_round_drafts_and_accepts_what_torch_does(case):
    torch = pytest.importorskip("torch")
    name, settings, least = CASES[case]
    drafter = dflashes.drafter(name, **settings, draft_sample_method="greedy")
    params = params_of(name)
    answers = host.generate_sequences(plan_of(drafter), params, ROWS, profile=tiny.NODES)
    reference = dflashes.torch_reference(name, params.drafter)
    ids = params.drafter.draft_to_target
    ids = np.arange(tiny.VOCAB) if ids is None else np.asarray(ids)
    total = 0
    for row, text, answer in zip(ROWS, plain(), answers, strict=True):
        states = dflashes.states_of(text, drafter.capture_layers)

        @functools.cache
        @torch.inference_mode()
        def block(root):
            logits = reference.draft_logits(states[:root], text[root], drafter.max_depth)  # noqa: B023
            distributions = np.full((drafter.max_depth, tiny.VOCAB), -np.inf)
            distributions[:, ids] = logits.log_softmax(-1).numpy()
            return distributions

        total += rounds.compare(
            answer, row.prompt, text, drafter.draft_tree, lambda root, path: block(root)[len(path)]
        )
    assert total >= least


@pytest.mark.parametrize(
    "name",
    ["sliding", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dflash", "reduced"))],
)
def test_recorded_distributions_equal_those_of_torch(name):
    torch = pytest.importorskip("torch")
    drafter = dflashes.drafter(name, 3)
    params = params_of(name)
    prompt = tiny.prompts((9,))[0]
    draft, _ = rounds.draft_after(drafter, params, prompt)
    with torch.inference_mode():
        states = dflashes.states_of(prompt, drafter.capture_layers)[:-1]
        reference = dflashes.torch_reference(name, params.drafter)
        expected = reference.draft_logits(states, prompt[-1], 3).numpy()
    rounds.assert_same_distributions(draft.logits[0, :3], expected)


def test_the_cache_equals_that_of_one_pass_over_the_text():
    drafter, params = dflashes.drafter("dflash", **WIDE), params_of("dflash")
    texts, lengths, state = rounds.after_rounds(drafter, params)
    fresh = rounds.recomputed(drafter, params, texts, lengths)
    rounds.assert_same_rows(state.memory, fresh, lengths - 1)


@pytest.mark.slow
def test_the_loop_copies_neither_the_targets_cache_nor_the_heads():
    plan = Plan(tiny.TARGET, dflashes.drafter("dflash", 2))
    params = params_of("dflash")
    batch = host.start(
        plan, params, [host.SequenceParams(ROWS[1].prompt, max_tokens=9, temperature=0.9)]
    )
    arguments = (plan, params, batch.request, ())
    lowered = loop.decode.lower(*arguments, batch.state, np.int32(9))
    text = shipped.compiled(lowered).as_text()
    for cache in (batch.state.cache, batch.state.memory):
        dims = ",".join(map(str, jax.tree.leaves(cache.layers)[0].shape))
        assert not re.findall(rf"f32\[{dims}\]\S* copy(?:-start)?\(", text)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dflash", {"num_speculative_tokens": 5}, "a block of 5 slots drafts 4 tokens"),
        ("reduced", {"num_speculative_tokens": 5}, "a block of 4 slots drafts 4 tokens"),
        ("dflash", {"num_speculative_tokens": 2, "tree": "eagle2"}, "use 'best_first'"),
        ("dflash", {}, "needs num_speculative_tokens"),
    ],
)
def test_settings_that_do_not_fit_the_head_are_refused(name, settings, message):
    with pytest.raises(ValueError, match=message):
        dflashes.drafter(name, **settings)


def test_a_block_that_does_not_fit_into_a_sliding_window_is_refused():
    config = dflashes.CONFIGS["sliding"]
    network = networks.changed(config.network, windows=(3, None))
    narrow = dataclasses.replace(config, network=network)
    assert DFlash(narrow, tiny.TARGET, 2).max_depth == 2
    with pytest.raises(ValueError, match="must fit into the sliding window of 3"):
        DFlash(narrow, tiny.TARGET, 3)
