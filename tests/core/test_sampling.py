"""Sampling filters, the addresses of noise, and drawing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from jspec.core import sampling
from jspec.core.types import Sampling
from tests.fakes import settings

process_logits = jax.jit(sampling.process_logits)
draw = jax.jit(lambda distribution, coarse, fine=0: sampling.draw(distribution, pair(coarse, fine)))
target_noise = jax.jit(sampling.target_noise, static_argnums=2)
round_noise = jax.jit(sampling.round_noise, static_argnums=(2, 3))
draw_target = jax.jit(sampling.draw_target)

pair = lambda coarse, fine: jnp.stack(jnp.broadcast_arrays(coarse, fine), -1)
PURPOSES = (sampling.DRAFT, sampling.ACCEPT, sampling.RESIDUAL)


# ---------------------------------------------------------------------------------------- filters


def reference_process(row, temperature=1.0, min_p=0.0, top_k=0, top_p=1.0):
    """The distribution of one sequence in float64 NumPy: temperature, min_p, top-k, then top-p."""
    row = np.where(np.isnan(row), -np.inf, np.asarray(row, np.float64))
    if temperature == 0:
        return np.eye(len(row))[np.argmax(row)]
    probs = scipy.special.softmax(row / temperature)
    probs = np.where(probs >= min_p * probs.max(), probs, 0)
    probs /= probs.sum()
    if top_k > 0:
        largest = np.sort(probs)[::-1][: min(top_k, len(row))]
        probs = np.where(probs >= largest[-1], probs, 0)
        probs /= probs.sum()
    if top_p < 1:
        order = np.argsort(-probs, kind="stable")
        above = np.cumsum(probs[order]) - probs[order]
        probs = np.where(probs >= probs[order][above < top_p][-1], probs, 0)
        probs /= probs.sum()
    return probs


def distribution(logits, sampled: Sampling):
    """The distribution that ``process_logits`` makes of logits [B, V]."""
    return scipy.special.softmax(
        np.asarray(process_logits(jnp.asarray(logits), sampled), np.float64), -1
    )


def grid_of_settings():
    """Every combination of a few values of the four filters, as columns."""
    values = [(0.0, 0.6, 1.0, 1.7), (0.0, 0.1, 0.5), (0, 1, 5, 10_000), (0.001, 0.3, 0.9, 1.0)]
    return [column.ravel() for column in np.meshgrid(*values, indexing="ij")]


def test_every_combination_of_filters_gives_the_distribution_of_the_reference():
    columns = grid_of_settings()
    logits = 2 * np.random.default_rng(0).normal(size=(len(columns[0]), 40)).astype(np.float32)
    actual = distribution(logits, settings(len(logits), *columns))
    wanted = [reference_process(*row) for row in zip(logits, *columns, strict=True)]
    np.testing.assert_allclose(actual, wanted, atol=2e-6)
    np.testing.assert_array_equal(actual > 0, np.array(wanted) > 0)


def test_filters_agree_with_transformers_in_the_order_of_vllm():
    torch = pytest.importorskip("torch")
    from transformers.generation import logits_process as hf

    logits = 2 * np.random.default_rng(1).normal(size=(50, 100)).astype(np.float32)
    scores = torch.tensor(logits)
    for processor in (
        hf.TemperatureLogitsWarper(0.7),
        hf.MinPLogitsWarper(0.02),
        hf.TopKLogitsWarper(20),
        hf.TopPLogitsWarper(0.85),
    ):
        scores = processor(None, scores)
    actual = process_logits(logits, settings(50, 0.7, 0.02, 20, 0.85))
    np.testing.assert_array_equal(np.isneginf(actual), torch.isinf(scores).numpy())
    np.testing.assert_allclose(
        scipy.special.softmax(actual, -1), torch.softmax(scores, -1).numpy(), atol=1e-6
    )


def test_top_p_is_applied_after_temperature():
    # Sharpened to T = 0.5 the first token alone holds 0.8; at T = 1 it would take two.
    actual = distribution(np.log([[0.6, 0.25, 0.15]]), settings(1, 0.5, top_p=0.7))
    np.testing.assert_allclose(actual, [[1, 0, 0]])


def test_top_p_counts_the_mass_that_top_k_leaves():
    # Of (.4, .3, .2, .1), top-k 2 leaves (.57, .43): half is then reached by the first token.
    actual = distribution(np.log([[0.4, 0.3, 0.2, 0.1]]), settings(1, 1.0, top_k=2, top_p=0.5))
    np.testing.assert_allclose(actual, [[1, 0, 0, 0]])


def test_tokens_that_tie_with_the_last_one_stay():
    tied = np.array([[2.0, 1.0, 1.0, 0.0]], np.float32)
    assert (distribution(tied, settings(1, 1.0, top_k=2)) > 0).tolist() == [
        [True, True, True, False]
    ]
    assert (distribution(tied, settings(1, 1.0, top_p=0.6)) > 0).tolist() == [
        [True, True, True, False]
    ]
    assert (distribution(np.zeros((1, 4)), settings(1, 1.0, min_p=1.0)) > 0).all()


def test_a_tiny_top_p_keeps_one_token_and_a_large_top_k_keeps_all():
    logits = np.random.default_rng(2).normal(size=(1, 9)).astype(np.float32)
    assert (distribution(logits, settings(1, 1.0, top_p=1e-9)) > 0).sum() == 1
    assert (distribution(logits, settings(1, 1.0, top_k=1000)) > 0).all()


VALUES = st.sampled_from([-np.inf, -2.5, -1.0, -1e-37, -0.0, 0.0, 1e-37, 0.5, 0.75, 3.0, 80.0])


@hypothesis_settings(max_examples=60, deadline=None)
@given(st.lists(VALUES, min_size=24, max_size=24), st.integers(0, 14), st.floats(1e-37, 1.0))
def test_thresholds_without_sorting_are_those_of_sorted_logits(values, top_k, top_p):
    logits = np.array(values, np.float32).reshape(2, 12)
    if np.isneginf(logits).all(-1).any():
        return
    expected = []
    for row in logits:
        ordered = np.sort(row)[::-1]
        probs = scipy.special.softmax(ordered.astype(np.float64))
        above = np.concatenate([[0], np.cumsum(probs)])[: len(row)]
        if np.abs(above - top_p).min() < 1e-6:  # float32 decides
            return
        by_k = row >= ordered[min(top_k or 12, 12) - 1]
        expected.append((by_k, row >= ordered[above < top_p].min()))
    k, p = jnp.full((2, 1), top_k), jnp.full((2, 1), top_p, jnp.float32)
    by_k, by_p = np.stack(expected, 1)
    np.testing.assert_array_equal(KEEP_TOP_K(jnp.asarray(logits), k), by_k)
    np.testing.assert_array_equal(KEEP_TOP_P(jnp.asarray(logits), p), by_p)


KEEP_TOP_K, KEEP_TOP_P = jax.jit(sampling.keep_top_k), jax.jit(sampling.keep_top_p)


def test_filters_sort_nothing_and_search_only_if_a_sequence_uses_them():
    sampled = settings(2, 0.7, top_k=5, top_p=0.9)
    program = jax.make_jaxpr(sampling.process_logits)(jnp.zeros((2, 3, 64)), sampled)
    outer = [equation.primitive.name for equation in program.eqns]
    assert outer.count("cond") == 2
    assert not {"while", "scan", "sort"} & set(outer)
    assert "sort" not in str(program)


def test_greedy_sequences_are_deterministic_at_their_first_maximum_beside_sampled_ones():
    logits = np.array([[1.0, 3.0, 3.0], [1.0, 3.0, 3.0]], np.float32)
    actual = np.asarray(process_logits(logits, settings(2, np.array([0.0, 1.0]))))
    assert actual[0].tolist() == [-np.inf, 0, -np.inf]
    np.testing.assert_array_equal(actual[1], logits[1])


def test_a_greedy_sequence_ignores_its_other_filters():
    logits = np.random.default_rng(3).normal(size=(1, 9)).astype(np.float32)
    actual = distribution(logits, settings(2, np.array([0.0, 1.0]), 0.5, 3, 0.5))[0]
    np.testing.assert_array_equal(actual, np.eye(9)[logits[0].argmax()])


def test_nan_counts_as_impossible_and_an_impossible_sequence_still_draws_an_id_in_range():
    row = np.array([[0.0, np.nan, 1.0]], np.float32)
    assert distribution(row, settings(1, 1.0))[0, 1] == 0
    assert np.asarray(process_logits(row, settings(1, 0.0))).argmax() == 2
    for fill in (np.nan, -np.inf):
        hopeless = jnp.full((1, 70), fill)
        for uniform in (0.0, 0.5, 1 - 2**-24):
            assert 0 <= int(draw(hopeless, jnp.array([uniform]))[0]) < 70


def test_logits_of_a_narrow_dtype_are_widened_and_float64_stays():
    assert process_logits(jnp.zeros((1, 4), jnp.bfloat16), settings(1)).dtype == jnp.float32
    with jax.enable_x64(True):
        assert process_logits(jnp.zeros((1, 4), jnp.float64), settings(1)).dtype == jnp.float64


def test_nodes_of_a_sequence_share_its_settings():
    logits = np.random.default_rng(4).normal(size=(2, 3, 9)).astype(np.float32)
    sampled = settings(2, np.array([0.5, 2.0]), top_k=np.array([2, 5]))
    actual = process_logits(logits, sampled)
    for node in range(3):
        np.testing.assert_array_equal(actual[:, node], process_logits(logits[:, node], sampled))


# ------------------------------------------------------------------------------------------- draw


def boundaries(log_weights, tokens, dtype, steps):
    """The largest u, up to 2**-steps, at which ``draw`` gives at most each of ``tokens``."""
    rows = jnp.broadcast_to(jnp.asarray(log_weights, dtype), (len(tokens), len(log_weights)))
    low, high = np.zeros(len(tokens)), np.ones(len(tokens))
    for _ in range(steps):
        middle = (low + high) / 2
        below = np.asarray(draw(rows, jnp.asarray(middle, dtype))) <= tokens
        low, high = np.where(below, middle, low), np.where(below, high, middle)
    return low


@pytest.mark.parametrize("vocab_size", [3, 64, 257])
def test_each_token_is_drawn_by_a_measure_of_uniforms_equal_to_its_probability(vocab_size):
    log_weights = 2 * np.random.default_rng(vocab_size).normal(size=vocab_size)
    log_weights[::7] = -np.inf
    wanted = np.cumsum(scipy.special.softmax(log_weights))
    tokens = np.arange(vocab_size)
    with jax.enable_x64(True):
        exact = boundaries(log_weights, tokens, jnp.float64, 52)
    np.testing.assert_allclose(exact, wanted, atol=1e-12)
    rounded = boundaries(log_weights, tokens, jnp.float32, 24)
    np.testing.assert_allclose(rounded, wanted, atol=1e-6)


def test_drawing_is_exact_to_a_millionth_at_a_vocabulary_of_150_thousand():
    rng = np.random.default_rng(5)
    log_weights = 3 * rng.normal(size=150_001)
    tokens = np.sort(rng.choice(150_001, 8, replace=False))
    wanted = np.cumsum(scipy.special.softmax(log_weights))[tokens]
    np.testing.assert_allclose(boundaries(log_weights, tokens, jnp.float32, 24), wanted, atol=1e-6)


def test_tokens_between_two_steps_of_a_coarse_uniform_are_drawn_as_often_as_their_probability():
    # Two tokens share a step of 2**-24, as most of a vocabulary of 150k do if it is peaked.
    weights = jnp.full(4097, 2**-25).at[0].set(1 - 2**-13)
    steps, parts = np.arange(512), np.arange(8) / 8 * 2**-24
    coarse = jnp.asarray(1 - 2**-13 + (700 + steps) * 2**-24, jnp.float32)
    rows = jnp.broadcast_to(jnp.log(weights), (512, 4097))
    drawn = np.stack([draw(rows, coarse, jnp.float32(part)) for part in parts], 1)
    assert (np.diff(drawn.ravel()) >= 0).all()
    counts = np.bincount(drawn.ravel())[drawn.min() + 1 : drawn.max()]
    assert len(counts) == pytest.approx(1024, abs=8) and (np.abs(counts - 4) <= 1).mean() > 0.98


def test_the_uniforms_that_draw_a_token_are_uniform_on_both_scales():
    keys, positions = keys_of(5000), jnp.arange(5000, dtype=jnp.int32)
    actual = round_noise(keys, positions, sampling.DRAFT, 8)
    coarse, fine = np.asarray(actual, np.float64).reshape(-1, 2).T
    assert (coarse * 2**24 % 1 == 0).all() and 0 <= fine.min() <= fine.max() < 2**-24
    for part in (coarse, fine * 2**24):
        assert scipy.stats.kstest(part, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(coarse, fine)[0, 1]) < 5 / len(coarse) ** 0.5


def test_a_token_without_weight_is_never_drawn_not_even_next_to_a_boundary():
    # Parallel running sums are rounded, so they may rise at a weight of 0. A draw by them alone
    # returns such a token for about one in a thousand of these uniforms.
    rng = np.random.default_rng(6)
    shape = (8_000, 500)
    log_weights = np.where(rng.random(shape) < 0.6, -np.inf, 2 * rng.normal(size=shape))
    log_weights = log_weights.astype(np.float32)
    edges = np.cumsum(scipy.special.softmax(log_weights.astype(np.float64), -1), -1)
    rows = np.arange(len(edges))
    for direction in (0, 1):
        edge = edges[rows, rng.integers(0, shape[1], len(edges))].astype(np.float32)
        uniform = np.minimum(np.nextafter(edge, np.float32(direction)), np.float32(1 - 2**-24))
        assert np.isfinite(log_weights[rows, draw(log_weights, uniform)]).all()


def test_the_ends_of_the_unit_interval_draw_the_first_and_the_last_token_of_positive_weight():
    log_weights = jnp.full((2, 150), -jnp.inf).at[:, 70:140].set(0.0)
    assert draw(log_weights, jnp.array([0.0, 1 - 2**-24])).tolist() == [70, 139]


@hypothesis_settings(max_examples=20, deadline=None, derandomize=True)
@given(
    st.lists(st.floats(-80, 80) | st.just(-np.inf), min_size=70, max_size=70),
    st.floats(0, 1, exclude_max=True, width=32),
)
def test_a_draw_always_has_positive_weight(log_weights, uniform):
    row = np.array(log_weights, np.float32)
    if np.isfinite(row).any():
        token = int(draw(row[None], jnp.array([uniform], jnp.float32))[0])
        assert row[token] > -np.inf


# ------------------------------------------------------------------------------------------ noise


def keys_of(count, seed=0):
    return jax.random.split(jax.random.key(seed), count)


def test_the_noise_of_a_sequence_is_the_same_alone_in_a_batch_and_permuted():
    keys, positions = keys_of(6), jnp.arange(6, dtype=jnp.int32) * 3
    order = np.random.default_rng(0).permutation(6)
    for noise in (
        lambda keys, positions: target_noise(keys, positions[:, None], 11),
        lambda keys, positions: round_noise(keys, positions, sampling.ACCEPT, 4),
    ):
        batch = np.asarray(noise(keys, positions))
        np.testing.assert_array_equal(noise(keys[order], positions[order]), batch[order])
        np.testing.assert_array_equal(noise(keys[2:3], positions[2:3]), batch[2:3])


def test_target_noise_depends_on_the_position_and_not_on_the_node_that_stands_there():
    keys = keys_of(2)
    chain = target_noise(keys, jnp.array([[5, 6, 7], [9, 10, 11]]), 8)
    bush = target_noise(keys, jnp.array([[5, 6, 6], [9, 9, 10]]), 8)
    np.testing.assert_array_equal(chain[0, 1], bush[0, 1])
    np.testing.assert_array_equal(chain[0, 1], bush[0, 2])
    np.testing.assert_array_equal(chain[1, 1], bush[1, 2])


def test_the_first_uniforms_of_a_round_do_not_depend_on_their_number():
    keys, roots = keys_of(3), jnp.array([0, 4, 8])
    few = round_noise(keys, roots, sampling.ACCEPT, 2)
    many = round_noise(keys, roots, sampling.ACCEPT, 7)
    np.testing.assert_array_equal(few, many[:, :2])


def test_no_two_addresses_share_noise():
    keys = keys_of(3)
    seen = []
    for root in range(20):
        position = jnp.full(3, root, jnp.int32)
        seen += [round_noise(keys, position, purpose, 6)[..., 0] for purpose in PURPOSES]
        gumbel = np.asarray(target_noise(keys, position, 6), np.float64)
        seen.append(np.exp(-np.exp(-gumbel)))
    values = np.sort(np.concatenate([np.asarray(part, np.float64).ravel() for part in seen]))
    assert np.diff(values).min() > 1e-9  # also for the same uniform behind two kinds of noise


def test_round_noise_is_uniform_and_target_noise_is_gumbel():
    keys, positions = keys_of(2000), jnp.arange(2000, dtype=jnp.int32)
    for purpose in PURPOSES:
        uniform = np.asarray(round_noise(keys, positions, purpose, 50)[..., 0])
        assert uniform.min() >= 0 and uniform.max() < 1
        assert scipy.stats.kstest(uniform.ravel(), "uniform").pvalue > 1e-3
    gumbel = np.asarray(target_noise(keys, positions, 50))
    assert np.isfinite(gumbel).all()
    assert scipy.stats.kstest(gumbel.ravel(), "gumbel_r").pvalue > 1e-3
    # The far tail, which decides for improbable tokens.
    tail = np.asarray(target_noise(keys_of(1, 1), jnp.zeros(1, jnp.int32), 4_000_000))
    for bound in (8, 11):
        expected = 4e6 * -np.expm1(-np.exp(-bound))
        assert abs((tail > bound).sum() - expected) < 5 * expected**0.5


def test_noise_of_different_purposes_positions_and_ranks_is_uncorrelated():
    keys, positions = keys_of(20_000), jnp.full(20_000, 3, jnp.int32)
    columns = [
        round_noise(keys, positions + offset, p, 2)[..., 0] for p in PURPOSES for offset in (0, 1)
    ]
    target = jnp.exp(-jnp.exp(-target_noise(keys, positions, 2)))
    correlation = np.corrcoef(np.concatenate([*columns, target], 1).T)
    assert np.abs(correlation - np.eye(len(correlation))).max() < 5 / 20_000**0.5


def test_the_target_draws_from_its_distribution():
    probs = np.array([0.5, 0.3, 0.15, 0.05, 0.0])
    keys, positions = keys_of(1), jnp.arange(200_000, dtype=jnp.int32)[None]
    logits = jnp.broadcast_to(jnp.log(jnp.array(probs)), (1, 200_000, 5))
    drawn = np.bincount(
        np.asarray(draw_target(logits, settings(1), keys, positions))[0], minlength=5
    )
    assert drawn[4] == 0
    assert scipy.stats.chisquare(drawn[:4], 200_000 * probs[:4]).pvalue > 1e-3


def test_a_greedy_sequence_draws_its_maximum_with_any_noise():
    logits = jnp.tile(jnp.array([[0.0, 0.1, 0.05]]), (2, 1))
    sampled = settings(2, np.array([0.0, 1.0]))
    for position in range(20):
        drawn = draw_target(
            process_logits(logits, sampled), sampled, keys_of(2), jnp.full(2, position)
        )
        assert drawn[0] == 1


# --------------------------------------------------------------------------------------- residual


def residual(p, q):
    """The normalised residual of two distributions, in float64."""
    with jax.enable_x64(True), np.errstate(divide="ignore"):
        logs = sampling.log_residual(jnp.log(jnp.array(p)), jnp.log(jnp.array(q)))
        return scipy.special.softmax(np.asarray(logs))


def test_the_residual_is_the_positive_part_of_p_minus_q():
    np.testing.assert_allclose(residual([0.5, 0.3, 0.2], [0.2, 0.5, 0.3]), [1, 0, 0])
    np.testing.assert_allclose(residual([0.5, 0.4, 0.1], [0.3, 0.3, 0.4]), [2 / 3, 1 / 3, 0])


def test_the_residual_of_a_deterministic_draft_is_p_without_it():
    np.testing.assert_allclose(residual([0.5, 0.3, 0.2], [0, 1, 0]), [5 / 7, 0, 2 / 7])


def test_an_empty_residual_is_p():
    np.testing.assert_allclose(residual([0.5, 0.3, 0.2], [0.5, 0.3, 0.2]), [0.5, 0.3, 0.2])
    np.testing.assert_allclose(residual([0, 1, 0], [0, 1, 0]), [0, 1, 0])


def test_disjoint_distributions_leave_all_of_p_and_tokens_both_exclude_stay_excluded():
    np.testing.assert_allclose(residual([0.7, 0.3, 0, 0], [0, 0, 1, 0]), [0.7, 0.3, 0, 0])


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("vocab", "count"), [(3, 3), (1000, 1), (1000, 3), (1024, 4), (5000, 8)])
def test_the_largest_values_come_in_the_order_of_a_stable_sort(vocab, count, dtype):
    values = np.random.default_rng(vocab).integers(-3, 60, (40, vocab)).astype(np.float32)
    values[::4, 1:-1] = -np.inf  # fewer numbers than asked for
    best, index = jax.jit(sampling.top_k, static_argnums=1)(jnp.array(values, dtype), count)
    wanted = np.argsort(-values, -1, kind="stable")[:, :count]
    np.testing.assert_array_equal(index, wanted)
    np.testing.assert_array_equal(best, np.take_along_axis(values, wanted, -1))
    np.testing.assert_array_equal(sampling.argmax(jnp.array(values, dtype)), wanted[:, 0])
