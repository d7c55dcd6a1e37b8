import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.api import config
from jspec.core.types import Params, Round, TargetOutput, Verdict
from jspec.drafters import TokenRecycling
from jspec.engine import functional as host
from jspec.engine.loop import init_shared
from jspec.engine.plan import Plan
from tests import fakes, tiny

VOCAB = 12
PATHS = ((0,), (1,), (2,), (0, 0), (0, 2), (2, 1), (0, 0, 0), (2, 1, 1))
TARGET = fakes.ToyTarget(VOCAB)
DISTRIBUTIONS = fakes.table(3, VOCAB, VOCAB)


def told(root, known, ranked):
    """Return the tree in plain Python: the tokens of nodes by path, if known."""
    tokens = {(): root}
    for path in sorted(PATHS, key=lambda path: (len(path), path)):
        above = tokens.get(path[:-1])
        if above in known:
            tokens[path] = ranked[above][path[-1]]
    return tokens


def simulated(first, count):
    """Yield the rounds of greedy decoding: the draft by path, and the text."""
    ranked = np.argsort(-np.asarray(DISTRIBUTIONS), axis=1, kind="stable").tolist()
    known, text, drafts = set(), [first], []
    while len(text) <= count:
        room = count + 1 - len(text)
        tree = {
            path: token for path, token in told(text[-1], known, ranked).items() if len(path) < room
        }
        drafts.append([tree[path] for path in sorted(tree, key=lambda path: (len(path), path))])
        known |= set(tree.values())
        path = ()
        while True:
            text.append(ranked[text[-1]][0])
            path = next((p for p in tree if p[:-1] == path and p and tree[p] == text[-1]), None)
            if path is None:
                break
    return drafts, text[1:]


@pytest.mark.parametrize("first", [0, 5, 7])
def test_drafts_are_the_targets_latest_guesses(first):
    drafter = TokenRecycling(VOCAB, tree=PATHS)
    plan = fakes.whole(TARGET, drafter)
    [answer], _ = host.generate_sharing(
        plan,
        Params(DISTRIBUTIONS),
        [host.SequenceParams((first,), max_tokens=30)],
        init_shared(plan),
        profile=tiny.NODES,
    )
    drafts, text = simulated(first, 30)
    assert answer.tokens.tolist() == text
    shown = [[token for token in row if token >= 0] for row in answer.trace[1].tolist()]
    assert shown == drafts and max(map(len, drafts)) == len(PATHS) + 1


def test_the_last_of_several_nodes_with_one_token_updates_the_matrix():
    drafter = TokenRecycling(VOCAB, tree=((0,), (1,), (0, 0)))
    logits = np.random.default_rng(0).normal(size=(3, 4, VOCAB)).astype(np.float32)
    tokens = jnp.array([[1, 2, 3, 2], [4, 2, 5, 1], [6, 7, 6, 6]], jnp.int32)
    valid = jnp.array([[1, 1, 1, 1], [1, 1, 0, 1], [1, 1, 1, 1]], bool)
    verdict = Verdict(None, jnp.array([2, 1, 0], jnp.int32), None)  # the third row was done
    draft = fakes.Draft(tokens, np.array([-1, 0, 0, 1], np.int32), valid, max_depth=2)
    out = TargetOutput(jnp.array(logits), (), ())
    matrix = drafter.init_shared().at[9].set(7)
    params = Params(None)
    _, matrix = drafter.update(Round(params, None, matrix, (), None, draft, verdict, out))
    expected = np.full((VOCAB, 2), -1)
    expected[9] = 7
    for token, (row, node) in {1: (1, 3), 2: (1, 1), 3: (0, 2), 4: (1, 0)}.items():
        expected[token] = np.argsort(-logits[row, node])[:2]
    np.testing.assert_array_equal(matrix, expected)


def test_later_calls_accept_more_and_no_text_changes():
    plan = fakes.whole(tiny.TARGET, TokenRecycling(tiny.VOCAB, 4, tree_size=12))
    rows = [
        host.SequenceParams(prompt, max_tokens=20, temperature=0.7 * (index % 2), stream=index)
        for index, prompt in enumerate(tiny.prompts())
    ]
    plain = host.generate_sequences(Plan(tiny.TARGET, tiny.NONE), tiny.params(), rows)
    shared, rounds = init_shared(plan), []
    for _ in range(2):
        answers, shared = host.generate_sharing(plan, tiny.params(), rows, shared)
        for answer, expected in zip(answers, plain, strict=True):
            assert answer.tokens.tolist() == expected.tokens.tolist()
        rounds.append(sum(answer.rounds for answer in answers))
    assert rounds[1] < rounds[0] < sum(answer.rounds for answer in plain)


def test_without_a_matrix_nothing_is_drafted():
    drafter = TokenRecycling(VOCAB)
    batch = host.start(Plan(TARGET, drafter), Params(DISTRIBUTIONS), [host.SequenceParams((1,))])
    propose = jax.jit(lambda history: drafter.propose(None, None, (), (), history))
    draft, _ = propose(batch.state.history)
    assert draft.valid[:, 0].all() and not draft.valid[:, 1:].any()


def test_the_config_asks_for_a_tree_by_size_by_name_or_by_paths():
    read = lambda **more: config.read({"method": "token_recycling"} | more).drafter(
        None, tiny.TARGET
    )
    sizes = lambda drafter: (drafter.max_depth, drafter.tree_size, drafter.width)
    assert sizes(read()) == (6, 81, 8)
    assert sizes(read(num_speculative_tokens=2, tree_top_k=2)) == (2, 7, 2)
    assert sizes(read(tree="medusa_mc_sim_7b_63")) == (4, 64, 10)
    assert sizes(read(tree=[[0], [1], [0, 0]])) == (2, 4, 2)
    assert sizes(read(tree="chain", num_speculative_tokens=3)) == (3, 4, 1)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(tree="eagle2"), "tree='eagle2' follows a head's probabilities"),
        (dict(tree="bush"), "no tree is published as 'bush'"),
        (dict(tree_size=1), "tree_size=1 must be 2 to"),
        (dict(tree="chain"), "tree='chain' needs num_speculative_tokens"),
        (dict(tree_top_k=0), "tree_top_k=0 must be at least 1"),
        (dict(model="some/model"), "model='some/model' is not used by method='token_recycling'"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        config.read({"method": "token_recycling"} | settings)


def test_a_tree_wider_than_the_vocabulary_is_refused():
    with pytest.raises(ValueError, match="nodes with 8 children, but the target knows only 4"):
        TokenRecycling(4)
