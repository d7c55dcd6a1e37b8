import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import trees
from jspec.models import decoder
from tests import networks
from training.losses import chunks
from training.networks import attention
from training.networks.forward import head_of, hidden_states
from training.networks.linear import LINEARS

CONFIG = networks.small(vocab_size=50, tie_embeddings=True)


@pytest.fixture
def params():
    return decoder.init_params(jax.random.key(0), CONFIG)


@pytest.fixture
def windows():
    return jax.random.randint(jax.random.key(1), (3, 41), 0, CONFIG.vocab_size)


def loss_of(params, windows, compute="float32", remat=False):
    x = hidden_states(params, CONFIG, windows[:, :-1], compute, remat)
    return chunks.next_token_loss(x, head_of(params), windows[:, 1:], LINEARS[compute])


def test_attention_in_blocks_equals_plain_causal_attention(monkeypatch):
    monkeypatch.setattr(attention, "QUERY_BLOCK", 16)
    q, k, v = (
        jax.random.normal(jax.random.key(n), (2, heads, 40, 8)) for n, heads in enumerate((4, 2, 2))
    )
    wide = [jnp.repeat(part, 2, axis=1) for part in (k, v)]
    scores = jnp.einsum("bhqd,bhkd->bhqk", q, wide[0]) / np.sqrt(8)
    scores = jnp.where(np.tril(np.ones((40, 40), bool)), scores, -jnp.inf)
    plain = jnp.einsum("bhqk,bhkd->bhqd", jax.nn.softmax(scores, -1), wide[1])
    np.testing.assert_allclose(attention.causal(q, k, v), plain, atol=2e-6)


def test_training_computes_the_features_of_the_serving_decoder(params, windows):
    scale = jax.random.uniform(jax.random.key(2), params.norm.shape, minval=0.5, maxval=1.5)
    params = params.replace(norm=scale)
    last = windows.shape[1] - 1
    chain, cache = trees.from_parents(trees.chain(last), last), decoder.init_cache(CONFIG, 3, 0)
    served = decoder.forward(params, CONFIG, windows, chain, cache, (CONFIG.num_layers,))
    trained = hidden_states(params, CONFIG, windows, "float32")
    np.testing.assert_allclose(trained, served.features[0], atol=1e-5)


def test_loss_in_chunks_equals_the_plain_loss_and_its_gradient(monkeypatch, params, windows):
    monkeypatch.setattr(chunks, "loss_chunk", lambda: 50)  # 120 rows: chunks of 14, 14, 12

    def plain(params):
        x = hidden_states(params, CONFIG, windows[:, :-1], "float32")
        log_p = jax.nn.log_softmax(x @ head_of(params))
        return -jnp.take_along_axis(log_p, windows[:, 1:, None], -1).mean()

    chunked = lambda params: loss_of(params, windows)
    ours, theirs = (
        jax.tree.leaves(jax.jit(jax.value_and_grad(loss))(params)) for loss in (chunked, plain)
    )
    for one, other in zip(ours, theirs, strict=True):
        np.testing.assert_allclose(one, other, atol=2e-6)


def test_bfloat16_gradients_stay_close_to_float32_ones(params, windows):
    def gradient(compute):
        return jax.jit(jax.grad(lambda params: loss_of(params, windows, compute)))(params)

    for coarse, fine in zip(
        jax.tree.leaves(gradient("bfloat16")), jax.tree.leaves(gradient("float32")), strict=True
    ):
        assert jnp.abs(coarse - fine).max() < 0.03 * jnp.abs(fine).max()


def test_recomputed_blocks_give_the_same_gradients_and_save_less_for_them(params, windows):
    def gradients(remat):
        loss = lambda p: loss_of(p, windows, remat=remat)
        saved = jax.eval_shape(lambda p: jax.vjp(loss, p)[1], params)
        return jax.jit(jax.grad(loss))(params), sum(x.size for x in jax.tree.leaves(saved))

    (plain, much), (recomputed, little) = gradients(False), gradients(True)
    chex.assert_trees_all_close(recomputed, plain, atol=1e-6)
    weights = sum(x.size for x in jax.tree.leaves(params))
    assert little - weights < 0.5 * (much - weights)
