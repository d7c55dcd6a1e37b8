"""Hydra heads (arXiv 2402.05109): each predicts one token further, given the tokens drafted before.

Head i (from 0) reads the target's last hidden state h after its final norm. It also reads the
target's embeddings of the root and of the i tokens drafted after it: ::

    z = [h, e(root), e(x_1), ..., e(x_i)]
    x = R z + r + silu(W z + b);  x = x + silu(W' x + b') for each further block
    logits = x H_i + c_i

In the authors' checkpoints the further blocks of a head share one weight. Hydra++ (``prefix-mlp``)
has a prefix layer: a block like the target's, with its own cache, that reads the hidden states of
all positions. Its normed output replaces h. Drafter: ``jspec.drafters.hydra``.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from jspec import ops
from jspec.core import kv_cache, trees
from jspec.core.entries import AttentionKV
from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.blocks.arithmetic import Linear, affine, by_rows, normal
from jspec.models.blocks.attend import attention_over
from jspec.models.decoder import DecoderConfig, LayerParams
from jspec.models.heads import medusa
from jspec.models.heads.medusa import BlockParams
from jspec.models.heads.network import Divided, check_sizes
from jspec.sharding import COLUMNS, ROWS


@dataclasses.dataclass(frozen=True)
class HydraConfig:
    """Sizes of a set of heads; static and hashable."""

    num_heads: int  # number of predicted tokens
    num_layers: int  # residual blocks of each head
    hidden_size: int  # D, the target's
    vocab_size: int  # V, the target's
    capture_layers: tuple[int, ...]  # index of the hidden state h, usually after the final norm
    tie_blocks: bool = False  # the blocks of a head after the first share their weights
    output_bias: bool = True
    network: DecoderConfig | None = None  # the prefix layer, one block; None for none
    activation_dtype: str = "float32"  # dtype of the residual stream
    before_layers: ClassVar[tuple[str, ...]] = ("prefix",)  # see ``NetworkSizes``

    def __post_init__(self):
        check_sizes(self, "num_heads", "num_layers", "hidden_size", "vocab_size")
        if self.tie_blocks and self.num_layers < 3:
            raise ValueError(f"tie_blocks needs three blocks at least, not {self.num_layers}.")
        prefix = self.network
        if prefix and (prefix.num_layers, prefix.hidden_size) != (1, self.hidden_size):
            raise ValueError(f"the prefix layer must be one block, {self.hidden_size} wide.")

    @property
    def target_vocab_size(self) -> int:
        """V; the draft vocabulary is the target's."""
        return self.vocab_size

    @property
    def separate_blocks(self) -> int:
        """Number of blocks of a head with their own weights."""
        return 2 if self.tie_blocks else self.num_layers

    @property
    def divided(self) -> Divided:
        """See ``Divided``."""
        return {
            "joining.weight": (ROWS, self.hidden_size),
            "joining.residual": (ROWS, self.hidden_size),
            "blocks.weight": (ROWS, self.hidden_size),
            "outputs": (COLUMNS, self.vocab_size),
            "output_biases": (ROWS, self.vocab_size),
        }


@struct.dataclass
class JoiningParams:
    """Weights of a head's first block, which reads the hidden state and n embeddings."""

    weight: Array  # [(1 + n) D, D]
    bias: Array  # [D]
    residual: Array  # [(1 + n) D, D]
    residual_bias: Array  # [D]


@struct.dataclass
class PrefixParams:
    """Weights of the prefix layer."""

    layers: tuple[LayerParams]
    norm: Array  # [D]


@struct.dataclass
class HydraParams:
    """Weights of the heads."""

    joining: tuple[JoiningParams, ...]  # per head
    blocks: tuple[tuple[BlockParams, ...], ...]  # per head, ``separate_blocks`` - 1
    outputs: tuple[Array, ...]  # per head, [D, V]
    output_biases: tuple[Array, ...]  # [V], or none
    prefix: PrefixParams | None = None


def init_params(key: Array, config: HydraConfig, dtype: jnp.dtype = jnp.float32) -> HydraParams:
    """Return random weights of std 0.02, with blocks that are the identity."""
    size, vocab = config.hidden_size, config.vocab_size
    prefix_key, *keys = jax.random.split(key, 1 + 2 * config.num_heads)
    keys = iter(keys)
    matrix = lambda *shape: normal(next(keys), shape, dtype)
    zeros = lambda *shape: jnp.zeros(shape, dtype)
    joining = tuple(
        JoiningParams(zeros(width, size), zeros(size), matrix(width, size), zeros(size))
        for width in (size * (2 + head) for head in range(config.num_heads))
    )
    block = BlockParams(zeros(size, size), zeros(size))
    prefix = None
    if config.network is not None:
        layers = decoder.init_layers(prefix_key, config.network, dtype)
        prefix = PrefixParams(layers, jnp.ones((size,), dtype))
    return HydraParams(
        joining=joining,
        blocks=((block,) * (config.separate_blocks - 1),) * config.num_heads,
        outputs=tuple(matrix(size, vocab) for _ in joining),
        output_biases=tuple(zeros(vocab) for _ in joining) if config.output_bias else (),
        prefix=prefix,
    )


def prefill(
    params: HydraParams,
    config: HydraConfig,
    hidden: Array,
    cache: kv_cache.KVCache,
    rows: Array | None = None,
) -> tuple[Array, tuple[AttentionKV, ...]]:
    """Run the prefix layer over n hidden states [B, n, D], which follow those in the cache.

    Returns:
      Its output [B, n, D], or [B, m, D] of ``rows`` int32 [B, m] only; and the cache entries of all
      n positions for ``kv_cache.append``.
    """
    network, tree = config.network, trees.chain_tree(*hidden.shape[:2])
    attend, entries = attention_over(cache, tree, rows=rows, implementation=network.attention)
    x, positions = hidden.astype(network.activation_dtype), cache.length[:, None] + tree.depth
    x, _ = decoder.trunk(params.prefix, network, x, positions, attend, rows=rows)
    return network.norm(x, params.prefix.norm), tuple(entries)


def step(
    params: HydraParams,
    config: HydraConfig,
    state: Array,
    embedded: Array,
    head: int,
    *,
    linear: Linear = ops.linear,
) -> tuple[Array, Array]:
    """Run a head, whose index is static, up to its output matrix.

    ``state`` [..., (1 + head) D] is that of the head before, or the hidden state for the first.
    ``embedded`` [..., D] is the target's embedding of the last drafted token, or of the root.

    Returns:
      The state [..., (2 + head) D] for the next head, and the input [..., D] of ``unembed``.
    """
    state = jnp.concatenate([state, embedded.astype(state.dtype)], -1)
    joining, later = params.joining[head], params.blocks[head]
    residual = by_rows(state, joining.residual, joining.residual_bias, linear)
    x = residual + jax.nn.silu(by_rows(state, joining.weight, joining.bias, linear))
    if config.tie_blocks:
        later = later * (config.num_layers - 1)
    return state, medusa.stream(later, x.astype(state.dtype), linear)


def unembed(params: HydraParams, x: Array, head: int) -> Array:
    """Return float32 logits [..., V] of the output [..., D] of ``step``."""
    bias = params.output_biases[head] if params.output_biases else None
    return affine(x, params.outputs[head], bias, ops.linear)
