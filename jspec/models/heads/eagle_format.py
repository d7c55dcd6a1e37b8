"""EAGLE heads in files: which config.json makes which ``EagleConfig``, and the tensors' names.

Three layouts, told apart by what is in them, never by a file's name:

  * ``eagle``: EAGLE-1 and -2 as published (``fc``, ``layers.i``, no norm at the end).
  * ``eagle3``: EAGLE-3 as published and as SpecForge writes it (``midlayer.*``); SGLang reads it.
  * ``speculators``: EAGLE-3 as the speculators library writes it (``layers.0.*``, and a config.json
    with ``speculators_model_type``).

What the readers of these files disagree about, and how it is read here:

  * ``norm_before_residual``: missing means false in ``eagle3``, as everyone there has it; in
    ``speculators`` vLLM takes true and the library itself false, so a file without it is refused.
  * ``norm_output``: true means that the head's own norm comes before its output is fed back (vLLM,
    SGLang, speculators, and SpecForge since September 2026; before, SpecForge trained as if it were
    false whatever it said).
  * ``eagle_aux_hidden_state_layer_ids``: at the top of config.json these are indices into
    ``hidden_states``. Inside ``eagle_config`` a list that begins with 1 counts outputs of layers,
    one less, and a list that begins with 2 counts hidden states (SGLang's rule); others could be
    either and are refused. Without a list: hidden states 2, n // 2 and n - 3 of n layers.
  * Biases that config.json does not mention exist if the file has them.
  * An ``lm_head`` or ``embed_tokens`` in the file is used, though some servers prefer the target's.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.models import families
from jspec.models.decoder import DecoderConfig
from jspec.models.families import common, llama, qwen3
from jspec.models.families.names import Entry, block_table, blocks, nest
from jspec.models.heads.eagle import EagleConfig, EagleParams

SPECULATORS = "speculators_model_type"
FIRST = "layers.0"  # called "midlayer" in layout ``eagle3``
_Q_PROJ = f"{FIRST}.self_attn.q_proj.weight"
_LAYER_IDS = "eagle_aux_hidden_state_layer_ids"
# The keys of config.json that these networks share with Llama; others (model_type among them: heads
# copy their target's) say nothing about a head.
_NETWORK_KEYS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "max_position_embeddings",
    "rope_theta", "rope_scaling", "rope_parameters", "original_max_position_embeddings",
    "partial_rotary_factor", "quantization_config", "compression_config",
)  # fmt: skip
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
        "own_embedding": "embed_tokens.weight" in tensors,
        "own_head": "lm_head.weight" in tensors,
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
        raise ValueError(f"eagle_config must be an object, got {nested!r}")
    wrong = [f"{k}={nested[k]!r}" for k, v in _NEUTRAL.items() if nested.get(k, v) is not v]
    if wrong:
        raise ValueError(f"not supported in eagle_config: {', '.join(wrong)}")
    if speculators and raw.get("norm_before_residual") is None:
        raise ValueError(
            "norm_before_residual is missing, which vLLM reads as true and speculators as false; "
            "state the one that the head was trained with"
        )
    return EagleConfig(
        generation=3,
        capture_layers=_capture_layers(raw, nested, target.num_layers),
        feature_norms=common.flag(raw, "fc_norm"),
        input_norm=common.flag(raw, "norm_before_fc") or common.flag(nested, "norm_before_fc"),
        norm_before_residual=common.flag(raw, "norm_before_residual"),
        norm_output=common.flag(raw, "norm_output"),
        **common_fields,
    )


def _transformer_config(raw: dict) -> dict:
    if raw[SPECULATORS] != "eagle3":
        raise ValueError(f"{SPECULATORS} {raw[SPECULATORS]!r} is not supported; known: 'eagle3'")
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ValueError(f"transformer_layer_config must be an object, got {inner!r}")
    kind = inner.get("model_type", "qwen3")
    if kind not in ("llama", "qwen3"):
        raise ValueError(
            f"transformer_layer_config.model_type {kind!r} is not supported; known: 'llama', "
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


def default_capture_layers(num_layers: int) -> tuple[int, ...]:
    """The hidden states that EAGLE-3 reads of a target with ``num_layers`` layers."""
    return (2, num_layers // 2, num_layers - 3)


def _capture_layers(raw: dict, nested: dict, num_layers: int) -> tuple[int, ...]:
    """Indices into ``hidden_states``; see the module's docstring."""
    top, inside = (_ids(source) for source in (raw, nested))
    if inside is None:
        layers = default_capture_layers(num_layers) if top is None else top
    elif top is not None and top in (inside, _after(inside)):
        layers = top
    elif top is not None or inside[0] not in (1, 2):
        other = "" if top is None else f", and {list(top)} at the top of config.json fits neither"
        raise ValueError(
            f"eagle_config.{_LAYER_IDS} {list(inside)} may count hidden states or outputs of layers"
            f"{other}; state them as indices into hidden_states, in {_LAYER_IDS} at the top alone"
        )
    else:
        layers = _after(inside) if inside[0] == 1 else inside
    count = raw.get("num_aux_hidden_states")
    if count not in (None, len(layers)):
        raise ValueError(f"num_aux_hidden_states is {count}, but {_LAYER_IDS} are {list(layers)}")
    _check_layers(layers, num_layers)
    return layers


