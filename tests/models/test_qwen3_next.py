"""Qwen3-Next's config.json: which blocks are read, and what is read of a published model."""

import json

import pytest

from jspec.checkpoints import families
from jspec.checkpoints.heads import mtp as mtp_format
from tests.checkpoints.test_families import read

# As published.
PUBLISHED = """
{"architectures": ["Qwen3NextForCausalLM"], "attention_bias": false, "attention_dropout": 0,
 "bos_token_id": 151643, "decoder_sparse_step": 1, "eos_token_id": 151645,
 "full_attention_interval": 4, "head_dim": 256, "hidden_act": "silu", "hidden_size": 2048,
 "initializer_range": 0.02, "intermediate_size": 5120, "linear_conv_kernel_dim": 4,
 "linear_key_head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
 "linear_value_head_dim": 128, "max_position_embeddings": 262144, "mlp_only_layers": [],
 "model_type": "qwen3_next", "moe_intermediate_size": 512, "norm_topk_prob": true,
 "num_attention_heads": 16, "num_experts": 512, "num_experts_per_tok": 10,
 "num_hidden_layers": 48, "num_key_value_heads": 2, "output_router_logits": false,
 "partial_rotary_factor": 0.25, "rms_norm_eps": 1e-06, "rope_scaling": null,
 "rope_theta": 5000000, "router_aux_loss_coef": 0.001, "shared_expert_intermediate_size": 512,
 "tie_word_embeddings": false, "use_cache": true, "use_sliding_window": false,
 "vocab_size": 151936}
"""


def test_of_a_published_qwen3_next_the_modules_are_read_and_the_target_is_refused():
    raw = json.loads(PUBLISHED)
    with pytest.raises(ValueError, match="layer_types: 36 of 48 layers are linear_attention"):
        families.find(raw).read(raw)
    modules = mtp_format.config_for(mtp_format.target_of(raw), "qwen3_next")
    assert (modules.capture_layers, modules.network.rope_dim) == ((48,), 64)
    shapes = {
        name.removeprefix("mtp."): shape
        for entry in mtp_format.table(modules, "qwen3_next")
        for name, shape in zip(entry.names, entry.shapes, strict=True)
    }
    attention, mlp = "layers.0.self_attn", "layers.0.mlp"
    assert len(shapes) == 4 + 8 + 5 + 3 * 512
    assert shapes["fc.weight"] == (2048, 4096)
    assert shapes[f"{attention}.q_proj.weight"] == (8192, 2048)
    assert shapes[f"{attention}.o_proj.weight"] == (2048, 4096)
    assert shapes[f"{mlp}.shared_expert_gate.weight"] == (1, 2048)
    assert shapes[f"{mlp}.experts.511.down_proj.weight"] == (2048, 512)


def test_blocks_of_qwen3_next_that_do_not_attend_are_refused_by_name():
    mixed = ["full_attention", "linear_attention", "linear_attention"]
    with pytest.raises(ValueError, match="layer_types: 2 of 3 layers are linear_attention"):
        read("qwen3_next", layer_types=mixed)
    with pytest.raises(ValueError, match="layer_types: 2 of 3 layers are linear_attention"):
        read("qwen3_next", layer_types=None, full_attention_interval=3)
    with pytest.raises(ValueError, match="layer_types: 3 of 3 layers are linear_attention"):
        read("qwen3_next", layer_types=None)
    plain = read("qwen3_next", layer_types=None, full_attention_interval=1)
    assert plain == read("qwen3_next")
    dense = read("qwen3_next", num_experts=0, partial_rotary_factor=0.5)
    assert (dense.moe, dense.rotary_dim, dense.qkv_sizes) == (None, 128, (2048, 512))
    raw = families.describe(dense)
    assert raw["model_type"] == "qwen3_next"
    assert families.find(raw).read(raw) == dense
