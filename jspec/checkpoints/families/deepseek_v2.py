"""DeepSeek-V2, V2-Lite and Coder-V2: latent attention, and experts behind a softmax."""

from jspec.checkpoints.families import deepseek_v3, experts
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family
from jspec.models.decoder import DecoderConfig, Layer

_METHODS = ("greedy", "group_limited_greedy")  # without groups, and with them


def _layers(raw: dict) -> tuple[Layer, ...]:
    if raw["topk_method"] == _METHODS[0]:
        raw = raw | {"n_group": 1, "topk_group": 1}
    return experts.after_dense(
        raw,
        deepseek_v3.latent(raw, interleaved=True),
        scoring="softmax",
        selection_bias=False,
        best_of_group=1,
    )


def _describe(config: DecoderConfig) -> dict:
    written = deepseek_v3.describe_latent(config) | experts.describe(config)
    method = _METHODS[written["n_group"] > 1]
    return written | {"scoring_func": "softmax", "topk_method": method, "mlp_bias": False}


FAMILY = Family(
    model_type="deepseek_v2",
    architecture="DeepseekV2ForCausalLM",
    defaults=SHARED_DEFAULTS
    | experts.DEFAULTS
    | {"max_position_embeddings": 2048, "q_lora_rank": 1536, "kv_lora_rank": 512}
    | {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    | {"n_routed_experts": 64, "moe_intermediate_size": 1407, "n_shared_experts": 2}
    | {"n_group": None, "topk_group": None, "topk_method": "greedy", "norm_topk_prob": False}
    | {"first_k_dense_replace": 0, "eos_token_id": 2},
    neutral=experts.NEUTRAL
    | {"scoring_func": (None, "softmax"), "topk_method": _METHODS, "norm_topk_prob": (None, False)}
    | dict.fromkeys(("attention_bias", "mlp_bias"), (None, False))
    | {"sliding_window": (None,)},
    layers=_layers,
    describe=_describe,
)
