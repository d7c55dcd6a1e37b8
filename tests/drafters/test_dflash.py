"""DFlash and DSpark: memory, the likeliest tokens of each slot, and errors."""

import dataclasses

import numpy as np
import pytest

from jspec.core.types import Params
from jspec.drafters.dflash import DFlash, DSpark
from tests import networks, tiny
from tests.drafters import dflashes, heads, rounds

# Wide enough that random weights get something accepted.
WIDE = dict(num_speculative_tokens=3, tree="best_first", tree_size=33)


def params_of(name):
    return Params(tiny.params().target, dflashes.random_params(name))


def test_the_cache_equals_that_of_one_pass_over_the_text():
    drafter, params = dflashes.drafter("dflash", **WIDE), params_of("dflash")
    texts, lengths, state = rounds.after_rounds(drafter, params)
    fresh = rounds.recomputed(drafter, params, texts, lengths)
    rounds.assert_same_rows(state.memory, fresh, lengths - 1)


@pytest.mark.slow
def test_only_the_likeliest_tokens_of_each_slot_are_drafted():
    torch = pytest.importorskip("torch")
    drafter, params = dflashes.drafter("vanilla", 3, dspark_draft_topk=5), params_of("vanilla")
    prompt = tiny.prompts((9,))[0]
    draft, _ = rounds.draft_after(drafter, params, prompt)
    with torch.inference_mode():
        states = heads.torch_states(prompt, drafter.capture_layers)[:-1]
        reference = dflashes.torch_reference("vanilla", params.drafter)
        base = reference.draft_logits(states, prompt[-1], 3)
        expected = reference.path_logits(states, np.asarray(draft.tokens[0, :3]), 3)
    for row, ids in enumerate(base.topk(5).indices):
        distribution = np.asarray(draft.logits[0, row])
        assert np.flatnonzero(np.isfinite(distribution)).tolist() == sorted(ids.tolist())
        gap = distribution[ids] - expected[row, ids].numpy()
        np.testing.assert_allclose(gap - gap.mean(), 0, atol=1e-4)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("dflash", {"num_speculative_tokens": 5}, "a block of 5 slots drafts 4 tokens"),
        ("reduced", {"num_speculative_tokens": 5}, "a block of 4 slots drafts 4 tokens"),
        ("dflash", {"num_speculative_tokens": 2, "tree": "eagle2"}, "use 'best_first'"),
        ("dflash", {}, "needs num_speculative_tokens"),
        ("gated", {"num_speculative_tokens": 5}, "a block of 5 slots drafts 4 tokens"),
        ("gated", {"num_speculative_tokens": 2, "tree": "best_first"}, "use 'eagle2'"),
        (
            "rnn",
            {"num_speculative_tokens": 2, "dspark_draft_topk": 41},
            "draft vocabulary size .40",
        ),
        (
            "rnn",
            {"num_speculative_tokens": 2, "tree": "sampled", "dspark_draft_topk": 2},
            "nodes with 4 children, but the head knows only 2 tokens",
        ),
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


def test_heads_are_drafted_with_by_their_own_method():
    with pytest.raises(ValueError, match="this is a DSpark head; draft with it by method 'dspark'"):
        DFlash(dflashes.CONFIGS["gated"], tiny.TARGET, 2)
    with pytest.raises(ValueError, match="this is a DFlash head; draft with it by method 'dflash'"):
        DSpark(dflashes.CONFIGS["dflash"], tiny.TARGET, 2)
