"""Inspection of a user's model: its sizes by tracing, its purity by running it.

Tracing needs no device and no compilation. So the adapters refuse a model that does not match its
description, with a ValueError, before anything else happens.
"""

import inspect
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import kv_cache, trees
from jspec.core.types import Array, Target

LayerShape = tuple[int, int, str]  # key heads, head_dim and dtype of a layer


def outputs(result: Any) -> tuple[Any, tuple[Array, ...] | None]:
    """Return the logits and the hidden states (None if absent) of a model's result."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], tuple | list):
        return result[0], tuple(result[1])
    return result, None


def stateless(apply: Callable, params: Any, max_positions: int) -> int:
    """Return the width V of the logits of ``apply(params, tokens [B, T]) -> logits [B, T, V]``."""
    shapes = ((2, min(3, max_positions)), (1, max_positions))
    widths = {_width(_trace(apply, params, *shape), shape) for shape in shapes}
    if len(widths) > 1:
        raise ValueError(f"the width of the logits depends on the tokens' shape: {sorted(widths)}.")
    return widths.pop()


def cached(apply: Callable, params: Any, max_positions: int) -> tuple[int, tuple[LayerShape, ...]]:
    """Return the logits' width and the layers of ``apply(params, tokens, positions, attend)``."""
    shape = 2, min(13, max_positions)  # no model has 13 heads, so swapped axes are detected
    layers: dict[int, LayerShape] = {}

    def run(params: Any, tokens: Array):
        fresh = []

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            _check_call(layer, layers, q, k, v, shape)
            layers[layer] = (k.shape[1], k.shape[3], k.dtype.name)
            fresh.append((k, v))
            return jnp.zeros(q.shape, q.dtype)

        positions = jnp.broadcast_to(jnp.arange(shape[1]), shape)
        return apply(params, tokens, positions, attend), fresh

    result, _ = _trace(run, params, *shape)
    width = _width(result, shape)
    if not layers:
        raise ValueError(
            "the model never called attend, so its tokens cannot see each other; call it in place "
            "of the attention, or pass use_cache=False for a model with its own."
        )
    if sorted(layers) != list(range(len(layers))):
        raise ValueError(f"attend was called for layers {sorted(layers)}; number them from 0 on.")
    return width, tuple(layers[layer] for layer in range(len(layers)))


def check_takes(
    function: Callable, use_cache: bool, first: str | None, options: Iterable[str] = ()
) -> None:
    """Raise ValueError if a function does not take the arguments that ``use_cache`` implies.

    ``first`` is the name of the argument before the tokens, None if there is none. ``options`` are
    the names of further keyword arguments.
    """
    arguments = [first] if first else []
    arguments += ["tokens", "positions", "attend"] if use_cache else ["tokens"]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin: tracing raises if it does not fit
        return
    try:
        signature.bind(*arguments, **dict.fromkeys(options))
    except TypeError as error:
        raise ValueError(
            f"the model takes {signature}, but use_cache={use_cache} calls it with "
            f"({', '.join([*arguments, *options])}): {error}. A model with its own attention needs "
            "use_cache=False, one that calls attend needs use_cache=True; options=… fills other "
            "arguments of a module."
        ) from None


def _trace(run: Callable, params: Any, batch: int, length: int) -> Any:
    """Return the abstract result of ``run(params, tokens)`` for int32 tokens [batch, length]."""
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    try:
        program, result = jax.make_jaxpr(run, return_shape=True)(params, tokens)
    except Exception as error:
        error.add_note(f"jspec was tracing the model with int32 tokens [{batch}, {length}].")
        raise
    if any(isinstance(constant, jax.core.Tracer) for constant in program.consts):
        raise ValueError(
            "the keys or values that the model passed to attend belong to a transformation; call "
            "attend outside jax.jit, jax.checkpoint, vmap and scan, in a Python loop over layers."
        )
    return result


def _width(result: Any, shape: tuple[int, int]) -> int:
    """Return the width of the logits of a model's result after checking its shapes."""
    logits, hidden = outputs(result)
    batch, length = shape
    if not _fits(logits, shape):
        returned = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", result)
        raise ValueError(
            f"for tokens {list(shape)} the model must return logits [{batch}, {length}, V], or "
            f"(logits, hidden) with a tuple of hidden states, but it returned {returned}."
        )
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be floating point numbers, not {logits.dtype}.")
    for index, states in enumerate(hidden or ()):
        if not _fits(states, shape):
            raise ValueError(f"hidden state {index} must be [{batch}, {length}, D], not {states}.")
    return logits.shape[2]


