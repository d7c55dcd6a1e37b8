"""Medusa heads (arXiv 2401.10774): head i predicts the token i + 2 positions ahead.

Head i (from 0) reads the target's last hidden state h after its final norm, at the position whose
own logits predict t+1, and predicts t+2+i: ::

    x = h;  x = x + silu(W x + b) for each of its blocks;  logits = head_i(x)

A head has no attention, sees no position, and does not see the tokens of other heads. Drafter:
``jspec.drafters.medusa``.
"""

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core.types import Array, Target
from jspec.models.blocks.arithmetic import Linear, by_rows, normal
from jspec.models.heads.network import Divided, check_sizes
from jspec.sharding import COLUMNS, ROWS


@dataclasses.dataclass(frozen=True)
class MedusaConfig:
    """Sizes of a set of heads; static and hashable."""

    num_heads: int  # number of predicted tokens
    num_layers: int  # residual blocks of each head
    hidden_size: int  # D, the target's
    vocab_size: int  # Vd, the width of the heads' logits
    target_vocab_size: int  # V
    capture_layers: tuple[int, ...]  # index of the target's hidden state after its final norm
    num_outputs: int  # output matrices: one per head, 1 shared by all, or 0 for the target's
    bias: bool = True  # whether the blocks have biases
    activation_dtype: str = "float32"  # dtype of the residual stream

    def __post_init__(self):
        check_sizes(
            self, "num_heads", "num_layers", "hidden_size", "vocab_size", "target_vocab_size"
        )
        if self.num_outputs not in (0, 1, self.num_heads):
            raise ValueError(
                f"num_outputs={self.num_outputs} must be {self.num_heads} (one a head), 1 or 0."
            )
        if self.reduced and not self.num_outputs:
            raise ValueError(
                f"heads with {self.vocab_size} of the target's {self.target_vocab_size} tokens "
                "need output matrices of their own."
            )

    @property
    def reduced(self) -> bool:
        """True if the draft vocabulary is a part of the target's."""
        return self.vocab_size != self.target_vocab_size

    @property
    def divided(self) -> Divided:
        """See ``Divided``."""
        return {
            "blocks.weight": (ROWS, self.hidden_size),
            "outputs": (COLUMNS, self.vocab_size),
        }


@struct.dataclass
class BlockParams:
    """Weights of a residual block."""

    weight: Array  # [D, D]
    bias: Array | None = None  # [D]


@struct.dataclass
class MedusaParams:
    """Weights of the heads."""

    blocks: tuple[tuple[BlockParams, ...], ...]  # per head
    outputs: tuple[Array, ...]  # ``num_outputs`` of [D, Vd]
    draft_to_target: Array | None = None  # [Vd] int32, ascending


def init_params(key: Array, config: MedusaConfig, dtype: jnp.dtype = jnp.float32) -> MedusaParams:
    """Return zero blocks and random outputs; a reduced vocabulary is the first Vd tokens."""
    size = config.hidden_size
    bias = jnp.zeros((size,), dtype) if config.bias else None
    block = BlockParams(jnp.zeros((size, size), dtype), bias)
    keys = jax.random.split(key, config.num_heads)[: config.num_outputs]
    return MedusaParams(
        blocks=((block,) * config.num_layers,) * config.num_heads,
        outputs=tuple(normal(key, (size, config.vocab_size), dtype) for key in keys),
        draft_to_target=jnp.arange(config.vocab_size, dtype=jnp.int32) if config.reduced else None,
    )


def heads(
    params: MedusaParams, config: MedusaConfig, hidden: Array, target: Target, target_params: object
) -> Array:
    """Return float32 logits [..., num_heads, Vd] of the target's hidden states [..., D]."""
    hidden = hidden.astype(config.activation_dtype)
    logits = []
    for index, blocks in enumerate(params.blocks):
        x = stream(blocks, hidden, ops.linear)
        if params.outputs:
            logits.append(ops.linear(x, params.outputs[index % len(params.outputs)]))
        else:
            logits.append(target.unembed(target_params, x, norm=False))
    return jnp.stack(logits, -2)


def stream(blocks: tuple[BlockParams, ...], x: Array, linear: Linear) -> Array:
    """Return the input [..., D] of a head's output matrix for hidden states x [..., D]."""
    for block in blocks:
        x = x + jax.nn.silu(by_rows(x, block.weight, block.bias, linear)).astype(x.dtype)
    return x
