"""Layouts of weights by kind of device: those that compilers choose inside the loop.

Weights in another layout are copied at every launch (docs/tpu_and_gpu.md). Other kinds of devices
read the default layout.
"""

import functools
import logging
from collections.abc import Mapping

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Format, Layout
from jax.sharding import SingleDeviceSharding

_log = logging.getLogger(__name__)

_PAIRS = (2, 1)  # Two rows of two-byte numbers share the words of a register.
_COLUMNS = Layout((1, 0), ((8, 128), _PAIRS))
# Matrices of two-byte numbers by the last field of their path; "" is for all others.
LAYOUTS: Mapping[str, Mapping[str, Layout]] = {
    "TPU v5 lite": {"qkv": _COLUMNS},
    "TPU v6 lite": {"qkv": _COLUMNS},
    "TPU7x": {
        "qkv": Layout((1, 0), ((16, 128), _PAIRS)),
        "embedding": Layout((0, 1), ((8, 128), _PAIRS)),
        "": Layout((0, 1), ((16, 128), _PAIRS)),
    },
}


def of(kind: str, path: tuple[str | int, ...]) -> Layout | None:
    """Return the layout of a matrix on a kind of device; None for the default one."""
    rows = LAYOUTS.get(kind, {})
    return rows.get(str(path[-1]), rows.get(""))


@functools.cache
def takes(device: jax.Device) -> bool:
    """Return whether weights on a device get layouts; it tries each of them once."""
    rows = LAYOUTS.get(device.device_kind, {})
    matrix = np.zeros((256, 256), jnp.bfloat16)
    try:
        for layout in rows.values():
            to = Format(layout, SingleDeviceSharding(device))
            jax.block_until_ready(jax.device_put(matrix, to))
    except Exception as error:  # Runtimes raise their own.
        reason = str(error).partition("\n")[0]
        _log.warning(
            "%s takes no layouts, so launches copy weights: %s", device.device_kind, reason
        )
        return False
    return bool(rows)
