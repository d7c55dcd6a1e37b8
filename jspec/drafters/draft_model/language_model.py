"""What drafters share that draft with a language model, which may have a vocabulary of its own.

Such a draft model drafts the tokens that it shares with the target (TLI, arXiv 2502.05202, section
4): its logits are cut to those before they are warped, so that the law of a draft, which is
recorded over the target's ids, is normalised there and 0 elsewhere, and every rule is exact. What
it reads is spelled in its own ids, token by token: tokens of the target that it lacks, in the
prompt or in what the target said, are its unknown token, or else its end of text.
"""

from typing import Any

import jax.numpy as jnp
from flax import struct

from jspec.core import kv_cache, trees, validation
from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.decoder import DecoderConfig, DecoderParams


@struct.dataclass
class TranslatingParams:
    """Weights of a draft model with a vocabulary of its own, and its way to the target's.

    ``translating`` makes them.
    """

    model: DecoderParams
    draft_to_target: Array  # [M] int32, ascending: the target's ids of the shared tokens
    shared_ids: Array  # [M] int32: the draft model's ids of the same tokens
    target_to_draft: Array  # [V] int32: the draft model's ids, one and the same where not shared


def translating(
    model: DecoderParams, target_ids: Array, draft_ids: Array, target_to_draft: Array
) -> TranslatingParams:
    """Parameters for ``use_heterogeneous_vocab``.

    Args:
      model: the draft model's weights.
      target_ids: [M], ascending: the target's ids of the tokens that both have.
      draft_ids: [M], the draft model's ids of the same tokens.
      target_to_draft: [V], what the draft model reads for each of the target's tokens.
    """
    return TranslatingParams(
        model, *(jnp.asarray(ids, jnp.int32) for ids in (target_ids, draft_ids, target_to_draft))
    )


def check_params(
    params: DecoderParams | TranslatingParams, config: DecoderConfig, translated: bool
) -> None:
    """Refuses weights of another draft model, or without the way between two vocabularies.

    Raises:
      ValueError: they are not ``TranslatingParams`` though ``translated``, or are though not, or
        do not fit ``config``.
    """
    validation.check_kind(params, TranslatingParams if translated else DecoderParams)
    decoder.check_params(weights_of(params), config)


def weights_of(params: DecoderParams | TranslatingParams) -> DecoderParams:
    """The draft model's own weights."""
    return params.model if isinstance(params, TranslatingParams) else params


def spell(params: DecoderParams | TranslatingParams, ids: Array) -> Array:
    """The target's token ids in those of the draft model."""
    return params.target_to_draft[ids] if isinstance(params, TranslatingParams) else ids


def next_logits(
    params: DecoderParams | TranslatingParams, config: DecoderConfig, hidden: Array, vocab_size: int
) -> Array:
    """Logits [..., Vd] of what follows, from last residual streams [..., D].

    Over the shared tokens where the draft model has a vocabulary of its own; else cut or padded to
    the ``vocab_size`` tokens of the target, padding never being drawn.
    """
    logits = decoder.unembed(weights_of(params), config, hidden)
    if isinstance(params, TranslatingParams):
        return logits[..., params.shared_ids]
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)


def take_in(
    params: Any, config: DecoderConfig, chunk: Array, cache: kv_cache.KVCache, count: Array
):
    """The cache with the first ``count`` [B] of the target's tokens ``chunk`` [B, C] behind it."""
    batch, size = chunk.shape
    tree = trees.from_parents(trees.chain(size - 1), size - 1)
    out = decoder.forward(weights_of(params), config, spell(params, chunk), tree, cache)
    rows = jnp.broadcast_to(jnp.arange(size), (batch, size))
    return kv_cache.append(cache, out.tree_kv, rows, count)
