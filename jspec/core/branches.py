"""The texts before the nodes of a draft, and masks of tokens that the host makes for them."""

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


@struct.dataclass
class NodeMasks:
    """The tokens that grammars on the host allow after the nodes of one round's draft."""

    bits: Array  # [B, N, W] uint32; bit i of word w is token 32 w + i
    drafted: Array  # [B, N, M] int32, the nodes' branches, as in ``Branches``
    used: Array  # [B] bool

    @classmethod
    def of_draft(cls, bits: Array, used: Array, branches: Branches) -> "NodeMasks":
        """Return masks for the nodes of a draft, whose ``branches`` are in order."""
        return cls(bits, branches.drafted, used)


def keep_masked(logits: Array, masks: NodeMasks, branches: Branches) -> Array:
    """Apply the mask of the node with the same branch; there is one for every accepted node."""
    most = max(masks.drafted.shape[-1], branches.drafted.shape[-1])
    pad = lambda x: jnp.pad(x, ((0, 0), (0, 0), (0, most - x.shape[-1])), constant_values=-1)
    same = (pad(branches.drafted)[:, :, None] == pad(masks.drafted)[:, None]).all(-1)
    bits = jnp.take_along_axis(masks.bits, same.argmax(-1)[..., None], 1)
    tokens = jnp.arange(logits.shape[-1])
    allowed = (bits[..., tokens // 32] >> (tokens % 32).astype(jnp.uint32)) & 1
    return jnp.where((allowed == 1) | ~masks.used[:, None, None], logits, -jnp.inf)
