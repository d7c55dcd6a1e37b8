"""Finding out what a user's own model is: its sizes by tracing it, its honesty by running it.

Tracing needs no device, no compilation and no time to speak of, so the adapters refuse a model that
does not fit its description before anything else happens.
"""

import inspect
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import kv_cache, trees
from jspec.core.types import Array, Target

# Of the keys and values of one layer: number of heads, head_dim, dtype.
LayerShape = tuple[int, int, str]


def outputs(result: Any) -> tuple[Any, tuple[Array, ...] | None]:
    """Logits and hidden states (None if not offered) of what a model returned."""
    if isinstance(result, tuple) and len(result) == 2 and isinstance(result[1], tuple | list):
        return result[0], tuple(result[1])
    return result, None


def stateless(apply: Callable, params: Any, max_positions: int) -> int:
    """Width V of the logits of ``apply(params, tokens [B, T]) -> logits [B, T, V]``.

    Raises:
      ValueError: the model returns something else, or not for every B and T.
    """
    shapes = ((2, min(3, max_positions)), (1, max_positions))
    widths = {_width(_trace(apply, params, *shape), shape) for shape in shapes}
    if len(widths) > 1:
        raise ValueError(f"the width of the logits depends on the tokens' shape: {sorted(widths)}.")
    return widths.pop()


def cached(apply: Callable, params: Any, max_positions: int) -> tuple[int, tuple[LayerShape, ...]]:
    """Width of the logits of ``apply(params, tokens, positions, attend)``, and its layers.

    Raises:
      ValueError: the model returns something else, or calls ``attend`` in a wrong way.
    """
    shape = 2, min(13, max_positions)  # 13 is nobody's number of heads
    layers: dict[int, LayerShape] = {}

    def run(params: Any, tokens: Array):
        fresh = []

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            _check_layer(layer, layers)
            _check_heads(layer, q, k, v, shape)
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
            "of the attention, or give use_cache=False for a model with its own."
        )
    if sorted(layers) != list(range(len(layers))):
        raise ValueError(f"attend was called for layers {sorted(layers)}; number them from 0 on.")
    return width, tuple(layers[layer] for layer in range(len(layers)))


def check_takes(
    function: Callable, use_cache: bool, first: str | None, options: Iterable[str] = ()
) -> None:
    """Refuses a function that cannot be called with what ``use_cache`` will pass.

    Args:
      function: of the user.
      use_cache: whether it takes positions and ``attend``.
      first: name of what comes before the tokens, None if nothing does.
      options: names of the keyword arguments that will be passed.

    Raises:
      ValueError: it does not take them.
    """
    arguments = [first] if first else []
    arguments += ["tokens", "positions", "attend"] if use_cache else ["tokens"]
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # a builtin: tracing will tell
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


def check_hashable(target: Hashable) -> None:
    """Refuses a target that cannot be the key of a compiled program.

    Raises:
      ValueError: something in it cannot be hashed.
    """
    try:
        hash(target)
    except TypeError as error:
        raise ValueError(
            f"the model must be hashable, as it is part of the key of compiled programs: {error}; "
            "use tuples and frozen dataclasses for the settings of modules, not lists or dicts."
        ) from error


def check_windows(windows: tuple[int | None, ...], num_layers: int) -> None:
    """Refuses sliding windows that do not fit the layers.

    Raises:
      ValueError: their number or a size is wrong.
    """
    if windows and len(windows) != num_layers:
        raise ValueError(
            f"windows={windows} has {len(windows)} entries for {num_layers} layers; give one for "
            "each layer, None where there is no window."
        )
    if any(window is not None and window < 1 for window in windows):
        raise ValueError(f"windows={windows}: a window must be at least 1, or None.")


def _trace(run: Callable, params: Any, batch: int, length: int) -> Any:
    """Abstract results of ``run(params, tokens)`` for int32 tokens [batch, length]."""
    tokens = jax.ShapeDtypeStruct((batch, length), jnp.int32)
    try:
        program, result = jax.make_jaxpr(run, return_shape=True)(params, tokens)
    except Exception as error:
        error.add_note(f"jspec was tracing the model with int32 tokens [{batch}, {length}].")
        raise
    if any(isinstance(constant, jax.core.Tracer) for constant in program.consts):
        raise ValueError(
            "keys or values that the model gave to attend belong to a transformation inside it; "
            "call attend outside jax.jit, jax.checkpoint, vmap and scan, in a Python loop over "
            "the layers."
        )
    return result


def _width(result: Any, shape: tuple[int, int]) -> int:
    """Refuses misshapen results of a model; returns the width of the logits."""
    logits, hidden = outputs(result)
    batch, length = shape
    if not _is_array(logits) or logits.ndim != 3 or logits.shape[:2] != shape:
        returned = jax.tree.map(lambda x: f"{x.dtype}{list(x.shape)}", result)
        raise ValueError(
            f"for tokens {list(shape)} the model must return logits [{batch}, {length}, V], or "
            f"(logits, hidden) with a tuple of hidden states, but it returned {returned}."
        )
    if not jnp.issubdtype(logits.dtype, jnp.floating):
        raise ValueError(f"logits must be floating point numbers, not {logits.dtype}.")
    for index, states in enumerate(hidden or ()):
        if not _is_array(states) or states.ndim != 3 or states.shape[:2] != shape:
            raise ValueError(
                f"hidden state {index} must be [{batch}, {length}, D], but is {states}."
            )
    return logits.shape[2]


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.ShapeDtypeStruct)


