"""Passes over lists of the valid nodes of all rows: what they cost, and that no text changes."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jspec.core import kv_cache, packing, trees
from jspec.core.types import Params
from jspec.engine import budget
from jspec.engine.engine import Engine
from jspec.engine.functional import SequenceParams
from jspec.engine.plan import Plan
from jspec.models import decoder
from jspec.models.blocks.experts import Experts
from jspec.models.blocks.latent_attention import LatentAttention
from tests import fakes, networks, tiny
from tests.test_conformance import DRAFTERS

ROWS = 6  # in eight slots


def sequences(**options):
    """Return sequences of several lengths, greedy and sampled in turn."""
    rows = []
    for index in range(ROWS):
        prompt = np.random.default_rng(index).integers(1, tiny.VOCAB, 3 + 2 * index).tolist()
        given = dict(max_tokens=10 + index, temperature=0.9 * (index % 2), stream=index) | options
        rows.append(SequenceParams(tuple(prompt * 2), **given))
    return rows


def steps(answers):
    return [[answer.tokens.tolist(), *np.array(answer.steps).tolist()] for answer in answers]


def check(method, tree):
    """Compare a method's texts and rounds in packed passes with those in whole ones."""
    drafter, weights = DRAFTERS[method][tree]
    rule = "rejection" if method == "hybrid" and tree == "merged" else "coupled"
    params, shared = Params(tiny.params().target, weights()), ()
    whole = Plan(tiny.TARGET, drafter, rule, node_buckets=(drafter.tree_size,))
    rows = sequences() if whole.effective_rule.randomness == "target" else sequences(temperature=0)
    found = []
    for plan in (whole, dataclasses.replace(whole, packed=True)):
        engine = Engine(plan, params, num_slots=8, capacity=64, shared=shared)
        found.append(steps(engine.run(rows)))
    assert found[0] == found[1]


FEW = [("ngram", "chain"), ("eagle", "eagle2"), ("medusa", "sampled")]
ALL = [(method, tree) for method in DRAFTERS for tree in DRAFTERS[method] if method != "none"]


@pytest.mark.parametrize(
    ("method", "tree"),
    [pytest.param(*case, marks=() if case in FEW else pytest.mark.slow) for case in ALL],
)
def test_packed_passes_change_no_text_and_no_round(method, tree):
    check(method, tree)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=6))
