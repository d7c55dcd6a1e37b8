"""Snowflake's LSTM speculator (Arctic Inference, ``sum_lstm``): an MLP speculator with a cell.

As in ``mlp_speculator``, a stage reads the state of the stage before and the last drafted token. It
computes three gates and a candidate for the cell, which starts at 0: ::

    g = s P_i + (e / w) E[token]           four parts, each with a P (and, untied, an E) of its own
    f, i, o = sigmoid(g_forget), sigmoid(g_input), sigmoid(g_output)
    c = f c + i gelu(norm_c(g_cell));  s = o gelu(norm_s(c));  logits = s H

P_0 reads the target's hidden state, P_1 serves all later stages. All stages share other weights.
Drafter: ``jspec.drafters.mlp_speculator``.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core.types import Array
from jspec.models.blocks.arithmetic import Linear, by_rows
from jspec.models.heads import mlp_speculator
from jspec.models.heads.mlp_speculator import NormParams, SpeculatorConfig, activate, init_norm

GATES = ("forget", "input", "output", "cell")  # in the order of the columns of P


@dataclasses.dataclass(frozen=True)
class LstmSpeculatorConfig(SpeculatorConfig):
    """Sizes of an LSTM speculator; ``tie_embeddings``: gates and cell share one embedding."""

    tie_embeddings: bool = True

    @property
    def tie_weights(self) -> bool:
        """True: the stages share their weights."""
        return True


@struct.dataclass
class LstmSpeculatorParams:
    """Weights of all stages."""

    embeddings: tuple[Array, ...]  # [V, I], one for all or one for each of ``GATES``
    projections: tuple[Array, Array]  # [D, 4 I] and [I, 4 I], columns as ``GATES``
    cell_norm: NormParams
    state_norm: NormParams
    head: Array  # [I, V]


@struct.dataclass
class LstmState:
    """The state that a stage passes to the next."""

    hidden: Array  # [..., D or I]
    cell: Array  # [..., I]


def init_params(
    key: Array, config: LstmSpeculatorConfig, dtype: jnp.dtype = jnp.float32
) -> LstmSpeculatorParams:
    """Return random normal weights of std 1 / sqrt(I)."""
    inner, vocab = config.inner_dim, config.vocab_size
    keys = iter(jax.random.split(key, len(GATES) + 3))
    normal = lambda *shape: (jax.random.normal(next(keys), shape) * inner**-0.5).astype(dtype)
    return LstmSpeculatorParams(
        embeddings=tuple(normal(vocab, inner) for _ in GATES[: 1 if config.tie_embeddings else 4]),
        projections=(normal(config.hidden_size, 4 * inner), normal(inner, 4 * inner)),
        cell_norm=init_norm(inner, dtype),
        state_norm=init_norm(inner, dtype),
        head=normal(inner, vocab),
    )


def start(config: LstmSpeculatorConfig, hidden: Array) -> LstmState:
    """Return the state of the first stage for the target's hidden state [..., D]."""
    hidden = mlp_speculator.start(config, hidden)
    return LstmState(hidden, jnp.zeros((*hidden.shape[:-1], config.inner_dim), hidden.dtype))


def step(
    params: LstmSpeculatorParams,
    config: LstmSpeculatorConfig,
    state: LstmState,
    tokens: Array,
    stage: int,
    *,
    linear: Linear = ops.linear,
) -> tuple[LstmState, Array]:
    """Run a stage, as ``mlp_speculator.step``: return the state and the input of ``unembed``."""
    embedded = [ops.look_up(table, tokens).astype(jnp.float32) for table in params.embeddings]
    embedded = jnp.concatenate(embedded * (len(GATES) // len(embedded)), -1)
    projection = params.projections[min(stage, 1)]
    mixed = by_rows(state.hidden, projection, None, linear)
    mixed = mixed + config.embedding_scale * embedded
    *gates, candidate = jnp.split(mixed, len(GATES), -1)
    forget, write, output = map(jax.nn.sigmoid, gates)
    cell = state.cell * forget + activate(candidate, params.cell_norm) * write
    hidden = (activate(cell, params.state_norm) * output).astype(config.activation_dtype)
    return LstmState(hidden, cell.astype(config.activation_dtype)), hidden


def unembed(params: LstmSpeculatorParams, x: Array, stage: int) -> Array:
    """Return float32 logits [..., V] of the output [..., I] of ``step``."""
    del stage
    return ops.linear(x, params.head)
