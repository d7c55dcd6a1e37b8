"""Parallel draft models: drafts equal to ``transformers``', memory, distributions, files."""

import dataclasses
import functools
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jspec import LLM, SamplingParams
from jspec.api import config
from jspec.checkpoints import checkpoint
from jspec.core import trees
from jspec.core.types import Params
from jspec.drafters import NoDrafter, ParallelDraftModel
from jspec.drafters.draft_model.language_model import translating
from jspec.engine import functional as host
from jspec.engine.plan import Plan
from jspec.models import decoder
from tests import fakes, llm_fixtures, networks, tiny
from tests.drafters import rounds
from tests.verify import statistics

VOCAB, MASK, POSITIONS, DEPTH = 5, 6, 61, 3
TARGET = fakes.PrefixTarget(VOCAB)
SIZES = networks.build(
    vocab_size=VOCAB + 2,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=128,
)
NETWORKS = {
    "Llama": dataclasses.replace(SIZES, tie_embeddings=True),
    "Qwen2": networks.changed(SIZES, qkv_bias=True),
}
TREES = {
    "chain": dict(num_speculative_tokens=DEPTH),
    "best first": dict(num_speculative_tokens=DEPTH, tree="best_first", tree_size=40),
    "sampled": dict(num_speculative_tokens=DEPTH, tree="sampled", tree_size=9, tree_top_k=2),
}
PROMPTS = ((3,), (1, 4, 0, 2, 2, 3, 1, 0, 4), (2, 2, 1) * 6)


def drafter_of(network, tree, **settings):
    return ParallelDraftModel(
        NETWORKS[network], TARGET, **TREES[tree], mask_token_id=MASK, **settings
    )


@functools.cache
def weights_of(network):
    params = decoder.init_params(jax.random.key(3), NETWORKS[network])
    rng = np.random.default_rng(1)
    return jax.tree.map(
        lambda x: 12 * x if x.ndim > 1 else x + rng.normal(0, 0.3, x.shape).astype(x.dtype), params
    )


@functools.cache
def params_of(network):
    return Params(fakes.table(0, POSITIONS, VOCAB), weights_of(network))


def rows_of(temperature=0.0):
    return [
        host.SequenceParams(prompt, max_tokens=24, temperature=temperature, stream=index)
        for index, prompt in enumerate(PROMPTS)
    ]


@functools.cache
def plain():
    """Return prompts and texts of greedy rows by plain decoding."""
    answers = host.generate_sequences(Plan(TARGET, NoDrafter()), params_of("Llama"), rows_of())
    texts = zip(PROMPTS, answers, strict=True)
    return [[*prompt, *answer.tokens.tolist()] for prompt, answer in texts]


@functools.cache
def greedy(network, tree):
    """Return greedy answers with all drafts."""
    drafter = drafter_of(network, tree, draft_sample_method="greedy")
    plan = fakes.whole(TARGET, drafter, "coupled")
    return drafter, host.generate_sequences(plan, params_of(network), rows_of(), profile=tiny.NODES)