def _check_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """The last hidden state is left out: with the final norm to some readers, without to others."""
    ascending = all(a < b for a, b in itertools.pairwise(layers))
    if not ascending or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ValueError(
            f"the head reads hidden states {list(layers)}, which must ascend and lie below the "
            f"target's {num_layers} layers; state others in {_LAYER_IDS}, or use the head's target"
        )


def _ids(source: dict) -> tuple[int, ...] | None:
    ids = source.get(_LAYER_IDS) or None
    if ids is not None and (not isinstance(ids, list) or any(type(i) is not int for i in ids)):
        raise ValueError(f"{_LAYER_IDS} must be a list of whole numbers, got {ids!r}")
    return ids and tuple(ids)


def _after(ids: tuple[int, ...]) -> tuple[int, ...]:
    """The hidden states that are the outputs of layers ``ids``."""
    return tuple(i + 1 for i in ids)


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
        names = (f"{first}.input_layernorm", f"{first}.hidden_norm") if third else (
            "embedding_layernorm", "hidden_states_layernorm"
        )  # fmt: skip
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
    if config.own_head:
        matrix("head", config.vocab_size, "lm_head.weight", transpose=True)
    if config.own_embedding:
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
      layout: "eagle", "eagle3" or "speculators".
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
    _check_layers(config.capture_layers, target.num_layers)
    flags = {
        "norm_before_residual": config.norm_before_residual,
        "norm_before_fc": config.input_norm,
        "fc_norm": config.feature_norms,
        "norm_output": config.norm_output,
    }
    more = {"draft_vocab_size": config.vocab_size}
    if config.target_hidden_size != config.hidden_size:
        more["target_hidden_size"] = config.target_hidden_size
    if layout == "eagle3":
        return inner | flags | more | {"architectures": ["LlamaForCausalLMEagle3"]} | _layer_ids(
            config.capture_layers, target.num_layers
        )  # fmt: skip
    verifier = {
        "name_or_path": target_name,
        "architectures": families.describe(target)["architectures"],
    }
    return flags | more | _speculators_keys(config, inner, verifier)


def _check_layout(config: EagleConfig, layout: str) -> None:
    network = config.network
    limits = {
        "a second block": network.num_layers > 1,
        "norms of queries and keys": network.qk_norm,
        "sliding windows": any(network.windows),
        "biases of the MLP": network.mlp_bias,
    }
    lost = {
        "eagle": {"EAGLE-3": config.generation == 3, **limits, "a second block": False},
        "eagle3": {"EAGLE-1": config.generation == 1, **limits},
        "speculators": {
            "EAGLE-1": config.generation == 1,
            "a bias of fc": config.fc_bias,
            "a head without an output matrix": not config.own_head,
            "a target of another width": config.target_hidden_size != config.hidden_size,
            "biases of the MLP beside norms of queries": network.qk_norm and network.mlp_bias,
        },
    }
    if config.generation == 3:
        uneven = network.qkv_bias != network.output_bias
        for layout_of_3 in ("eagle3", "speculators"):
            lost[layout_of_3]["biases of q, k, v without that of o, or the reverse"] = uneven
    found = [what for what, present in lost[layout].items() if present]
    if found:
        raise ValueError(
            f"layout={layout!r} has no place for {', '.join(found)}; layouts are 'eagle' (EAGLE-1 "
            "and -2), 'eagle3' and 'speculators' (EAGLE-3)"
        )
    if layout == "speculators" and not config.own_embedding:
        raise ValueError("layout='speculators' needs an embedding; pass the target's as embedding")


def _layer_ids(layers: tuple[int, ...], num_layers: int) -> dict:
    """Keys for hidden states that are not the default ones, as vLLM and as SGLang count them."""
    if layers == default_capture_layers(num_layers):
        return {}
    keys: dict[str, Any] = {_LAYER_IDS: list(layers)}
    if layers[0] == 2:
        keys["eagle_config"] = {_LAYER_IDS: [layer - 1 for layer in layers]}
    elif layers[0] > 2:
        keys["eagle_config"] = {_LAYER_IDS: list(layers)}
    return keys


def _speculators_keys(config: EagleConfig, inner: dict, verifier: dict) -> dict:
    windows = config.network.windows
    if any(windows):
        inner |= common.describe_windows(config.network)
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": _DEFAULT_TOKENS,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    return {
        "architectures": ["Eagle3Speculator"],
        SPECULATORS: "eagle3",
        "speculators_version": "0.9.0",  # whose schema this is
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": inner,
        _LAYER_IDS: list(config.capture_layers),
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
    }
