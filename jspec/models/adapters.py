"""Adapters that turn a language model in plain JAX, Flax Linen or Flax NNX into a ``Target``.

With a cache, at full speed: the model calls ``attend`` in place of its own attention, and jspec
provides the cache and the tree attention. ::

    def apply(params, tokens, positions, attend):  # int32 [B, N], int32 [B, N]
        ...                             # rotate or embed by positions, not by index in the row
        mixed = attend(layer, q, k, v)  # q [B, H, N, D], k and v [B, Hkv, N, D] -> [B, H, N, D]
        ...                             # once for each layer 0, 1, ...; no mask
        return logits                   # [B, N, V]

Without a cache (``use_cache=False``): any causal model ``apply(params, tokens [B, T]) -> logits
[B, T, V]``, unchanged. It runs over the full buffer in every round, once for each leaf of a draft.
This is slow, but every method and rule works.

Both may return ``(logits, hidden)``; ``hidden`` is a sequence of [B, N, D] that ``capture_layers``
index. Published heads expect the indices of Hugging Face's ``hidden_states``.

The model must be a pure function of its weights and of the tokens that each token sees: no dropout,
no batch statistics, no routing in which tokens compete. ``check`` runs the model to test this.

The constructors return ``(target, params)``; weights stay arguments of compiled programs. Targets
with equal settings and equal models are equal and share programs. Linen modules compare by fields,
NNX modules by graph (structure and static attributes), functions by identity. So do not pass a
lambda or ``functools.partial`` that is made per call; give a function with settings the form of a
frozen dataclass with ``__call__``.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Self

import jax
import jax.numpy as jnp
from flax import errors as flax_errors
from flax import struct
from jax import lax

from jspec.core import kv_cache, trees
from jspec.core.entries import AttentionKV, SlotEntry
from jspec.core.types import Array, Target, TargetOutput, Tree
from jspec.models import probe
from jspec.models.blocks.attend import attention_over
from jspec.models.probe import check

__all__ = ["CachedTarget", "StatelessTarget", "check", "from_function", "from_linen", "from_nnx"]

_INFERENCE = "put it in inference mode: no dropout, running averages, no cache of its own"


@dataclasses.dataclass(frozen=True)
class AdaptedTarget(Target):
    """The base of both adapted targets; use the constructors below."""

    apply: Callable[..., Any]
    vocab_size: int
    max_positions: int
    embed_function: Callable[[Any, Array], Array] | None
    unembed_function: Callable[..., Array] | None

    def embed(self, params: Any, tokens: Array) -> Array:
        """Return input vectors [..., D] of token ids; raise ValueError without ``embed``."""
        return _require(self.embed_function, "embed")(params, tokens)

    def unembed(self, params: Any, hidden: Array, *, norm: bool = True) -> Array:
        """Return logits [..., V] of hidden [..., D]; raise ValueError without ``unembed``."""
        return _require(self.unembed_function, "unembed")(params, hidden, norm=norm)


@dataclasses.dataclass(frozen=True)
class CachedTarget(AdaptedTarget):
    """A model that calls ``attend``."""

    entries: tuple[tuple[int, int, str], ...]  # per layer: key heads, head_dim, dtype
    scale: float | None
    windows: tuple[int | None, ...]

    def init_cache(self, batch: int, capacity: int) -> kv_cache.KVCache:
        """Return an empty cache of ``capacity`` slots per row."""
        layers = (
            AttentionKV.empty(batch, heads, capacity, size, jnp.dtype(dtype))
            for heads, size, dtype in self.entries
        )
        return kv_cache.empty(batch, layers, windows=self.windows)

    def forward(self, params, tokens, tree, cache, capture_layers=()) -> TargetOutput:
        """Score the nodes ``tokens`` [B, N] of ``tree``, which follow the cache's prefix."""
        tree = trees.broadcast(tree, tokens.shape[0])
        mix, tree_kv = attention_over(cache, tree)

        def attend(layer: int, q: Array, k: Array, v: Array) -> Array:
            window = self.windows[layer] if self.windows else None
            return mix(layer, q, k, v, window=window, scale=self.scale).astype(q.dtype)

        positions = cache.length[:, None] + tree.depth
        logits, hidden = probe.outputs(self.apply(params, tokens, positions, attend))
        return TargetOutput(logits, _captured(hidden, capture_layers), tuple(tree_kv))


