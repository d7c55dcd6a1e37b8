"""EAGLE heads in files: which config.json makes which ``EagleConfig``, and the tensors' names.

Four layouts, told apart by what is in them, never by a file's name:

  * ``eagle``: EAGLE-1 and -2 as published (``fc``, ``layers.i``, no norm at the end).
  * ``eagle3``: EAGLE-3 as published and as SpecForge writes it (``midlayer.*``); SGLang reads it.
  * ``speculators``: EAGLE-3 as the speculators library writes it (``layers.0.*``, and a config.json
    with ``speculators_model_type``), and P-EAGLE (``mask_hidden``, and type "peagle").
  * ``peagle``: P-EAGLE as SpecForge writes it (``layers.0.*``, and a config.json like that of
    ``eagle3``). Its mask token is read under any of the names in ``mask_token.KEYS``.

What the readers of these files disagree about, and how it is read here:

  * ``norm_before_residual``: missing means false in ``eagle3`` and ``peagle``, and in
    ``speculators`` for P-EAGLE, as everyone there has it; for its EAGLE-3 heads vLLM takes true and
    the library itself false, so a file without it is refused.
  * ``norm_output``: true means that the head's own norm comes before its output is fed back (vLLM,
    SGLang, speculators, and SpecForge since September 2026; before, SpecForge trained as if it were
    false whatever it said).
  * ``eagle_aux_hidden_state_layer_ids``: see ``eagle_layers``.
  * Biases that config.json does not mention exist if the file has them.
  * An ``lm_head`` or ``embed_tokens`` in the file is used, though some servers prefer the target's.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.checkpoints import families
from jspec.checkpoints.families import common, llama, qwen3
from jspec.checkpoints.families.names import Entry, block_table, blocks, nest
from jspec.checkpoints.heads import eagle_layers, mask_token
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.eagle import EagleConfig, EagleParams
from jspec.util.messages import shown

SPECULATORS = "speculators_model_type"
FIRST = "layers.0"  # called "midlayer" in layout ``eagle3``
MASK = "mask_hidden"
_PEAGLE = "PEagleDraftModel"  # SpecForge's name for it, which vLLM knows
_Q_PROJ = f"{FIRST}.self_attn.q_proj.weight"
# The keys of config.json that these networks share with Llama; others (model_type among them: heads
# copy their target's) say nothing about a head.
_NETWORK_KEYS = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "hidden_act",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
    "rope_scaling",
    "rope_parameters",
    "original_max_position_embeddings",
    "partial_rotary_factor",
    "quantization_config",
    "compression_config",
)
_DEFAULT_TOKENS = 5  # what a server drafts unless it is told otherwise
# Switches of ``eagle_config`` that nothing here implements, and the value that EAGLE-3 has.
_NEUTRAL = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


# Reading.


def generation(tensors: Mapping[str, np.ndarray]) -> int | None:
    """1 for EAGLE-1 and -2, 3 for EAGLE-3, None for something else, by the tensors.

    Only EAGLE-3's attention reads the embedding beside the feature, so its inputs are twice as many
    as fc's outputs.
    """
    if "fc.weight" not in tensors or _Q_PROJ not in tensors:
        return None
    twice = tensors[_Q_PROJ].shape[-1:] == (2 * tensors["fc.weight"].shape[0],)
    return 3 if twice or f"{FIRST}.hidden_norm.weight" in tensors else 1


def layout(raw: dict, tensors: Mapping[str, np.ndarray]) -> str | None:
    """The layout of a head with such tensors; None for something else."""
    found = generation(tensors)
    if found != 3:
        return "eagle" if found == 1 else None
    if SPECULATORS in raw:
        return "speculators"
    return "peagle" if MASK in tensors else "eagle3"


def read(raw: dict, tensors: Mapping[str, np.ndarray], target: DecoderConfig) -> EagleConfig:
    """The head that a config.json and its tensors describe, for ``target``.

    Raises:
      ValueError: a key is missing, malformed, ambiguous or not supported, or the head was made for
        another target.
    """
    speculators = SPECULATORS in raw
    inner = _transformer_config(raw) if speculators else raw
    vocab = _given(raw, "draft_vocab_size", common.whole(inner, "vocab_size"))
    common_fields = {
        "network": _network(inner, tensors, vocab),
        "target_hidden_size": _given(raw, "target_hidden_size", common.whole(inner, "hidden_size")),
        "target_vocab_size": inner["vocab_size"],
        "separate_embedding": "embed_tokens.weight" in tensors,
        "separate_head": "lm_head.weight" in tensors,
        "fc_bias": _stated(raw, ("bias",), "fc.bias", tensors),
    }
    _check_target(common_fields, target)
    if generation(tensors) == 1:
        return EagleConfig(
            generation=1,
            capture_layers=(target.num_layers,),
            norm_inputs=common.flag(raw, "add_para_norm"),
            **common_fields,
        )
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"eagle_config must be an object, got {shown(nested)}")
    wrong = [f"{k}={shown(nested[k])}" for k, v in _NEUTRAL.items() if nested.get(k, v) is not v]
    if wrong:
        raise ValueError(f"not supported in eagle_config: {', '.join(wrong)}")
    parallel = MASK in tensors or raw.get(SPECULATORS) == "peagle"
    if speculators and not parallel and raw.get("norm_before_residual") is None:
        raise ValueError(
            "norm_before_residual is missing, which vLLM reads as true and speculators as false; "
            "state the one that the head was trained with"
        )
    return EagleConfig(
        generation=3,
        capture_layers=eagle_layers.read(raw, nested, target.num_layers),
        feature_norms=common.flag(raw, "fc_norm"),
        input_norm=common.flag(raw, "norm_before_fc") or common.flag(nested, "norm_before_fc"),
        norm_before_residual=common.flag(raw, "norm_before_residual"),
        norm_output=common.flag(raw, "norm_output"),
        mask_token_id=_mask_token(raw) if parallel else None,
        **common_fields,
    )


def _mask_token(raw: dict) -> int:
    found = mask_token.mask_token_id(raw)
    if found is None:
        raise ValueError(
            f"the head guesses several tokens in one pass, but config.json names no mask token for "
            f"it under any of {', '.join(mask_token.KEYS)}; add the one that it was trained with"
        )
    return found


def _transformer_config(raw: dict) -> dict:
    if raw[SPECULATORS] not in ("eagle3", "peagle"):
        raise ValueError(
            f"{SPECULATORS} {shown(raw[SPECULATORS])} is not supported; known: 'eagle3', 'peagle'"
        )
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ValueError(f"transformer_layer_config must be an object, got {shown(inner)}")
    kind = inner.get("model_type", "qwen3")
    if kind not in ("llama", "qwen3"):
        raise ValueError(
            f"transformer_layer_config.model_type {shown(kind)} is not supported; known: 'llama', "
            "'qwen3'"
        )
    return families.FAMILIES[kind].defaults | inner  # the library's networks are transformers'


def _network(inner: dict, tensors: Mapping[str, np.ndarray], vocab: int) -> DecoderConfig:
    """The head's blocks."""
    sizes = {key: inner[key] for key in _NETWORK_KEYS if key in inner}
    network = llama.FAMILY.read(sizes)
    attention = f"{FIRST}.self_attn"
    return dataclasses.replace(
        network,
        vocab_size=vocab,
        qkv_bias=_stated(
            inner, ("qkv_bias", "attention_bias"), f"{attention}.q_proj.bias", tensors
        ),
        output_bias=_stated(inner, ("attention_bias",), f"{attention}.o_proj.bias", tensors),
        mlp_bias=_stated(inner, ("mlp_bias",), f"{FIRST}.mlp.up_proj.bias", tensors),
        qk_norm=f"{attention}.q_norm.weight" in tensors,
        windows=_windows(inner),
    )


