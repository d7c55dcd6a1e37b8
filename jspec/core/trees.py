"""Draft trees: parents, depths and ancestor sets.

Node 0 is the root and parents precede their children, so a chain is ``[-1, 0, ..., K-1]``.
Ancestor sets are bits in uint32 words, node j in bit ``j % 32`` of word ``j // 32``. So N = 64
nodes need two words per row, and no dense mask over the cache.
"""

import jax.numpy as jnp
import numpy as np

from jspec.core.types import Array, Tree

WORD = 32
MOST_NODES = 1024  # limit on tree_size: attention among the nodes takes an N x N mask


def chain(depth: int) -> np.ndarray:
    """Return the parents of a chain with ``depth`` drafted nodes, int32 [depth + 1].

    >>> chain(3)
    array([-1,  0,  1,  2], dtype=int32)
    """
    return np.arange(-1, depth, dtype=np.int32)


def chain_tree(batch: int, size: int) -> Tree:
    """Return the static tree of a chain of ``size`` nodes, root included, for ``batch`` rows."""
    return broadcast(from_parents(chain(size - 1), size - 1), batch)


def is_chain(parents: Array | np.ndarray) -> bool:
    """Return whether ``parents`` are those of a static chain.

    >>> is_chain(chain(3)), is_chain(np.array([-1, 0, 0]))
    (True, False)
    """
    static = isinstance(parents, np.ndarray) and parents.ndim == 1
    return static and np.array_equal(parents, chain(len(parents) - 1))


def from_parents(parents: Array | np.ndarray, max_depth: int) -> Tree:
    """Return the tree of ``parents`` ([N] or [B, N], -1 for the root), at most ``max_depth`` deep.

    A NumPy array gives NumPy constants, which XLA folds. A traced array gives traced values.

    >>> tree = from_parents(np.array([-1, 0, 0, 1]), max_depth=2)
    >>> tree.depth
    array([0, 1, 1, 2], dtype=int32)
    >>> tree.ancestors[..., 0]
    array([ 1,  3,  5, 11], dtype=uint32)
    """
    xp = np if isinstance(parents, np.ndarray) else jnp
    above = xp.maximum(parents, 0)  # the root is its own parent
    reach = _reach_static(above) if xp is np else _reach_traced(above, max_depth)
    depth = (reach.sum(-1) - 1).astype(xp.int32)
    return Tree(above.astype(xp.int32), depth, pack_bits(reach), max_depth)


def _reach_static(above: np.ndarray) -> np.ndarray:
    """Return bool [..., N, N], filled row by row: each node, and the ancestors of each node."""
    reach = np.zeros((*above.shape, above.shape[-1]), bool)
    reach[..., 0, 0] = True
    for node in range(1, above.shape[-1]):
        parent = above[..., node, None, None]
        reach[..., node, :] = np.take_along_axis(reach, parent, -2)[..., 0, :]
        reach[..., node, node] = True
    return reach


def _reach_traced(above: Array, max_depth: int) -> Array:
    """Return the same in O(log max_depth) operations: each squaring doubles the edges covered."""
    num_nodes, span = above.shape[-1], 1
    reach = jnp.eye(num_nodes, dtype=bool) | (above[..., None] == jnp.arange(num_nodes))
    while span < max_depth:
        reach = jnp.matmul(reach.astype(jnp.int32), reach.astype(jnp.int32)) > 0
        span *= 2
    return reach


def pack_bits(mask: Array | np.ndarray) -> Array | np.ndarray:
    """Pack bool [..., N] into uint32 words [..., W]."""
    xp = np if isinstance(mask, np.ndarray) else jnp
    num_words = -(-mask.shape[-1] // WORD)
    missing = num_words * WORD - mask.shape[-1]
    padded = xp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, missing)])
    words = padded.reshape(*mask.shape[:-1], num_words, WORD).astype(xp.uint32)
    return (words << xp.arange(WORD, dtype=xp.uint32)).sum(-1, dtype=xp.uint32)


def unpack_bits(words: Array | np.ndarray, num_nodes: int) -> Array | np.ndarray:
    """Unpack uint32 words [..., W] to bool [..., num_nodes], the inverse of ``pack_bits``."""
    xp = np if isinstance(words, np.ndarray) else jnp
    bits = (words[..., None] >> xp.arange(WORD, dtype=xp.uint32)) & xp.uint32(1)
    return bits.reshape(*words.shape[:-1], -1)[..., :num_nodes] > 0


def within(tree: Tree, window: int) -> Array | np.ndarray:
    """Return the ancestor words [..., N, W] of nodes fewer than ``window`` edges up.

    >>> within(from_parents(chain(3), max_depth=3), window=2)[..., 0]
    array([ 1,  3,  6, 12], dtype=uint32)
    """
    if tree.max_depth < window:
        return tree.ancestors
    return tree.ancestors & pack_bits(tree.depth[..., :, None] - tree.depth[..., None, :] < window)


def broadcast(tree: Tree, batch: int) -> Tree:
    """Return ``tree`` with a leading axis of ``batch`` rows, if it has none. NumPy stays NumPy."""
    if tree.depth.ndim == 2:
        return tree
    xp = np if isinstance(tree.depth, np.ndarray) else jnp
    arrays = (tree.parents, tree.depth, tree.ancestors)
    return Tree(*(xp.broadcast_to(x, (batch, *x.shape)) for x in arrays), tree.max_depth)


def first_nodes(tree: Tree, count: int) -> Tree:
    """Return the tree of the first ``count`` nodes; parents precede children, so it is closed."""
    parents, depth = tree.parents[..., :count], tree.depth[..., :count]
    ancestors = tree.ancestors[..., :count, : -(-count // WORD)]
    return Tree(parents, depth, ancestors, min(tree.max_depth, count - 1))
