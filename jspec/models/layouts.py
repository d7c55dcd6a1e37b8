"""Layouts of weights by kind of device: those that compilers choose inside the loop.

Weights in another layout are copied at every launch (docs/tpu_and_gpu.md). Other kinds of devices
read the default layout.
"""

import functools
import logging
from collections.abc import Mapping

import jax.numpy as jnp
import numpy as np
from jax.experimental.layout import Layout
from jax.sharding import Sharding

from jspec.sharding.placement import Placement

_log = logging.getLogger(__name__)

_PAIRS = (2, 1)  # Two rows of two-byte numbers share the words of a register.
_COLUMNS = Layout((1, 0), ((8, 128), _PAIRS))
# Matrices of two-byte numbers by the last field of their path; "" is for all others.
LAYOUTS: Mapping[str, Mapping[str, Layout]] = {
    "TPU v5 lite": {"qkv": _COLUMNS},
    "TPU v6 lite": {"qkv": _COLUMNS},
    "TPU7x": {"qkv": _COLUMNS},
}
# The loop reads tiles of 16 rows on these, but programs of several devices take tiles of 8 only.
LARGE_TILES: Mapping[str, Mapping[str, Layout]] = {
    "TPU7x": {
        "qkv": Layout((1, 0), ((16, 128), _PAIRS)),
        "embedding": Layout((0, 1), ((8, 128), _PAIRS)),
        "": Layout((0, 1), ((16, 128), _PAIRS)),
    },
}
SMALL_TILES = "--xla_tpu_control_large_2nd_minor_layout_for_x16=0"  # The loop reads tiles of 8.


def of(kind: str, path: tuple[str | int, ...], num_devices: int = 1) -> Layout | None:
    """Return the layout of a matrix for programs of some devices; None for the default one."""
    rows = _rows(kind, num_devices)
    return rows.get(str(path[-1]), rows.get(""))


@functools.cache
def takes(sharding: Sharding) -> bool:
    """Return whether weights at ``sharding`` get layouts; it tries each of them once.

    ``sharding`` divides the columns of a matrix, if there are several devices.
    """
    (kind,), size = {device.device_kind for device in sharding.device_set}, len(sharding.device_set)
    if size > 1 and kind in LARGE_TILES:
        _log.warning(
            "Launches on several %s copy the weights, unless the process has LIBTPU_INIT_ARGS=%s.",
            kind,
            SMALL_TILES,
        )
    rows = _rows(kind, size)
    matrix = np.zeros((256, 256 * size), jnp.bfloat16)
    try:
        for layout in rows.values():
            Placement(sharding, layout=layout).put(matrix)
    except Exception as error:  # Runtimes raise their own.
        reason = str(error).partition("\n")[0]
        _log.warning("%s takes no layouts, so launches copy weights: %s", kind, reason)
        return False
    return bool(rows)


def _rows(kind: str, num_devices: int) -> Mapping[str, Layout]:
    if num_devices == 1 and kind in LARGE_TILES:
        return LARGE_TILES[kind]
    return LAYOUTS.get(kind, {})
