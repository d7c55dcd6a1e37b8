"""DFlash heads in files: config.json to ``DFlashConfig``, and the names of the tensors.

Two layouts of the same tensors (``fc``, ``hidden_norm``, ``layers.i``, ``norm``):

  * ``dflash``: the layout of the authors and of SpecForge, a Qwen3 config.json with
    ``dflash_config``. SGLang, vLLM and the JAX servers read it. The head uses the embedding and the
    output matrix of the target.
  * ``dflash-speculators``: the layout of the speculators library (``speculators_model_type``), with
    its own embedding and output matrix, which may cover only some tokens (``d2t``).

The readers of these files disagree. jspec reads them as follows:

  * ``target_layer_ids`` counts outputs of layers, so hidden states one higher.
    ``aux_hidden_state_layer_ids`` of speculators counts hidden states.
  * ``block_size``, ``mask_token_id`` and other keys may be in ``dflash_config`` or beside it. If
    both are set, they must agree.
  * Slots see later slots, except in sliding layers. ``dflash_config.causal`` (or ``is_causal``)
    overrides this for all layers. In speculators, ``sliding_window_non_causal`` makes the sliding
    layers bidirectional too.
  * A window of w tokens ends at the slot that attends, as in servers and in SpecForge's training.
    In the speculators library all slots of a block look back w tokens from the root.
  * An ``lm_head`` or ``embed_tokens`` in the file is used, though some servers prefer the target's.

``dspark`` extends both layouts. Drafter: ``jspec.drafters.dflash``.
"""

import dataclasses
import functools
from typing import Any

from jspec.checkpoints.families import common, qwen3
from jspec.checkpoints.families.names import Entry, block_table, blocks, matrix, vector
from jspec.checkpoints.heads import base, speculators
from jspec.checkpoints.heads.base import HeadFormat, Layout, Tensors
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.dflash import DFlashConfig, DFlashParams, is_causal
from jspec.util.messages import shown

KINDS = ("dflash", "dspark")
_MODELS = {"dflash": "DFlash", "dspark": "DSpark"}
_LAYER_IDS, _HIDDEN_IDS = "target_layer_ids", "aux_hidden_state_layer_ids"
# Keys of config.json or ``dflash_config`` that jspec does not implement, and their neutral values.
_NEUTRAL = {
    "attention_sink_bias": (None, False),
    "add_swa_attention_sink_bias": (None, False),
    "is_neox_style": (None, True),
    "use_aux_hidden_state": (None, True),
    "shift_label": (None, False),
    "logit_scale": (None, 1),
    "projector_type": (None, *KINDS),
}


def layout_of(raw: dict, tensors: Tensors) -> str | None:
    """Return the layout of a DFlash or DSpark head, or None for other heads."""
    if not {"fc.weight", "hidden_norm.weight", "layers.0.input_layernorm.weight"} <= set(tensors):
        return None
    return "dflash-speculators" if speculators.KEY in raw else "dflash"


def _sniff(raw: dict, tensors: Tensors) -> tuple[str, str] | None:
    layout = layout_of(raw, tensors)
    return layout and ("dflash", layout)


def read_config(
    raw: dict, tensors: Tensors, target: DecoderConfig, _: str, from_anchor: bool = False
) -> DFlashConfig:
    """Return the config of a head; ``from_anchor`` is the default of ``sample_from_anchor``."""
    keys = settings(raw)
    from_library = speculators.KEY in raw
    inner = speculators.network_config(raw, KINDS) if from_library else _with_windows(raw, keys)
    network = qwen3.FAMILY.read(inner)
    hidden = common.whole_or(raw, "target_hidden_size", network.hidden_size)
    layers = common.whole_or(raw, "num_target_layers", target.num_layers)
    base.check_target(
        ("a hidden size", hidden, target.hidden_size),
        ("a vocabulary", network.vocab_size, target.vocab_size),
        ("a number of layers", layers, target.num_layers),
    )
    vocab = common.whole_or(raw, "draft_vocab_size", network.vocab_size)
    anchor = {"sample_from_anchor": from_anchor} | keys
    return DFlashConfig(
        network=dataclasses.replace(network, vocab_size=vocab, tie_embeddings=False),
        target_hidden_size=hidden,
        target_vocab_size=network.vocab_size,
        capture_layers=_capture_layers(raw, keys, network.num_layers, target.num_layers),
        block_size=common.whole(keys, "block_size", least=2),
        mask_token=common.whole(keys, "mask_token_id", least=0),
        causal=_causal(raw, keys, network),
        from_anchor=common.flag(anchor, "sample_from_anchor"),
        **base.separate(tensors),
    )


