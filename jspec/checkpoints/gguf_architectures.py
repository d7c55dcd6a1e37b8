"""The architectures of llama.cpp that load, and how their metadata become config.json.

The facts are those of llama.cpp's converters (conversion/) and of its loader (src/models): settings
that files leave out are constants of its code.
"""

import dataclasses
import difflib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from jspec.checkpoints.gguf_files import GgufFile
from jspec.util.messages import shown


@dataclasses.dataclass(frozen=True)
class Architecture:
    """One ``general.architecture``.

    Attributes:
      family: ``model_type`` of the family, unless ``special`` returns another one.
      keys: keys of config.json, and their keys in the metadata after the name of the architecture.
      constants: values of config.json for keys that the metadata leave out.
      biases: keys of config.json that are true if a tensor is there, and its name without that of
        its layer.
      permuted: whether the rows of q and k are stored as pairs of neighbours.
      centred: whether norms, which the family stores minus one, are stored whole.
      partly_rotated: whether heads may have features without a rotation.
      read: further keys of the metadata that ``special`` reads.
      special: returns further keys of a config.json, given those above.
    """

    family: str
    keys: Mapping[str, str] = dataclasses.field(default_factory=dict)
    constants: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    biases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    permuted: bool = False
    centred: bool = False
    partly_rotated: bool = False
    read: tuple[str, ...] = ()
    special: Callable[[GgufFile, dict], dict] = lambda *_: {}


def find(file: GgufFile) -> Architecture:
    """Return the architecture of a file; raise ValueError for one that is not supported."""
    name = file.get("general.architecture")
    if name not in ARCHITECTURES:
        near = difflib.get_close_matches(str(name), ARCHITECTURES, n=1)
        nearest = f"; the nearest is {near[0]}" if near else ""
        raise ValueError(
            f"architecture {shown(name)} is not supported in GGUF files; known: "
            f"{', '.join(ARCHITECTURES)}{nearest}"
        )
    return ARCHITECTURES[name]


def number(value: Any) -> Any:
    """Return a float32 of the metadata as the shortest number that rounds to it."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _kinds(file: GgufFile, _: dict) -> dict:
    """Return the window, and the kind of each layer if the metadata list them."""
    pattern = file.get("{arch}.attention.sliding_window_pattern")
    window = file.get("{arch}.attention.sliding_window") or None
    if isinstance(pattern, list):
        kinds = [_SLIDING if each else _FULL for each in pattern]
        return {"sliding_window": window, "layer_types": kinds}
    return {"sliding_window": window} | ({"sliding_window_pattern": pattern} if pattern else {})


def _llama(file: GgufFile, _: dict) -> dict:
    """Return Mixtral's keys for a file with experts."""
    return {"model_type": "mixtral"} if file.get("{arch}.expert_count") else {}


def _olmo2(file: GgufFile, raw: dict) -> dict:
    """Return Olmo 3's keys for a file with a window."""
    windows = _kinds(file, raw)
    return windows | {"model_type": "olmo3"} if windows["sliding_window"] else {}


def _gemma(_: GgufFile, raw: dict) -> dict:
    """Return the keys of Gemma 2 and 3 that files leave to llama.cpp, as it sets them.

    Models of 46 and 62 layers, the largest ones, scale scores by the width of a share of the
    stream, and others by that of a head.
    """
    is_large = raw["num_hidden_layers"] in (46, 62)
    width = raw["hidden_size"] // raw["num_attention_heads"] if is_large else raw.get("head_dim")
    given = {key: raw.get(key) or None for key in _CAPS}
    return given if width is None else given | {"query_pre_attn_scalar": width}


