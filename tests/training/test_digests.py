"""A digest of weights depends on every value, but not on the dtype in which they were loaded."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from training.util.digests import same_weights, tree_digest, weights_digest

WEIGHTS = {
    "matrix": jax.random.normal(jax.random.key(0), (3, 4, 5)).astype(jnp.bfloat16),
    "codes": jnp.arange(60, dtype=jnp.uint8).reshape(6, 10),
    "words": jnp.arange(6, dtype=jnp.int32) + 2**24,
    "scale": jnp.bfloat16(0.5),
}


def changed(name, index, value):
    return WEIGHTS | {name: WEIGHTS[name].at[index].set(value)}


def digests(*weights):
    return [f(w) for f, w in itertools.product((tree_digest, weights_digest), weights)]


@pytest.mark.parametrize(
    "other",
    [
        *(changed("matrix", index, 0.0) for index in np.ndindex(3, 4, 5)),
        changed("codes", (5, 9), 60),
        changed("words", 3, 2**24 + 4),  # equal in float32 and below
        changed("scale", (), -0.5),
        WEIGHTS | {"matrix": WEIGHTS["matrix"][:, jnp.array([0, 2, 1, 3])]},
        WEIGHTS | {"matrix": WEIGHTS["matrix"].reshape(3, 2, 10)},
    ],
)
def test_every_value_and_its_index_count(other):
    assert len(set(digests(WEIGHTS, other))) == 4


def test_weights_have_one_digest_in_every_float_dtype_and_on_the_host():
    wide = WEIGHTS | {"matrix": WEIGHTS["matrix"].astype(jnp.float32)}
    assert weights_digest(wide) == weights_digest(WEIGHTS)
    assert tree_digest(jax.device_get(WEIGHTS)) == tree_digest(WEIGHTS) != tree_digest(wide)


def test_the_digest_of_an_earlier_version_is_that_of_the_first_rows():
    first, other = weights_digest(WEIGHTS), weights_digest(changed("matrix", (1, 1, 1), 0.0))
    earlier = first.partition(", all ")[0]
    assert same_weights(first, first) and not same_weights(first, other)
    assert same_weights(earlier, first) and same_weights(earlier, other)
    assert not same_weights(earlier, weights_digest(changed("matrix", (0, 0, 0), 0.0)))
