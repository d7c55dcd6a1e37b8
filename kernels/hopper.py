"""Shared parts of kernels for NVIDIA Hopper GPUs (Pallas on Mosaic GPU)."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.core.weights import bits_of

MULTIPROCESSORS = 132  # multiprocessors of an H100 or H200
# JAX 0.10 needs an index argument even for an indexed reference; 0.12 takes none.
NO_INDEX = {"idx": None} if jax.__version_info__ < (0, 11) else {}


def wrong_device(device: jax.Device) -> str | None:
    """Return the reason why a GPU does not run the kernel: only Hopper has wgmma."""
    if device.compute_capability.split(".")[0] == "9":
        return None
    capability = f"{device.compute_capability} ({device.device_kind})"
    return f"needs a GPU of compute capability 9 (Hopper), not {capability}; take another"


def smem(
    size: int, width: int, dtype: jnp.dtype, *lead: int, swizzle: int | None = None
) -> plgpu.SMEM:
    """Return shared memory [*lead, size, width] for TMA and wgmma.

    ``swizzle`` None is the widest that fits; both operands of a wgmma have the same.
    """
    bits = bits_of(dtype)
    swizzle = swizzle or next(each for each in (128, 64, 32) if width * bits % (8 * each) == 0)
    transforms = plgpu.TilingTransform((8, swizzle * 8 // bits)), plgpu.SwizzleTransform(swizzle)
    return plgpu.SMEM((*lead, size, width), dtype, transforms=transforms)
