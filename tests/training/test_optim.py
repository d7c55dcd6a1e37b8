import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.drafters import METHODS
from jspec.models import decoder
from jspec.models.heads import dflash, eagle, hydra, medusa, mtp
from tests import tiny
from tests.drafters import dflashes, heads, hydras, mtps, peagle, speculators
from tests.training import toy
from training.trainer.optim import hidden_matrices, make_optimizer, make_schedule


def schedule(name, steps=100, **options):
    return make_schedule(
        toy.settings(schedule=name, learning_rate=1.0, steps=steps, warmup=10, **options)
    )


def test_wsd_before_its_decay_does_not_depend_on_the_length_of_the_run():
    short, long = (schedule("wsd", steps, decay=20) for steps in (100, 200))
    assert [short(s) for s in range(80)] == [long(s) for s in range(80)]
    assert short(5) == 0.5 and short(90) == pytest.approx(0.5) and short(100) == 0


def test_cosine_and_linear_fall_to_their_floor():
    for name, halfway in (("cosine", 0.1 + 0.9 / 2), ("linear", 0.55)):
        course = schedule(name)
        assert course(0) == 0 and course(10) == 1 and course(100) == pytest.approx(0.1)
        assert course(55) == pytest.approx(halfway)
        assert schedule(name, learning_rate_floor=0.0)(100) == pytest.approx(0)


def test_constant_stays_at_its_peak():
    course = schedule("constant")
    assert course(5) == 0.5 and course(10) == course(5000) == 1


PARAMS = {
    "embedding": jnp.full((4, 4), 2.0),
    "layers": ({"up": jnp.full((4, 4), 2.0)}, {"up": jnp.full((4, 4), 2.0)}),
    "norm": jnp.full((4,), 2.0),
    "head": jnp.full((4, 4), 2.0),
    "joint": {"heads": ({"up": jnp.full((4, 4), 2.0)},)},
    "speculator": {"embeddings": (jnp.full((4, 4), 2.0),), "heads": (jnp.full((4, 4), 2.0),)},
}


def updated(grads, **options):
    optimizer = make_optimizer(toy.settings(warmup=0, learning_rate=0.5, **options))
    return optimizer.update(grads, optimizer.init(PARAMS), PARAMS)[0]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_only_the_blocks_matrices_decay(name):
    zeros = jax.tree.map(jnp.zeros_like, PARAMS)
    updates = updated(zeros, optimizer=name, weight_decay=0.1)
    for inner in (*updates["layers"], *updates["joint"]["heads"]):
        np.testing.assert_allclose(inner["up"], -0.5 * 0.1 * 2.0, rtol=1e-5)
    outer = [updates[name] for name in ("embedding", "norm", "head", "speculator")]
    assert not any(leaf.any() for leaf in jax.tree.leaves(outer))


def test_adamw_takes_its_betas():
    # One step of Adam from zero is the sign of the gradient; two differing steps are not.
    def second(beta1, beta2):
        optimizer = make_optimizer(
            toy.settings(
                warmup=0, learning_rate=1.0, beta1=beta1, beta2=beta2, weight_decay=0.0, clip="none"
            )
        )
        state = optimizer.init(PARAMS)
        for size in (1.0, 3.0):
            grads = jax.tree.map(lambda x, size=size: jnp.full_like(x, size), PARAMS)
            updates, state = optimizer.update(grads, state, PARAMS)
        return float(updates["norm"][0])

    for beta1, beta2 in ((0.9, 0.98), (0.5, 0.9)):
        mean = (beta1 * (1 - beta1) * 1 + (1 - beta1) * 3) / (1 - beta1**2)
        square = (beta2 * (1 - beta2) * 1 + (1 - beta2) * 9) / (1 - beta2**2)
        assert second(beta1, beta2) == pytest.approx(-mean / square**0.5, rel=1e-4)


def test_muon_turns_the_gradient_of_a_block_into_an_orthogonal_step():
    grads = jax.tree.map(jnp.zeros_like, PARAMS)
    random = jax.random.normal(jax.random.key(0), (4, 4))
    grads["layers"][0]["up"] = random
    step = updated(grads, optimizer="muon", weight_decay=0.0)["layers"][0]["up"]
    singular = np.linalg.svd(step, compute_uv=False)
    assert singular.min() > 0.5 * singular.max()
    assert np.linalg.svd(random, compute_uv=False).min() < 0.5 * np.linalg.svd(random)[1].max()


