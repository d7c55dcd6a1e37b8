"""A network of whose last block only some rows are wanted."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.core import kv_cache, trees
from jspec.models import decoder
from jspec.models.decoder import DecoderConfig
from jspec.models.mla import MlaConfig
from jspec.models.moe import MoeConfig

SIZES = dict(
    vocab_size=40,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=64,
)
CONFIGS = {
    "plain": DecoderConfig(**SIZES),
    "windows": DecoderConfig(**SIZES, windows=(None, 3)),
    "partly rotated": DecoderConfig(**SIZES, qk_norm=True, rotary_dim=4),
    "latent": DecoderConfig(**SIZES, mla=MlaConfig(16, 12, 8, 4, 8)),
    "experts": DecoderConfig(**SIZES, moe=MoeConfig(4, 2, 12, 48)),
}
BATCH, PREFIX, NODES = 3, 5, 6


@functools.partial(jax.jit, static_argnames="config")
def run(params, config, tokens, cache, wanted=None):
    """What leaves the last block, and the entries of all nodes: a chain behind the cache."""
    tree = trees.from_parents(trees.chain(tokens.shape[1] - 1), tokens.shape[1] - 1)
    tree = trees.broadcast(tree, len(tokens))
    attend, entries = decoder.attention_over(cache, tree, windows=config.windows, wanted=wanted)
    x, _ = decoder.trunk(
        params,
        config,
        decoder.embed(params, config, tokens),
        cache.length[:, None] + tree.depth,
        attend,
        wanted=wanted,
    )
    return x, tuple(entries)


@pytest.mark.parametrize("name", CONFIGS)
def test_rows_that_are_wanted_are_as_among_all_and_every_row_leaves_its_keys(name):
    config, rng = CONFIGS[name], np.random.default_rng(0)
    shapes = jax.eval_shape(lambda: decoder.init_params(jax.random.key(0), config))
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(0, 0.3, x.shape), x.dtype), shapes)
    said, tokens = (rng.integers(0, 40, (BATCH, count)) for count in (PREFIX, NODES))
    cache = decoder.init_cache(config, BATCH, PREFIX)
    _, entries = run(params, config, said, cache)
    kept = np.array([PREFIX, 2, 0])  # a row without a prefix too
    cache = kv_cache.append(cache, entries, np.tile(np.arange(PREFIX), (BATCH, 1)), kept)

    whole, all_entries = run(params, config, tokens, cache)
    wanted = np.array([[5, 0], [2, 3], [0, 4]])
    some, some_entries = run(params, config, tokens, cache, wanted)
    assert some.shape == (BATCH, 2, 32)
    expected = np.take_along_axis(np.asarray(whole), wanted[..., None], 1)
    np.testing.assert_allclose(some, expected, atol=2e-5)
    for one, other in zip(jax.tree.leaves(some_entries), jax.tree.leaves(all_entries), strict=True):
        assert one.shape[2] == NODES
        np.testing.assert_allclose(one, other, atol=2e-5)
