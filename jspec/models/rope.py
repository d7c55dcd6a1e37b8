"""Rotary position embedding (arXiv 2104.09864) and every scaling that Llama-like models use.

Cosines and sines depend on the position alone, never on the length of the call: a token keeps its
rotation for ever, with and without speculation. The two scalings that depend on a length
(``dynamic`` and ``longrope``) take the token's own position + 1, which is what token-by-token
decoding in ``transformers`` does; past the original length a prompt processed there in one pass
differs, since it rotates every token by the length of the whole prompt.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core.types import Array

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """One scaling of the rotary frequencies. Lengths are in tokens.

    Raises:
      ValueError: ``kind`` is unknown.
    """

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0  # trained length; used by every kind but default and linear
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    amplitude: float = 1.0  # factor on cos and sin (yarn, longrope)
    short_factors: tuple[float, ...] = ()  # longrope
    long_factors: tuple[float, ...] = ()  # longrope

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"rope kind {self.kind!r} is not supported; known: {', '.join(KINDS)}")


def cos_sin(rope: RopeConfig, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """Cosines and sines for int32 positions [...]: two float32 arrays [..., head_dim / 2]."""
    place = positions.astype(jnp.float32)[..., None]
    if rope.kind == "dynamic":
        frequencies = _dynamic(rope, head_dim, place)
    elif rope.kind == "longrope":
        base = _default(rope, head_dim)
        frequencies = jnp.where(
            place < rope.original_length,
            (base / np.array(rope.short_factors)).astype(np.float32),
            (base / np.array(rope.long_factors)).astype(np.float32),
        )
    else:
        frequencies = _STATIC[rope.kind](rope, head_dim).astype(np.float32)
    angles = place * frequencies
    cos, sin = lax.platform_dependent(angles, cpu=_turned_once, default=_turned)
    return cos * rope.amplitude, sin * rope.amplitude


def _turned(angles: Array) -> tuple[Array, Array]:
    return jnp.cos(angles), jnp.sin(angles)


def _turned_once(angles: Array) -> tuple[Array, Array]:
    """Cosines and sines that XLA's CPU backend computes once a pass.

    It would fuse them into every rotation of every layer and compute them anew for every head. It
    drops barriers before it fuses, but fuses nothing out of a branch; this one is always taken.
    """
    if not angles.size:
        return _turned(angles)
    return lax.cond(angles.ravel()[0] > -jnp.inf, _turned, _not_turned, angles)


def _not_turned(angles: Array) -> tuple[Array, Array]:
    return jnp.ones_like(angles), jnp.zeros_like(angles)


def rotate(x: Array, cos: Array, sin: Array) -> Array:
    """Rotates the first R features of x [B, T, H, D] by cos and sin [B, T, R / 2].

    Feature j is paired with j + R / 2; features from R on stay as they are.
    """
    cos, sin = cos[:, :, None], sin[:, :, None]
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    turned = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(turned if half * 2 == x.shape[-1] else [*turned, rest], -1)


def _default(rope: RopeConfig, head_dim: int) -> np.ndarray:
    return rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _linear(rope: RopeConfig, head_dim: int) -> np.ndarray:
    return _default(rope, head_dim) / rope.factor


def _dynamic(rope: RopeConfig, head_dim: int, place: Array) -> Array:
    """NTK-aware scaling, with a base that grows with the position past the original length."""
    length = jnp.maximum(place + 1, rope.original_length)
    stretch = rope.factor * length / rope.original_length - (rope.factor - 1)
    theta = rope.theta * stretch ** (head_dim / (head_dim - 2))
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)


def _llama3(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Llama 3.1: long wavelengths are divided by ``factor``, short ones kept, a blend between."""
    base = _default(rope, head_dim)
    turns = rope.original_length * base / (2 * math.pi)  # full turns within the trained length
    keep = (turns - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    keep = np.clip(keep, 0, 1)
    return keep * base + (1 - keep) * base / rope.factor


def _yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """YaRN (arXiv 2309.00071, equation 23): a ramp between kept and divided frequencies."""
    base = _default(rope, head_dim)

    def dim_of(turns: float) -> float:
        length = rope.original_length / (turns * 2 * math.pi)
        return head_dim * math.log(length) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001  # the ramp becomes a step
    divided = np.clip((np.arange(head_dim // 2) - low) / (high - low), 0, 1)
    return base / rope.factor * divided + base * (1 - divided)


_STATIC = {"default": _default, "linear": _linear, "llama3": _llama3, "yarn": _yarn}
