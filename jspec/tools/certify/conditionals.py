"""Distributions of the next token after every prefix, computed in float64 on the CPU.

``conditionals[i]`` [V**i, V] are the logits after each prefix of i tokens, in lexicographic order.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import sampling
from jspec.core.types import Sampling

Conditionals = list[np.ndarray]
_process_logits = jax.jit(sampling.process_logits)


@contextlib.contextmanager
def float64() -> Iterator[None]:
    """Make arrays float64 on the CPU inside the context, whatever the accelerator.

    A TPU only emulates float64, to an unspecified precision, and compiles it ten times slower. The
    enumerated code is the same everywhere.
    """
    with jax.enable_x64(True), jax.default_device(_cpu()):
        yield


def _cpu() -> jax.Device | None:
    """None, JAX's default device, where JAX_PLATFORMS excludes the CPU."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None


def context_free(probs: list[float] | np.ndarray, count: int) -> Conditionals:
    """Return ``count`` conditionals with the same distribution everywhere."""
    with np.errstate(divide="ignore"):
        row = np.log(np.asarray(probs, np.float64))
    return [np.tile(row, (len(row) ** depth, 1)) for depth in range(count)]


def context_dependent(seed: int, vocab_size: int, count: int, scale: float = 1.5) -> Conditionals:
    """Return ``count`` conditionals with different random logits after every prefix."""
    rng = np.random.default_rng(seed)
    return [scale * rng.normal(size=(vocab_size**depth, vocab_size)) for depth in range(count)]


def processed(conditionals: Conditionals, settings: Sampling | None) -> Conditionals:
    """Return processed logits, by the shipped code with the first row of ``settings``."""
    if settings is None or not conditionals:
        return conditionals
    with float64():
        row = jax.tree.map(lambda x: x[:1], settings)
        logits = _process_logits(jnp.asarray(np.concatenate(conditionals))[None], row)
    ends = np.cumsum([len(rows) for rows in conditionals])
    return np.split(np.asarray(logits)[0], ends[:-1])


def softmax(logits: np.ndarray) -> np.ndarray:
    """Return the probabilities of logits [..., V]."""
    peak = logits.max(-1, keepdims=True)
    weights = np.exp(logits - np.where(np.isfinite(peak), peak, 0))
    return weights / weights.sum(-1, keepdims=True)
