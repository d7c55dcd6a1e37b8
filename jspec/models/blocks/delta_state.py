"""The gated delta rule over the nodes of a tree, and the state that it leaves behind.

A head maps keys to values by a matrix S [Dk, Dv] (arXiv 2412.06464). A token with key k, value v,
query q, log decay g <= 0 and rate b makes ::

    S <- exp(g) S        S <- S + k u^T  with  u = b (v - S^T k)        output = S^T q

A pass over nodes reads S once and writes nothing. Let r(n, m) be the product of the decays below
node m and down to node n, and r(n) of all down to n. The u of all nodes, of a chain or a tree,
solve one unit triangular system over their ancestors (arXiv 2406.06484 for chains)::

    u_n = b_n (v_n - r(n) S^T k_n - sum over ancestors m of r(n, m) (k_n . k_m) u_m)
    output_n = r(n) S^T q_n + sum over m, n included, of r(n, m) (q_n . k_m) u_m

The state behind the nodes of a path is r S + sum over m of r(m) k_m u_m^T, r(m) of the decays
behind m. All r are exponentials of sums of log decays of one sign, never of their differences.

A draft network runs over the nodes of a round in several passes. What a node reads from the state
behind earlier nodes is r S^T x plus the sum over them of r(m) (x . k_m) u_m, so S stays as it is.
"""

from typing import Self

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from jspec import sharding
from jspec.core import trees
from jspec.core.entries import NODE_AXIS, Commit, Entry
from jspec.core.types import Array, Tree
from jspec.models.blocks.recur import Earlier

_CHUNK = 64  # nodes of a chain that are solved at once
_FEW = 16  # levels that are substituted one by one, and committed nodes that are added one by one


@struct.dataclass
class DeltaNodes:
    """The values of N nodes, of which a committed path makes the next state."""

    inputs: Array  # [B, P, N, C] float32, of the convolution, in P parts of the columns
    keys: Array  # [B, Hk, N, Dk] float32
    updates: Array  # [B, H, N, Dv] float32, u
    decays: Array  # [B, H, N] float32, g


