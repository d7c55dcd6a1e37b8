"""Generates plainly on one device, drafting with the batch cut over eight; one line of JSON a case.

Run by tests/test_reproducibility.py in a process of its own, where a CPU stands in for eight.
"""

import json

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.engine.batch import advance, read, start
from jspec.engine.plan import Plan
from jspec.models.batch_invariant import BatchInvariantDecoder
from tests import tiny
from tests.test_reproducibility import rows

MESH = Mesh(np.array(jax.devices()), ("data",))


def spread(tree, batch):
    """The arrays cut by rows, where they have ``batch`` of them; others are copied."""

    def place(x):
        axes = ("data",) if x.ndim and x.shape[0] == batch else ()
        return jax.device_put(x, NamedSharding(MESH, PartitionSpec(*axes)))

    return jax.tree.map(place, tree)


def texts(batch):
    return [answer.tokens.tolist() for answer in read(batch)]


def main():
    for dtype, target in (
        ("float32", tiny.TARGET),
        ("bfloat16", BatchInvariantDecoder(tiny.TARGET.config)),
    ):
        params = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), tiny.params())
        plan, asked = Plan(target, tiny.NGRAM, "coupled"), rows()
        plain = Plan(target, tiny.NONE)
        one = advance(plain, params, start(plain, params, asked))
        cut = spread(start(plan, params, asked), len(asked))
        eight = advance(plan, spread(params, -1), cut)
        print(
            json.dumps(
                {
                    "dtype": dtype,
                    "one": texts(one),
                    "eight": texts(eight),
                    "devices": len(eight.state.history.tokens.sharding.device_set),
                }
            )
        )


if __name__ == "__main__":
    main()
