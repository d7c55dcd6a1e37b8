"""Losses of EAGLE heads, against the functions that serve them and numpy."""

import dataclasses
import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import kv_cache, trees
from jspec.models import decoder
from jspec.models.blocks.attend import attention_beside, attention_over
from jspec.models.decoder import Decoder
from jspec.models.heads import eagle
from jspec.models.heads.eagle import EagleConfig
from jspec.models.heads.network import embed
from tests import networks
from tests.training import texts
from tests.training.texts import FIRST, SECOND, log_softmax
from training.data.features import TaughtBatch
from training.networks.forward import Frozen
from training.tasks.eagle_task import PUBLISHED, EagleTask, Recipe, target_states, totals_of

TARGET = networks.small(num_layers=4)
VOCABULARY = np.sort(np.random.default_rng(3).permutation(TARGET.vocab_size)[:25]).astype(np.int32)


def head_config(generation: int, vocab_size: int = TARGET.vocab_size) -> EagleConfig:
    network = networks.changed(TARGET, num_layers=1, vocab_size=vocab_size)
    return EagleConfig(
        network=network,
        generation=generation,
        capture_layers=(1, 2, 3) if generation == 3 else (TARGET.num_layers,),
        target_hidden_size=TARGET.hidden_size,
        target_vocab_size=TARGET.vocab_size,
        separate_head=generation == 3,
    )


@pytest.fixture(scope="module")
def target():
    return networks.loud(decoder.init_params(jax.random.key(0), TARGET))


@pytest.fixture(scope="module")
def batch():
    return texts.packed(TARGET.vocab_size)


def serve(params, config, target, tokens, steps):
    """Return drafts {(i, k): (logits [Vd], f' [D])} as drafting computes them.

    Also return the target's logits [n, V] and normed features [n, D].
    """
    logits, hidden, truth, normed = map(np.asarray, _serve(params, config, target, tokens, steps))
    drafted = {
        (i, step): (logits[step, i], hidden[step, i])
        for step in range(steps)
        for i in range(len(tokens) - 1 - step)
    }
    return drafted, truth, normed


@functools.partial(jax.jit, static_argnums=(1, 4))
def _serve(params, config, target, tokens, steps):
    """Return a cache per row i, with the rows of true features up to i alone."""
    module, rows = Decoder(TARGET), tokens.shape[0] - 1
    chain = trees.broadcast(trees.from_parents(trees.chain(rows), rows), 1)
    attend, _ = attention_over(decoder.init_cache(TARGET, 1, rows + 1), chain)
    x, captured = decoder.trunk(
        target,
        TARGET,
        decoder.embed(target, TARGET, tokens[None]),
        jnp.arange(rows + 1)[None],
        attend,
        capture_layers=config.capture_layers,
    )
    normed = TARGET.norm(x, target.norm)
    features = (normed,) if config.generation == 1 else captured
    fused = eagle.fuse(params, config, tuple(x[:, :rows] for x in features))
    vectors = lambda ids: embed(params, config, ids, module, target)
    empty = decoder.init_cache(config.network, 1, rows)
    hidden, entries = eagle.prefill(params, config, vectors(tokens[None, 1:]), fused, empty)
    each = lambda x: jnp.broadcast_to(x, (rows, *x.shape[1:]))
    cache = kv_cache.KVCache(jax.tree.map(each, entries), jnp.arange(1, rows + 1, dtype=jnp.int32))
    room = lambda x: jnp.zeros((rows, x.shape[1], steps, x.shape[3]))
    side, hidden = jax.tree.map(room, entries), [hidden[0][:, None]]
    for step in range(1, steps):
        ids = jnp.roll(tokens, -1 - step)[:rows, None]
        mask = jnp.broadcast_to(jnp.arange(steps) < step, (rows, 1, steps))
        positions = jnp.arange(rows)[:, None] + step
        attend, side = attention_beside(cache, side, jnp.int32(step - 1), mask, positions)
        hidden.append(eagle.blocks(params, config, vectors(ids), hidden[-1], positions, attend))
    hidden = jnp.stack(hidden)[:, :, 0]
    logits = eagle.unembed(params, config, hidden, module, target)
    truth = module.unembed(target, normed[0], norm=False)
    return logits, hidden, truth, normed[0]


def expected(params, config, recipe, target, batch, distance):
    """Return the loss, summed in numpy over every row of every document, drafted as in serving."""
    total = 0.0
    for tokens, weights in texts.alone(batch):
        drafted, truth, normed = serve(params, config, target, tokens, recipe.unroll)
        for (i, step), (logits, hidden) in drafted.items():
            j = i + 1 + step
            value = recipe.loss_weight * distance(truth[j], log_softmax(logits))
            if recipe.top_k_weight:
                p = np.exp(log_softmax(truth[j]))
                top = np.argsort(-p)[:10]
                value -= recipe.top_k_weight * (p[top] * log_softmax(logits)[top]).sum()
            if recipe.feature_weight:
                gap = np.abs(hidden - normed[j])
                huber = np.where(gap < 1, gap**2 / 2, gap - 0.5)
                value += recipe.feature_weight * huber.mean()
            learned = weights[j + 1] if j + 1 < len(tokens) else 0.0  # weight of the guessed token
            total += learned * recipe.step_decay**step * value
    return total / texts.rows_of(batch)