def _gemma4(file: GgufFile, raw: dict) -> dict:
    """Return the keys of layers with a window and of those without one.

    Frequencies that are divided by 1e30 are of features without a rotation. Layers without a window
    whose values are their keys have no tensor for them; nor have layers that read those of others.
    """
    get = lambda key, default=None: number(file.get("{arch}." + key, default))
    windows = _kinds(file, raw)
    kinds = windows.get("layer_types", [])
    heads, divisors = raw["num_key_value_heads"], file.tensors.get("rope_freqs.weight")
    by_kind = dict(zip(kinds, heads, strict=False)) if isinstance(heads, list) else {}
    share = 1.0 if divisors is None else float((divisors[:] < 1e10).mean())
    unshared = raw["num_hidden_layers"] - raw.get("num_kv_shared_layers", 0)
    names = (f"blk.{i}.attn_v.weight" for i, kind in enumerate(kinds[:unshared]) if kind == _FULL)
    full = {"rope_type": "proportional", "partial_rotary_factor": share}
    local = {"rope_type": "default", "rope_theta": get("rope.freq_base_swa", 1e4)}
    table = file.tensors.get("per_layer_token_embd.weight")
    sizes = {} if table is None else {"vocab_size_per_layer_input": table.shape[0]}
    return windows | {
        **sizes,
        **_widths(raw, unshared),
        "head_dim": get("attention.key_length_swa", raw.get("head_dim")),
        "global_head_dim": raw.get("head_dim"),
        "num_key_value_heads": by_kind.get(_SLIDING, heads),
        "num_global_key_value_heads": by_kind.get(_FULL),
        "attention_k_eq_v": any(name not in file.tensors for name in names),
        "enable_moe_block": bool(raw.get("num_experts")),
        "final_logit_softcapping": raw.get("final_logit_softcapping") or None,
        "rope_parameters": {
            _FULL: full | {"rope_theta": raw.get("rope_theta", 1e6)},
            _SLIDING: local,
        },
        "rope_scaling": None,
    }


def _widths(raw: dict, unshared: int) -> dict:
    """Return the widths of MLPs: of the first ``unshared`` layers, and of others twice as wide."""
    given = raw["intermediate_size"]
    if not isinstance(given, list):
        return {}
    width, count = min(given, default=0), raw["num_hidden_layers"]
    doubled = [width] * unshared + [2 * width] * (count - unshared)
    if given not in (doubled, [width] * count):
        raise ValueError(
            f"gemma4.feed_forward_length={shown(given)} is not supported, only one width, and "
            f"twice that in the last {count - unshared} of {count} layers"
        )
    return {"intermediate_size": width, "use_double_wide_mlp": given == doubled}


def _sparse(file: GgufFile, raw: dict) -> dict:
    """Return the layers without experts, and the width of a shared expert."""
    routers = [f"blk.{index}.ffn_gate_inp.weight" for index in range(raw["num_hidden_layers"])]
    plain = [index for index, router in enumerate(routers) if router not in file.tensors]
    shared = (x for name, x in file.tensors.items() if name.endswith(".ffn_up_shexp.weight"))
    width = next((tensor.shape[0] for tensor in shared), None)
    return {"mlp_only_layers": plain} | (
        {"shared_expert_intermediate_size": width} if width else {}
    )


def _hybrid(file: GgufFile, raw: dict) -> dict:
    """Return the keys of layers of the gated delta rule, which have an output ``ssm_out``."""
    names, heads = (_FULL, "linear_attention"), raw["linear_num_value_heads"]
    layers = range(raw["num_hidden_layers"])
    kinds = [names[f"blk.{index}.ssm_out.weight" in file.tensors] for index in layers]
    width = file.get("{arch}.ssm.inner_size", 0) // max(heads, 1)
    mixture = _sparse(file, raw) if raw.get("num_experts") else {}
    return mixture | {"layer_types": kinds, "linear_value_head_dim": width}


def _scoring(file: GgufFile, _: dict) -> dict:
    """Return how a router scores experts; llama.cpp has a number for each way."""
    kind = file.get("{arch}.expert_gating_func", 0)
    names = {0: None, 1: "softmax", 2: "sigmoid"}
    if kind not in names:
        raise ValueError(f"expert_gating_func={shown(kind)} is not supported, only 1 and 2")
    return {"scoring_func": names[kind]}


