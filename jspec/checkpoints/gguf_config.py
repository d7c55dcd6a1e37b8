"""The metadata of GGUF files as config.json."""

import re

import numpy as np

from jspec.checkpoints.gguf_architectures import Architecture, find, number
from jspec.checkpoints.gguf_files import GgufFile
from jspec.models.blocks import rope
from jspec.util.messages import shown

FREQUENCIES = "rope_freqs.weight"  # the only trace of Llama 3's rotary scaling
FACTORS = "rope_factors_short.weight", "rope_factors_long.weight"
_KEYS = {
    "num_hidden_layers": "block_count",
    "hidden_size": "embedding_length",
    "intermediate_size": "feed_forward_length",
    "num_attention_heads": "attention.head_count",
    "max_position_embeddings": "context_length",
    "rms_norm_eps": "attention.layer_norm_rms_epsilon",
}
_OPTIONAL = {
    "num_key_value_heads": "attention.head_count_kv",
    "head_dim": "attention.key_length",
    "rope_theta": "rope.freq_base",
}
_YARN = {
    "attention_factor": "yarn_attn_factor",
    "beta_fast": "yarn_beta_fast",
    "beta_slow": "yarn_beta_slow",
}
# Keys that change the computation, with the values that have no effect.
_NEUTRAL: dict[str, tuple] = {
    "attention.clamp_kqv": (0.0,),
    "attention.scale": (0.0,),
    "attn_logit_softcapping": (0.0,),
    "final_logit_softcapping": (0.0,),
    "embedding_scale": (0.0, 1.0),
    "expert_count": (0,),
    "expert_weights_scale": (0.0, 1.0),
    "expert_group_count": (0, 1),
    "expert_shared_count": (0,),
    "attention.temperature_scale": (0.0,),
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}


def read(file: GgufFile) -> dict:
    """Return the config.json of a model.

    Raises:
      ValueError: the architecture or a setting is not supported, or a size is missing.
    """
    if (kind := file.get("general.type", "model")) != "model":
        remedy = (
            "merge it into its model first (llama.cpp's llama-export-lora)"
            if kind == "adapter"
            else "give the file of the model itself"
        )
        raise ValueError(f"it is of type {shown(kind)}, not a model; {remedy}")
    architecture = find(file)
    name = file.get("general.architecture")
    wrong = [
        f"{name}.{key}={shown(value)}"
        for key, neutral in _NEUTRAL.items()
        if key not in (*architecture.keys.values(), *architecture.read)
        and (value := file.get("{arch}." + key)) is not None
        and value not in neutral
    ]
    if wrong:
        raise ValueError(f"not supported: {', '.join(wrong)}")
    keys = _KEYS | _OPTIONAL | architecture.keys
    raw = {ours: number(file.get("{arch}." + key)) for ours, key in keys.items()}
    missing = [f"{name}.{keys[key]}" for key in _KEYS if raw[key] is None and key in _required(raw)]
    if missing:
        raise ValueError(f"its metadata lack {', '.join(missing)}; download it again")
    raw = architecture.constants | {key: value for key, value in raw.items() if value is not None}
    tensors = {re.sub(r"^blk\.\d+\.", "", name) for name in file.tensors}
    raw |= {
        "model_type": architecture.family,
        "num_hidden_layers": raw["num_hidden_layers"] - file.get("{arch}.nextn_predict_layers", 0),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": file.dtype,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(file),
        **{key: tensor in tensors for key, tensor in architecture.biases.items()},
    }
    raw.setdefault("intermediate_size", raw.get("moe_intermediate_size"))
    raw["rope_scaling"] = _scaling(file, raw)
    raw |= _rotated(file, raw, architecture)
    return raw | architecture.special(file, raw)


def _required(raw: dict) -> set[str]:
    """Return the sizes that a file must state; models with experts alone have no other MLP."""
    width = {"moe_intermediate_size": "intermediate_size", "layer_norm_eps": "rms_norm_eps"}
    return set(_KEYS) - {width[key] for key in width if raw.get(key) is not None}


