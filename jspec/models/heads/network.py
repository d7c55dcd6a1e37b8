"""Shared code of heads that are built from decoder blocks."""

from typing import Any

from jspec import ops
from jspec.core.types import Array, Target
from jspec.models.decoder import DecoderConfig


class NetworkSizes:
    """The part of a head's config that follows from its ``network`` and its target's sizes."""

    network: DecoderConfig
    target_vocab_size: int

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


def embed(
    params: Any, config: SharingSizes, tokens: Array, target: Target, target_params: Any
) -> Array:
    """Return vectors [..., D] of target ids [...], by the head's embedding or the target's."""
    if params.embedding is None:
        vectors = target.embed(target_params, tokens)
    else:
        vectors = ops.look_up(params.embedding, tokens)
    return vectors.astype(config.network.activation_dtype)