@struct.dataclass
class TokenSlots(SlotEntry):
    """The committed tokens, of a model that keeps nothing else."""

    tokens: Array  # [B, 1, S, 1] int32

    @classmethod
    def empty(cls, batch: int, capacity: int) -> Self:
        """Return ``capacity`` empty slots per row."""
        return cls(jnp.zeros((batch, 1, capacity, 1), jnp.int32))


@dataclasses.dataclass(frozen=True)
class StatelessTarget(AdaptedTarget):
    """A causal model that runs over the full text in every round."""

    def init_cache(self, batch: int, capacity: int) -> kv_cache.KVCache:
        """Return an empty buffer of ``capacity`` tokens per row."""
        return kv_cache.empty(batch, [TokenSlots.empty(batch, capacity)])

    def forward(self, params, tokens, tree, cache, capture_layers=()) -> TargetOutput:
        """Score the nodes ``tokens`` [B, N] of ``tree``, which follow the cache's prefix.

        It takes one pass per leaf, over the path from the root: one pass for a chain.
        """
        tree = trees.broadcast(tree, tokens.shape[0])
        above = trees.unpack_bits(tree.ancestors, tokens.shape[1])  # [B, N, N]
        is_leaf = above.sum(1) == 1  # an ancestor of no other node
        leaves = jnp.argsort(~is_leaf, axis=1, stable=True)
        run = lambda leaf: self._run_path(params, tokens, tree, cache, capture_layers, above, leaf)

        def step(index: Array, results):
            leaf = lax.dynamic_index_in_dim(leaves, index, 1, keepdims=False)
            fresh, on_path = run(leaf)
            return jax.tree.map(lambda new, old: jnp.where(on_path, new, old), fresh, results)

        if tokens.shape[1] == 1:
            results, _ = run(leaves[:, 0])
        else:
            empty, _ = jax.eval_shape(run, leaves[:, 0])
            empty = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), empty)
            results = lax.fori_loop(0, is_leaf.sum(1).max(), step, empty)
        logits, features = results
        return TargetOutput(logits, features, (TokenSlots(tokens[:, None, :, None]),))

    def _run_path(self, params, tokens, tree: Tree, cache, capture_layers, above, leaf):
        """Return logits and features of the nodes on the path to ``leaf`` [B], and its mask."""
        on_path = jnp.take_along_axis(above, leaf[:, None, None], 1)[:, 0]  # [B, N]
        stored = cache.layers[0].tokens[:, 0, : self.max_positions, 0]
        positions = cache.length[:, None] + tree.depth
        slots = jnp.where(on_path, positions, stored.shape[1])  # others are out of range: dropped
        write = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))
        sequence = write(stored, slots, tokens)
        logits, hidden = probe.outputs(self.apply(params, sequence))
        results = jax.tree.map(
            lambda x: jnp.take_along_axis(x, positions[:, :, None], 1, mode="clip"),
            (logits, _captured(hidden, capture_layers)),
        )
        return results, on_path[:, :, None]


def _require(function: Callable | None, name: str) -> Callable:
    if function is None:
        raise ValueError(
            f"the drafter uses the target's {name}, but the adapter was made without one; "
            f"give {name}=… to the constructor."
        )
    return function


def _captured(hidden: tuple[Array, ...] | None, layers: tuple[int, ...]) -> tuple[Array, ...]:
    cause = f"the drafter captures hidden states {layers}, but the model returns"
    if layers and hidden is None:
        raise ValueError(
            f"{cause} logits alone; let it return (logits, hidden), hidden a sequence of [B, N, D]."
        )
    missing = [index for index in layers if index >= len(hidden)]
    if missing:
        raise ValueError(f"{cause} {len(hidden)} of them: there is no index {missing}.")
    return tuple(hidden[index] for index in layers)


