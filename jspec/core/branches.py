"""The texts before the nodes of a draft."""

import jax.numpy as jnp
from flax import struct

from jspec.core import trees
from jspec.core.types import Array, Draft, History, Tree


@struct.dataclass
class Branches:
    """The text before each of F nodes: the committed text and the node's branch."""

    history: History
    drafted: Array  # [B, F, M] int32, from below the root; -1 past the node itself

    @classmethod
    def at_root(cls, history: History) -> "Branches":
        """Return the branch of the root alone."""
        return cls(history, jnp.zeros((len(history.length), 1, 0), jnp.int32))

    @classmethod
    def of_draft(cls, history: History, draft: Draft, tree: Tree) -> "Branches":
        """Return the branches of all nodes of a draft."""
        above = trees.unpack_bits(tree.ancestors, draft.tokens.shape[1])  # [B, N, N]
        depth = tree.depth[:, None, :, None] == jnp.arange(1, tree.max_depth + 1)
        here = above[..., None] & depth  # [B, N, N, M]
        tokens = jnp.where(here, draft.tokens[:, None, :, None], -1)
        return cls(history, tokens.max(2, initial=-1))

    @property
    def length(self) -> Array:
        """Tokens of the text [B, F]."""
        return self.history.length[:, None] + (self.drafted >= 0).sum(-1)
