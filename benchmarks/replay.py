"""A target that generates a given text at the cost of a real one, to measure drafts of it."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jspec.core import trees
from jspec.core.types import Array, Params, Target
from jspec.engine.plan import Plan
from jspec.models.decoder import Decoder

_CERTAIN = 1e4  # added to the logit of the text's next token


@dataclasses.dataclass(frozen=True)
class Replay(Target):
    """A decoder whose params are its weights and a text, token ids [B, T], or [1, T] of all rows.

    Hidden states, and so the drafts of heads, are the decoder's. Logits put the mass on the text's
    next token, so that greedy decoding generates the text for any draft.
    """

    decoder: Decoder

    reads_pages, packs_nodes = True, True

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.decoder.vocab_size

    @property
    def max_positions(self) -> int:
        """The limit of the decoder."""
        return self.decoder.max_positions

    def init_cache(self, batch: int, capacity: int) -> Any:
        """Return the decoder's cache."""
        return self.decoder.init_cache(batch, capacity)

    def forward(self, params, tokens, tree, cache, capture_layers=(), packing=None):
        """Run the decoder, and make the text's tokens certain."""
        weights, text = params
        text = jnp.broadcast_to(text, (tokens.shape[0], text.shape[1]))
        out = self.decoder.forward(weights, tokens, tree, cache, capture_layers, packing)
        tree = trees.broadcast(tree, tokens.shape[0])
        after = cache.length[:, None] + tree.depth + 1
        tokens_after = jnp.take_along_axis(text, after, 1, mode="clip")
        rows = jnp.arange(tokens.shape[0])[:, None], jnp.arange(tokens.shape[1])
        return out.replace(logits=out.logits.at[(*rows, tokens_after)].add(_CERTAIN))

    def embed(self, params, tokens: Array) -> Array:
        """Return the decoder's embeddings."""
        return self.decoder.embed(params[0], tokens)

    def unembed(self, params, hidden: Array, *, norm: bool = True) -> Array:
        """Return the decoder's logits: only the target's pass reads the text."""
        return self.decoder.unembed(params[0], hidden, norm=norm)


def replaying(plan: Plan, params: Params, text: Array) -> tuple[Plan, Params]:
    """Return the plan and weights that generate ``text``, which includes the prompts."""
    target = Replay(plan.target)
    plan = dataclasses.replace(plan, target=target, drafter=_with_target(plan.drafter, target))
    return plan, params._replace(target=(params.target, text))


def _with_target(drafter: Any, target: Replay) -> Any:
    """Return the drafter with the new target wherever it uses the target's matrices."""
    names = {field.name for field in dataclasses.fields(drafter)}
    if "parts" in names:
        parts = tuple(_with_target(part, target) for part in drafter.parts)
        return dataclasses.replace(drafter, parts=parts)
    return dataclasses.replace(drafter, target=target) if "target" in names else drafter
