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
from tests.training import texts
from tests.training.texts import log_softmax
from training.networks.forward import Frozen
from training.tasks.medusa import JointParams, MedusaRecipe, MedusaTask

TARGET = networks.small()
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


@pytest.fixture(scope="module")
def target():
    return networks.loud(decoder.init_params(jax.random.key(0), TARGET))


@pytest.fixture(scope="module")
def batch():
    return texts.packed(TARGET.vocab_size)


def loud(params):
    return jax.tree.map(
        lambda x: 0.3 * jax.random.normal(jax.random.key(x.size), x.shape),
        params.replace(draft_to_target=None),
    )


def expected(heads, config, target, batch, value):
    """Return the sum of 0.8^i value over all guesses, divided by the rows of the batch."""
    module, total = Decoder(TARGET), 0.0
    for tokens, weights in texts.alone(batch):
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
    return total / texts.rows_of(batch)


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
    for tokens, weights in texts.alone(batch):
        chain = trees.from_parents(trees.chain(len(tokens) - 1), len(tokens) - 1)
        cache = decoder.init_cache(TARGET, 1, len(tokens))
        log_p = log_softmax(
            np.asarray(decoder.forward(target, TARGET, tokens[None], chain, cache).logits[0])
        )
        plain -= sum(weights[i + 1] * log_p[i, tokens[i + 1]] for i in range(len(tokens) - 1))
    plain /= texts.rows_of(batch)
    np.testing.assert_allclose(metrics["next_token_loss"], plain, rtol=2e-5)


def test_a_loss_that_is_not_known_is_refused():
    with pytest.raises(ValueError, match="--medusa-loss 'mse' does not work; choose one of labels"):
        MedusaRecipe(medusa_loss="mse")