def _windows(inner: dict) -> tuple[int | None, ...]:
    """Sliding windows, where ``layer_types`` names them; ``sliding_window`` alone does nothing."""
    if inner.get("layer_types") is None:
        return ()
    return common.windows({"use_sliding_window": True, "sliding_window": None} | inner)


def _stated(raw: dict, keys: tuple[str, ...], name: str, tensors: Mapping[str, np.ndarray]) -> bool:
    """What the first of ``keys`` that is there says, else whether the file has the tensor."""
    stated = next((key for key in keys if raw.get(key) is not None), None)
    return name in tensors if stated is None else common.flag(raw, stated)


def _given(raw: dict, key: str, default: int) -> int:
    return default if raw.get(key) is None else common.whole(raw, key)


def _check_target(fields: dict, target: DecoderConfig) -> None:
    wrong = [
        f"{what} of {theirs} where the target has {ours}"
        for what, theirs, ours in (
            ("a hidden size", fields["target_hidden_size"], target.hidden_size),
            ("a vocabulary", fields["target_vocab_size"], target.vocab_size),
        )
        if theirs != ours
    ]
    if wrong:
        raise ValueError(f"the head was made for another target: it expects {' and '.join(wrong)}")


# Both ways.


def table(config: EagleConfig, first: str = FIRST) -> tuple[Entry, ...]:
    """Names of a head's tensors; those of its first block begin with ``first``."""
    network, hidden, third = config.network, config.hidden_size, config.generation == 3
    entries = [Entry(("fc",), ("fc.weight",), ((hidden, config.fc_inputs),), transpose=True)]

    def vector(field: str, size: int, *names: str) -> None:
        entries.append(Entry((field,), names, ((size,),) * len(names)))

    def matrix(field: str, rows: int, name: str, transpose: bool = False) -> None:
        entries.append(Entry((field,), (name,), ((rows, hidden),), transpose))

    if config.fc_bias:
        vector("fc_bias", hidden, "fc.bias")
    if third or config.norm_inputs:
        names = (
            (f"{first}.input_layernorm", f"{first}.hidden_norm")
            if third
            else ("embedding_layernorm", "hidden_states_layernorm")
        )
        vector("embedding_norm", hidden, f"{names[0]}.weight")
        vector("hidden_norm", hidden, f"{names[1]}.weight")
    if config.feature_norms:
        count = len(config.capture_layers)
        names = (f"fc_norm.{index}.weight" for index in range(count))
        vector("feature_norms", config.target_hidden_size, *names)
    if config.input_norm:
        vector("input_norm", config.fc_inputs, "input_norm.weight")
    width = 2 * hidden if third else hidden
    entries += block_table(network, 0, first, inputs=width, input_norm=False)
    for layer in range(1, network.num_layers):
        entries += block_table(network, layer, f"layers.{layer}")
    if third:
        vector("norm", hidden, "norm.weight")
    if config.mask_token_id is not None:
        entries.append(Entry((MASK,), (MASK,), ((1, 1, config.fc_inputs),)))
    if config.separate_head:
        matrix("head", config.vocab_size, "lm_head.weight", transpose=True)
    if config.separate_embedding:
        matrix("embedding", config.target_vocab_size, "embed_tokens.weight")
    return tuple(entries)