def settings(raw: dict) -> dict:
    """Return the keys of ``dflash_config`` and of config.json in one dict."""
    nested = raw.get("dflash_config") or {}
    if not isinstance(nested, dict):
        raise ValueError(f"dflash_config must be an object, got {shown(nested)}")
    for key, value in nested.items():
        if raw.get(key) not in (None, value):
            both = f"{shown(raw[key])} in config.json and {shown(value)} in its dflash_config"
            raise ValueError(f"{key} is {both}; state one")
    merged = raw | {key: value for key, value in nested.items() if value is not None}
    wrong = [key for key, neutral in _NEUTRAL.items() if merged.get(key) not in neutral]
    if wrong:
        named = ", ".join(f"{key}={shown(merged[key])}" for key in wrong)
        raise ValueError(f"not supported: {named}")
    return merged


def _with_windows(raw: dict, keys: dict) -> dict:
    """Return config.json with ``use_swa`` and ``swa_window_size`` as Qwen3's keys."""
    inner = dict(raw)
    if "swa_window_size" in keys:
        inner["sliding_window"] = common.whole(keys, "swa_window_size")
    kinds = inner.get("layer_types")
    if common.flag(keys, "use_swa") and "sliding_attention" not in (kinds or ()):
        if inner.get("sliding_window") is None:
            raise ValueError("use_swa is true, but there is no swa_window_size")
        count = common.whole(inner, "num_hidden_layers")
        inner |= {"layer_types": ["sliding_attention"] * count, "use_sliding_window": True}
    return inner


def _causal(raw: dict, keys: dict, network: DecoderConfig) -> tuple[bool, ...]:
    sliding = tuple(window is not None for window in network.windows)
    default = sliding if any(sliding) else ()
    if speculators.KEY in raw:
        return () if common.flag(raw, "sliding_window_non_causal") else default
    stated = [keys[key] for key in ("is_causal", "causal") if keys.get(key) is not None]
    if not stated:
        return default
    if not isinstance(stated[0], bool):
        raise ValueError(f"causal must be true or false, got {shown(stated[0])}")
    return (True,) * network.num_layers if stated[0] else ()


