"""The device, versions and command line of a measurement."""

import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

_PACKAGES = ("jax", "jaxlib", "flax", "numpy", "torch", "transformers")
_PLUGINS = ("libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin")  # one of them, or none


def describe(program: str | None = None) -> dict:
    """Return device, versions, commit, command line and load, without paths of this machine.

    ``program`` names the command; None names the module that runs.
    """
    import jax

    return {
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "device": {
            "platform": jax.default_backend(),
            "kind": jax.devices()[0].device_kind,
            "cpu": _cpu_model(),
            "cores": os.cpu_count(),
        },
        "python": platform.python_version(),
        "versions": {name: _version(name) for name in _PACKAGES}
        | {name: version for name in _PLUGINS if (version := _version(name))},
        "commit": _git("rev-parse", "HEAD"),
        "uncommitted_changes": bool(_git("status", "--porcelain", "--", "jspec", "kernels")),
        "argv": [program or f"benchmarks.{Path(sys.argv[0]).stem}", *map(_shortened, sys.argv[1:])],
        "load_average": os.getloadavg(),
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _git(*arguments: str) -> str | None:
    root = Path(__file__).resolve().parents[3]
    if not (root / "pyproject.toml").is_file():  # installed, maybe inside another checkout
        return None
    try:
        done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True)
    except OSError:  # git is not installed
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def _shortened(word: str) -> str:
    """Return the last two parts of an absolute path, without the folders of this machine."""
    return "/".join(Path(word).parts[-2:]) if word.startswith("/") else word
