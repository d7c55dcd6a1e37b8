"""How results call a config: in a name for people, and as JSON that is of use elsewhere."""

import json
import os
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jspec.engine.loading import LoadedModel


def names_of(configs: Sequence[Mapping[str, Any]], unsaid: Collection[str] = ()) -> list[str]:
    """The names of all configs; of those that would be equal, each says which its model is.

    Args:
      configs: of all contenders but plain decoding.
      unsaid: keys that do not tell contenders apart.
    """
    alike = [name_of(_without(given, unsaid)) for given in configs]
    models = [_path(given.get("model")) for given in configs]
    names = []
    for given, name, own in zip(configs, alike, models, strict=True):
        others = {path for path, other in zip(models, alike, strict=True) if other == name} - {own}
        names.append(name_of(given, _tail(own, models) if own and others else ""))
    return names


def name_of(config: Mapping[str, Any], which: str = "") -> str:
    """A contender's name: its method and what is set beside, folders and ids cut short.

    ``which`` tells its model from others.
    """
    rest = _without(config, ("method", "model"))
    words = [config.get("method") or which or (_path(config.get("model")) or Path("?")).name]
    words += [which] if which and config.get("method") else []
    if "num_speculative_tokens" in rest:
        words.append(f"K={rest.pop('num_speculative_tokens')}")
    words += [f"{key}={json.dumps(value, default=str)}" for key, value in sorted(rest.items())]
    return ", ".join(words)


def portable(given: Mapping[str, Any], among: Sequence[Mapping[str, Any]] = ()) -> dict[str, Any]:
    """A config without folders, which are of interest to nobody else.

    But for those that tell a path from what others ``among`` all configs have in its place.
    """
    return {
        key: _tail(Path(value), [_path(other.get(key)) for other in among])
        if isinstance(value, str | os.PathLike) and Path(value).is_absolute()
        else value.path
        if isinstance(value, LoadedModel)
        else value
        for key, value in given.items()
    }


def _tail(path: Path, among: Iterable[Path | None]) -> str:
    """The shortest end of a path that no other one has.

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
    """Where a model lies, if that is known."""
    model = getattr(model, "path", model)
    return Path(model) if isinstance(model, str | os.PathLike) else None


def _without(config: Mapping[str, Any], keys: Collection[str]) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}
