"""The rows of families without experts and without recurrent layers."""

from tests.families.rows import LLAMA3, LONGROPE, TRAINED, YARN, Row, rope

_GEMMA4 = {
    "sliding_window": 6,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "global_head_dim": 32,
    "num_global_key_value_heads": 1,
    "attention_k_eq_v": True,
    "hidden_size_per_layer_input": 0,
    "final_logit_softcapping": 3.0,
    "tie_word_embeddings": False,  # Tied, a text repeats one token.
}

ROWS = {
    "llama": Row(
        checkpoints="Llama 2, 3, 3.1, 3.2, 3.3; SmolLM2",
        heads="EAGLE, EAGLE-3, Medusa, Hydra, MLP speculators, DFlash",
        features="every rotary scaling; biases",
        cases={
            "llama": rope("llama3", **LLAMA3),
            "llama-plain": {"num_key_value_heads": 4},
            "llama-linear-biases-tied": rope("linear", factor=3.0)
            | {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": True},
            "llama-dynamic": rope("dynamic", factor=2.5) | {"max_position_embeddings": TRAINED},
            "llama-yarn": rope("yarn", **YARN, beta_fast=16.0, beta_slow=0.5, truncate=False)
            | {"num_key_value_heads": 1},
            "llama-longrope": rope("longrope", **LONGROPE),
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
            "qwen2": rope("yarn", **YARN, mscale=1.0, mscale_all_dim=0.7)
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
    "mimo": Row(
        checkpoints="MiMo-7B",
        heads="MTP in its files",
        features="Qwen2 with modules for later tokens",
        cases={},
        compared="equal to `qwen2`",
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
                    "full_attention": {"rope_type": "yarn", "rope_theta": 5e4, **YARN},
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
                    "short_factor": LONGROPE["short_factor"][:6],
                    "long_factor": LONGROPE["long_factor"][:6],
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
                "tie_word_embeddings": False,
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
                "tie_word_embeddings": False,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
                },
            },
        },
    ),
    "gemma4_text": Row(
        checkpoints="Gemma 4 E2B, E4B, 26B-A4B, 31B; their text part",
        heads="",
        features="Gemma 3 with norms of values, keys that are values, heads of two sizes, partial "
        "rotation, and a factor for each layer; experts beside the MLP; "
        "inputs of each layer; keys and values of other layers",
        cases={
            "gemma4_text": _GEMMA4,
            "gemma4_text-experts": _GEMMA4
            | {"enable_moe_block": True, "num_experts": 8, "top_k_experts": 3}
            | {"moe_intermediate_size": 16},
            "gemma4_text-shared": _GEMMA4
            | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
            | {"num_hidden_layers": 5, "attention_k_eq_v": False, "use_double_wide_mlp": True}
            | {"layer_types": [*["sliding_attention", "full_attention"] * 2, "full_attention"]}
            | {"num_kv_shared_layers": 3},
        },
        in_engine=("gemma4_text-experts", "gemma4_text-shared"),
    ),
    "ministral3": Row(
        checkpoints="Ministral 3 3B, 8B, 14B (text part)",
        heads="",
        features="queries that grow with the position; YaRN",
        cases={
            "ministral3": rope(
                "yarn", **YARN, mscale=1.0, mscale_all_dim=1.0, llama_4_scaling_beta=0.4
            )
            | {"sliding_window": 40},
        },
    ),
    "hunyuan_v1_dense": Row(
        checkpoints="Hunyuan 0.5B to 7B Instruct",
        heads="EAGLE-3",
        features="norms of query and key heads behind the rotation",
        cases={
            "hunyuan_v1_dense": rope("dynamic", alpha=3.0, factor=1.0) | {"attention_bias": True},
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
        cases={"apertus": rope("llama3", **LLAMA3) | {"attention_bias": True}},
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
