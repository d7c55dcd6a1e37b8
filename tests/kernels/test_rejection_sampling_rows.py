"""The two passes of the rejection sampling kernels over entire vocabularies of real models."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu
from scipy.special import softmax

from jspec.core import sampling
from jspec.kernels.rejection_sampling import pallas_gpu, pallas_tpu
from jspec.kernels.rejection_sampling.distributions import (
    DraftDistribution,
    Filters,
    Refusal,
    TargetDistribution,
)
from jspec.kernels.rejection_sampling.shapes import ALL_FILTERS, VOCABULARIES
from tests.kernels.drafts import settings
from tests.kernels.test_rejection_sampling_kernels import (
    SIMULATED,
    needs_gpu_interpreter,
    races_on_tpu,
)

ROWS = 3
LONG = pallas_tpu.BLOCKS._replace(chunk=16384, segment=16384)  # few blocks per vocabulary
each_vocabulary = pytest.mark.parametrize("vocab", VOCABULARIES.values(), ids=VOCABULARIES.keys())


def rows_of(vocab, coarse):
    """Return raw logits [3, V] with many ties, and the filters of the rows."""
    rng = np.random.default_rng(vocab)
    logits = 3 * rng.standard_normal((ROWS, vocab))
    logits = jnp.array(np.round(logits * 8) / 8, jnp.bfloat16 if coarse else jnp.float32)
    return logits, settings(list(range(ROWS)), ALL_FILTERS)


def assert_distributions_are_processed_alike(distributions_of, vocab):
    logits, filters = rows_of(vocab, coarse=vocab > 40000)
    distribution = distributions_of(
        logits,
        Filters(**filters.values, names=filters.names),
    )
    processed = np.array(sampling.process_logits(logits[:, None], filters)[:, 0], np.float64)
    selected = np.array(logits.astype(jnp.float32) >= distribution.floor[:, None])
    greedy = np.array(filters.temperature) == 0
    np.testing.assert_array_equal(selected[~greedy], np.isfinite(processed[~greedy]))
    log_total = np.log(np.exp(processed).sum(-1))
    result = distribution.peak / distribution.temperature + distribution.log_total
    np.testing.assert_allclose(result[~greedy], log_total[~greedy], rtol=1e-5)
    np.testing.assert_array_equal(distribution.only[greedy], processed[greedy].argmax(-1))
    assert (distribution.only[~greedy] == -1).all()


def assert_masses_are_sums(masses_of, vocab, segment):
    """Refuse a drawn and a deterministic token, over rows in another order."""
    rng = np.random.default_rng(vocab)
    x, y = (rng.standard_normal((ROWS, vocab)).astype(np.float32) for _ in range(2))
    narrow = jnp.array(y, jnp.bfloat16)
    rows = np.array([2, 0], np.int32)
    p, q = (softmax(np.array(z, np.float64)[rows], -1) for z in (x, narrow.astype(jnp.float32)))
    scalar = lambda *values: jnp.array(values, jnp.float32)
    dropped, absent = np.array([5, vocab - 1]), np.array([vocab - 2, -1])
    total = lambda z: jnp.array(np.log(np.exp(np.array(z, np.float64)).sum(-1)), jnp.float32)[rows]
    target = TargetDistribution(
        scalar(1, 1),
        scalar(-np.inf, -np.inf),
        scalar(3, -3),
        total(x) - scalar(3, -3),
        jnp.array([-1, 7]),
    )
    p[1] = np.arange(vocab) == 7
    q[0, absent[0]] = 0
    steps = (
        Refusal(scalar(1, 1), scalar(0.7, 0), jnp.array([-1, -1])),
        Refusal(scalar(2, 1), scalar(0, 0), jnp.array(dropped)),
    )
    result = masses_of(
        jnp.array(x),
        narrow,
        jnp.array(rows),
        target,
        DraftDistribution(
            scalar(2, 1), total(narrow.astype(jnp.float32)) - scalar(2, 1), (jnp.array(absent),)
        ),
        steps,
    )
    before = np.maximum(p - np.array([[0.7], [0]]) * q, 0)
    after = 2 * before * np.array([[1], [0.5]])
    after[[0, 1], dropped] = q[[0, 1], dropped] = 0
    starts = np.arange(0, vocab, segment)
    for mass, values in zip(result, (before, after, q), strict=True):
        expected = np.add.reduceat(values, starts, -1)
        np.testing.assert_allclose(mass, expected, rtol=1e-4, atol=1e-9)


@each_vocabulary
def test_the_tpu_kernel_filters_as_process_logits(vocab):
    # Simulated memory is slow: the odd vocabulary must do.
    simulated = vocab == VOCABULARIES["Phi-3-mini"]
    options = SIMULATED if simulated else dict(interpret=True)
    distributions = functools.partial(pallas_tpu.distributions, blocks=LONG, **options)
    assert_distributions_are_processed_alike(distributions, vocab)
    assert not (simulated and races_on_tpu())


@each_vocabulary
def test_the_tpu_kernel_sums_residuals(vocab):
    masses = functools.partial(pallas_tpu.masses, blocks=LONG, **SIMULATED)
    assert_masses_are_sums(masses, vocab, LONG.segment)
    assert not races_on_tpu()


@pytest.mark.parametrize(("temperature", "offset"), [(1.0, 3e4), (0.01, 20.0), (1e-5, 20.0)])
def test_distributions_of_large_logits_sum_to_one(temperature, offset):
    rng, vocab = np.random.default_rng(0), 300
    logits = jnp.array(offset + rng.standard_normal((ROWS, vocab)), jnp.float32)
    logits = logits.at[:, 7].set(logits.max(-1))  # a tie of the likeliest
    filters = settings([0] * ROWS, ("temperature",))
    filters.values["temperature"] = jnp.full(ROWS, temperature, jnp.float32)
    asked = Filters(**filters.values, names=filters.names)
    target, draft = (
        pallas_tpu.distributions(logits, filters, interpret=True) for filters in (asked, None)
    )
    draft, every = DraftDistribution(draft.peak, draft.log_total), jnp.arange(ROWS)
    masses = pallas_tpu.masses(logits, logits, every, target, draft, (), interpret=True)
    for mass in (masses.before, masses.draft):
        np.testing.assert_allclose(mass.sum(-1), 1, atol=1e-6)


@needs_gpu_interpreter
@each_vocabulary
def test_the_gpu_kernel_filters_as_process_logits(vocab):
    blocks = pallas_gpu.BLOCKS._replace(chunk=16384, segment=16384)
    options = dict(blocks=blocks, interpret=plgpu.InterpretGPUParams())
    assert_distributions_are_processed_alike(
        functools.partial(pallas_gpu.distributions, **options), vocab
    )


@needs_gpu_interpreter
@each_vocabulary
def test_the_gpu_kernel_sums_residuals(vocab):
    blocks = pallas_gpu.BLOCKS._replace(chunk=16384, segment=16384)
    options = dict(blocks=blocks, interpret=plgpu.InterpretGPUParams())
    assert_masses_are_sums(functools.partial(pallas_gpu.masses, **options), vocab, blocks.segment)
