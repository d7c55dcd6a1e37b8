import dataclasses
import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special

from jspec.core import sampling, trees
from jspec.core.types import History, Params, Request
from jspec.drafters import DraftModel
from jspec.drafters.draft_model.language_model import translating
from jspec.engine import functional as host
from jspec.models import decoder
from jspec.tools.certify.conditionals import context_dependent
from jspec.tools.certify.drawing import DEPTH, Case
from jspec.tools.certify.enumeration import outcome
from jspec.verify import RULES
from tests import fakes, networks, tiny
from tests.drafters import rounds
from tests.verify import statistics

ROWS = [
    host.SequenceParams(prompt, max_tokens=24, temperature=temperature, stream=index)
    for index, (prompt, temperature) in enumerate(zip(tiny.prompts(), (0.0, 0.7, 1.0), strict=True))
]


def answers(drafter, rule="coupled", drafter_params=None):
    plan = rounds.plan_of(drafter, rule)
    weights = tiny.params().drafter if drafter_params is None else drafter_params
    return host.generate_sequences(
        plan, Params(tiny.params().target, weights), ROWS, profile=tiny.NODES
    )


def texts(outcomes):
    return [answer.tokens.tolist() for answer in outcomes]


@functools.cache
def plain():
    return texts(answers(tiny.NONE))


def test_a_single_drafted_token_changes_no_text():
    assert texts(answers(DraftModel(tiny.DRAFT_CONFIG, 1))) == plain()


@pytest.mark.parametrize("size", [48, 80])
def test_a_vocabulary_of_another_size_is_cut_or_padded(size):
    config = dataclasses.replace(tiny.DRAFT_CONFIG, vocab_size=size)
    weights = decoder.init_params(jax.random.key(1), config)
    drafter = DraftModel(config, 4, vocab_size=tiny.VOCAB)
    outcomes = answers(drafter, drafter_params=weights)
    assert texts(outcomes) == plain()
    drafted = [answer.trace[1][:, 1:].max() for answer in outcomes]
    assert max(drafted) < min(size, tiny.VOCAB)


def test_rounds_past_the_reach_of_the_draft_model_are_plain_steps():
    outcomes = answers(DraftModel(tiny.DRAFT_CONFIG, 4, max_length=20))
    assert texts(outcomes) == plain()
    for row, answer in zip(ROWS, outcomes, strict=True):
        accepted, drafted, _ = answer.trace
        roots = len(row.prompt) - 1 + np.cumsum([0, *(accepted + 1)])[:-1]
        nodes = roots[:, None] + np.arange(5)
        assert (drafted[:, 1:][nodes[:, 1:] >= 20] == -1).all()
        assert answer.drafts == (roots < 19).sum()


