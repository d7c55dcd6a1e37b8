"""A plan is built of what fits together, and says of all else what does not fit and what would."""

import dataclasses
from typing import get_args

import pytest

from jspec import verify
from jspec.drafters import Eagle
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.eagle import EagleConfig
from jspec.plan import Plan
from jspec.types import Proposal
from jspec.verify import RULES
from tests.fakes import TableDrafter, ToyTarget, TreeTableDrafter
from tests.tiny import TARGET as DECODER
from tests.tiny import VOCAB

TARGET = ToyTarget(4)
CHAIN = TableDrafter(2)
TREE = TreeTableDrafter(2, parents=(-1, 0, 0, 1, 1, 2, 2))

# What is exact for what. Point masses and pruned trees: section 3a of the target-only walk; draws:
# each is enumerated in tests/verify.
DRAWN = {"chain", "iid", "without_replacement", "top_plus_one", "mixed", "points_last"}
EXACT_FOR = {
    "rejection": DRAWN | {"point"}, "block": DRAWN | {"point"},
    "match": DRAWN | {"point", "pruned"}, "coupled": DRAWN | {"point", "pruned"},
    "typical": set(), "synthetic": set(),
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Labelled(TreeTableDrafter):
    """A tree that says any law of itself."""

    noise: str = "own"


def labelled(proposal):
    return Labelled(2, (-1, 0, 1) if proposal == "chain" else TREE.parents, proposal)


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.lossless])
@pytest.mark.parametrize("proposal", get_args(Proposal))
def test_a_pair_is_planned_if_and_only_if_it_is_exact(rule, proposal):
    assert RULES[rule].exact_for == EXACT_FOR[rule]
    if proposal in EXACT_FOR[rule]:
        plan = Plan(TARGET, labelled(proposal), rule)
        assert plan.effective_rule.lossless
        assert (plan.drafter.noise == "target") == (rule == "coupled" and proposal != "point")
        return
    with pytest.raises(ValueError) as error:
        Plan(TARGET, labelled(proposal), rule)
    assert str(error.value) == (
        f"rule={rule!r} is not exact for the {proposal!r} drafts of Labelled; use one of match, "
        "coupled."
    )


def test_point_masses_are_judged_by_the_target_only_walk():
    for rule in ("rejection", "block"):
        assert Plan(TARGET, labelled("point"), rule).effective_rule == RULES["match"]


def test_laws_that_keep_the_tokens_of_siblings_are_judged_by_walks_of_their_own():
    for rule in ("rejection", "block"):
        walks = [Plan(TARGET, labelled(law), rule).effective_rule.walk
                 for law in ("iid", "points_last", "without_replacement")]  # fmt: skip
        known = RULES[rule]
        assert walks == [known.walk_replaced, known.walk_points_last, known.walk]


def test_lossy_rules_judge_drafts_of_any_law():
    for proposal in get_args(Proposal):
        plan = Plan(TARGET, labelled(proposal), "typical")
        assert plan.effective_rule == RULES["typical"]


def test_a_rule_of_ones_own_is_taken_at_its_word():
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
        (labelled("greedy"), "rejection", "Labelled.proposal='greedy' must be one of 'point'"),
        (dataclasses.replace(TREE, proposal="chain"), "rejection",
         "TreeTableDrafter says proposal='chain', but has tree_size=7 nodes for max_depth=2"),
        (CHAIN, "synthetic", "rule='synthetic' is set for drafts of depth 0, but TableDrafter "
         "drafts to depth 2; give Plan a rule made for it, such as rule=jspec.verify.synthetic"),
        (CHAIN, verify.synthetic(rates=(1, 1, 1)), "is set for drafts of depth 3, but"),
        (CHAIN, verify.synthetic(length=3.5), "is set for drafts of depth 3 or more, but"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named_with_its_remedy(drafter, rule, message):
    with pytest.raises(ValueError) as error:
        Plan(TARGET, drafter, rule)
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_a_kernel_that_no_draft_would_reach_is_refused():
    for name in ("rejection", "block"):
        forced = dataclasses.replace(RULES[name], implementation="pallas_tpu")
        for drafter in (CHAIN, TREE, labelled("iid")):
            assert Plan(TARGET, drafter, forced).effective_rule.implementation == "pallas_tpu"
        with pytest.raises(ValueError) as error:
            Plan(TARGET, labelled("point"), forced)
        assert f"rule={name!r} names implementation='pallas_tpu'" in str(error.value)
        assert "Labelled are point masses" in str(error.value)
        assert "comes to 'match', which has no kernel; leave implementation out" in str(error.value)


def test_a_kernel_is_refused_to_a_dynamic_tree():
    network = DecoderConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_layers=1, num_heads=4,
        num_kv_heads=2, head_dim=8, max_positions=512,
    )  # fmt: skip
    head = EagleConfig(network, 3, (0, 1, 2), target_hidden_size=32, target_vocab_size=VOCAB)
    drafter = Eagle(head, DECODER, tree="eagle2", tree_size=8, tree_depth=3, tree_top_k=4)
    forced = dataclasses.replace(RULES["rejection"], implementation="pallas_gpu")
    with pytest.raises(ValueError, match=r"Eagle are point masses \(as are all dynamic trees\)"):
        Plan(DECODER, drafter, forced)
