"""DeepSeek-V3 and R1: latent attention, experts after the first blocks, YaRN on the scores."""

from jspec.checkpoints.families import experts, scaling
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag, whole
from jspec.models.blocks.latent_attention import MlaConfig
from jspec.models.decoder import DecoderConfig


def _special(raw: dict) -> dict:
    rope_dim = whole(raw, "qk_rope_head_dim")
    if rope_dim % 2:
        raise ValueError(f"qk_rope_head_dim must be even, got {rope_dim}")
    weight = scaling.merged(raw).get("mscale_all_dim", 0)
    mla = MlaConfig(
        kv_rank=whole(raw, "kv_lora_rank"),
        q_rank=None if raw["q_lora_rank"] is None else whole(raw, "q_lora_rank"),
        nope_dim=whole(raw, "qk_nope_head_dim"),
        rope_dim=rope_dim,
        value_dim=whole(raw, "v_head_dim"),
        interleaved=flag(raw, "rope_interleave"),
        mscale=scaling.positive("mscale_all_dim", weight) if weight else 0.0,
    )
    # Every head has its own keys; head_dim in config.json is the rotated part.
    heads = whole(raw, "num_attention_heads")
    sizes = {"head_dim": mla.head_dim, "num_kv_heads": heads}
    return sizes | {"mla": mla, "moe": experts.read(raw)}


def _describe(config: DecoderConfig) -> dict:
    mla = config.mla
    if mla is None:
        return {}
    written = {
        "head_dim": mla.rope_dim,
        "kv_lora_rank": mla.kv_rank,
        "q_lora_rank": mla.q_rank,
        "qk_nope_head_dim": mla.nope_dim,
        "qk_rope_head_dim": mla.rope_dim,
        "v_head_dim": mla.value_dim,
        "rope_interleave": mla.interleaved,
        "attention_bias": False,
    }
    if mla.mscale:
        rope = scaling.write(config.rope, config.max_positions)
        for spelling in ("rope_scaling", "rope_parameters"):
            if rope[spelling]:
                written[spelling] = rope[spelling] | {"mscale_all_dim": mla.mscale}
    return written | experts.describe(config)


FAMILY = Family(
    model_type="deepseek_v3",
    architecture="DeepseekV3ForCausalLM",
    defaults=SHARED_DEFAULTS
    | experts.DEFAULTS
    | {"num_key_value_heads": 128, "max_position_embeddings": 4096, "q_lora_rank": 1536}
    | {"n_group": 8, "topk_group": 4, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5}
    | {"rope_interleave": True, "eos_token_id": 1},
    neutral=experts.NEUTRAL | {"attention_bias": (None, False), "sliding_window": (None,)},
    special=_special,
    describe=_describe,
)
