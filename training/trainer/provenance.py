"""How an output came to be: a record that names no path of the machine."""

import importlib.metadata
import json
import platform
import shlex
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "tokenizers", "numpy")


def provenance(module: str, argv: Sequence[str]) -> dict[str, Any]:
    """The command, the commit, versions and devices: what is known before any work is done.

    Args:
      module: as in ``python -m training.pretrain``.
      argv: its arguments; of absolute paths only the last part is kept.
    """
    devices = jax.devices()
    return {
        "command": f"python -m {module} " + shlex.join(map(without_folders, argv)),
        "git": _git_commit(),
        "versions": {name: importlib.metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "device": devices[0].device_kind,
        "devices": len(devices),
        "processes": jax.process_count(),
    }


def write_provenance(directory: Path, facts: Mapping[str, Any]) -> None:
    """Writes ``provenance.json`` into ``directory``."""
    (directory / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n")


def without_folders(word: str) -> str:
    """A word of the command line, with only the last part of a path that is absolute."""
    flag, equals, value = word.rpartition("=")
    if value.startswith(("/", "~")):
        return flag + equals + Path(value).name
    return word


def _git_commit() -> str:
    """The commit of the checkout that runs, ``-dirty`` where its files differ from it."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        found = subprocess.run(command, capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return found.stdout.strip()
