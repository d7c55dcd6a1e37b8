"""DSpark: drafts equal to torch's in every round, distributions of paths, and errors."""

import functools

import numpy as np
import pytest

from jspec.core.types import Params
from jspec.drafters.dflash import DFlash, DSpark
from jspec.engine import functional as host
from tests import tiny
from tests.drafters import dflashes, rounds
from tests.drafters.rounds import ROWS, plain, plan_of

CASES = {
    "chain": ("vanilla", dict(num_speculative_tokens=4)),
    "dynamic": ("gated", dict(num_speculative_tokens=3, tree="eagle2", tree_size=8, tree_top_k=3)),
    "paths": ("rnn", dict(tree=((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 2, 0)))),
}


def params_of(name):
    return Params(tiny.params().target, dflashes.random_params(name))


@pytest.mark.parametrize(
    "case",
    ["dynamic", *(pytest.param(name, marks=pytest.mark.slow) for name in ("chain", "paths"))],
)
def test_every_round_drafts_and_accepts_what_torch_does(case):
    torch = pytest.importorskip("torch")
    name, settings = CASES[case]
    drafter = dflashes.drafter(name, **settings, draft_sample_method="greedy")
    params = params_of(name)
    answers = host.generate_sequences(plan_of(drafter), params, ROWS[:1], profile=tiny.NODES)
    reference = dflashes.torch_reference(name, params.drafter)
    ids = params.drafter.draft_to_target
    ids = np.arange(tiny.VOCAB) if ids is None else np.asarray(ids)
    states = dflashes.states_of(plain()[0], drafter.capture_layers)

    @functools.cache
    @torch.inference_mode()
    def distribution(root, path):
        tokens = [plain()[0][root], *path]
        logits = reference.path_logits(states[:root], tokens, drafter.max_depth)[-1]
        scores = np.full(tiny.VOCAB, -np.inf)
        scores[ids] = logits.log_softmax(-1).numpy()
        return scores

    rounds.compare(answers[0], ROWS[0].prompt, plain()[0], drafter.draft_tree, distribution)


@pytest.mark.parametrize(
    "name", ["rnn", *(pytest.param(name, marks=pytest.mark.slow) for name in ("vanilla", "gated"))]
)
def test_recorded_distributions_equal_those_of_torch(name):
    torch = pytest.importorskip("torch")
    drafter, params, prompt = dflashes.drafter(name, 3), params_of(name), tiny.prompts((9,))[0]
    draft, _ = rounds.draft_after(drafter, params, prompt)
    with torch.inference_mode():
        states = dflashes.states_of(prompt, drafter.capture_layers)[:-1]
        reference = dflashes.torch_reference(name, params.drafter)
        path = np.asarray(draft.tokens[0, :-1]).tolist()
        expected = reference.path_logits(states, path, 3).numpy()
    rounds.assert_same_distributions(draft.logits[0, :3], expected)


@pytest.mark.slow
def test_only_the_likeliest_tokens_of_each_slot_are_drafted():
    torch = pytest.importorskip("torch")
    drafter, params = dflashes.drafter("vanilla", 3, dspark_draft_topk=5), params_of("vanilla")
    prompt = tiny.prompts((9,))[0]
    draft, _ = rounds.draft_after(drafter, params, prompt)
    with torch.inference_mode():
        states = dflashes.states_of(prompt, drafter.capture_layers)[:-1]
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


def test_heads_are_drafted_with_by_their_own_method():
    with pytest.raises(ValueError, match="this is a DSpark head; draft with it by method 'dspark'"):
        DFlash(dflashes.CONFIGS["gated"], tiny.TARGET, 2)
    with pytest.raises(ValueError, match="this is a DFlash head; draft with it by method 'dflash'"):
        DSpark(dflashes.CONFIGS["dflash"], tiny.TARGET, 2)