def default_capture_layers(num_layers: int, num_blocks: int) -> tuple[int, ...]:
    """Return the hidden states that a head of ``num_blocks`` blocks reads by default.

    There is one for each block, spread evenly from the second to the last but two of the target's
    ``num_layers`` (arXiv 2602.06036).
    """
    if num_blocks == 1:
        return (num_layers // 2 + 1,)
    span = num_layers - 4
    return tuple(2 + round(index * span / (num_blocks - 1)) for index in range(num_blocks))


def _capture_layers(raw: dict, keys: dict, num_blocks: int, num_layers: int) -> tuple[int, ...]:
    key, offset = (_HIDDEN_IDS, 0) if speculators.KEY in raw else (_LAYER_IDS, 1)
    ids = keys.get(key)
    if ids is None and offset:
        layers = default_capture_layers(num_layers, num_blocks)
    elif not isinstance(ids, list) or not ids or any(type(i) is not int for i in ids):
        raise ValueError(f"{key} must be a list of whole numbers, got {shown(ids)}")
    else:
        layers = tuple(i + offset for i in ids)
    base.check_layers(layers, num_layers)
    return layers


def table(config: DFlashConfig) -> tuple[Entry, ...]:
    """Return the entries of a head, in either layout."""
    hidden = config.hidden_size
    entries = [
        matrix(("fc",), "fc.weight", hidden, config.fc_inputs),
        vector(("hidden_norm",), "hidden_norm.weight", hidden),
    ]
    for layer in range(config.network.num_layers):
        entries += block_table(config.network, layer, f"layers.{layer}")
    entries.append(vector(("norm",), "norm.weight", hidden))
    return (*entries, *base.separate_entries(config))


def assemble(config: DFlashConfig, nested: dict, draft_to_target: Any) -> DFlashParams:
    """Return the params of the nested arrays."""
    layers = blocks(nested, config.network)
    return DFlashParams(layers=layers, draft_to_target=draft_to_target, **nested)


def describe(
    layout: str, config: DFlashConfig, target: DecoderConfig, target_name: str, kind="dflash"
) -> dict:
    """Return the config.json of a head, without the keys that only DSpark has."""
    _check_layout(layout, config)
    base.check_layers(config.capture_layers, target.num_layers)
    network = dataclasses.replace(config.network, vocab_size=config.target_vocab_size)
    inner = qwen3.FAMILY.write(network)
    shared = {"block_size": config.block_size, "tie_word_embeddings": False}
    if layout == "dflash":
        return inner | shared | _authors_keys(config, target, kind)
    return shared | {
        **speculators.describe(kind, inner, config.max_depth, target, target_name),
        "architectures": [f"{_MODELS[kind]}Speculator"],
        "draft_vocab_size": config.vocab_size,
        _HIDDEN_IDS: list(config.capture_layers),
        "mask_token_id": config.mask_token,
        "sliding_window_non_causal": not config.causal,
        "sample_from_anchor": config.from_anchor,
    }


def _check_layout(layout: str, config: DFlashConfig) -> None:
    mixer, mlp = config.network.layers[0].mixer, config.network.layers[0].feed_forward
    sliding = [window is not None for window in config.network.windows]
    causal = [is_causal(config, layer) for layer in range(len(sliding))]
    mixed = causal != sliding and len(set(causal)) > 1
    features = {
        "blocks without norms of queries and keys": mixer.qk_norm is None,
        "biases of the MLP": mlp.bias,
        "biases of q, k, v without that of o, or the reverse": mixer.qkv_bias != mixer.output_bias,
    }
    if layout == "dflash":
        separate = config.separate_embedding or config.separate_head
        features["a separate embedding or output matrix"] = separate
        features["causal layers beside others, except sliding ones"] = mixed
    else:
        features |= speculators.features(config)
        features["causal layers, except sliding ones"] = any(causal) and causal != sliding
    base.refuse(layout, features, "layouts are 'dflash' and 'dflash-speculators'")
    if layout == "dflash-speculators":
        speculators.check_embedding(layout, config)


def _authors_keys(config: DFlashConfig, target: DecoderConfig, kind: str) -> dict:
    causal = {is_causal(config, layer) for layer in range(config.network.num_layers)}
    nested: dict[str, Any] = {
        "mask_token_id": config.mask_token,
        _LAYER_IDS: [layer - 1 for layer in config.capture_layers],
    }
    if len(causal) == 1 and (any(config.network.windows) or causal == {True}):
        nested["causal"] = causal == {True}  # by default only the sliding layers are
    if config.from_anchor:
        nested["sample_from_anchor"] = True
    model = f"{_MODELS[kind]}DraftModel"
    return {
        "architectures": [model],
        "auto_map": {"AutoModel": f"{kind}.{model}"},
        "num_target_layers": target.num_layers,
        "dflash_config": nested,
    }


def layouts(table, describe) -> tuple[Layout, ...]:
    """Return both layouts; ``describe`` takes the name of the layout first."""
    layout = lambda name, **options: Layout(
        name, table, functools.partial(describe, name), base.vocabulary_maps, **options
    )
    held = dict.fromkeys(("names_target", "holds_embedding", "holds_output"), True)
    return layout("dflash"), layout("dflash-speculators", **held)


FORMAT = HeadFormat(
    title="DFlash",
    kinds=("dflash",),
    owns=lambda config: isinstance(config, DFlashConfig) and config.spark is None,
    layouts=layouts(table, describe),
    sniff=_sniff,
    read_config=read_config,
    assemble=assemble,
    select=base.select_weights,
    reduce=base.reduce_by_offsets,
)
