"""Snowflake's LSTM speculator in files: its config.json and the names of the tensors.

Layout ``arctic-lstm``: ``{forget,input,output,cell}_emb.0`` and ``_proj.{0,1}``, ``cell_ln.0``,
``state_ln.0`` and ``head.0``. The file holds tied embeddings four times, because Arctic Inference
requires all of them. ``head.{i}`` may repeat ``head.0``. Copies that differ raise. Drafter:
``jspec.drafters.mlp_speculator``.
"""

import re

import numpy as np

from jspec.checkpoints.families import common
from jspec.checkpoints.families.names import Entry, matrix
from jspec.checkpoints.heads import base, mlp_speculator
from jspec.checkpoints.heads.base import HeadFormat, Layout, Tensors
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.arctic import GATES, LstmSpeculatorConfig, LstmSpeculatorParams
from jspec.models.heads.mlp_speculator import NormParams
from jspec.util.messages import shown


def _select(_: dict, tensors: Tensors, config: LstmSpeculatorConfig) -> Tensors:
    heads = {f"head.{stage}.weight": "head.0.weight" for stage in range(1, config.n_predict)}
    return base.without_repeats(heads | _tied(config), tensors)


def _assemble(_: LstmSpeculatorConfig, nested: dict, _ids: None) -> LstmSpeculatorParams:
    parts = {field: base.by_index(nested[field]) for field in ("embeddings", "projections")}
    norms = {field: NormParams(**nested[field]) for field in ("cell_norm", "state_norm")}
    return LstmSpeculatorParams(**nested | parts | norms)


def _read_config(raw: dict, _: Tensors, target: DecoderConfig, *_layout) -> LstmSpeculatorConfig:
    if raw.get("method") != "sum_lstm":
        raise ValueError(f"method is {shown(raw.get('method'))}, but the tensors are of 'sum_lstm'")
    if not common.flag(raw, "tie_weights"):
        raise ValueError("tie_weights is false, but method 'sum_lstm' has only tied weights")
    return LstmSpeculatorConfig(
        inner_dim=mlp_speculator.variant_width(raw),
        tie_embeddings=common.flag(raw, "tie_lstm_embs"),
        **mlp_speculator.read_sizes(raw, target, "input_hidden_dim"),
    )


def _tied(config: LstmSpeculatorConfig) -> dict[str, str]:
    """Return the names of the copies of a tied embedding, and the name of the original."""
    if not config.tie_embeddings:
        return {}
    return {_embedding(gate): _embedding(GATES[0]) for gate in GATES[1:]}


def _embedding(gate: str) -> str:
    return f"{gate}_emb.0.weight"


def _table(config: LstmSpeculatorConfig) -> tuple[Entry, ...]:
    inner, vocab = config.inner_dim, config.vocab_size
    gates = GATES[:1] if config.tie_embeddings else GATES
    entries = [
        Entry(("embeddings", index), (_embedding(gate),), ((vocab, inner),))
        for index, gate in enumerate(gates)
    ]
    for stage, inputs in enumerate((config.hidden_size, inner)):
        names = tuple(f"{gate}_proj.{stage}.weight" for gate in GATES)
        shapes = ((inner, inputs),) * len(GATES)
        entries.append(Entry(("projections", stage), names, shapes, transpose=True))
    for norm, name in (("cell_norm", "cell_ln.0"), ("state_norm", "state_ln.0")):
        entries += mlp_speculator.norm_entries((norm,), name, inner)
    return (*entries, matrix(("head",), "head.0.weight", vocab, inner))


def _describe(config: LstmSpeculatorConfig, target: DecoderConfig, target_name: str) -> dict:
    """Return a config.json that Arctic Inference reads."""
    return mlp_speculator.describe_variant(config, target, target_name) | {
        "architectures": ["ArcticLSTMSpeculatorPreTrainedModel"],
        "method": "sum_lstm",
        "tie_weights": True,
        "tie_lstm_embs": config.tie_embeddings,
    }


def _extra(
    config: LstmSpeculatorConfig, params: LstmSpeculatorParams, dtype: np.dtype
) -> dict[str, np.ndarray]:
    return base.copies(_tied(config), _table(config), params, dtype)


FORMAT = HeadFormat(
    title="LSTM speculator",
    kinds=("mlp_speculator",),
    owns=lambda config: isinstance(config, LstmSpeculatorConfig),
    layouts=(Layout("arctic-lstm", _table, _describe, _extra, names_target=True),),
    sniff=base.by_names("mlp_speculator", {"arctic-lstm": re.compile(r"forget_proj\.0\.weight")}),
    read_config=_read_config,
    assemble=_assemble,
    select=_select,
)
