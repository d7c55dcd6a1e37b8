"""LLM with heads: loaded from files, drafting trees, and refused if they do not fit."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

import jspec
from jspec.checkpoints import loading
from jspec.checkpoints.heads import head_files
from jspec.cli import demo
from jspec.models.heads import arctic, dflash, dspark, eagle, hydra, medusa, mlp_speculator
from tests import llm_fixtures, networks

TARGET = llm_fixtures.TARGET
EAGLE = eagle.EagleConfig(
    TARGET, 1, (1,), TARGET.hidden_size, TARGET.vocab_size, separate_embedding=True
)
MEDUSA = medusa.MedusaConfig(
    3, 1, TARGET.hidden_size, TARGET.vocab_size, TARGET.vocab_size, (1,), 3
)
_SIZES = (TARGET.hidden_size, 24, TARGET.vocab_size, (1,))
# The class of each kind, and the name of its method.
HEADS = {
    "eagle": (eagle, EAGLE, "eagle"),
    "medusa": (medusa, MEDUSA, "medusa"),
    "mlp": (mlp_speculator, mlp_speculator.MlpSpeculatorConfig(3, *_SIZES), "mlp_speculator"),
    "lstm": (arctic, arctic.LstmSpeculatorConfig(3, *_SIZES), "mlp_speculator"),
    "hydra": (
        hydra,
        hydra.HydraConfig(2, 1, TARGET.hidden_size, TARGET.vocab_size, (1,), network=TARGET),
        "hydra",
    ),
}
NETWORK = networks.changed(TARGET, num_layers=1, qk_norm=True, windows=())
HEADS["dflash"] = (
    dflash,
    dflash.DFlashConfig(NETWORK, (0,), TARGET.hidden_size, TARGET.vocab_size, 4, 3),
    "dflash",
)
SPARK = dspark.SparkConfig(8, "gated", confidence=True, confidence_sees_token=True)
HEADS["dspark"] = (dflash, dataclasses.replace(HEADS["dflash"][1], spark=SPARK), "dspark")
PROMPTS = ["the quick", "def add(x", "grüße", "over the lazy dog"]
GREEDY = jspec.SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True)


@functools.cache
def head(root, kind):
    """The directory of a random head; the EAGLE head brings a copy of the target's embedding."""
    module, config, _ = HEADS[kind]
    shapes = jax.eval_shape(lambda: module.init_params(jax.random.key(0), config))
    rng = np.random.default_rng(3)
    params = jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), shapes)
    if kind == "eagle":
        embedding = llm_fixtures.loaded(root)["target"].params.embedding
        params = params.replace(embedding=np.asarray(embedding))
    directory = root / f"head-{kind}"
    head_files.save_head(directory, config, params, TARGET, target_name="someone/target")
    return directory


def open_llm(root, kind, **settings):
    config = {"method": HEADS[kind][2], "model": str(head(root, kind))} | settings
    return jspec.LLM(llm_fixtures.loaded(root)["target"], config)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("eagle", {"num_speculative_tokens": 3, "tree": "eagle2", "tree_size": 8, "tree_top_k": 3}),
        ("medusa", {"tree": [[0], [1], [0, 0], [0, 1], [1, 0]]}),
        ("mlp", {}),
        ("lstm", {"method": None, "tree": "sampled", "tree_size": 6, "num_speculative_tokens": 3}),
        ("hydra", {"method": None, "tree": [[0], [1], [0, 0], [0, 1]]}),
        ("dflash", {"method": None, "tree": "best_first", "tree_size": 8, "tree_depth": 3}),
        pytest.param(
            "dspark", {"num_speculative_tokens": 3, "dspark_draft_topk": 8}, marks=pytest.mark.slow
        ),
    ],
)
def test_greedy_text_of_a_head_from_its_files_is_that_of_plain_decoding(root, kind, settings):
    results = open_llm(root, kind, **settings).generate(PROMPTS, GREEDY)
    plain = jspec.LLM(llm_fixtures.loaded(root)["target"]).generate(PROMPTS, GREEDY)
    texts = lambda outputs: [output.outputs[0].token_ids for output in outputs]
    assert texts(results) == texts(plain)
    drafted = results[0].outputs[0].speculative_decoding_stats["num_draft_tokens"]
    assert drafted > 16


def test_a_head_with_the_targets_embedding_shares_it(root):
    target = llm_fixtures.loaded(root)["target"]
    separate = loading.load_head(head(root, "eagle"), TARGET)
    assert separate.config.separate_embedding
    shared = loading.sharing(separate, target.params.embedding)
    assert not shared.config.separate_embedding and shared.params.embedding is None
    other = loading.sharing(separate, target.params.embedding + 1)
    assert other is separate


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (
            "eagle",
            {"method": "eagle3", "num_speculative_tokens": 2},
            "holds a head of method 'eagle', not 'eagle3'",
        ),
        ("medusa", {"num_speculative_tokens": 4}, "the tree is 4 deep, but there are 3 heads"),
        ("medusa", {"num_speculative_tokens": 2, "tree": "eagle2"}, "and this one does not"),
        ("mlp", {"num_speculative_tokens": 4}, "has weights for n_predict=3 tokens"),
        ("lstm", {"num_speculative_tokens": 4}, "must be divisible by n_predict=3"),
        ("hydra", {"num_speculative_tokens": 3}, "the tree is 3 deep, but there are 2 heads"),
        ("dflash", {"num_speculative_tokens": 4}, "a block of 4 slots drafts 3 tokens"),
        ("hydra", {}, "`num_speculative_tokens` was not provided"),
        (
            "eagle",
            {"num_speculative_tokens": 2, "max_model_len": 300},
            "speculative_max_model_len=300 cannot be larger than",
        ),
    ],
)
def test_a_head_that_does_not_fit_is_refused_before_the_target_is_loaded(
    root, kind, settings, message, monkeypatch
):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match=message):
        open_llm(root, kind, **settings)


def test_a_head_for_another_target_is_refused(root, tmp_path):
    config = json.loads((head(root, "eagle") / "config.json").read_text())
    weights = (head(root, "eagle") / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(weights)
    (tmp_path / "config.json").write_text(json.dumps(config | {"vocab_size": 999}))
    with pytest.raises(ValueError, match="999"):
        jspec.LLM(
            llm_fixtures.loaded(root)["target"],
            {"method": "eagle", "model": str(tmp_path), "num_speculative_tokens": 2},
        )


@pytest.mark.parametrize("kind", HEADS)
def test_a_loaded_head_for_a_target_of_another_width_is_refused(root, kind):
    loaded = loading.load_head(head(root, kind), TARGET)
    assert loading.load_head(loaded, TARGET) is loaded
    others = [{"hidden_size": 64}, {"vocab_size": 999}]
    if max(loaded.config.capture_layers):  # the embeddings are hidden states of any target
        others.append({"layers": ()})
    for other in others:
        with pytest.raises(ValueError, match="made for another target"):
            loading.load_head(loaded, dataclasses.replace(TARGET, **other))


def test_an_eagle_head_that_is_taken_for_a_draft_model_is_recognised():
    settings = {"model": str(demo.ASSETS / "eagle1"), "num_speculative_tokens": 3}
    with pytest.raises(ValueError, match=r"looks like an EAGLE head; is method='eagle' or"):
        jspec.LLM(demo.ASSETS / "target", settings)
