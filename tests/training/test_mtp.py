"""Losses of MTP modules, against plain torch."""

import dataclasses

import jax
import numpy as np
import pytest

from jspec.models.blocks.experts import Experts
from jspec.models.blocks.latent_attention import LatentAttention
from jspec.models.blocks.mlp import GatedMlpParams
from jspec.models.heads import eagle
from tests import networks, tiny
from tests.drafters import heads, mtps
from tests.training import texts
from training.networks.forward import Frozen
from training.tasks.eagle import HeadSettings, head_config
from training.tasks.mtp import MtpRecipe, MtpTask, early_exit

TARGET = tiny.TARGET.config
STEPS, DECAY = 3, 0.6


def expected(head, batch, factor):
    """Return the weighted cross-entropies of every guess, computed as the head drafts it alone."""
    torch = pytest.importorskip("torch")
    total = 0.0
    for tokens, weights in texts.alone(batch):
        features, _ = heads.hidden_states(tokens[None], (TARGET.num_layers,))
        features = torch.tensor(np.asarray(features[0][0]))
        for row in range(len(tokens)):
            for step in range(STEPS):
                label = row + 2 + step
                if label < len(tokens) and weights[label] > 0:
                    given = tokens[1:label].tolist()
                    logits = head.draft_logits(features[: row + 1], given)
                    loss = -logits.log_softmax(-1)[int(tokens[label])].item()
                    total += weights[label] * DECAY**step * loss
    whole = sum(DECAY**step for step in range(STEPS))
    return factor * total / whole / texts.rows_of(batch)


@pytest.mark.parametrize("name", ["one", pytest.param("two", marks=pytest.mark.slow)])
def test_the_loss_is_that_of_drafts_by_plain_torch(name):
    pytest.importorskip("torch")
    config, params = mtps.CONFIGS[name], mtps.random_params(name)
    head = mtps.torch_reference(name, params)
    recipe = MtpRecipe(unroll=STEPS, step_decay=DECAY, loss_factor=0.1)
    task, batch = MtpTask(config, TARGET, recipe, "float32"), texts.packed(tiny.VOCAB, rows=1)
    loss, metrics = jax.jit(task.loss)(
        params, Frozen(tiny.params().target), batch, jax.random.key(0)
    )
    np.testing.assert_allclose(loss, expected(head, batch, 0.1), rtol=1e-4)
    assert {f"accepted_{step}" for step in range(STEPS)} <= set(metrics)


def test_fresh_modules_pass_on_what_they_read():
    config, target = mtps.CONFIGS["one"], tiny.params().target
    fresh = mtps.mtp.init_params(jax.random.key(3), config)
    params = early_exit(fresh, config, Frozen(target))
    text = np.random.default_rng(0).integers(0, tiny.VOCAB, (1, 12))
    features, _ = heads.hidden_states(text, (TARGET.num_layers,))
    [out] = mtps.rows_of_text(params, config, text, features[0])
    read, out = np.asarray(features[0][0, 1:-1]), np.asarray(out[0, 1:])
    cosine = (read * out).sum(-1) / np.linalg.norm(read, axis=-1) / np.linalg.norm(out, axis=-1)
    assert cosine.min() > 0.9
    assert 0.5 < np.linalg.norm(out) / np.linalg.norm(read) < 2


def test_heads_for_a_target_with_experts_have_plain_blocks():
    target = networks.changed(
        TARGET,
        head_dim=20,
        num_kv_heads=4,
        mixer=LatentAttention(4, 24, 20, 12, 8, 10),
        feed_forward=Experts(8, 2, 16, 16),
    )
    config = head_config(HeadSettings(capture_layers=(0, 1)), "eagle3", target)
    shapes = jax.eval_shape(lambda: eagle.init_params(jax.random.key(0), config))
    assert shapes.layers[0].mixer.qkv.shape == (2 * 32, (4 + 2 * 4) * 20)
    assert isinstance(shapes.layers[0].feed_forward, GatedMlpParams)


def test_what_cannot_be_trained_is_refused():
    for settings, message in (
        ({"unroll": 0}, "it must be at least 1"),
        ({"step_decay": -1.0}, "it must be at least 0"),
        ({"loss_factor": 0.0}, "it must be above 0"),
        ({"mtp_loss": "mse"}, "choose one of labels, kl, ce"),
    ):
        with pytest.raises(ValueError, match=message):
            MtpRecipe(**settings)
    experts = networks.changed(mtps.CONFIGS["raw"].network, feed_forward=Experts(4, 2, 8, 8))
    config = dataclasses.replace(mtps.CONFIGS["raw"], network=experts)
    with pytest.raises(ValueError, match="modules with experts cannot be trained"):
        MtpTask(config, TARGET, MtpRecipe())
