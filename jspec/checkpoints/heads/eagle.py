"""EAGLE heads in files: config.json to ``EagleConfig``, and the names of the tensors.

Four layouts, recognised by the contents of the files, never by their names:

  * ``eagle``: EAGLE-1 and -2 as published (``fc``, ``layers.i``, no norm at the end).
  * ``eagle3``: EAGLE-3 as published and as SpecForge writes it (``midlayer.*``). SGLang reads it.
  * ``speculators``: EAGLE-3 as the speculators library writes it (``layers.0.*``, and a config.json
    with ``speculators_model_type``), and P-EAGLE (``mask_hidden``, and type "peagle").
  * ``peagle``: P-EAGLE as SpecForge writes it (``layers.0.*``, and a config.json like that of
    ``eagle3``). The mask token may have any of the names in ``mask_token.KEYS``.

The readers of these files disagree. jspec reads them as follows:

  * ``norm_before_residual``: a missing key means false in ``eagle3`` and ``peagle``, and in
    ``speculators`` for P-EAGLE. For EAGLE-3 in ``speculators``, vLLM takes true and the library
    takes false, so a file without the key raises.
  * ``norm_output``: true means that the head's own norm precedes the feedback of its output (vLLM,
    SGLang, speculators, and SpecForge since September 2026; older SpecForge ignored the key).
  * ``eagle_aux_hidden_state_layer_ids``: see ``eagle_layers``.
  * A bias that config.json does not mention exists if the file has it.
  * An ``lm_head`` or ``embed_tokens`` in the file is used, though some servers prefer the target's.

Drafter: ``jspec.drafters.eagle`` and ``jspec.drafters.parallel_eagle``.
"""

import dataclasses
import functools
import re
from typing import Any

import numpy as np

from jspec.checkpoints import families
from jspec.checkpoints.families import common, llama, qwen3
from jspec.checkpoints.families.names import Entry, block_table, blocks, matrix, vector
from jspec.checkpoints.heads import base, eagle_layers, mask_token, speculators
from jspec.checkpoints.heads.base import HeadFormat, Layout, Tensors
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.eagle import EagleConfig, EagleParams
from jspec.util.messages import shown

FIRST = "layers.0"  # called "midlayer" in layout ``eagle3``
_MASK = "mask_hidden"
_PEAGLE = "PEagleDraftModel"  # SpecForge's name, which vLLM reads
_Q_PROJ = f"{FIRST}.self_attn.q_proj.weight"
# The keys of config.json that these networks share with Llama. Other keys do not describe the head:
# trainers copy model_type and more from the target.
_NETWORK_KEYS = (
    *common.SIZES,
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
)
_DEFAULT_TOKENS = 5  # drafted by a server without a setting
# Switches of ``eagle_config`` that jspec does not implement, and their value in EAGLE-3.
_NEUTRAL = {
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
}


def _generation(tensors: Tensors) -> int | None:
    """Return 1 for EAGLE-1 and -2, 3 for EAGLE-3, None for other heads.

    Only the attention of EAGLE-3 reads the embedding beside the feature, so its input is twice as
    wide as the output of ``fc``.
    """
    if "fc.weight" not in tensors or _Q_PROJ not in tensors:
        return None
    twice = tensors[_Q_PROJ].shape[-1:] == (2 * tensors["fc.weight"].shape[0],)
    return 3 if twice or f"{FIRST}.hidden_norm.weight" in tensors else 1


def _sniff(raw: dict, tensors: Tensors) -> tuple[str, str] | None:
    generation = _generation(tensors)
    if generation is None:
        return None
    if generation == 1:
        return "eagle", "eagle"
    if speculators.KEY in raw:
        return "eagle3", "speculators"
    return "eagle3", "peagle" if _MASK in tensors else "eagle3"


