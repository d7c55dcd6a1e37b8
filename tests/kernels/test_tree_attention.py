"""The specification of tree attention against a dense softmax in NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec import ops, topology
from jspec.kernels.tree_attention import reference

BATCH, DIM = 3, 8


def random_case(heads, kv_heads, nodes, keys, slots, seed=0):
    rng = np.random.default_rng(seed)
    array = lambda *shape: rng.standard_normal(shape).astype(np.float32)
    mask = rng.random((BATCH, nodes, keys)) < 0.4
    mask[:, np.arange(nodes), np.arange(nodes)] = True
    return dict(
        q=array(BATCH, heads, nodes, DIM),
        tree_k=array(BATCH, kv_heads, keys, DIM),
        tree_v=array(BATCH, kv_heads, keys, DIM),
        ancestors=topology.pack_bits(mask),
        cache_k=array(BATCH, kv_heads, slots, DIM),
        cache_v=array(BATCH, kv_heads, slots, DIM),
        length=np.array([0, slots // 3, slots], np.int32),
    )


def dense(
    q, tree_k, tree_v, ancestors, cache_k, cache_v, length, scale,
    window=None, positions=None, soft_cap=None,
):  # fmt: skip
    heads, nodes = q.shape[1:3]
    group = heads // tree_k.shape[1]
    keys = np.repeat(np.concatenate([cache_k, tree_k], 2), group, 1).astype(np.float64)
    values = np.repeat(np.concatenate([cache_v, tree_v], 2), group, 1)
    slots = np.arange(cache_k.shape[2])
    prefix = np.broadcast_to(slots < length[:, None, None], (len(q), nodes, len(slots)))
    if window is not None:
        prefix = prefix & (slots > positions[:, :, None] - window)
    key = np.arange(tree_k.shape[2])
    near = ancestors[..., key // 32] >> (key % 32).astype(np.uint32) & 1
    mask = np.concatenate([prefix, near > 0], -1)[:, None]
    scores = np.einsum("bhnd,bhsd->bhns", q, keys) * scale
    if soft_cap is not None:
        scores = soft_cap * np.tanh(scores / soft_cap)
    scores = np.where(mask, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhns,bhsd->bhnd", weights / weights.sum(-1, keepdims=True), values)


@pytest.mark.parametrize("block", [None, 4, 7, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "nodes", "keys", "slots"),
    [(4, 2, 5, 5, 21), (2, 2, 1, 4, 16), (6, 1, 3, 3, 1)],
)
def test_blocks_of_the_prefix_and_the_tree_are_one_softmax(
    heads, kv_heads, nodes, keys, slots, block
):
    case = random_case(heads, kv_heads, nodes, keys, slots)
    found = reference.tree_attention(*map(jnp.array, case.values()), scale=0.3, block=block)
    np.testing.assert_allclose(found, dense(**case, scale=0.3), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("window", [1, 3, 9, 100])
def test_a_sliding_window_reaches_back_from_each_query(window, block):
    case = random_case(4, 2, 5, 5, 21)
    positions = case["length"][:, None] + np.arange(5, dtype=np.int32)
    options = dict(scale=0.3, window=window, positions=positions)
    found = reference.tree_attention(*map(jnp.array, case.values()), block=block, **options)
    np.testing.assert_allclose(found, dense(**case, **options), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("block", [None, 4])
def test_a_soft_cap_bends_the_scores_before_they_are_masked(block):
    case = random_case(4, 2, 5, 40, 21)
    found = reference.tree_attention(
        *map(jnp.array, case.values()), scale=2.0, soft_cap=1.5, block=block
    )
    np.testing.assert_allclose(found, dense(**case, scale=2.0, soft_cap=1.5), rtol=2e-5, atol=2e-6)
    assert np.abs(found - dense(**case, scale=2.0)).max() > 0.1


def test_without_a_cache_the_tree_attends_to_itself():
    case = random_case(4, 2, 5, 5, 1)
    case["length"][:] = 0
    alone = {**case, "cache_k": None, "cache_v": None}
    found = reference.tree_attention(*alone.values(), scale=0.3)
    np.testing.assert_allclose(found, dense(**case, scale=0.3), rtol=2e-5, atol=2e-6)


def test_an_implementation_that_is_not_known_is_refused():
    case = random_case(2, 2, 1, 1, 4)
    with pytest.raises(ValueError, match="implementation='cudnn' is not known"):
        ops.attention(*case.values(), scale=1.0, implementation="cudnn")


def test_a_mask_that_is_not_packed_into_words_is_refused():
    case = random_case(2, 2, 3, 3, 4)
    case["ancestors"] = topology.unpack_bits(case["ancestors"], 3)
    with pytest.raises(ValueError, match=r"ancestors is bool\[3, 3, 3\].*need uint32\[3, 3, 1\]"):
        ops.attention(*case.values(), scale=1.0)


def test_a_window_without_positions_is_refused():
    with pytest.raises(ValueError, match="window=3 needs the positions"):
        ops.attention(*random_case(2, 2, 3, 3, 4).values(), scale=1.0, window=3)


def test_a_linear_of_narrow_weights_gives_a_row_the_same_result_at_any_count():
    rng = np.random.default_rng(0)
    weight = jnp.array(rng.standard_normal((64, 96)), jnp.bfloat16)
    x = jnp.array(rng.standard_normal((9, 64)), jnp.float32)
    full = ops.linear(x, weight)
    for count in (1, 2, 3, 5):
        np.testing.assert_allclose(
            ops.linear(x[:count], weight), full[:count], rtol=1e-5, atol=1e-5
        )
    np.testing.assert_allclose(ops.linear(x, weight.T, transposed=True), full, rtol=1e-5, atol=1e-5)