def assemble(entries: tuple[Entry, ...], arrays: list, draft_to_target: Any) -> EagleParams:
    """Parameters from one array for each entry."""
    nested = nest(entries, arrays)
    return EagleParams(layers=blocks(nested), draft_to_target=draft_to_target, **nested)


# Writing.


def describe(config: EagleConfig, layout: str, target: DecoderConfig, target_name: str) -> dict:
    """A config.json for ``config`` that vLLM, and for ``eagle`` and ``eagle3`` SGLang, read.

    There is no key ``bias``, though EAGLE-1 knows one for ``fc``: to vLLM and SGLang it means the
    biases of attention.

    Args:
      config: the head.
      layout: "eagle", "eagle3", "peagle" or "speculators".
      target: what it drafts for.
      target_name: hub id or path of that, for ``speculators``.

    Raises:
      ValueError: the layout cannot express the head.
    """
    _check_layout(config, layout)
    network = dataclasses.replace(
        config.network, vocab_size=config.target_vocab_size, tie_embeddings=False, windows=()
    )
    family = qwen3.FAMILY if network.qk_norm else llama.FAMILY
    inner = family.write(network) | {"attention_bias": network.output_bias}
    if layout == "eagle":
        more = {"qkv_bias": network.qkv_bias}
        return inner | more | ({"add_para_norm": True} if config.norm_inputs else {})
    eagle_layers.check(config.capture_layers, target.num_layers)
    flags = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.input_norm,
        "fc_norm": config.feature_norms,
        "norm_output": config.norm_output,
    }
    more = {"draft_vocab_size": config.vocab_size}
    if config.target_hidden_size != config.hidden_size:
        more["target_hidden_size"] = config.target_hidden_size
    mask = {} if config.mask_token_id is None else {"mask_token_id": config.mask_token_id}
    if layout in ("eagle3", "peagle"):
        kind = _PEAGLE if mask else "LlamaForCausalLMEagle3"
        served = {"pard_token": config.mask_token_id} if mask else {}  # vLLM's name for it
        return (
            inner
            | flags
            | more
            | mask
            | served
            | {"architectures": [kind]}
            | (eagle_layers.describe(config.capture_layers, target.num_layers))
        )
    verifier = {
        "name_or_path": target_name,
        "architectures": families.describe(target)["architectures"],
    }
    return flags | more | mask | _speculators_keys(config, inner, verifier)


