"""Losses of draft models against numpy, and their own continuations."""

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core import trees
from jspec.models import decoder
from jspec.models.decoder import Decoder
from tests import networks
from tests.training import texts
from training.losses.distances import LOSSES
from training.networks.forward import Frozen
from training.tasks.draft import DraftRecipe, DraftTask, sample_continuations

TARGET = networks.small(tie_embeddings=True)
DRAFT = networks.small(vocab_size=44, num_layers=1, tie_embeddings=True)  # its embedding is padded


@pytest.fixture(scope="module")
def weights():
    return Frozen(
        networks.loud(decoder.init_params(jax.random.key(0), TARGET)),
        networks.loud(decoder.init_params(jax.random.key(1), DRAFT)),
    )


@pytest.fixture(scope="module")
def batch():
    return texts.packed(TARGET.vocab_size)


forward = jax.jit(decoder.forward, static_argnums=1)


def distributions(params, config, tokens):
    chain = trees.from_parents(trees.chain(len(tokens) - 1), len(tokens) - 1)
    cache = decoder.init_cache(config, 1, len(tokens))
    logits = np.asarray(forward(params, config, tokens[None], chain, cache).logits[0])
    return texts.log_softmax(logits[:, : TARGET.vocab_size])


DISTANCES = {
    "kl": lambda p, q: (p * np.log(p / q)).sum(),
    "ce": lambda p, q: -(p * np.log(q)).sum(),
    "reverse_kl": lambda p, q: (q * np.log(q / p)).sum(),
    "jsd": lambda p, q: 0.5 * (p * np.log(2 * p / (p + q)) + q * np.log(2 * q / (p + q))).sum(),
    "tvd": lambda p, q: 0.5 * np.abs(p - q).sum(),
    "overlap": lambda p, q: -np.log(1 - 0.5 * np.abs(p - q).sum()),
}


@pytest.mark.parametrize("loss", ["kl", "tvd"])
def test_the_loss_is_the_distance_of_each_documents_distributions(loss, weights, batch):
    task = DraftTask(DRAFT, TARGET, DraftRecipe(loss=loss, text_weight=0.25), compute="float32")
    got, metrics = jax.jit(task.loss)(weights.start, weights, batch, jax.random.key(0))
    total, accepted, counted = 0.0, 0.0, 0
    for tokens, learned in texts.alone(batch):
        p = np.exp(distributions(weights.target, TARGET, tokens))
        q = np.exp(distributions(weights.start, DRAFT, tokens))
        for i in np.flatnonzero(learned[1:]):
            text = -np.log(q[i, tokens[i + 1]])
            total += 0.75 * DISTANCES[loss](p[i], q[i]) + 0.25 * text
            accepted, counted = accepted + np.minimum(p[i], q[i]).sum(), counted + 1
    np.testing.assert_allclose(got, total / texts.rows_of(batch), rtol=2e-5)
    np.testing.assert_allclose(metrics["accepted"].mean, accepted / counted, rtol=2e-5)


@pytest.mark.parametrize("loss", DISTANCES)
def test_distances_are_those_of_their_formulas(loss):
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(12), size=2)
    got = LOSSES[loss](jnp.log(p), jnp.log(q))
    np.testing.assert_allclose(got, DISTANCES[loss](p, q), rtol=2e-5)


def gradient(loss, p, logits):
    return np.asarray(
        jax.grad(lambda logits: LOSSES[loss](jnp.log(p), jax.nn.log_softmax(logits)).sum())(
            jnp.asarray(logits)
        )
    )


