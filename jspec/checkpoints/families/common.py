"""``Family``, and the keys of config.json that mean the same in all families."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.checkpoints.families import scaling
from jspec.checkpoints.families.names import Entry, llama_table
from jspec.models.blocks.attention import Attention
from jspec.models.blocks.block import FeedForward, Mixer
from jspec.models.blocks.mlp import GatedMlp
from jspec.models.blocks.norms import RmsNorm
from jspec.models.blocks.rope import RopeConfig
from jspec.models.decoder import DecoderConfig, Layer
from jspec.util.messages import shown
from jspec.util.values import INT32


@dataclasses.dataclass(frozen=True)
class Family:
    """One ``model_type`` of Hugging Face.

    Attributes:
      model_type: value of that key.
      architecture: the class in transformers.
      defaults: transformers' values for keys that config.json leaves out.
      neutral: the keys that jspec does not implement, and their values without an effect; None for
        a key that this family implements and others do not.
      layers: returns the layers of a config.json with defaults filled in.
      describe: returns the keys of ``layers`` that are particular to the family; it raises
        ValueError for layers of another kind.
      ropes_by_kind: whether layers with a window may have another rope than those without.
      renamed: modules of a layer under Llama's names, and their names in this family's files.
        Llama has no norms of outputs; ours are ``post_self_attn_layernorm`` and
        ``post_mlp_layernorm``. Modules of one name are one tensor, in the order of Llama's.
      respelled: returns a config.json in the keys of other families; defaults are filled in.
      fields: returns the fields of a ``DecoderConfig`` that others leave at their defaults, of a
        config.json with defaults filled in.
    """

    model_type: str
    architecture: str
    defaults: dict
    neutral: dict
    layers: Callable[[dict], tuple[Layer, ...]]
    describe: Callable[[DecoderConfig], dict]
    ropes_by_kind: bool = False
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    respelled: Callable[[dict], dict] = lambda raw: raw
    fields: Callable[[dict], dict[str, Any]] = lambda _: {}

    def table(self, config: DecoderConfig) -> tuple[Entry, ...]:
        """Return the entries of a decoder."""
        return llama_table(config, self.renamed)

    def read(self, raw: dict) -> DecoderConfig:
        """Return the decoder that a config.json describes."""
        raw = self.defaults | raw
        _refuse(raw, NEUTRAL | self.neutral)
        for key in SIZES:
            whole(raw, key)
        whole(raw, "max_position_embeddings")
        raw = self.respelled(raw)
        if raw.get("num_nextn_predict_layers") is not None:  # MTP modules in the same files
            whole(raw, "num_nextn_predict_layers", least=0)
        layers = self.layers(raw)
        rotated = [layer.mixer.rotation[1] for layer in layers if layer.mixer.rotation]
        rotary = scaling.of_kind(raw, FULL) if self.ropes_by_kind else raw
        fields = {
            "vocab_size": raw["vocab_size"],
            "hidden_size": raw["hidden_size"],
            "layers": layers,
            "max_positions": scaling.read(rotary, rotated[0] if rotated else 2)[1],
            "norm": layers[0].norm or layers[0].output_norm,
            "tie_embeddings": flag(raw, "tie_word_embeddings"),
        }
        return DecoderConfig(**fields | self.fields(raw))

    def write(self, config: DecoderConfig) -> dict:
        """Return a config.json for ``config``; ``read`` it again to check that it is complete."""
        mixer = config.layers[0].mixer
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.layers[0].feed_forward.dense_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": mixer.num_heads,
            "num_key_value_heads": mixer.num_kv_heads,
            "head_dim": mixer.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm.eps,
            "tie_word_embeddings": config.tie_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
            **self._ropes(config),
            **self.describe(config),
        }

    def _ropes(self, config: DecoderConfig) -> dict:
        """Return the rotary keys of a config.json."""
        mixers = [layer.mixer for layer in config.layers if layer.mixer.rope]
        first = mixers[0].rope if mixers else RopeConfig()
        ropes = {mixer.window is None: mixer.rope for mixer in mixers}
        written = scaling.write(ropes.get(True, first), config.max_positions)
        if self.ropes_by_kind:
            local = scaling.write(ropes.get(False, first), config.max_positions)
            both = {FULL: written, SLIDING: local}
            written["rope_parameters"] = {key: x["rope_parameters"] for key, x in both.items()}
        return written


FULL, SLIDING = KINDS = ("full_attention", "sliding_attention")  # in ``layer_types``

# Without defaults: a config.json without them is damaged.
SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
SHARED_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

# transformers' defaults for the keys of ``windows``.
WINDOW_DEFAULTS = {
    "use_sliding_window": False,
    "sliding_window": 4096,
    "max_window_layers": 28,
    "layer_types": None,
}

# jspec builds one item for each of these, so they have a limit.
_COUNTS = ("num_hidden_layers", "n_predict", "num_nextn_predict_layers", "num_heads", "block_size")
_MOST = dict.fromkeys(_COUNTS, 4096) | {"n_routed_experts": 1 << 16}

# Keys by which related families change the computation. Other unread keys (dropout, initialisation,
# token ids, ...) have no effect on inference.
NEUTRAL = {
    "hidden_act": ("silu", "swish"),
    "attention_multiplier": (None,),
    **dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"), (None,)),
    **dict.fromkeys(("quantization_config", "compression_config", "per_layer_config"), (None, {})),
    **dict.fromkeys(("is_encoder_decoder", "add_cross_attention", "use_mrope"), (None, False)),
    **dict.fromkeys(("embedding_multiplier", "residual_multiplier", "logits_scaling"), (None, 1)),
    **dict.fromkeys(("num_experts", "num_local_experts"), (None, 0)),
    "partial_rotary_factor": (None, 1),
}


def norm(raw: dict) -> RmsNorm:
    """Return the norm of a config.json."""
    return RmsNorm(scaling.positive("rms_norm_eps", raw["rms_norm_eps"]))


def attention(raw: dict, *, partly_rotated: bool = False, **switches: Any) -> Attention:
    """Return the attention of a config.json; ``switches`` are further fields of it.

    ``partly_rotated`` allows a ``partial_rotary_factor`` other than 1.
    """
    num_heads, num_kv_heads, head_dim = heads(raw)
    rotary_dim = rotated_size(raw, head_dim, partly_rotated)
    rope = scaling.read(raw, rotary_dim or head_dim)[0]
    return Attention(num_heads, num_kv_heads, head_dim, rope, rotary_dim, **switches)


def heads(raw: dict) -> tuple[int, int, int]:
    """Return the numbers of query heads and of key heads, and the width of a head."""
    heads = whole(raw, "num_attention_heads")
    kv_heads = whole_or(raw, "num_key_value_heads", heads)
    head_dim = whole_or(raw, "head_dim", whole(raw, "hidden_size") // heads)
    if heads % kv_heads or head_dim % 2 or head_dim < 2:
        raise ValueError(
            f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
            f"({kv_heads}), and head_dim ({head_dim}) even"
        )
    return heads, kv_heads, head_dim


def rotated_size(raw: dict, head_dim: int, partly_rotated: bool = False) -> int | None:
    """Return the number of rotated features of a head; None for all."""
    factors = [keys.get("partial_rotary_factor") for keys in (scaling.merged(raw), raw)]
    factor = next((value for value in factors if value is not None), 1)
    if factor == 1:
        return None
    if not partly_rotated:
        raise ValueError("partial_rotary_factor other than 1 is not supported")
    size = int(head_dim * scaling.positive("partial_rotary_factor", factor))
    if size % 2 or not 2 <= size <= head_dim:
        raise ValueError(
            f"partial_rotary_factor={shown(factor)} of head_dim {head_dim} rotates {size} "
            "features, but they must be an even number of them"
        )
    return None if size == head_dim else size


def alike(
    raw: dict,
    mixer: Mixer,
    feed_forward: FeedForward,
    windows: Sequence[int | None] = (),
    ropes: Sequence[RopeConfig | None] = (),
    **fields: Any,
) -> tuple[Layer, ...]:
    """Return as many equal layers as a config.json states, with a window and a rope for each.

    ``fields`` are further ones of every ``Layer``.
    """
    count = whole(raw, "num_hidden_layers")
    windows, ropes = windows or (mixer.window,) * count, ropes or (mixer.rope,) * count
    kinds = dict.fromkeys(zip(windows, ropes, strict=True), mixer)
    for window, rope in kinds:
        if (window, rope) != (mixer.window, mixer.rope):
            kinds[window, rope] = dataclasses.replace(mixer, window=window, rope=rope)
    if "norm" not in fields:
        fields["norm"] = norm(raw)
    each = zip(windows, ropes, strict=True)
    return tuple(Layer(kinds[kind], feed_forward, **fields) for kind in each)


def mlp(raw: dict, bias: bool = False) -> GatedMlp:
    """Return the MLP of a config.json."""
    return GatedMlp(whole(raw, "intermediate_size"), bias)


def attention_of(config: DecoderConfig) -> Attention:
    """Return the attention of the first layer, for ``Family.describe``; see there."""
    mixer = config.layers[0].mixer
    if not isinstance(mixer, Attention):
        raise ValueError(f"its layers have {mixer.title}")
    return mixer


def mlp_of(config: DecoderConfig) -> GatedMlp:
    """Return the MLP of the first layer, for ``Family.describe``; see there."""
    feed_forward = config.layers[0].feed_forward
    if not isinstance(feed_forward, GatedMlp):
        raise ValueError(f"its layers have {feed_forward.title}")
    return feed_forward


def whole(raw: dict, key: str, least: int = 1) -> int:
    """Return the integer under ``key``, at least ``least`` and at most a plausible size."""
    value, most = raw.get(key), _MOST.get(key, INT32 - 1)
    if type(value) is not int or value < least:
        kind = "a positive integer" if least == 1 else f"an integer of at least {least}"
        raise ValueError(f"{key} must be {kind}, got {shown(value)}")
    if value > most:
        raise ValueError(f"{key} must be at most {most}, got {shown(value)}")
    return value


def whole_or(raw: dict, key: str, default: int) -> int:
    """Return ``whole(raw, key)``, or ``default`` if the key is missing or null."""
    return default if raw.get(key) is None else whole(raw, key)


def flag(raw: dict, key: str) -> bool:
    """Return the boolean under ``key``; null counts as false."""
    value = raw.get(key)
    if value not in (None, False, True):
        raise ValueError(f"{key} must be true or false, got {shown(value)}")
    return bool(value)


def architectures(raw: dict) -> list[str]:
    """Return the list of names under ``architectures``, or [] if it is missing."""
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures must be a list of names, got {shown(names)}")
    return names


def counted(names: Sequence[tuple[str, str]], most: int) -> tuple[int, int]:
    """Return the numbers of heads, and of blocks of a head, from the digits in tensors' names.

    Raise ValueError if there are more than ``most``, the tensors of the file.
    """
    longest = [max(digits, key=lambda x: (len(x), x)) for digits in zip(*names, strict=True)]
    heads, blocks = (1 + int(digits[:7]) for digits in longest)
    if heads * blocks > most:
        raise ValueError(
            f"names of tensors number head {shown(longest[0], 40)} and block "
            f"{shown(longest[1], 40)}, but the file has no more than {most} tensors"
        )
    return heads, blocks


def windows(raw: dict) -> tuple[int | None, ...]:
    """Return the sliding window of every layer from Qwen's four keys; () for none."""
    count = whole(raw, "num_hidden_layers")
    sliding = raw["sliding_window"] is not None and flag(raw, "use_sliding_window")
    kinds = layer_types(raw)
    if kinds is None:
        first = whole(raw, "max_window_layers", least=0)
        kinds = [KINDS[sliding and layer >= first] for layer in range(count)]
    if SLIDING not in kinds:
        return ()
    if not sliding:
        raise ValueError(
            "layer_types names sliding_attention, but use_sliding_window is "
            f"{shown(raw['use_sliding_window'])} and sliding_window "
            f"{shown(raw['sliding_window'])}; set both"
        )
    return sized(raw, kinds)


