"""speculative_config: the meaning of each key, and the errors of unsupported ones."""

import dataclasses
import json
from pathlib import Path

import pytest

from jspec import verify
from jspec.api import config
from jspec.api.config import keys as config_keys
from jspec.api.config.keys import KEYS
from jspec.drafters import (
    METHODS,
    DraftModel,
    Eagle,
    Medusa,
    MlpSpeculator,
    NGram,
    NoDrafter,
)
from jspec.engine.plan import Plan
from jspec.models.heads.eagle import EagleConfig
from jspec.models.heads.medusa import MedusaConfig
from jspec.models.heads.mlp_speculator import MlpSpeculatorConfig
from jspec.verify import RULES
from tests import tiny
from tests.api.config import docs_tables

DOCS = Path(__file__).resolve().parents[3] / "docs" / "speculative_config.md"
NGRAM = {"method": "ngram", "num_speculative_tokens": 4}
SYNTHETIC = NGRAM | {"rejection_sample_method": "synthetic"}
DRAFT = {"model": "some/draft", "num_speculative_tokens": 4}
EAGLE = {"method": "eagle", "model": "some/head", "num_speculative_tokens": 4}
TARGET = tiny.TARGET
HEAD = EagleConfig(TARGET.config, 1, (2,), 32, tiny.VOCAB)
HEADS = MedusaConfig(5, 1, 32, tiny.VOCAB, tiny.VOCAB, (2,), 5)
SPECULATOR = MlpSpeculatorConfig(3, 32, 24, tiny.VOCAB, (2,))
WORKING = ", ".join(repr(name) for name in METHODS if name != "none")


def ngram(**settings):
    return config.read(NGRAM | settings).drafter(None, TARGET)


def error_of(given):
    with pytest.raises(ValueError) as error:
        config.read(given)
    assert "\n" not in str(error.value)
    return str(error.value)


def test_the_docs_hold_the_table_of_the_code():
    assert docs_tables.markdown() in DOCS.read_text(encoding="utf-8"), (
        "paste into docs/speculative_config.md what this prints: "
        "python -m tests.api.config.docs_tables"
    )


def test_no_config_decodes_plainly():
    assert config.read(None).drafter(None, TARGET) == NoDrafter()
    assert config.read({"method": "none"}) == config.read(None)


def test_every_method_and_every_rule_has_a_name_in_the_config():
    assert set(config_keys.RULE_NAMES.values()) == set(RULES)


def test_a_drafters_fields_are_config_keys():
    # Set by LLM, Plan and Hybrid.
    internal = {"config", "target", "vocab_size", "max_length", "noise", "backlog", "first"}
    for method in METHODS.values():
        assert {field.name for field in dataclasses.fields(method)} - internal <= set(KEYS)


