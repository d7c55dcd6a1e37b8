"""The drafting method of a ``speculative_config``, from its name or from its model.

Unknown, refused and missing methods raise ValueError.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jspec.api.config.keys import (
    CUSTOM_CLASS,
    METHOD_ALIASES,
    METHOD_IN_NAME,
    METHOD_OF_KEY,
    METHOD_OF_MODEL_TYPE,
    METHODS_AS_MODELS,
    METHODS_REFUSED,
)
from jspec.checkpoints.families import common
from jspec.checkpoints.files import model_files
from jspec.checkpoints.heads.head_files import LoadedHead
from jspec.drafters.methods import METHODS
from jspec.util.messages import did_you_mean, shown

NONE = "none"


def method_of(values: Mapping[str, Any]) -> str:
    """Return the method, stated or inferred as vLLM infers it."""
    method, model = values["method"], values["model"]
    if method is None and model is None:
        if values["num_speculative_tokens"] is not None:
            raise ValueError(
                "num_speculative_tokens was provided but without speculative model. Add "
                "'method' (such as 'ngram') or 'model'."
            )
        raise ValueError(f"speculative_config needs a 'method' ({_working()}) or a 'model'.")
    if method is None:
        method = _method_of_model(model)
    if not isinstance(method, str):
        raise ValueError(f"method={shown(method)} must be a name: {_working()}.")
    return _known_method(method)


def _method_of_model(model: Any) -> str:
    """Infer the method from the model's name or from its config.json."""
    if isinstance(model, LoadedHead):
        return model.kind
    if not isinstance(model, str | os.PathLike):
        return "draft_model"
    name = str(model).lower()
    if name in METHODS_AS_MODELS:
        return name
    in_name = next((method for part, method in METHOD_IN_NAME.items() if part in name), None)
    file = Path(model) / "config.json"
    if in_name or not os.path.isfile(file):  # Path.is_file raises for names that are too long
        return in_name or "draft_model"
    raw = model_files.read_json(file)
    architectures, kind = common.architectures(raw), raw.get("speculators_model_type")
    if isinstance(kind, str) and kind in METHODS:
        return kind
    if kind == "peagle" or "PEagleDraftModel" in architectures:
        return "eagle3"
    if any("DSpark" in name for name in architectures):
        return "dspark"
    by_key = next((method for key, method in METHOD_OF_KEY.items() if key in raw), "draft_model")
    kind = raw.get("model_type")
    return METHOD_OF_MODEL_TYPE.get(kind, by_key) if isinstance(kind, str) else by_key


def _known_method(name: str) -> str:
    method = METHOD_ALIASES.get(name, name)
    if method in METHODS:
        return method
    if method in METHODS_REFUSED:
        raise ValueError(f"method={name!r} is refused: {METHODS_REFUSED[method]}.")
    if "." in method:
        raise ValueError(
            f"method={shown(name)} is no method; a class of your own is method={CUSTOM_CLASS!r} "
            f"with model={shown(name)}."
        )
    if method.endswith("_mtp"):
        raise ValueError(
            f"method={shown(name)} is not built yet; these work: {_working()}. If the model is a "
            "plain language model, set method='draft_model'."
        )
    known = f"{_working()}{did_you_mean(method, [*METHODS, CUSTOM_CLASS])}"
    raise ValueError(f"Unsupported speculative method: {shown(name)}; these work: {known}")


def _working() -> str:
    return ", ".join(repr(name) for name in METHODS if name != NONE)