@struct.dataclass
class DeltaState(Entry):
    """The state of one layer, and the last inputs of its convolution."""

    state: Array  # [B, H, Dv, Dk] float32, the transposes of S
    inputs: Array  # [B, P, W - 1, C] float32
    num_keys: int = struct.field(pytree_node=False)  # Hk; each key head has H / Hk matrices S
    is_divided: bool = struct.field(pytree_node=False, default=False)  # see ``Entry``
    copy: "DeltaState | None" = None  # see ``Entry``

    can_copy = True

    def with_copy(self) -> Self:
        """See ``Entry``."""
        return self.replace(copy=jax.tree.map(jnp.zeros_like, self))

    def of_nodes(self, batch: int, count: int) -> DeltaNodes:
        """See ``Entry``."""
        _, heads, value_dim, key_dim = self.state.shape

        def shape(*sizes: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct((batch, *sizes), jnp.float32)

        return DeltaNodes(
            inputs=shape(self.inputs.shape[1], count, self.inputs.shape[3]),
            keys=shape(self.num_keys, count, key_dim),
            updates=shape(heads, count, value_dim),
            decays=shape(heads, count),
        )

    def append(self, new: DeltaNodes, commit: Commit) -> Self:
        """See ``Entry``; the state is read once and written once."""
        count = jnp.broadcast_to(commit.count, len(commit.path))[:, None]
        is_committed = (jnp.arange(commit.path.shape[1]) < count)[:, None, :, None]
        at = commit.path[:, None, :, None]

        def along(x: Array) -> Array:
            """Return the values [B, H, R, ...] of the path's nodes, 0 where not committed."""
            return jnp.where(is_committed, jnp.take_along_axis(x, at, NODE_AXIS), 0)

        grown = count[:, :, None, None] > 0
        keys, updates = along(new.keys), along(new.updates)
        state = carried(self.state, keys, updates, along(new.decays[..., None])[..., 0])
        steps = (count + np.arange(self.inputs.shape[2]))[:, None, :, None]
        rows = jnp.concatenate([self.inputs, along(new.inputs)], NODE_AXIS)
        inputs = jnp.take_along_axis(rows, steps, NODE_AXIS)
        return self.replace(
            state=jnp.where(grown, state, self.state), inputs=jnp.where(grown, inputs, self.inputs)
        )


def carried(state: Array, keys: Array, updates: Array, decays: Array) -> Array:
    """Return the state [B, H, Dv, Dk] behind a path of R nodes.

    Few nodes are added one by one, so that XLA makes one loop over the state. It would store the
    result of a product, as large as the state, before it is added.
    """
    groups, steps = keys.shape[1:3]
    later = lax.cumsum(decays, 2, reverse=True)
    behind = jnp.pad(later[:, :, 1:], ((0, 0), (0, 0), (0, 1)))
    updates = updates * jnp.exp(behind)[..., None]
    updates = _grouped(updates, groups)
    total = jnp.exp(later[:, :, :1])[..., None] * state
    total = _grouped(total, groups)
    if steps <= _FEW:
        for step in range(steps):
            key = keys[:, :, None, step, None]
            total = total + updates[:, :, :, step, :, None] * key
    else:
        total = total + _product("bgmk,bgrmv->bgrvk", keys, updates)
    return total.reshape(state.shape)


def convolved(
    inputs: Array,
    past: Array,
    kernel: Array,
    tree: Tree,
    earlier: Earlier | None = None,
    starts: Array | None = None,
) -> Array:
    """Return the causal convolution [B, P, N, C] of the nodes' inputs along their paths.

    Args:
      inputs: [B, P, N, C].
      past: [B, P, W - 1, C], the last committed inputs.
      kernel: [P, W, C]; its last row is that of the node itself.
      tree: of the nodes, with a batch axis.
      earlier: nodes between the prefix and these.
      starts: bool [B, N], nodes of a chain that no earlier node precedes.
    """
    width, count = kernel.shape[1], inputs.shape[2]
    between = () if earlier is None else (earlier.values.inputs,)
    rows = jnp.concatenate([past, *between, inputs], NODE_AXIS)
    if earlier is not None:
        slots = _slots_behind(tree, earlier.seen, width)
        seen = [jnp.take_along_axis(rows, slot, NODE_AXIS) for slot in slots]
    elif _is_chain(tree):
        seen = [rows[:, :, back : back + count] for back in range(width)]
    else:
        slots = [slot[:, None, :, None] for slot in _slots(tree, width)]
        seen = [jnp.take_along_axis(rows, slot, NODE_AXIS) for slot in slots]
    if starts is not None:
        index = jnp.arange(count)
        since = index - lax.cummax(jnp.where(starts, index, -width), 1)  # inputs of the same text
        seen = [
            jnp.where((since >= width - 1 - back)[:, None, :, None], row, 0)
            for back, row in enumerate(seen)
        ]
    return sum(row * kernel[:, None, back] for back, row in enumerate(seen))


def _slots(tree: Tree, width: int) -> list[Array | np.ndarray]:
    """Return the indices [B, N] of inputs behind W - 1 committed ones, the oldest first."""
    xp = np if isinstance(tree.parents, np.ndarray) else jnp
    node = xp.broadcast_to(xp.arange(tree.depth.shape[1]), tree.depth.shape)
    slots = [width - 1 + node]
    for back in range(1, width):
        node = xp.take_along_axis(tree.parents, node, 1)
        is_node = tree.depth >= back
        slots.append(width - 1 + xp.where(is_node, node, tree.depth - back))
    return slots[::-1]


def _slots_behind(tree: Tree, seen: Array, width: int) -> list[Array]:
    """Return ``_slots`` [B, 1, N, 1] where earlier nodes, ``seen`` [B, N, M], are in between."""
    batch, count, _ = seen.shape
    above = trees.unpack_bits(tree.ancestors, count)
    above = jnp.broadcast_to(above, (batch, count, count))
    past = jnp.ones((batch, count, width - 1), bool)
    visible = jnp.concatenate([past, seen, above], 2)
    back = lax.cumsum(visible.astype(jnp.int32), 2, reverse=True) - 1  # inputs in between
    slots = (jnp.argmax(visible & (back == step), 2) for step in range(width)[::-1])
    return [slot[:, None, :, None] for slot in slots]


def outputs(
    entry: DeltaState,
    *,
    pairs: Array,
    values: Array,
    decays: Array,
    rates: Array,
    tree: Tree,
    earlier: Earlier | None = None,
) -> tuple[Array, Array]:
    """Return the outputs of the nodes, and their updates u, both [B, H, N, Dv].

    Args:
      entry: the state of the prefix, read only.
      pairs: [B, Hk, N, 2, Dk], a query and a key of each node.
      values: [B, H, N, Dv].
      decays: [B, H, N], g.
      rates: [B, H, N], b.
      tree: of the nodes, with a batch axis.
      earlier: nodes between the prefix and these.
    """
    count = values.shape[2]
    nodes = pairs, values, decays, rates
    if count <= _CHUNK or not _is_chain(tree) or earlier is not None:
        above = trees.unpack_bits(tree.ancestors, count)
        return _solved(entry.state, nodes, above, tree.max_depth, entry.is_divided, earlier)
    missing = -count % _CHUNK

    def chunks(x: Array) -> Array:
        x = jnp.pad(x, ((0, 0), (0, 0), (0, missing), *[(0, 0)] * (x.ndim - 3)))
        return jnp.moveaxis(x.reshape(*x.shape[:2], -1, _CHUNK, *x.shape[3:]), 2, 0)

    above = np.tri(_CHUNK, dtype=bool)[None]

    def step(state: Array, nodes: tuple[Array, ...]) -> tuple[Array, tuple[Array, Array]]:
        mixed, updates = _solved(state, nodes, above, _CHUNK, entry.is_divided)
        pairs, _, decays, _ = nodes
        return carried(state, pairs[..., 1, :], updates, decays), (mixed, updates)

    _, results = lax.scan(step, entry.state, tuple(map(chunks, nodes)))
    mixed, updates = (
        jnp.moveaxis(x, 0, 2).reshape(*x.shape[1:3], -1, x.shape[-1])[:, :, :count] for x in results
    )
    return mixed, updates


def _solved(
    state: Array,
    nodes: tuple[Array, ...],
    above: Array | np.ndarray,
    depth: int,
    is_divided: bool,
    earlier: Earlier | None = None,
) -> tuple[Array, Array]:
    """Return ``outputs`` of nodes of which ``above`` [B, N, N] are the ancestors, at most N."""
    pairs, values, decays, rates = nodes
    heads, groups, count = state.shape[1], *pairs.shape[1:3]
    strict = above & ~np.eye(count, dtype=bool)
    mask = jnp.asarray(above, jnp.float32)[:, None]
    below = decays[..., None] * strict[:, None]  # [B, H, N, N]: g of j, if it is below m
    ratios = jnp.exp(jnp.where(above[:, None], _product("bhnj,bhjm->bhnm", mask, below), -jnp.inf))
    total = jnp.exp(_product("bhnj,bhj->bhn", mask, decays))[..., None]

    # One product of all queries and keys reads the state once. XLA for GPU merges products with a
    # common first operand, and would copy the state beside the keys: the barrier separates them.
    read = _product("bgnck,bgrvk->bgrcnv", pairs, _grouped(state, groups))
    read = read.reshape(len(state), heads, 2, count, -1)
    if earlier is not None:
        read = _behind(read, pairs, earlier)
    read, pairs = lax.optimization_barrier((read, pairs))
    alike = _product("bgnck,bgmk->bgcnm", pairs, pairs[..., 1, :])
    alike = jnp.repeat(alike, heads // groups, 1)

    system = jnp.where(strict[:, None], rates[..., None] * ratios * alike[:, :, 1], 0)
    right = rates[..., None] * (values - total * read[:, :, 1])
    updates = _solve(system, right, depth, is_divided)
    mixed = _product("bhnm,bhmv->bhnv", ratios * alike[:, :, 0], updates)
    return total * read[:, :, 0] + mixed, updates


def _behind(read: Array, pairs: Array, earlier: Earlier) -> Array:
    """Return what pairs [B, Hk, N, 2, Dk] read from the state behind the nodes that they see.

    ``read`` [B, H, 2, N, Dv] is what they read from the state of the prefix.
    """
    nodes, seen, heads = earlier.values, earlier.seen[:, None], read.shape[1]
    decays = lax.cumsum(jnp.where(seen, nodes.decays[:, :, None], 0), 3, reverse=True)
    later = jnp.pad(decays[..., 1:], ((0, 0), (0, 0), (0, 0), (0, 1)))
    ratios = jnp.where(seen, jnp.exp(later), 0)[:, :, None]
    alike = _product("bgmk,bgnck->bgcnm", nodes.keys, pairs)
    alike = jnp.repeat(alike, heads // pairs.shape[1], 1)
    added = _product("bhcnm,bhmv->bhcnv", ratios * alike, nodes.updates)
    return jnp.exp(decays[..., :1])[:, :, None] * read + added


def _solve(system: Array, right: Array, depth: int, is_divided: bool) -> Array:
    """Return x of (1 + system) x = right, for a strictly lower triangular system [B, H, N, N].

    In a shallow tree the inverse is exact after as many substitutions as there are levels.
    """
    eye = jnp.eye(system.shape[-1], dtype=system.dtype)
    if depth <= _FEW:
        inverse = jnp.broadcast_to(eye, system.shape)
        for _ in range(depth):
            inverse = eye - _product("bhnj,bhjm->bhnm", system, inverse)
        return _product("bhnm,bhmv->bhnv", inverse, right)

    def solve(right: Array, system: Array) -> Array:
        return lax.linalg.triangular_solve(
            system + eye, right, left_side=True, lower=True, unit_diagonal=True
        )

    # XLA would gather the systems of all heads on every device.
    return sharding.over_heads(solve, is_split=is_divided)(right, system)


def _grouped(x: Array, groups: int) -> Array:
    """Return x [B, H, ...] by key heads, [B, Hk, H / Hk, ...]."""
    return x.reshape(len(x), groups, -1, *x.shape[2:])


def _product(equation: str, x: Array, y: Array) -> Array:
    """Return an einsum of float32 arrays, in full precision."""
    return jnp.einsum(equation, x, y, precision=lax.Precision.HIGHEST)


def _is_chain(tree: Tree) -> bool:
    """Return whether the nodes of all rows are a static chain."""
    static = isinstance(tree.depth, np.ndarray)
    return static and bool((tree.depth == np.arange(tree.depth.shape[-1])).all())