def test_a_model_that_drafts_for_itself_is_always_right_when_greedy():
    drafter = DraftModel(tiny.TARGET.config, 4)
    greedy = answers(drafter, drafter_params=tiny.params().target)[0]
    assert greedy.accepted[4] == greedy.drafts - 1  # the limit cuts the last draft short
    assert greedy.acceptance_length == pytest.approx(24 / 5, abs=0.3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_speculative_tokens=0), "num_speculative_tokens=0 must be at least 1"),
        (dict(draft_sample_method="argmax"), "draft_sample_method='argmax' must be"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        DraftModel(**{"config": tiny.DRAFT_CONFIG, "num_speculative_tokens": 4, **settings})


def test_a_sliding_window_must_hold_a_round():
    config = networks.changed(tiny.DRAFT_CONFIG, windows=(5,))
    with pytest.raises(ValueError, match=r"must be at most 3: the 6 rows .* window of 5"):
        DraftModel(config, 4)


def test_models_in_bfloat16_throughout_run_as_they_do_on_an_accelerator():
    narrow = dict(cache_dtype="bfloat16", activation_dtype="bfloat16")
    target = decoder.Decoder(dataclasses.replace(tiny.TARGET.config, **narrow))
    drafter = DraftModel(dataclasses.replace(tiny.DRAFT_CONFIG, **narrow), 4)
    weights = jax.tree.map(lambda x: x.astype(jnp.bfloat16), tiny.params())
    short = [dataclasses.replace(row, max_tokens=6) for row in ROWS[1:2]]
    plan = fakes.whole(target, drafter)
    batch = host.advance(plan, weights, host.start(plan, weights, short))
    assert {leaf.dtype.name for leaf in jax.tree.leaves(batch.state.cache.layers)} == {"bfloat16"}
    assert [len(answer.tokens) for answer in batch.answers] == [6]


# ------------------------------------------------------------------ a vocabulary of its own (TLI)

SHARED = np.array([0, 2, 3]), np.array([4, 1, 0])  # the target's ids and the draft model's
FOREIGN = dataclasses.replace(tiny.DRAFT_CONFIG, vocab_size=5)
UNKNOWN = 2


@functools.cache
def foreign():
    """Return weights of a draft model of five tokens that shares three of the target's four."""
    loud = jax.tree.map(lambda x: x * 6, decoder.init_params(jax.random.key(3), FOREIGN))
    return translating(loud, *SHARED, [4, UNKNOWN, 1, 0])


def scores(texts):
    """Return the draft model's logits of the shared tokens after texts [B, T] of target ids."""
    ours = np.array([4, UNKNOWN, 1, 0])[texts]
    tree = trees.from_parents(trees.chain(ours.shape[1] - 1), ours.shape[1] - 1)
    cache = decoder.init_cache(FOREIGN, len(ours), 0)
    forward = jax.jit(decoder.forward, static_argnums=1)
    out = forward(foreign().model, FOREIGN, jnp.asarray(ours), tree, cache)
    return np.asarray(out.logits[:, -1, SHARED[1]], np.float64)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_drafts_in_another_vocabulary_leave_the_targets_distribution_by_enumeration(rule):
    prefixes = [
        np.array([(0, *p) for p in itertools.product(range(4), repeat=n)]) for n in range(DEPTH)
    ]
    target = context_dependent(0, 4, DEPTH + 1)
    case = Case(
        tuple(range(-1, DEPTH)),
        "chain",
        target,
        [scores(texts) for texts in prefixes],
        tuple(SHARED[0].tolist()),
    )
    result = outcome(RULES[rule], case)
    assert result.distance < 1e-12
    assert result.accepted[1:].sum() > 0.1


PROMPT = np.array([[0, 1, 3, 1, 2], [2, 1, 1, 0, 3]])  # some tokens are not in its vocabulary
HEAT = (0.8, 1.3)


def proposed(noise):
    """Return a draft of three tokens after ``PROMPT``, and the rows' keys."""
    drafter = DraftModel(FOREIGN, 3, noise=noise, use_heterogeneous_vocab=True)
    params, keys = Params(None, foreign()), jax.random.split(jax.random.key(0), 2)
    request = Request(
        keys, fakes.settings(2, temperature=HEAT), jnp.full((2, 1), -1), jnp.full((2,), 20)
    )
    memory, prefill = drafter.init(params, request, 24), jax.jit(drafter.prefill)
    tokens = jnp.asarray(PROMPT)
    memory = prefill(params, memory, tokens, (), jnp.int32(0), jnp.full((2,), 4))
    history = History(jnp.pad(tokens, ((0, 0), (0, 9))), jnp.full((2,), 5))
    return jax.jit(drafter.propose)(params, request, (), memory, history)[0], keys


def distributions(drafted):
    """Yield the processed log-probabilities [B, M] of each drafted token over the shared tokens."""
    for depth in range(3):
        text = np.concatenate([PROMPT, drafted[:, 1 : depth + 1]], 1)
        yield scipy.special.log_softmax(scores(text) / np.array(HEAT)[:, None], -1)


def test_the_recorded_distribution_is_the_draft_models_over_the_shared_tokens():
    draft, _ = proposed("own")
    np.testing.assert_array_equal(draft.draft_to_target, SHARED[0])
    drafted = np.asarray(draft.tokens)
    assert np.isin(drafted[:, 1:], SHARED[0]).all()
    for depth, expected in enumerate(distributions(drafted)):
        distribution = scipy.special.log_softmax(np.asarray(draft.logits[:, depth], np.float64), -1)
        np.testing.assert_allclose(distribution, expected, atol=1e-4)


def test_drafts_with_the_targets_noise_use_that_of_their_target_ids():
    draft, keys = proposed("target")
    assert draft.logits is None and draft.draft_to_target is None
    drafted = np.asarray(draft.tokens)
    for depth, distribution in enumerate(distributions(drafted)):
        noise = sampling.target_noise(keys, jnp.full((2,), 5 + depth), 4)
        likeliest = (distribution + np.asarray(noise)[:, SHARED[0]]).argmax(-1)
        np.testing.assert_array_equal(drafted[:, depth + 1], SHARED[0][likeliest])


@pytest.mark.parametrize("rule", ["rejection", "block", "match", "coupled"])
def test_sampleddrafted_in_another_vocabulary_have_the_targets_distribution(rule):
    target = fakes.table(0, 4, 4)
    drafter = DraftModel(FOREIGN, 2, use_heterogeneous_vocab=True)
    plan = fakes.whole(fakes.ToyTarget(4), drafter, rule)
    sampled, _ = statistics.texts(plan, Params(target, foreign()), fakes.settings(20_000), 4)
    distribution = statistics.joint_distribution(
        scipy.special.softmax(np.asarray(target, np.float64), -1), 4
    )
    assert statistics.excess(statistics.counts(sampled, 4), distribution) < 1


def test_shuffled_ids_of_a_draft_model_change_no_draft():
    order = np.random.default_rng(0).permutation(tiny.VOCAB)  # target id of each of its ids
    ours = np.argsort(order)
    weights = tiny.params().drafter
    shuffled = weights.replace(embedding=weights.embedding[order])  # tied: the head's rows too
    other = dataclasses.replace(tiny.DRAFT, use_heterogeneous_vocab=True)
    outcomes = answers(other, "rejection", translating(shuffled, np.arange(64), ours, ours))
    for answer, expected in zip(outcomes, answers(tiny.DRAFT, "rejection"), strict=True):
        assert answer.tokens.tolist() == expected.tokens.tolist()
        np.testing.assert_array_equal(answer.trace[1], expected.trace[1])
        assert answer.accepted.tolist() == expected.accepted.tolist()


def test_tokens_unknown_to_the_drafter_change_no_text():
    config = dataclasses.replace(tiny.DRAFT_CONFIG, vocab_size=24)
    weights = decoder.init_params(jax.random.key(1), config)
    shared = np.arange(0, 64, 3)
    ways = np.full(64, 23)
    ways[shared] = np.arange(shared.size)
    drafter = DraftModel(config, 4, "greedy", use_heterogeneous_vocab=True)
    params = translating(weights, shared, np.arange(shared.size), ways)
    outcomes = answers(drafter, drafter_params=params)
    assert texts(outcomes) == plain()
    drafted = np.concatenate([answer.trace[1][:, 1:].ravel() for answer in outcomes])
    assert np.isin(drafted[drafted >= 0], shared).all()
