"""Plans accept parts that fit each other, and refuse others with a remedy."""

import dataclasses
from typing import get_args

import pytest

from jspec import verify
from jspec.core.types import Proposal
from jspec.drafters import Eagle, Hybrid
from jspec.engine.plan import Plan
from jspec.models.heads.eagle import EagleConfig
from jspec.verify import RULES
from tests import networks
from tests.fakes import TableDrafter, ToyTarget, TreeTableDrafter
from tests.tiny import NGRAM, VOCAB
from tests.tiny import TARGET as DECODER

TARGET = ToyTarget(4)
CHAIN = TableDrafter(2)
TREE = TreeTableDrafter(2, parents=(-1, 0, 0, 1, 1, 2, 2))


# The proposals for which each rule is exact. tests/verify enumerates the outcomes of each pair.
PROPOSALS = (
    "deterministic",
    "chain",
    "without_replacement",
    "top_plus_one",
    "mixed",
    "deterministic_last",
)
EXACT_FOR = {
    "rejection": {*PROPOSALS},
    "block": {*PROPOSALS},
    "match": {*PROPOSALS},
    "coupled": {*PROPOSALS},
    "typical": set(),
    "synthetic": set(),
}


@dataclasses.dataclass(frozen=True)
class Labelled(TreeTableDrafter):
    """A tree with any ``proposal``."""

    noise: str = "own"


def labelled(proposal):
    return Labelled(2, (-1, 0, 1) if proposal == "chain" else TREE.parents, proposal)


def test_the_table_lists_every_rule_and_proposal():
    assert set(RULES) == set(EXACT_FOR)
    assert set(get_args(Proposal)) == set(PROPOSALS)


@pytest.mark.parametrize("rule", ["rejection", "block", "match", "coupled", "typical", "synthetic"])
def test_every_rule_is_exact_for_the_listed_proposals(rule):
    assert RULES[rule].exact_for == EXACT_FOR[rule]
    assert RULES[rule].lossless == bool(EXACT_FOR[rule])


@pytest.mark.parametrize("rule", ["rejection", "block", "match", "coupled"])
@pytest.mark.parametrize("proposal", PROPOSALS)
def test_every_lossless_rule_is_planned_with_every_proposal(rule, proposal):
    plan = Plan(TARGET, labelled(proposal), rule)
    assert plan.effective_rule.lossless
    shares_noise = rule == "coupled" and proposal != "deterministic"
    assert (plan.drafter.noise == "target") == shares_noise


def test_deterministic_drafts_are_judged_by_match():
    for rule in ("rejection", "block"):
        assert Plan(TARGET, labelled("deterministic"), rule).effective_rule == RULES["match"]


def test_lossy_rules_judge_drafts_of_any_proposal():
    for proposal in get_args(Proposal):
        plan = Plan(TARGET, labelled(proposal), "typical")
        assert plan.effective_rule == RULES["typical"]


def test_a_rule_of_the_user_is_exact_for_the_proposals_it_names():
    mine = verify.Rule("mine", RULES["match"].walk, "target", frozenset({"chain"}))
    assert Plan(TARGET, CHAIN, mine).effective_rule == mine
    with pytest.raises(ValueError, match="rule='mine' is not exact for the 'without_replacement'"):
        Plan(TARGET, TREE, mine)


def test_plans_with_equal_settings_of_a_rule_are_equal():
    build = lambda alpha: Plan(TARGET, CHAIN, verify.typical(0.1, alpha))
    assert build(0.3) == build(0.3)
    assert hash(build(0.3)) == hash(build(0.3))
    assert build(0.3) != build(0.4)


@pytest.mark.parametrize(
    ("drafter", "rule", "message"),
    [
        (CHAIN, "rejektion", "rule='rejektion' is not known; use one of rejection, block"),
        (labelled("greedy"), "rejection", "Labelled.proposal='greedy' must be one of "),
        (
            dataclasses.replace(TREE, proposal="chain"),
            "rejection",
            "TreeTableDrafter has proposal='chain', but tree_size=7 nodes for max_depth=2",
        ),
        (
            CHAIN,
            "synthetic",
            "rule='synthetic' is set for drafts of depth 0, but TableDrafter "
            "drafts to depth 2; give Plan a rule made for it, such as rule=jspec.verify.synthetic",
        ),
        (CHAIN, verify.synthetic(rates=(1, 1, 1)), "is set for drafts of depth 3, but"),
        (CHAIN, verify.synthetic(length=3.5), "is set for drafts of depth 3 or more, but"),
    ],
)
def test_parts_that_do_not_fit_raise_with_a_remedy(drafter, rule, message):
    with pytest.raises(ValueError) as error:
        Plan(TARGET, drafter, rule)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_a_sampling_backend_that_no_draft_would_reach_is_refused(rule):
    for drafter in (CHAIN, TREE):
        Plan(TARGET, drafter, rule, sampling_backend="pallas_tpu")
    with pytest.raises(ValueError, match=r"but those of Labelled are deterministic .*'match', wh"):
        Plan(TARGET, labelled("deterministic"), rule, sampling_backend="pallas_tpu")


