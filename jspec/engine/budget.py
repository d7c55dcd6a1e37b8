"""The verification budget: which drafted nodes the target's pass takes.

The drafted nodes of all rows compete. A node survives with the probability that the nodes on its
path are all accepted, estimated from the row's past. A pass of a certain size is expected to emit a
token for each unfinished row, and one for each survivor. The round takes the pass that emits the
most tokens a second, by the measured seconds of rounds, and in it the nodes that survive likeliest.

All of this is known before the round, and nothing depends on a drafted token. So every rule stays
exact.
"""

import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.core.types import Array, Draft, Tree
from jspec.engine.plan import Pass

MOST_SURE = 0.98  # acceptance rate that no estimate exceeds, so that a node outlives its children


@struct.dataclass
class Budget:
    """Estimates of acceptance and of costs for the rounds of a launch."""

    rate: Array  # [B] float32, estimated probability that a node is accepted if its parent is
    seconds: Array  # [P] float32, of a round in each of ``RoundPlan.passes``

    def cut(self, passes: tuple[Pass, ...], draft: Draft, tree: Tree, done: Array) -> Draft:
        """Return the draft with the nodes that the budget leaves valid.

        ``done`` is bool [B]. Children of nodes that are left out are left out.
        """
        batch, nodes = draft.valid.shape
        drafted = draft.valid & (jnp.arange(nodes) > 0) & ~done[:, None]
        survival = jnp.where(drafted, self.rate[:, None] ** tree.depth, -1)
        # Parents come before their children: they survive more likely, or have the lower index.
        order = jnp.argsort(-survival.reshape(-1), stable=True)
        rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)).reshape(batch, nodes)
        emitted = expected(passes, jnp.where(drafted, survival, 0), (~done).sum(), jnp)
        best = jnp.argmax(emitted / self.seconds)
        limits = jnp.array([each.nodes for each in passes])[best]
        room = jnp.array([each.total if each.packed else batch * nodes for each in passes])[best]
        fits = (jnp.arange(nodes) < limits) & (rank < room - (~done).sum())
        return draft.replace(valid=draft.valid & (fits | ~drafted))


def expected(passes: tuple[Pass, ...], survival: Array, rows: Array, xp=np) -> Array:
    """Return the tokens that a round in each pass is expected to emit, [P].

    Args:
      passes: P sizes.
      survival: [B, N], 0 for roots and for nodes that are not valid.
      rows: [], number of unfinished rows.
      xp: numpy, or jax.numpy.
    """
    best = xp.cumsum(xp.sort(survival.reshape(-1))[::-1])
    by_node = xp.cumsum(survival.sum(0))
    emitted = []
    for nodes, total, packed in passes:
        last = xp.clip(total - rows, 0, best.size) - 1
        listed = xp.where(last < 0, 0, best[last])
        emitted.append(rows + (listed if packed else by_node[min(nodes, len(by_node)) - 1]))
    return xp.stack(emitted)
