"""Snowflake's LSTM speculator in files: its config.json and the tensors' names.

Layout ``arctic-lstm``: ``{forget,input,output,cell}_emb.0`` and ``_proj.{0,1}``, ``cell_ln.0``,
``state_ln.0`` and ``head.0``. Tied embeddings stand in the file four times, since Arctic Inference
asks for all of them; ``head.{i}`` may repeat ``head.0``. Copies that differ are refused.
"""

from collections.abc import Mapping

import numpy as np

from jspec.checkpoints.families import common
from jspec.checkpoints.families.names import Entry, nest
from jspec.checkpoints.heads import mlp_speculator as shared
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.arctic import GATES, LstmSpeculatorConfig, LstmSpeculatorParams
from jspec.models.heads.mlp_speculator import NormParams
from jspec.util.messages import shown

ARCHITECTURE = "ArcticLSTMSpeculatorPreTrainedModel"


def layout(tensors: Mapping[str, np.ndarray]) -> str | None:
    """The layout that the tensors' names have, or None."""
    return "arctic-lstm" if "forget_proj.0.weight" in tensors else None


def read(
    raw: dict, tensors: Mapping[str, np.ndarray], target: DecoderConfig
) -> LstmSpeculatorConfig:
    """The speculator that a config.json describes, for ``target``.

    Raises:
      ValueError: a key is malformed or not supported, or it was made for another target.
    """
    del tensors
    if raw.get("method") != "sum_lstm":
        raise ValueError(
            f"method is {shown(raw.get('method'))}, but the tensors are those of 'sum_lstm'"
        )
    if not common.flag(raw, "tie_weights"):
        raise ValueError("tie_weights is false, but method 'sum_lstm' knows tied weights alone")
    return LstmSpeculatorConfig(
        inner_dim=shared.variant_width(raw),
        tie_embeddings=common.flag(raw, "tie_lstm_embs"),
        **shared.read_sizes(raw, target, "input_hidden_dim"),
    )


def repeats(config: LstmSpeculatorConfig) -> dict[str, str]:
    """Names that files may repeat, and the name that each is a copy of."""
    heads = {f"head.{stage}.weight": "head.0.weight" for stage in range(1, config.n_predict)}
    return heads | required_repeats(config)


def required_repeats(config: LstmSpeculatorConfig) -> dict[str, str]:
    """Copies that must be in a file that Arctic Inference is to read."""
    if not config.tie_embeddings:
        return {}
    return {_embedding(gate): _embedding(GATES[0]) for gate in GATES[1:]}


def _embedding(gate: str) -> str:
    return f"{gate}_emb.0.weight"


def table(config: LstmSpeculatorConfig, kind: str) -> tuple[Entry, ...]:
    """Names of the tensors."""
    del kind
    inner, vocab = config.inner_dim, config.vocab_size
    own = GATES[:1] if config.tie_embeddings else GATES
    entries = [
        Entry(("embeddings", index), (_embedding(gate),), ((vocab, inner),))
        for index, gate in enumerate(own)
    ]
    for stage, inputs in enumerate((config.hidden_size, inner)):
        names = tuple(f"{gate}_proj.{stage}.weight" for gate in GATES)
        shapes = ((inner, inputs),) * len(GATES)
        entries.append(Entry(("projections", stage), names, shapes, transpose=True))
    for norm, name in (("cell_norm", "cell_ln.0"), ("state_norm", "state_ln.0")):
        entries += shared.norm_entries((norm,), name, inner)
    entries.append(Entry(("head",), ("head.0.weight",), ((vocab, inner),), transpose=True))
    return tuple(entries)


def assemble(entries: tuple[Entry, ...], arrays: list) -> LstmSpeculatorParams:
    """Parameters from one array for each entry."""
    nested = nest(entries, arrays)
    in_order = lambda part: tuple(nested[part][index] for index in sorted(nested[part]))
    return LstmSpeculatorParams(
        embeddings=in_order("embeddings"),
        projections=in_order("projections"),
        cell_norm=NormParams(**nested["cell_norm"]),
        state_norm=NormParams(**nested["state_norm"]),
        head=nested["head"],
    )


def describe(
    config: LstmSpeculatorConfig, kind: str, target: DecoderConfig, base_model: str
) -> dict:
    """A config.json for ``config`` as Arctic Inference reads it."""
    del kind
    return shared.describe_variant(config, target, base_model) | {
        "architectures": [ARCHITECTURE],
        "method": "sum_lstm",
        "tie_weights": True,
        "tie_lstm_embs": config.tie_embeddings,
    }
