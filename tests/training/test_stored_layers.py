"""Checkpoints and records of runs have the form of the first runs, whatever parts a layer has."""

import jax
import pytest

from jspec.models import decoder
from jspec.models.blocks.experts import Experts
from jspec.models.blocks.latent_attention import LatentAttention
from jspec.models.heads.medusa import MedusaConfig
from tests import networks, tiny
from training.util.stored_layers import config_record, from_stored, to_stored

WHOLE = networks.changed(
    tiny.TARGET.config,
    num_layers=1,
    qkv_bias=True,
    output_bias=True,
    mlp_bias=True,
    qk_norm=True,
)
LATENT = LatentAttention(4, 16, 12, 8, 4, 8)
EXPERTS = Experts(4, 2, 8, 8)
# Paths of arrays in a checkpoint of version 0.2.0, in the order of its digests.
PATHS = {
    "whole": "attention_norm qkv output mlp_norm gate_up down qkv_bias output_bias gate_up_bias "
    "down_bias q_norm k_norm",
    "latent": "attention_norm output mlp_norm gate_up down mla/down mla/q_up mla/kv_norm mla/kv_up "
    "mla/q_norm",
    "experts": "attention_norm qkv output mlp_norm gate_up down moe/router moe/gate_up moe/down "
    "moe/bias",
}
CONFIGS = {
    "whole": WHOLE,
    "latent": networks.changed(tiny.DRAFT_CONFIG, mixer=LATENT),
    "experts": networks.changed(tiny.DRAFT_CONFIG, feed_forward=EXPERTS),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_arrays_of_layers_have_the_paths_and_the_order_of_the_first_runs(name):
    weights = decoder.init_params(jax.random.key(0), CONFIGS[name])
    stored = to_stored({"params": weights})
    paths = [
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, _ in jax.tree_util.tree_flatten_with_path(stored)[0]
    ]
    layers = [path for path in paths if "layers" in path]
    assert layers == [f"params/layers/0/{path}" for path in PATHS[name].split()]
    again = from_stored(stored)["params"]
    assert jax.tree.structure(again) == jax.tree.structure(weights)
    assert all(a is b for a, b in zip(*map(jax.tree.leaves, (again, weights)), strict=True))


def test_a_record_holds_the_text_of_a_config_that_version_0_2_0_wrote():
    config = networks.changed(tiny.TARGET.config, qk_norm=True, windows=(None, 9), norm_eps=1e-5)
    assert config_record(config) == (
        "DecoderConfig(vocab_size=64, hidden_size=32, intermediate_size=64, num_layers=2, "
        "num_heads=4, num_kv_heads=2, head_dim=8, max_positions=512, norm_eps=1e-05, "
        "rope=RopeConfig(theta=10000.0, kind='default', factor=1.0, original_length=0, "
        "low_freq_factor=1.0, high_freq_factor=4.0, beta_fast=32.0, beta_slow=1.0, truncate=True, "
        "amplitude=1.0, short_factors=(), long_factors=()), tie_embeddings=False, qkv_bias=False, "
        "output_bias=False, mlp_bias=False, qk_norm=True, windows=(None, 9), "
        "cache_dtype='float32', activation_dtype='float32', attention=None, rotary_dim=None, "
        "mla=None, moe=None)"
    )
    medusa = MedusaConfig(3, 1, 32, 64, 64, (2,), num_outputs=3)
    assert config_record(medusa) == repr(medusa)
    assert config_record(CONFIGS["experts"]) == repr(CONFIGS["experts"])  # not trained
