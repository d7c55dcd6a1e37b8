"""DFlash and DSpark heads in files: exact round trips, and named errors."""

import dataclasses
import re

import jax
import numpy as np
import pytest

from jspec.checkpoints import loading
from jspec.checkpoints.heads import head_files
from tests import tiny
from tests.checkpoints import directories
from tests.drafters import dflashes

TARGET = tiny.TARGET.config
CONFIGS = dflashes.CONFIGS


def save(directory, name, layout=None, **options):
    head = CONFIGS[name], dflashes.random_params(name)
    return directories.save(directory, head, TARGET, layout or dflashes.LAYOUTS[name], **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", CONFIGS)
def test_saved_heads_are_loaded_again_as_they_were(tmp_path, name, dtype):
    config, params = save(tmp_path / "a", name, dtype=dtype)
    head = head_files.load_head(tmp_path / "a", TARGET)
    kind = "dspark" if name in dflashes.SPARKS else "dflash"
    assert (head.kind, head.layout) == (kind, dflashes.LAYOUTS[name])
    network = dataclasses.replace(
        head.config.network, cache_dtype="float32", activation_dtype="float32"
    )
    assert dataclasses.replace(head.config, network=network) == config
    assert jax.tree.structure(head.params) == jax.tree.structure(params)
    for ours, theirs in zip(*map(jax.tree.leaves, (head.params, params)), strict=True):
        theirs = theirs.astype(dtype) if theirs.dtype == np.float32 else theirs
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
    directories.assert_saved_again(tmp_path / "a", TARGET)


def test_names_and_keys_are_those_of_the_authors(tmp_path):
    save(tmp_path, "sliding")
    tensors, raw = directories.read(tmp_path)
    assert {
        "fc.weight",
        "hidden_norm.weight",
        "norm.weight",
        "layers.1.self_attn.q_norm.weight",
    } < set(tensors)
    assert not {"lm_head.weight", "embed_tokens.weight"} & set(tensors)
    assert tensors["fc.weight"].shape == (32, 32)
    wanted = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "block_size": 4,
        "num_target_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 7,
        "use_sliding_window": True,
        "dflash_config": {"mask_token_id": 63, "target_layer_ids": [0]},
    }
    assert raw | wanted == raw


def test_the_speculators_layout_holds_the_shared_weights(tmp_path):
    target = tiny.params().target
    save(tmp_path, "dflash", "dflash-speculators", embedding=target.embedding, output=target.head)
    tensors, raw = directories.read(tmp_path)
    np.testing.assert_array_equal(tensors["embed_tokens.weight"], target.embedding)
    np.testing.assert_array_equal(tensors["lm_head.weight"], target.head.T)
    wanted = {
        "speculators_model_type": "dflash",
        "architectures": ["DFlashSpeculator"],
        "block_size": 5,
        "aux_hidden_state_layer_ids": [0, 1],
        "mask_token_id": 63,
        "draft_vocab_size": 64,
        "sample_from_anchor": False,
    }
    assert raw | wanted == raw
    proposal = raw["speculators_config"]["proposal_methods"][0]
    assert proposal["speculative_tokens"] == 4
    head = loading.sharing(head_files.load_head(tmp_path, TARGET), target.embedding)
    assert head.config.separate_head and not head.config.separate_embedding