def soft_cross_entropy(truth, log_q):
    return -(np.exp(log_softmax(truth)) * log_q).sum()


def loud_head(config, frozen):
    params = eagle.init_params(jax.random.key(2), config)
    return networks.loud(params.replace(draft_to_target=None))


RECIPES = {
    "eagle1": (1, dataclasses.replace(PUBLISHED["eagle1"], noise=0.0)),
    "hass": (1, dataclasses.replace(PUBLISHED["hass"], noise=0.0)),
    "eagle3": (3, dataclasses.replace(PUBLISHED["eagle3"], unroll=4)),
}


@pytest.mark.parametrize("variant", RECIPES)
def test_the_loss_is_that_of_the_rows_as_drafting_computes_them(variant, target, batch):
    generation, recipe = RECIPES[variant]
    config, frozen = head_config(generation), Frozen(target)
    task = EagleTask(config, TARGET, recipe, compute="float32")
    params = loud_head(config, frozen)
    loss, _ = jax.jit(task.loss)(params, frozen, batch, jax.random.key(0))
    by_hand = expected(params, config, recipe, target, batch, soft_cross_entropy)
    np.testing.assert_allclose(loss, by_hand, rtol=2e-5)


def test_recomputed_steps_and_the_loop_of_accelerators_give_the_same_gradients(
    target, batch, monkeypatch
):
    config, frozen = head_config(3), Frozen(target)
    params, recipe = loud_head(config, frozen), Recipe(unroll=3)

    def gradients(remat, platform):
        monkeypatch.setattr(jax, "default_backend", lambda: platform)
        task = EagleTask(config, TARGET, recipe, compute="float32", remat=remat)
        loss = lambda params: task.loss(params, frozen, batch, jax.random.key(0))[0]
        return jax.jit(jax.value_and_grad(loss))(params)

    expected = gradients(False, "cpu")
    for remat, platform in ((True, "cpu"), (True, "tpu")):
        chex.assert_trees_all_close(gradients(remat, platform), expected, rtol=1e-4, atol=1e-6)


def test_rows_whose_answer_a_reduced_vocabulary_lacks_do_not_count(target, batch):
    config, recipe = head_config(3, len(VOCABULARY)), Recipe(unroll=2)
    frozen = Frozen(target, None, jnp.asarray(VOCABULARY))
    params = loud_head(config, frozen)
    task = EagleTask(config, TARGET, recipe, compute="float32")
    loss, _ = jax.jit(task.loss)(params, frozen, batch, jax.random.key(0))

    def renormalised(truth, log_q):
        if truth.argmax() not in VOCABULARY:
            return 0.0
        return -(np.exp(log_softmax(truth[VOCABULARY])) * log_q).sum()

    np.testing.assert_allclose(
        loss, expected(params, config, recipe, target, batch, renormalised), rtol=2e-5
    )


def test_acceptance_over_a_reduced_vocabulary_counts_what_it_cannot_draft(target, batch):
    config, recipe = head_config(3, len(VOCABULARY)), Recipe(unroll=1, loss="tvd")
    frozen = Frozen(target, None, jnp.asarray(VOCABULARY))
    params = loud_head(config, frozen)
    task = EagleTask(config, TARGET, recipe, compute="float32")
    everywhere = dataclasses.replace(batch, weights=np.ones_like(batch.weights))
    loss, metrics = jax.jit(task.loss)(params, frozen, everywhere, jax.random.key(0))

    def rejected(truth, log_q):
        p = np.exp(log_softmax(truth))[VOCABULARY]
        return 1 - np.minimum(p, np.exp(log_q)).sum()

    by_hand = expected(params, config, recipe, target, everywhere, rejected)
    np.testing.assert_allclose(loss, by_hand, rtol=2e-5)
    rows = 2 * (FIRST + SECOND - 4)  # the first two tokens of a document are not guessed
    share = rows / texts.rows_of(batch)
    np.testing.assert_allclose(1 - metrics["accepted_0"].mean, by_hand / share, rtol=2e-5)