def test_a_key_that_is_left_out_has_the_drafters_default(monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Yours(NGram):
        window: int = 7

    monkeypatch.setitem(METHODS, "yours", Yours)
    monkeypatch.setitem(config_keys.KEYS, "window", config_keys.Key("window", 7, "works", ""))
    window = lambda **given: ngram(method="yours", **given).window
    assert (window(), window(window=None), window(window=3)) == (7, 7, 3)


HYBRID = {
    "method": "hybrid",
    "parts": [
        {"method": "ngram", "num_speculative_tokens": 3},
        {"model": "draft", "num_speculative_tokens": 2},
    ],
}


def test_the_parts_of_a_hybrid_are_configs():
    build = lambda **more: config.read(HYBRID | more).drafter((None, tiny.DRAFT_CONFIG), TARGET)
    assert build().parts[0] == NGram(3)
    assert build().parts[1].num_speculative_tokens == 2 and build().combine == "merge"
    assert build(combine="choose").combine == "choose"
    assert config.read(HYBRID | {"rejection_sample_method": "block"}).rule == "block"
    assert config.read(HYBRID).needs_model and not config.read(HYBRID).needs_head


def test_draft_sample_method_belongs_to_a_part():
    given = {"method": "hybrid", "parts": [NGRAM, DRAFT | {"draft_sample_method": "greedy"}]}
    part = config.read(given).parts[1]
    assert part.drafter(tiny.DRAFT_CONFIG, TARGET).proposal == "deterministic"
    with pytest.raises(ValueError, match="draft_sample_method='greedy' applies to neither part"):
        config.read(given | {"draft_sample_method": "greedy"})


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        (
            None,
            "parts=None must be a list of two configs, a lookup method and one with a "
            "network, such as [{'method': 'suffix'}, {'method': 'eagle3', 'model': ...}].",
        ),
        ([NGRAM, {"method": "ngarm"}], "parts[1]: Unsupported speculative method: 'ngarm'"),
        (
            [NGRAM, DRAFT | {"rejection_sample_method": "block"}],
            "parts[1] has 'rejection_sample_method', but one rule judges both; give it beside "
            "'parts'.",
        ),
        (
            [NGRAM, DRAFT | {"adaptive_length": True}],
            "parts[1] must have one K for all rounds; leave adaptive_length, "
            "enable_adaptive_verification and num_speculative_tokens_per_batch_size out.",
        ),
        ([HYBRID, DRAFT], "parts[0] has the method 'hybrid', which is no part."),
        ([NGRAM, None], "parts[1] has the method 'none', which is no part."),
    ],
)
def test_invalid_parts_are_refused(parts, message):
    with pytest.raises(ValueError) as error:
        config.read({"method": "hybrid", "parts": parts})
    assert str(error.value).startswith(message)


@pytest.mark.parametrize(
    ("given", "method"),
    [
        ({"method": "ngram"}, "ngram"),
        ({"model": "ngram"}, "ngram"),
        ({"model": "[ngram]"}, "ngram"),
        ({"method": "ngram_gpu"}, "ngram"),
        ({"method": "ngram", "model": "ngram"}, "ngram"),
        ({"model": "meta-llama/Llama-3.2-1B"}, "draft_model"),
        ({"model": Path("/models/draft")}, "draft_model"),
        ({"method": "draft_model", "model": "my/eagle3-distilled"}, "draft_model"),
    ],
)
def test_the_method_is_inferred_as_in_vllm(given, method):
    assert config.read(given | {"num_speculative_tokens": 2}).method == method


@pytest.mark.parametrize(
    ("settings", "bounds"),
    [
        ({}, (5, 5)),
        ({"prompt_lookup_max": 3}, (3, 3)),
        ({"prompt_lookup_min": 7}, (7, 7)),
        ({"prompt_lookup_min": 2, "prompt_lookup_max": 4}, (2, 4)),
        ({"prompt_lookup_min": None, "prompt_lookup_max": 4}, (4, 4)),
    ],
)
def test_a_missing_bound_of_the_lookup_copies_the_other_or_is_five(settings, bounds):
    assert ngram(**settings) == NGram(4, *bounds)


def test_draft_models_sample_by_default():
    build = lambda **more: config.read(DRAFT | more).drafter(tiny.DRAFT_CONFIG, TARGET)
    assert build() == DraftModel(tiny.DRAFT_CONFIG, 4, "probabilistic", vocab_size=64)
    assert build(draft_sample_method="greedy").draft_sample_method == "greedy"


def test_a_draft_model_with_its_own_vocabulary_may_sample_unlike_in_vllm():
    build = lambda **more: config.read(DRAFT | more).drafter(tiny.DRAFT_CONFIG, TARGET)
    separate = build(use_heterogeneous_vocab=True)
    assert separate.use_heterogeneous_vocab and separate.draft_sample_method == "probabilistic"
    assert build(use_heterogeneous_vocab=False) == build(use_heterogeneous_vocab=None) == build()


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        (None, "rejection"),
        ("standard", "rejection"),
        ("probabilistic", "rejection"),
        ("strict", "match"),
        ("block", "block"),
        ("coupled", "coupled"),
    ],
)
def test_rules_have_vllms_old_and_new_names(name, rule):
    assert config.read(NGRAM | {"rejection_sample_method": name}).rule == rule