def test_with_muon_the_other_weights_take_a_share_of_the_learning_rate():
    grads = jax.tree.map(jnp.ones_like, PARAMS)
    options = dict(optimizer="muon", weight_decay=0.0, clip="none")
    whole, share = (updated(grads, adamw_share=share, **options) for share in (1.0, 0.25))
    for name in ("embedding", "norm", "head"):
        np.testing.assert_allclose(share[name], 0.25 * np.asarray(whole[name]), rtol=1e-5)
    np.testing.assert_array_equal(share["layers"][0]["up"], whole["layers"][0]["up"])


def test_gradients_are_cut_by_norm_or_by_value():
    grads = jax.tree.map(lambda x: jnp.full_like(x, 0.1), PARAMS)
    grads["norm"] = jnp.array([30.0, 0.2, -40.0, 0.0])

    def cut(**options):
        optimizer = make_optimizer(toy.settings(beta1=0.0, **options))
        state = optimizer.update(grads, optimizer.init(PARAMS), PARAMS)[1]
        means = [
            leaf
            for path, leaf in jax.tree_util.tree_leaves_with_path(state)
            if "mu" in jax.tree_util.keystr(path) and "norm" in jax.tree_util.keystr(path)
        ]
        return means[0]

    np.testing.assert_allclose(cut(clip="value", clip_at=0.5), [0.5, 0.2, -0.5, 0.0])
    np.testing.assert_allclose(cut(clip="none"), grads["norm"])
    by_norm = cut(clip="norm", clip_at=2.0)
    np.testing.assert_allclose(by_norm, grads["norm"] * 2.0 / optax_norm(grads), rtol=1e-5)


def optax_norm(tree) -> float:
    return float(np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(tree))))


NETWORKS = {
    "decoder": (decoder, tiny.TARGET.config),
    "tied decoder": (decoder, tiny.DRAFT_CONFIG),
    "eagle": (eagle, heads.CONFIGS["eagle"]),
    "eagle3": (eagle, heads.CONFIGS["eagle3"]),
    "p-eagle": (eagle, peagle.CONFIG),
    "medusa": (medusa, heads.CONFIGS["medusa"]),
    **{f"hydra {name}": (hydra, config) for name, config in hydras.CONFIGS.items()},
    **{f"mtp {name}": (mtp, config) for name, config in mtps.CONFIGS.items()},
    **{f"dflash {name}": (dflash, config) for name, config in dflashes.CONFIGS.items()},
    **{
        f"speculator {name}": (speculators.module_of(name), config)
        for name, config in speculators.CONFIGS.items()
    },
}


def shapes_of(network):
    module, config = network
    return jax.eval_shape(lambda: module.init_params(jax.random.key(0), config))


def of_more_tokens(config):
    """Return the config with one more token in each vocabulary."""
    changed = {}
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if field.name in ("vocab_size", "target_vocab_size"):
            changed[field.name] = value + 1
        elif dataclasses.is_dataclass(value):
            changed[field.name] = of_more_tokens(value)
    return dataclasses.replace(config, **changed)


def test_the_networks_are_those_of_all_methods():
    known = {type(shapes_of(network)) for network in NETWORKS.values()}
    drafting = {kind for method in METHODS.values() for kind in getattr(method, "weights", ())}
    assert drafting <= known


@pytest.mark.parametrize("name", NETWORKS)
def test_matrices_with_an_axis_of_tokens_are_not_inner_ones(name):
    """It would decay, and Muon would give its rows equal lengths."""
    module, config = NETWORKS[name]
    shapes, wider = shapes_of((module, config)), shapes_of((module, of_more_tokens(config)))
    inner = hidden_matrices(shapes)
    outer = jax.tree.map(lambda a, b: a.shape != b.shape, shapes, wider)
    both = jax.tree.map(lambda a, b: a and b, inner, outer)
    wrong = [jax.tree_util.keystr(path) for path, x in jax.tree.leaves_with_path(both) if x]
    assert not wrong
    missed = jax.tree.map(
        lambda leaf, hidden, tokens: leaf.ndim == 2 and not hidden and not tokens,
        shapes,
        inner,
        outer,
    )
    assert not any(jax.tree.leaves(missed))
