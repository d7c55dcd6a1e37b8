"""MLP speculators in files: config.json to ``MlpSpeculatorConfig``, and the names of the tensors.

Two layouts, recognised by the names of the tensors. ``arctic`` holds the layout of the LSTM.

  * ``mlp_speculator``: IBM's (fms), under a prefix ``speculator.``: ``emb.{i}``, ``proj.{i}``,
    ``ln.{i}`` and ``head.{i}`` of each stage.
  * ``arctic-rnn``: Snowflake's ``sum_rnn``: the same, but ``emb.{i}.0``, ``proj.{i}.0`` and
    ``ln.{i}.0``, without the prefix.

With tied weights all stages use the tensors of the first stage (and all later ones ``proj.1``).
They are written once. A file may repeat them, and the copies must be equal. Drafter:
``jspec.drafters.mlp_speculator``.
"""

import re
from typing import Any

from jspec.checkpoints import families
from jspec.checkpoints.families import common
from jspec.checkpoints.families.names import Entry, matrix, vector
from jspec.checkpoints.heads import base
from jspec.checkpoints.heads.base import HeadFormat, Layout, Tensors
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorParams, NormParams
from jspec.util.messages import shown

_FIRST = {
    "mlp_speculator": re.compile(r"proj\.0\.weight"),
    "arctic-rnn": re.compile(r"proj\.0\.0\.weight"),
}


def _select(_: dict, tensors: Tensors, config: MlpSpeculatorConfig) -> Tensors:
    return base.without_repeats(_repeats(config), tensors)


def _assemble(_: MlpSpeculatorConfig, nested: dict, _ids: None) -> MlpSpeculatorParams:
    parts = {name: base.by_index(stages) for name, stages in nested.items()}
    norms = tuple(NormParams(**norm) for norm in parts["norms"])
    return MlpSpeculatorParams(**parts | {"norms": norms})


def _read_config(
    raw: dict, tensors: Tensors, target: DecoderConfig, layout: str
) -> MlpSpeculatorConfig:
    variant = layout == "arctic-rnn"
    if variant and raw.get("method", "sum_rnn") != "sum_rnn":
        raise ValueError(f"method is {shown(raw['method'])}, but the tensors are of 'sum_rnn'")
    sizes = read_sizes(raw, target, "input_hidden_dim" if variant else "emb_dim")
    inner = variant_width(raw) if variant else common.whole(raw, "inner_dim", least=0)
    tied = common.flag(raw, "tie_weights") or common.flag(raw, "tie_wts")
    if raw.get("tie_weights") is None and raw.get("tie_wts") is None:  # early files of fms
        tied = sizes["n_predict"] > 1 and not any(name.startswith("emb.1.") for name in tensors)
    return MlpSpeculatorConfig(inner_dim=inner or target.hidden_size, tie_weights=tied, **sizes)


def read_sizes(raw: dict, target: DecoderConfig, hidden_key: str) -> dict:
    """Return the fields that the configs of all speculators have."""
    if raw.get("quantization_config") is not None:
        raise ValueError("quantization_config is not supported: save the weights unquantised")
    base.check_target(
        (f"a hidden size ({hidden_key})", common.whole(raw, hidden_key), target.hidden_size),
        ("a vocabulary (vocab_size)", common.whole(raw, "vocab_size"), target.vocab_size),
    )
    return {
        "n_predict": common.whole(raw, "n_predict"),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "capture_layers": (target.num_layers,),
        "scale_input": common.flag(raw, "scale_input"),
    }


def variant_width(raw: dict) -> int:
    """Return the inner width of Snowflake's variants, which three equal keys hold."""
    dims = {key: _dim(raw, key) for key in ("inner_dim", "emb_dim", "proj_dim")}
    if len(set(dims.values())) > 1:
        stated = ", ".join(f"{key}={dim}" for key, dim in dims.items())
        raise ValueError(f"inner_dim, emb_dim and proj_dim must be equal, got {stated}")
    return dims["inner_dim"]


def _dim(raw: dict, key: str) -> int:
    """Return a number that may be written as a list of one, or as digits."""
    value = raw.get(key)
    parts = value.split(".") if isinstance(value, str) else value
    parts = parts if isinstance(parts, list) else [parts]
    if len(parts) > 1:
        raise ValueError(f"{key}={shown(value)} asks for a stack of layers; only one is supported")
    digits = [int(part) if isinstance(part, str) and part.isdecimal() else part for part in parts]
    if len(digits) != 1 or type(digits[0]) is not int or digits[0] < 1:
        raise ValueError(f"{key} must be a positive integer or its digits, got {shown(value)}")
    return digits[0]