def _glm4_moe(file: GgufFile, raw: dict) -> dict:
    return _scoring(file, raw) | {"use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors}


def _deepseek2(file: GgufFile, raw: dict) -> dict:
    """Return the keys of DeepSeek's V2 or, if the router has a bias, of its V3.

    Old files have the lengths of heads under ``key_length``; new ones have those of latents there.
    """
    rope = file.get("{arch}.rope.dimension_count", 64)
    key, value = (
        file.get(f"{{arch}}.attention.{each}_length_mla")
        or file.get(f"{{arch}}.attention.{each}_length", 0)
        for each in ("key", "value")
    )
    keys = {
        "head_dim": rope,
        "num_key_value_heads": raw["num_attention_heads"],
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": value,
        **_scoring(file, raw),
    }
    growth = number(10.0 * file.get("{arch}." + _GROWTH, 0.0))
    if raw["rope_scaling"] and growth:
        keys["rope_scaling"] = raw["rope_scaling"] | dict.fromkeys(_MSCALES, growth)
    if any(name.endswith("exp_probs_b.bias") for name in file.tensors):
        return keys
    method = "greedy" if raw["n_group"] == 1 else "group_limited_greedy"
    return keys | {"model_type": "deepseek_v2", "topk_method": method}


def _mistral3(file: GgufFile, raw: dict) -> dict:
    """Return the growth of queries and of scores beside the rotary keys."""
    growth = number(file.get("{arch}." + _GROWTH, 0.0))
    beta = number(file.get("{arch}.attention.temperature_scale", 0.0))
    scaling = raw["rope_scaling"] or {"rope_type": "default"}
    scaling |= dict.fromkeys(_MSCALES, growth) if growth else {}
    return {"rope_scaling": scaling | ({"llama_4_scaling_beta": beta} if beta else {})}


def _unscaled(_: GgufFile, raw: dict) -> dict:
    """State that there is no rotary scaling, where the family's default is one."""
    return {} if raw["rope_scaling"] else _UNSCALED


def _gpt_oss(file: GgufFile, raw: dict) -> dict:
    if raw["rope_scaling"] and raw["rope_scaling"]["rope_type"] == "yarn":
        return _kinds(file, raw) | {"rope_scaling": raw["rope_scaling"] | {"truncate": False}}
    return _kinds(file, raw) | _unscaled(file, raw)


def _llama4(_: GgufFile, raw: dict) -> dict:
    """Return the keys of Llama 4: its model of 128 experts alone does not norm queries."""
    return {"use_qk_norm": raw["num_local_experts"] != 128}


_FULL, _SLIDING = "full_attention", "sliding_attention"
_UNSCALED = {"rope_scaling": {"rope_type": "default"}}
_GROWTH = "rope.scaling.yarn_log_multiplier"
_LONGROPE = "rope.scaling.attn_factor"
_MSCALES = "mscale", "mscale_all_dim"  # Files have the second one; published models have both.
_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")
_Q, _OUT, _UP = "attn_q.bias", "attn_output.bias", "ffn_up.bias"
_USED = {"num_experts_per_tok": "expert_used_count"}
_LOCAL = {"num_local_experts": "expert_count", **_USED}
_QWEN_MOE = {
    "num_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
    **_USED,
}
_DEEPSEEK_MOE = {
    "n_routed_experts": "expert_count",
    "moe_intermediate_size": "expert_feed_forward_length",
    "norm_topk_prob": "expert_weights_norm",
    "n_shared_experts": "expert_shared_count",
    "first_k_dense_replace": "leading_dense_block_count",
    "routed_scaling_factor": "expert_weights_scale",
    "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
    **_USED,
}
_UNGROUPED = {"n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0, "norm_topk_prob": False}
_DELTA_RULE = {
    "linear_conv_kernel_dim": "ssm.conv_kernel",
    "linear_key_head_dim": "ssm.state_size",
    "linear_num_key_heads": "ssm.group_count",
    "linear_num_value_heads": "ssm.time_step_rank",
}
_GEMMA = Architecture(
    "gemma2",
    centred=True,
    special=_gemma,
    keys={
        "sliding_window": "attention.sliding_window",
        "rope_local_base_freq": "rope.freq_base_swa",
        **{key: key for key in _CAPS},
    },
)
_HYBRID = Architecture(
    "qwen3_5_text",
    keys=_DELTA_RULE,
    biases={"attention_bias": _Q},
    centred=True,
    partly_rotated=True,
    special=_hybrid,
)

ARCHITECTURES: Mapping[str, Architecture] = {
    "llama": Architecture(
        "llama",
        keys=_LOCAL,
        biases={"attention_bias": _Q, "mlp_bias": _UP},
        permuted=True,
        special=_llama,
    ),
    "qwen2": Architecture("qwen2"),
    "qwen3": Architecture("qwen3"),
    "olmo2": Architecture("olmo2", special=_olmo2),
    "gemma2": _GEMMA,
    "gemma3": dataclasses.replace(_GEMMA, family="gemma3_text"),
    "gemma4": Architecture(
        "gemma4_text",
        keys={
            "final_logit_softcapping": "final_logit_softcapping",
            "hidden_size_per_layer_input": "embedding_length_per_layer_input",
            "num_kv_shared_layers": "attention.shared_kv_layers",
            "num_experts": "expert_count",
            "top_k_experts": "expert_used_count",
            "moe_intermediate_size": "expert_feed_forward_length",
        },
        special=_gemma4,
    ),
    "qwen2moe": Architecture(
        "qwen2_moe",
        keys=_QWEN_MOE,
        biases={"qkv_bias": _Q},
        constants={"norm_topk_prob": False},
        special=_sparse,
    ),
    "qwen3moe": Architecture(
        "qwen3_moe",
        keys=_QWEN_MOE,
        biases={"attention_bias": _Q},
        constants={"norm_topk_prob": True},
        special=_sparse,
    ),
    "olmoe": Architecture(
        "olmoe",
        keys={"num_experts": "expert_count", **_USED},
        biases={"attention_bias": _Q},
    ),
    "phimoe": Architecture(
        "phimoe",
        keys=_LOCAL,
        biases={"attention_bias": _Q, "lm_head_bias": "output.bias"},
        read=(_LONGROPE,),
        special=_kinds,
    ),
    "minimax-m2": Architecture(
        "minimax_m2",
        keys=_LOCAL,
        partly_rotated=True,
        special=_scoring,
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        keys=_DEEPSEEK_MOE,
        constants=_UNGROUPED,
        biases={"attention_bias": _Q},
        partly_rotated=True,
        special=_glm4_moe,
    ),
    "phi3": Architecture(
        "phi3",
        keys={"original_max_position_embeddings": "rope.scaling.original_context_length"},
        partly_rotated=True,
        read=(_LONGROPE,),
        special=_kinds,
    ),
    "granite": Architecture(
        "granite",
        keys={
            "attention_multiplier": "attention.scale",
            "embedding_multiplier": "embedding_scale",
            "residual_multiplier": "residual_scale",
            "logits_scaling": "logit_scale",
        },
        biases={"attention_bias": _Q, "mlp_bias": _UP},
        permuted=True,
    ),
    "glm4": Architecture("glm4", biases={"attention_bias": _Q}, partly_rotated=True),
    "smollm3": Architecture(
        "smollm3",
        constants={"no_rope_layer_interval": 4},
        biases={"attention_bias": _Q, "mlp_bias": _UP},
        permuted=True,
    ),
    "seed_oss": Architecture(
        "seed_oss",
        biases={"attention_bias": _Q, "attention_out_bias": _OUT, "mlp_bias": _UP},
    ),
    "exaone4": Architecture("exaone4", special=_kinds),
    "cohere2": Architecture(
        "cohere2",
        keys={"layer_norm_eps": "attention.layer_norm_epsilon", "logit_scale": "logit_scale"},
        biases={"attention_bias": _Q},
        special=_kinds,
    ),
    "mistral3": Architecture(
        "ministral3",
        permuted=True,
        read=(_GROWTH, "attention.temperature_scale"),
        special=_mistral3,
    ),
    "hunyuan-dense": Architecture("hunyuan_v1_dense", biases={"attention_bias": _Q}),
    "ernie4_5": Architecture("ernie4_5", biases={"use_bias": _Q}),
    "apertus": Architecture("apertus", biases={"attention_bias": _Q}, special=_unscaled),
    "gpt-oss": Architecture("gpt_oss", keys=_LOCAL, special=_gpt_oss),
    "llama4": Architecture(
        "llama4_text",
        keys=_LOCAL
        | {
            "intermediate_size": "expert_feed_forward_length",
            "intermediate_size_mlp": "feed_forward_length",
            "interleave_moe_layer_step": "interleave_moe_layer_step",
        },
        biases={"attention_bias": _Q},
        special=_llama4,
    ),
    "deepseek2": Architecture(
        "deepseek_v3",
        keys=_DEEPSEEK_MOE
        | {"q_lora_rank": "attention.q_lora_rank", "kv_lora_rank": "attention.kv_lora_rank"},
        constants=_UNGROUPED | {"q_lora_rank": None},
        read=(_GROWTH,),
        special=_deepseek2,
    ),
    "qwen35": _HYBRID,
    "qwen35moe": dataclasses.replace(
        _HYBRID,
        family="qwen3_5_moe_text",
        keys=_DELTA_RULE | _QWEN_MOE,
        constants={"norm_topk_prob": True},
    ),
    "qwen3next": dataclasses.replace(
        _HYBRID,
        family="qwen3_next",
        keys=_DELTA_RULE | _QWEN_MOE,
        constants={"norm_topk_prob": True},
    ),
}