@pytest.mark.parametrize("name", config_keys.RULES_NOT_BUILT)
def test_lossy_rules_that_are_not_built_are_refused(name):
    assert "lossy and not built" in error_of(NGRAM | {"rejection_sample_method": name})


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"rejection_sample_method": "typical"}, "typical"),
        ({"rejection_sample_method": "typical", "posterior_alpha": 0.5}, verify.typical(0.09, 0.5)),
        (
            {"rejection_sample_method": "typical", "posterior_threshold": 0.2},
            verify.typical(0.2, 0.3),
        ),
        (
            {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2.5},
            verify.synthetic(length=2.5),
        ),
        (
            {
                "rejection_sample_method": "synthetic",
                "synthetic_acceptance_rates": [0.9, 0.5, 0.5, 0],
            },
            verify.synthetic([0.9, 0.5, 0.5, 0.0]),
        ),
    ],
)
def test_lossy_rules_run_by_name(settings, rule):
    read = config.read(NGRAM | settings)
    assert read.rule == rule
    plan = Plan(tiny.TARGET, read.drafter(None, tiny.TARGET), read.rule)
    assert not plan.effective_rule.lossless
    assert hash(plan) == hash(Plan(tiny.TARGET, plan.drafter, config.read(NGRAM | settings).rule))


@pytest.mark.parametrize("name", [name for name, key in KEYS.items() if key.standing != "works"])
def test_a_key_that_is_not_supported_is_accepted_at_its_default_and_raises_otherwise(name):
    assert config.read(NGRAM | {name: KEYS[name].default}) == config.read(NGRAM)
    assert config.read(NGRAM | {name: None}) == config.read(NGRAM)
    assert KEYS[name].note.rstrip(".") in error_of(NGRAM | {name: 7})


def test_keys_left_at_vllms_defaults_change_nothing():
    defaults = {name: key.default for name, key in KEYS.items() if key.default is not None}
    assert config.read(defaults | NGRAM) == config.read(NGRAM)


@pytest.mark.parametrize("method", ["ernie_mtp", "exaone_moe_mtp"])
def test_a_method_that_is_not_built_names_those_that_work(method):
    message = error_of({"method": method, "model": "some/head", "num_speculative_tokens": 3})
    assert f"method={method!r} is not built yet; these work: {WORKING}." in message


@pytest.mark.parametrize("method", ["mtp", "deepseek_mtp", "glm4_moe_mtp", "mimo_mtp"])
def test_modules_in_the_targets_files_need_no_model(method):
    for given in ({}, {"num_speculative_tokens": 2}, {"model": "some/modules"}):
        read = config.read({"method": method} | given)
        assert (read.method, read.model, read.needs_head) == ("mtp", given.get("model"), True)


@pytest.mark.parametrize("kind", ["deepseek_v3", "glm4_moe", "mimo", "mimo_mtp"])
def test_a_model_with_modules_of_its_own_drafts_with_them_as_in_vllm(kind, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
    assert config.read({"model": str(tmp_path), "num_speculative_tokens": 1}).method == "mtp"


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("yuhuili/EAGLE3-LLaMA3.1", "eagle3"),
        ("yuhuili/EAGLE-LLaMA3", "eagle"),
        ("z-lab/Qwen3-DFlash-b16", "dflash"),
        ("suffix", "suffix"),
    ],
)
def test_a_head_is_recognised_by_its_name_as_in_vllm(name, method):
    given = {"model": name, "num_speculative_tokens": 4}
    if method in METHODS:
        assert config.read(given).method == method
    else:
        assert f"method={method!r} is not built" in error_of(given)


