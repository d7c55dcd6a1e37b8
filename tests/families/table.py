"""The families that load: checkpoints, heads, and the tiny models that the tests compare.

``python -m tests.families.docs_table`` prints the table of docs/compatibility.md.
"""

from tests.families import dense
from tests.families.rows import LLAMA3, TRAINED, YARN, Row, rope

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
    **dense.ROWS,
    "qwen3_5_text": Row(
        checkpoints="Qwen3.5, Qwen3.6; their text part",
        heads="MTP in its files; smaller ones as draft models",
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
    "deepseek_v3": Row(
        checkpoints="DeepSeek-V3, R1",
        heads="MTP in its files",
        features="latent attention, whose cache stays latent; experts in groups",
        cases={
            "deepseek_v3": _EXPERTS
            | rope("yarn", factor=8.0, original_max_position_embeddings=TRAINED, mscale=1.0)
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
            | rope("yarn", factor=8.0, original_max_position_embeddings=TRAINED, mscale=0.7)
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
    "llama4_text": Row(
        checkpoints="Llama 4 Scout, Maverick; their text part",
        heads="EAGLE-3",
        features="attention in chunks; layers without rotation, whose queries grow; one expert "
        "beside a shared one, which weighs its input",
        cases={
            "llama4_text": rope("llama3", **LLAMA3)
            | {"num_hidden_layers": 4, "attention_chunk_size": 24, "floor_scale": 7}
            | {"attn_scale": 0.3, "no_rope_layer_interval": 3, "interleave_moe_layer_step": 2}
            | {"intermediate_size_mlp": 40, "num_local_experts": 4},
            "llama4_text-full": {"attention_chunk_size": None, "attn_temperature_tuning": False}
            | {"num_local_experts": 4, "use_qk_norm": False, "num_experts_per_tok": 2},
        },
    ),
    "gpt_oss": Row(
        checkpoints="gpt-oss-20b, gpt-oss-120b, in MXFP4 or bfloat16",
        heads="EAGLE-3",
        features="sinks; windows; biased experts with a clamped SwiGLU",
        cases={
            "gpt_oss": rope("yarn", **YARN, truncate=False)
            | {"num_local_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 32}
            | {"sliding_window": 6, "swiglu_limit": 1.5, "num_hidden_layers": 3},
        },
    ),
}
CASES = {name: (kind, keys) for kind, row in ROWS.items() for name, keys in row.cases.items()}
ENGINE = tuple(
    case for row in ROWS.values() if row.cases for case in (next(iter(row.cases)), *row.in_engine)
)
