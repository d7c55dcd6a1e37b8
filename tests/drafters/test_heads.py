"""Drafters with a head: drafts equal to torch's in every round, memory, prompts, programs."""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.types import Params
from jspec.drafters import Eagle
from jspec.engine import chunks, loop
from jspec.engine import functional as host
from jspec.engine.plan import Plan
from jspec.models import decoder
from tests import shipped, tiny
from tests.drafters import heads, rounds
from tests.drafters.rounds import ROWS, plain, plan_of
from tests.fakes import whole

# Method, tree, and N where the tree does not say it.
CASES = {
    "eagle-chain": ("eagle", dict(num_speculative_tokens=4)),
    "eagle-paths": ("eagle", dict(tree=((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 2, 0)))),
    "eagle3-chain": ("eagle3", dict(num_speculative_tokens=4)),
    "eagle3-long": ("eagle3", dict(num_speculative_tokens=8)),
    "eagle3-eagle2": (
        "eagle3",
        dict(num_speculative_tokens=3, tree="eagle2", tree_size=14, tree_top_k=4),
    ),
    "medusa-chain": ("medusa", dict(num_speculative_tokens=3)),
    "medusa-paths": ("medusa", dict(tree=((0,), (1,), (2,), (0, 0), (0, 1), (2, 0), (0, 1, 0)))),
    "medusa-best": ("medusa", dict(num_speculative_tokens=3, tree="best_first", tree_size=9)),
}
WEIGHTS = {"random": heads.random_params, "trained": heads.trained_params}


def params_of(method, weights):
    return Params(tiny.params().target, WEIGHTS[weights](method))


@functools.cache
def drafted(case, weights):
    """Return greedy answers with all drafts."""
    method, settings = CASES[case]
    drafter = heads.drafter(method, **settings, draft_sample_method="greedy")
    plan = plan_of(drafter)
    return drafter, host.generate_sequences(
        plan, params_of(method, weights), ROWS, profile=tiny.NODES
    )


# ------------------------------------------------------------------------------------- references


@functools.cache
def reference(method, weights):
    """Return the torch reference: log-probabilities [V] of (row of texts, root, path)."""
    torch = pytest.importorskip("torch")
    head = heads.torch_reference(method, WEIGHTS[weights](method))
    layers = heads.CONFIGS[method].capture_layers
    texts = [np.array(text) for text in plain()]
    states = [jax.device_get(heads.hidden_states(text[None], layers)[0]) for text in texts]
    features = [torch.tensor(np.stack([x[0] for x in each], 1)) for each in states]

    @functools.cache
    @torch.inference_mode()
    def log_probs(row, root, path):
        if method == "medusa":
            logits = head.draft_logits(features[row][root - 1 : root, 0])[0, len(path)]
        else:
            tokens = [*texts[row][1 : root + 1].tolist(), *path]
            logits = head.draft_logits(features[row][:root], tokens)[-1]
        distribution = torch.full((tiny.VOCAB,), -float("inf"))
        ids = head.target_ids() if method == "eagle3" else torch.arange(tiny.VOCAB)
        distribution[ids] = logits.float()
        return distribution.log_softmax(-1).numpy()

    return texts, log_probs


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("case", CASES)
def test_every_round_drafts_and_accepts_what_torch_does(case, weights):
    drafter, answers = drafted(case, weights)
    method = CASES[case][0]
    texts, log_probs = reference(method, weights)
    total = 0
    for row, answer in enumerate(answers):
        distribution = functools.partial(log_probs, row)
        total += rounds.compare(
            answer, ROWS[row].prompt, texts[row].tolist(), drafter.draft_tree, distribution
        )
    assert weights == "random" or total > 25  # a trained head is right often


# ----------------------------------------------------------------------------------------- memory


@pytest.mark.parametrize("method", heads.METHODS)
def test_the_memory_of_a_head_equals_that_of_one_pass_over_the_text(method):
    """No drafted row is left in the cache, whatever was accepted."""
    drafter = heads.drafter(method, 3, tree="sampled", tree_size=8)
    params = params_of(method, "trained")
    texts, lengths, state = rounds.after_rounds(drafter, params)
    fresh = rounds.recomputed(drafter, params, texts, lengths)
    np.testing.assert_allclose(state.memory.hidden[:3], fresh.hidden, atol=2e-4)
    if method == "medusa":
        assert state.memory.has_hidden[:3].all()
    else:
        rounds.assert_same_rows(state.memory.cache, fresh.cache, lengths - 1)


