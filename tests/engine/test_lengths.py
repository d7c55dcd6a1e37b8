"""Drafts of several lengths: the texts, the caches, and what a paused drafter misses."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import verify
from jspec.api import config
from jspec.core.types import Params
from jspec.drafters import NGram, ParallelDraftModel, Suffix
from jspec.engine import functional as host
from jspec.engine import loop
from jspec.engine.plan import Plan
from jspec.verify import rejection
from tests import shipped, tiny
from tests.drafters import heads, hydras, speculators
from tests.fakes import PrefixTarget, TableDrafter, table

V = 8
TARGET, WEIGHTS = PrefixTarget(V), table(3, 64, V, scale=3.0)

DRAFTERS = {
    "ngram": (NGram(4, 1, 3), lambda: None),
    "suffix": (Suffix(4, suffix_decoding_max_cached_tokens=64), lambda: None),
    "draft_model": (tiny.DRAFT, lambda: tiny.params().drafter),
    "parallel": (
        ParallelDraftModel(tiny.TARGET.config, tiny.TARGET, 4, mask_token_id=3),
        lambda: tiny.params().target,
    ),
    "eagle": (heads.drafter("eagle", 4), lambda: heads.random_params("eagle")),
    "medusa": (heads.drafter("medusa", 4), lambda: heads.random_params("medusa")),
    "mlp": (
        speculators.drafter("tied scaled", num_speculative_tokens=4),
        lambda: speculators.random_params("tied scaled"),
    ),
    "hydra": (hydras.drafter("mlp", num_speculative_tokens=3), lambda: hydras.random_params("mlp")),
}
LINES = [
    host.SequenceParams(prompt, max_tokens=20, temperature=t, stream=i)
    for i, (prompt, t) in enumerate(zip(tiny.prompts((1, 9, 5, 3)), (0, 0.8, 0, 1), strict=True))
]


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("draft_model", "eagle") else pytest.param(name, marks=pytest.mark.slow)
        for name in DRAFTERS
    ],
)
def test_texts_stay_those_of_plain_decoding_while_lengths_change(name):
    inner, weights = DRAFTERS[name]
    most = inner.max_depth
    # As rows end one by one, every length is used, then none, then the longest again.
    ranges = (1, 1, most), (2, 2, 0), (3, 3, 1)
    params = Params(tiny.params().target, weights())
    rows = [dataclasses.replace(row, max_tokens=20 - 5 * i) for i, row in enumerate(LINES)]
    plain = host.generate_sequences(Plan(tiny.TARGET, tiny.NONE), tiny.params(), rows)
    plan = Plan(tiny.TARGET, inner, "coupled", lengths=(0, 1, most), batch_sizes=ranges)
    answers = host.generate_sequences(plan, params, rows)
    for answer, expected in zip(answers, plain, strict=True):
        np.testing.assert_array_equal(answer.tokens, expected.tokens)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("draft_model", "parallel") else pytest.param(name, marks=pytest.mark.slow)
        for name in DRAFTERS
    ],
)
def test_a_shortened_draft_is_that_of_a_drafter_of_its_length(name):
    inner, weights = DRAFTERS[name]
    shaped = {"tree_size", "tree_depth"} & {field.name for field in dataclasses.fields(inner)}
    short = dataclasses.replace(inner, num_speculative_tokens=1, **dict.fromkeys(shaped))
    choice = {"lengths": (0, 1, inner.max_depth), "batch_sizes": ((1, 1, 1),)}
    shortened = Plan(tiny.TARGET, inner, **choice)
    params = Params(tiny.params().target, weights())
    row = host.SequenceParams(tiny.prompts((19,))[0], max_tokens=60)
    (one, other) = (
        host.generate_sequences(plan, params, [row], profile=tiny.NODES)[0]
        for plan in (shortened, Plan(tiny.TARGET, short))
    )
    assert one.rounds == other.rounds
    np.testing.assert_array_equal(one.trace[0], other.trace[0])
    np.testing.assert_array_equal(one.trace[1][:, :2], other.trace[1])


def test_a_draft_model_pauses_and_catches_up():
    drafting_target = dataclasses.replace(
        tiny.DRAFT, config=tiny.TARGET.config
    )  # the target itself
    params = Params(tiny.params().target, tiny.params().target)
    rows = [dataclasses.replace(LINES[i], max_tokens=size) for i, size in ((0, 60), (2, 24))]
    plan = Plan(tiny.TARGET, drafting_target, lengths=(0, 4), batch_sizes=((2, 2, 0),))
    answer = host.generate_sequences(plan, params, rows, profile=tiny.NODES)[0]
    accepted, drafted = answer.trace[0], (answer.trace[1][:, 1:] >= 0).sum(1)
    assert set(drafted[:24]) == {0}  # while both rows run
    first = int(np.argmax(drafted > 0))
    assert first == 24  # all missing tokens are prefilled at once
    assert set(accepted[first:-1]) == {4}


@pytest.mark.parametrize("name", ["eagle", pytest.param("draft_model", marks=pytest.mark.slow)])
def test_a_paused_drafter_catches_up_before_it_drafts(name):
    inner, weights = DRAFTERS[name]
    params = Params(tiny.params().target, weights())
    plan = Plan(tiny.TARGET, inner, lengths=(0, 4))
    # 32 tokens are prefilled together, and the 9 after them before there is a draft.
    row = host.SequenceParams(tiny.prompts((19,))[0], max_tokens=45)
    batch = host.advance(plan.at_length(0), params, host.start(plan, params, [row]), 41)
    assert batch.answers[0].drafted == 0
    begun = host.advance(plan, params, batch, 1)
    assert begun.answers[0].drafted > 0
    late = begun.state
    always = host.advance(plan, params, host.start(plan, params, [row])).state
    length = int(late.memory.cache.length[0])
    assert length > 58
    for one, other in zip(
        jax.tree.leaves(late.memory.cache.layers),
        jax.tree.leaves(always.memory.cache.layers),
        strict=True,
    ):
        np.testing.assert_allclose(one[:, :, :length], other[:, :, :length], atol=1e-5)


@pytest.mark.parametrize(("name", "taken_in"), [("eagle", 32), ("draft_model", 0)])
def test_a_paused_drafter_prefills_only_when_its_buffer_is_full(name, taken_in):
    inner, weights = DRAFTERS[name]
    plan = Plan(tiny.TARGET, inner, lengths=(0, 4))
    params = Params(tiny.params().target, weights())
    row = host.SequenceParams(tiny.prompts((19,))[0], max_tokens=45)
    begun = host.start(plan, params, [row])
    before = int(begun.state.memory.cache.length[0])
    rested = host.advance(plan.at_length(0), params, begun, 41).state
    assert rested.memory.cache.length[0] - before == taken_in


def test_a_head_of_nan_does_not_hang_the_loop():
    inner, weights = DRAFTERS["eagle"]
    broken = jax.tree.map(
        lambda x: jnp.full_like(x, jnp.nan) if x.dtype.kind == "f" else x, weights()
    )
    plan = Plan(tiny.TARGET, inner, lengths=(0, 4), batch_sizes=((2, 2, 0),))
    rows = [
        dataclasses.replace(LINES[i], max_tokens=size, temperature=0)
        for i, size in ((0, 56), (2, 42))
    ]
    answers = host.generate_sequences(plan, Params(tiny.params().target, broken), rows)
    plain = host.generate_sequences(Plan(tiny.TARGET, tiny.NONE), tiny.params(), rows)
    for answer, expected in zip(answers, plain, strict=True):
        np.testing.assert_array_equal(answer.tokens, expected.tokens)


@pytest.mark.parametrize("length", [0, 4])
@pytest.mark.parametrize("name", ["eagle", pytest.param("draft_model", marks=pytest.mark.slow)])
def test_no_loop_copies_a_cache(name, length):
    inner, weights = DRAFTERS[name]
    plan = Plan(tiny.TARGET, inner, lengths=(0, 4))
    params = Params(tiny.params().target, weights())
    batch = host.start(plan, params, LINES)
    rounds = plan.at_length(length)
    inputs = params, batch.request, loop.init_shared(plan), batch.state, np.int32(9)
    text = shipped.compiled(loop.decode.lower(rounds, *inputs)).as_text()
    caches = batch.state.cache.layers, batch.state.memory.cache.layers
    for shape in {leaf.shape for leaf in jax.tree.leaves(caches)}:
        copies = re.findall(rf"f32\[{','.join(map(str, shape))}\]\S* copy(?:-start)?\(", text)
        assert not copies, f"{len(copies)} copies of a cache of shape {shape}"


def test_a_rule_for_drawn_chains_is_not_used_where_nothing_is_drafted():
    def walk(processed, draft, tree, uniforms, proposal):
        assert draft.logits is not None, "a chain without its distribution"
        return rejection.rejection(processed, draft, tree, uniforms, proposal)

    rule = verify.Rule("mine", walk, "round", frozenset({"chain"}))
    row, params = (
        host.SequenceParams((1, 1, 1), 48, temperature=0.8),
        Params(WEIGHTS, table(1, V, V)),
    )
    plain = host.generate_sequences(Plan(TARGET, tiny.NONE), params, [row])
    plan = Plan(TARGET, TableDrafter(4), rule, lengths=(0, 4), batch_sizes=((1, 1, 0),))
    (answer,) = host.generate_sequences(plan, params, [row])
    np.testing.assert_array_equal(answer.tokens, plain[0].tokens)
    assert answer.drafted == 0
    assert plan.at_length(4).effective_rule.name == "mine"


def sizes_of(plan):
    """Return the node counts of a row's passes at each of the plan's lengths."""
    plans = map(plan.at_length, plan.lengths)
    return [[size.nodes for size in each.passes(1)] for each in plans]


def test_given_node_buckets_are_used_at_every_length():
    plan = Plan(tiny.TARGET, tiny.DRAFT, node_buckets=(5,), lengths=(0, 2, 4))
    assert sizes_of(plan) == [[1], [3], [5]]


@pytest.mark.parametrize(
    ("inner", "sizes"),
    [(tiny.DRAFT, [[1], [3], [5]]), (NGram(4), [[1], [1, 3], [1, 5]])],  # may find nothing
)
def test_a_network_that_drafts_needs_no_program_for_no_draft(inner, sizes):
    assert sizes_of(Plan(tiny.TARGET, inner, lengths=(0, 2, 4))) == sizes


@pytest.mark.parametrize(
    ("drafter", "settings", "message"),
    [
        (
            tiny.NONE,
            {"lengths": (0,)},
            "drafter=NoDrafter must draft chains of num_speculative_tokens; use a chain, or a "
            "fixed length.",
        ),
        (
            heads.drafter("eagle", tree="sampled", num_speculative_tokens=2),
            {"lengths": (0, 2)},
            "drafter=Eagle must draft chains of num_speculative_tokens; use a chain, or a fixed "
            "length.",
        ),
        (tiny.DRAFT, {"lengths": (0, 2)}, "lengths=(0, 2) must ascend to 4, the drafter's K."),
        (tiny.DRAFT, {"lengths": (-1, 4)}, "lengths=(-1, 4) must be at least 0."),
        (
            tiny.DRAFT,
            {"lengths": (0, 4), "batch_sizes": ((1, 2, 3),)},
            "batch_sizes=((1, 2, 3),) must be of 1 or more rows and of one of the lengths (0, 4), "
            "unlike (1, 2, 3).",
        ),
    ],
)
def test_lengths_that_cannot_be_chosen_are_refused(drafter, settings, message):
    with pytest.raises(ValueError) as error:
        Plan(tiny.TARGET, drafter, **settings)
    assert str(error.value) == message


NGRAM = {"method": "ngram", "num_speculative_tokens": 5}


@pytest.mark.parametrize(
    ("keys", "lengths", "batch_sizes"),
    [
        ({"adaptive_length": True}, (0, 3, 5), ()),
        ({"adaptive_length": [0, 3]}, (0, 3, 5), ()),
        ({"enable_adaptive_verification": True}, (5,), ()),
        ({"enable_adaptive_verification": True, "adaptive_length": [0]}, (0, 5), ()),
        (
            {"num_speculative_tokens_per_batch_size": [[5, 64, 0], [1, 4, 3]]},
            (0, 3, 5),
            ((1, 4, 3), (5, 64, 0)),
        ),
    ],
)
def test_a_config_asks_for_lengths(keys, lengths, batch_sizes):
    read = config.read(NGRAM | keys)
    assert read.drafter(None, tiny.TARGET) == NGram(5)
    assert (read.lengths, read.batch_sizes) == (lengths, batch_sizes)
    assert config.read(NGRAM | {"adaptive_length": False}) == config.read(NGRAM)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"adaptive_length": [0, 7]}, "K=7 is not among 0 to num_speculative_tokens=5"),
        ({"adaptive_length": "yes"}, "adaptive_length='yes' must be true or a list of whole"),
        ({"num_speculative_tokens_per_batch_size": [(1, 2)]}, "must be a list of (least, most, K)"),
        ({"num_speculative_tokens_per_batch_size": [(1, 4, 3), (4, 8, 2)]}, "overlap."),
        (
            {"num_speculative_tokens_per_batch_size": [(1, 4, 3)], "adaptive_length": True},
            "both choose K; give one.",
        ),
        (
            {
                "num_speculative_tokens_per_batch_size": [(1, 4, 3)],
                "enable_adaptive_verification": True,
            },
            "both choose how much is verified; give one, or adaptive_length.",
        ),
        ({"enable_adaptive_verification": "yes"}, "='yes' must be true or false."),
        (
            {"num_speculative_tokens": None, "adaptive_length": True},
            "num_speculative_tokens must be",
        ),
    ],
)
def test_lengths_that_do_not_fit_are_refused(keys, message):
    with pytest.raises(ValueError) as error:
        config.read(NGRAM | keys)
    assert message in str(error.value)


def test_methods_without_a_length_of_their_own_refuse_the_keys():
    given = {"method": "hybrid", "parts": [NGRAM, NGRAM], "adaptive_length": True}
    with pytest.raises(ValueError, match="adaptive_length=True is not used by method='hybrid'"):
        config.read(given)
    suffix = {"method": "suffix", "num_speculative_tokens": 4, "tree": "best_first"}
    with pytest.raises(ValueError, match="must draft chains of num_speculative_tokens"):
        read = config.read(suffix | {"adaptive_length": True})
        Plan(tiny.TARGET, read.drafter(None, tiny.TARGET), lengths=read.lengths)
    assert Suffix().tree_size == 13  # its chains follow the length of the match already
