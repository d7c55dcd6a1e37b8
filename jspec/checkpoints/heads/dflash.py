"""DFlash and DSpark heads in files: which config.json makes which ``DFlashConfig``, and the names.

Two layouts, of the same tensors (``fc``, ``hidden_norm``, ``layers.i``, ``norm``, and of DSpark
``markov_head`` and ``confidence_head``):

  * ``dflash``: the authors' and SpecForge's, a Qwen3 config.json with ``dflash_config``; SGLang,
    vLLM and the JAX servers read it. The target lends its embedding and output matrix.
  * ``dflash-speculators``: as the speculators library writes it (``speculators_model_type``), with
    an embedding and an output matrix of its own, which may know only some tokens (``d2t``).

What the readers of these files disagree about, and how it is read here:

  * ``target_layer_ids`` count outputs of layers, so hidden states one higher;
    ``aux_hidden_state_layer_ids`` of speculators count hidden states.
  * ``block_size``, ``mask_token_id`` and their like stand in ``dflash_config`` or beside it; where
    both are given they must agree.
  * Which slots see later ones: all but those of sliding layers, unless ``dflash_config.causal`` (or
    ``is_causal``) says it for all layers. In speculators, ``sliding_window_non_causal`` frees the
    sliding layers too.
  * A window of w tokens ends at the slot that looks back, as servers have it and as SpecForge
    trains; the speculators library lets all slots of a block look back w tokens from the root.
  * A DSpark head drafts from the root's slot on unless ``sample_from_anchor`` is false, as it is
    trained and served; SpecForge's own loop leaves that slot out.
  * An ``lm_head`` or ``embed_tokens`` in the file is used, though some servers prefer the target's.
"""

import dataclasses
import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np

from jspec.checkpoints import families
from jspec.checkpoints.families import common, qwen3
from jspec.checkpoints.families.names import Entry, block_table, blocks, nest
from jspec.checkpoints.heads import dspark
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.dflash import DFlashConfig, DFlashParams, is_causal
from jspec.models.heads.dspark import SparkParams
from jspec.util.messages import shown

SPECULATORS = "speculators_model_type"
KINDS = ("dflash", "dspark")
_ARCHITECTURES = {"dflash": "DFlash", "dspark": "DSpark"}
_LAYER_IDS, _HIDDEN_IDS = "target_layer_ids", "aux_hidden_state_layer_ids"
# Keys of config.json or ``dflash_config`` that ask for what is not here, and what asks for nothing.
_NEUTRAL = {
    "attention_sink_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
    "is_neox_style": (None, True),
    "use_aux_hidden_state": (None, True),
    "shift_label": (None, False),
    "logit_scale": (None, 1),
    "projector_type": (None, *KINDS),
}


# Reading.


def layout(raw: dict, tensors: Mapping[str, np.ndarray]) -> str | None:
    """The layout that the tensors' names and config.json have, or None."""
    if not {"fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"} <= set(tensors):
        return None
    return "dflash-speculators" if SPECULATORS in raw else "dflash"


def kind(raw: dict, tensors: Mapping[str, np.ndarray]) -> str:
    """ "dflash" or "dspark", by the tensors or, where these do not tell, by config.json."""
    if dspark.is_there(tensors):
        return "dspark"
    inside = raw.get("dflash_config")
    stated = [raw.get(SPECULATORS), inside.get("projector_type") if isinstance(inside, dict) else 0]
    named = any("DSpark" in name for name in common.architectures(raw))
    return "dspark" if named or "dspark" in stated else "dflash"