@pytest.mark.parametrize(
    ("raw", "method"),
    [
        ({"model_type": "medusa"}, "medusa"),
        ({"model_type": "mlp_speculator"}, "mlp_speculator"),
        ({"hydra_head_arch": "mlp"}, "hydra"),
        ({"medusa_num_heads": 3}, "medusa"),
        ({"model_type": "qwen3", "dflash_config": {}}, "dflash"),
        ({"speculators_model_type": "eagle3"}, "eagle3"),
        ({"speculators_model_type": "dspark"}, "dspark"),
        ({"architectures": ["DSparkDraftModel"], "dflash_config": {}}, "dspark"),
        ({"model_type": "llama"}, "draft_model"),
    ],
)
def test_the_config_json_of_a_directory_determines_the_method(tmp_path, raw, method):
    (tmp_path / "config.json").write_text(json.dumps(raw))
    assert config.read({"model": tmp_path, "num_speculative_tokens": 2}).method == method
    named = tmp_path / "my-eagle3"  # the name has precedence, as in vLLM
    named.mkdir()
    (named / "config.json").write_text(json.dumps(raw))
    assert config.read({"model": named, "num_speculative_tokens": 2}).method == "eagle3"


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_block_drafters_accept_parallel_drafting(method):
    given = {"method": method, "model": "some/head", "num_speculative_tokens": 3}
    assert config.read(given | {"parallel_drafting": True}) == config.read(given)
    with pytest.raises(ValueError, match="parallel_drafting='yes' must be true or false"):
        config.read(given | {"parallel_drafting": "yes"})


def test_a_speculators_default_depth_is_its_n_predict():
    given = {"method": "mlp_speculator", "model": "some/speculator"}
    for tree in ({}, {"tree": "sampled", "tree_size": 6}, {"tree": "eagle2", "tree_top_k": 2}):
        assert config.read(given | tree).drafter(SPECULATOR, TARGET).max_depth == 3
    assert config.read(given | {"method": "arctic"}) == config.read(given)
    shallow = config.read(given | {"num_speculative_tokens": 2})
    assert shallow.drafter(SPECULATOR, TARGET) == MlpSpeculator(SPECULATOR, TARGET, 2)
    with pytest.raises(ValueError, match="the draft is 4 deep, but the speculator has weights"):
        config.read(given | {"num_speculative_tokens": 4}).drafter(SPECULATOR, TARGET)
    assert "`num_speculative_tokens` was not provided" in error_of(given | {"method": "eagle"})


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, dict(num_speculative_tokens=4)),
        (
            {"tree": "chain", "draft_sample_method": "greedy"},
            dict(num_speculative_tokens=4, draft_sample_method="greedy"),
        ),
        (
            {"tree": "eagle2", "tree_size": 20, "tree_top_k": 5},
            dict(num_speculative_tokens=4, tree="eagle2", tree_size=20, tree_top_k=5),
        ),
        (
            {"tree": "eagle2", "num_speculative_tokens": None, "tree_depth": 6},
            dict(tree_depth=6, tree="eagle2"),
        ),
        (
            {"tree": "sampled", "draft_sample_method": "top_plus_one"},
            dict(num_speculative_tokens=4, tree="sampled", draft_sample_method="top_plus_one"),
        ),
        (
            {"tree": "medusa_vicuna_7b_stage2", "num_speculative_tokens": None},
            dict(tree="medusa_vicuna_7b_stage2"),
        ),
        (
            {"tree": [[0], [1], [0, 0]], "num_speculative_tokens": 2},
            dict(tree=((0,), (1,), (0, 0)), num_speculative_tokens=2),
        ),
        ({"max_model_len": 64}, dict(num_speculative_tokens=4, max_length=64)),
    ],
)
def test_tree_keys_are_the_fields_of_a_drafter_with_a_head(settings, expected):
    drafter = config.read(EAGLE | settings).drafter(HEAD, TARGET)
    assert drafter == Eagle(HEAD, TARGET, **expected)
    if expected.get("tree") != "eagle2" and drafter.max_depth <= 5:
        given = EAGLE | settings | {"method": "medusa"}
        assert config.read(given).drafter(HEADS, TARGET) == Medusa(HEADS, TARGET, **expected)