def from_function(
    apply: Callable[..., Any],
    params: Any,
    *,
    max_positions: int,
    use_cache: bool = True,
    vocab_size: int | None = None,
    scale: float | None = None,
    windows: tuple[int | None, ...] = (),
    embed: Callable[[Any, Array], Array] | None = None,
    unembed: Callable[..., Array] | None = None,
) -> tuple[CachedTarget | StatelessTarget, Any]:
    """Return a plain function as a target, and ``params`` unchanged.

    Tracing reads the sizes (layers, heads, vocabulary); nothing runs or compiles.

    Args:
      apply: the model, as the module's docstring describes it.
      params: its weights, a pytree.
      max_positions: longest sequence that the model supports.
      use_cache: whether ``apply`` takes positions and ``attend``.
      vocab_size: expected width of the logits, as a check.
      scale: factor on the attention scores; None for ``head_dim ** -0.5``.
      windows: sliding window of each layer or None; () for no windows.
      embed: ``(params, tokens [...]) -> [..., D]``, for drafters that share the embedding.
      unembed: ``(params, hidden [..., D], *, norm) -> [..., V]``, for drafters that share the head;
        If ``norm``, the final norm is applied first.

    Raises:
      ValueError: the model does not match these arguments.
    """
    if max_positions < 1:
        raise ValueError(f"max_positions={max_positions} must be at least 1.")
    probe.check_takes(apply, use_cache, "params")
    if use_cache:
        width, entries = probe.cached(apply, params, max_positions)
        target = CachedTarget(
            apply=apply,
            vocab_size=width,
            max_positions=max_positions,
            embed_function=embed,
            unembed_function=unembed,
            entries=entries,
            scale=scale,
            windows=tuple(windows),
        )
        _check_windows(target.windows, len(entries))
    elif windows or scale is not None:
        raise ValueError(
            "scale and windows belong to use_cache=True; a model with its own attention applies "
            "them itself."
        )
    else:
        target = StatelessTarget(
            apply=apply,
            vocab_size=probe.stateless(apply, params, max_positions),
            max_positions=max_positions,
            embed_function=embed,
            unembed_function=unembed,
        )
    if vocab_size not in (None, target.vocab_size):
        raise ValueError(
            f"vocab_size={vocab_size}, but the model's logits have {target.vocab_size} columns; "
            "drop vocab_size, or pass the padded size."
        )
    _check_hashable(target)
    return target, params


def _check_hashable(target: AdaptedTarget) -> None:
    try:
        hash(target)
    except TypeError as error:
        raise ValueError(
            f"the model must be hashable, because it keys compiled programs: {error}; use tuples "
            "and frozen dataclasses for the settings of modules, not lists or dicts."
        ) from error


def _check_windows(windows: tuple[int | None, ...], num_layers: int) -> None:
    if windows and len(windows) != num_layers:
        raise ValueError(
            f"windows={windows} has {len(windows)} entries for {num_layers} layers; give one for "
            "each layer, None for no window."
        )
    if any(window is not None and window < 1 for window in windows):
        raise ValueError(f"windows={windows} must be at least 1 each, or None.")


def from_linen(
    module: Any,
    variables: Any,
    *,
    method: str | None = None,
    options: Mapping[str, Hashable] | None = None,
    embed: Callable | str | None = None,
    unembed: Callable | str | None = None,
    **settings: Any,
) -> tuple[CachedTarget | StatelessTarget, Any]:
    """Return a Flax Linen module as a target, and its variables.

    Args:
      module: unbound, with hashable fields (tuples, not lists). Its call takes the arguments of
        ``apply`` without ``params``.
      variables: result of ``module.init``: parameters, running averages.
      method: the method to call; None for ``__call__``.
      options: keyword arguments of every call, such as ``{"deterministic": True}``.
      embed: name of a method, or a function ``(module, tokens)``.
      unembed: the same for ``(module, hidden, *, norm)``.
      **settings: those of ``from_function``; ``max_positions`` is required.

    Raises:
      ValueError: as ``from_function``; or the call draws random numbers or updates variables.
    """
    from flax import linen  # imported here because its import is slow

    _check_kind(module, linen.Module, "from_linen")
    bind = functools.partial(_LinenCall, module)
    return _from_module(module, bind, variables, method, options, embed, unembed, settings)


