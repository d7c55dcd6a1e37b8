"""Qwen3-Next: gated attention, norms around zero, and experts beside one that has a gate.

Three in four blocks of the published models are gated delta-rule ones, which are not built. Targets
whose blocks all attend are read; of the others, only the modules for later tokens.
"""

from jspec.checkpoints.families import scaling
from jspec.checkpoints.families.common import SHARED_DEFAULTS, Family, flag, whole
from jspec.models.decoder import DecoderConfig
from jspec.models.moe import MoeConfig
from jspec.util.messages import shown

_EVERY = 4  # blocks, of which the last one attends, where config.json does not say


def attending(raw: dict) -> dict:
    """config.json of a target all of whose blocks attend: what the blocks of its modules are."""
    return raw | {"layer_types": None, "full_attention_interval": 1}


def _special(raw: dict) -> dict:
    _refuse_recurrence(raw)
    bias = flag(raw, "attention_bias")
    return {
        "qk_norm": True,
        "attention_gate": True,
        "zero_centred_norms": True,
        "qkv_bias": bias,
        "output_bias": bias,
        "moe": _experts(raw),
    }


def _refuse_recurrence(raw: dict) -> None:
    count, kinds = whole(raw, "num_hidden_layers"), raw["layer_types"]
    if kinds is None:
        every = whole({"full_attention_interval": _EVERY} | raw, "full_attention_interval")
        kinds = [
            "linear_attention" if layer % every else "full_attention"
            for layer in range(1, count + 1)
        ]
    known = ("full_attention", "linear_attention")
    if not isinstance(kinds, list) or len(kinds) != count or any(k not in known for k in kinds):
        raise ValueError(
            f"layer_types must name full_attention or linear_attention for each of {count} "
            f"layers, got {shown(kinds)}"
        )
    recurrent = kinds.count("linear_attention")
    if recurrent:
        raise ValueError(
            f"layer_types: {recurrent} of {count} layers are linear_attention, which is not "
            "supported yet: such gated delta-rule blocks keep a recurrent state in place of keys "
            "and values, and a refused draft cannot be taken back out of it; only full_attention "
            "is. The modules for later tokens (MTP) of such a target load without it, by "
            "jspec.files.head_files.load_head"
        )


def _experts(raw: dict) -> MoeConfig | None:
    if whole(raw, "num_experts", least=0) == 0:
        return None
    try:
        return MoeConfig(
            num_experts=whole(raw, "num_experts"),
            experts_per_token=whole(raw, "num_experts_per_tok"),
            intermediate_size=whole(raw, "moe_intermediate_size"),
            shared_size=whole(raw, "shared_expert_intermediate_size"),
            normalise=flag(raw, "norm_topk_prob"),
            scoring="softmax",
            shared_gate=True,
        )
    except ValueError as error:
        raise ValueError(f"experts: {error}") from None


def _describe(config: DecoderConfig) -> dict:
    share = (config.rotary_dim or config.head_dim) / config.head_dim
    rope = scaling.write(config.rope, config.max_positions)
    described = {
        "attention_bias": config.qkv_bias,
        "partial_rotary_factor": share,
        "rope_parameters": rope["rope_parameters"] | {"partial_rotary_factor": share},
        "layer_types": ["full_attention"] * config.num_layers,
        "full_attention_interval": 1,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "num_experts": 0,
    }
    if config.moe is None:
        return described
    return described | {
        "num_experts": config.moe.num_experts,
        "num_experts_per_tok": config.moe.experts_per_token,
        "moe_intermediate_size": config.moe.intermediate_size,
        "shared_expert_intermediate_size": config.moe.shared_size,
        "norm_topk_prob": config.moe.normalise,
    }


FAMILY = Family(
    model_type="qwen3_next",
    architecture="Qwen3NextForCausalLM",
    defaults=SHARED_DEFAULTS
    | {
        "num_key_value_heads": 2,
        "head_dim": 256,
        "max_position_embeddings": 32768,
        "partial_rotary_factor": 0.25,
        "norm_topk_prob": True,
        "attention_bias": False,
        "layer_types": None,
        "eos_token_id": None,
    },
    neutral={
        "partial_rotary_factor": None,
        "num_experts": None,
        "decoder_sparse_step": (None, 1),
        "mlp_only_layers": (None, []),
        "use_sliding_window": (None, False),
    },
    special=_special,
    describe=_describe,
    partly_rotated=True,
)
