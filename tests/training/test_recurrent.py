"""Networks with the gated delta rule in training: their states, and what learns from them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

from jspec.core import kv_cache, trees
from jspec.models import decoder
from jspec.sharding import TENSOR
from tests import networks
from tests.families import models
from tests.families.test_engine import head_for
from tests.training import texts
from training.networks.forward import Frozen, packed_states
from training.networks.target import load
from training.tasks.draft import DraftRecipe, DraftTask
from training.tasks.eagle_task import EagleTask, Recipe

CASES = ["qwen3_next", "qwen3_5_text"]
CAPTURED = (0, 1, 3)
PIECE = 24  # tokens of a prefill chunk


@pytest.fixture
def target(request, tmp_path_factory):
    directory = models.saved(request.param, tmp_path_factory.getbasetemp() / "families")
    return load(str(directory), "float32", Mesh(jax.devices()[:1], (TENSOR,)))


@functools.partial(jax.jit, static_argnums=1)
def in_pieces(params, config, tokens):
    """Return the captured states [T, D] of a text that an engine prefills in chunks."""
    cache, states = decoder.init_cache(config, 1, len(tokens)), []
    for start in range(0, len(tokens), PIECE):
        piece = tokens[None, start : start + PIECE]
        tree = trees.chain_tree(*piece.shape)
        out = decoder.forward(params, config, piece, tree, cache, CAPTURED)
        cache = kv_cache.append_prompt(cache, out.tree_kv, jnp.full(1, piece.shape[1]))
        states.append([feature[0] for feature in out.features])
    return [jnp.concatenate(parts) for parts in zip(*states, strict=True)]


@pytest.mark.parametrize("target", CASES, indirect=True)
def test_packed_texts_have_the_states_that_an_engine_captures_of_each_alone(target):
    batch = texts.packed(target.config.vocab_size, first=90, second=41, padding=3)
    states = functools.partial(packed_states, compute="float32", capture_layers=CAPTURED)
    captured, normed = jax.jit(states, static_argnums=1)(target.params, target.config, batch)
    np.testing.assert_array_equal(captured[-1], normed)
    for row, start, end in texts.places(batch):
        alone = in_pieces(target.params, target.config, batch.tokens[row, start:end])
        for packed, expected in zip(captured, alone, strict=True):
            np.testing.assert_allclose(packed[row, start:end], expected, atol=2e-4)


def eagle_task(target):
    """Return the task of an EAGLE-3 head, and its frozen weights."""
    head = head_for(target.config).config
    task = EagleTask(head, target.config, Recipe(unroll=2, step_decay=0.8), "float32")
    return task, Frozen(target.params)


def draft_task(target):
    """Return the task of a draft model with states of its own, and its frozen weights."""
    task = DraftTask(target.config, target.config, DraftRecipe(), "float32")
    return task, Frozen(target.params, networks.loud(target.params, 1.2))


@pytest.mark.parametrize("target", CASES[1:], indirect=True)
@pytest.mark.parametrize("made", [eagle_task, draft_task])
def test_heads_and_draft_models_learn_from_a_target_with_states(target, made):
    (task, frozen), batch = made(target), texts.packed(target.config.vocab_size)
    params, optimizer = task.init(jax.random.key(0), frozen), optax.adam(1e-3)

    @jax.jit
    def step(params, state):
        grad = jax.value_and_grad(lambda x: task.loss(x, frozen, batch, None)[0])
        loss, gradient = grad(params)
        updates, state = optimizer.update(gradient, state)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for _ in range(8):
        params, state, loss = step(params, state)
        losses.append(float(loss))
    assert np.isfinite(losses).all() and losses[-1] < losses[0] - 0.02