@pytest.mark.parametrize("variant", PUBLISHED)
def test_a_few_steps_of_training_draft_better(variant, target, batch):
    generation = 3 if variant == "eagle3" else 1
    frozen, config = Frozen(target), head_config(generation)
    recipe = dataclasses.replace(PUBLISHED[variant], unroll=min(PUBLISHED[variant].unroll, 3))
    task = EagleTask(config, TARGET, recipe, compute="float32")
    params = task.init(jax.random.key(0), frozen)
    step = jax.jit(jax.value_and_grad(task.loss, has_aux=True))
    accepted = []
    for number in range(40):
        (_, metrics), grads = step(params, frozen, batch, jax.random.key(number))
        accepted.append(float(metrics["accepted_0"].mean))
        scale = 0.3 / np.sqrt(sum(float((g**2).sum()) for g in jax.tree.leaves(grads)))
        params = jax.tree.map(lambda p, g, scale=scale: p - scale * g, params, grads)
    assert accepted[-1] > accepted[0] + 0.05


def test_gradients_stop_between_the_passes_of_hass_alone(target, batch):
    config, frozen = head_config(1), Frozen(target)
    params = loud_head(config, frozen)
    late = dataclasses.replace(
        batch,
        weights=np.where(np.arange(batch.tokens.shape[1]) == FIRST - 1, 1.0, 0.0)
        * np.ones_like(batch.weights),
    )
    grads = {}
    for through in (False, True):
        recipe = Recipe(unroll=3, step_decay=1e3, through_steps=through)
        task = EagleTask(config, TARGET, recipe, compute="float32")
        grad = jax.jit(jax.grad(lambda *a, task=task: task.loss(*a)[0]))
        grads[through] = grad(params, frozen, late, jax.random.key(0))
    assert float(jnp.abs(grads[True].fc - grads[False].fc).max()) > 1e-3


def test_noise_reaches_the_features_and_depends_on_the_key_but_not_on_held_out_text(target, batch):
    config, frozen = head_config(1), Frozen(target)
    params = loud_head(config, frozen)
    task = EagleTask(config, TARGET, PUBLISHED["eagle1"], compute="float32")
    loss = jax.jit(lambda key: task.loss(params, frozen, batch, key)[0])
    first, again, other = loss(jax.random.key(0)), loss(jax.random.key(0)), loss(jax.random.key(1))
    assert first == again
    assert first != other
    quiet = EagleTask(
        config, TARGET, dataclasses.replace(PUBLISHED["eagle1"], noise=0.0), "float32"
    )
    held_out = jax.jit(lambda key: quiet.loss(params, frozen, batch, key)[0])(jax.random.key(0))
    assert loss(None) == held_out


def test_a_new_head_passes_on_the_deepest_feature(target, batch):
    """Its distribution is the target's early exit at layer 3, plus the noise of a random block."""
    config, frozen = head_config(3), Frozen(target)
    task = EagleTask(config, TARGET, Recipe(unroll=1), compute="float32")
    params = task.init(jax.random.key(0), frozen)
    tokens = batch.tokens[0, :FIRST]
    drafted, _, _ = serve(params, config, target, tokens, 1)
    chain = trees.from_parents(trees.chain(FIRST - 1), FIRST - 1)
    out = decoder.forward(
        target, TARGET, tokens[None], chain, decoder.init_cache(TARGET, 1, FIRST), (3,)
    )
    exits = decoder.unembed(target, TARGET, out.features[0])[0]
    got = np.stack([drafted[i, 0][0] for i in range(FIRST - 1)])
    agreement = np.corrcoef(got.ravel(), np.asarray(exits[: FIRST - 1]).ravel())[0, 1]
    assert agreement > 0.95


def test_what_cannot_be_trained_is_refused():
    with pytest.raises(ValueError, match="--loss 'mse' does not work; choose one of kl, ce"):
        Recipe(unroll=1, loss="mse")
    with pytest.raises(ValueError, match="no feature of the target"):
        EagleTask(head_config(3), TARGET, Recipe(unroll=1, feature_weight=1.0))


@pytest.mark.parametrize("loss", ["ce", "overlap"])
@pytest.mark.parametrize("generation, known", [(1, None), (3, None), (3, 20)])
def test_features_computed_before_give_the_same_loss(generation, known, loss, target, batch):
    vocabulary = None if known is None else jnp.arange(known, dtype=jnp.int32) * 2
    config = head_config(generation, TARGET.vocab_size if known is None else known)
    frozen = Frozen(target, draft_to_target=vocabulary)
    params = loud_head(config, frozen)
    task = EagleTask(config, TARGET, Recipe(unroll=2, loss=loss), compute="float32")
    captured, normed = target_states(task, frozen, batch)
    empty = jnp.zeros((*normed.shape[:2], 0, normed.shape[2]))
    log_total, likeliest = totals_of(target, normed, "float32")
    taught = TaughtBatch(
        batch.tokens,
        batch.segments,
        batch.weights,
        captured=jnp.stack(captured, 2) if captured else empty,
        normed=normed,
        log_total=log_total,
        likeliest=likeliest,
    )
    loss = jax.jit(task.loss)
    online, _ = loss(params, frozen, batch, jax.random.key(0))
    np.testing.assert_allclose(
        loss(params, frozen, taught, jax.random.key(0))[0], online, rtol=1e-6
    )
