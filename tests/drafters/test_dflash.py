"""DFlash: drafts equal to torch's in every round, distributions, memory and errors."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.types import Params, Request
from jspec.drafters.dflash import DFlash
from jspec.engine import batch as host
from jspec.engine import loop
from jspec.engine.plan import Plan
from tests import shipped, tiny
from tests.drafters import dflashes, heads, rounds
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


def states_of(text, layers):
    """Return the target's hidden states [T, C, D] of a text, in torch."""
    import torch

    features, _ = heads.hidden_states(np.array([text]), layers)
    return torch.stack([torch.tensor(np.asarray(feature[0])) for feature in features], 1)


@pytest.mark.usefixtures("quick_programs")
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
    answers = host.generate_sequences(plan_of(drafter, record_rounds=64), params, ROWS)
    reference = dflashes.torch_reference(name, params.drafter)
    ids = params.drafter.draft_to_target
    ids = np.arange(tiny.VOCAB) if ids is None else np.asarray(ids)
    total = 0
    for row, text, answer in zip(ROWS, plain(), answers, strict=True):
        states = states_of(text, drafter.capture_layers)

        @functools.cache
        @torch.inference_mode()
        def block(root):
            logits = reference.draft_logits(states[:root], text[root], drafter.max_depth)  # noqa: B023
            distributions = np.full((drafter.max_depth, tiny.VOCAB), -np.inf)
            distributions[:, ids] = logits.log_softmax(-1).numpy()
            return distributions

        distribution = lambda root, path: block(root)[len(path)]
        total += rounds.compare(answer, row.prompt, text, drafter.draft_tree, distribution)
    assert total >= least


@pytest.mark.usefixtures("quick_programs")
@pytest.mark.parametrize(
    "name",
    ["sliding", *(pytest.param(name, marks=pytest.mark.slow) for name in ("dflash", "reduced"))],
)
def test_recorded_distributions_equal_those_of_torch(name):
    torch = pytest.importorskip("torch")
    drafter = dflashes.drafter(name, 3)
    params = params_of(name)
    prompt = tiny.prompts((9,))[0]
    row = host.SequenceParams(prompt, max_tokens=20, temperature=1.0)
    batch = host.start(plan_of(drafter, "rejection"), params, [row])
    state = batch.state
    draft, _ = jax.jit(drafter.propose)(params, batch.request, (), state.memory, state.history)
    with torch.inference_mode():
        states = states_of(prompt, drafter.capture_layers)[:-1]
        reference = dflashes.torch_reference(name, params.drafter)
        expected = reference.draft_logits(states, prompt[-1], 3).numpy()
    assert np.ptp(expected, -1).min() > 0.5
    gap = np.asarray(draft.logits[0, :3]) - expected
    np.testing.assert_allclose(gap - gap.mean(-1, keepdims=True), 0, atol=1e-4)


@pytest.mark.usefixtures("quick_programs")
def test_the_cache_equals_that_of_one_pass_over_the_text():
    drafter = dflashes.drafter("dflash", **WIDE)
    rows = [
        host.SequenceParams(prompt, max_tokens=64, temperature=0.4 * index, stream=index)
        for index, prompt in enumerate(tiny.prompts((1, 9, 23)))
    ]
    plan, params = plan_of(drafter), params_of("dflash")
    state = host.advance(plan, params, host.start(plan, params, rows), 9).state
    texts, lengths = np.asarray(state.history.tokens)[:3], np.asarray(state.history.length)[:3]
    assert len(set(lengths - [1, 9, 23])) > 1  # rows that accepted different numbers of tokens
    features, _ = heads.hidden_states(texts, drafter.capture_layers)
    zeros = jnp.zeros((3,), jnp.int32)
    request = Request(jax.random.split(jax.random.key(0), 3), None, zeros[:, None], zeros)
    fresh = jax.jit(drafter.prefill)(
        params,
        drafter.init(params, request, texts.shape[1]),
        texts,
        tuple(x[:, :-1] for x in features),
        np.int32(0),
        lengths - 1,
    )
    assert state.memory.length[:3].tolist() == fresh.length.tolist() == (lengths - 1).tolist()
    leaves = (jax.tree.leaves(memory.layers) for memory in (state.memory, fresh))
    for cached, recomputed in zip(*leaves, strict=True):
        for row, length in enumerate(lengths - 1):
            np.testing.assert_allclose(
                cached[row, :, :length], recomputed[row, :, :length], atol=2e-4
            )


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
    network = dataclasses.replace(config.network, windows=(3, None))
    narrow = dataclasses.replace(config, network=network)
    assert DFlash(narrow, tiny.TARGET, 2).max_depth == 2
    with pytest.raises(ValueError, match="must fit into the sliding window of 3"):
        DFlash(narrow, tiny.TARGET, 3)