def layer_types(raw: dict) -> list[str] | None:
    """Return the kind of every layer, or None if a config.json does not state them."""
    kinds, count = raw.get("layer_types"), whole(raw, "num_hidden_layers")
    if kinds is None:
        return None
    if not isinstance(kinds, list) or len(kinds) != count or any(k not in KINDS for k in kinds):
        raise ValueError(
            f"layer_types must name {' or '.join(KINDS)} for each of {count} layers, got "
            f"{shown(kinds)}"
        )
    return kinds


def sized(raw: dict, kinds: Sequence[str]) -> tuple[int | None, ...]:
    """Return the sliding window of every layer, given their kinds."""
    size = whole(raw, "sliding_window") if SLIDING in kinds else None
    return tuple(size if kind == SLIDING else None for kind in kinds)


def every(raw: dict, interval: object) -> tuple[int | None, ...]:
    """Return the windows of ``layer_types``; by default one layer in ``interval`` has none."""
    count, kinds = whole(raw, "num_hidden_layers"), layer_types(raw)
    if kinds is None and (type(interval) is not int or interval < 1):
        raise ValueError(
            f"sliding_window_pattern must be a positive integer, got {shown(interval)}; or give "
            "layer_types"
        )
    return sized(raw, kinds or [KINDS[(layer + 1) % interval != 0] for layer in range(count)])