def test_a_dynamic_tree_has_the_authors_size_unless_its_depth_admits_fewer_nodes():
    sizes = [
        config.read(EAGLE | {"tree": "eagle2", "num_speculative_tokens": depth})
        .drafter(HEAD, TARGET)
        .tree_size
        for depth in (1, 2, 8)
    ]
    assert sizes == [11, 60, 60]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"num_speculative_tokens": None}, "`num_speculative_tokens` was not provided"),
        ({"num_speculative_tokens": None, "tree": "eagle2"}, "tree='eagle2' needs num_speculative"),
        ({"tree": "eagle_2"}, "tree='eagle_2' is not known; use one of chain, eagle2, best_"),
        ({"tree": "mc_sim_7b_63"}, "tree='mc_sim_7b_63' is not known"),
        ({"tree": 7}, "tree=7 must be a name or a list of rank paths"),
        ({"tree": [0, 1]}, "tree=[0, 1] must be a name or a list of rank paths"),
        (
            {"tree": [[0], [0, 0], [1, 0]], "num_speculative_tokens": 2},
            "path [1, 0] of the tree has no parent",
        ),
        ({"tree": [[0], [1]]}, "num_speculative_tokens=4, but the tree of these paths has 1"),
        (
            {"tree": [[0], [1]], "num_speculative_tokens": 1, "tree_size": 4},
            "tree_size=4, but the tree of these paths has 3; leave tree_size out",
        ),
        ({"tree_size": 9}, "tree_size=9, but tree='chain' has 5"),
        ({"tree_depth": 3}, "num_speculative_tokens=4 and tree_depth=3 are the same depth"),
        ({"tree": "eagle2", "tree_size": 1}, "tree_size=1 must be 2 to 311"),
        ({"tree": "eagle2", "tree_size": 99, "tree_top_k": 3}, "tree_size=99 must be 2 to 31"),
        ({"tree": "sampled", "tree_size": 99, "tree_top_k": 2}, "tree_size=99 must be 2 to 31"),
        ({"tree": "eagle2", "tree_size": "9"}, "tree_size='9' must be a whole number"),
        ({"tree": "eagle2", "tree_top_k": 0}, "tree_top_k=0 must be a whole number of at least 1"),
        (
            {"tree": "eagle2", "draft_sample_method": "probabilistic"},
            "draft_sample_method='probabilistic' is not exact for tree='eagle2'",
        ),
        ({"tree": "sampled", "draft_sample_method": "greedy"}, "tree='sampled' asks for draws"),
        ({"draft_sample_method": "top_plus_one"}, "needs a tree with siblings"),
        (
            {
                "tree": [[0], [2]],
                "num_speculative_tokens": 1,
                "draft_sample_method": "probabilistic",
            },
            "needs a tree whose siblings have the ranks 0, 1, 2",
        ),
        ({"draft_sample_method": "gredy"}, "did you mean 'greedy'?"),
        ({"model": None}, "method='eagle' needs a 'model'"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max=3 is not used by method='eagle'"),
    ],
)
def test_tree_keys_that_do_not_fit_each_other_are_refused(settings, message):
    assert message in error_of(EAGLE | settings)


def test_methods_without_a_head_have_no_trees():
    assert "tree='eagle2' is not used by method='ngram'" in error_of(NGRAM | {"tree": "eagle2"})
    assert config.read(NGRAM | {"tree": "chain"}) == config.read(NGRAM)


