"""MLP speculators in files: which config.json makes which config, and the tensors' names.

Two layouts, told apart by the names of the tensors; ``arctic_format`` has the LSTM's:

  * ``mlp_speculator``: IBM's (fms), under a prefix ``speculator.``: ``emb.{i}``, ``proj.{i}``,
    ``ln.{i}`` and ``head.{i}`` of each stage;
  * ``arctic-rnn``: Snowflake's ``sum_rnn``: the same, but ``emb.{i}.0``, ``proj.{i}.0`` and
    ``ln.{i}.0``, and without the prefix.

Where weights are tied the first stage's tensors serve all (and proj.1 all later ones): they are
written once, and read where they repeat, which they must without a difference.
"""

from collections.abc import Mapping

import numpy as np

from jspec.checkpoints import families
from jspec.checkpoints.families import common
from jspec.checkpoints.families.names import Entry, nest
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorParams, NormParams
from jspec.util.messages import shown

MODEL_TYPE = "mlp_speculator"
PREFIX = "speculator."  # of IBM's names, which wrap the net in a class
ARCHITECTURES = {
    "mlp_speculator": "MLPSpeculatorPreTrainedModel",
    "arctic-rnn": "MLPVariantSpeculatorPreTrainedModel",
}
_FIRST = {"proj.0.weight": "mlp_speculator", "proj.0.0.weight": "arctic-rnn"}


# Reading.


def layout(tensors: Mapping[str, np.ndarray]) -> str | None:
    """The layout that the tensors' names have, or None."""
    return next((name for tensor, name in _FIRST.items() if tensor in tensors), None)


def read(
    raw: dict, tensors: Mapping[str, np.ndarray], target: DecoderConfig
) -> MlpSpeculatorConfig:
    """The speculator that a config.json and its tensors describe, for ``target``.

    Raises:
      ValueError: a key is malformed or not supported, or it was made for another target.
    """
    kind = layout(tensors)
    variant = kind == "arctic-rnn"
    if variant and raw.get("method", "sum_rnn") != "sum_rnn":
        raise ValueError(
            f"method is {shown(raw['method'])}, but the tensors are those of 'sum_rnn'"
        )
    sizes = read_sizes(raw, target, "input_hidden_dim" if variant else "emb_dim")
    inner = variant_width(raw) if variant else common.whole(raw, "inner_dim", least=0)
    stated = raw.get("tie_weights") is not None or raw.get("tie_wts") is not None
    tied = common.flag(raw, "tie_weights") or common.flag(raw, "tie_wts")
    if not stated:  # fms wrote no such key at first
        tied = sizes["n_predict"] > 1 and not any(name.startswith("emb.1.") for name in tensors)
    return MlpSpeculatorConfig(
        inner_dim=inner or target.hidden_size,
        tie_weights=tied,
        **sizes,
    )


def read_sizes(raw: dict, target: DecoderConfig, hidden_key: str) -> dict:
    """The fields that all speculators have, once they fit the target.

    Raises:
      ValueError: a key is malformed or not supported, or it was made for another target.
    """
    if raw.get("quantization_config") is not None:
        raise ValueError("quantization_config is not supported: save the weights unquantised")
    for what, key, own in (
        ("hidden size", hidden_key, target.hidden_size),
        ("vocabulary", "vocab_size", target.vocab_size),
    ):
        if common.whole(raw, key) != own:
            raise ValueError(
                f"the speculator was made for another target: it expects a {what} of {raw[key]} "
                f"({key}) where the target has {own}"
            )
    return {
        "n_predict": common.whole(raw, "n_predict"),
        "hidden_size": target.hidden_size,
        "vocab_size": target.vocab_size,
        "capture_layers": (target.num_layers,),
        "scale_input": common.flag(raw, "scale_input"),
    }


def variant_width(raw: dict) -> int:
    """I of Snowflake's variants, whose three dims must be one and the same number.

    Raises:
      ValueError: a dim is malformed, has several layers, or differs from the others.
    """
    dims = {key: _dim(raw, key) for key in ("inner_dim", "emb_dim", "proj_dim")}
    if len(set(dims.values())) > 1:
        stated = ", ".join(f"{key}={dim}" for key, dim in dims.items())
        raise ValueError(f"inner_dim, emb_dim and proj_dim must be equal, got {stated}")
    return dims["inner_dim"]


