"""Tests that a batch-invariant decoder's logits do not depend on the grouping into passes."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core import kv_cache, trees
from jspec.models import decoder
from jspec.models.batch_invariant import BatchInvariantDecoder
from jspec.models.blocks.experts import Experts
from jspec.models.blocks.latent_attention import LatentAttention
from jspec.models.decoder import Decoder
from tests import fakes, networks, tiny

LENGTH = 90  # more than a block of slots and several tiles of queries
CONFIG = networks.small(
    vocab_size=256,
    hidden_size=128,
    intermediate_size=344,
    head_dim=32,
    max_positions=256,
    qk_norm=True,
    windows=(None, 20),
)


@functools.cache
def weights(dtype):
    params = decoder.init_params(jax.random.key(0), CONFIG, jnp.dtype(dtype))
    return networks.loud(params, 4)


@functools.partial(jax.jit, static_argnums=0)
def run_pass(target, params, tokens, cache):
    """Return logits of the next tokens of a text, and the cache that includes them."""
    batch, size = tokens.shape
    out = target.forward(params, tokens, trees.chain_tree(batch, size), cache)
    rows = jnp.broadcast_to(jnp.arange(size), (batch, size))
    return out.logits, kv_cache.append(cache, out.tree_kv, rows, jnp.full((batch,), size))


def logits(kind, dtype, *, sizes, batch=1, capacity=LENGTH):
    """Return logits [LENGTH, V] of the first text, in passes of ``sizes`` tokens."""
    text = np.random.default_rng(0).integers(0, CONFIG.vocab_size, (8, LENGTH)).astype(np.int32)
    target = kind(CONFIG)
    cache, parts, done = target.init_cache(batch, capacity), [], 0
    for size in itertools.cycle(sizes):
        chunk = text[:batch, done : done + size]
        if chunk.shape[1] < size:
            return np.concatenate(parts)
        out, cache = run_pass(target, weights(dtype), chunk, cache)
        parts.append(np.asarray(out[0]))
        done += size


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_logits_do_not_depend_on_pass_size_batch_or_capacity(dtype):
    plain = logits(BatchInvariantDecoder, dtype, sizes=[1])
    ordinary = logits(Decoder, dtype, sizes=[1])
    differs = False
    for changes in ({"sizes": [5]}, {"sizes": [45], "batch": 8}, {"sizes": [90], "capacity": 200}):
        other = logits(BatchInvariantDecoder, dtype, **changes)
        np.testing.assert_array_equal(other, plain[: len(other)])
        differs |= (logits(Decoder, dtype, **changes) != ordinary[: len(other)]).any()
    # An ordinary decoder rounds differently in some shape, so the test is meaningful.
    assert differs
    np.testing.assert_allclose(plain, ordinary, atol=1e-4 if dtype == "float32" else 0.2)


def test_trees_latent_attention_experts_and_kernels_raise():
    bush = fakes.BushDrafter(2, tiny.VOCAB, parents=(-1, 0, 0))
    script = fakes.Script(jnp.zeros((1, 64), jnp.int32), jnp.zeros(1, jnp.int32))
    with pytest.raises(ValueError, match="deterministic=True takes chains, but this drafter"):
        target = BatchInvariantDecoder(tiny.TARGET.config)
        jspec.generate(target, tiny.params().target, [[1, 2]], drafter=bush, drafter_params=script)
    latent = LatentAttention(
        num_heads=4, kv_rank=8, q_rank=None, nope_dim=8, rope_dim=4, value_dim=8
    )
    experts = Experts(num_experts=4, experts_per_token=2, intermediate_size=8, shared_size=8)
    for name, value, words in (
        ("mixer", latent, "latent attention"),
        ("feed_forward", experts, "experts"),
        ("attention", "pallas_tpu", "attention='pallas_tpu'"),
    ):
        with pytest.raises(ValueError, match=f"deterministic=True does not support {words} of"):
            BatchInvariantDecoder(networks.changed(tiny.TARGET.config, **{name: value}))
