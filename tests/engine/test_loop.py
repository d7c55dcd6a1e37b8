"""The decoding loop: its programs, caches, counts and slices."""

import copy
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import kv_cache, trees
from jspec.core.logprobs import Scoring
from jspec.core.types import Params
from jspec.drafters import DraftModel

# As attributes of the package these names are the functions, not the modules.
from jspec.engine import chunks, loop
from jspec.engine import functional as host
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile
from jspec.models import decoder
from tests import shipped, tiny

DRAFTERS = {
    "none": tiny.NONE,
    "ngram": tiny.NGRAM,
    "draft_model": tiny.DRAFT,
    "greedy": tiny.GREEDY_DRAFT,
}


def sequences(max_tokens=24, temperature=0.0, **settings):
    return [
        host.SequenceParams(
            prompt, max_tokens=max_tokens, temperature=temperature, stream=index, **settings
        )
        for index, prompt in enumerate(tiny.prompts())
    ]


def texts(answers):
    return [answer.tokens.tolist() for answer in answers]


# The two tests that drop all programs come first, so the others trace theirs once.
def test_an_equal_plan_and_bucket_trace_nothing_new(monkeypatch):
    traced = []
    propose = DraftModel.propose
    monkeypatch.setattr(DraftModel, "propose", lambda *a: traced.append(1) or propose(*a))
    jax.clear_caches()
    for seed, max_tokens in ((1, 24), (2, 20)):
        # New objects, equal to the old ones.
        drafter = DraftModel(copy.deepcopy(tiny.DRAFT_CONFIG), 4)
        plan = Plan(decoder.Decoder(tiny.TARGET.config), drafter)
        inputs = sequences(max_tokens, temperature=0.5 * seed, seed=seed)
        host.generate_sequences(plan, tiny.params(), inputs)
    assert len(traced) == 1


def test_a_group_of_sequences_launches_four_programs_and_no_small_ones(caplog):
    plan, params, inputs = Plan(tiny.TARGET, tiny.NGRAM), tiny.params(), sequences()
    jax.clear_caches()
    with jax.log_compiles():
        host.generate_sequences(plan, params, inputs, profile=Profile(scoring=Scoring(2)))
    launched = re.findall(r"Compiling jit\((\w+)\)", caplog.text)
    assert sorted(launched) == ["allocate", "launch", "prefill", "seat"]


@functools.cache
def compiled_loop(name, temperature):
    """Return a batch and its loop, compiled as for users."""
    plan = Plan(tiny.TARGET, DRAFTERS[name])
    batch = host.start(plan, tiny.params(), sequences(temperature=temperature))
    arguments = (plan, tiny.params(), batch.request, (), batch.state, jnp.int32(9))
    return batch, shipped.compiled(loop.decode.lower(*arguments))


# The other two have the caches of these.
@pytest.mark.parametrize(
    ("name", "temperature"),
    [
        ("none", 0.0),
        ("ngram", 0.9),
        ("draft_model", 0.9),
        pytest.param("none", 0.9, marks=pytest.mark.slow),
        pytest.param("greedy", 0.9, marks=pytest.mark.slow),
    ],
)
def test_the_loop_copies_no_cache(name, temperature):
    batch, compiled = compiled_loop(name, temperature)
    shapes = {leaf.shape for leaf in jax.tree.leaves(batch.state.cache.layers)}
    if name in ("draft_model", "greedy"):
        shapes |= {leaf.shape for leaf in jax.tree.leaves(batch.state.memory.cache.layers)}
    for shape in shapes:
        dims = ",".join(map(str, shape))
        copies = re.findall(rf"f32\[{dims}\]\S* copy(?:-start)?\(", compiled.as_text())
        assert not copies, f"{len(copies)} copies of a cache of shape {shape}"
    donated = sum(leaf.nbytes for leaf in jax.tree.leaves(batch.state.cache))
    assert compiled.memory_analysis().alias_size_in_bytes >= donated


def test_a_pass_computes_the_cosines_of_its_positions_once_for_all_layers_and_heads():
    text = compiled_loop("none", 0.0)[1].as_text()
    assert len(re.findall(r" cosine\(", text)) == len(re.findall(r" sine\(", text)) == 1