def _select(raw: dict, tensors: Tensors, config: EagleConfig) -> Tensors:
    """Drop the zero bias of ``eagle`` files, and take a mask of [1, 1, n], [1, n] or [n]."""
    selected = base.select_weights(raw, tensors, config)
    if not config.fc_bias and raw.get("bias") is not False:  # a denied bias is unexpected
        selected.pop("fc.bias", None)
    if _MASK in selected:
        selected[_MASK] = selected[_MASK].reshape(1, 1, -1)
    return selected


def _read_config(raw: dict, tensors: Tensors, target: DecoderConfig, layout: str) -> EagleConfig:
    from_library = speculators.KEY in raw
    inner = _network_config(raw) if from_library else raw
    vocab, hidden = (common.whole(inner, key) for key in ("vocab_size", "hidden_size"))
    draft_vocab = common.whole_or(raw, "draft_vocab_size", vocab)
    nonzero = bool(np.any(tensors.get("fc.bias", True)))
    fields = {
        "network": _network(inner, tensors, draft_vocab, layout),
        "target_hidden_size": common.whole_or(raw, "target_hidden_size", hidden),
        "target_vocab_size": vocab,
        **base.separate(tensors),
        "fc_bias": _has_bias(raw, ("bias",), "fc.bias", tensors) and nonzero,
    }
    base.check_target(
        ("a hidden size", fields["target_hidden_size"], target.hidden_size),
        ("a vocabulary", vocab, target.vocab_size),
    )
    if _generation(tensors) == 1:
        return EagleConfig(
            generation=1,
            capture_layers=(target.num_layers,),
            norm_inputs=common.flag(raw, "add_para_norm"),
            **fields,
        )
    nested = raw.get("eagle_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"eagle_config must be an object, got {shown(nested)}")
    wrong = [f"{k}={shown(nested[k])}" for k, v in _NEUTRAL.items() if nested.get(k, v) is not v]
    if wrong:
        raise ValueError(f"not supported in eagle_config: {', '.join(wrong)}")
    parallel = _MASK in tensors or raw.get(speculators.KEY) == "peagle"
    mask = mask_token.mask_token_id(raw) if parallel else None
    if parallel and mask is None:
        raise ValueError(
            "the head drafts several tokens in one pass, but config.json names no mask token "
            f"under any of {', '.join(mask_token.KEYS)}; add the one that it was trained with"
        )
    if from_library and not parallel and raw.get("norm_before_residual") is None:
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
        mask_token_id=mask,
        **fields,
    )


def _network_config(raw: dict) -> dict:
    inner = speculators.network_config(raw, ("eagle3", "peagle"))
    kind = inner.get("model_type", "qwen3")
    if kind not in ("llama", "qwen3"):
        raise ValueError(
            f"transformer_layer_config.model_type {shown(kind)} is not supported; known: 'llama', "
            "'qwen3'"
        )
    return families.FAMILIES[kind].defaults | inner  # the library's networks are transformers'


def _network(inner: dict, tensors: Tensors, vocab: int, layout: str) -> DecoderConfig:
    """Return the config of the head's blocks.

    Layout ``eagle3`` has one. Some of its files state the target's number of layers.
    """
    if layout == "eagle3":
        inner = inner | {"num_hidden_layers": 1}
    network = llama.FAMILY.read({key: inner[key] for key in _NETWORK_KEYS if key in inner})
    attention = f"{FIRST}.self_attn"
    bias = lambda keys, name: _has_bias(inner, keys, name, tensors)
    windows = ()
    if inner.get("layer_types") is not None:  # ``sliding_window`` alone has no effect
        windows = common.windows({"use_sliding_window": True, "sliding_window": None} | inner)
    first = network.layers[0]
    mixer = dataclasses.replace(
        first.mixer,
        qk_norm=network.norm if f"{attention}.q_norm.weight" in tensors else None,
        qkv_bias=bias(("qkv_bias", "attention_bias"), f"{attention}.q_proj.bias"),
        output_bias=bias(("attention_bias",), f"{attention}.o_proj.bias"),
    )
    mlp_bias = bias(("mlp_bias",), f"{FIRST}.mlp.up_proj.bias")
    mlp = dataclasses.replace(first.feed_forward, bias=mlp_bias)
    layers = common.alike(llama.FAMILY.defaults | inner, mixer, mlp, windows)
    return dataclasses.replace(network, vocab_size=vocab, layers=layers)


