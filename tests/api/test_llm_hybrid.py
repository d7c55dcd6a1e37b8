"""LLM with two drafters in one: from a config, with a model, a head or a class of the user's."""

import pytest

import jspec
from tests import llm_fixtures
from tests.api.test_llm_heads import head

PROMPTS = ["the quick", "def add(x"]
GREEDY = jspec.SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True)
SUFFIX = {
    "method": "suffix",
    "suffix_decoding_max_cached_tokens": 128,
    "suffix_decoding_max_tree_depth": 8,
}


def hybrid(root, *parts, **more):
    config = {"method": "hybrid", "parts": list(parts)} | more
    return jspec.LLM(llm_fixtures.loaded(root)["target"], config)


def texts(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def lengths(outputs):
    return [output.speculative_decoding_stats["mean_acceptance_length"] for output in outputs]


def test_past_responses_and_a_draft_model_in_one_tree(root, tmp_path):
    draft = {"model": llm_fixtures.loaded(root)["draft"], "num_speculative_tokens": 2}
    llm = hybrid(root, SUFFIX, draft)
    plain = texts(llm_fixtures.llm(root, "none").generate(PROMPTS, GREEDY))
    first, second = llm.generate(PROMPTS, GREEDY), llm.generate(PROMPTS, GREEDY)
    assert texts(first) == texts(second) == plain
    assert min(lengths(second)) > max(lengths(first)) + 1
    llm.save_shared(tmp_path / "shared.safetensors")
    other = hybrid(root, SUFFIX, draft)
    other.load_shared(tmp_path / "shared.safetensors")
    assert lengths(other.generate(PROMPTS, GREEDY)) == lengths(second)


def test_a_part_may_be_a_head_or_a_class_of_the_users(root):
    plain = texts(llm_fixtures.llm(root, "none").generate(PROMPTS, GREEDY))
    eagle = {"method": "eagle", "model": head(root, "eagle"), "num_speculative_tokens": 2}
    custom = {"method": "custom_class", "model": "tests.drafters.custom.Repeat"}
    assert texts(hybrid(root, custom, eagle, combine="choose").generate(PROMPTS, GREEDY)) == plain


def test_parts_that_do_not_fit_are_refused_before_weights_are_loaded(root, monkeypatch):
    monkeypatch.setattr(
        "jspec.checkpoints.loading.load", lambda *_: pytest.fail("weights were loaded")
    )
    draft = {"model": llm_fixtures.loaded(root)["draft"], "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match="must be a lookup"):
        hybrid(root, draft, SUFFIX)
    with pytest.raises(ValueError, match="combine='both' must be 'merge' or 'choose'"):
        hybrid(root, SUFFIX, draft, combine="both")
    long = draft | {"max_model_len": 1 << 20}
    with pytest.raises(ValueError, match="cannot be larger than draft_max_model_len"):
        hybrid(root, SUFFIX, long)
