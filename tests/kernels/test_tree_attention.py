"""The specification of tree attention against a dense softmax in NumPy."""

import functools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jspec import ops
from jspec.core import trees
from jspec.core.weights import Transposed
from jspec.kernels.tree_attention import reference
from tests.kernels.attention import dense, in_pages, random_case


def small_case(heads, kv_heads, nodes, keys, slots, window=None):
    return random_case(
        heads, kv_heads, 8, nodes, keys, slots, [0, slots // 3, slots], window=window
    )


@pytest.mark.parametrize("block", [None, 4, 7, 64])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "nodes", "keys", "slots"),
    [(4, 2, 5, 5, 21), (2, 2, 1, 4, 16), (6, 1, 3, 3, 1)],
)
def test_blocks_of_the_prefix_and_the_tree_are_one_softmax(
    heads, kv_heads, nodes, keys, slots, block
):
    case, _ = small_case(heads, kv_heads, nodes, keys, slots)
    result = reference.tree_attention(*map(jnp.array, case.values()), scale=0.3, block=block)
    np.testing.assert_allclose(result, dense(**case, scale=0.3), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("block", [None, 4])
@pytest.mark.parametrize("window", [1, 3, 9, 100])
def test_a_sliding_window_reaches_back_from_each_query(window, block):
    case, options = small_case(4, 2, 5, 5, 21, window)
    result = reference.tree_attention(
        *map(jnp.array, case.values()), scale=0.3, block=block, **options
    )
    np.testing.assert_allclose(result, dense(**case, scale=0.3, **options), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 50, 300])
