"""The families that load: checkpoints, heads, and the tiny models that the tests compare.

``python -m tests.families.docs_table`` prints the table of docs/compatibility.md.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

TRAINED = 32  # trained length of rotary scalings: longer than the prompts, shorter than the texts

# Sizes of the tiny models, under the keys of config.json.
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A family of ``jspec.checkpoints.families``.

    Attributes:
      checkpoints: public ones, for the documentation.
      heads: heads for them, for the documentation.
      features: features of the network, for the documentation.
      cases: tiny models to compare with transformers: names, and keys of config.json beside
        ``SIZES``. The first also runs through the engine. None of them for a family that
        transformers lacks.
      compared: for the documentation, if there are no cases.
      whole: the ``model_type`` that transformers has in place of this text part, and the other keys
        of its config.json; None for a text part that transformers has as a model.
    """

    checkpoints: str
    heads: str
    features: str
    cases: Mapping[str, dict[str, Any]]
    compared: str = ""
    whole: tuple[str, dict[str, Any]] | None = None


def _rope(kind: str, **more: Any) -> dict[str, Any]:
    """Return keys of config.json for a rotary scaling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


_LONGROPE = {
    "short_factor": [1.0 + 0.05 * j for j in range(8)],
    "long_factor": [2.0 + 0.3 * j for j in range(8)],
    "original_max_position_embeddings": TRAINED,
}
_LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
_YARN = {"factor": 4.0, "original_max_position_embeddings": TRAINED}
_EXPERTS = {
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "routed_scaling_factor": 1.7,
    "num_hidden_layers": 3,
}
_SOFTMAX = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
}

_HYBRID = {
    "num_hidden_layers": 3,
    "head_dim": 32,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 12,
}
_SHARED_EXPERT = {
    "num_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 24,
}

ROWS = {
    "llama": Row(
        checkpoints="Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2",
        heads="EAGLE, EAGLE-3, Medusa, Hydra, MLP speculators, DFlash",
        features="every rotary scaling; biases",
        cases={
            "llama": _rope("llama3", **_LLAMA3),
            "llama-plain": {"num_key_value_heads": 4},
            "llama-linear-biases-tied": _rope("linear", factor=3.0)
            | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            "llama-dynamic": _rope("dynamic", factor=2.5) | {"max_position_embeddings": TRAINED},
            "llama-yarn": _rope("yarn", **_YARN, beta_fast=16.0, beta_slow=0.5, truncate=False)
            | {"num_key_value_heads": 1},
            "llama-longrope": _rope("longrope", **_LONGROPE),
        },
    ),
    "mistral": Row(
        checkpoints="Mistral 7B, Mistral Nemo, Mistral Small",
        heads="EAGLE, EAGLE-3",
        features="a window, whose pages are freed",
        cases={"mistral": {"sliding_window": 6, "head_dim": 32}},
    ),
    "qwen2": Row(
        checkpoints="Qwen2, Qwen2.5, QwQ",
        heads="EAGLE, EAGLE-3",
        features="windows by layer",
        cases={
            "qwen2": _rope("yarn", **_YARN, mscale=1.0, mscale_all_dim=0.7)
            | {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
            | {"tie_word_embeddings": True},
        },
    ),
    "qwen3": Row(
        checkpoints="Qwen3 0.6B to 32B",
        heads="EAGLE-3, P-EAGLE, DFlash, DSpark",
        features="norms of query and key heads",
        cases={
            "qwen3": {
                "head_dim": 32,
                "tie_word_embeddings": True,
                "use_sliding_window": True,
                "sliding_window": 4,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        },
    ),
    "qwen3_5_text": Row(
        checkpoints="Qwen3.5, Qwen3.6; their text part",
        heads="MTP in its files",
        features="gated delta rule, short convolution; gated attention, partial rotation",
        cases={"qwen3_5_text": _HYBRID},
    ),
    "qwen3_5_moe_text": Row(
        checkpoints="Qwen3.5-35B-A3B, 122B-A10B, 397B-A17B; their text part",
        heads="MTP in its files",
        features="`qwen3_5_text` with experts, of which one is shared and has a gate",
        cases={
            "qwen3_5_moe_text": _HYBRID
            | _SHARED_EXPERT
            | {"linear_num_key_heads": 4, "attention_bias": True, "tie_word_embeddings": True},
        },
    ),
    "qwen3_next": Row(
        checkpoints="Qwen3-Next-80B-A3B, Qwen3-Coder-Next",
        heads="MTP in its files",
        features="`qwen3_5_moe_text` with columns in the order of key heads; plain MLPs by layer",
        cases={"qwen3_next": _HYBRID | _SHARED_EXPERT | {"mlp_only_layers": [1]}},
    ),
    "mimo": Row(
        checkpoints="MiMo-7B",
        heads="MTP in its files",
        features="Qwen2 with modules for later tokens",
        cases={},
        compared="equal to `qwen2`",
    ),
    "deepseek_v3": Row(
        checkpoints="DeepSeek-V3, R1",
        heads="MTP in its files",
        features="latent attention, whose cache stays latent; experts in groups",
        cases={
            "deepseek_v3": _EXPERTS
            | _rope("yarn", factor=8.0, original_max_position_embeddings=TRAINED, mscale=1.0)
            | {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}
            | {"v_head_dim": 10, "q_lora_rank": 20, "n_group": 4, "topk_group": 2}
            | {"num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 1},
        },
    ),
    "deepseek_v2": Row(
        checkpoints="DeepSeek-V2, V2-Lite, Coder-V2",
        heads="",
        features="latent attention; softmax experts in groups",
        cases={
            "deepseek_v2": _EXPERTS
            | _rope("yarn", factor=8.0, original_max_position_embeddings=TRAINED, mscale=0.7)
            | {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}
            | {"v_head_dim": 10, "q_lora_rank": None, "n_group": 4, "topk_group": 2}
            | {"num_key_value_heads": 4, "head_dim": 8, "first_k_dense_replace": 1}
            | {"topk_method": "group_limited_greedy"},
            "deepseek_v2-greedy": _EXPERTS
            | {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12}
            | {"v_head_dim": 10, "q_lora_rank": 20, "num_key_value_heads": 4, "head_dim": 8},
        },
    ),
    "glm4_moe": Row(
        checkpoints="GLM-4.5, GLM-4.5-Air",
        heads="MTP in its files",
        features="partial rotation; experts",
        cases={
            "glm4_moe": _EXPERTS
            | {"n_group": 1, "topk_group": 1, "attention_bias": True, "use_qk_norm": True}
            | {"first_k_dense_replace": 0},
        },
    ),
    "qwen3_moe": Row(
        checkpoints="Qwen3-30B-A3B, Qwen3-235B-A22B, Qwen3-Coder",
        heads="EAGLE-3, DFlash",
        features="softmax experts; plain MLPs in some layers",
        cases={
            "qwen3_moe": _SOFTMAX | {"mlp_only_layers": [1], "norm_topk_prob": True},
        },
    ),
    "qwen2_moe": Row(
        checkpoints="Qwen1.5-MoE-A2.7B, Qwen2-57B-A14B",
        heads="",
        features="softmax experts; a gated shared expert",
        cases={
            "qwen2_moe": _SOFTMAX
            | {"shared_expert_intermediate_size": 24, "decoder_sparse_step": 2},
        },
    ),
    "mixtral": Row(
        checkpoints="Mixtral 8x7B, 8x22B",
        heads="EAGLE",
        features="softmax experts",
        cases={"mixtral": {"num_local_experts": 4}},
    ),
    "olmoe": Row(
        checkpoints="OLMoE-1B-7B",
        heads="",
        features="softmax experts; norms of queries and keys over all heads",
        cases={"olmoe": _SOFTMAX | {"num_hidden_layers": 2}},
    ),
    "phimoe": Row(
        checkpoints="Phi-3.5-MoE",
        heads="",
        features="sparsemixer experts; norms that subtract the mean; biases",
        cases={"phimoe": {"num_local_experts": 4, "lm_head_bias": True, "attention_bias": True}},
    ),
    "minimax_m2": Row(
        checkpoints="MiniMax-M2, M2.1",
        heads="EAGLE-3",
        features="sigmoid experts with a bias; norms over all heads; partial rotation",
        cases={"minimax_m2": {"num_local_experts": 8, "rotary_dim": 8}},
    ),
    "olmo2": Row(
        checkpoints="OLMo 2 1B to 32B",
        heads="",
        features="norms of outputs; norms of queries and keys over all heads",
        cases={"olmo2": {"attention_bias": True}},
    ),
    "olmo3": Row(
        checkpoints="Olmo 3 7B, 32B",
        heads="",
        features="OLMo 2 with windows; rotary scaling of layers without one",
        cases={
            "olmo3": {
                "sliding_window": 6,
                "num_hidden_layers": 4,
                "rope_parameters": {
                    "full_attention": {"rope_type": "yarn", "rope_theta": 5e4, **_YARN},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 5e4},
                },
            },
        },
    ),
    "smollm3": Row(
        checkpoints="SmolLM3-3B",
        heads="",
        features="layers without a rotation",
        cases={
            "smollm3": {
                "no_rope_layer_interval": 2,
                "use_sliding_window": True,
                "sliding_window": 6,
                "mlp_bias": True,
            },
        },
    ),
    "phi3": Row(
        checkpoints="Phi-3, Phi-3.5-mini, Phi-4, Phi-4-mini",
        heads="",
        features="fused tensors; LongRoPE; partial rotation; a window",
        cases={
            "phi3": {"sliding_window": 6, "tie_word_embeddings": True},
            "phi3-longrope": {
                "original_max_position_embeddings": 128,  # generate starts over behind it
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 0.75,
                    "short_factor": _LONGROPE["short_factor"][:6],
                    "long_factor": _LONGROPE["long_factor"][:6],
                },
            },
        },
    ),
    "granite": Row(
        checkpoints="Granite 3.0 to 3.3",
        heads="",
        features="factors on embeddings, scores, residuals and logits",
        cases={
            "granite": {
                "attention_bias": True,
                "attention_multiplier": 0.3,
                "embedding_multiplier": 12.0,
                "logits_scaling": 0.7,
                "residual_multiplier": 0.22,
            },
        },
    ),
    "glm4": Row(
        checkpoints="GLM-4-0414, GLM-Z1",
        heads="",
        features="norms of inputs and outputs; partial rotation of neighbours",
        cases={"glm4": {"attention_bias": True, "partial_rotary_factor": 0.5}},
    ),
    "seed_oss": Row(
        checkpoints="Seed-OSS-36B",
        heads="",
        features="biases",
        cases={"seed_oss": {"attention_bias": True, "attention_out_bias": True}},
    ),
    "exaone4": Row(
        checkpoints="EXAONE 4.0 1.2B, 32B",
        heads="",
        features="norms of outputs; windows; layers without a rotation",
        cases={"exaone4": {"sliding_window": 6, "sliding_window_pattern": 2}},
    ),
    "cohere2": Row(
        checkpoints="Command R7B, Command A",
        heads="",
        features="attention and MLP side by side; norms that subtract the mean; windows; layers "
        "without a rotation",
        cases={
            "cohere2": {
                "sliding_window": 6,
                "layer_types": ["sliding_attention", "full_attention"],
                "attention_bias": True,
                "logit_scale": 1.5,
            },
        },
    ),
    "llama4_text": Row(
        checkpoints="Llama 4 Scout, Maverick; their text part",
        heads="EAGLE-3",
        features="attention in chunks; layers without rotation, whose queries grow; one expert "
        "beside a shared one, which weighs its input",
        cases={
            "llama4_text": _rope("llama3", **_LLAMA3)
            | {"num_hidden_layers": 4, "attention_chunk_size": 24, "floor_scale": 7}
            | {"attn_scale": 0.3, "no_rope_layer_interval": 3, "interleave_moe_layer_step": 2}
            | {"intermediate_size_mlp": 40, "num_local_experts": 4},
            "llama4_text-full": {"attention_chunk_size": None, "attn_temperature_tuning": False}
            | {"num_local_experts": 4, "use_qk_norm": False, "num_experts_per_tok": 2},
        },
    ),
    "gpt_oss": Row(
        checkpoints="gpt-oss-20b, gpt-oss-120b, in bfloat16",
        heads="EAGLE-3",
        features="sinks; windows; biased experts with a clamped SwiGLU",
        cases={
            "gpt_oss": _rope("yarn", **_YARN, truncate=False)
            | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}
            | {"sliding_window": 6, "swiglu_limit": 1.5, "num_hidden_layers": 3},
        },
    ),
    "gemma2": Row(
        checkpoints="Gemma 2 2B, 9B, 27B",
        heads="",
        features="norms of inputs and outputs; windows by layer; capped scores and logits",
        cases={
            "gemma2": {
                "sliding_window": 6,
                "attn_logit_softcapping": 2.0,
                "final_logit_softcapping": 3.0,
                "query_pre_attn_scalar": 24,
            },
        },
    ),
    "gemma3_text": Row(
        checkpoints="Gemma 3 270M to 27B, MedGemma; their text part",
        heads="EAGLE-3",
        features="Gemma 2 with norms of query and key heads, and a rope for layers with a window",
        cases={
            "gemma3_text": {
                "sliding_window": 6,
                "num_hidden_layers": 3,
                "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
                "query_pre_attn_scalar": 24,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        },
    ),
    "ministral3": Row(
        checkpoints="Ministral 3 3B, 8B, 14B (text part)",
        heads="",
        features="queries that grow with the position; YaRN",
        cases={
            "ministral3": _rope(
                "yarn", **_YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4
            )
            | {"sliding_window": 40},
        },
    ),
    "hunyuan_v1_dense": Row(
        checkpoints="Hunyuan 0.5B to 7B Instruct",
        heads="EAGLE-3",
        features="norms of query and key heads behind the rotation",
        cases={
            "hunyuan_v1_dense": _rope("dynamic", alpha=3.0, factor=1.0) | {"attention_bias": True},
        },
    ),
    "ernie4_5": Row(
        checkpoints="ERNIE-4.5-0.3B",
        heads="",
        features="rotation of neighbours; biases",
        cases={"ernie4_5": {"use_bias": True}},
    ),
    "apertus": Row(
        checkpoints="Apertus 8B, 70B",
        heads="",
        features="an MLP with xIELU and no gate; norms of query and key heads",
        cases={"apertus": _rope("llama3", **_LLAMA3) | {"attention_bias": True}},
    ),
    "muse_glimmer_text": Row(
        checkpoints="Muse Glimmer 30B (text part)",
        heads="",
        features="Gemma's norms; gates; windows; layers without a rotation; capped logits",
        cases={
            "muse_glimmer_text": {
                "num_hidden_layers": 4,
                "sliding_window": 6,
                "qk_scale_factor": 2.5,
                "final_logit_softcapping": 3.0,
                "output_multiplier": 0.8,
            },
        },
        whole=(
            "muse_glimmer",
            {
                "vision_config": {
                    "num_hidden_layers": 1,
                    "hidden_size": 32,
                    "intermediate_size": 16,
                    "num_attention_heads": 2,
                },
                "out_hidden_size": 128,
                "projector_hidden_size": 16,
            },
        ),
    ),
}
CASES = {name: (kind, keys) for kind, row in ROWS.items() for name, keys in row.cases.items()}
ENGINE = tuple(next(iter(row.cases)) for row in ROWS.values() if row.cases)
