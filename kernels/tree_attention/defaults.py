"""The arrays for which a kernel of tree attention is the default, and the evidence for it."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

Array = jax.Array


class Default(NamedTuple):
    """Arrays of bfloat16 for which a kernel is the default, if it takes them."""

    backend: str  # Result of ``jax.default_backend``.
    kinds: tuple[str, ...]  # Beginnings of ``jax.Device.device_kind``.
    has_pages: bool
    most_nodes: int
    most_devices: int | None  # Devices of JAX; None for any number.
    evidence: str


_MEASURED = "measured: 3.1 to 7.8 times XLA's speed in accelerator_check_h200.json"
_COMPILED = "compiled: bytes of a round in tests/aot/roofline.json"
DEFAULTS = {  # by module
    "pallas_gpu": (
        Default("gpu", ("",), False, 64, 1, _MEASURED),
        Default("gpu", ("",), True, 64, None, _COMPILED),
    ),
    "pallas_tpu": (
        Default("tpu", ("TPU v5 lite", "TPU v6 lite", "TPU7x"), True, 1024, None, _COMPILED),
    ),
}


def lists(
    module: str, q: Array, tree_k: Array, cache_k: Array | None, table: Array | None = None
) -> bool:
    """Return whether ``DEFAULTS`` has such arrays on the devices of JAX."""
    del cache_k  # in bfloat16 or in 8 bits
    kind, count = jax.devices()[0].device_kind, jax.device_count()
    return tree_k.dtype == jnp.bfloat16 and any(
        jax.default_backend() == each.backend
        and kind.startswith(each.kinds)
        and each.has_pages == (table is not None)
        and q.shape[2] <= each.most_nodes
        and count <= (each.most_devices or count)
        for each in DEFAULTS[module]
    )