def from_nnx(
    module: Any,
    *,
    method: str | None = None,
    options: Mapping[str, Hashable] | None = None,
    embed: Callable | str | None = None,
    unembed: Callable | str | None = None,
    **settings: Any,
) -> tuple[CachedTarget | StatelessTarget, Any]:
    """Return a Flax NNX module as a target, and a snapshot of its variables as nested dicts.

    The arguments are those of ``from_linen``, without ``variables``. The target is a copy in
    inference mode (dropout, batch statistics), so it and ``module`` do not change each other.

    Raises:
      ValueError: as ``from_function``; or the call updates variables or draws random numbers. This
        is not detected inside ``nnx.jit`` and ``nnx.remat``, which rewrite every variable.
    """
    from flax import nnx  # imported here because its import is slow

    _check_kind(module, nnx.Module, "from_nnx")
    inference = nnx.merge(*nnx.split(module))
    inference.eval()
    graph, state = nnx.split(inference)
    bind = functools.partial(_NNXCall, graph)
    params = nnx.to_pure_dict(state)
    return _from_module(module, bind, params, method, options, embed, unembed, settings)


def _from_module(module, bind, params, method, options, embed, unembed, settings):
    """Return the target of ``bind(method, options)``, a function of (params, …)."""
    options = tuple(sorted(dict(options or {}).items()))
    probe.check_takes(
        getattr(module, method or "__call__"), settings.get("use_cache", True), None, dict(options)
    )
    return from_function(
        bind(method, options),
        params,
        embed=embed and bind(embed),
        unembed=unembed and bind(unembed),
        **settings,
    )


def _check_kind(module: Any, kind: type, name: str) -> None:
    if not isinstance(module, kind):
        raise ValueError(
            f"{name} takes an instance of {kind.__module__.split('.')[1]}.{kind.__name__}, not "
            f"{module!r:.80}; use from_linen, from_nnx or from_function."
        )


@dataclasses.dataclass(frozen=True)
class _ModuleCall:
    module: Any  # graph of an NNX module
    method: Callable | str | None
    options: tuple[tuple[str, Hashable], ...] = ()


class _LinenCall(_ModuleCall):
    """A Linen module as a function of (variables, …)."""

    def __call__(self, variables: Any, *args: Any, **more: Any) -> Any:
        options = dict(self.options) | more
        try:
            return self.module.apply(variables, *args, method=self.method, **options)
        except (flax_errors.InvalidRngError, flax_errors.ModifyScopeVariableError) as error:
            raise ValueError(
                f"{type(self.module).__name__} is not a pure function of its variables: {error} "
                f"To make a target of it, {_INFERENCE}; options={{'deterministic': True}} sets a "
                "switch."
            ) from error


class _NNXCall(_ModuleCall):
    """An NNX module as a function of (state, …)."""

    def __call__(self, values: Any, *args: Any, **more: Any) -> Any:
        from flax import nnx

        module = nnx.merge(self.module, values)
        state = lambda: dict(nnx.to_flat_state(nnx.state(module)))
        before = {path: (variable, variable.get_value()) for path, variable in state().items()}
        name = self.method or "__call__"
        function = getattr(type(module), name) if isinstance(name, str) else name
        result = function(module, *args, **dict(self.options), **more)
        after = state()
        changed = [path for path, (_, old) in before.items() if after[path].get_value() is not old]
        # If parameters are new objects too, a transformation has rewritten all of them, unchanged.
        if changed and not any(isinstance(before[path][0], nnx.Param) for path in changed):
            names = ", ".join(".".join(map(str, path)) for path in changed)
            raise ValueError(
                f"{type(module).__name__} changes its variables when it is called: {names}. To "
                f"make a target of it, {_INFERENCE}."
            )
        return result
