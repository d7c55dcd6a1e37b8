"""What DSpark heads have in files beside DFlash's: keys of config.json, and the tensors' names."""

from collections.abc import Mapping

import numpy as np

from jspec.checkpoints.families.names import Entry
from jspec.models.heads.dspark import SparkConfig
from jspec.util.messages import shown

MARKOV, CONFIDENCE = "markov_head.", "confidence_head.proj"
_MIXED = {"gated": "gate_proj", "rnn": "joint_proj"}


def is_there(tensors: Mapping[str, np.ndarray]) -> bool:
    """Whether a file has any of it."""
    return any(name.startswith((MARKOV, CONFIDENCE)) for name in tensors)


def read(settings: dict, tensors: Mapping[str, np.ndarray], hidden: int) -> SparkConfig:
    """What the tensors say; the keys of config.json must not say otherwise.

    Raises:
      ValueError: they do.
    """
    before = tensors.get(f"{MARKOV}markov_w1.weight")
    chances = tensors.get(f"{CONFIDENCE}.weight")
    rank = 0 if before is None else before.shape[-1]
    found = [kind for kind, part in _MIXED.items() if f"{MARKOV}{part}.weight" in tensors]
    markov = found[0] if found else "vanilla"
    for key, ours, told in (("markov_rank", rank, True), ("markov_head_type", markov, rank > 0)):
        if told and settings.get(key) not in (None, ours):
            raise ValueError(
                f"{key} is {shown(settings[key])}, but the tensors are those of {ours!r}"
            )
    sees = chances is not None and chances.shape[-1] != hidden
    return SparkConfig(rank, markov, chances is not None, sees and rank > 0)


def table(
    config: SparkConfig | None, hidden: int, target_vocab: int, vocab: int
) -> tuple[Entry, ...]:
    """Names of the tensors; none without ``config``."""
    if config is None:
        return ()
    entries = []
    if config.rank:
        for field, name, rows, transpose in (
            ("before", "markov_w1", target_vocab, False),
            ("bias", "markov_w2", vocab, True),
        ):
            shape = ((rows, config.rank),)
            entries.append(Entry(("spark", field), (f"{MARKOV}{name}.weight",), shape, transpose))
    names = {"mix": f"{MARKOV}{_MIXED.get(config.markov)}", "confidence": CONFIDENCE}
    for field, (inputs, outputs) in config.sizes(hidden).items():
        weight, bias = (f"{names[field]}.{part}" for part in ("weight", "bias"))
        entries.append(Entry(("spark", field), (weight,), ((outputs, inputs),), transpose=True))
        entries.append(Entry(("spark", f"{field}_bias"), (bias,), ((outputs,),)))
    return tuple(entries)


def describe(config: SparkConfig) -> dict:
    """Keys of config.json."""
    return {
        "markov_rank": config.rank,
        "markov_head_type": config.markov,
        "enable_confidence_head": config.confidence,
        "confidence_head_with_markov": config.confidence_sees_token,
    }
