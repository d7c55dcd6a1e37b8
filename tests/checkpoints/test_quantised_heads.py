"""Draft heads with quantised targets: modules in the files of these, and heads of their own."""

import dataclasses

import jax
import numpy as np
import pytest

import jspec
from jspec.checkpoints import checkpoint, stitching
from jspec.checkpoints.heads import head_files, mtp
from jspec.core.weights import Weight, as_array
from jspec.models import decoder
from jspec.models.blocks.experts import Experts
from jspec.models.blocks.latent_attention import LatentAttention
from jspec.models.heads import eagle
from jspec.models.heads import mtp as modules
from tests import networks
from tests.checkpoints import quantised_writing
from tests.checkpoints.quantised_writing import CASES
from tests.families import models

GREEDY = jspec.SamplingParams(temperature=0, max_tokens=16, ignore_eos=True, detokenize=False)
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 7]]
SIZES = dict(vocab_size=64, hidden_size=64, num_layers=2, max_positions=256)
PLAIN = networks.build(intermediate_size=64, num_heads=4, num_kv_heads=2, head_dim=16, **SIZES)
DEEPSEEK = networks.changed(
    PLAIN,
    mixer=LatentAttention(
        num_heads=4, kv_rank=32, q_rank=32, nope_dim=16, rope_dim=16, value_dim=16
    ),
    feed_forward=Experts(num_experts=4, experts_per_token=2, intermediate_size=32, shared_size=32),
)


def saved(folder, config):
    params = networks.loud(decoder.init_params(jax.random.key(0), config))
    checkpoint.save_pretrained(folder, config, params)
    return folder


def texts(directory, config=None):
    settings = dict(max_num_seqs=2, max_model_len=64, block_size=16, num_gpu_blocks_override=8)
    answers = jspec.LLM(str(directory), config, **settings).generate(PROMPTS, GREEDY)
    return [each.outputs[0].token_ids for each in answers]


def is_weight(leaf):
    return isinstance(leaf, Weight)


def is_linear(key):
    kept = "norm", "in_proj_a", "in_proj_b", "input_proj"
    return ("proj" in key or key.endswith("fc.weight")) and not any(part in key for part in kept)


def assert_equal_and_quantised(quantised, plain, least):
    """Compare the weights of two heads, of which the first has ``least`` or more quantised."""
    leaves = jax.tree.leaves(quantised.params, is_leaf=is_weight)
    assert sum(map(is_weight, leaves)) >= least
    for actual, expected in zip(leaves, jax.tree.leaves(plain.params), strict=True):
        np.testing.assert_array_equal(as_array(actual), as_array(expected))


@pytest.mark.parametrize(
    ("kind", "case", "least"),
    [("deepseek", "fp8 blocks", 6), ("qwen3_5_text", "fp8 tensors", 4), ("mimo", "w8a16", 4)],
)
def test_modules_in_quantised_files_are_quantised_and_draft(tmp_path, kind, case, least):
    configs = {"deepseek": DEEPSEEK, "mimo": PLAIN}
    plain = models.saved(kind, tmp_path) if kind not in configs else tmp_path / kind
    if kind in configs:
        saved(plain, configs[kind])
    target = checkpoint.load_config(plain)[0]
    config = mtp.config_for(target, mtp.natural_layout(target))
    weights = networks.loud(modules.init_params(jax.random.key(1), config))
    stitching.stitch(tmp_path / "stitched", plain, config, weights)
    quantised, plain = quantised_writing.write_both(
        tmp_path / "stitched", tmp_path, CASES[case], is_linear
    )
    heads = [head_files.load_head(each, target, kind="mtp") for each in (quantised, plain)]
    assert_equal_and_quantised(*heads, least)
    assert head_files.load_head(quantised, None).config == heads[0].config
    assert texts(quantised, {"method": "mtp", "num_speculative_tokens": 2}) == texts(quantised)


@pytest.mark.parametrize("is_quantised", [True, False])
def test_a_head_beside_a_quantised_target_may_be_quantised_itself(tmp_path, is_quantised):
    """The config.json of a head of floats may repeat the target's quantisation."""
    target = quantised_writing.write_both(
        saved(tmp_path / "target", PLAIN), tmp_path, CASES["w4a16"], is_linear
    )[0]
    config = eagle.EagleConfig(PLAIN, 3, (0, 1), 64, 64, separate_head=True)
    config = dataclasses.replace(config, network=networks.changed(PLAIN, num_layers=1))
    params = networks.loud(eagle.init_params(jax.random.key(3), config))
    head_files.save_head(tmp_path / "head", config, params, PLAIN, target_name="target")
    (folder := tmp_path / "pair").mkdir()
    heads = quantised_writing.write_both(
        tmp_path / "head", folder, CASES["w8a8 fp8"], lambda key: is_quantised and is_linear(key)
    )
    both = [head_files.load_head(each, PLAIN) for each in heads]
    assert_equal_and_quantised(*both, 5 if is_quantised else 0)
    drafts = {"method": "eagle3", "model": str(heads[0]), "num_speculative_tokens": 3}
    assert texts(target, drafts) == texts(target)


@pytest.mark.parametrize("packed", ["fc.weight", "midlayer.self_attn.q_proj.weight"])
def test_heads_with_packed_weights_are_refused_by_name(tmp_path, packed):
    config = eagle.EagleConfig(networks.changed(PLAIN, num_layers=1), 3, (0, 1), 64, 64)
    params = eagle.init_params(jax.random.key(3), config)
    head_files.save_head(tmp_path / "head", config, params, PLAIN)
    folder = quantised_writing.write_both(
        tmp_path / "head", tmp_path, CASES["w4a16"], lambda key: key == packed
    )[0]
    assert packed not in quantised_writing.files_of(folder)[1]
    message = r"a draft head with packed weights \(.*weight_packed, …\), .* in fp8 or in w8a8"
    with pytest.raises(ValueError, match=message):
        head_files.load_head(folder, PLAIN)