def _dim(raw: dict, key: str) -> int:
    """A whole number, a list of one, or its digits; several are a stack that we do not run."""
    value = raw.get(key)
    parts = value.split(".") if isinstance(value, str) else value
    parts = parts if isinstance(parts, list) else [parts]
    if len(parts) > 1:
        raise ValueError(f"{key}={shown(value)} asks for a stack of layers; only one is supported")
    digits = [int(part) if isinstance(part, str) and part.isdecimal() else part for part in parts]
    if len(digits) != 1 or type(digits[0]) is not int or digits[0] < 1:
        raise ValueError(f"{key} must be a positive integer or its digits, got {shown(value)}")
    return digits[0]


def repeats(config: MlpSpeculatorConfig) -> dict[str, str]:
    """Names that files of tied weights may repeat, and the name that each is a copy of."""
    if not config.tie_weights:
        return {}
    first = {"emb": 0, "proj": 1, "ln": 0, "head": 0}
    ends = {part: (".weight", ".0.weight") for part in ("emb", "proj")} | {"head": (".weight",)}
    ends["ln"] = (".weight", ".bias", ".0.weight", ".0.bias")
    return {
        f"{part}.{stage}{end}": f"{part}.{at}{end}"
        for part, at in first.items()
        for stage in range(at + 1, config.n_predict)
        for end in ends[part]
    }


def required_repeats(config: MlpSpeculatorConfig) -> dict[str, str]:
    """Copies that must be in a file: none."""
    del config
    return {}


# Both ways.


def table(config: MlpSpeculatorConfig, kind: str) -> tuple[Entry, ...]:
    """Names of the tensors in layout ``kind``, without the prefix."""
    inner, vocab, deeper = config.inner_dim, config.vocab_size, ".0" if kind != MODEL_TYPE else ""
    entries = []
    for stage in range(config.count("embeddings")):
        name = f"emb.{stage}{deeper}.weight"
        entries.append(Entry(("embeddings", stage), (name,), ((vocab, inner),)))
    for stage in range(config.count("projections")):
        name, inputs = f"proj.{stage}{deeper}.weight", inner if stage else config.hidden_size
        shape = (inner, inputs)
        entries.append(Entry(("projections", stage), (name,), (shape,), transpose=True))
    for stage in range(config.count("norms")):
        entries += norm_entries(("norms", stage), f"ln.{stage}{deeper}", inner)
    for stage in range(config.count("heads")):
        shape = (vocab, inner)
        name = f"head.{stage}.weight"
        entries.append(Entry(("heads", stage), (name,), (shape,), transpose=True))
    return tuple(entries)


def norm_entries(path: tuple[str | int, ...], name: str, size: int) -> list[Entry]:
    """Names of a norm's weight and bias."""
    return [Entry((*path, kind), (f"{name}.{kind}",), ((size,),)) for kind in ("weight", "bias")]


def assemble(entries: tuple[Entry, ...], arrays: list) -> MlpSpeculatorParams:
    """Parameters from one array for each entry."""
    nested = nest(entries, arrays)
    in_order = lambda part: tuple(nested[part][index] for index in sorted(nested[part]))
    return MlpSpeculatorParams(
        embeddings=in_order("embeddings"),
        projections=in_order("projections"),
        norms=tuple(NormParams(**norm) for norm in in_order("norms")),
        heads=in_order("heads"),
    )


# Writing.


def describe(
    config: MlpSpeculatorConfig, kind: str, target: DecoderConfig, base_model: str
) -> dict:
    """A config.json for ``config`` as fms and vLLM, or Arctic Inference, read it."""
    if kind == "arctic-rnn":
        return describe_variant(config, target, base_model) | {
            "architectures": [ARCHITECTURES[kind]],
            "method": "sum_rnn",
            "tie_weights": config.tie_weights,
            "tie_lstm_embs": False,
        }
    return describe_stages(config) | {
        "architectures": [ARCHITECTURES[kind]],
        "emb_dim": config.hidden_size,
        "inner_dim": config.inner_dim,
        "tie_weights": config.tie_weights,
    }


def describe_variant(config, target: DecoderConfig, base_model: str) -> dict:
    """The keys that Snowflake's variants share. Arctic Inference wants dims as digits."""
    return describe_stages(config) | {
        "base_model_archs": families.describe(target)["architectures"],
        "base_model_name_or_path": base_model,
        "input_hidden_dim": config.hidden_size,
        **dict.fromkeys(("inner_dim", "emb_dim", "proj_dim"), str(config.inner_dim)),
    }


def describe_stages(config) -> dict:
    """The keys that all speculators share. fms drafts a tree by the last two: here, a chain."""
    return {
        "model_type": MODEL_TYPE,
        "vocab_size": config.vocab_size,
        "n_predict": config.n_predict,
        "num_lookahead_tokens": config.n_predict,
        "scale_input": config.scale_input,
        "top_k_tokens_per_head": [1] * config.n_predict,
        "n_candidates": 1,
    }
