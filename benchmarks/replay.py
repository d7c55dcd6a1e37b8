"""A target that says a given text, at the cost of a real one: to measure drafts of real answers."""

import dataclasses
from typing import Any

import jax.numpy as jnp

from jspec.core import trees
from jspec.core.types import Array, Params
from jspec.engine.plan import Plan
from jspec.models.decoder import Decoder

_CERTAIN = 1e4  # added to the logit of the text's next token


@dataclasses.dataclass(frozen=True)
class Replay:
    """``decoder`` on the text of ``params``, its weights and the token ids [B, T] of every row.

    Hidden states, and so the drafts of heads, are the decoder's own; the token after each position
    of the text is the text's. At temperature 0 this is what is said, whatever is drafted.
    """

    decoder: Decoder

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.decoder.vocab_size

    @property
    def max_positions(self) -> int:
        """Of the decoder."""
        return self.decoder.max_positions

    def init_cache(self, batch: int, capacity: int) -> Any:
        """The decoder's."""
        return self.decoder.init_cache(batch, capacity)

    def forward(self, params, tokens, tree, cache, capture_layers=()):
        """One pass of the decoder; the text's tokens are certain."""
        weights, text = params
        out = self.decoder.forward(weights, tokens, tree, cache, capture_layers)
        tree = trees.broadcast(tree, tokens.shape[0])
        after = cache.length[:, None] + tree.depth + 1
        said = jnp.take_along_axis(text, after, 1, mode="clip")
        rows = jnp.arange(tokens.shape[0])[:, None], jnp.arange(tokens.shape[1])
        return out.replace(logits=out.logits.at[(*rows, said)].add(_CERTAIN))

    def embed(self, params, tokens: Array) -> Array:
        """The decoder's."""
        return self.decoder.embed(params[0], tokens)

    def unembed(self, params, hidden: Array, *, norm: bool = True) -> Array:
        """The decoder's: what is said is only known to the target's own pass."""
        return self.decoder.unembed(params[0], hidden, norm=norm)


def replaying(plan: Plan, params: Params, text: Array) -> tuple[Plan, Params]:
    """The plan and its weights, made to say ``text`` [B, T], prompts included."""
    target = Replay(plan.target)
    plan = dataclasses.replace(plan, target=target, drafter=_told(plan.drafter, target))
    return plan, params._replace(target=(params.target, text))


def _told(drafter: Any, target: Replay) -> Any:
    """The drafter with the new target wherever it shares the target's matrices."""
    names = {field.name for field in dataclasses.fields(drafter)}
    if "parts" in names:
        parts = tuple(_told(part, target) for part in drafter.parts)
        return dataclasses.replace(drafter, parts=parts)
    if "drafter" in names:  # of an adaptive length
        return dataclasses.replace(drafter, drafter=_told(drafter.drafter, target))
    return dataclasses.replace(drafter, target=target) if "target" in names else drafter