def test_keys_of_dspark_are_those_of_its_trainers(tmp_path):
    save(tmp_path / "a", "gated")
    tensors, raw = directories.read(tmp_path / "a")
    assert {
        "markov_head.markov_w1.weight",
        "markov_head.markov_w2.weight",
        "markov_head.gate_proj.weight",
        "confidence_head.proj.bias",
    } < set(tensors)
    assert tensors["confidence_head.proj.weight"].shape == (1, 32)
    assert raw["architectures"] == ["DSparkDraftModel"]
    wanted = {
        "projector_type": "dspark",
        "markov_rank": 5,
        "markov_head_type": "gated",
        "enable_confidence_head": True,
        "confidence_head_with_markov": False,
        "sample_from_anchor": False,
        "attention_mode": "gqa",
    }
    assert raw["dflash_config"] | wanted == raw["dflash_config"]
    save(tmp_path / "b", "rnn")
    tensors, raw = directories.read(tmp_path / "b")
    assert tensors["markov_head.joint_proj.weight"].shape == (12, 40)
    assert raw["architectures"] == ["DSparkSpeculator"] and raw["sample_from_anchor"]
    assert raw["speculators_model_type"] == "dspark" and raw["markov_rank"] == 4
    assert raw["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 4


def _without(name):
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("name", "change", "keys", "message"),
    [
        (
            "dflash",
            _without("layers.1.mlp.up_proj.weight"),
            {},
            "1 missing: layers.1.mlp.up_proj.weight",
        ),
        ("dflash", lambda t: t.update(extra=t["norm.weight"]), {}, "1 unexpected: extra"),
        (
            "dflash",
            lambda t: t.update({"fc.weight": t["fc.weight"][:, :32]}),
            {},
            "fc.weight is float32[32, 32], not [32, 64]",
        ),
        ("dflash", None, {"vocab_size": 99}, "a vocabulary of 99 where the target has 64"),
        ("dflash", None, {"num_target_layers": 9}, "a number of layers of 9 where the target has"),
        ("dflash", None, {"block_size": 1}, "block_size must be an integer of at least 2, got 1"),
        ("dflash", None, {"mask_token_id": 3}, "mask_token_id is 3 in config.json and 63 in its"),
        (
            "dflash",
            None,
            {"dflash_config": {"mask_token_id": 63, "target_layer_ids": [1]}},
            "reads hidden states [2], which must ascend and lie below the target's 2 layers",
        ),
        (
            "dflash",
            None,
            {"dflash_config": {"mask_token_id": 63, "attention_sink_bias": True}},
            "not supported: attention_sink_bias=True",
        ),
        (
            "dflash",
            None,
            {"dflash_config": {"mask_token_id": 63, "projector_type": "domino"}},
            "not supported: projector_type='domino'",
        ),
        (
            "dflash",
            None,
            {"dflash_config": {"target_layer_ids": [-1, 0]}},
            "mask_token_id must be an integer",
        ),
        (
            "gated",
            _without("markov_head.gate_proj.bias"),
            {},
            "1 missing: markov_head.gate_proj.bias",
        ),
        ("vanilla", None, {"markov_rank": 9}, "markov_rank is 9 in config.json and 6 in its"),
        ("rnn", None, {"markov_rank": 9}, "markov_rank is 9, but the tensors are those of 4"),
        ("rnn", None, {"markov_head_type": "gated"}, "'gated', but the tensors are those of 'rnn'"),
        ("reduced", None, {"speculators_model_type": "dflash2"}, "'dflash2' is not supported"),
        ("reduced", _without("d2t"), {}, "but the file has no d2t"),
        ("reduced", None, {"aux_hidden_state_layer_ids": None}, "must be a list of whole numbers"),
    ],
)
def test_files_that_contradict_themselves_are_refused(tmp_path, name, change, keys, message):
    save(tmp_path, name)
    directories.edit(tmp_path, change, **keys)
    with pytest.raises(ValueError, match=re.escape(message)):
        head_files.load_head(tmp_path, TARGET)


@pytest.mark.parametrize(
    ("name", "layout", "changes", "message"),
    [
        ("reduced", "dflash", {}, "a separate embedding or output matrix"),
        ("dflash", "dflash-speculators", {}, "a head without an output matrix"),
        ("dflash", "dflash", {"causal": (True, False)}, "causal layers beside others"),
        (
            "reduced",
            "dflash-speculators",
            {"causal": (True,)},
            "causal layers, except sliding ones",
        ),
    ],
)
def test_a_layout_that_cannot_express_a_head_is_refused(tmp_path, name, layout, changes, message):
    config = dataclasses.replace(CONFIGS[name], **changes)
    with pytest.raises(ValueError, match=message):
        head_files.save_head(
            tmp_path / "head",
            config,
            dflashes.random_params(name),
            TARGET,
            layout=layout,
            target_name="someone/model",
        )
    assert not (tmp_path / "head").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_size": 1}, "block_size=1 must be at least 2"),
        ({"mask_token": 64}, "mask_token=64 must be one of the target's 64 ids"),
        ({"causal": (True,)}, "a bool for each of 2 layers"),
        ({"capture_layers": ()}, "must name one hidden state or more"),
        ({"target_hidden_size": 48}, "cannot share the target's embedding or output matrix"),
        ({"target_vocab_size": 80}, "needs an output matrix of its own"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(CONFIGS["dflash"], **changes)