@pytest.mark.parametrize(
    ("rule", "backend", "message"),
    [
        ("rejection", "triton", "sampling_backend='triton' is not known; use None or one of 'xla'"),
        ("rejection", "reference", "'reference' is not known; use None or one of 'xla', 'pallas_t"),
        ("match", "pallas_tpu", "is for the rules 'rejection' and 'block', not for 'match'; leave"),
        (verify.typical(), "pallas_gpu", "rules 'rejection' and 'block', not for 'typical'"),
    ],
)
def test_a_sampling_backend_that_a_rule_does_not_have_is_refused(rule, backend, message):
    with pytest.raises(ValueError, match=message):
        Plan(TARGET, CHAIN, rule, sampling_backend=backend)
    assert Plan(TARGET, CHAIN, rule, sampling_backend="xla").sampling_backend == "xla"


def test_a_sampling_backend_is_refused_to_a_dynamic_tree():
    network = networks.small(
        vocab_size=VOCAB, intermediate_size=64, num_layers=1, max_positions=512
    )
    head = EagleConfig(network, 3, (0, 1, 2), target_hidden_size=32, target_vocab_size=VOCAB)
    drafter = Eagle(head, DECODER, tree="eagle2", tree_size=8, tree_depth=3, tree_top_k=4)
    with pytest.raises(ValueError, match=r"Eagle are deterministic \(as are all dynamic trees\)"):
        Plan(DECODER, drafter, sampling_backend="pallas_gpu")


@dataclasses.dataclass(frozen=True)
class Noiseless(TreeTableDrafter):
    """A drawn tree without a choice of noise."""


def test_a_rule_that_shares_noise_refuses_a_drafter_that_cannot():
    drafter = Noiseless(2, TREE.parents)
    message = r"but Noiseless has no field noise: Literal\['own', .* jspec\.core\.sampling\.draw_ta"
    with pytest.raises(ValueError, match=message):
        Plan(TARGET, drafter, "coupled")
    with pytest.raises(ValueError, match="but Noiseless has no field noise"):
        Hybrid((NGRAM, drafter), "choose", noise="target")
    assert Plan(TARGET, drafter, "match").drafter == drafter


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"node_buckets": (2.5, 3)},
            "node_buckets=(2.5, 3) must ascend from 1 or more to tree_size=3, in",
        ),
        (
            {"node_buckets": (1, 2)},
            "node_buckets=(1, 2) must ascend from 1 or more to tree_size=3, in",
        ),
        ({"node_buckets": 3}, "node_buckets=3 must be a list"),
    ],
)
def test_a_plan_setting_out_of_range_is_refused(settings, message):
    with pytest.raises(ValueError) as error:
        Plan(TARGET, CHAIN, **settings)
    assert message in str(error.value)


def test_node_buckets_may_be_a_list():
    assert hash(Plan(TARGET, CHAIN, node_buckets=[1, 3])) == hash(
        Plan(TARGET, CHAIN, node_buckets=(1, 3))
    )


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        ({"name": 3}, "name=3 of a Rule must be a string"),
        ({"randomness": "targets"}, "randomness='targets' of a Rule must be in ('target', "),
        ({"exact_for": "chain"}, "exact_for='chain' of a Rule must be a frozenset of proposals"),
        ({"exact_for": {"chain"}}, "exact_for={'chain'} of a Rule must be a frozenset"),
        ({"exact_for": frozenset({"iit"})}, "exact_for=frozenset({'iit'}) of a Rule must be a fr"),
        ({"walk": None}, "walk=None of a Rule must be a function of (processed logits, draft"),
        ({"deterministic_rule": "match"}, "deterministic_rule='match' of a Rule must be a Rule"),
        ({"depths": 3}, "depths=3 of a Rule must be a pair (smallest, "),
        ({"depths": (3, 2)}, "depths=(3, 2) of a Rule must be a pair"),
        ({"implementation": "pallas_tpu"}, "give sampling_backend to Plan or LLM"),
    ],
)
def test_a_rule_setting_out_of_range_is_refused_when_the_rule_is_made(mistake, message):
    with pytest.raises(ValueError) as error:
        dataclasses.replace(RULES["rejection"], **mistake)
    assert message in str(error.value)
