"""Tests of a decoder whose last block computes only some rows."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import kv_cache, trees
from jspec.models import decoder
from jspec.models.blocks.attend import attention_over
from jspec.models.blocks.experts import Experts
from jspec.models.blocks.latent_attention import LatentAttention
from tests import networks

CONFIGS = {
    "plain": networks.small(),
    "windows": networks.small(windows=(None, 3)),
    "partly rotated": networks.small(qk_norm=True, rotary_dim=4),
    "latent": networks.small(mixer=LatentAttention(4, 16, 12, 8, 4, 8)),
    "experts": networks.small(feed_forward=Experts(4, 2, 12, 48)),
}
BATCH, PREFIX, NODES = 3, 5, 6


@functools.partial(jax.jit, static_argnames="config")
def run(params, config, tokens, cache, rows=None):
    """Return the last residual stream and the cache entries of a chain after the cache."""
    tree = trees.chain_tree(*tokens.shape)
    attend, entries = attention_over(cache, tree, rows=rows)
    x, _ = decoder.trunk(
        params,
        config,
        decoder.embed(params, config, tokens),
        cache.length[:, None] + tree.depth,
        attend,
        rows=rows,
    )
    return x, tuple(entries)


@pytest.mark.parametrize("name", CONFIGS)
def test_selected_rows_equal_those_of_all_rows_and_all_rows_return_keys(name):
    config, rng = CONFIGS[name], np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: decoder.init_params(jax.random.key(0), config))
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes)
    prefix, tokens = (rng.integers(0, 40, (BATCH, count)) for count in (PREFIX, NODES))
    cache = decoder.init_cache(config, BATCH, PREFIX)
    _, entries = run(params, config, prefix, cache)
    lengths = np.array([PREFIX, 2, 0])  # a row without a prefix too
    cache = kv_cache.append(cache, entries, np.tile(np.arange(PREFIX), (BATCH, 1)), lengths)

    every, all_entries = run(params, config, tokens, cache)
    rows = np.array([[5, 0], [2, 3], [0, 4]])
    some, some_entries = run(params, config, tokens, cache, rows)
    assert some.shape == (BATCH, 2, 32)
    expected = np.take_along_axis(np.asarray(every), rows[..., None], 1)
    np.testing.assert_allclose(some, expected, atol=2e-5)
    for one, other in zip(jax.tree.leaves(some_entries), jax.tree.leaves(all_entries), strict=True):
        assert one.shape[2] == NODES
        np.testing.assert_allclose(one, other, atol=2e-5)
