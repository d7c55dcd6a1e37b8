"""Programs that do not depend on how strictly the caller has JAX promote arrays."""

import functools
from collections.abc import Callable
from typing import Any

import jax


def standard_promotion(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that is traced under JAX's default rules of promotion.

    jspec broadcasts ranks, and multiplies bfloat16 by float32. A caller may have set
    ``jax_numpy_rank_promotion="raise"`` or ``jax_numpy_dtype_promotion="strict"`` for own code.
    """

    @functools.wraps(function)
    def traced(*arguments: Any, **keywords: Any) -> Any:
        with jax.numpy_rank_promotion("allow"), jax.numpy_dtype_promotion("standard"):
            return function(*arguments, **keywords)

    return traced
