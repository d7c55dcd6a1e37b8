"""DeepSeek-V3 and R1: latent attention, experts after the first blocks, YaRN on the scores."""

from jspec.checkpoints.families import common, experts, scaling
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag, whole
from jspec.models.blocks.latent_attention import LatentAttention
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    return experts.after_dense(raw, latent(raw, interleaved=flag(raw, "rope_interleave")))


def latent(raw: dict, *, interleaved: bool) -> LatentAttention:
    """Return the latent attention of a config.json."""
    rope_dim = whole(raw, "qk_rope_head_dim")
    if rope_dim % 2:
        raise ValueError(f"qk_rope_head_dim must be even, got {rope_dim}")
    num_heads, _, head_dim = common.heads(raw)
    common.rotated_size(raw, head_dim)  # refuses a part
    weight = scaling.merged(raw).get("mscale_all_dim", 0)
    return LatentAttention(
        num_heads=num_heads,
        kv_rank=whole(raw, "kv_lora_rank"),
        q_rank=None if raw["q_lora_rank"] is None else whole(raw, "q_lora_rank"),
        nope_dim=whole(raw, "qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=whole(raw, "v_head_dim"),
        rope=scaling.read(raw, rope_dim)[0],
        interleaved=interleaved,
        mscale=scaling.positive("mscale_all_dim", weight) if weight else 0.0,
    )


def describe_latent(config: DecoderConfig) -> dict:
    """Return the inverse of ``latent``, without the interleaving."""
    mixer = config.layers[0].mixer
    if not isinstance(mixer, LatentAttention):
        raise ValueError(f"its layers have {mixer.title}")
    written = {
        "head_dim": mixer.rope_dim,
        "kv_lora_rank": mixer.kv_rank,
        "q_lora_rank": mixer.q_rank,
        "qk_nope_head_dim": mixer.nope_dim,
        "qk_rope_head_dim": mixer.rope_dim,
        "v_head_dim": mixer.value_dim,
        "attention_bias": False,
    }
    if mixer.mscale:
        rope = scaling.write(mixer.rope, config.max_positions)
        for spelling in ("rope_scaling", "rope_parameters"):
            if rope[spelling]:
                written[spelling] = rope[spelling] | {"mscale_all_dim": mixer.mscale}
    return written


def _describe(config: DecoderConfig) -> dict:
    written = describe_latent(config)
    interleaved = config.layers[0].mixer.interleaved
    return written | {"rope_interleave": interleaved} | experts.describe(config)


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults=SHARED_DEFAULTS
    | experts.DEFAULTS
    | {"num_key_value_heads": 128, "max_position_embeddings": 4096, "q_lora_rank": 1536}
    | {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
    | {"rope_interleave": True, "eos_token_id": 1},
    neutral=experts.NEUTRAL | {"attention_bias": (None, False), "sliding_window": (None,)},
    layers=_layers,
    describe=_describe,
)
