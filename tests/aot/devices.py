"""The devices that programs are compiled for, as their compilers describe them."""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

# By default libtpu searches for a TPU machine, and allows one process only.
ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",
    "CUDA_VISIBLE_DEVICES": "-1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_ACCELERATOR_TYPE": "v5litepod-4",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
}


@dataclasses.dataclass(frozen=True)
class Device:
    """A kind of chip, in grids of four chips and of eight devices."""

    platform: str
    chip_grid: str
    grid_of_eight: str

    def describe(self, chips: int) -> list:
        """Return descriptions of the devices of ``chips`` chips (two per tpu7x chip)."""
        devices = self.of_grid(self.chip_grid)
        return devices[: chips * len(devices) // 4]

    def first(self, count: int) -> list:
        """Return descriptions of up to eight devices."""
        return self.of_grid(self.grid_of_eight if count > 4 else self.chip_grid)[:count]

    def of_grid(self, grid: str) -> list:
        """Return descriptions of the devices of a grid, in the words of the compiler."""
        from jax.experimental import topologies

        options = {"topology_name": grid}
        if self.platform == "cuda":
            config = Path(__file__).with_name("h200.textproto").read_text()
            options = {"target_config": config, "topology": grid}
        return topologies.get_topology_desc(platform=self.platform, **options).devices


DEVICES = {
    "v5e": Device("tpu", "v5e:2x2", "v5e:2x4"),
    "v5p": Device("tpu", "v5p:2x2x1", "v5p:2x2x2"),
    "v6e": Device("tpu", "v6e:2x2", "v6e:2x4"),
    "tpu7x": Device("tpu", "tpu7x:2x2x1", "tpu7x:2x2x1"),
    "h200": Device("cuda", "1x1x4", "1x1x8"),
}


def lines_of(module: str, *arguments: str, timeout: float) -> Iterator[dict]:
    """Run a module that compiles, and yield its lines of JSON; the last one reports its death."""
    worker = subprocess.Popen(
        ["timeout", "--kill-after=10", str(timeout), sys.executable, "-m", module, *arguments],
        env=os.environ | ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    for line in worker.stdout:
        if line.startswith("{"):
            yield json.loads(line)
    messages = worker.stderr.read().strip().splitlines()
    if status := worker.wait():
        cause = f"{timeout:g} s was the time limit" if status == 124 else (messages or [""])[-1]
        yield {"program": "the worker", "error": f"ended with status {status}: {cause}"}
