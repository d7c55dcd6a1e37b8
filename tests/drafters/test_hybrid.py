"""Hybrids: accepted tokens of each round, the distribution of texts, and the choice of drafts."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core.types import Params
from jspec.drafters import Hybrid, NGram, Suffix, TokenRecycling
from jspec.engine import functional as host
from jspec.engine.loop import init_shared
from jspec.engine.plan import Plan
from tests import networks, tiny
from tests.drafters import heads
from tests.drafters.rounds import plan_of
from tests.fakes import (
    NeverRightDrafter,
    OracleDrafter,
    PrefixTarget,
    RandomDrafter,
    TableDrafter,
    run_rows,
    script,
    table,
    whole,
)
from tests.verify import test_joint_distribution as joint_distribution

V, K = 8, 3
TARGET, WEIGHTS = PrefixTarget(V), table(3, 64, V, scale=3.0)
ROWS = [host.SequenceParams((1 + i,) * 3, max_tokens=24, stream=i) for i in range(2)]
PLAIN = run_rows(Plan(TARGET, tiny.NONE), Params(WEIGHTS), ROWS)
SCRIPT = script(ROWS, PLAIN)
LOOKUP = NGram(4, prompt_lookup_min=1, prompt_lookup_max=3)
NARROW = networks.changed(tiny.DRAFT_CONFIG, windows=(19,))


def run(parts, combine):
    drafter = Hybrid(parts, combine)
    plan = whole(TARGET, drafter)
    return run_rows(plan, Params(WEIGHTS, (SCRIPT, SCRIPT)), ROWS)


@pytest.mark.parametrize("combine", ["merge", "choose"])
def test_the_text_is_that_of_plain_decoding_and_the_better_part_decides_the_rounds(combine):
    right, wrong = OracleDrafter(K, V), NeverRightDrafter(2, V)
    for parts, rounds in (
        ((right, wrong), 6),
        ((wrong, right), 6),
        ((OracleDrafter(5, V), right), 4),
        ((RandomDrafter(K, V), RandomDrafter(5, V)), None),
    ):
        answers = run(parts, combine)
        for answer, plain in zip(answers, PLAIN, strict=True):
            np.testing.assert_array_equal(answer.tokens, plain.tokens)
            if rounds and (combine == "merge" or parts[0] is not wrong):
                assert answer.rounds == rounds


def test_merged_rounds_accept_as_much_as_the_better_part_alone():
    # Both draft by a hash of the position: the same drafts alone and merged.
    first, second = RandomDrafter(K, V), OracleDrafter(1, V)
    for answer, plain in zip(run((first, second), "merge"), PLAIN, strict=True):
        text, root = [*ROWS[0].prompt, *plain.tokens], 2
        for accepted, nodes, parents in zip(*answer.trace, strict=True):
            paths, right = {0: ()}, 0
            for node in np.flatnonzero(nodes[1:] >= 0) + 1:
                path = paths[node] = (*paths[parents[node]], int(nodes[node]))
                if list(path) == text[root + 1 : root + 1 + len(path)]:
                    right = max(right, len(path))
            assert accepted == right >= min(1, len(text) - root - 2)
            root += accepted + 1


def test_rows_switch_to_the_network_once_lookups_fail():
    answers = run((NeverRightDrafter(K, V), OracleDrafter(K, V)), "choose")
    for answer in answers:
        accepted = answer.trace[0]
        first = int(np.argmax(accepted > 0))
        assert 1 <= first <= 4
        assert (accepted[first:-1] == K).mean() > 0.7  # and now and then the lookup is retried


def test_a_draft_model_that_paused_catches_up_and_drafts_as_well_as_before():
    drafting_target = dataclasses.replace(tiny.DRAFT, config=tiny.TARGET.config)  # always right
    rows = [host.SequenceParams((3, 4, 5) * 4, max_tokens=48, stream=0)]
    params = Params(tiny.params().target, (SCRIPT, tiny.params().target))
    wrong = NeverRightDrafter(7, tiny.VOCAB)
    text = run_rows(Plan(tiny.TARGET, tiny.NONE), params, rows)
    known = script(rows, text, length=128)
    params = params._replace(drafter=(known, tiny.params().target))
    for combine, lookup in (("merge", OracleDrafter(7, tiny.VOCAB)), ("choose", wrong)):
        plan = plan_of(Hybrid((lookup, drafting_target), combine), "rejection")
        (answer,) = run_rows(plan, params, rows)
        np.testing.assert_array_equal(answer.tokens, text[0].tokens)
        accepted = answer.trace[0][:-1]
        assert set(accepted) == ({7} if combine == "merge" else {0, 4})
        if combine == "choose":
            assert (accepted == 4).sum() >= 6 and (accepted == 0).sum() <= 6


@pytest.mark.parametrize("rule", ["rejection", "block"])
@pytest.mark.parametrize("combine", ["merge", "choose"])
def test_sampled_texts_of_several_rounds_have_the_targets_distribution(rule, combine):
    drafter = Hybrid((NGram(2, 1, 2), TableDrafter(2)), combine)
    target, weights = (
        table(0, joint_distribution.V, joint_distribution.V),
        table(1, joint_distribution.V, joint_distribution.V),
    )
    joint_distribution.check_texts(rule, drafter, Params(target, (None, weights)), chunks=1)


def test_shared_state_is_kept_for_both_parts():
    suffix, recycling = Suffix(suffix_decoding_max_cached_tokens=64), TokenRecycling(tiny.VOCAB, 3)
    for first in (suffix, recycling):
        plan = plan_of(Hybrid((first, heads.drafter("eagle", 3))), "rejection")
        params = Params(tiny.params().target, (None, heads.random_params("eagle")))
        rows = [host.SequenceParams((5, 9, 11), max_tokens=20, stream=0)]
        shared = init_shared(plan)
        lengths = []
        for _ in range(2):
            answers, shared = host.generate_sharing(plan, params, rows, shared)
            lengths.append(answers[0].acceptance_length)
        assert lengths[1] > lengths[0] + 1 and shared[1] == ()


@pytest.mark.parametrize(
    ("parts", "settings", "message"),
    [
        ((LOOKUP,), {}, "parts must hold two drafters, not 1; give a lookup and a network."),
        (
            (tiny.DRAFT, LOOKUP),
            {},
            "parts[0] must be a lookup, which DraftModel is not; put 'ngram', 'suffix' or "
            "'token_recycling' first.",
        ),
        ((LOOKUP, tiny.DRAFT), {"combine": "both"}, "combine='both' must be 'merge' or 'choose'."),
        (
            (
                LOOKUP,
                heads.drafter(
                    "eagle",
                    tree="sampled",
                    num_speculative_tokens=2,
                    draft_sample_method="top_plus_one",
                ),
            ),
            {},
            "combine='merge' is not exact for the 'top_plus_one' drafts of Eagle; use "
            "draft_sample_method='probabilistic' or 'greedy', or combine='choose'.",
        ),
        (
            (LOOKUP, dataclasses.replace(tiny.DRAFT, config=NARROW)),
            {"combine": "choose"},
            "num_speculative_tokens=4 must be at most 3: the 20 rows of a round must fit into the "
            "sliding window of 19.",
        ),
    ],
)
def test_parts_that_cannot_be_combined_are_refused(parts, settings, message):
    with pytest.raises(ValueError) as error:
        Hybrid(parts, **settings)
    assert str(error.value) == message


def test_there_is_a_node_bucket_for_either_draft():
    drafter = Hybrid((LOOKUP, tiny.DRAFT))
    assert Plan(tiny.TARGET, drafter).node_buckets == (1, 5, 9)
    assert Plan(tiny.TARGET, Hybrid((NGram(2), tiny.DRAFT), "choose")).node_buckets == (1, 3, 5)
    assert (jnp.array(drafter.tree_size), drafter.max_depth) == (9, 4)
