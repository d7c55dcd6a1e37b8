"""The gated MLP."""

import jax
import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models.blocks.arithmetic import Linear


def gated(x: Array, gate_up: Array, down: Array, linear: Linear) -> Array:
    """Return the gated MLP without biases of x [..., D]: ``gate_up`` [D, 2F], ``down`` [F, D]."""
    gate, up = jnp.split(linear(x, gate_up), 2, axis=-1)
    return linear(jax.nn.silu(gate) * up, down)
