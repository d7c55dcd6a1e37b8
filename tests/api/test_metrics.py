"""Acceptance statistics: vLLM's definitions, from counts made by hand."""

import numpy as np
import pytest

from jspec.api import metrics
from jspec.api.metrics import Counter, Counts, Gauge, Vector
from jspec.engine.answers import Answer, cut

# K = 3. Rounds drafted 3, 0, 3, 2 and 3 tokens, of which 3, 0, 0, 1 and 1 were accepted.
ACCEPTED = [3, 0, 0, 1, 1]
IDS = [[5, 6, 7], [], [8, 9, 5], [6, 6], [7, 5, 5]]
CHAIN = [0, 1, 2]


def answer(parents=CHAIN):
    """Five rounds: 3 + 1 + 0 + 1 + 0 + 1 + 1 + 1 + 1 + 1 = 10 tokens."""
    pad = lambda row, fill: [fill, *row, *[-1] * (3 - len(row))]
    return Answer(
        tokens=np.arange(10) + 100,
        steps=(np.array(ACCEPTED), np.array([len(ids) for ids in IDS])),
        max_depth=3,
        finish_reason="length",
        nodes=(
            np.array([pad(ids, 1) for ids in IDS]),
            np.array([pad(parents[: len(ids)], 0) for ids in IDS]),
        ),
    )


COUNTS = Counts.of(answer())


def test_counts_are_those_of_the_rounds_that_had_a_draft():
    assert (COUNTS.num_drafts, COUNTS.num_draft_tokens, COUNTS.num_accepted_tokens) == (4, 11, 5)
    assert (COUNTS.num_passes, COUNTS.num_tokens) == (5, 10)


def test_acceptance_per_position_is_unconditional():
    assert COUNTS.num_accepted_tokens_per_pos == (3, 1, 1)
    assert COUNTS.acceptance_per_pos == (3 / 4, 1 / 4, 1 / 4)


def test_mean_acceptance_length_counts_the_bonus_token_and_not_the_rounds_without_a_draft():
    assert COUNTS.mean_acceptance_length == 1 + 5 / 4
    assert COUNTS.mean_acceptance_length == 1 + sum(COUNTS.acceptance_per_pos)


def test_tokens_per_pass_counts_every_round():
    assert COUNTS.tokens_per_pass == 10 / 5


def test_draft_acceptance_rate_is_accepted_over_drafted():
    assert COUNTS.draft_acceptance_rate == 5 / 11


def test_counts_add_up():
    both = COUNTS + COUNTS
    assert (both.num_drafts, both.num_tokens) == (8, 20)
    assert both.acceptance_per_pos == COUNTS.acceptance_per_pos


def test_no_draft_is_no_gain_and_no_division_by_zero():
    none = Counts.none(3)
    assert none.mean_acceptance_length == 1.0
    assert (none.draft_acceptance_rate, none.tokens_per_pass) == (0.0, 0.0)
    assert none.acceptance_per_pos == (0.0, 0.0, 0.0)


def test_request_stats_have_the_names_of_vllm_and_tokens_per_pass():
    assert metrics.request_stats(answer()) == {
        "mean_acceptance_length": 2.25,
        "draft_acceptance_rate": 5 / 11,
        "acceptance_histogram": {"0": 1, "1": 2, "3": 1},
        "num_spec_steps": 4,
        "num_accepted_draft_tokens": 5,
        "num_draft_tokens": 11,
        "num_spec_tokens": 3,
        "tokens_per_pass": 2.0,
    }


def test_details_list_every_round():
    stats = metrics.request_stats(answer(), detailed=True)
    assert stats["per_step_accepted"] == ACCEPTED
    assert stats["per_step_drafted"] == [3, 0, 3, 2, 3]
    assert stats["per_step_drafted_token_ids"] == IDS
    assert "per_step_parents" not in stats
    assert sum(stats["per_step_accepted"]) + len(stats["per_step_accepted"]) == 10


def test_details_of_trees_name_the_parents_by_index_in_the_step():
    stats = metrics.request_stats(answer(parents=[0, 0, 2]), detailed=True)
    assert stats["per_step_parents"] == [[-1, -1, 1], [], [-1, -1, 1], [-1, -1], [-1, -1, 1]]


@pytest.mark.parametrize(
    ("num_tokens", "accepted", "drafted"),
    [
        (10, ACCEPTED, 11),
        (9, [3, 0, 0, 1, 0], 11),
        (8, [3, 0, 0, 1], 8),
        (5, [3, 0], 3),
        (4, [3], 3),
        (2, [1], 3),
        (1, [0], 3),
    ],
)
def test_a_cut_answer_counts_as_if_it_had_ended_there(num_tokens, accepted, drafted):
    short = cut(answer(), num_tokens)
    stats = metrics.request_stats(short, detailed=True)
    assert stats["per_step_accepted"] == accepted
    assert stats["num_draft_tokens"] == drafted == sum(stats["per_step_drafted"])
    assert short.tokens.tolist() == list(range(100, 100 + num_tokens))
    assert short.rounds == len(accepted)
    assert short.drafts == stats["num_spec_steps"] == sum(n > 0 for n in stats["per_step_drafted"])
    assert stats["num_accepted_draft_tokens"] == sum(accepted)


def test_entries_carry_the_counter_names_of_vllm():
    labels = {"model_name": "m"}
    assert metrics.entries(COUNTS, 4.0, labels) == [
        Counter("vllm:spec_decode_num_drafts", labels, 4),
        Counter("vllm:spec_decode_num_draft_tokens", labels, 11),
        Counter("vllm:spec_decode_num_accepted_tokens", labels, 5),
        Vector("vllm:spec_decode_num_accepted_tokens_per_pos", labels, [3, 1, 1]),
        Counter("vllm:generation_tokens", labels, 10),
        Gauge("vllm:avg_generation_throughput_toks_per_s", labels, 2.5),
    ]
