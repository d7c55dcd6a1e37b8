"""A row of the table of families, and what the tiny models of its cases share."""

import dataclasses
from collections.abc import Mapping
from typing import Any

TRAINED = 32  # trained length of rotary scalings: longer than the prompts, shorter than the texts

# Sizes of the tiny models, under the keys of config.json.
SIZES = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "head_dim": 16,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}


@dataclasses.dataclass(frozen=True)
class Row:
    """A family of ``jspec.checkpoints.families``.

    Attributes:
      checkpoints: public ones, for the documentation.
      heads: heads for them, for the documentation.
      features: features of the network, for the documentation.
      cases: tiny models to compare with transformers: names, and keys of config.json beside
        ``SIZES``. The first also runs through the engine. None of them for a family that
        transformers lacks.
      in_engine: other cases that run through the engine.
      compared: for the documentation, if there are no cases.
      whole: the ``model_type`` that transformers has in place of this text part, and the other keys
        of its config.json; None for a text part that transformers has as a model.
    """

    checkpoints: str
    heads: str
    features: str
    cases: Mapping[str, dict[str, Any]]
    in_engine: tuple[str, ...] = ()
    compared: str = ""
    whole: tuple[str, dict[str, Any]] | None = None


def rope(kind: str, **more: Any) -> dict[str, Any]:
    """Return keys of config.json for a rotary scaling."""
    return {"rope_parameters": {"rope_type": kind, "rope_theta": 1e4, **more}}


LONGROPE = {
    "short_factor": [1.0 + 0.05 * j for j in range(8)],
    "long_factor": [2.0 + 0.3 * j for j in range(8)],
    "original_max_position_embeddings": TRAINED,
}
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": TRAINED,
}
YARN = {"factor": 4.0, "original_max_position_embeddings": TRAINED}
