"""Shared code of heads: sizes, their checks, and matrices that may be the target's."""

from typing import Any, ClassVar

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jspec import ops
from jspec.core.types import Array, Target
from jspec.models.blocks.arithmetic import normal
from jspec.models.decoder import DecoderConfig
from jspec.sharding import COLUMNS, ROWS

# How several devices divide the arrays of a head beside its layers: by the names that lead to an
# array, the division, and the size of the axis. Other arrays are whole on every device.
Divided = dict[str, tuple[PartitionSpec, int]]


class NetworkSizes:
    """The part of a head's config that follows from its ``network`` and its target's sizes."""

    network: DecoderConfig
    target_vocab_size: int
    before_layers: ClassVar[tuple[str, ...]] = ()  # names that lead to the layers in the weights

    @property
    def vocab_size(self) -> int:
        """Vd, the width of the head's logits."""
        return self.network.vocab_size

    @property
    def hidden_size(self) -> int:
        """D, the width of the head's residual stream."""
        return self.network.hidden_size

    @property
    def reduced(self) -> bool:
        """True if the draft vocabulary is a part of the target's."""
        return self.vocab_size != self.target_vocab_size


class SharingSizes(NetworkSizes):
    """The config of a head that may share the target's embedding and output matrix."""

    target_hidden_size: int
    separate_embedding: bool
    separate_head: bool

    @property
    def divided(self) -> Divided:
        """Divisions of the matrices that may be the target's."""
        return {"embedding": (ROWS, self.target_vocab_size), "head": (COLUMNS, self.vocab_size)}

    def check_sharing(self) -> None:
        """Refuse a head whose sizes differ from those of a matrix that it shares.

        Raises:
          ValueError: the width or the vocabulary differs.
        """
        shares = not (self.separate_embedding and self.separate_head)
        if self.hidden_size != self.target_hidden_size and shares:
            raise ValueError(
                f"the head is {self.hidden_size} wide and the target {self.target_hidden_size}, so "
                "it cannot share the target's embedding or output matrix; give it both "
                "(separate_embedding=True, separate_head=True)."
            )
        if self.reduced and not self.separate_head:
            raise ValueError(
                f"a head with {self.vocab_size} of the target's {self.target_vocab_size} tokens "
                "needs an output matrix of its own (separate_head=True)."
            )


def check_sizes(config: Any, *names: str) -> None:
    """Check the config of a head that reads one hidden state.

    Raises:
      ValueError: a size among ``names`` is less than 1, or ``capture_layers`` is not one index.
    """
    for name in names:
        if vars(config)[name] < 1:
            raise ValueError(f"{name}={vars(config)[name]} must be at least 1.")
    if len(config.capture_layers) != 1:
        raise ValueError(f"capture_layers={config.capture_layers} must be one hidden state.")


def init_shared(
    head_key: Array, embedding_key: Array, config: SharingSizes, dtype: jnp.dtype
) -> dict[str, Array | None]:
    """Return the head's own output matrix, embedding and vocabulary map, None where it has none.

    A reduced vocabulary is the first Vd tokens.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = (config.target_vocab_size, hidden)
    return {
        "head": normal(head_key, (hidden, vocab), dtype) if config.separate_head else None,
        "embedding": normal(embedding_key, embedding, dtype) if config.separate_embedding else None,
        "draft_to_target": jnp.arange(vocab, dtype=jnp.int32) if config.reduced else None,
    }


def unembed(params: Any, hidden: Array, target: Target, target_params: Any) -> Array:
    """Return float32 logits [..., Vd] of hidden [..., D], by the head's matrix or the target's."""
    if params.head is None:
        return target.unembed(target_params, hidden, norm=False)
    return ops.linear(hidden, params.head)


def embed(
    params: Any, config: SharingSizes, tokens: Array, target: Target, target_params: Any
) -> Array:
    """Return vectors [..., D] of target ids [...], by the head's embedding or the target's."""
    if params.embedding is None:
        vectors = target.embed(target_params, tokens)
    else:
        vectors = ops.look_up(params.embedding, tokens)
    return vectors.astype(config.network.activation_dtype)
