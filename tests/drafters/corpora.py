"""Corpora of suffix decoding: fill one, and read it back on the host."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import History
from jspec.drafters.suffix import corpus as suffix_corpus


def responses(corpus):
    """Return the responses in the corpus, the oldest first."""
    host = jax.device_get(corpus)
    starts = host.starts[np.arange(host.oldest, host.newest) % host.starts.shape[0]]
    sizes = np.diff(np.append(starts, host.end))  # wraps around as positions do
    slots = host.tokens.shape[0]
    return [
        host.tokens[(start + 1 + np.arange(size - 1)) % slots].tolist()
        for start, size in zip(starts, sizes[: len(starts)], strict=True)
    ]


def extend(corpus, texts):
    """Store texts (token ids) as responses, the oldest first. Consumes ``corpus``."""
    for text in texts:
        size = 1 << max(len(text), 32).bit_length()  # so few programs are compiled
        row = np.zeros((1, size), np.int32)
        row[0, : len(text)] = text
        corpus = _store(corpus, row, np.int32(len(text)))
    return corpus


@functools.partial(jax.jit, donate_argnums=0)
def _store(corpus, row, length):
    zero = jnp.zeros((1,), jnp.int32)
    return suffix_corpus.store(corpus, History(row, length[None]), zero, jnp.ones((1,), bool))