def _fits(x: Any, shape: tuple[int, int]) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct) and x.ndim == 3 and x.shape[:2] == shape


def _check_call(layer: Any, seen: dict, q: Array, k: Array, v: Array, shape: tuple) -> None:
    """Check a call of ``attend`` for tokens of ``shape``; ``seen`` holds the layers before."""
    if not isinstance(layer, int):
        raise ValueError(
            f"attend's layer must be a Python int, not {layer}: write the loop over the layers in "
            "Python; a scan over them would copy the cache."
        )
    if layer in seen:
        raise ValueError(f"attend was called twice for layer {layer}; each has one cache entry.")
    arrays = [f"{name} {x.dtype}{list(x.shape)}" for name, x in (("q", q), ("k", k), ("v", v))]
    passed = f"layer {layer} passed attend {', '.join(arrays)} for tokens {list(shape)}"
    around = lambda x: (x.ndim, x.shape[0], *x.shape[2:])  # without the number of heads
    expected = (4, *shape, q.shape[-1])
    if {around(q), around(k), around(v)} != {expected} or k.shape != v.shape:
        raise ValueError(
            f"{passed}; it takes q [B, H, N, D] and k, v [B, Hkv, N, D], heads before nodes: apply "
            "swapaxes(1, 2) if yours come after."
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{passed}; the query heads must be a multiple of the key heads.")
    if k.dtype != v.dtype:
        raise ValueError(f"{passed}; keys and values must have one dtype, that of the cache.")


def check(target: Target, params: Any, *, tolerance: float = 1e-3, seed: int = 0) -> float:
    """Run a target on random tokens and return the largest difference of logits that must be equal.

    It detects a model that sees the future, numbers its tokens itself, or mixes rows of a batch, in
    one small compiled program. Shapes cannot show this.

    The result and ``tolerance`` are relative to the largest logit; bfloat16 models need more.

    Raises:
      ValueError: the difference exceeds ``tolerance``.
    """
    if target.max_positions < _LENGTH:
        raise ValueError(f"check needs {_LENGTH} positions; the model has {target.max_positions}.")
    future, branched = jax.jit(_gaps, static_argnums=0)(target, params, seed)
    future, branched = float(future), float(branched)
    if not future <= tolerance:
        raise ValueError(
            f"the logits of a token change with later tokens, by {future:.2g} of the largest; "
            "make the model causal, and independent of the other tokens of a pass."
        )
    if not branched <= tolerance:
        raise ValueError(
            f"the logits of a draft tree differ from those of the same text, by {branched:.2g} of "
            "the largest; number tokens by the positions it is given, and keep rows independent."
        )
    return max(future, branched)


_LENGTH = 10  # tokens of the text that ``check`` runs


def _gaps(target: Target, params: Any, seed: Array) -> tuple[Array, Array]:
    """Return the changes of logits by later tokens, and between a tree and plain text."""
    prefix, vocab = jnp.array([3, 1]), target.vocab_size
    tokens = jax.random.randint(jax.random.key(seed), (2, _LENGTH), 0, vocab)
    chain = trees.chain_tree(2, _LENGTH)
    empty = target.init_cache(2, _LENGTH)
    plain = target.forward(params, tokens, chain, empty, ())
    largest = jnp.abs(plain.logits).max()
    gap = lambda a, b: jnp.abs(a - b).max() / largest

    half = _LENGTH // 2
    later = jnp.arange(_LENGTH) >= half
    other = target.forward(params, (tokens + later) % vocab, chain, empty, ())
    future = gap(plain.logits[:, :half], other.logits[:, :half])

    # After a ragged prefix, nodes 0, 1 and 3 continue the text; 2 and 4 are another branch.
    rows = jnp.broadcast_to(jnp.arange(_LENGTH), tokens.shape)
    cache = kv_cache.append(empty, plain.tree_kv, rows, prefix)
    tree = trees.from_parents(np.array([-1, 0, 0, 1, 2], np.int32), 2)
    positions = prefix[:, None] + tree.depth
    drafted = jnp.take_along_axis(tokens, positions, 1) + np.array([0, 0, 1, 0, 1])
    branched = target.forward(params, drafted % vocab, tree, cache, ())
    straight = jnp.take_along_axis(plain.logits, positions[:, :, None], 1)
    text = np.array([0, 1, 3])
    return future, gap(straight[:, text], branched.logits[:, text])
