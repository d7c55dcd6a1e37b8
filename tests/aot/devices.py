"""The devices that programs are compiled for, described to their compilers."""

import dataclasses
from pathlib import Path

# libtpu looks for a TPU machine around it unless told otherwise, and locks itself to one process.
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
    """A kind of chip, four of them in a topology."""

    platform: str
    trees: str

    def describe(self, chips: int) -> list:
        """``chips`` described devices (a tpu7x chip has two). Needs the compiler's package."""
        from jax.experimental import topologies

        if self.platform == "cuda":
            config = Path(__file__).with_name("h200.textproto").read_text()
            found = topologies.get_topology_desc(
                platform="cuda", target_config=config, trees=self.trees
            )
        else:
            found = topologies.get_topology_desc(platform="tpu", topology_name=self.trees)
        return found.devices[: chips * len(found.devices) // 4]


DEVICES = {
    "v5e": Device("tpu", "v5e:2x2"),
    "v5p": Device("tpu", "v5p:2x2x1"),
    "v6e": Device("tpu", "v6e:2x2"),
    "tpu7x": Device("tpu", "tpu7x:2x2x1"),
    "h200": Device("cuda", "1x1x4"),
}