def test_no_embedding_is_widened_or_copied_for_a_few_tokens():
    narrow = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype(jnp.bfloat16), tree))
    params = narrow(tiny.params())
    plan = Plan(tiny.TARGET, DRAFTERS["draft_model"])
    batch = host.start(plan, params, sequences())
    text = shipped.compiled(
        loop.decode.lower(plan, params, batch.request, (), batch.state, jnp.int32(9))
    ).as_text()
    for table in (params.target.embedding, params.drafter.embedding):
        dims = ",".join(map(str, table.shape))
        assert f"bf16[{dims}]" in text
        assert not re.search(rf"f32\[{dims}\]\S* convert\(", text)
        assert not re.search(rf"= u16\[{dims}\]\S* (?!bitcast-convert|parameter)", text)


def test_cancelling_any_number_of_sequences_compiles_nothing(caplog):
    plan = Plan(tiny.TARGET, tiny.NONE)
    begun = lambda: host.start(plan, tiny.params(), sequences())
    host.cancel(plan, begun(), [1])
    for group in ([0, 2], [2, 0, 1]):
        batch = begun()
        expected, lengths = np.array(batch.request.max_length), np.array(batch.state.history.length)
        expected[group] = lengths[group]
        with jax.log_compiles():
            ended = host.cancel(plan, batch, group)
        assert sorted(group) == np.flatnonzero(ended.state.done)[: len(group)].tolist()
        np.testing.assert_array_equal(ended.request.max_length, expected)
    assert "Compiling" not in caplog.text


def test_under_jax_enable_x64_a_chain_that_shares_noise_gives_the_text_of_plain_decoding():
    inputs = sequences(max_tokens=8, temperature=0.8)
    plans = Plan(tiny.TARGET, tiny.NONE), Plan(tiny.TARGET, tiny.DRAFT, "coupled")
    with jax.enable_x64(True):
        plain, drafted = (host.generate_sequences(plan, tiny.params(), inputs) for plan in plans)
    assert texts(drafted) == texts(plain)
    assert sum(answer.drafted for answer in drafted) > 0


@pytest.mark.parametrize(
    ("name", "other"),
    [("ngram", (1, 2, 3, 5)), ("draft_model", (1, 5))],
    ids=["ngram", "draft_model"],
)
def test_node_buckets_change_no_text(name, other):
    drafter = DRAFTERS[name]
    inputs = sequences(temperature=0.8)
    answers = [
        texts(
            host.generate_sequences(
                Plan(tiny.TARGET, drafter, node_buckets=node_buckets), tiny.params(), inputs
            )
        )
        for node_buckets in ((5,), other)
    ]
    assert answers[0] == answers[1]


@pytest.mark.parametrize("node_buckets", [(1, 4), (5, 1), (0, 5), (1, 1, 5)])
def test_node_buckets_that_do_not_fit_are_refused(node_buckets):
    with pytest.raises(ValueError, match="must ascend from 1 or more to tree_size=5"):
        Plan(tiny.TARGET, tiny.NGRAM, node_buckets=node_buckets)


def test_a_rule_that_is_not_known_is_refused_with_the_known_ones():
    with pytest.raises(ValueError, match="rule='tipical' is not known; use one of rejection"):
        Plan(tiny.TARGET, tiny.NGRAM, rule="tipical")


@pytest.mark.parametrize("name", ["none", "ngram", "draft_model"])
def test_the_caches_end_as_after_a_fresh_pass_over_the_text(name):
    plan = Plan(tiny.TARGET, DRAFTERS[name])
    params = tiny.params()
    batch = host.advance(plan, params, host.start(plan, params, sequences(temperature=0.7)))
    history = batch.state.history
    check_cache(tiny.TARGET.config, params.target, batch.state.cache, history, behind=1)
    if name == "draft_model":
        cache = batch.state.memory.cache
        behind = history.length - cache.length
        assert ((behind == 1) | (behind == 2)).all()
        check_cache(tiny.DRAFT_CONFIG, params.drafter, cache, history, behind)


forward = jax.jit(decoder.forward, static_argnums=1)


