"""Where laws are enumerated: in float64, on the CPU."""

import contextlib
from collections.abc import Iterator

import jax


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Inside, arrays are float64 and lie on the CPU, whatever the accelerator.

    A TPU has no float64: XLA emulates it, to a precision that no one states, and takes ten times
    as long to compile. What is enumerated is the code of a rule, which is the same everywhere.
    """
    with jax.enable_x64(True), jax.default_device(_cpu()):
        yield


def _cpu() -> jax.Device | None:
    """None, which leaves it to JAX, where JAX_PLATFORMS rules the CPU out."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