@pytest.mark.parametrize("longest", [90, 200, 201, 400])
def test_a_long_cache_is_read_in_blocks_or_whole_to_the_same_result(longest, window):
    case, options = random_case(4, 2, 8, 3, 3, 400, [0, 70, longest], window=window)
    result = reference.tree_attention(*map(jnp.array, case.values()), scale=0.3, **options)
    np.testing.assert_allclose(result, dense(**case, scale=0.3, **options), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("count", [3, 6, 8])
def test_sequences_with_many_keys_attend_in_groups_to_the_same_result(count, window, monkeypatch):
    lengths = [0, 7, 21, 3, 20, 1, 9, 14][:count]
    case, options = random_case(4, 2, 8, 5, 5, 21, lengths, window=window)
    monkeypatch.setattr(reference, "WHOLE_BYTES", 0)
    monkeypatch.setattr(reference, "GROUP_BYTES", 3 * case["cache_k"][0].nbytes)
    assert reference.cpu_group(case["cache_k"]) == {3: 3, 6: 3, 8: 2}[count]
    monkeypatch.setattr(reference, "GROUP_BYTES", 1)
    assert reference.cpu_group(case["cache_k"]) == {3: 3, 6: 3, 8: 2}[count]  # never one
    attend = jax.jit(functools.partial(ops.attention, scale=0.3, window=window))
    arrays, rest = map(jnp.array, case.values()), options.get("positions")
    result = attend(*arrays, positions=rest)
    np.testing.assert_allclose(result, dense(**case, scale=0.3, **options), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize("block", [None, 8, 16, 64])
@pytest.mark.parametrize("page", [4, 8, 32])
def test_pages_anywhere_in_a_pool_are_one_prefix(page, block, window):
    case, options = small_case(4, 2, 5, 5, 21, window)
    paged, table = in_pages(case, page)
    arrays = map(jnp.array, paged.values())
    result = reference.tree_attention(*arrays, scale=0.3, block=block, table=table, **options)
    np.testing.assert_allclose(result, dense(**case, scale=0.3, **options), rtol=2e-5, atol=2e-6)


def test_bits_of_bfloat16_are_read_as_its_numbers():
    case, _ = random_case(4, 2, 8, 5, 5, 21, [0, 7, 21], dtype=ml_dtypes.bfloat16)
    paged, table = in_pages(case, 8)
    paged |= {name: paged[name].view(np.uint16) for name in ("cache_k", "cache_v")}
    result = ops.attention(*map(jnp.array, paged.values()), scale=0.3, table=table)
    np.testing.assert_allclose(result, dense(**case, scale=0.3), atol=2e-2)


@pytest.mark.parametrize("nodes", [5, 65])
def test_bits_are_widened_for_few_nodes_and_queries_are_rounded_for_many(nodes):
    case, _ = random_case(4, 2, 8, nodes, nodes, 21, [0, 7, 21], dtype=ml_dtypes.bfloat16)
    case["q"] = np.random.default_rng(1).standard_normal(case["q"].shape).astype(np.float32)
    expected = dense(**case, scale=0.3)
    paged, table = in_pages(case, 8)
    paged |= {name: paged[name].view(np.uint16) for name in ("cache_k", "cache_v")}
    result = ops.attention(*map(jnp.array, paged.values()), scale=0.3, table=table)
    error = np.abs(result - expected).max()
    assert error < 2e-6 if nodes <= reference.FEW_NODES else 1e-4 < error < 2e-2


def test_a_sequence_attends_to_its_pages_as_it_does_alone_to_the_bit():
    case, options = random_case(4, 2, 8, 5, 5, 40, [40, 0, 7, 21, 33], window=12)
    paged, table = in_pages(case, 8)
    arrays = list(map(jnp.array, paged.values()))
    attend = jax.jit(functools.partial(ops.attention, scale=0.3, window=12))
    together = attend(*arrays, table=jnp.array(table), positions=options["positions"])
    np.testing.assert_allclose(together, dense(**case, scale=0.3, **options), atol=2e-6)
    for row in range(5):
        mine = [x if len(x) != 5 else x[row : row + 1] for x in arrays]
        rest = dict(table=jnp.array(table)[row : row + 1])
        alone = attend(*mine, positions=options["positions"][row : row + 1], **rest)
        np.testing.assert_array_equal(alone[0], together[row])


@pytest.mark.parametrize("window", [None, 12])
def test_a_row_of_which_only_the_first_node_is_used_reads_its_pages_as_a_row_of_one_node(window):
    case, options = random_case(4, 2, 8, 5, 5, 40, [40, 0, 7, 21, 33], window=window)
    case["ancestors"] = trees.pack_bits(np.broadcast_to(np.tri(5, dtype=bool), (5, 5, 5)))
    paged, table = in_pages(case, 8)
    arrays, table = {name: jnp.array(x) for name, x in paged.items()}, jnp.array(table)
    attend = jax.jit(functools.partial(ops.attention, scale=0.3, window=window))
    positions = options.get("positions")
    first_only = np.array([True, False, True, False, True])
    every = attend(*arrays.values(), table=table, positions=positions)
    result = attend(*arrays.values(), table=table, positions=positions, first_only=first_only)
    np.testing.assert_array_equal(result[~first_only], every[~first_only])
    np.testing.assert_allclose(result[:, :, 0], every[:, :, 0], rtol=2e-5, atol=2e-6)
    # Their other nodes attend to the tree alone.
    arrays["length"] = jnp.zeros_like(arrays["length"])
    alone = attend(*arrays.values(), table=table, positions=positions)
    np.testing.assert_array_equal(result[first_only][:, :, 1:], alone[first_only][:, :, 1:])


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(("heads", "kv_heads", "nodes", "parts"), [(4, 2, 96, 3), (2, 2, 128, 2)])
def test_parts_of_the_nodes_attend_to_those_before_them(heads, kv_heads, nodes, parts, window):
    case, options = random_case(heads, kv_heads, 8, nodes, nodes, 70, [0, 33, 70], window=window)
    earlier = np.random.default_rng(2).random((3, nodes, nodes)) < 0.3
    case["ancestors"] = trees.pack_bits(np.tril(earlier, -1) | np.eye(nodes, dtype=bool))
    expected = dense(**case, scale=0.3, **options)
    arrays = list(map(jnp.array, case.values()))
    attend = functools.partial(reference.tree_attention, scale=0.3, parts=parts, **options)
    np.testing.assert_allclose(attend(*arrays), expected, rtol=2e-5, atol=2e-6)
    paged, table = in_pages(case, 8)
    paged = map(jnp.array, paged.values())
    np.testing.assert_allclose(attend(*paged, table=table), expected, rtol=2e-5, atol=2e-6)


def test_a_cpu_reads_a_long_prompt_in_parts(monkeypatch):
    case, _ = random_case(2, 1, 8, 128, 128, 24, [0, 24])
    case["ancestors"] = trees.pack_bits(np.broadcast_to(np.tri(128, dtype=bool), (2, 128, 128)))
    monkeypatch.setattr(reference, "PART_NODES", 32)
    for paged in (False, True):
        arrays, table = in_pages(case, 8) if paged else (case, None)
        result = ops.attention(*map(jnp.array, arrays.values()), scale=0.3, table=table)
        np.testing.assert_allclose(result, dense(**case, scale=0.3), rtol=2e-5, atol=2e-6)


def test_scores_of_many_nodes_over_a_long_cache_are_never_held_all_at_once():
    case, _ = random_case(4, 2, 8, 256, 256, 8192, [8192])
    attend = jax.jit(functools.partial(reference.tree_attention, scale=0.3))
    taken = attend.lower(*case.values()).compile().memory_analysis().temp_size_in_bytes
    assert taken < 4 * case["q"][..., 0].size * 8192


@pytest.mark.parametrize("block", [None, 4])
def test_a_soft_cap_bends_the_scores_before_they_are_masked(block):
    case, _ = small_case(4, 2, 5, 40, 21)
    result = reference.tree_attention(
        *map(jnp.array, case.values()), scale=2.0, soft_cap=1.5, block=block
    )
    np.testing.assert_allclose(result, dense(**case, scale=2.0, soft_cap=1.5), rtol=2e-5, atol=2e-6)
    assert np.abs(result - dense(**case, scale=2.0)).max() > 0.1


def test_without_a_cache_the_tree_attends_to_itself():
    case, _ = small_case(4, 2, 5, 5, 1)
    case["length"][:] = 0
    alone = {**case, "cache_k": None, "cache_v": None}
    result = reference.tree_attention(*alone.values(), scale=0.3)
    np.testing.assert_allclose(result, dense(**case, scale=0.3), rtol=2e-5, atol=2e-6)


def test_an_implementation_that_is_not_known_is_refused():
    case, _ = small_case(2, 2, 1, 1, 4)
    with pytest.raises(ValueError, match="implementation='cudnn' is not known"):
        ops.attention(*case.values(), scale=1.0, implementation="cudnn")


def test_a_mask_that_is_not_packed_into_words_is_refused():
    case, _ = small_case(2, 2, 3, 3, 4)
    case["ancestors"] = trees.unpack_bits(case["ancestors"], 3)
    with pytest.raises(ValueError, match=r"ancestors is bool\[3, 3, 3\].*need uint32\[3, 3, 1\]"):
        ops.attention(*case.values(), scale=1.0)


def test_a_window_without_positions_is_refused():
    with pytest.raises(ValueError, match="window=3 needs the positions"):
        ops.attention(*small_case(2, 2, 3, 3, 4)[0].values(), scale=1.0, window=3)


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


def test_a_weight_that_is_stored_transposed_is_the_same_weight_and_rows_are_equal_to_the_bit():
    rng = np.random.default_rng(0)
    weight = jnp.array(rng.standard_normal((64, 96)), jnp.bfloat16)
    x = jnp.array(rng.standard_normal((70, 64)), jnp.float32)
    stored = Transposed(weight.T)
    assert (stored.shape, stored.dtype) == (weight.shape, weight.dtype)
    full = ops.linear(x, stored)
    np.testing.assert_allclose(full, ops.linear(x, weight), rtol=1e-5, atol=1e-5)
    back = ops.linear(full, stored, transposed=True)
    np.testing.assert_allclose(
        back, ops.linear(full, weight, transposed=True), rtol=1e-4, atol=1e-3
    )
    for count in (1, 3, 8, 33):
        np.testing.assert_array_equal(ops.linear(x[:count], stored), full[:count])
