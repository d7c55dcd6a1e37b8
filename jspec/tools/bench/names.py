"""Names and portable forms of configs in results."""

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.checkpoints.loading import LoadedModel


def names_of(configs: Sequence[Mapping[str, Any]], unsaid: Collection[str] = ()) -> list[str]:
    """Return the name of each config; equal names get the end of their model's path.

    Keys that are ``unsaid`` do not distinguish contenders.
    """
    alike = [name_of(_without(given, unsaid)) for given in configs]
    models = [_path(given.get("model")) for given in configs]
    names = []
    for given, name, model in zip(configs, alike, models, strict=True):
        others = {path for path, other in zip(models, alike, strict=True) if other == name}
        is_alone = model is None or others == {model}
        names.append(name_of(given, "" if is_alone else _tail(model, models)))
    return names


def name_of(config: Mapping[str, Any], which: str = "") -> str:
    """Return a contender's name: its method and other keys, and ``which`` model if given."""
    rest = _without(config, ("method", "model"))
    words = [config.get("method") or which or (_path(config.get("model")) or Path("?")).name]
    words += [which] if which and config.get("method") else []
    if "num_speculative_tokens" in rest:
        words.append(f"K={rest.pop('num_speculative_tokens')}")
    words += [f"{key}={json.dumps(value, default=str)}" for key, value in sorted(rest.items())]
    return ", ".join(words)


def with_weights(name: str, quantization: str | None) -> str:
    """Return the name of a method with the weights of a ``quantization``."""
    return f"{quantization}, {name}" if quantization else name


def portable(given: Mapping[str, Any], among: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """Return a config without this machine's folders.

    Keeps the shortest path suffix that distinguishes the config from the others ``among``.
    """
    result = {}
    for key, value in given.items():
        if isinstance(value, str | os.PathLike) and Path(value).is_absolute():
            value = _tail(Path(value), [_path(other.get(key)) for other in among])
        result[key] = value.path if isinstance(value, LoadedModel) else value
    return result


def _tail(path: Path, among: Iterable[Path | None]) -> str:
    """Return the shortest path suffix that no other path has.

    >>> _tail(Path("/runs/a/export"), [Path("/runs/b/export"), Path("/runs/a/head")])
    'a/export'
    """
    others = [each for each in among if each not in (None, path)]
    for length in range(1, len(path.parts)):
        end = path.parts[-length:]
        if all(other.parts[-length:] != end for other in others):
            return str(Path(*end))
    return str(path)


def _path(model: Any) -> Path | None:
    model = getattr(model, "path", model)
    return Path(model) if isinstance(model, str | os.PathLike) else None


def _without(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}