@pytest.mark.parametrize("method", heads.METHODS)
def test_a_prompt_prefilled_in_chunks_gives_the_memory_of_one_prefilled_at_once(
    method, monkeypatch
):
    drafter = heads.drafter(method, 3, tree="sampled", tree_size=8)
    plan, params = plan_of(drafter), params_of(method, "random")
    rows = [host.SequenceParams(prompt, max_tokens=8) for prompt in tiny.prompts((1, 17, 40, 33))]
    whole = host.start(plan, params, rows).state.memory
    monkeypatch.setattr(chunks, "TOTALS", (16,))
    parts = host.start(plan, params, rows).state.memory
    np.testing.assert_allclose(parts.hidden, whole.hidden, atol=1e-5)
    if method == "medusa":
        assert whole.has_hidden.tolist() == parts.has_hidden.tolist() == [False, True, True, True]
        return
    rounds.assert_same_rows(parts.cache, whole.cache, [0, 16, 39, 32], atol=1e-5)


# --------------------------------------------------------------------------------------- programs


def test_an_equal_drafter_traces_nothing_new(monkeypatch):
    traced = []
    propose = Eagle.propose
    monkeypatch.setattr(Eagle, "propose", lambda *a: traced.append(1) or propose(*a))
    for seed in (1, 2):
        drafter = heads.drafter("eagle3", 2, tree="eagle2", tree_size=6, tree_top_k=3)
        rows = [dataclasses.replace(row, seed=seed, max_tokens=30 + seed) for row in ROWS]
        host.generate_sequences(plan_of(drafter), params_of("eagle3", "random"), rows)
    assert len(traced) == 1


@pytest.mark.parametrize("tree", ["chain", "eagle2", "sampled"])
def test_the_loop_copies_neither_the_targets_cache_nor_the_heads(tree):
    settings = {} if tree == "chain" else dict(tree=tree, tree_size=6, tree_top_k=3)
    plan = Plan(tiny.TARGET, heads.drafter("eagle", 8 if tree == "chain" else 2, **settings))
    rows = [dataclasses.replace(row, temperature=0.9) for row in ROWS]
    params = params_of("eagle", "random")
    batch = host.start(plan, params, rows)
    arguments = (plan, params, batch.request, (), batch.state, np.int32(9))
    compiled = shipped.compiled(loop.decode.lower(*arguments))
    caches = (batch.state.cache, batch.state.memory.cache)
    for shape in {leaf.shape for cache in caches for leaf in jax.tree.leaves(cache.layers)}:
        dims = ",".join(map(str, shape))
        copies = re.findall(rf"f32\[{dims}\]\S* copy(?:-start)?\(", compiled.as_text())
        assert not copies, f"{len(copies)} copies of a cache of shape {shape}"
    donated = sum(leaf.nbytes for leaf in jax.tree.leaves(caches))
    assert compiled.memory_analysis().alias_size_in_bytes >= donated


def test_models_in_bfloat16_throughout_run_as_they_do_on_an_accelerator():
    narrow = dict(cache_dtype="bfloat16", activation_dtype="bfloat16")
    target = decoder.Decoder(dataclasses.replace(tiny.TARGET.config, **narrow))
    config = heads.CONFIGS["eagle3"]
    config = dataclasses.replace(config, network=dataclasses.replace(config.network, **narrow))
    for tree in ("chain", "eagle2"):
        drafter = Eagle(config, target, 2, tree=tree, tree_size=3 if tree == "chain" else 5)
        plan = whole(target, drafter)
        weights = jax.tree.map(
            lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x,
            params_of("eagle3", "random"),
        )
        rows = [dataclasses.replace(ROWS[1], max_tokens=6)]
        batch = host.advance(plan, weights, host.start(plan, weights, rows))
        held = jax.tree.leaves((batch.state.cache.layers, batch.state.memory.cache.layers))
        assert {leaf.dtype.name for leaf in held} == {"bfloat16"}
        assert [len(answer.tokens) for answer in batch.answers] == [6]


def test_nodes_past_the_longest_text_to_draft_for_are_not_drafted():
    drafter = heads.drafter("eagle", 3, tree="sampled", tree_size=8, max_length=30)
    plan = plan_of(drafter)
    answers = host.generate_sequences(plan, params_of("eagle", "trained"), ROWS, profile=tiny.NODES)
    for row, answer in zip(ROWS, answers, strict=True):
        root = len(row.prompt) - 1
        for accepted, nodes, _ in zip(*answer.trace, strict=True):
            depths = np.array(drafter.draft_tree.depth)[nodes >= 0]
            assert root + depths[1:].max(initial=0) < 30 or len(depths) == 1
            if 0 < root < min(26, len(row.prompt) + row.max_tokens - 4):
                assert depths.max() == 3
            root += accepted + 1
    texts = [text[len(row.prompt) :] for row, text in zip(ROWS, plain(), strict=True)]
    assert [answer.tokens.tolist() for answer in answers] == texts
