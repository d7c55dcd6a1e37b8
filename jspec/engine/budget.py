"""The verification budget: which drafted nodes the target's pass takes.

The drafted nodes of all rows compete. A node survives with the probability that the nodes on its
path are all accepted, estimated from the row's past. A pass of a certain size is expected to emit a
token for each unfinished row, and one for each survivor. The round takes the pass that emits the
most tokens a second, by the measured seconds of rounds, and in it the nodes that survive likeliest.

All of this is computed before the round, and nothing depends on a drafted token. So every rule
stays exact.
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
    seconds: Array  # [P] float32, of a round in each of ``Plan.passes``

    def cut(self, passes: tuple[Pass, ...], draft: Draft, tree: Tree, done: Array) -> Draft:
        """Return the draft with the nodes that the budget leaves valid.

        ``done`` is bool [B]. Children of nodes that are left out are left out.
        """
        batch, nodes = draft.valid.shape
        drafted = draft.valid & (jnp.arange(nodes) > 0) & ~done[:, None]
        survival = jnp.where(drafted, self.rate[:, None] ** tree.depth, 0)
        emitted = expected(passes, survival, (~done).sum(), jnp)
        best = jnp.argmax(emitted / self.seconds)
        limits = jnp.array([each.nodes for each in passes])[best]
        room = jnp.array([each.total if each.packed else batch * nodes for each in passes])[best]
        fits = drafted & (jnp.arange(nodes) < limits)
        # Parents come before their children: they survive more likely, or have the lower index.
        order = jnp.argsort(-jnp.where(fits, survival, -1).reshape(-1), stable=True)
        rank = jnp.zeros_like(order).at[order].set(jnp.arange(order.size)).reshape(batch, nodes)
        fits &= rank < room - (~done).sum()
        return draft.replace(valid=draft.valid & (fits | ~drafted))


def expected(passes: tuple[Pass, ...], survival: Array, rows: Array, xp=np) -> Array:
    """Return the tokens that a round in each pass is expected to emit, [P]; 0 if it is too small.

    Args:
      passes: P sizes.
      survival: [B, N], 0 for roots and for nodes that are not valid.
      rows: [], number of unfinished rows.
      xp: numpy, or jax.numpy.
    """
    emitted = []
    for nodes, total, packed in passes:
        taken = survival[:, :nodes].reshape(-1)
        if packed:
            likeliest = xp.sort(taken)[::-1]
            taken = xp.where(xp.arange(taken.size) < total - rows, likeliest, 0)
        holds = total >= rows if packed else True
        emitted.append(xp.where(holds, rows + taken.sum(), 0))
    return xp.stack(emitted)
