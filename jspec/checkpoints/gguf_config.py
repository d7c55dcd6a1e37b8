"""The metadata of GGUF files as config.json, and their tensors under Hugging Face's names."""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from jspec.checkpoints.gguf_files import GgufFile, GgufTensor
from jspec.models.blocks import rope
from jspec.util.messages import shown

_FREQUENCIES = "rope_freqs.weight"  # the only trace of Llama 3's rotary scaling
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
    "logit_scale": (0.0, 1.0),
    "residual_scale": (0.0, 1.0),
    "rope.scaling.alpha": (0.0, 1.0),
    "rope.scaling.attn_factor": (0.0, 1.0),
    "rope.scaling.yarn_ext_factor": (-1.0, 1.0),
    "rope.scaling.yarn_log_multiplier": (0.0,),
    "use_parallel_residual": (False,),
}


def _biases(file: GgufFile) -> dict:
    """Return Llama's switches, by the names of the tensors."""
    return {
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


_CAPS = ("attn_logit_softcapping", "final_logit_softcapping")


def _gemma(file: GgufFile) -> dict:
    """Return the keys of Gemma 2 and 3 that files leave to llama.cpp, as it sets them.

    Models of 46 and 62 layers, the largest ones, scale scores by the width of a share of the
    stream, and others by that of a head.
    """
    get = lambda key: _number(file.get("{arch}." + key))
    width, heads = get("embedding_length"), get("attention.head_count")
    is_large = get("block_count") in (46, 62)
    given = {
        "query_pre_attn_scalar": width // heads if is_large else get("attention.key_length"),
        "sliding_window": get("attention.sliding_window"),
        "rope_local_base_freq": get("rope.freq_base_swa"),
        **{key: get(key) for key in _CAPS},
    }
    return {key: value or None for key, value in given.items() if value is not None}


@dataclasses.dataclass(frozen=True)
class _Architecture:
    """One ``general.architecture``.

    Attributes:
      family: ``model_type`` of the family.
      permuted: whether the rows of q and k are stored as pairs of neighbours.
      centred: whether norms, which the family stores minus one, are stored whole.
      special: returns keys that are particular to the family.
      read: keys of ``_NEUTRAL`` that ``special`` reads.
    """

    family: str
    permuted: bool = False
    centred: bool = False
    read: tuple[str, ...] = ()
    special: Callable[[GgufFile], dict] = lambda _: {}


def _without_window(file: GgufFile) -> dict:
    """Return no keys; raise ValueError for Olmo 3, whose files have the architecture of OLMo 2."""
    if window := file.get("{arch}.attention.sliding_window"):
        raise ValueError(
            f"attention.sliding_window={shown(window)} of olmo2 is not supported in GGUF files; "
            "take the Hugging Face files"
        )
    return {}


_ARCHITECTURES = {
    "llama": _Architecture("llama", permuted=True, special=_biases),
    "qwen2": _Architecture("qwen2"),
    "qwen3": _Architecture("qwen3"),
    "olmo2": _Architecture("olmo2", special=_without_window),
    "gemma2": _Architecture("gemma2", centred=True, special=_gemma, read=_CAPS),
    "gemma3": _Architecture("gemma3_text", centred=True, special=_gemma, read=_CAPS),
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
    architecture = _architecture(file)
    name = file.get("general.architecture")
    wrong = [
        f"{name}.{key}={shown(value)}"
        for key, neutral in _NEUTRAL.items()
        if key not in architecture.read
        and (value := file.get("{arch}." + key)) is not None
        and value not in neutral
    ]
    if wrong:
        raise ValueError(f"not supported: {', '.join(wrong)}")
    missing = [f"{name}.{key}" for key in _KEYS.values() if file.get("{arch}." + key) is None]
    if missing:
        raise ValueError(f"its metadata lack {', '.join(missing)}; download it again")
    keys = _KEYS | _OPTIONAL
    raw = {ours: _number(file.get("{arch}." + key)) for ours, key in keys.items()}
    raw = {key: value for key, value in raw.items() if value is not None}
    raw |= {
        "model_type": architecture.family,
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": file.dtype,
        "bos_token_id": file.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": end_ids(file),
        **architecture.special(file),
    }
    raw["rope_scaling"] = _scaling(file, raw)
    head_dim = raw.get("head_dim") or raw["hidden_size"] // raw["num_attention_heads"]
    for key in ("attention.value_length", "rope.dimension_count"):
        if (size := file.get("{arch}." + key, head_dim)) != head_dim:
            raise ValueError(f"{name}.{key}={size} is not supported, only {head_dim} (all of head)")
    return raw


def tensors(file: GgufFile, raw: dict, names: Iterable[str]) -> dict[str, GgufTensor]:
    """Return the tensors under the names of Hugging Face.

    Args:
      file: its tensors.
      raw: ``read(file)``.
      names: of Hugging Face. Tensors without one keep the name of the file.
    """
    import gguf

    architecture = _architecture(file)
    kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
    kind = kinds[file.get("general.architecture")]
    table = gguf.get_tensor_name_map(kind, raw["num_hidden_layers"])
    stored = dict(file.tensors)
    stored.pop(_FREQUENCIES, None)
    renamed = {}
    for name in names:
        tensor = stored.pop(table.get_name(name, (".weight", ".bias")), None)
        if tensor is not None:
            tensor = _ordered(name, tensor, raw) if architecture.permuted else tensor
            is_less = architecture.centred and name.endswith("norm.weight")
            renamed[name] = dataclasses.replace(tensor, offset=-1.0) if is_less else tensor
    return renamed | stored


def _architecture(file: GgufFile) -> _Architecture:
    name = file.get("general.architecture")
    if name not in _ARCHITECTURES:
        known = ", ".join(_ARCHITECTURES)
        raise ValueError(
            f"architecture {shown(name)} is not supported in GGUF files; known: {known}"
        )
    return _ARCHITECTURES[name]


def _number(value: Any) -> Any:
    """Return a float32 of the metadata as the shortest number that rounds to it."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ValueError("it has no tensor token_embd.weight; download it again")
    return embedding.shape[0]


def _ordered(name: str, tensor: GgufTensor, raw: dict) -> GgufTensor:
    """Undo llama.cpp's order of q and k, which has features i and i + d/2 as neighbours."""
    part = name.split(".")[-2]
    if part not in ("q_proj", "k_proj"):
        return tensor
    heads = raw["num_attention_heads"]
    heads = raw.get("num_key_value_heads", heads) if part == "k_proj" else heads
    rows = tensor.shape[0]
    if rows % (2 * heads):
        return tensor  # its shape is refused later
    stored = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return dataclasses.replace(tensor, order=stored.swapaxes(1, 2).reshape(-1))


def _scaling(file: GgufFile, raw: dict) -> dict | None:
    """Return ``rope_scaling``."""
    kind = file.get("{arch}.rope.scaling.type") or "none"
    prefix = "{arch}.rope.scaling."
    factor = _number(file.get(prefix + "factor"))
    if _FREQUENCIES in file.tensors:
        return _llama3(file, raw)
    if kind == "none" or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        keys = {ours: _number(file.get(prefix + key)) for ours, key in _YARN.items()}
        keys["original_max_position_embeddings"] = file.get(prefix + "original_context_length")
        given = {key: value for key, value in keys.items() if value is not None}
        return {"rope_type": "yarn", "factor": factor, **given}
    raise ValueError(f"rope.scaling.type={shown(kind)} is not supported in GGUF files")


def _llama3(file: GgufFile, raw: dict) -> dict:
    """Return Llama 3's scaling, whose divisors of the frequencies are all that files keep.

    Its factors are 1 and 4, and its original length 8192, in all published models.
    """
    stored = file.tensors[_FREQUENCIES][:].astype(np.float64)
    head_dim = 2 * len(stored)
    theta, factor = raw.get("rope_theta", 10000.0), _number(float(stored.max()))
    low, high, original = 1.0, 4.0, 8192
    config = rope.RopeConfig(theta, "llama3", factor, original, low, high)
    plain = rope.RopeConfig(theta)
    expected = rope.frequencies(plain, head_dim) / rope.frequencies(config, head_dim)
    if not np.allclose(stored, expected, rtol=1e-4):
        raise ValueError(f"{_FREQUENCIES} holds a rotary scaling that is not Llama 3's")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": original,
    }


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