@settings(max_examples=50)
def test_packing_takes_every_listed_node_and_brings_it_back(listed):
    listed = np.array(listed)
    count = int(listed.sum())
    numbers = np.arange(listed.size).reshape(listed.shape)
    packed = packing.packing_of(jnp.array(listed), (count // 2, count, count + 2))
    flat = packed.pack(jnp.array(numbers))
    assert flat.shape == (1, count + 2)
    assert flat[0, :-2].tolist() == numbers[listed].tolist()
    assert np.asarray(packed.unpack(flat))[listed].tolist() == numbers[listed].tolist()
    assert packed.rows.tolist() == listed.any(1).tolist()
    assert packed.first_only.tolist() == (~listed[:, 1:].any(1)).tolist()
    # Functions run over the smallest size that holds the list.
    assert packed.over(lambda x: x + 1, flat)[0, :count].tolist() == (flat + 1)[0, :count].tolist()
    assert (packed.over(lambda x: x + 1, flat)[0, count:] == 0).all()


def test_lists_grow_by_what_a_matmul_costs_on_a_platform():
    on_cpu = {(1, 5): (1, 5), (2, 10): (10,), (8, 8): (8,), (8, 40): (8, 20, 40)}
    on_cpu[64, 320] = (8, 32, 80, 164, 320)
    for (rows, most), expected in on_cpu.items():
        assert packing.sizes(rows, most, "cpu") == expected
    for platform in ("gpu", "tpu"):
        assert packing.sizes(8, 40, platform) == (40,)
        assert packing.sizes(64, 320, platform) == (128, 176, 240, 320)


# Wide enough that each kind of matmul has a choice of sizes.
WIDE = networks.changed(
    tiny.TARGET.config, hidden_size=160, num_heads=12, num_kv_heads=4, vocab_size=128
)
LATENT = LatentAttention(
    num_heads=12, kv_rank=32, q_rank=None, nope_dim=32, rope_dim=16, value_dim=32
)
EXPERTS = Experts(num_experts=4, experts_per_token=2, intermediate_size=8, shared_size=64)
KINDS = {"standard": WIDE} | {
    name: networks.changed(WIDE, **parts)
    for name, parts in {
        "windowed": {"windows": (4, None)},
        "latent": {"mixer": LATENT},
        "experts": {"feed_forward": EXPERTS},
    }.items()
}


@pytest.mark.parametrize("sizes", [(4, 12), (12, 16)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_packed_pass_scores_listed_nodes_as_a_whole_pass_does(kind, sizes):
    config, batch, nodes = KINDS[kind], 4, 5
    params = decoder.init_params(jax.random.key(0), config)
    tokens = jax.random.randint(jax.random.key(1), (batch, 12), 0, config.vocab_size)
    cache = decoder.init_cache(config, batch, 32)
    chain = trees.chain_tree(batch, 12)
    prompt = decoder.forward(params, config, tokens, chain, cache)
    order = np.broadcast_to(np.arange(12), (batch, 12))
    cache = kv_cache.append(cache, prompt.tree_kv, order, np.array([0, 3, 12, 7]))
    tree = trees.broadcast(trees.from_parents(np.array([-1, 0, 0, 1, 1]), 2), batch)
    listed = np.arange(nodes) < np.array([1, 5, 2, 3])[:, None]
    run = functools.partial(
        decoder.forward, params, config, tokens[:, :nodes], tree, cache, capture_layers=(0, 2)
    )
    whole, packed = run(), run(packing=packing.packing_of(listed, sizes))
    for one, other in zip(
        (whole.logits, *whole.features), (packed.logits, *packed.features), strict=True
    ):
        np.testing.assert_allclose(one[listed], other[listed], atol=2e-5)
    entries = zip(jax.tree.leaves(whole.tree_kv), jax.tree.leaves(packed.tree_kv), strict=True)
    for one, other in entries:
        one, other = (np.asarray(part).swapaxes(1, 2)[listed] for part in (one, other))
        np.testing.assert_allclose(one, other, atol=2e-5)


def test_a_pass_runs_over_the_valid_nodes_of_unfinished_rows():
    drafter = fakes.RandomLengthDrafter(4, tiny.VOCAB)
    plan = Plan(tiny.TARGET, drafter, packed=True, platform="cpu")
    assert [each.total for each in plan.passes(8)] == [8, 20, 40]
    rows = sequences(temperature=0)
    plain = Engine(Plan(tiny.TARGET, tiny.NONE), tiny.params(), num_slots=8, capacity=64).run(rows)
    params = Params(tiny.params().target, fakes.script(rows, plain))
    passed, found = [], []
    for each in (plan, dataclasses.replace(plan, packed=False)):
        engine = Engine(each, params, num_slots=8, capacity=64)
        found.append(engine.run(rows))
        passed.append(engine.num_passed)
    valid = sum(answer.rounds + answer.drafted for answer in found[0])
    assert steps(found[0]) == steps(found[1])
    assert valid <= passed[0] <= 0.7 * passed[1]


@pytest.mark.parametrize("platform", packing.MATMULS)
def test_an_accelerator_has_one_pass_for_all_lists_that_take_the_same_time(platform):
    passes = lambda rows, **options: Plan(
        tiny.TARGET, tiny.NGRAM, platform=platform, **options
    ).passes(rows)
    totals = lambda rows, **options: [each.total for each in passes(rows, **options)]
    if platform == "cpu":
        assert totals(8, packed=True) == [8, 20, 40]
        assert totals(8) == [8, 40]
        return
    assert totals(8, packed=True) == totals(8) == [40]
    assert totals(64, packed=True) == [128, 176, 240, 320]
    assert totals(64) == [64, 320]


def test_a_pass_that_is_too_small_for_the_rows_emits_nothing():
    plan = Plan(tiny.TARGET, tiny.NGRAM, packed=True, platform="cpu")
    survival = np.full((16, 5), 0.5)
    survival[:, 0] = 0
    sizes = [each.total for each in plan.passes(16)]
    assert sizes == [8, 20, 32, 52, 80]
    assert budget.expected(plan.passes(16), survival, 16).tolist() == [0, 18, 24, 34, 48]


def test_rows_may_lack_a_draft_unless_a_network_drafts_and_no_budget_takes_it_back():
    eagle = DRAFTERS["eagle"]["chain"][0]
    budgeted = Plan(tiny.TARGET, eagle, lengths=(eagle.max_depth,)).at_length(eagle.max_depth)
    assert not Plan(tiny.TARGET, tiny.NGRAM).drafts_always
    assert Plan(tiny.TARGET, eagle).drafts_always
    assert not budgeted.drafts_always


def test_an_unknown_platform_is_refused():
    with pytest.raises(ValueError, match="platform='cuda' must be one of cpu, gpu, tpu, or None"):
        Plan(tiny.TARGET, tiny.NGRAM, platform="cuda")


def test_a_target_that_takes_no_packing_is_refused():
    with pytest.raises(ValueError, match="ToyTarget has no packs_nodes=True; leave packed out"):
        Plan(fakes.ToyTarget(8), tiny.NGRAM, packed=True)