def _rotated(file: GgufFile, raw: dict, architecture: Architecture) -> dict:
    """Return the share of a head that is rotated; raise ValueError where the family has none."""
    if "kv_lora_rank" in raw:
        return {}
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    for key in ("attention.value_length", "rope.dimension_count"):
        size = file.get("{arch}." + key, head_dim)
        if key.startswith("rope") and architecture.partly_rotated:
            return {"partial_rotary_factor": size / head_dim}
        if size != head_dim:
            name = file.get("general.architecture")
            raise ValueError(f"{name}.{key}={size} is not supported, only {head_dim} (all of head)")
    return {}


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError("it has no tensor token_embd.weight; download it again")
    return embedding.shape[0]


def _scaling(file: GgufFile, raw: dict) -> dict | None:
    """Return ``rope_scaling``."""
    kind = file.get("{arch}.rope.scaling.type") or "none"
    prefix = "{arch}.rope.scaling."
    factor = number(file.get(prefix + "factor"))
    if FREQUENCIES in file.tensors:
        return _llama3(file, raw)
    if all(name in file.tensors for name in FACTORS):
        return _longrope(file)
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        keys = {ours: number(file.get(prefix + key)) for ours, key in _YARN.items()}
        keys["original_max_position_embeddings"] = file.get(prefix + "original_context_length")
        given = {key: value for key, value in keys.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, **given}
    raise ValueError(f"rope.scaling.type={shown(kind)} is not supported in GGUF files")


def _llama3(file: GgufFile, raw: dict) -> dict:
    """Return Llama 3's scaling, whose divisors of the frequencies are all that files keep.

    Its factors are 1 and 4, and its original length 8192, in most published models. Divisors of
    others are kept as they are.
    """
    stored = file.tensors[FREQUENCIES][:].astype(np.float64)
    head_dim = 2 * len(stored)
    theta, factor = raw.get("rope_theta", 10000.0), number(float(stored.max()))
    low, high, original = 1.0, 4.0, 8192
    config = rope.RopeConfig(theta, "llama3", factor, original, low, high)
    plain = rope.RopeConfig(theta)
    expected = rope.frequencies(plain, head_dim) / rope.frequencies(config, head_dim)
    if not np.allclose(stored, expected, rtol=1e-4):
        factors = stored.tolist()
        return _of_factors(factors, factors, {"attention_factor": 1.0})
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


def _longrope(file: GgufFile) -> dict:
    """Return the scaling of Phi-3, with divisors for short texts and for long ones."""
    short, long = ([number(float(x)) for x in file.tensors[name][:]] for name in FACTORS)
    keys = {
        "attention_factor": number(file.get("{arch}.rope.scaling.attn_factor")),
        "original_max_position_embeddings": file.get("{arch}.rope.scaling.original_context_length"),
    }
    return _of_factors(short, long, {k: value for k, value in keys.items() if value is not None})


def _of_factors(short: list[float], long: list[float], keys: dict) -> dict:
    return {"rope_type": "longrope", "short_factor": short, "long_factor": long, **keys}


# Tokens that end an answer wherever they exist; files name only one or two of them.
ENDS = (
    *("<|endoftext|>", "<|im_end|>", "<|end|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>"),
    *("<end_of_turn>", "<|endofturn|>", "<|return|>", "<|call|>", "<EOT>", "[EOT]", "[EOS]"),
    *("_<EOT>", "<end_of_utterance>", "<\uff5cend\u2581of\u2581sentence\uff5c>"),
)
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")
CONTROL = 3  # ggml's type of special tokens


def end_ids(file: GgufFile) -> list[int]:
    """Return the end-of-text ids of the metadata, and the tokens of the texts in ``ENDS``.

    Their type does not count, as in llama.cpp: some files mark them as tokens of the user.
    """
    named = {file.get(f"tokenizer.ggml.{key}") for key in _END_KEYS} - {None}
    tokens = file.get("tokenizer.ggml.tokens", [])
    return sorted({int(i) for i in named} | {i for i, t in enumerate(tokens) if t in ENDS})
