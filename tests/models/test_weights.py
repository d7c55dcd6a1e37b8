"""Kinds of weights: a new one is a class, and every model runs with it unchanged."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jspec import ops
from jspec.core import trees
from jspec.core.types import Params
from jspec.core.weights import Transposed, Weight, as_arrays, columns_from
from jspec.engine import functional as host
from jspec.engine.engine import Engine
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.models import decoder
from jspec.models.blocks.experts import Experts
from jspec.models.blocks.latent_attention import LatentAttention
from tests import networks, tiny


@struct.dataclass
class Int8(Weight):
    """A matrix [..., I, O] of whole numbers, with a scale for each output."""

    values: jax.Array  # int8 [..., I, O]
    scale: jax.Array  # float32 [..., 1, O]

    shape = property(lambda self: self.values.shape)
    dtype = property(lambda self: self.scale.dtype)

    def array(self):
        return self.values * self.scale

    def linear(self, x, *, transposed):
        product = functools.partial(ops.linear, w=self.values.astype(self.dtype))
        if transposed:  # the outputs of the matrix are the inputs of the product
            return product(x * self.scale[0], transposed=True)
        return product(x) * self.scale[0]

    def look_up(self, ids):
        return self.values[ids] * self.scale[0]


@struct.dataclass
class Slow(Weight):
    """A kind that defines no product of its own."""

    stored: jax.Array

    shape = property(lambda self: self.stored.shape)
    dtype = property(lambda self: self.stored.dtype)

    def array(self):
        return -self.stored


def int8(x):
    scale = jnp.abs(x).max(-2, keepdims=True) / 127
    return Int8(jnp.round(x / scale).astype(jnp.int8), scale)


KINDS = {"int8": int8, "slow": lambda x: Slow(-x), "transposed": None}
CONFIGS = {
    "dense": tiny.TARGET.config,
    "tied": tiny.DRAFT_CONFIG,
    "latent experts": networks.changed(
        tiny.TARGET.config,
        mixer=LatentAttention(4, 16, 12, 8, 4, 8),
        feed_forward=Experts(4, 2, 8, 8),
    ),
}


def stored_as(kind, params):
    """Return weights whose matrices are of ``kind``; ``Transposed`` are two-dimensional."""
    if kind != "transposed":
        return jax.tree.map(lambda x: KINDS[kind](x) if x.ndim > 1 else x, params)
    layers = jax.tree.map(lambda x: Transposed(x.T) if x.ndim == 2 else x, params.layers)
    return params.replace(layers=layers)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_with_a_kind_of_weights_are_those_of_its_arrays(kind, name):
    config = CONFIGS[name]
    params = stored_as(kind, decoder.init_params(jax.random.key(0), config))
    tokens, cache = jnp.arange(20).reshape(2, 10) * 3 % 64, decoder.init_cache(config, 2, 16)
    run = jax.jit(lambda params: decoder.forward(params, config, tokens, TREE, cache).logits)
    actual, expected = run(params), run(as_arrays(params))
    assert isinstance(params.layers[0].mixer.output, Weight)
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4 * np.abs(expected).max())


TREE = trees.chain_tree(2, 10)


def test_an_engine_generates_with_a_kind_of_weights_that_it_does_not_know():
    stored = stored_as("int8", tiny.params().target)
    rows = [host.SequenceParams(each, max_tokens=12) for each in tiny.prompts()]
    plan, texts = Plan(tiny.TARGET, tiny.NGRAM), []
    for target in (stored, as_arrays(stored)):
        params = Params(target)
        pool = Pool(plan, params, num_pages=40, page_size=16)
        engine = Engine(plan, params, num_slots=3, capacity=64, pool=pool)
        texts.append([answer.tokens.tolist() for answer in engine.run(rows)])
    assert texts[0] == texts[1]


@pytest.mark.parametrize("kind", KINDS)
def test_keys_and_values_alone_are_columns_of_a_weight_of_any_kind(kind):
    mixer = tiny.TARGET.config.layers[0].mixer
    params = decoder.init_params(jax.random.key(0), tiny.TARGET.config)
    params = stored_as(kind, params).layers[0].mixer
    x, first = jax.random.normal(jax.random.key(1), (2, 5, 32)), mixer.qkv_sizes[0]
    identity = jnp.ones((2, 5, 1)), jnp.zeros((2, 5, 1))
    entry = mixer.keys_and_values(params, x, identity, ops.linear)
    both = (x @ params.qkv.array())[..., first:].reshape(2, 5, 2, mixer.num_kv_heads, -1)
    for actual, expected in zip((entry.k, entry.v), both.transpose(2, 0, 3, 1, 4), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-5)
    stays = isinstance(columns_from(params.qkv, first), Transposed)
    assert stays == (kind == "transposed")


def test_training_gets_the_arrays_of_weights_of_every_kind():
    stored = stored_as("transposed", tiny.params().target)
    trained = as_arrays(stored)
    assert not any(isinstance(x, Weight) for x in jax.tree.leaves(trained))
    assert jax.tree.structure(trained) == jax.tree.structure(tiny.params().target)
    for leaf, like in zip(*map(jax.tree.leaves, (trained, tiny.params().target)), strict=True):
        np.testing.assert_array_equal(leaf, like)
