"""Programs in a process of their own, where one CPU simulates eight devices."""

import json
import os
import subprocess
import sys
from typing import Any

from tests import house


def environment() -> dict[str, str]:
    """Return the environment of such a process."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    return os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}


def printed(module: str, *arguments: Any) -> list[Any]:
    """Run a module with arguments; return the JSON values that it prints, one a line."""
    run = subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=house.ROOT,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=3000,
    )
    assert run.returncode == 0, run.stderr
    return [json.loads(line) for line in run.stdout.splitlines() if line.startswith(("{", "["))]