@pytest.mark.parametrize(
    ("drafter", "message"),
    [
        (lambda: Medusa(HEADS, TARGET, 3, tree="eagle2"), "tree='eagle2' follows the confidence"),
        (lambda: Medusa(HEADS, TARGET, 6), "the tree is 6 deep, but there are 5 heads"),
        (
            lambda: Eagle(HEAD, TARGET, 2, tree="eagle2", tree_top_k=65, tree_size=9),
            "nodes with 65 children, but the head knows only 64 tokens",
        ),
    ],
)
def test_trees_that_a_head_cannot_grow_are_refused(drafter, message):
    with pytest.raises(ValueError, match=message):
        drafter()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("ngram", "speculative_config='ngram' is text, but not JSON"),
        ({}, f"speculative_config needs a 'method' ({WORKING}) or a 'model'."),
        (
            {"num_speculative_tokens": 4},
            "num_speculative_tokens was provided but without speculative model.",
        ),
        (
            {"method": "ngrm"},
            f"Unsupported speculative method: 'ngrm'; these work: {WORKING}; did you mean 'ngram'?",
        ),
        ({"method": 5}, "method=5 must be a name"),
        ({"method": "extract_hidden_states"}, "it drafts nothing"),
        ({"method": "cascade"}, "use 'draft_model', or 'hybrid' with ngram"),
        ({"confidence_threshold": 0.3}, "use a smaller num_speculative_tokens or adaptive_length"),
        (
            {"model": "some/draft"},
            "A speculative model was provided, but `num_speculative_tokens` was not provided",
        ),
        (
            {"method": "ngram"},
            "num_speculative_tokens must be provided with speculative model "
            "unless the draft model config contains an n_predict parameter.",
        ),
        (
            NGRAM | {"num_speculative_tokens": 0},
            "Expected num_speculative_tokens to be greater than zero (0).",
        ),
        (NGRAM | {"num_speculative_tokens": -3}, "greater than zero (-3)"),
        (NGRAM | {"num_speculative_tokens": "4"}, "num_speculative_tokens='4' must be a whole"),
        (NGRAM | {"num_speculative_tokens": 2.5}, "num_speculative_tokens=2.5 must be a whole"),
        (
            NGRAM | {"prompt_lookup_min": 5, "prompt_lookup_max": 2},
            "prompt_lookup_min=5 must be <= prompt_lookup_max=2",
        ),
        (NGRAM | {"prompt_lookup_min": 0}, "prompt_lookup_min=0 must be a whole number of at"),
        (
            NGRAM | {"tensor_parallel_size": 2},
            "'tensor_parallel_size' is not a valid argument in the speculative_config. Please pass "
            "'draft_tensor_parallel_size' instead.",
        ),
        (
            DRAFT | {"draft_tensor_parallel_size": 0},
            "draft_tensor_parallel_size=0 must be a whole number of at least 1.",
        ),
        (
            DRAFT | {"prompt_lookup_max": 3},
            "prompt_lookup_max=3 is not used by method='draft_model'",
        ),
        (NGRAM | {"model": "some/draft"}, "model='some/draft' is not used by method='ngram'"),
        (NGRAM | {"max_model_len": 64}, "max_model_len=64 is not used by method='ngram'"),
        (DRAFT | {"max_model_len": 0}, "max_model_len=0 must be a whole number of at least 1."),
        ({"method": "none", "num_speculative_tokens": 4}, "is not used by method='none'"),
        ({"method": "draft_model", "num_speculative_tokens": 4}, "needs a 'model'"),
        (DRAFT | {"model": ["a"]}, "model=['a'] must be a local directory or a hub id."),
        (
            DRAFT | {"draft_sample_method": "probabalistic"},
            "draft_sample_method='probabalistic' must be 'probabilistic' or 'greedy'; did you mean "
            "'probabilistic'?",
        ),
        (
            NGRAM | {"rejection_sample_method": "strikt"},
            "rejection_sample_method='strikt' is not known; use one of standard, probabilistic, "
            "block, strict, coupled, typical, synthetic, or the dotted path of a "
            "jspec.verify.Rule; did you mean 'strict'?",
        ),
        (NGRAM | {"rejection_sample_method": ["block"]}, "is not known"),
        (
            NGRAM | {"num_spec_tokens": 4},
            "speculative_config has no key 'num_spec_tokens'; did you mean "
            "'num_speculative_tokens'?",
        ),
        (NGRAM | {"prompt_lookup_mx": 4}, "did you mean 'prompt_lookup_max'?"),
        (
            DRAFT | {"use_heterogeneous_vocab": "yes"},
            "use_heterogeneous_vocab='yes' must be true or false.",
        ),
        (
            NGRAM | {"use_heterogeneous_vocab": True},
            "use_heterogeneous_vocab=True is not used by method='ngram'",
        ),
        (
            HYBRID | {"enable_adaptive_verification": True},
            "enable_adaptive_verification=True is not used by method='hybrid'",
        ),
        (
            NGRAM | {"synthetic_acceptance_length": 2.0},
            "synthetic_acceptance_rates / synthetic_acceptance_length are only valid with "
            "rejection_sample_method='synthetic'.",
        ),
        (
            NGRAM | {"posterior_alpha": 0.3},
            "posterior_threshold / posterior_alpha are only valid "
            "with rejection_sample_method='typical'.",
        ),
        (
            SYNTHETIC,
            "rejection_sample_method='synthetic' requires exactly one of "
            "synthetic_acceptance_rates or synthetic_acceptance_length.",
        ),
        (
            SYNTHETIC
            | {"synthetic_acceptance_length": 2, "synthetic_acceptance_rates": [1, 1, 0, 0]},
            "requires exactly one of",
        ),
        (
            SYNTHETIC | {"synthetic_acceptance_rates": [1, 1]},
            "synthetic_acceptance_rates must have length 4, got 2.",
        ),
        (
            SYNTHETIC | {"synthetic_acceptance_rates": [1, 1, 0.5, -0.5]},
            "synthetic_acceptance_rates entries must be in [0, 1], got [1.0, 1.0, 0.5, -0.5].",
        ),
        (
            SYNTHETIC | {"synthetic_acceptance_rates": [0.5, 0.6, 0.5, 0.5]},
            "synthetic_acceptance_rates must be non-increasing, got [0.5, 0.6, 0.5, 0.5].",
        ),
        (SYNTHETIC | {"synthetic_acceptance_rates": "1100"}, "must be a list of numbers"),
        (
            SYNTHETIC | {"synthetic_acceptance_length": 5.5},
            "synthetic_acceptance_length must be in [1, 5], got 5.5.",
        ),
        (SYNTHETIC | {"synthetic_acceptance_length": True}, "must be a number"),
        (
            NGRAM | {"rejection_sample_method": "typical", "posterior_threshold": 2},
            "posterior_threshold=2 must be in [0, 1]",
        ),
        (
            NGRAM | {"rejection_sample_method": "typical", "posterior_alpha": -1},
            "posterior_alpha=-1 must be a number of at least 0",
        ),
    ],
)
def test_errors_name_the_cause_and_the_remedy(given, message):
    assert message in error_of(given)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"max_model_len": 300},
            "speculative_max_model_len=300 cannot be larger than draft_max_model_len=256",
        ),
        (
            {"max_model_len": 250},
            "speculative_max_model_len=250 cannot be larger than target_max_model_len=200",
        ),
    ],
)
def test_max_model_len_is_within_the_limits_of_both_models(settings, message):
    with pytest.raises(ValueError, match=message):
        config.check_lengths(config.read(DRAFT | settings), 256, 200)


def test_a_draft_model_may_have_a_lower_limit_than_the_target():
    config.check_lengths(config.read(DRAFT | {"max_model_len": 100}), 128, 256)
