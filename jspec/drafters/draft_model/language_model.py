"""Shared code of drafters that run a language model autoregressively or in parallel.

A draft model with a vocabulary of its own drafts the tokens that it shares with the target (TLI,
arXiv 2502.05202, section 4). Its logits are restricted to those before they are processed, so the
recorded distribution is normalised over the shared tokens and 0 elsewhere, and every rule is exact.
It reads the text in its own ids, token by token. A token of the target that it lacks becomes its
unknown token, or else its end-of-text token.
"""

import dataclasses

import jax.numpy as jnp
from flax import struct

from jspec.core import kv_cache, trees, validation
from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.decoder import DecoderConfig, DecoderParams


@struct.dataclass
class TranslatingParams:
    """Weights of a draft model with another vocabulary, and the maps between the two."""

    model: DecoderParams
    draft_to_target: Array  # [M] int32, ascending: the target's ids of the shared tokens
    shared_ids: Array  # [M] int32: the draft model's ids of the same tokens
    target_to_draft: Array  # [V] int32: the draft model's ids, its unknown token if not shared


def translating(
    model: DecoderParams, target_ids: Array, draft_ids: Array, target_to_draft: Array
) -> TranslatingParams:
    """Return ``TranslatingParams`` of host arrays, for ``use_heterogeneous_vocab``."""
    maps = target_ids, draft_ids, target_to_draft
    return TranslatingParams(model, *(jnp.asarray(ids, jnp.int32) for ids in maps))


def weights_of(params: DecoderParams | TranslatingParams) -> DecoderParams:
    """Return the weights of the decoder."""
    return params.model if isinstance(params, TranslatingParams) else params


def spell(params: DecoderParams | TranslatingParams, ids: Array) -> Array:
    """Map the target's token ids to the draft model's."""
    return params.target_to_draft[ids] if isinstance(params, TranslatingParams) else ids


def next_logits(
    params: DecoderParams | TranslatingParams, config: DecoderConfig, hidden: Array, vocab_size: int
) -> Array:
    """Return next-token logits [..., Vd] from final hidden states [..., D].

    Vd counts the shared tokens if the draft model has another vocabulary. Otherwise it is the
    target's ``vocab_size``: logits are cut or padded with -inf.
    """
    logits = decoder.unembed(weights_of(params), config, hidden)
    if isinstance(params, TranslatingParams):
        return logits[..., params.shared_ids]
    missing = vocab_size - logits.shape[-1]
    if missing <= 0:
        return logits[..., :vocab_size]
    padding = [(0, 0)] * (logits.ndim - 1) + [(0, missing)]
    return jnp.pad(logits, padding, constant_values=-jnp.inf)


class ReadsText:
    """Methods of drafters whose ``memory.cache`` holds the text that a language model has read."""

    def check_params(self, params):
        """Refuse weights of another draft model, or of the wrong type."""
        validation.check_kind(
            params, TranslatingParams if self.use_heterogeneous_vocab else DecoderParams
        )
        decoder.check_params(weights_of(params), self.config)

    def with_backlog(self, count):
        """Return a drafter that reads up to ``count`` committed tokens a round."""
        return self if self.backlog >= count else dataclasses.replace(self, backlog=count)

    def prefill(self, params, memory, tokens, features, start, valid):
        """Read a chunk of the prompt into the cache."""
        model, chunk = weights_of(params.drafter), spell(params.drafter, tokens[:, :-1])
        tree = trees.chain_tree(*chunk.shape)
        out = decoder.forward(model, self.config, chunk, tree, memory.cache)
        return memory.replace(cache=kv_cache.append_prompt(memory.cache, out.tree_kv, valid))