def check_cache(config, params, cache, history, behind):
    length = history.length - behind
    np.testing.assert_array_equal(cache.length, length)
    size = history.tokens.shape[1]
    tree = trees.from_parents(trees.chain(size - 1), size - 1)
    empty = decoder.init_cache(config, len(length), 0)
    fresh = forward(params, config, history.tokens, tree, empty).tree_kv
    for row, end in enumerate(length.tolist()):
        for stored, expected in zip(
            jax.tree.leaves(cache.layers), jax.tree.leaves(fresh), strict=True
        ):
            np.testing.assert_allclose(
                stored[row, :, :end], expected[row, :, :end], rtol=2e-4, atol=2e-4
            )


def test_attention_never_reads_unwritten_slots_of_the_cache():
    config = tiny.TARGET.config
    cache = decoder.init_cache(config, 2, 8192)
    poison = jax.tree.map(lambda x: x.at[:, :, 256:].set(jnp.nan), cache.layers)
    cache = kv_cache.KVCache(poison, jnp.array([200, 0], jnp.int32))
    tree = trees.from_parents(trees.chain(4), 4)
    tokens = jnp.zeros((2, 5), jnp.int32)
    logits = forward(tiny.params().target, config, tokens, tree, cache).logits
    assert jnp.isfinite(logits).all()


def test_slices_of_rounds_give_the_same_text_as_one_launch():
    plan, params = Plan(tiny.TARGET, tiny.DRAFT, "block"), tiny.params()
    inputs = sequences(temperature=0.8)
    whole = texts(host.generate_sequences(plan, params, inputs))
    engine, slices = host.engine_of(plan, params, inputs, len(inputs)), []
    tickets = [engine.submit(sequence, rounds=2) for sequence in inputs]
    while not engine.is_idle:
        engine.step()
        slices.append([ticket.answer for ticket in tickets])
    assert texts(slices[-1]) == whole
    assert len(slices) > 3
    for answers in slices:
        pairs = zip(texts(answers), whole, strict=True)
        assert all(text == full[: len(text)] for text, full in pairs)
    assert {answer.finish_reason for answer in slices[0]} == {None}


def test_a_cancelled_sequence_emits_nothing_more_and_the_others_continue():
    plan, params = Plan(tiny.TARGET, tiny.NGRAM), tiny.params()
    inputs = sequences(temperature=0.8)
    whole = texts(host.generate_sequences(plan, params, inputs))
    batch = host.advance(plan, params, host.start(plan, params, inputs), rounds=2)
    before = texts(batch.answers)
    batch = host.advance(plan, params, host.cancel(plan, batch, [1]))
    after = batch.answers
    assert texts(after) == [whole[0], before[1], whole[2]]
    assert after[1].finish_reason == "length"


def test_the_trace_of_rounds_spells_the_text():
    plan = Plan(tiny.TARGET, tiny.DRAFT)
    for answer in host.generate_sequences(
        plan, tiny.params(), sequences(temperature=0.6), profile=tiny.NODES
    ):
        accepted, drafted, parents = answer.trace
        assert len(accepted) == answer.rounds
        assert (accepted + 1).sum() == len(answer.tokens)
        at = 0
        for count, nodes in zip(accepted, drafted, strict=True):
            assert nodes[1 : count + 1].tolist() == answer.tokens[at : at + count].tolist()
            at += count + 1
        assert (drafted[:, 1:] >= 0).sum() == answer.drafted
        assert (parents[:, 0] == 0).all()


def test_the_accepted_and_drafted_tokens_of_each_round_come_without_nodes_too():
    plan, params = Plan(tiny.TARGET, tiny.DRAFT), tiny.params()
    inputs = sequences(temperature=0.6)
    whole = host.generate_sequences(plan, params, inputs, profile=tiny.NODES)
    for answer, expected in zip(host.generate_sequences(plan, params, inputs), whole, strict=True):
        accepted, nodes, _ = expected.trace
        np.testing.assert_array_equal(answer.steps[0], accepted)
        np.testing.assert_array_equal(answer.steps[1], (nodes[:, 1:] >= 0).sum(1))
        assert answer.trace is None


def test_answers_do_not_depend_on_the_rounds_of_a_launch():
    plan, params = Plan(tiny.TARGET, tiny.DRAFT), tiny.params()
    inputs = sequences(temperature=0.6)
    one, many = (
        host.generate_sequences(plan, params, inputs, profile=Profile(rounds, True, Scoring(2)))
        for rounds in (1, 40)
    )
    for answer, other in zip(one, many, strict=True):
        jax.tree.map(np.testing.assert_array_equal, vars(answer), vars(other))


