import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.core import trees
from jspec.core.history import extend_history, trim_draft
from jspec.core.types import Draft, History, Request, Verdict

K, CAPACITY = 3, 16


@st.composite
def rounds(draw):
    """Generate a round of one row: history, draft, accepted count, next token, stops, limit."""
    token = st.integers(0, 5)
    history = draw(st.lists(token, min_size=1, max_size=8))
    return dict(
        history=history,
        drafted=draw(st.lists(token, min_size=K, max_size=K)),
        num_emitted=draw(st.integers(0, K + 1)),
        next_token=draw(token),
        stops=draw(st.lists(token, max_size=2, unique=True)),
        limit=len(history) + draw(st.integers(1, 6)),
    )


def expected(case):
    """Return the history and whether the row finishes, computed with a Python list."""
    emitted = [*case["drafted"][: max(case["num_emitted"] - 1, 0)], case["next_token"]]
    history, finished = list(case["history"]), False
    for token in emitted[: case["num_emitted"]]:
        history.append(token)
        finished = token in case["stops"] or len(history) >= case["limit"]
        if finished:
            break
    return history, finished


def as_arrays(cases):
    pad = lambda values, size, fill: values + [fill] * (size - len(values))
    array = lambda rows: jnp.array(rows, jnp.int32)
    history = History(
        array([pad(c["history"], CAPACITY, 0) for c in cases]),
        array([len(c["history"]) for c in cases]),
    )
    drafted = array([[0, *c["drafted"]] for c in cases])
    draft = Draft(drafted, trees.chain(K), jnp.ones(drafted.shape, bool), max_depth=K)
    verdict = Verdict(
        jnp.broadcast_to(jnp.arange(K + 1), drafted.shape),
        array([c["num_emitted"] for c in cases]),
        array([c["next_token"] for c in cases]),
    )
    stops = array([pad(c["stops"], 2, -1) for c in cases])
    request = Request(None, None, stops, array([c["limit"] for c in cases]))
    return request, history, draft, verdict


@settings(max_examples=60)
@given(st.lists(rounds(), min_size=4, max_size=4))
def test_nothing_is_emitted_past_a_stop_token_or_a_limit(cases):
    history, verdict, finished = extend_history(*as_arrays(cases))
    for row, case in enumerate(cases):
        tokens, finishes = expected(case)
        length = int(history.length[row])
        assert history.tokens[row, :length].tolist() == tokens
        assert bool(finished[row]) == finishes
        assert int(verdict.num_emitted[row]) == len(tokens) - len(case["history"])


def test_nodes_past_the_limit_and_of_finished_rows_are_dropped():
    case = dict(history=[1], drafted=[2, 3, 4], num_emitted=1, next_token=0, stops=[], limit=3)
    request, history, draft, _ = as_arrays([case, {**case, "limit": 9}, case])
    tree = trees.broadcast(trees.from_parents(draft.parents, K), 3)
    done = jnp.array([False, False, True])
    valid = trim_draft(request, history, draft, tree, done).valid
    np.testing.assert_array_equal(valid[0], [True, True, False, False])  # the second token is drawn
    np.testing.assert_array_equal(valid[1], [True] * 4)
    np.testing.assert_array_equal(valid[2], [False] * 4)