def _check_layout(config: EagleConfig, layout: str) -> None:
    network, first = config.network, config.generation == 1
    parallel = config.mask_token_id is not None
    limits = {
        "norms of queries and keys": network.qk_norm,
        "sliding windows": any(network.windows),
        "biases of the MLP": network.mlp_bias,
    }
    uneven = not first and network.qkv_bias != network.output_bias
    third = {
        "EAGLE-1": first,
        "biases of q, k, v without that of o, or the reverse": uneven,
    }
    lost = {
        "eagle": {"EAGLE-3": not first, **limits},
        "eagle3": {
            **third,
            **limits,
            "a second block": network.num_layers > 1,
            "the mask of P-EAGLE": parallel,
        },
        "peagle": {
            **third,
            **limits,
            "a head without a mask": not first and not parallel,
            "norms of the hidden states": config.feature_norms or config.input_norm,
            "a norm of what is fed back": config.norm_output,
        },
        "speculators": {
            **third,
            "a bias of fc": config.fc_bias,
            "a head without an output matrix": not config.separate_head,
            "a target of another width": config.target_hidden_size != config.hidden_size,
            "biases of the MLP beside norms of queries": network.qk_norm and network.mlp_bias,
        },
    }
    found = [what for what, present in lost[layout].items() if present]
    if found:
        raise ValueError(
            f"layout={layout!r} has no place for {', '.join(found)}; layouts are 'eagle' (EAGLE-1 "
            "and -2), 'eagle3' and 'speculators' (EAGLE-3), 'peagle' and 'speculators' (P-EAGLE)"
        )
    if layout in ("speculators", "peagle") and not config.separate_embedding:
        raise ValueError(f"layout={layout!r} needs an embedding; pass the target's as embedding")


def _speculators_keys(config: EagleConfig, inner: dict, verifier: dict) -> dict:
    windows = config.network.windows
    if any(windows):
        inner |= common.describe_windows(config.network)
    kind = "eagle3" if config.mask_token_id is None else "peagle"
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": _DEFAULT_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator" if kind == "eagle3" else "PEagleSpeculator"],
        SPECULATORS: kind,
        "speculators_version": "0.9.0",  # whose schema this is
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": inner,
        eagle_layers.LAYER_IDS: list(config.capture_layers),
        "embed_requires_grad": kind == "peagle",
        "tie_word_embeddings": False,
    }
