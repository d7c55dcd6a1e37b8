"""MiniMax-M2: experts behind a sigmoid with a bias, norms over all heads, half of each rotated."""

from jspec.checkpoints.families import common, experts, mixtral
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, whole
from jspec.models.decoder import DecoderConfig, Layer
from jspec.util.messages import shown


def _layers(raw: dict) -> tuple[Layer, ...]:
    if raw["rotary_dim"] is not None:  # the only key of published files
        rotated = whole(raw, "rotary_dim")
        raw = raw | {"partial_rotary_factor": rotated / common.heads(raw)[2]}
    kinds = raw.get("attn_type_list") or []
    if not isinstance(kinds, list) or any(kind != 1 for kind in kinds):
        raise ValueError(f"attn_type_list must name full attention (1) alone, got {shown(kinds)}")
    mixer = common.attention(
        raw,
        partly_rotated=True,
        qk_norm=common.norm(raw),
        norms_all_heads=True,
    )
    return common.alike(raw, mixer, mixtral.local(raw, 256))


def _describe(config: DecoderConfig) -> dict:
    mixer = common.attention_of(config)
    return common.describe_rotated(config) | {
        "rotary_dim": mixer.rotary_dim or mixer.head_dim,
        "scoring_func": "sigmoid",
        "use_qk_norm": True,
        "use_routing_bias": True,
        "qk_norm_type": "per_layer",
        **mixtral.describe_local(config),
    }


FAMILY = Family(
    model_type="minimax_m2",
    architecture="MiniMaxM2ForCausalLM",
    defaults=SHARED_DEFAULTS
    | {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 196608}
    | {"default_theta": 5e6, "rotary_dim": None, "eos_token_id": 200020}
    | {"num_experts_per_tok": 8},
    neutral=dict.fromkeys(experts.COUNTS)
    | {"partial_rotary_factor": None}
    | {"scoring_func": (None, "sigmoid"), "qk_norm_type": (None, "per_layer")}
    | dict.fromkeys(("use_qk_norm", "use_routing_bias"), (None, True))
    | {"shared_intermediate_size": (None, 0), "sliding_window": (None,)},
    layers=_layers,
    describe=_describe,
)
