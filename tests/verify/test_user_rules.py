"""Rules of the user, named by their dotted path: ``LLM`` and ``certify`` take the same ones."""

import dataclasses
import re

import pytest

import jspec
from jspec.api import config
from jspec.tools.certify.exact import rule_of
from jspec.verify import RULES
from tests import llm_fixtures

HERE = "tests.verify.test_user_rules"
MINE = dataclasses.replace(RULES["block"], name="mine")
DRAWN_ALONE = dataclasses.replace(
    RULES["rejection"], name="drawn alone", exact_for=frozenset({"chain"}), deterministic_rule=None
)
NOT_A_RULE = MINE.walk


def read(path, **settings):
    drafter = {"method": "ngram", "num_speculative_tokens": 3}
    return config.read(drafter | {"rejection_sample_method": path} | settings).rule


@pytest.fixture
def models(tmp_path_factory):
    return llm_fixtures.checkpoints(tmp_path_factory.getbasetemp() / "models")


def test_llm_and_certify_load_the_same_rule():
    assert read(f"{HERE}.MINE") is rule_of(f"{HERE}.MINE") is MINE


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("no_such_package.MINE", "cannot be imported: No module named 'no_such_package'"),
        (f"{HERE}.YOURS", "cannot be imported: module 'tests.verify.test_user_rules' has no"),
        (f"{HERE}.NOT_A_RULE", "is a function, not a jspec.verify.Rule; wrap its walk: Rule("),
    ],
)
def test_a_path_that_leads_to_no_rule_is_named_with_its_remedy(path, message):
    for key, load in (("rejection_sample_method", read), ("rule", rule_of)):
        with pytest.raises(ValueError, match=re.escape(message)) as error:
            load(path)
        assert f"{key}={path!r} " in str(error.value) and "\n" not in str(error.value)


def test_settings_of_other_rules_are_refused():
    with pytest.raises(ValueError, match="posterior_alpha are only valid with"):
        read(f"{HERE}.MINE", posterior_alpha=0.5)


def test_llm_decodes_with_the_users_rule(models):
    draft = {"model": str(models["draft"]), "num_speculative_tokens": 3}
    prompts, settings = ["the quick", "def add("], jspec.SamplingParams(temperature=0.8, seed=1)
    texts = []
    for name in ("block", f"{HERE}.MINE"):
        llm = jspec.LLM(models["target"], draft | {"rejection_sample_method": name})
        texts.append([each.outputs[0].token_ids for each in llm.generate(prompts, settings)])
    assert texts[0] == texts[1]


def test_llm_refuses_the_users_rule_for_drafts_that_it_is_not_exact_for(models):
    ngram = {"method": "ngram", "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match="'drawn alone' is not exact for the 'deterministic'"):
        jspec.LLM(models["target"], ngram | {"rejection_sample_method": f"{HERE}.DRAWN_ALONE"})