def _has_bias(raw: dict, keys: tuple[str, ...], name: str, tensors: Tensors) -> bool:
    """Return the first of ``keys`` that is set, else whether the file has the tensor."""
    stated = next((key for key in keys if raw.get(key) is not None), None)
    return name in tensors if stated is None else common.flag(raw, stated)


def _table(config: EagleConfig) -> tuple[Entry, ...]:
    network, hidden, third = config.network, config.hidden_size, config.generation == 3
    norm_names = ("embedding_layernorm", "hidden_states_layernorm")
    if third:
        norm_names = (f"{FIRST}.input_layernorm", f"{FIRST}.hidden_norm")
    entries = [matrix(("fc",), "fc.weight", hidden, config.fc_inputs)]
    if config.fc_bias:
        entries.append(vector(("fc_bias",), "fc.bias", hidden))
    if third or config.norm_inputs:
        entries.append(vector(("embedding_norm",), f"{norm_names[0]}.weight", hidden))
        entries.append(vector(("hidden_norm",), f"{norm_names[1]}.weight", hidden))
    if config.feature_norms:
        count = len(config.capture_layers)
        names = tuple(f"fc_norm.{index}.weight" for index in range(count))
        entries.append(Entry(("feature_norms",), names, ((config.target_hidden_size,),) * count))
    if config.input_norm:
        entries.append(vector(("input_norm",), "input_norm.weight", config.fc_inputs))
    width = 2 * hidden if third else hidden
    entries += block_table(network, 0, FIRST, inputs=width, input_norm=False)
    for layer in range(1, network.num_layers):
        entries += block_table(network, layer, f"layers.{layer}")
    if third:
        entries.append(vector(("norm",), "norm.weight", hidden))
    if config.mask_token_id is not None:
        entries.append(Entry((_MASK,), (_MASK,), ((1, 1, config.fc_inputs),)))
    return (*entries, *base.separate_entries(config))


def _assemble(config: EagleConfig, nested: dict, draft_to_target: Any) -> EagleParams:
    layers = blocks(nested, config.network)
    return EagleParams(layers=layers, draft_to_target=draft_to_target, **nested)


def _describe(layout: str, config: EagleConfig, target: DecoderConfig, target_name: str) -> dict:
    """Return a config.json that vLLM reads, and SGLang for ``eagle`` and ``eagle3``.

    It has no key ``bias``, though EAGLE-1 has one for ``fc``: vLLM and SGLang take that for the
    biases of attention.
    """
    _check_layout(layout, config)
    network = dataclasses.replace(
        config.network.with_mixers(window=None),
        vocab_size=config.target_vocab_size,
        tie_embeddings=False,
    )
    mixer = network.layers[0].mixer
    family = qwen3.FAMILY if mixer.qk_norm else llama.FAMILY
    inner = family.write(network) | {"attention_bias": mixer.output_bias}
    if layout == "eagle":
        norms = {"add_para_norm": True} if config.norm_inputs else {}
        return inner | norms | {"qkv_bias": mixer.qkv_bias}
    base.check_layers(config.capture_layers, target.num_layers, eagle_layers.LAYER_IDS)
    parallel = config.mask_token_id is not None
    keys: dict[str, Any] = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.input_norm,
        "fc_norm": config.feature_norms,
        "norm_output": config.norm_output,
        "draft_vocab_size": config.vocab_size,
    }
    if config.target_hidden_size != config.hidden_size:
        keys["target_hidden_size"] = config.target_hidden_size
    if parallel:
        keys["mask_token_id"] = config.mask_token_id
    if layout == "speculators":
        return keys | _speculators_keys(config, inner, target, target_name)
    if parallel:
        keys["pard_token"] = config.mask_token_id  # vLLM's name for it
    keys["architectures"] = [_PEAGLE if parallel else "LlamaForCausalLMEagle3"]
    return inner | keys | eagle_layers.describe(config.capture_layers, target.num_layers)


