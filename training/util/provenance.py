"""Records of how an output was made; they name no path of the machine."""

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
    """Return the command, the commit, versions and devices; absolute paths are cut."""
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
    """Write ``provenance.json`` into ``directory``."""
    (directory / "provenance.json").write_text(json.dumps(facts, indent=2) + "\n")


def without_folders(word: str) -> str:
    """Return a word of the command line; an absolute path is cut to its last part."""
    flag, equals, value = word.rpartition("=")
    if value.startswith(("/", "~")):
        return flag + equals + Path(value).name
    return word


def _git_commit() -> str:
    """Return the commit of this checkout, with ``-dirty`` if its files differ from it."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
