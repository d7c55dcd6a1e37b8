"""The text part of a model that reads images or sound too: its config and its tensors."""

import logging
from collections.abc import Mapping
from typing import Any

_log = logging.getLogger(__name__)

# Keys beside the text part's config that hold for it.
_SHARED = (
    *("bos_token_id", "eos_token_id", "pad_token_id"),
    *("dtype", "torch_dtype", "quantization_config", "tie_word_embeddings"),
)
# Beginnings of names in such files, and those of a model of text alone.
_PREFIXES = {
    "model.language_model.": "model.",
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_KEPT = ("lm_head.", "mtp.")


def config_of(raw: dict) -> dict:
    """Return the config.json of the text part; ``raw`` itself of a model of text alone."""
    text = raw.get("text_config")
    if not isinstance(text, dict):
        return raw
    shared = {key: raw[key] for key in _SHARED if raw.get(key) is not None}
    return text | shared


def tensors_of(tensors: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the tensors of the text part under the names of a model of text alone.

    What is left out is logged, by the beginnings of the names. Files of a model of text alone stay
    as they are.
    """
    if not any(name.startswith(tuple(_PREFIXES)) for name in tensors):
        return tensors
    text, others = {}, {}
    for name, tensor in tensors.items():
        old = next((prefix for prefix in _PREFIXES if name.startswith(prefix)), None)
        if old is not None:
            text[_PREFIXES[old] + name.removeprefix(old)] = tensor
        elif name.startswith(_KEPT):
            text[name] = tensor
        else:
            others[".".join(name.split(".")[:2])] = None
    if others:
        _log.warning("only the text part is loaded; left out: %s", ", ".join(others))
    return text