def _check_layer(layer: Any, seen: dict[int, LayerShape]) -> None:
    if not isinstance(layer, int):
        raise ValueError(
            f"attend's layer must be a Python int, not {layer}: write the loop over the layers in "
            "Python; a scan over them would copy the cache."
        )
    if layer in seen:
        raise ValueError(f"attend was called twice for layer {layer}; each has one cache entry.")


def _check_heads(layer: int, q: Array, k: Array, v: Array, tokens_shape: tuple[int, int]) -> None:
    gave = (
        f"layer {layer} gave attend q {q.dtype}{list(q.shape)}, k {k.dtype}{list(k.shape)} and "
        f"v {v.dtype}{list(v.shape)} for tokens {list(tokens_shape)}"
    )
    around = lambda x: (x.ndim, x.shape[0], *x.shape[2:])  # all but the number of heads
    batch, length = tokens_shape
    wanted = (4, batch, length, q.shape[-1])
    if {around(q), around(k), around(v)} != {wanted} or k.shape != v.shape:
        raise ValueError(
            f"{gave}; it takes q [B, H, N, D] and k, v [B, Hkv, N, D], with heads before nodes: "
            "swapaxes(1, 2) if yours come after."
        )
    if q.shape[1] % k.shape[1]:
        raise ValueError(f"{gave}; the number of query heads must be a multiple of the key heads.")
    if k.dtype != v.dtype:
        raise ValueError(f"{gave}; keys and values must have one dtype, that of the cache.")


def check(target: Target, params: Any, *, tolerance: float = 1e-3, seed: int = 0) -> float:
    """Runs a target on random tokens and compares logits that must not differ.

    Shapes cannot tell a model that sees the future, that numbers its tokens itself, or in which the
    rows of a batch meet; this does, in one small compiled program.

    Args:
      target: of any kind.
      params: its weights.
      tolerance: as a part of the largest logit; bfloat16 models need a wider one.
      seed: of the tokens.

    Returns:
      The largest difference seen, as a part of the largest logit.

    Raises:
      ValueError: it exceeds ``tolerance``.
    """
    if target.max_positions < _CHECKED:
        raise ValueError(f"check needs {_CHECKED} positions; the model has {target.max_positions}.")
    future, placed = (float(gap) for gap in jax.jit(_gaps, static_argnums=0)(target, params, seed))
    if not future <= tolerance:
        raise ValueError(
            f"the logits of a token change with the tokens after it, by {future:.2g} of the "
            "largest: is the model causal, and each token's work its own?"
        )
    if not placed <= tolerance:
        raise ValueError(
            f"the logits of a draft tree differ from those of the same text in one piece, by "
            f"{placed:.2g} of the largest: does the model number its tokens by the positions it is "
            "given, and keep rows apart?"
        )
    return max(future, placed)


_CHECKED = 10  # tokens of a text that ``check`` runs


def _gaps(target: Target, params: Any, seed: Array) -> tuple[Array, Array]:
    """How far later tokens change earlier logits, and a tree differs from plain text."""
    prefix, vocab = jnp.array([3, 1]), target.vocab_size
    tokens = jax.random.randint(jax.random.key(seed), (2, _CHECKED), 0, vocab)
    chain = trees.from_parents(trees.chain(_CHECKED - 1), _CHECKED - 1)
    empty = target.init_cache(2, _CHECKED)
    plain = target.forward(params, tokens, chain, empty, ())
    largest = jnp.abs(plain.logits).max()
    gap = lambda a, b: jnp.abs(a - b).max() / largest

    half = _CHECKED // 2
    later = jnp.arange(_CHECKED) >= half
    other = target.forward(params, (tokens + later) % vocab, chain, empty, ())
    future = gap(plain.logits[:, :half], other.logits[:, :half])

    # After a ragged prefix, nodes 0, 1 and 3 go on with the text; 2 and 4 are a wrong turn.
    rows = jnp.broadcast_to(jnp.arange(_CHECKED), tokens.shape)
    cache = kv_cache.append(empty, plain.tree_kv, rows, prefix)
    tree = trees.from_parents(np.array([-1, 0, 0, 1, 2], np.int32), 2)
    place = prefix[:, None] + tree.depth
    drafted = jnp.take_along_axis(tokens, place, 1) + np.array([0, 0, 1, 0, 1])
    branched = target.forward(params, drafted % vocab, tree, cache, ())
    straight = jnp.take_along_axis(plain.logits, place[:, :, None], 1)
    text = np.array([0, 1, 3])
    return future, gap(straight[:, text], branched.logits[:, text])
