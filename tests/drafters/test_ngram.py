import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.core.types import History
from jspec.drafters import NGram

CAPACITY = 24


def looked_up(history, shortest, longest, count):
    """Return the draft by the rule: the longest suffix, its earliest occurrence."""
    for size in range(min(longest, len(history) - 1), shortest - 1, -1):
        suffix = history[-size:]
        for end in range(size, len(history)):
            if history[end - size : end] == suffix:
                return history[end : end + count]
    return []


def proposed(drafter, histories):
    rows = jnp.array([row + [0] * (CAPACITY - len(row)) for row in histories], jnp.int32)
    history = History(rows, jnp.array([len(row) for row in histories], jnp.int32))
    draft, _ = drafter.propose(None, None, (), (), history)
    return [
        np.asarray(draft.tokens[row, 1:])[np.asarray(draft.valid[row, 1:])].tolist()
        for row in range(len(histories))
    ]


histories = st.lists(st.integers(0, 2), min_size=1, max_size=CAPACITY)


@settings(max_examples=60)
@given(st.lists(histories, min_size=3, max_size=3), st.integers(1, 3), st.integers(0, 2))
def test_the_longest_suffix_and_its_earliest_occurrence_are_proposed(rows, shortest, extra):
    drafter = NGram(4, prompt_lookup_min=shortest, prompt_lookup_max=shortest + extra)
    expected = [looked_up(row, shortest, shortest + extra, 4) for row in rows]
    assert proposed(drafter, rows) == expected


def test_tokens_past_the_length_are_never_matched():
    drafter = NGram(2, prompt_lookup_min=1, prompt_lookup_max=2)
    rows = jnp.array([[7, 8, 9, 9, 9, 7, 8]], jnp.int32)
    draft, _ = drafter.propose(None, None, (), (), History(rows, jnp.array([3], jnp.int32)))
    assert not draft.valid[0, 1:].any()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(num_speculative_tokens=0), "num_speculative_tokens=0 must be at least 1"),
        (dict(num_speculative_tokens=2, prompt_lookup_min=0), "prompt_lookup_min=0"),
        (
            dict(num_speculative_tokens=2, prompt_lookup_min=3, prompt_lookup_max=2),
            "prompt_lookup_min=3 must be <= prompt_lookup_max=2",
        ),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        NGram(**settings)