def read(raw: dict, tensors: Mapping[str, np.ndarray], target: DecoderConfig) -> DFlashConfig:
    """The head that a config.json and its tensors describe, for ``target``.

    Raises:
      ValueError: a key is missing, malformed, contradictory or not supported, or the head was made
        for another target.
    """
    settings = _settings(raw)
    inner = _transformer_config(raw) if SPECULATORS in raw else _with_windows(raw, settings)
    network = qwen3.FAMILY.read(inner)
    vocab = _given(raw, "draft_vocab_size", network.vocab_size)
    fields = {
        "network": dataclasses.replace(network, vocab_size=vocab, tie_embeddings=False),
        "target_hidden_size": _given(raw, "target_hidden_size", network.hidden_size),
        "target_vocab_size": network.vocab_size,
    }
    _check_target(fields, raw, target)
    spark = None
    if kind(raw, tensors) == "dspark":
        spark = dspark.read(settings, tensors, network.hidden_size)
    sliding = tuple(window is not None for window in network.windows)
    return DFlashConfig(
        capture_layers=_capture_layers(raw, settings, network.num_layers, target.num_layers),
        block_size=common.whole(settings, "block_size", least=2),
        mask_token=common.whole(settings, "mask_token_id", least=0),
        causal=_causal(raw, settings, sliding, network.num_layers),
        from_anchor=common.flag(
            {"sample_from_anchor": spark is not None} | settings, "sample_from_anchor"
        ),
        separate_embedding="embed_tokens.weight" in tensors,
        separate_head="lm_head.weight" in tensors,
        spark=spark,
        **fields,
    )


def _settings(raw: dict) -> dict:
    """The keys of ``dflash_config`` and those beside it, one where both have one."""
    inside = raw.get("dflash_config") or {}
    if not isinstance(inside, dict):
        raise ValueError(f"dflash_config must be an object, got {shown(inside)}")
    unlike = [key for key, value in inside.items() if raw.get(key) not in (None, value)]
    if unlike:
        key = unlike[0]
        raise ValueError(
            f"{key} is {shown(raw[key])} in config.json and {shown(inside[key])} in its "
            "dflash_config; state one"
        )
    settings = raw | {key: value for key, value in inside.items() if value is not None}
    wrong = [
        f"{key}={shown(settings[key])}"
        for key, allowed in _NEUTRAL.items()
        if settings.get(key) not in allowed
    ]
    if wrong:
        raise ValueError(f"not supported: {', '.join(wrong)}")
    return settings


def _transformer_config(raw: dict) -> dict:
    if raw[SPECULATORS] not in KINDS:
        known = " and ".join(map(repr, KINDS))
        raise ValueError(
            f"{SPECULATORS} {shown(raw[SPECULATORS])} is not supported; known: {known}"
        )
    inner = raw.get("transformer_layer_config")
    if not isinstance(inner, dict):
        raise ValueError(f"transformer_layer_config must be an object, got {shown(inner)}")
    return inner


def _with_windows(raw: dict, settings: dict) -> dict:
    """config.json with ``use_swa`` and ``swa_window_size`` said in Qwen3's words."""
    inner = dict(raw)
    if "swa_window_size" in settings:
        inner["sliding_window"] = common.whole(settings, "swa_window_size")
    kinds = inner.get("layer_types")
    if common.flag(settings, "use_swa") and "sliding_attention" not in (kinds or ()):
        if inner.get("sliding_window") is None:
            raise ValueError("use_swa is true, but there is no swa_window_size")
        count = common.whole(inner, "num_hidden_layers")
        inner |= {"layer_types": ["sliding_attention"] * count, "use_sliding_window": True}
    return inner


def _causal(
    raw: dict, settings: dict, sliding: tuple[bool, ...], num_layers: int
) -> tuple[bool, ...]:
    if SPECULATORS in raw:
        freed = common.flag(raw, "sliding_window_non_causal")
        return () if freed or not any(sliding) else sliding
    stated = [settings[key] for key in ("is_causal", "causal") if settings.get(key) is not None]
    if stated and not isinstance(stated[0], bool):
        raise ValueError(f"causal must be true or false, got {shown(stated[0])}")
    if not stated:
        return sliding if any(sliding) else ()
    return (True,) * num_layers if stated[0] else ()


def _given(raw: dict, key: str, default: int) -> int:
    return default if raw.get(key) is None else common.whole(raw, key)


