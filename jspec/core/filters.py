"""The sampling filters: the range of each, and the tokens that it keeps."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core.parameters import Parameter, between
from jspec.core.types import Array
from jspec.util.values import is_real, is_whole

COLDEST, HOTTEST = 1e-5, 1e30  # temperatures; past them, float32 logits overflow
_LEAST_TOP_P = float(np.finfo(np.float32).tiny)  # devices flush less to 0, which keeps no token


@dataclasses.dataclass(frozen=True)
class Filter(Parameter):
    """A parameter that removes tokens from the distribution.

    ``keep`` maps logits [B, ..., V], scaled by temperature, and values [B, ..., 1] to the tokens
    that stay, bool [B, ..., V].
    """

    keep: Callable[[Array, Array], Array] | None = None  # None for the temperature


_TEMPERATURE = f"0 (greedy), or {COLDEST} to {HOTTEST}; values between 0 and "
_TEMPERATURE += f"{COLDEST} are too close to 0 to divide by"
_TOP_K = "a whole number from 1 to 2**31 - 1, or 0 to turn it off"
_TOP_P = "in (0, 1]; 1 turns it off"


def _keep_min_p(logits: Array, min_p: Array) -> Array:
    return logits >= logits.max(-1, keepdims=True) + jnp.log(min_p)


def keep_top_k(logits: Array, top_k: Array) -> Array:
    """Return where logits [..., V] are among the ``top_k`` [..., 1] largest, ties included."""
    vocab = logits.shape[-1]
    limit = jnp.clip(jnp.where(top_k > 0, top_k, vocab), 1, vocab)
    return lax.cond(
        jnp.any(limit < vocab),
        lambda: _keep_least(logits, jnp.ones_like(logits), limit.astype(logits.dtype)),
        lambda: jnp.ones(logits.shape, bool),
    )


def keep_top_p(logits: Array, top_p: Array) -> Array:
    """Return where logits [..., V] are above the rest of mass 1 - ``top_p`` [..., 1], with ties.

    A token stays if the probability of all larger ones is below ``top_p``.
    """
    return (top_p >= 1) | lax.cond(
        jnp.any(top_p < 1),
        lambda: _keep_least(logits, jax.nn.softmax(logits, -1), top_p),
        lambda: jnp.ones(logits.shape, bool),
    )


def _keep_least(logits: Array, weights: Array, limit: Array) -> Array:
    """Return where the ``weights`` of all larger logits sum to less than ``limit`` [..., 1].

    Searches the bits of the least such logit. That takes one sum a bit; sorting 49,152 logits takes
    30 times as long on a CPU. A GPU makes the sums of two bits in one pass over the logits, as it
    reads them from memory each time.
    """
    unsigned = jnp.dtype(f"uint{jnp.finfo(logits.dtype).bits}")
    ordinals = _ordinals(logits, unsigned)
    least = lax.platform_dependent(
        ordinals,
        weights,
        limit,
        cuda=functools.partial(_least_ordinal, digit=2),
        default=functools.partial(_least_ordinal, digit=1),
    )
    return ordinals >= least


def _least_ordinal(ordinals: Array, weights: Array, limit: Array, *, digit: int) -> Array:
    """Return the least ordinal [..., 1] whose larger ones weigh less; ``digit`` bits in a pass."""
    unsigned = ordinals.dtype
    bits = jnp.iinfo(unsigned).bits

    def clear(index: Array, least: Array) -> Array:
        low = (bits - digit * (index + 1)).astype(unsigned)
        lower = [least - (unsigned.type(each) << low) for each in range(1, 1 << digit)]
        above = [jnp.where(ordinals > one, weights, 0).sum(-1, keepdims=True) for one in lower]
        # The sums increase, so those below the limit are the first ones.
        return least - (sum((each < limit).astype(unsigned) for each in above) << low)

    least = jnp.full((*ordinals.shape[:-1], 1), jnp.iinfo(unsigned).max, unsigned)
    return lax.fori_loop(0, bits // digit, clear, least)


def _ordinals(logits: Array, unsigned: np.dtype) -> Array:
    """Map floats to unsigned integers of the same order; both zeros have one."""
    values = lax.bitcast_convert_type(jnp.where(logits == 0, 0, logits), unsigned)
    sign = unsigned.type(1 << (unsigned.itemsize * 8 - 1))
    return jnp.where(values >= sign, ~values, values | sign)


# Every sampling filter, in the order in which they apply, which is vLLM's. To add one, add its
# entry here and its field to ``SamplingFields``.
FILTERS: dict[str, Filter] = {
    entry.name: entry
    for entry in (
        Filter(
            "temperature",
            0.0,
            lambda x: is_real(x) and (x == 0 or COLDEST <= x <= HOTTEST),
            _TEMPERATURE,
        ),
        Filter("min_p", 0.0, between(0, 1), "in [0, 1]; 0 turns it off", keep=_keep_min_p),
        Filter(
            "top_k",
            0,
            lambda x: is_whole(x, -1),
            _TOP_K,
            lambda x: max(int(x), 0),
            np.int32,
            keep_top_k,
        ),
        Filter(
            "top_p",
            1.0,
            lambda x: is_real(x) and 0 < x <= 1,
            _TOP_P,
            lambda x: max(float(x), _LEAST_TOP_P),
            keep=keep_top_p,
        ),
    )
}


def used_filters(sequence: Any) -> list[str]:
    """Return the names of the filters that a ``SequenceParams`` uses; none if it is greedy."""
    if sequence.temperature == 0:
        return []
    return [name for name, entry in FILTERS.items() if entry.value(sequence) != entry.neutral]