def _repeats(config: MlpSpeculatorConfig) -> dict[str, str]:
    """Return the names that files of tied weights may repeat, and their originals."""
    if not config.tie_weights:
        return {}
    firsts = {"emb": 0, "proj": 1, "ln": 0, "head": 0}
    ends = {part: (".weight", ".0.weight") for part in ("emb", "proj")} | {"head": (".weight",)}
    ends["ln"] = (".weight", ".bias", ".0.weight", ".0.bias")
    return {
        f"{part}.{stage}{end}": f"{part}.{first}{end}"
        for part, first in firsts.items()
        for stage in range(first + 1, config.n_predict)
        for end in ends[part]
    }


def _table(config: MlpSpeculatorConfig, end: str = "") -> tuple[Entry, ...]:
    inner, vocab = config.inner_dim, config.vocab_size
    entries = []
    for stage in range(config.count("embeddings")):
        name = f"emb.{stage}{end}.weight"
        entries.append(Entry(("embeddings", stage), (name,), ((vocab, inner),)))
    for stage in range(config.count("projections")):
        name, inputs = f"proj.{stage}{end}.weight", inner if stage else config.hidden_size
        entries.append(matrix(("projections", stage), name, inner, inputs))
    for stage in range(config.count("norms")):
        entries += norm_entries(("norms", stage), f"ln.{stage}{end}", inner)
    for stage in range(config.count("heads")):
        entries.append(matrix(("heads", stage), f"head.{stage}.weight", vocab, inner))
    return tuple(entries)


def _rnn_table(config: MlpSpeculatorConfig) -> tuple[Entry, ...]:
    return _table(config, end=".0")


def norm_entries(path: tuple[str | int, ...], name: str, size: int) -> list[Entry]:
    """Return the entries of a norm's weight and bias."""
    return [vector((*path, kind), f"{name}.{kind}", size) for kind in ("weight", "bias")]


def _describe_ibm(config: MlpSpeculatorConfig, *_: Any) -> dict:
    """Return a config.json that fms and vLLM read."""
    return _describe_stages(config) | {
        "architectures": ["MLPSpeculatorPreTrainedModel"],
        "emb_dim": config.hidden_size,
        "inner_dim": config.inner_dim,
        "tie_weights": config.tie_weights,
    }


def _describe_rnn(config: MlpSpeculatorConfig, target: DecoderConfig, target_name: str) -> dict:
    """Return a config.json that Arctic Inference reads."""
    return describe_variant(config, target, target_name) | {
        "architectures": ["MLPVariantSpeculatorPreTrainedModel"],
        "method": "sum_rnn",
        "tie_weights": config.tie_weights,
        "tie_lstm_embs": False,
    }


def describe_variant(config: Any, target: DecoderConfig, target_name: str) -> dict:
    """Return the keys that Snowflake's variants share; Arctic Inference reads widths as digits."""
    return _describe_stages(config) | {
        "base_model_archs": families.describe(target)["architectures"],
        "base_model_name_or_path": target_name,
        "input_hidden_dim": config.hidden_size,
        **dict.fromkeys(("inner_dim", "emb_dim", "proj_dim"), str(config.inner_dim)),
    }


def _describe_stages(config: Any) -> dict:
    """Return the keys that all speculators share; with the last two, fms drafts a chain."""
    return {
        "model_type": "mlp_speculator",
        "vocab_size": config.vocab_size,
        "n_predict": config.n_predict,
        "num_lookahead_tokens": config.n_predict,
        "scale_input": config.scale_input,
        "top_k_tokens_per_head": [1] * config.n_predict,
        "n_candidates": 1,
    }


FORMAT = HeadFormat(
    title="MLP speculator",
    kinds=("mlp_speculator",),
    owns=lambda config: isinstance(config, MlpSpeculatorConfig),
    layouts=(
        Layout("mlp_speculator", _table, _describe_ibm, rename="speculator.{}".format),
        Layout("arctic-rnn", _rnn_table, _describe_rnn, names_target=True),
    ),
    sniff=base.by_names("mlp_speculator", _FIRST),
    read_config=_read_config,
    assemble=_assemble,
    select=_select,
)
