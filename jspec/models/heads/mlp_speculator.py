"""MLP speculators of IBM (arXiv 2404.19124): a small recurrent network, one stage per token.

A stage reads the state of the stage before and the last drafted token, and predicts the next token.
The first stage reads the root, and the target's hidden state after its final norm at the position
before the root: ::

    s = rms(hidden) / sqrt(2) where ``scale_input``, else hidden
    s = gelu(norm_i(s P_i + (e / w) E_i[token]));  logits = s H_i          for stage i = 0, 1, ...

with w = 2 ** (-1 / (2 n_predict)) and e = sqrt((1 - w ** 2) inner_dim / 2). The norm is an RMS norm
with a weight and a bias; gelu is the exact one. There is no attention and no position.

With tied weights all stages share E, norm and H, and all but the first share P. So there can be
more stages than ``n_predict``. Snowflake's ``sum_rnn`` (Arctic Inference) is the same network.
Drafter: ``jspec.drafters.mlp_speculator``.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core.types import Array
from jspec.models.blocks.arithmetic import Linear, by_rows
from jspec.models.blocks.norms import rms_norm
from jspec.models.heads.network import Divided, check_sizes
from jspec.sharding import COLUMNS, ROWS

EPS = 1e-6  # epsilon of every norm; checkpoints do not contain it


@dataclasses.dataclass(frozen=True)
class SpeculatorConfig:
    """Sizes of any speculator; static and hashable."""

    n_predict: int  # number of stages in training; also scales the embeddings
    hidden_size: int  # D, the target's
    inner_dim: int  # I, width of the state (and cell) and of the embeddings
    vocab_size: int  # V, the target's
    capture_layers: tuple[int, ...]  # index of the target's hidden state after its final norm
    scale_input: bool = False  # the hidden state is normed first
    activation_dtype: str = "float32"  # dtype of the state (and cell)

    def __post_init__(self):
        check_sizes(self, "n_predict", "hidden_size", "inner_dim", "vocab_size")

    @property
    def target_vocab_size(self) -> int:
        """V; the draft vocabulary is the target's."""
        return self.vocab_size

    @property
    def embedding_scale(self) -> float:
        """e / w: at the last stage, the state weighs as much as all embeddings together."""
        state_weight = 0.5 ** (0.5 / self.n_predict)
        return math.sqrt((1 - state_weight**2) * self.inner_dim / 2) / state_weight

    @property
    def divided(self) -> Divided:
        """See ``Divided``; an LSTM has one ``head``."""
        columns = COLUMNS, self.vocab_size
        return {
            "embeddings": (ROWS, self.vocab_size),
            "projections": (ROWS, math.gcd(self.hidden_size, self.inner_dim)),
            "heads": columns,
            "head": columns,
        }


@dataclasses.dataclass(frozen=True)
class MlpSpeculatorConfig(SpeculatorConfig):
    """Sizes of an MLP speculator; with ``tie_weights`` the stages share their weights."""

    tie_weights: bool = False

    def __post_init__(self):
        super().__post_init__()
        if self.tie_weights and self.n_predict < 2:
            raise ValueError(
                f"tie_weights needs two stages at least, but n_predict is {self.n_predict}."
            )

    def count(self, part: str) -> int:
        """Return the number of separate weights of a ``part``: "embeddings", "projections", ..."""
        if not self.tie_weights:
            return self.n_predict
        return 2 if part == "projections" else 1


@struct.dataclass
class NormParams:
    """Weights of a norm."""

    weight: Array  # [I]
    bias: Array  # [I]


@struct.dataclass
class MlpSpeculatorParams:
    """Weights, per stage or shared: see ``MlpSpeculatorConfig.count``."""

    embeddings: tuple[Array, ...]  # [V, I]
    projections: tuple[Array, ...]  # [D, I], then [I, I]
    norms: tuple[NormParams, ...]
    heads: tuple[Array, ...]  # [I, V]


def init_params(
    key: Array, config: MlpSpeculatorConfig, dtype: jnp.dtype = jnp.float32
) -> MlpSpeculatorParams:
    """Return random normal weights of std 1 / sqrt(I), like IBM's."""
    inner, vocab = config.inner_dim, config.vocab_size
    keys = iter(jax.random.split(key, 3 * config.n_predict))

    def normal(part: str, shape: tuple[int, int], first: tuple[int, int] | None = None):
        shapes = [first or shape] + [shape] * (config.count(part) - 1)
        return tuple(
            (jax.random.normal(next(keys), shape) * inner**-0.5).astype(dtype) for shape in shapes
        )

    return MlpSpeculatorParams(
        embeddings=normal("embeddings", (vocab, inner)),
        projections=normal("projections", (inner, inner), (config.hidden_size, inner)),
        norms=tuple(init_norm(inner, dtype) for _ in range(config.count("norms"))),
        heads=normal("heads", (inner, vocab)),
    )


def init_norm(size: int, dtype: jnp.dtype) -> NormParams:
    """Return the weights of a norm that only divides."""
    return NormParams(jnp.ones((size,), dtype), jnp.zeros((size,), dtype))


def start(config: SpeculatorConfig, hidden: Array) -> Array:
    """Return the state of the first stage for the target's hidden state [..., D]."""
    hidden = hidden.astype(config.activation_dtype)
    if not config.scale_input:
        return hidden
    scale = jnp.full((config.hidden_size,), 0.5**0.5, hidden.dtype)
    return rms_norm(hidden, scale, EPS)


def step(
    params: MlpSpeculatorParams,
    config: MlpSpeculatorConfig,
    state: Array,
    tokens: Array,
    stage: int,
    *,
    linear: Linear = ops.linear,
) -> tuple[Array, Array]:
    """Run a stage, whose index is static, up to its output matrix.

    ``state`` [..., D or I] is from ``start`` or the stage before; ``tokens`` int32 [...] are the
    root or the last drafted tokens.

    Returns:
      The state [..., I], and the input of ``unembed``, which is the same.
    """
    of_stage = lambda part: part[min(stage, len(part) - 1)]
    embedded = ops.look_up(of_stage(params.embeddings), tokens).astype(jnp.float32)
    mixed = by_rows(state, of_stage(params.projections), None, linear)
    mixed = mixed + config.embedding_scale * embedded
    state = activate(mixed, of_stage(params.norms)).astype(config.activation_dtype)
    return state, state


def unembed(params: MlpSpeculatorParams, x: Array, stage: int) -> Array:
    """Return float32 logits [..., V] of the output [..., I] of ``step``."""
    return ops.linear(x, params.heads[min(stage, len(params.heads) - 1)])


def activate(x: Array, norm: NormParams) -> Array:
    """Return the exact gelu of the normed x, in float32 (or wider)."""
    wide = jnp.promote_types(x.dtype, jnp.float32)
    x = rms_norm(x.astype(wide), norm.weight, EPS) + norm.bias.astype(wide)
    return jax.nn.gelu(x, approximate=False)