def _check_target(fields: dict, raw: dict, target: DecoderConfig) -> None:
    layers = _given(raw, "num_target_layers", target.num_layers)
    wrong = [
        f"{what} of {theirs} where the target has {ours}"
        for what, theirs, ours in (
            ("a hidden size", fields["target_hidden_size"], target.hidden_size),
            ("a vocabulary", fields["target_vocab_size"], target.vocab_size),
            ("a number of layers", layers, target.num_layers),
        )
        if theirs != ours
    ]
    if wrong:
        raise ValueError(f"the head was made for another target: it expects {' and '.join(wrong)}")


def default_capture_layers(num_layers: int, num_blocks: int) -> tuple[int, ...]:
    """The hidden states that a head of ``num_blocks`` blocks reads of a target of ``num_layers``:
    one a block, spread evenly from the second to the last but two (arXiv 2602.06036)."""
    if num_blocks == 1:
        return (num_layers // 2 + 1,)
    span = num_layers - 4
    return tuple(2 + round(index * span / (num_blocks - 1)) for index in range(num_blocks))


def _capture_layers(raw: dict, settings: dict, num_blocks: int, num_layers: int) -> tuple[int, ...]:
    """Indices into ``hidden_states``; see the module's docstring."""
    key, offset = (_HIDDEN_IDS, 0) if SPECULATORS in raw else (_LAYER_IDS, 1)
    ids = settings.get(key)
    if ids is None and offset:
        layers = default_capture_layers(num_layers, num_blocks)
    elif not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise ValueError(f"{key} must be a list of whole numbers, got {shown(ids)}")
    else:
        layers = tuple(i + offset for i in ids)
    _check_layers(layers, num_layers)
    return layers


def _check_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """The last hidden state is left out: with the final norm to some readers, without to others."""
    ascending = all(a < b for a, b in itertools.pairwise(layers))
    if not ascending or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ValueError(
            f"the head reads hidden states {list(layers)}, which must ascend and lie below the "
            f"target's {num_layers} layers; state others, or use the head's target"
        )


# Both ways.


def table(config: DFlashConfig, layout: str = "dflash") -> tuple[Entry, ...]:
    """Names of a head's tensors, in either layout."""
    del layout
    hidden = config.hidden_size
    entries = [
        Entry(("fc",), ("fc.weight",), ((hidden, config.fc_inputs),), transpose=True),
        Entry(("hidden_norm",), ("hidden_norm.weight",), ((hidden,),)),
    ]
    for layer in range(config.network.num_layers):
        entries += block_table(config.network, layer, f"layers.{layer}")
    entries.append(Entry(("norm",), ("norm.weight",), ((hidden,),)))
    if config.separate_head:
        shape = ((config.vocab_size, hidden),)
        entries.append(Entry(("head",), ("lm_head.weight",), shape, transpose=True))
    if config.separate_embedding:
        shape = ((config.target_vocab_size, hidden),)
        entries.append(Entry(("embedding",), ("embed_tokens.weight",), shape))
    spark = dspark.table(config.spark, hidden, config.target_vocab_size, config.vocab_size)
    return (*entries, *spark)


def assemble(entries: tuple[Entry, ...], arrays: list, draft_to_target: Any) -> DFlashParams:
    """Parameters from one array for each entry."""
    nested = nest(entries, arrays)
    if "spark" in nested:
        nested["spark"] = SparkParams(**nested["spark"])
    return DFlashParams(layers=blocks(nested), draft_to_target=draft_to_target, **nested)


# Writing.


def describe(config: DFlashConfig, layout: str, target: DecoderConfig, target_name: str) -> dict:
    """A config.json for ``config``.

    Args:
      config: the head.
      layout: "dflash" or "dflash-speculators".
      target: what it drafts for.
      target_name: hub id or path of that, for ``dflash-speculators``.

    Raises:
      ValueError: the layout cannot express the head.
    """
    _check_layout(config, layout)
    _check_layers(config.capture_layers, target.num_layers)
    network = dataclasses.replace(config.network, vocab_size=config.target_vocab_size)
    inner = qwen3.FAMILY.write(network)
    shared = {"block_size": config.block_size, "tie_word_embeddings": False}
    if layout == "dflash":
        return inner | shared | _authors_keys(config, target)
    verifier = {
        "name_or_path": target_name,
        "architectures": families.describe(target)["architectures"],
    }
    return shared | _speculators_keys(config, inner, verifier)


def _check_layout(config: DFlashConfig, layout: str) -> None:
    network, per_layer = config.network, range(config.network.num_layers)
    sliding = [bool(network.windows) and network.windows[i] is not None for i in per_layer]
    causal = [is_causal(config, layer) for layer in per_layer]
    lost = {
        "blocks without norms of queries and keys": not network.qk_norm,
        "biases of the MLP": network.mlp_bias,
        "biases of q, k, v without that of o, or the reverse": network.qkv_bias
        != network.output_bias,
    }
    if layout == "dflash":
        lost |= {
            "an embedding or output matrix of the head's own": config.separate_embedding
            or config.separate_head,
            "layers that are causal and others that are not, but for sliding ones": causal
            != sliding
            and len(set(causal)) > 1,
        }
    else:
        lost |= {
            "a head without an output matrix": not config.separate_head,
            "a target of another width": config.target_hidden_size != config.hidden_size,
            "causal layers but those that slide": any(causal) and causal != sliding,
        }
    found = [what for what, present in lost.items() if present]
    if found:
        raise ValueError(
            f"layout={layout!r} has no place for {', '.join(found)}; layouts are 'dflash' and "
            "'dflash-speculators'"
        )
    if layout == "dflash-speculators" and not config.separate_embedding:
        raise ValueError(f"layout={layout!r} needs an embedding; pass the target's as embedding")


def _authors_keys(config: DFlashConfig, target: DecoderConfig) -> dict:
    causal = [is_causal(config, layer) for layer in range(config.network.num_layers)]
    inside: dict[str, Any] = {
        "mask_token_id": config.mask_token,
        _LAYER_IDS: [layer - 1 for layer in config.capture_layers],
    }
    if any(config.network.windows) or any(causal):
        inside["causal"] = all(causal)
        if len(set(causal)) > 1:
            del inside["causal"]  # what sliding layers are where nothing is said
    if config.from_anchor or config.spark is not None:
        inside["sample_from_anchor"] = config.from_anchor
    method = "dflash" if config.spark is None else "dspark"
    model = f"{_ARCHITECTURES[method]}DraftModel"
    if config.spark is not None:
        same = config.network.num_heads == config.network.num_kv_heads
        mode = {"projector_type": "dspark", "attention_mode": "mha" if same else "gqa"}
        inside |= mode | dspark.describe(config.spark)
    return {
        "architectures": [model],
        "auto_map": {"AutoModel": f"{method}.{model}"},
        "num_target_layers": target.num_layers,
        "dflash_config": inside,
    }


def _speculators_keys(config: DFlashConfig, inner: dict, verifier: dict) -> dict:
    proposal = {
        "proposal_type": "greedy",
        "speculative_tokens": config.max_depth,
        "verifier_accept_k": 1,
        "accept_tolerance": 0.0,
    }
    method = "dflash" if config.spark is None else "dspark"
    more = {} if config.spark is None else dspark.describe(config.spark)
    return more | {
        "architectures": [f"{_ARCHITECTURES[method]}Speculator"],
        SPECULATORS: method,
        "speculators_version": "0.9.0",  # whose schema this is
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
            "verifier": verifier,
        },
        "transformer_layer_config": inner,
        "draft_vocab_size": config.vocab_size,
        _HIDDEN_IDS: list(config.capture_layers),
        "mask_token_id": config.mask_token,
        "sliding_window_non_causal": not config.causal,
        "sample_from_anchor": config.from_anchor,
    }
