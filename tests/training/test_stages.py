"""Losses of MLP speculators and Hydra heads, against plain torch."""

import dataclasses

import jax
import numpy as np
import pytest

from jspec.models.blocks.experts import Experts
from jspec.models.heads import hydra
from tests import networks, tiny
from tests.drafters import heads, hydras, speculators
from tests.training import texts
from tests.training.texts import log_softmax
from training.networks.forward import Frozen
from training.tasks.stages import StagesRecipe, StagesTask

TARGET, DECAY = tiny.TARGET.config, 0.7


def from_text(log_p, log_q, label):
    return -log_q[label]


def from_distribution(log_p, log_q, label):
    return -np.log(np.exp(np.minimum(log_p, log_q)).sum())


def expected(draft_logits, config, stages, batch, value):
    """Return the weighted losses of every guess, computed as the head drafts it alone."""
    total = 0.0
    for tokens, weights in texts.alone(batch):
        (features,), logits = heads.hidden_states(tokens[None], config.capture_layers)
        distributions = log_softmax(np.asarray(logits[0], np.float64))
        for row in range(len(tokens) - 1):
            given = tokens[row + 1 : row + 1 + stages].tolist()
            guesses = draft_logits(np.array(features[0][: row + 1]), given)
            for stage, log_q in enumerate(log_softmax(guesses.astype(np.float64))):
                at = row + 1 + stage  # the target's row with the guessed token's distribution
                if at + 1 < len(tokens):
                    far = value(distributions[at], log_q, tokens[at + 1])
                    total += weights[at + 1] * DECAY**stage * far
    return total / texts.rows_of(batch)


@pytest.mark.parametrize(
    ("name", "loss", "remat"),
    [
        ("prefix", "overlap", True),
        ("tied scaled", "labels", False),
        ("lstm", "overlap", True),
        pytest.param("mlp deep", "labels", False, marks=pytest.mark.slow),
        pytest.param("prefix deep", "labels", False, marks=pytest.mark.slow),
        pytest.param("untied", "overlap", True, marks=pytest.mark.slow),
        pytest.param("lstm untied", "labels", False, marks=pytest.mark.slow),
    ],
)
def test_the_loss_is_that_of_drafts_by_plain_torch(name, loss, remat):
    torch = pytest.importorskip("torch")
    grounded = name in hydras.CONFIGS
    known = hydras if grounded else speculators
    config, params, batch = (
        known.CONFIGS[name],
        known.random_params(name),
        texts.packed(tiny.VOCAB, rows=1),
    )
    reference = known.torch_reference(name, params)

    def draft_logits(features, given):
        read = torch.tensor(features if grounded else features[-1])
        return reference.draft_logits(read, given).numpy()

    recipe = StagesRecipe(loss=loss, stage_decay=DECAY)
    task = StagesTask(config, TARGET, recipe, "float32", remat)
    frozen = Frozen(tiny.params().target)
    compute = jax.jit(jax.value_and_grad(task.loss, has_aux=True))
    (got, metrics), grads = compute(params, frozen, batch, jax.random.key(0))
    stages = config.num_heads if grounded else config.n_predict
    value = from_text if loss == "labels" else from_distribution
    want = expected(draft_logits, config, stages, batch, value)
    np.testing.assert_allclose(got, want, rtol=1e-4)
    assert {f"accepted_{stage}" for stage in range(stages)} <= set(metrics)
    assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(grads))


def test_fresh_hydra_heads_predict_what_the_target_does():
    config, frozen = hydras.CONFIGS["mlp"], Frozen(tiny.params().target)
    params = StagesTask(config, TARGET, StagesRecipe()).init(jax.random.key(0), frozen)
    hidden, first, second = jax.random.normal(jax.random.key(1), (3, 4, hydras.WIDTH))
    expected = tiny.TARGET.unembed(frozen.target, hidden, norm=False)
    state, of_first = hydra.step(params, config, hidden, first, 0)
    _, of_second = hydra.step(params, config, state, second, 1)
    for head, x in enumerate((of_first, of_second)):
        logits = hydra.unembed(params, x, head)
        np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["prefix", "lstm"])
def test_training_starts_from_given_weights(name):
    known = hydras if name in hydras.CONFIGS else speculators
    task = StagesTask(known.CONFIGS[name], TARGET, StagesRecipe())
    given = known.random_params(name)
    start = task.init(jax.random.key(0), Frozen(tiny.params().target, given))
    assert jax.tree.all(jax.tree.map(np.array_equal, start, given))


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="--loss 'mse' does not work; choose one of labels"):
        StagesRecipe(loss="mse")
    with pytest.raises(ValueError, match="--stage-decay -1"):
        StagesRecipe(stage_decay=-1)
    config = hydras.CONFIGS["prefix"]
    experts = networks.changed(config.network, feed_forward=Experts(4, 2, 8, 8))
    with pytest.raises(ValueError, match=r"experts, .*--variant hydra"):
        StagesTask(dataclasses.replace(config, network=experts), TARGET, StagesRecipe())
