"""What heads have in common whose blocks are those of a decoder."""

from typing import Any

from jspec import ops
from jspec.core.types import Array, Target
from jspec.models.decoder import DecoderConfig


class NetworkSizes:
    """Sizes of a head that follow from its ``network`` and its target's vocabulary."""

    network: DecoderConfig
    target_vocab_size: int

    @property
    def vocab_size(self) -> int:
        """Vd, the columns of the head's logits."""
        return self.network.vocab_size

    @property
    def hidden_size(self) -> int:
        """D, the width of the head's stream."""
        return self.network.hidden_size

    @property
    def reduced(self) -> bool:
        """Whether the head knows only some of the target's tokens."""
        return self.vocab_size != self.target_vocab_size


def embed(
    params: Any, config: NetworkSizes, tokens: Array, target: Target, target_params: Any
) -> Array:
    """Token ids of the target [...] to vectors [..., D], by the head's own embedding if any."""
    if params.embedding is None:
        vectors = target.embed(target_params, tokens)
    else:
        vectors = ops.look_up(params.embedding, tokens)
    return vectors.astype(config.network.activation_dtype)
