"""Losses of Medusa heads, against the function that serves them and numpy."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import trees
from jspec.models import decoder
from jspec.models.decoder import Decoder
from jspec.models.heads import medusa
from jspec.models.heads.medusa import MedusaConfig
from tests import networks
from training.data.batch import Batch
from training.networks.forward import Frozen
from training.tasks.medusa import JointParams, MedusaRecipe, MedusaTask

TARGET = networks.build(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
)
HEADS = MedusaConfig(
    num_heads=3,
    num_layers=1,
    hidden_size=32,
    vocab_size=40,
    target_vocab_size=40,
    capture_layers=(2,),
    num_outputs=3,
)
VOCABULARY = np.arange(3, 40, 2, dtype=np.int32)
FIRST, SECOND = 11, 8


@pytest.fixture(scope="module")
def target():
    params = decoder.init_params(jax.random.key(0), TARGET)
    return jax.tree.map(lambda x: 6 * x if x.ndim > 1 else x, params)


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(1)
    tokens = rng.integers(0, TARGET.vocab_size, (2, FIRST + SECOND + 2)).astype(np.int32)
    row = np.repeat([1, 2, 0], [FIRST, SECOND, 2]).astype(np.int32)
    weights = (rng.random(tokens.shape) < 0.8) & (row > 0)
    return Batch(tokens, np.stack([row, row]), weights.astype(np.float32))


def loud(params):
    return jax.tree.map(
        lambda x: 0.3 * jax.random.normal(jax.random.key(x.size), x.shape),
        params.replace(draft_to_target=None),
    )


def log_softmax(x):
    return x - np.logaddexp.reduce(x, axis=-1, keepdims=True)


def documents(batch):
    for tokens, weights in zip(batch.tokens, batch.weights, strict=True):
        for start, end in ((0, FIRST), (FIRST, FIRST + SECOND)):
            yield tokens[start:end], weights[start:end]


def expected(heads, config, target, batch, value):
    """Return the sum of 0.8^i value over all guesses, divided by the rows of the batch."""
    module, total = Decoder(TARGET), 0.0
    for tokens, weights in documents(batch):
        chain = trees.from_parents(trees.chain(len(tokens) - 1), len(tokens) - 1)
        cache = module.init_cache(1, len(tokens))
        out = module.forward(target, tokens[None], chain, cache, (TARGET.num_layers,))
        guesses = log_softmax(
            np.asarray(medusa.heads(heads, config, out.features[0], module, target))
        )
        truth = np.asarray(out.logits[0])
        for j in range(len(tokens)):
            for i in range(config.num_heads):
                beside = j + 1 + i  # the target's row with the guessed token's distribution
                if beside + 1 < len(tokens):
                    got = value(truth[beside], guesses[0, j, i], tokens[beside + 1])
                    total += weights[beside + 1] * 0.8**i * got
    return total / (batch.tokens.shape[0] * (batch.tokens.shape[1] - 1))


def label_loss(truth, log_q, label):
    return -log_q[label]


def reduced_label_loss(truth, log_q, label):
    return -log_q[list(VOCABULARY).index(label)] if label in VOCABULARY else 0.0


def kl(truth, log_q, label):
    log_p = log_softmax(truth)
    return (np.exp(log_p) * (log_p - log_q)).sum()


@pytest.mark.parametrize(
    ("loss", "config", "value"),
    [
        ("labels", HEADS, label_loss),
        ("kl", dataclasses.replace(HEADS, num_outputs=1), kl),
        ("labels", dataclasses.replace(HEADS, vocab_size=len(VOCABULARY)), reduced_label_loss),
    ],
    ids=["labels", "kl, one output", "labels, reduced vocabulary"],
)
def test_the_loss_is_that_of_the_guesses_that_serving_makes(loss, config, value, target, batch):
    vocabulary = jnp.asarray(VOCABULARY) if config.reduced else None
    heads = loud(medusa.init_params(jax.random.key(2), config))
    task = MedusaTask(config, TARGET, MedusaRecipe(medusa_loss=loss), compute="float32")
    frozen = Frozen(target, None, vocabulary)
    got, metrics = jax.jit(task.loss)(JointParams(heads), frozen, batch, jax.random.key(0))
    np.testing.assert_allclose(got, expected(heads, config, target, batch, value), rtol=2e-5)
    assert 0 < metrics["accepted_0"].mean < 1


def test_fresh_heads_predict_what_the_target_does(target):
    task = MedusaTask(HEADS, TARGET, MedusaRecipe(), compute="float32")
    heads = task.init(jax.random.key(0), Frozen(target)).heads
    hidden = jax.random.normal(jax.random.key(1), (4, 32))
    logits = medusa.heads(heads, HEADS, hidden, Decoder(TARGET), target)
    expected = Decoder(TARGET).unembed(target, hidden, norm=False)
    np.testing.assert_allclose(logits, np.repeat(expected[:, None], 3, 1), rtol=1e-5)


def test_joint_training_moves_the_target_and_reports_its_own_loss(target, batch):
    task = MedusaTask(HEADS, TARGET, MedusaRecipe(), joint=True, compute="float32")
    frozen = Frozen(target)
    params = task.init(jax.random.key(0), frozen)
    (loss, metrics), grads = jax.jit(jax.value_and_grad(task.loss, has_aux=True))(
        params, frozen, batch, jax.random.key(0)
    )
    total = metrics["next_token_loss"] + 0.2 * metrics["heads_loss"]
    np.testing.assert_allclose(loss, total, rtol=1e-6)
    assert float(jnp.abs(grads.target.layers[0].mixer.qkv).max()) > 1e-5
    plain = 0.0
    for tokens, weights in documents(batch):
        chain = trees.from_parents(trees.chain(len(tokens) - 1), len(tokens) - 1)
        cache = decoder.init_cache(TARGET, 1, len(tokens))
        log_p = log_softmax(
            np.asarray(decoder.forward(target, TARGET, tokens[None], chain, cache).logits[0])
        )
        plain -= sum(weights[i + 1] * log_p[i, tokens[i + 1]] for i in range(len(tokens) - 1))
    rows = batch.tokens.shape[0] * (batch.tokens.shape[1] - 1)
    np.testing.assert_allclose(metrics["next_token_loss"], plain / rows, rtol=2e-5)


def test_a_loss_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="--medusa-loss 'mse' does not work; choose one of labels"):
        MedusaRecipe(medusa_loss="mse")