def test_a_launch_ends_where_a_watched_sequence_does():
    plan, params = Plan(tiny.TARGET, tiny.NGRAM), tiny.params()
    inputs = [
        host.SequenceParams(prompt, max_tokens=tokens)
        for prompt, tokens in zip(tiny.prompts((9, 5)), (6, 60), strict=True)
    ]
    batch = host.start(plan, params, inputs)

    def launch(shared, state, watched):
        watched = np.array(watched)
        inputs = params, batch.request, shared, state, np.int32(32), watched
        return loop.launch(plan, Profile(), *inputs)

    shared, state, ran = launch((), batch.state, [True, False])
    assert ran.done.tolist() == [True, False]
    assert ran.length[0] - ran.start[0] == 6 and 0 < ran.rounds <= 6
    shared, state, idle = launch(shared, state, [True, False])  # dispatched before the host knew
    assert idle.rounds == 0 and idle.length.tolist() == ran.length.tolist()
    _, _, ran = launch(shared, state, [False, False])
    assert ran.rounds > 0 and ran.length[0] == idle.length[0] and ran.length[1] > idle.length[1]


@pytest.mark.parametrize("name", ["ngram", "draft_model"])
def test_counts_add_up_to_the_text(name):
    plan = Plan(tiny.TARGET, DRAFTERS[name])
    for answer in host.generate_sequences(plan, tiny.params(), sequences()):
        num_accepted = (answer.accepted * np.arange(5)).sum()
        assert num_accepted + answer.rounds == len(answer.tokens) == 24
        assert answer.accepted.sum() == answer.drafts <= answer.rounds
        assert num_accepted <= answer.drafted <= 4 * answer.drafts


def test_text_depends_neither_on_grouping_nor_on_neighbours():
    plan, params = Plan(tiny.TARGET, tiny.DRAFT), tiny.params()
    inputs = [
        *sequences(temperature=0.8),
        host.SequenceParams((1, 2, 3), max_tokens=24, temperature=0.5, seed=4),
    ]
    together = texts(host.generate_sequences(plan, params, inputs))
    assert texts(host.generate_sequences(plan, params, inputs, max_num_seqs=2)) == together
    assert texts(host.generate_sequences(plan, params, inputs[::-1])) == together[::-1]


def test_a_long_prompt_is_prefilled_in_chunks(monkeypatch):
    plan, params = Plan(tiny.TARGET, tiny.DRAFT), tiny.params()
    inputs = [host.SequenceParams(prompt, max_tokens=8) for prompt in tiny.prompts((70, 3))]
    whole = texts(host.generate_sequences(plan, params, inputs))
    monkeypatch.setattr(chunks, "TOTALS", (16,))
    assert texts(host.generate_sequences(plan, params, inputs)) == whole


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(prompt=()), "prompt is empty"),
        (dict(max_tokens=0), "max_tokens=0 must be at least 1"),
        (dict(temperature=-1.0), "temperature=-1.0 must be 0"),
        (dict(temperature=float("nan")), "temperature=nan must be"),
        (dict(top_p=0.0), r"top_p=0.0 must be in \(0, 1\]"),
        (dict(top_k=-2), "top_k=-2 must be"),
        (dict(min_p=1.5), "min_p=1.5 must be"),
    ],
)
def test_sequence_params_out_of_range_are_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        host.SequenceParams(**{"prompt": (1,), **settings})


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            host.SequenceParams((1,) * 500, max_tokens=13),
            "together 513, but the model has 512 positions",
        ),
        (host.SequenceParams((3, 64)), "token id 64, outside the vocabulary of 64"),
        (host.SequenceParams((-1, 3)), "token id -1, outside"),
    ],
)
def test_sequences_that_do_not_fit_the_model_are_refused(row, message):
    with pytest.raises(ValueError, match=message):
        host.start(Plan(tiny.TARGET, tiny.NONE), tiny.params(), [row])


def test_params_of_both_models_are_arguments_and_never_constants():
    plan = Plan(tiny.TARGET, tiny.DRAFT)
    inputs = sequences(max_tokens=4)
    first = texts(host.generate_sequences(plan, tiny.params(), inputs))
    other = Params(jax.tree.map(lambda x: -x, tiny.params().target), tiny.params().drafter)
    assert texts(host.generate_sequences(plan, other, inputs)) != first
