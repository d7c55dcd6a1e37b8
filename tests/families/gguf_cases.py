"""The architectures of GGUF files, and the tiny models of them that the tests compare."""

from tests.families import table
from tests.families.rows import LLAMA3, TRAINED, YARN, rope

_LLAMA3 = rope("llama3", **LLAMA3 | {"original_max_position_embeddings": 8192})
_BOTH = {"mscale": 0.7, "mscale_all_dim": 0.7, "original_max_position_embeddings": TRAINED}
_INPUTS = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128}
_FULL = {"layer_types": ["full_attention"] * 2}
_HYBRID = {
    "layer_types": None,
    "full_attention_interval": 4,
    "num_hidden_layers": 4,
    "linear_value_head_dim": 16,  # llama.cpp has keys and values of one size.
}

_NO_WINDOW = {"use_sliding_window": False, "layer_types": None}
_GEMMA = {"query_pre_attn_scalar": 16, "layer_types": None, "tie_word_embeddings": True}

# Name of a case -> architecture, case of the table, and keys of config.json that differ from it
# because files of that architecture cannot express them.
CASES = {
    "llama": ("llama", "llama", _LLAMA3),
    "llama, biases": ("llama", "llama-linear-biases-tied", {}),
    "mistral": ("llama", "mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", "qwen2", rope("yarn", **YARN) | _NO_WINDOW),
    "qwen3": ("qwen3", "qwen3", _NO_WINDOW),
    "olmo2": ("olmo2", "olmo2", {"attention_bias": False}),
    "olmo3": ("olmo2", "olmo3", {}),
    "gemma2": ("gemma2", "gemma2", _GEMMA),
    "gemma3": ("gemma3", "gemma3_text", _GEMMA | {"num_hidden_layers": 6}),
    "gemma4": ("gemma4", "gemma4_text", {}),
    "gemma4, experts": ("gemma4", "gemma4_text-experts", {}),
    "gemma4, inputs": ("gemma4", "gemma4_text", _INPUTS),
    "gemma4, shared": ("gemma4", "gemma4_text-shared", {}),
    "mixtral": ("llama", "mixtral", {}),
    "qwen3moe": ("qwen3moe", "qwen3_moe", {"mlp_only_layers": []}),
    "qwen2moe": ("qwen2moe", "qwen2_moe", {"decoder_sparse_step": 1}),
    "olmoe": ("olmoe", "olmoe", {"num_key_value_heads": 4}),
    "phimoe": ("phimoe", "phimoe", {}),
    "minimax-m2": ("minimax-m2", "minimax_m2", {}),
    "glm4moe": ("glm4moe", "glm4_moe", {}),
    "phi3": ("phi3", "phi3", {}),
    "phi3, no window": ("phi3", "phi3", {"sliding_window": None}),
    "phi3, longrope": ("phi3", "phi3-longrope", {}),
    "granite": ("granite", "granite", {}),
    "glm4": ("glm4", "glm4", {}),
    "smollm3": (
        "smollm3",
        "smollm3",
        {"no_rope_layer_interval": 4, "num_hidden_layers": 4, "use_sliding_window": False}
        | {"mlp_bias": False},
    ),
    "seed_oss": ("seed_oss", "seed_oss", {"attention_out_bias": False}),
    "exaone4": ("exaone4", "exaone4", {}),
    "exaone4, no window": ("exaone4", "exaone4", {"sliding_window": None} | _FULL),
    "cohere2": (
        "cohere2",
        "cohere2",
        {"attention_bias": False, "layer_types": None, "num_hidden_layers": 4},
    ),
    "mistral3": (
        "mistral3",
        "ministral3",
        {"sliding_window": None},
    ),
    "hunyuan-dense": ("hunyuan-dense", "hunyuan_v1_dense", {"attention_bias": False}),
    "ernie4_5": ("ernie4_5", "ernie4_5", {"use_bias": False}),
    "apertus": ("apertus", "apertus", _LLAMA3 | {"attention_bias": False}),
    "gpt-oss": ("gpt-oss", "gpt_oss", rope("yarn", **YARN, truncate=False) | {"swiglu_limit": 7.0}),
    "gpt-oss, unscaled": ("gpt-oss", "gpt_oss", rope("default") | {"swiglu_limit": 7.0}),
    "llama4": (
        "llama4",
        "llama4_text",
        _LLAMA3
        | {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1}
        | {"no_rope_layer_interval": 4},
    ),
    "deepseek2, v3": ("deepseek2", "deepseek_v3", rope("yarn", factor=8.0, **_BOTH)),
    "deepseek2, v2": (
        "deepseek2",
        "deepseek_v2",
        rope("yarn", factor=8.0, **_BOTH) | {"q_lora_rank": 20},
    ),
    "deepseek2, greedy": ("deepseek2", "deepseek_v2-greedy", {}),
    "qwen35": ("qwen35", "qwen3_5_text", _HYBRID),
    "qwen35moe": ("qwen35moe", "qwen3_5_moe_text", _HYBRID | {"attention_bias": False}),
    "qwen3next": ("qwen3next", "qwen3_next", _HYBRID | {"mlp_only_layers": []}),
}


def config_of(name):
    """Return the architecture of a case, the family, and the keys of config.json."""
    arch, case, changes = CASES[name]
    kind, keys = table.CASES[case]
    return arch, kind, keys | changes


def architecture_of(kind):
    """Return the architecture of a family's files, or None."""
    pairs = ((arch, table.CASES[case][0]) for arch, case, _ in CASES.values())
    return next((arch for arch, family in pairs if family == kind), None)
