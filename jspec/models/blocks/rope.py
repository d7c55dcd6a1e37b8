"""Rotary position embedding (arXiv 2104.09864) with the scalings of Llama-like models.

Cosines and sines depend only on the position, so a token keeps its rotation with and without
speculation. The two scalings that depend on a length (``dynamic`` and ``longrope``) take the
token's position + 1, like token-by-token decoding in ``transformers``. A one-pass prompt there
differs past the original length, because it rotates every token by the length of the prompt.
"""

import dataclasses
import math

import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core.types import Array

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional")


@dataclasses.dataclass(frozen=True)
class RopeConfig:
    """A scaling of the rotary frequencies; lengths are in tokens."""

    theta: float = 10000.0
    kind: str = "default"
    factor: float = 1.0
    original_length: int = 0  # trained length; unused by default and linear
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    amplitude: float = 1.0  # factor on cos and sin (yarn, longrope)
    short_factors: tuple[float, ...] = ()  # longrope
    long_factors: tuple[float, ...] = ()  # longrope
    share: float = 1.0  # proportional: of the features of a head, those that are rotated

    def __post_init__(self):
        if self.kind not in KINDS:
            raise ValueError(f"rope kind {self.kind!r} is not supported; known: {', '.join(KINDS)}")


def frequencies(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Return the angles per position, float64 [head_dim / 2], of a kind without a length."""
    return _STATIC[rope.kind](rope, head_dim)


def cos_sin(rope: RopeConfig, head_dim: int, positions: Array) -> tuple[Array, Array]:
    """Return cosines and sines of int32 positions [...]: float32 [..., head_dim / 2] each."""
    position = positions.astype(jnp.float32)[..., None]
    if rope.kind == "dynamic":
        per_position = _dynamic(rope, head_dim, position)
    elif rope.kind == "longrope":
        base = _default(rope, head_dim)
        per_position = jnp.where(
            position < rope.original_length,
            (base / np.array(rope.short_factors)).astype(np.float32),
            (base / np.array(rope.long_factors)).astype(np.float32),
        )
    else:
        per_position = frequencies(rope, head_dim).astype(np.float32)
    angles = position * per_position
    cos, sin = lax.platform_dependent(angles, cpu=_cos_sin_once, default=_cos_sin)
    return cos * rope.amplitude, sin * rope.amplitude


def _cos_sin(angles: Array) -> tuple[Array, Array]:
    return jnp.cos(angles), jnp.sin(angles)


def _cos_sin_once(angles: Array) -> tuple[Array, Array]:
    """Return cosines and sines that XLA's CPU backend computes once per pass.

    Otherwise it fuses them into every rotation and recomputes them for every head. It drops
    barriers before it fuses, but does not fuse out of a branch. This branch is always taken.
    """
    if not angles.size:
        return _cos_sin(angles)
    return lax.cond(
        angles.ravel()[0] > -jnp.inf,
        _cos_sin,
        lambda angles: (jnp.ones_like(angles), jnp.zeros_like(angles)),
        angles,
    )


def rotate(x: Array, cos: Array, sin: Array, *, interleaved: bool = False) -> Array:
    """Rotate the first R features of x [B, T, H, D] by cos and sin [B, T, R / 2].

    Feature j is paired with j + R / 2. Features from R on are unchanged. If the pairs are
    ``interleaved``, 2j with 2j + 1, the result has them at j and j + R / 2, for queries and keys
    alike.
    """
    cos, sin = cos[:, :, None], sin[:, :, None]
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    if interleaved:
        first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
    rotated = [first * cos - second * sin, second * cos + first * sin]
    return jnp.concatenate(rotated if half * 2 == x.shape[-1] else [*rotated, rest], -1)


def _default(rope: RopeConfig, head_dim: int) -> np.ndarray:
    return rope.theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)


def _dynamic(rope: RopeConfig, head_dim: int, position: Array) -> Array:
    """Return NTK-aware frequencies; theta grows with positions past the original length."""
    length = jnp.maximum(position + 1, rope.original_length)
    stretch = rope.factor * length / rope.original_length - (rope.factor - 1)
    theta = rope.theta * stretch ** (head_dim / (head_dim - 2))
    return theta ** (-np.arange(0, head_dim, 2, dtype=np.float32) / head_dim)


def _llama3(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Divide low frequencies by ``factor`` and keep high ones, with a ramp between (Llama 3.1)."""
    base = _default(rope, head_dim)
    turns = rope.original_length * base / (2 * math.pi)  # full turns within the trained length
    width = rope.high_freq_factor - rope.low_freq_factor
    ramp = (turns - rope.low_freq_factor) / (width or 1e-9)  # a step without a width
    ramp = np.clip(ramp, 0, 1)
    return ramp * base + (1 - ramp) * base / rope.factor


def _yarn(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Blend original and divided frequencies by a ramp (YaRN, arXiv 2309.00071, equation 23)."""
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


def _proportional(rope: RopeConfig, head_dim: int) -> np.ndarray:
    """Keep the highest frequencies of the whole head; the other features have none (Gemma 4)."""
    base = _default(rope, head_dim) / rope.factor
    return np.where(np.arange(head_dim // 2) < int(rope.share * head_dim // 2), base, 0.0)


_STATIC = {
    "proportional": _proportional,
    "default": _default,
    "linear": lambda rope, head_dim: _default(rope, head_dim) / rope.factor,
    "llama3": _llama3,
    "yarn": _yarn,
}