def _check_layout(layout: str, config: EagleConfig) -> None:
    network, first = config.network, config.generation == 1
    mixer, mlp = network.layers[0].mixer, network.layers[0].feed_forward
    parallel = config.mask_token_id is not None
    old = {
        "norms of queries and keys": mixer.qk_norm is not None,
        "sliding windows": any(network.windows),
        "biases of the MLP": mlp.bias,
    }
    uneven = not first and mixer.qkv_bias != mixer.output_bias
    third = {"EAGLE-1": first, "biases of q, k, v without that of o, or the reverse": uneven}
    eagle3 = {"a second block": network.num_layers > 1, "the mask of P-EAGLE": parallel}
    peagle = {
        "a head without a mask": not first and not parallel,
        "norms of the hidden states": config.feature_norms or config.input_norm,
        "a norm of the output that is fed back": config.norm_output,
    }
    library = speculators.features(config) | {
        "a bias of fc": config.fc_bias,
        "biases of the MLP beside norms of queries": mixer.qk_norm is not None and mlp.bias,
    }
    features = {
        "eagle": {"EAGLE-3": not first, **old},
        "eagle3": third | old | eagle3,
        "peagle": third | old | peagle,
        "speculators": third | library,
    }
    remedy = "write 'eagle' (EAGLE-1 and -2), 'eagle3' or 'speculators' (EAGLE-3), 'peagle' or "
    base.refuse(layout, features[layout], f"{remedy}'speculators' (P-EAGLE)")
    if layout in ("speculators", "peagle"):
        speculators.check_embedding(layout, config)


def _speculators_keys(
    config: EagleConfig, inner: dict, target: DecoderConfig, target_name: str
) -> dict:
    if any(config.network.windows):
        inner |= common.describe_windows(config.network)
    parallel = config.mask_token_id is not None
    kind = "peagle" if parallel else "eagle3"
    return speculators.describe(kind, inner, _DEFAULT_TOKENS, target, target_name) | {
        "architectures": ["PEagleSpeculator" if parallel else "Eagle3Speculator"],
        eagle_layers.LAYER_IDS: list(config.capture_layers),
        "embed_requires_grad": parallel,
    }


def _extra_first(
    config: EagleConfig, params: EagleParams, dtype: np.dtype
) -> dict[str, np.ndarray]:
    extra = base.vocabulary_maps(config, params, dtype)
    if not config.fc_bias:  # SGLang leaves this bias uninitialised if the file has none
        extra["fc.bias"] = np.zeros(config.hidden_size, dtype)
    return extra


def _default_layout(config: EagleConfig) -> str:
    if config.generation == 1:
        return "eagle"
    return "eagle3" if config.mask_token_id is None else "peagle"


def _layout(name: str, extra=base.vocabulary_maps, **options) -> Layout:
    describe = functools.partial(_describe, name)
    return Layout(name, _table, describe, extra, holds_embedding=True, **options)


def _midlayer(name: str) -> str:
    return re.sub(rf"^{re.escape(FIRST)}\.", "midlayer.", name)


FORMAT = HeadFormat(
    title="EAGLE",
    kinds=("eagle", "eagle3"),
    owns=lambda config: isinstance(config, EagleConfig),
    layouts=(
        _layout("eagle", extra=_extra_first),
        _layout("eagle3", rename=_midlayer),
        _layout("peagle"),
        _layout("speculators", names_target=True),
    ),
    sniff=_sniff,
    read_config=_read_config,
    assemble=_assemble,
    select=_select,
    reduce=base.reduce_by_offsets,
    default_layout=_default_layout,
)
