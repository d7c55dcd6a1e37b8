"""What the families share: a ``Family`` and the parts of config.json that mean the same in all."""

import dataclasses
from collections.abc import Callable, Sequence

from jspec.checkpoints.families import scaling
from jspec.checkpoints.families.names import Entry, llama_table
from jspec.models.decoder import DecoderConfig
from jspec.util.messages import shown
from jspec.util.values import INT32


@dataclasses.dataclass(frozen=True)
class Family:
    """One ``model_type`` of Hugging Face: how its config.json and its tensors map to a decoder."""

    model_type: str
    architecture: str
    defaults: dict  # what `transformers` assumes for keys that config.json leaves out
    # Keys that we do not implement, and the values under which they do nothing; None for a key that
    # other families do not implement, but this one does.
    neutral: dict
    special: Callable[[dict], dict]  # config.json to the fields of DecoderConfig that differ
    describe: Callable[[DecoderConfig], dict]  # the inverse of ``special``
    table: Callable[[DecoderConfig], tuple[Entry, ...]] = llama_table
    partly_rotated: bool = False  # whether ``partial_rotary_factor`` may be other than 1

    def read(self, raw: dict) -> DecoderConfig:
        """The decoder that a config.json describes.

        Raises:
          ValueError: a key is missing, malformed, or has a value that is not implemented.
        """
        raw = self.defaults | raw
        _refuse(raw, _NEUTRAL | self.neutral)
        heads, hidden = whole(raw, "num_attention_heads"), whole(raw, "hidden_size")
        given = lambda key, default: default if raw[key] is None else whole(raw, key)
        kv_heads, head_dim = given("num_key_value_heads", heads), given("head_dim", hidden // heads)
        if heads % kv_heads or head_dim % 2 or head_dim < 2:
            raise ValueError(
                f"num_attention_heads ({heads}) must be a multiple of num_key_value_heads "
                f"({kv_heads}), and head_dim ({head_dim}) even"
            )
        whole(raw, "max_position_embeddings")
        if raw.get("num_nextn_predict_layers") is not None:  # of modules that ride along
            whole(raw, "num_nextn_predict_layers", least=0)
        sizes = {
            "vocab_size": whole(raw, "vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": whole(raw, "intermediate_size"),
            "num_layers": whole(raw, "num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "norm_eps": scaling.positive("rms_norm_eps", raw["rms_norm_eps"]),
            "tie_embeddings": flag(raw, "tie_word_embeddings"),
            "rotary_dim": self._rotary_dim(raw, head_dim),
        }
        sizes |= self.special(raw)
        latent = sizes.get("mla")
        rotated = latent.rope_dim if latent else sizes["rotary_dim"] or sizes["head_dim"]
        rope, max_positions = scaling.read(raw, rotated)
        return DecoderConfig(rope=rope, max_positions=max_positions, **sizes)

    def _rotary_dim(self, raw: dict, head_dim: int) -> int | None:
        """Features of a head that are rotated; None for all."""
        places = (scaling.merged(raw), raw)
        found = [place.get("partial_rotary_factor") for place in places]
        factor = next((value for value in found if value is not None), 1)
        if factor == 1:
            return None
        if not self.partly_rotated:
            raise ValueError("partial_rotary_factor other than 1 is not supported")
        size = int(head_dim * scaling.positive("partial_rotary_factor", factor))
        if size % 2 or not 2 <= size <= head_dim:
            raise ValueError(
                f"partial_rotary_factor={shown(factor)} of head_dim {head_dim} rotates {size} "
                "features, but they must be an even number of them"
            )
        return None if size == head_dim else size

    def write(self, config: DecoderConfig) -> dict:
        """A config.json for ``config``; only ``read`` can tell whether it says everything."""
        return {
            "architectures": [self.architecture],
            "model_type": self.model_type,
            "vocab_size": config.vocab_size,
            "hidden_size": config.hidden_size,
            "intermediate_size": config.intermediate_size,
            "num_hidden_layers": config.num_layers,
            "num_attention_heads": config.num_heads,
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": config.norm_eps,
            "tie_word_embeddings": config.tie_embeddings,
            "attention_dropout": 0.0,
            "initializer_range": 0.02,
            "use_cache": True,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **scaling.write(config.rope, config.max_positions),
            **self.describe(config),
        }


# Sizes have no defaults: a config.json without them is damaged.
SHARED_DEFAULTS = {
    "num_key_value_heads": None,
    "head_dim": None,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

# Of these there is a list somewhere, with a place for each.
_MOST = dict.fromkeys(
    (
        "num_hidden_layers",
        "n_predict",
        "num_nextn_predict_layers",
        "mtp_num_hidden_layers",
        "medusa_num_layers",
        "num_heads",
        "medusa_num_heads",
        "block_size",
    ),
    4096,
) | dict.fromkeys(("n_routed_experts", "num_experts"), 1 << 16)

# Keys through which relatives of these families change the computation. Others that we do not
# read (dropout, initialisation, token ids, ...) have no say in inference.
_NEUTRAL = {
    "hidden_act": ("silu", "swish"),
    "partial_rotary_factor": (None, 1),
    "quantization_config": (None, {}),
    "compression_config": (None, {}),
    "is_encoder_decoder": (None, False),
    "add_cross_attention": (None, False),
    "per_layer_config": (None, {}),
    "use_mrope": (None, False),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "attention_multiplier": (None,),
    "embedding_multiplier": (None, 1),
    "residual_multiplier": (None, 1),
    "logits_scaling": (None, 1),
    "num_experts": (None, 0),
    "num_local_experts": (None, 0),
}


def whole(raw: dict, key: str, least: int = 1) -> int:
    """The integer under ``key``, at least ``least``, and no more than any network has."""
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
    """The boolean under ``key``; null counts as false."""
    value = raw.get(key)
    if value not in (None, False, True):
        raise ValueError(f"{key} must be true or false, got {shown(value)}")
    return bool(value)


def architectures(raw: dict) -> list[str]:
    """The names under ``architectures``; none where it is missing.

    Raises:
      ValueError: it is no list of names.
    """
    names = raw.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"architectures must be a list of names, got {shown(names)}")
    return names


def counted(names: Sequence[tuple[str, str]], most: int) -> tuple[int, int]:
    """How many heads, and blocks of a head, names of tensors number from 0 on.

    Args:
      names: (head, block) of each such tensor, as digits.
      most: tensors of the file.

    Raises:
      ValueError: they number more than the file has tensors.
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
    """The sliding window of every layer, from the four keys that Qwen has for it."""
    count = whole(raw, "num_hidden_layers")
    sliding = raw["sliding_window"] is not None and flag(raw, "use_sliding_window")
    kinds = raw["layer_types"]
    if kinds is None:
        first = whole(raw, "max_window_layers", least=0)
        kinds = [
            "sliding_attention" if sliding and layer >= first else "full_attention"
            for layer in range(count)
        ]
    known = ("full_attention", "sliding_attention")
    if not isinstance(kinds, list) or len(kinds) != count or any(k not in known for k in kinds):
        raise ValueError(
            f"layer_types must name full_attention or sliding_attention for each of {count} "
            f"layers, got {shown(kinds)}"
        )
    if "sliding_attention" not in kinds:
        return ()
    if not sliding:
        raise ValueError(
            "layer_types names sliding_attention, but use_sliding_window is "
            f"{shown(raw['use_sliding_window'])} and sliding_window "
            f"{shown(raw['sliding_window'])}; set both"
        )
    size = whole(raw, "sliding_window")
    return tuple(size if kind == "sliding_attention" else None for kind in kinds)


def describe_windows(config: DecoderConfig) -> dict:
    """The inverse of ``windows``; layers share one size, or ``read`` gives something else."""
    per_layer = config.windows or (None,) * config.num_layers
    sizes = [size for size in per_layer if size is not None]
    return {
        "use_sliding_window": bool(sizes),
        "sliding_window": sizes[0] if sizes else None,
        "layer_types": [
            "full_attention" if size is None else "sliding_attention" for size in per_layer
        ],
        "max_window_layers": config.num_layers,  # layer_types decides; old readers see no window
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
