"""Generation on one device without drafts, and on eight with drafts; prints one JSON per case.

tests/test_reproducibility.py runs this in a process where one CPU simulates eight devices.
"""

import json

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jspec.engine.functional import advance, start
from jspec.engine.plan import Plan
from jspec.models.batch_invariant import BatchInvariantDecoder
from tests import test_reproducibility, tiny

MESH = Mesh(np.array(jax.devices()), ("data",))


def spread(tree, batch):
    """Shard arrays of ``batch`` rows by rows; replicate the others."""

    def put(x):
        axes = ("data",) if x.ndim and x.shape[0] == batch else ()
        return jax.device_put(x, NamedSharding(MESH, PartitionSpec(*axes)))

    return jax.tree.map(put, tree)


def texts(batch):
    return [answer.tokens.tolist() for answer in batch.answers]


def main():
    for dtype, target in (
        ("float32", tiny.TARGET),
        ("bfloat16", BatchInvariantDecoder(tiny.TARGET.config)),
    ):
        params = jax.tree.map(lambda x, dtype=dtype: x.astype(dtype), tiny.params())
        plan, sequences = Plan(target, tiny.NGRAM, "coupled"), test_reproducibility.sequences()
        plain = Plan(target, tiny.NONE)
        one = advance(plain, params, start(plain, params, sequences))
        sharded = spread(start(plan, params, sequences), len(sequences))
        eight = advance(plan, spread(params, -1), sharded)
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
