"""Models that mix layers of the gated delta rule and of gated attention, in config.json."""

from jspec.checkpoints.families import common, scaling
from jspec.checkpoints.families.common import flag, whole
from jspec.models.blocks.attention import Attention
from jspec.models.blocks.block import Mixer
from jspec.models.blocks.delta_rule import DeltaRule
from jspec.models.blocks.norms import RmsNorm
from jspec.models.decoder import DecoderConfig
from jspec.util.messages import shown

_SIZES = {
    "linear_num_value_heads": "num_heads",
    "linear_num_key_heads": "num_kv_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "head_dim",
    "linear_conv_kernel_dim": "kernel_size",
}
_KINDS = ("linear_attention", "full_attention")

# transformers' defaults.
DEFAULTS = {
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "partial_rotary_factor": 0.25,
    "attention_bias": False,
    "layer_types": None,
    "full_attention_interval": 4,
    "linear_num_value_heads": 32,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
NEUTRAL = {"partial_rotary_factor": None, "sliding_window": (None,)}


def norm(raw: dict) -> RmsNorm:
    """Return the norm of the residual stream and of the heads of attention."""
    return RmsNorm(common.norm(raw).eps, centred=True)


def mixers(raw: dict, *, by_key_heads: bool) -> tuple[Mixer, ...]:
    """Return the mixer of every layer; ``by_key_heads`` is the order of columns in the files."""
    sizes = {field: whole(raw, key) for key, field in _SIZES.items()}
    values, keys = sizes["num_heads"], sizes["num_kv_heads"]
    if values % keys:
        raise ValueError(
            f"linear_num_value_heads ({values}) must be a multiple of linear_num_key_heads ({keys})"
        )
    bias = flag(raw, "attention_bias")
    attention = common.attention(
        raw,
        partly_rotated=True,
        qkv_bias=bias,
        output_bias=bias,
        qk_norm=norm(raw),
        gated=True,
    )
    delta_rule = DeltaRule(**sizes, by_key_heads=by_key_heads, norm=common.norm(raw))
    return tuple(attention if kind == _KINDS[1] else delta_rule for kind in _kinds(raw))


def _kinds(raw: dict) -> list[str]:
    """Return the kind of every layer."""
    kinds, count = raw["layer_types"], whole(raw, "num_hidden_layers")
    if kinds is None:
        interval = whole(raw, "full_attention_interval")
        kinds = [_KINDS[(layer + 1) % interval == 0] for layer in range(count)]
    if not isinstance(kinds, list) or len(kinds) != count or any(k not in _KINDS for k in kinds):
        raise ValueError(
            f"layer_types must name {' or '.join(_KINDS)} for each of {count} layers, got "
            f"{shown(kinds)}"
        )
    if len(set(kinds)) < 2:
        raise ValueError(f"layer_types must name {' and '.join(_KINDS)}, got {shown(kinds)}")
    return kinds


def describe(config: DecoderConfig) -> dict:
    """Return the inverse of ``mixers``."""
    every = [layer.mixer for layer in config.layers]
    attention = next((mixer for mixer in every if isinstance(mixer, Attention)), None)
    delta_rule = next((mixer for mixer in every if isinstance(mixer, DeltaRule)), None)
    if attention is None or delta_rule is None:
        raise ValueError(f"its layers have {every[0].title} alone")
    share = (attention.rotary_dim or attention.head_dim) / attention.head_dim
    rope = scaling.write(attention.rope, config.max_positions)
    return {
        "num_attention_heads": attention.num_heads,
        "num_key_value_heads": attention.num_kv_heads,
        "head_dim": attention.head_dim,
        "partial_rotary_factor": share,
        "rope_parameters": rope["rope_parameters"] | {"partial_rotary_factor": share},
        "attention_bias": attention.qkv_bias,
        "layer_types": [_KINDS[isinstance(mixer, Attention)] for mixer in every],
        **{key: vars(delta_rule)[field] for key, field in _SIZES.items()},
    }
