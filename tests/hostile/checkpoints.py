"""A small checkpoint of every kind, and the function that opens it."""

import functools
from collections.abc import Callable
from pathlib import Path

from jspec.checkpoints import checkpoint
from jspec.checkpoints.heads import head_files
from tests import llm_fixtures, tiny
from tests.checkpoints import test_dflash_files, test_head_files, test_speculator_files
from tests.drafters import hydras, mtps

_HEADS = {
    **{name: (test_head_files.save, test_head_files.TARGET) for name in test_head_files.HEADS},
    **{
        name: (test_speculator_files.save, tiny.TARGET.config)
        for name in test_speculator_files.LAYOUTS
    },
    **{name: (test_dflash_files.save, tiny.TARGET.config) for name in test_dflash_files.CONFIGS},
}
_OTHERS = {
    **{f"hydra {name}": (hydras, name) for name in hydras.CONFIGS},
    **{f"mtp {name}": (mtps, name) for name in ("one", "raw", "two raw")},
}
KINDS = ("target", *_HEADS, *_OTHERS)


@functools.cache
def saved(root: Path, kind: str) -> Path:
    """Return a directory with a checkpoint of this kind, saved on first use."""
    directory = root / kind.replace(" ", "-").replace(",", "")
    if kind == "target":
        llm_fixtures.write_model(directory, llm_fixtures.TARGET, 0)
    elif kind in _HEADS:
        _HEADS[kind][0](directory, kind)
    else:
        module, name = _OTHERS[kind]
        head_files.save_head(
            directory,
            module.CONFIGS[name],
            module.random_params(name),
            _target(kind),
            target_name="someone/model",
        )
    return directory


def opener(kind: str) -> Callable[[Path], object]:
    """Return the function that opens a checkpoint of this kind."""
    if kind == "target":
        return checkpoint.load_pretrained
    return functools.partial(head_files.load_head, target_config=_target(kind))


def _target(kind: str):
    return _HEADS[kind][1] if kind in _HEADS else tiny.TARGET.config


def contents(directory: Path) -> dict[str, bytes]:
    """Return the contents of the files of a directory by name."""
    return {file.name: file.read_bytes() for file in sorted(directory.iterdir())}


def write(directory: Path, files: dict[str, bytes]) -> Path:
    """Replace the files of a directory by ``files``."""
    directory.mkdir(parents=True, exist_ok=True)
    for file in directory.iterdir():
        file.unlink()
    for name, content in files.items():
        (directory / name).write_bytes(content)
    return directory
