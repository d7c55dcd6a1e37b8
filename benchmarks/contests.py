"""The contest of kernels with XLA: what ``benchmarks.kernels`` races."""

from collections.abc import Callable
from typing import NamedTuple

import jax

XLA = "xla"
KERNELS = {"tpu": "pallas_tpu", "gpu": "pallas_gpu"}  # kernel of each platform
STEPS = 16  # in one program, to hide its launch
WORKING_SET = 2**27  # bytes read before any is read again, larger than the devices' caches
MOST_COPIES = 8  # most copies of the inputs: each adds compile time


class Contest(NamedTuple):
    """One operation at one size."""

    operation: str
    case: dict  # its parameters
    contenders: dict[str, Callable[[], jax.Array]]  # each makes ``calls`` calls; the first is XLA
    calls: int
    num_bytes: int  # read and written by one call
    copies: int  # copies of the inputs, used in turn

    @property
    def cached(self) -> bool:
        """True if all copies may fit into the device's cache; then the floor can be beaten."""
        return self.copies * self.num_bytes < WORKING_SET


def kernels() -> tuple[str, ...]:
    """Return the kernels of this device: one, or none."""
    return () if no_kernels() else (KERNELS[jax.default_backend()],)


def no_kernels() -> str | None:
    """Return the reason why this device has no kernels, or None."""
    platform, device = jax.default_backend(), jax.devices()[0]
    if platform not in KERNELS:
        return f"no kernel is for {platform}"
    if platform == "gpu" and not device.compute_capability.startswith("9."):
        return f"the kernels are for GPUs of the Hopper kind, not {device.device_kind}"
    return None
