"""Sampling filters, the addresses of noise, and drawing."""

import functools
import itertools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.special
import scipy.stats
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from jax import lax

from jspec.core import filters, sampling
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


@hypothesis_settings(max_examples=60)
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
    for keep_top_k, keep_top_p in (KEEP, KEEP_ON_A_GPU):
        np.testing.assert_array_equal(keep_top_k(jnp.asarray(logits), k), by_k)
        np.testing.assert_array_equal(keep_top_p(jnp.asarray(logits), p), by_p)


def filters_compiled():
    """Return both filters, compiled for the arguments above."""
    logits, k, p = (
        jax.ShapeDtypeStruct(shape, dtype)
        for shape, dtype in (((2, 12), np.float32), ((2, 1), np.int32), ((2, 1), np.float32))
    )
    by_k, by_p = jax.jit(filters.keep_top_k), jax.jit(filters.keep_top_p)
    return by_k.lower(logits, k).compile(), by_p.lower(logits, p).compile()


KEEP = filters_compiled()
with mock.patch.object(lax, "platform_dependent", lambda *x, cuda, **_: cuda(*x)):
    KEEP_ON_A_GPU = filters_compiled()


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


def drawn_tokens(log_weights, count, rows, dtype=jnp.float32):
    """Tokens of ``count`` draws from log-weights [V], with noise of many sequences and roots."""
    shape = (rows, len(log_weights))
    distribution = jnp.broadcast_to(jnp.asarray(log_weights, dtype), shape)
    keys, roots = keys_of(rows, seed=len(log_weights)), jnp.arange(rows)
    return np.concatenate(
        [
            DRAW_AT(distribution, keys, roots + rows * batch, purpose)
            for batch, purpose in enumerate([sampling.DRAFT, sampling.RESIDUAL] * (count // rows))
        ]
    )


@functools.partial(jax.jit, static_argnums=3)
def DRAW_AT(distribution, keys, roots, purpose):
    return sampling.draw(distribution, sampling.round_noise(keys, roots, purpose, 1)[:, 0])


def assert_tokens_are_of(tokens, log_weights, group):
    """Chi-square of the tokens, counted in the ``group`` [V] of each; rare groups are left out."""
    probs = scipy.special.softmax(np.asarray(log_weights, np.float64))
    assert (probs[tokens] > 0).all()
    expected = np.bincount(group, probs) * len(tokens)
    observed = np.bincount(group[tokens], minlength=len(expected))
    used = expected > 5
    expected, observed = expected[used], observed[used]
    expected *= observed.sum() / expected.sum()
    assert scipy.stats.chisquare(observed, expected).pvalue > 1e-3


@pytest.mark.parametrize("vocab_size", [3, 64, sampling.DRAW_BLOCK + 1])
def test_each_token_is_drawn_as_often_as_its_probability(vocab_size):
    log_weights = 2 * np.random.default_rng(vocab_size).normal(size=vocab_size)
    log_weights[1::7] = -np.inf
    tokens = drawn_tokens(log_weights, 100_000 if vocab_size < 100 else 8000, 1000)
    assert_tokens_are_of(tokens, log_weights, np.arange(vocab_size))


def test_tokens_of_150_thousand_are_drawn_as_often_as_their_probability():
    log_weights = 3 * np.random.default_rng(5).normal(size=150_001)
    log_weights[40_000:60_000] = -np.inf
    tokens = drawn_tokens(log_weights, 1600, 40)
    assert_tokens_are_of(tokens, log_weights, np.arange(150_001) // sampling.DRAW_BLOCK)
    likelihood = np.digitize(log_weights, [-3, 0, 2, 4, 6, 8, 9, 10, 11])
    assert_tokens_are_of(tokens, log_weights, likelihood)


def test_draws_in_float64_have_the_same_noise():
    log_weights = np.random.default_rng(7).normal(size=5000)
    narrow = drawn_tokens(log_weights, 40, 20)
    with jax.enable_x64(True):
        np.testing.assert_array_equal(drawn_tokens(log_weights, 40, 20, jnp.float64), narrow)


def test_last_bits_of_log_weights_change_a_draw_at_near_ties_only():
    # One half of the vocabulary rounds up, as another tile of a matmul may.
    rng, count, vocab = np.random.default_rng(8), 1000, 4096
    program = 500 + 0.7 * rng.standard_normal((count, vocab), np.float32)
    other = np.where(np.arange(vocab) < vocab // 2, np.nextafter(program, np.float32(999)), program)
    keys, roots = keys_of(count), jnp.arange(count)
    one, another = (DRAW_AT(jnp.asarray(x), keys, roots, sampling.DRAFT) for x in (program, other))
    parted = np.flatnonzero(one != another)
    assert len(parted) <= 1  # an inverse CDF over running sums changes 16
    uniforms = round_noise(keys, roots, sampling.DRAFT, 1)[:, 0]
    assert (sampling.draw_gap(jnp.asarray(program), uniforms, another) < 2e-4).all()


def test_the_gap_of_a_token_is_what_its_weight_and_that_of_its_block_lack():
    rng, vocab = np.random.default_rng(9), 3 * sampling.DRAW_BLOCK
    log_weights = jnp.asarray(rng.standard_normal((20, vocab), np.float32))
    uniforms = round_noise(keys_of(20), jnp.arange(20), sampling.RESIDUAL, 1)[:, 0]
    drawn = sampling.draw(log_weights, uniforms)
    assert (sampling.draw_gap(log_weights, uniforms, drawn) == 0).all()
    same_block = drawn ^ 1
    gap = sampling.draw_gap(log_weights, uniforms, same_block)
    assert (gap > 0).all()
    for factor, expected in ((0.99, drawn), (1.01, same_block)):
        raised = log_weights.at[jnp.arange(20), same_block].add(factor * gap)
        np.testing.assert_array_equal(sampling.draw(raised, uniforms), expected)
    other = (drawn + sampling.DRAW_BLOCK) % vocab
    assert (sampling.draw_gap(log_weights, uniforms, other) > 0).all()
    masked = log_weights.at[jnp.arange(20), other].set(-jnp.inf)
    assert jnp.isposinf(sampling.draw_gap(masked, uniforms, other)).all()


def test_the_uniforms_that_draw_a_token_are_uniform_on_both_scales():
    keys, positions = keys_of(5000), jnp.arange(5000, dtype=jnp.int32)
    actual = round_noise(keys, positions, sampling.DRAFT, 8)
    coarse, fine = np.asarray(actual, np.float64).reshape(-1, 2).T
    assert (coarse * 2**24 % 1 == 0).all() and 0 <= fine.min() <= fine.max() < 2**-24
    for part in (coarse, fine * 2**24):
        assert scipy.stats.kstest(part, "uniform").pvalue > 1e-3
    assert abs(np.corrcoef(coarse, fine)[0, 1]) < 5 / len(coarse) ** 0.5


def test_a_token_without_weight_is_never_drawn():
    rng, shape = np.random.default_rng(6), (500, 5000)
    log_weights = np.where(rng.random(shape) < 0.6, -np.inf, 2 * rng.normal(size=shape))
    log_weights[:, 2000:4200] = -np.inf  # a block of which no token has weight
    tokens = DRAW_AT(
        jnp.asarray(log_weights, jnp.float32), keys_of(500), jnp.arange(500), sampling.DRAFT
    )
    assert np.isfinite(log_weights[np.arange(500), tokens]).all()


def test_the_only_token_with_weight_is_drawn_wherever_it_stands():
    only = jnp.array([0, 1, 2047, 2048, 4095, 4096, 4099])
    for weight in (0.0, -1e30, 1e30):
        log_weights = jnp.where(jnp.arange(4100) == only[:, None], weight, -jnp.inf)
        tokens = DRAW_AT(log_weights, keys_of(7), jnp.arange(7), sampling.DRAFT)
        np.testing.assert_array_equal(tokens, only)


@pytest.mark.parametrize("vocab", [70, 5000])
@pytest.mark.parametrize("fill", [np.nan, -np.inf, np.inf])
def test_a_row_without_a_distribution_draws_an_id_in_range(vocab, fill):
    log_weights = jnp.full((20, vocab), fill)
    tokens = DRAW_AT(log_weights, keys_of(20), jnp.arange(20), sampling.DRAFT)
    assert (tokens >= 0).all() and (tokens < vocab).all()


def test_draws_of_other_purposes_and_ranks_are_independent():
    keys, roots = keys_of(4000), jnp.arange(4000, dtype=jnp.int32)
    uniforms = [round_noise(keys, roots, p, 2)[:, i] for p in PURPOSES for i in (0, 1)]
    flat = jnp.zeros((4000, 16))
    columns = np.array([sampling.draw(flat, uniform) for uniform in uniforms])
    for one, other in itertools.combinations(columns, 2):
        counts = np.bincount(16 * one + other, minlength=256)
        assert scipy.stats.chisquare(counts).pvalue > 1e-4


@hypothesis_settings(max_examples=20, derandomize=True)
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
