"""The MLP of Apertus, which has no gate: down(xielu(up x)).

xIELU (arXiv 2411.13010, equation 9) has two slopes that are learned, and two fixed numbers.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core.types import Array
from jspec.models.blocks.arithmetic import normal
from jspec.models.blocks.block import FeedForward, Pass
from jspec.models.blocks.tensors import Tensor, matrix

_FIRST = {"alpha_p": 0.2, "alpha_n": -1.05, "beta": 0.5, "eps": -1e-6}
_SHAPES = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}


@dataclasses.dataclass(frozen=True)
class XieluMlp(FeedForward):
    """An MLP with xIELU; static and hashable."""

    intermediate_size: int  # F

    title = "an MLP with xIELU"

    @property
    def dense_size(self) -> int:
        """See ``FeedForward``."""
        return self.intermediate_size

    def init(
        self, keys: Array, hidden: int, dtype: jnp.dtype, shrink: float = 1.0
    ) -> "XieluMlpParams":
        """See ``FeedForward``."""
        wide = self.intermediate_size
        numbers = {name: jnp.full(_SHAPES[name], value, dtype) for name, value in _FIRST.items()}
        return XieluMlpParams(
            up=normal(keys[0], (hidden, wide), dtype),
            down=normal(keys[1], (wide, hidden), dtype, shrink),
            **numbers,
        )

    def tensors(self, hidden: int) -> tuple[Tensor, ...]:
        """See ``FeedForward``."""
        wide = self.intermediate_size
        up, down = ("mlp.up_proj",), ("mlp.down_proj",)
        return (
            matrix("up", up, (wide,), hidden, by_linear=True, divided="outputs"),
            matrix("down", down, (hidden,), wide, by_linear=True, divided="inputs"),
            *(Tensor((name,), (f"mlp.act_fn.{name}",), (x,)) for name, x in _SHAPES.items()),
        )

    def divides(self, ways: int) -> bool:
        """See ``Mixer``."""
        return self.intermediate_size % ways == 0

    def split(self, ways: int) -> "XieluMlp":
        """See ``Mixer``."""
        del ways
        return self

    def apply(self, params: "XieluMlpParams", x: Array, run: Pass) -> Array:
        """See ``FeedForward``."""
        return run.linear(xielu(run.linear(x, params.up), params), params.down)


@struct.dataclass
class XieluMlpParams:
    """Weights of an MLP with xIELU."""

    up: Array  # [D, F]
    down: Array  # [F, D]
    alpha_p: Array  # [1]
    alpha_n: Array  # [1]
    beta: Array  # []
    eps: Array  # []


def xielu(x: Array, params: XieluMlpParams) -> Array:
    """Return xIELU of x, in its dtype."""
    names = ("alpha_p", "alpha_n", "beta", "eps")
    positive, negative, beta, eps = (vars(params)[name].astype(x.dtype) for name in names)
    above = jax.nn.softplus(positive) * x * x
    below = (jnp.expm1(jnp.minimum(x, eps)) - x) * (beta + jax.nn.softplus(negative))
    return jnp.where(x > 0, above, below) + beta * x
