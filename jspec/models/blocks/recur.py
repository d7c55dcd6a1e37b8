"""``recur``: recurrences of new nodes behind the states of a committed prefix."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp

from jspec.core import kv_cache, trees
from jspec.core.types import Array, Tree
from jspec.models.blocks.attend import put_nodes


@dataclasses.dataclass(frozen=True)
class Earlier:
    """The nodes of a round that earlier passes ran over.

    Attributes:
      values: of M slots, as those passes returned them; an ancestor has a lower slot.
      seen: bool [B, n, M], the slots that each new node sees.
    """

    values: Any
    seen: Array


# visit(entry, tree, earlier=None, starts=None) -> outputs of new nodes, and their values
#
# ``earlier`` are nodes between the prefix and those of the tree. ``starts``, bool [B, N], are the
# nodes of a chain that begin a text of their own, in training.
Visit = Callable[..., tuple[Array, Any]]
# recur(layer, visit) -> outputs of ``visit``
Recur = Callable[[int, Visit], Array]


def recurrence_over(cache: kv_cache.KVCache, tree: Tree, new: list[Any]) -> Recur:
    """Return a ``recur`` over a committed prefix and a draft tree.

    It puts the values of the nodes into ``new``, the list of ``attention_over``.
    """

    def recur(index: int, visit: Visit) -> Array:
        mixed, new[index] = visit(cache.layers[index], tree)
        return mixed

    return recur


def recurrence_beside(
    cache: kv_cache.KVCache, side: list[Any], slot: Array | int, mask: Array
) -> Recur:
    """Return a ``recur`` over a committed prefix and side buffers, for tokens that are a chain.

    It updates ``side``, the list of ``attention_beside``, whose other arguments these are. No node
    is earlier than those of the static ``slot`` 0.
    """
    batch, count, width = mask.shape
    tree, slots = trees.chain_tree(batch, count), jnp.arange(width)
    seen = mask & ((slots < slot) | (slots >= slot + count))
    is_first = isinstance(slot, int) and slot == 0

    def recur(index: int, visit: Visit) -> Array:
        earlier = None if is_first else Earlier(side[index], seen)
        mixed, new = visit(cache.layers[index], tree, earlier=earlier)
        side[index] = put_nodes(side[index], new, slot)
        return mixed

    return recur