def test_gradients_are_those_that_are_derived_by_hand():
    rng = np.random.default_rng(0)
    p, logits = rng.dirichlet(np.ones(12)), rng.normal(size=12)
    q = np.exp(logits - np.logaddexp.reduce(logits))
    kl, reverse = q - p, q * (np.log(q / p) - (q * np.log(q / p)).sum())
    below = (q <= p).astype(float)
    tvd = -q * (below - (q * below).sum())
    alpha = np.minimum(p, q).sum()
    share = np.exp(-3 * alpha)
    expected = {
        "kl": kl,
        "ce": kl,
        "reverse_kl": reverse,
        "tvd": tvd,
        "overlap": tvd / alpha,
        "lk": share * kl + (1 - share) * tvd,
    }
    for loss, by_hand in expected.items():
        np.testing.assert_allclose(gradient(loss, p, logits), by_hand, atol=1e-6, err_msg=loss)


def test_a_normalised_reward_points_where_total_variation_does():
    """For one row, mean and scale of the reward only change the length of the gradient."""
    rng = np.random.default_rng(0)
    p, logits = rng.dirichlet(np.ones(12)), rng.normal(size=12)
    a, b = gradient("tvd", p, logits), gradient("tvd++", p, logits)
    np.testing.assert_allclose(a / np.linalg.norm(a), b / np.linalg.norm(b), atol=1e-4)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_rows_loss_and_gradient_depend_on_no_other_row(loss):
    """So it does not depend on rows that do not count, on padding, or on cuts of a batch."""
    rng = np.random.default_rng(0)
    p, logits = rng.dirichlet(np.ones(12), size=3), rng.normal(size=(3, 12))
    for row in range(3):
        alone = gradient(loss, p[row : row + 1], logits[row : row + 1])[0]
        np.testing.assert_allclose(gradient(loss, p, logits)[row], alone, rtol=1e-4, atol=1e-7)


def test_a_draft_model_continues_prompts_by_its_own_distribution(weights):
    """Near temperature 0 the continuation equals greedy decoding."""
    prompts = np.random.default_rng(2).integers(0, 36, (3, 5)).astype(np.int32)
    written = sample_continuations(
        weights.start, DRAFT, jnp.asarray(prompts), 14, jax.random.key(0), 1e-4, DRAFT.vocab_size
    )
    answers = jspec.generate(Decoder(DRAFT), weights.start, prompts.tolist(), max_new_tokens=9)
    np.testing.assert_array_equal(written[:, :5], prompts)
    np.testing.assert_array_equal(written[:, 5:], np.stack([a.tokens for a in answers]))


def test_on_policy_windows_are_learned_from_behind_their_prompts_alone(weights, batch):
    recipe = DraftRecipe(on_policy=1.0, on_policy_prompt=12)
    task = DraftTask(DRAFT, TARGET, recipe, compute="float32")
    loss = jax.jit(task.loss)
    same = loss(weights.start, weights, batch, jax.random.key(0))[0]
    assert jnp.isfinite(same)
    assert same == loss(weights.start, weights, batch, jax.random.key(0))[0]
    assert same != loss(weights.start, weights, batch, jax.random.key(1))[0]
    behind = batch.replace(tokens=np.where(np.arange(batch.tokens.shape[1]) >= 12, 0, batch.tokens))
    assert same == loss(weights.start, weights, behind, jax.random.key(0))[0]


def test_held_out_windows_are_judged_as_they_are_written(weights, batch):
    measured = []
    for share in (0.0, 1.0):
        recipe = DraftRecipe(on_policy=share, on_policy_prompt=12)
        task = DraftTask(DRAFT, TARGET, recipe, compute="float32")
        measured.append(jax.jit(task.loss)(weights.start, weights, batch, None))
    chex.assert_trees_all_equal(*measured)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"loss": "mse"}, "--loss 'mse' does not work; choose one of kl"),
        ({"on_policy": 1.5}, "--on-policy 1.5 does not work; take 0 to 1"),
        ({"on_policy_temperature": 0.0}, "--on-policy-temperature 0.0 does not work"),
        ({"on_policy_prompt": 0}, "--on-policy-prompt 0 does not work"),
    ],
)
def test_recipes_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DraftRecipe(**options)