def ropes(
    raw: dict, windows: Sequence[int | None], rotary_dim: int, local_theta: str = "rope_theta"
) -> list[RopeConfig]:
    """Return the rope of every layer: one for layers without a window, one for those with.

    ``local_theta`` is the old key for the theta of layers with a window.
    """
    full, local = (
        scaling.read(scaling.of_kind(raw, kind, theta), rotary_dim)[0]
        for kind, theta in ((FULL, "rope_theta"), (SLIDING, local_theta))
    )
    return [full if window is None else local for window in windows]


def describe_rotated(config: DecoderConfig) -> dict:
    """Return the keys of attention that rotates a part of each head, or all of it."""
    mixer = attention_of(config)
    share = (mixer.rotary_dim or mixer.head_dim) / mixer.head_dim
    rope = scaling.write(mixer.rope, config.max_positions)["rope_parameters"]
    return {
        "partial_rotary_factor": share,
        "rope_parameters": rope | {"partial_rotary_factor": share},
    }


def describe_kinds(config: DecoderConfig) -> dict:
    """Return the keys of ``sized`` and ``layer_types``; they keep one size for all layers."""
    size = next((size for size in config.windows if size is not None), None)
    kinds = [KINDS[size is not None] for size in config.windows]
    return {"sliding_window": size, "layer_types": kinds}


def describe_windows(config: DecoderConfig) -> dict:
    """Return the inverse of ``windows``; it keeps one size for all layers."""
    return describe_kinds(config) | {
        "use_sliding_window": any(config.windows),
        "max_window_layers": config.num_layers,  # layer_types decides in new readers
    }


def _refuse(raw: dict, neutral: dict) -> None:
    method = raw.get("quantization_config")
    if isinstance(method, dict) and method:
        raise ValueError(
            f"quantised weights (quant_method {shown(method.get('quant_method'))}) are not "
            "read; take a checkpoint in bfloat16, or convert this one and remove "
            "quantization_config"
        )
    wrong = [
        f"{key}={shown(raw[key])} (only {' or '.join(repr(value) for value in allowed)})"
        for key, allowed in neutral.items()
        if allowed is not None and key in raw and raw[key] not in allowed
    ]
    if wrong:
        raise ValueError(f"not supported: {', '.join(wrong)}")