@functools.cache
def guesses(network, directory):
    """Return the guesses of ``transformers`` after a text, logits [K, VOCAB], from the files."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    checkpoint.save_pretrained(directory, NETWORKS[network], weights_of(network))
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    assert type(model).__name__ == f"{network}ForCausalLM"

    @functools.cache
    @torch.inference_mode()
    def after(text):
        fed = torch.tensor([[*text, *[MASK] * (DEPTH - 1)]])
        return model(fed).logits[0, len(text) - 1 :, :VOCAB].double().numpy()

    return after


@pytest.mark.parametrize(("network", "tree"), [("Llama", "chain"), ("Qwen2", "best first")])
def test_every_round_drafts_and_accepts_what_transformers_does(network, tree, tmp_path):
    drafter, answers = greedy(network, tree)
    after = guesses(network, tmp_path)
    counts = set()
    for text, prompt, answer in zip(plain(), PROMPTS, answers, strict=True):

        def distribution(root, path, text=tuple(text)):
            return scipy.special.log_softmax(after(text[: root + 1])[len(path)])

        rounds.compare(answer, prompt, text, drafter.draft_tree, distribution, first=0)
        counts |= set(answer.trace[0].tolist())
    assert counts >= ({0, 1} if tree == "chain" else {1, 2, 3})


@functools.cache
def after_rounds():
    """Return the drafter, and its batch after some rounds of sampled rows."""
    drafter = drafter_of("Qwen2", "sampled")
    plan, params = fakes.whole(TARGET, drafter), params_of("Qwen2")
    return drafter, host.advance(plan, params, host.start(plan, params, rows_of(0.8)), 5)


def test_the_distribution_of_each_draft_is_that_of_transformers(tmp_path):
    after = guesses("Qwen2", tmp_path)
    drafter, batch = after_rounds()
    state, propose = batch.state, jax.jit(drafter.propose)
    draft, _ = propose(params_of("Qwen2"), batch.request, (), state.memory, state.history)
    depth = np.array(drafter.draft_tree.depth)
    inner = np.flatnonzero(np.array(drafter.draft_tree.widths))
    for row in range(len(PROMPTS)):
        length = state.history.length[row]
        text = tuple(np.asarray(state.history.tokens)[row, :length].tolist())
        results = scipy.special.log_softmax(np.asarray(draft.logits[row, inner], float), -1)
        expected = scipy.special.log_softmax(after(text)[depth[inner]] / 0.8, -1)
        np.testing.assert_allclose(results, expected, atol=1e-4)


def check_memory(state, network):
    """Check that the cache equals that of a pass over the text alone, without any mask."""
    texts, last = state.history.tokens, state.history.tokens.shape[1] - 1
    tree = trees.from_parents(trees.chain(last), last)
    sizes, weights = NETWORKS[network], weights_of(network)
    empty = decoder.init_cache(sizes, len(texts), 0)
    fresh = jax.jit(decoder.forward, static_argnums=1)(weights, sizes, texts, tree, empty).tree_kv
    cached = jax.tree.leaves(state.memory.cache.layers)
    for ours, expected in zip(cached, jax.tree.leaves(fresh), strict=True):
        for row, length in enumerate(np.asarray(state.memory.cache.length)):
            np.testing.assert_allclose(ours[row, :, :length], expected[row, :, :length], atol=2e-4)


def test_masks_and_rejected_drafts_leave_no_trace_in_the_cache():
    drafter, batch = after_rounds()
    state = batch.state
    unseen = np.asarray(state.history.length - state.memory.cache.length)[: len(PROMPTS)]
    assert (unseen >= 1).all() and (unseen <= DEPTH + 1).all()
    check_memory(state, "Qwen2")
    assert not drafter.capture_layers


@pytest.mark.slow
def test_a_longer_backlog_is_read_at_once_and_changes_no_draft():
    drafter, answers = greedy("Llama", "chain")
    plan = Plan(TARGET, dataclasses.replace(drafter, backlog=12), "coupled")
    params = params_of("Llama")
    batch = host.start(plan, params, rows_of(), profile=tiny.NODES)
    memory = batch.state.memory
    behind = memory.cache.replace(length=jnp.maximum(memory.cache.length - 9, 0))
    state = batch.state.replace(memory=memory.replace(cache=behind))
    batch = host.advance(plan, params, batch.replace(state=state))
    for answer, expected in zip(batch.answers, answers, strict=True):
        np.testing.assert_array_equal(answer.trace[1], expected.trace[1])
    check_memory(batch.state, "Llama")


def test_a_row_that_paused_catches_up_round_by_round_and_drafts_again():
    drafter, answers = greedy("Llama", "chain")
    plan = fakes.whole(TARGET, drafter, "coupled")
    params = params_of("Llama")
    batch = host.start(plan, params, rows_of(), profile=tiny.NODES)
    capacity = batch.state.memory.cache.layers[0].k.shape[2]
    nothing = drafter.init(params, batch.request, capacity)
    state = batch.state.replace(memory=nothing)
    batch = host.advance(plan, params, batch.replace(state=state))
    results = batch.answers
    waits = []
    for prompt, answer, usual in zip(PROMPTS, results, answers, strict=True):
        assert answer.tokens.tolist() == usual.tokens.tolist()
        drafts = [by_root(prompt, one) for one in (answer, usual)]
        shared = [root for root, nodes in drafts[0].items() if (nodes[1:] >= 0).any()]
        assert len(shared) > 5
        for root in shared:
            np.testing.assert_array_equal(drafts[0][root], drafts[1].get(root, drafts[0][root]))
        waits.append(min(shared) - len(prompt) + 1)
    # A round reads K + 1 tokens, and the target adds one.
    assert waits[0] == 0 and waits[2] == -(-(len(PROMPTS[2]) - DEPTH - 1) // DEPTH)
    check_memory(batch.state, "Llama")


def by_root(prompt, answer):
    """Return the tokens drafted at each root position."""
    accepted, nodes, _ = answer.trace
    roots = len(prompt) - 1 + np.cumsum([0, *(accepted + 1)])[:-1]
    return dict(zip(roots.tolist(), nodes, strict=True))


# ---------------------------------------------------------------------------------- distributions

DISTRIBUTIONS = [
    ("chain", "block", {}),
    ("sampled", "rejection", {}),
    ("chain", "rejection", {}),
    ("best first", "rejection", {}),
    ("sampled", "block", {}),
    ("chain", "coupled", {}),
    ("sampled", "rejection", {"draft_sample_method": "top_plus_one"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("tree", "rule", "settings"), DISTRIBUTIONS)
def test_texts_have_the_targets_distribution(tree, rule, settings):
    target = fakes.ToyTarget(4)
    drafter = dataclasses.replace(drafter_of("Llama", tree, **settings), target=target)
    table = fakes.table(2, 4, 4)
    plan, params = Plan(target, drafter, rule), Params(table, weights_of("Llama"))
    results, _ = statistics.texts(plan, params, fakes.settings(20_000), 4)
    distribution = statistics.joint_distribution(
        scipy.special.softmax(np.asarray(table, np.float64), -1), 4
    )
    assert statistics.excess(statistics.counts(results, 4), distribution) < 1


def test_another_order_of_the_vocabulary_changes_no_draft():
    order = np.array([3, 0, 4, 2, 1, 5, 6])  # target id of each of its ids
    ours = np.argsort(order)
    weights = weights_of("Llama")
    shuffled = weights.replace(embedding=weights.embedding[order])  # tied: the head's rows too
    drafter, answers = greedy("Llama", "chain")
    other = dataclasses.replace(drafter, use_heterogeneous_vocab=True)
    params = translating(shuffled, np.arange(VOCAB), ours[:VOCAB], ours[:VOCAB])
    plan = fakes.whole(TARGET, other, "coupled")
    results = host.generate_sequences(
        plan, Params(params_of("Llama").target, params), rows_of(), profile=tiny.NODES
    )
    for answer, expected in zip(results, answers, strict=True):
        np.testing.assert_array_equal(answer.trace[1], expected.trace[1])


# ------------------------------------------------------------------------------------------ files

ASKED = {
    "method": "draft_model",
    "model": "somewhere",
    "num_speculative_tokens": 3,
    "parallel_drafting": True,
}


def test_the_key_chooses_trees_that_need_one_pass():
    given = ASKED | {"tree": "best_first", "tree_size": 7}
    read = config.read(given)
    assert read.needs_model and not read.needs_head
    settings = {**read.settings, "mask_token_id": MASK}
    drafter = dataclasses.replace(read, settings=settings).drafter(
        SIZES, decoder.Decoder(dataclasses.replace(SIZES, vocab_size=VOCAB))
    )
    assert isinstance(drafter, ParallelDraftModel)
    assert (drafter.tree_size, drafter.max_depth, drafter.proposal) == (7, 3, "deterministic")
    assert drafter.max_length == SIZES.max_positions


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (ASKED | {"tree": "eagle2"}, "and this one does not: use 'best_first'"),
        (ASKED | {"parallel_drafting": "yes"}, "parallel_drafting='yes' must be true or false"),
        (
            ASKED | {"parallel_drafting": False, "tree": "best_first"},
            "tree='best_first' is not used",
        ),
        (
            {"method": "ngram", "num_speculative_tokens": 2, "parallel_drafting": True},
            "parallel_drafting=True is not used by method='ngram'",
        ),
        (ASKED, "must have `pard_token` or `ptd_token_id` specified in its config.json"),
    ],
)
def test_settings_that_contradict_the_key_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        config.read(given).drafter(SIZES, decoder.Decoder(SIZES))


@pytest.mark.parametrize("mask", [-1, 7])
def test_the_mask_must_be_a_token_of_the_draft_model(mask):
    message = f"mask_token_id={mask} must be from 0 to 6, the draft model's tokens"
    with pytest.raises(ValueError, match=message):
        ParallelDraftModel(SIZES, TARGET, 2, mask_token_id=mask)


def test_a_model_that_names_its_mask_drafts_from_its_files(tmp_path_factory, tmp_path):
    root = tmp_path_factory.getbasetemp() / "models"
    paths, both = llm_fixtures.checkpoints(root), llm_fixtures.loaded(root)
    shutil.copytree(paths["draft"], tmp_path / "draft")
    asked = {
        "model": str(tmp_path / "draft"),
        "num_speculative_tokens": 3,
        "parallel_drafting": True,
    }
    with pytest.raises(ValueError, match="must have `pard_token` or `ptd_token_id`"):
        LLM(both["target"], asked)
    file = tmp_path / "draft" / "config.json"
    raw = json.loads(file.read_text())
    for keys, message in (
        ({"pard_token": 305, "ptd_token_id": 306}, "several mask tokens"),
        ({"pard_token": "305"}, "pard_token must be a token id"),
    ):
        file.write_text(json.dumps(raw | keys))
        with pytest.raises(ValueError, match=message):
            LLM(both["target"], asked)
    file.write_text(json.dumps(raw | {"pard_token": 305, "spd_type": "pard"}))
    llm = LLM(both["target"], asked)
    settings = SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True)
    prompt = {"prompt_token_ids": [5, 7, 9, 30]}
    texts = [
        model.generate([prompt], settings)[0].outputs[0].token_ids
        for model in (llm, llm_fixtures.llm(root, "none"))
    ]
    assert texts[0] == texts[1]
    assert llm.get_metrics()
