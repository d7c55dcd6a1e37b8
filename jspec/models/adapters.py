"""A user's own language model, in plain JAX, Flax Linen or Flax NNX, as a ``Target``.

There are two ways in. With a cache, at full speed: the model hands its queries, keys and values to
``attend`` where its own attention stood, and jspec brings the cache and the tree attention. ::

    def apply(params, tokens, positions, attend):  # int32 [B, N], int32 [B, N]
        ...                             # rotate or embed by positions, not by place in the row
        mixed = attend(layer, q, k, v)  # q [B, H, N, D], k and v [B, Hkv, N, D] -> [B, H, N, D]
        ...                             # once for each layer 0, 1, ...; no mask
        return logits                   # [B, N, V]

With ``use_cache=False`` any causal model will do, ``apply(params, tokens [B, T]) -> logits
[B, T, V]``, unchanged. It is run over the whole buffer again in every round, once for each leaf of
a draft: slow, but every method and rule works.

Both may return ``(logits, hidden)`` instead, ``hidden`` a sequence of [B, N, D] that the drafter's
``capture_layers`` index (by Hugging Face's ``hidden_states`` where heads made for it are used).

The model must be a pure function of its weights and of what each token sees: no dropout, no
statistics of a batch, no routing that lets tokens compete. ``check`` tests it by running it.

The constructors give ``(target, params)``; weights stay arguments of the compiled program. Targets
are equal, and share compiled programs, if their settings are equal and their models are: Linen
modules by their fields, NNX modules by their graph (structure and static attributes), functions by
identity. So pass a function defined once, not a lambda or ``functools.partial`` made for each call;
for a function with settings write a frozen dataclass with ``__call__``.
"""

import dataclasses
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import errors as flax_errors
from flax import struct
from jax import lax

from jspec.core import kv_cache, trees
from jspec.core.types import Array, TargetOutput, Tree
from jspec.models import decoder, probe
from jspec.models.probe import check

__all__ = [
    "CachedTarget",
    "StatelessTarget",
    "check",
    "from_function",
    "from_linen",
    "from_nnx",
]

_INFERENCE = "put it in inference mode: no dropout, running averages, no cache of its own"


# --- Targets ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class AdaptedTarget:
    """What both kinds of adapted targets have; made by the constructors below."""

    apply: Callable[..., Any]
    vocab_size: int
    max_positions: int
    embed_function: Callable[[Any, Array], Array] | None
    unembed_function: Callable[..., Array] | None

    def embed(self, params: Any, tokens: Array) -> Array:
        """Token ids to the model's input vectors [..., D].

        Raises:
          ValueError: the adapter was made without ``embed``.
        """
        return _given(self.embed_function, "embed")(params, tokens)

    def unembed(self, params: Any, hidden: Array, *, norm: bool = True) -> Array:
        """Last residual stream [..., D] to logits [..., V]; without ``norm`` the head alone.

        Raises:
          ValueError: the adapter was made without ``unembed``.
        """
        return _given(self.unembed_function, "unembed")(params, hidden, norm=norm)


@dataclasses.dataclass(frozen=True)
class CachedTarget(AdaptedTarget):
    """A model that calls ``attend``."""

    entries: tuple[tuple[int, int, str], ...]  # of each layer: key heads, head_dim, dtype
    scale: float | None
    windows: tuple[int | None, ...]

    def init_cache(self, batch: int, capacity: int) -> kv_cache.KVCache:
        """An empty cache of ``capacity`` slots a row."""
        layers = tuple(
            kv_cache.allocate(1, batch, heads, capacity, size, jnp.dtype(dtype)).layers[0]
            for heads, size, dtype in self.entries
        )
        return kv_cache.KVCache(layers, jnp.zeros((batch,), jnp.int32))

    def forward(self, params, tokens, tree, cache, capture_layers=()) -> TargetOutput:
        """Scores the nodes ``tokens`` [B, N] of ``tree``, placed after the cache's prefix."""
        tree = trees.broadcast(tree, tokens.shape[0])
        mix, tree_kv = decoder.attention_over(cache, tree, scale=self.scale, windows=self.windows)
        attend = lambda layer, q, k, v: mix(layer, q, k, v).astype(q.dtype)
        positions = cache.length[:, None] + tree.depth
        logits, hidden = probe.outputs(self.apply(params, tokens, positions, attend))
        return TargetOutput(logits, _captured(hidden, capture_layers), tuple(tree_kv))


@struct.dataclass
class TokenSlots:
    """The cache entry of a model without a cache: the committed tokens themselves."""

    tokens: Array  # [B, 1, S, 1] int32


@dataclasses.dataclass(frozen=True)
class StatelessTarget(AdaptedTarget):
    """A causal model that is run from the first token again in every round."""

    def init_cache(self, batch: int, capacity: int) -> kv_cache.KVCache:
        """Room for ``capacity`` tokens a row."""
        slots = TokenSlots(jnp.zeros((batch, 1, capacity, 1), jnp.int32))
        return kv_cache.KVCache((slots,), jnp.zeros((batch,), jnp.int32))

    def forward(self, params, tokens, tree, cache, capture_layers=()) -> TargetOutput:
        """Scores the nodes ``tokens`` [B, N] of ``tree``, placed after the cache's prefix.

        One pass for each leaf, over its path from the root: a chain takes one.
        """
        tree = trees.broadcast(tree, tokens.shape[0])
        above = trees.unpack_bits(tree.ancestors, tokens.shape[1])  # [B, N, N]
        is_leaf = above.sum(1) == 1  # an ancestor of itself alone
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
        """Logits and features of the nodes on the way to ``leaf`` [B], and which those are."""
        on_path = jnp.take_along_axis(above, leaf[:, None, None], 1)[:, 0]  # [B, N]
        stored = cache.layers[0].tokens[:, 0, : self.max_positions, 0]
        positions = cache.length[:, None] + tree.depth
        place = jnp.where(on_path, positions, stored.shape[1])
        sequence = jax.vmap(lambda row, at, new: row.at[at].set(new, mode="drop"))(
            stored, place, tokens
        )
        logits, hidden = probe.outputs(self.apply(params, sequence))
        at_nodes = lambda x: jnp.take_along_axis(x, positions[:, :, None], 1, mode="clip")
        results = jax.tree.map(at_nodes, (logits, _captured(hidden, capture_layers)))
        return results, on_path[:, :, None]


def _given(function: Callable | None, name: str) -> Callable:
    if function is None:
        raise ValueError(
            f"the drafter uses the target's {name}, but the adapter was made without one; "
            f"give {name}=… to the constructor."
        )
    return function


def _captured(
    hidden: tuple[Array, ...] | None, capture_layers: tuple[int, ...]
) -> tuple[Array, ...]:
    if capture_layers and hidden is None:
        raise ValueError(
            f"the drafter captures hidden states {capture_layers}, but the model returns logits "
            "alone; let it return (logits, hidden), hidden a sequence of [B, N, D]."
        )
    missing = [index for index in capture_layers if index >= len(hidden)]
    if missing:
        raise ValueError(
            f"the drafter captures hidden states {capture_layers}, but the model returns "
            f"{len(hidden)} of them: there is no index {missing}."
        )
    return tuple(hidden[index] for index in capture_layers)


# --- Constructors ----------------------------------------------------------------------------


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
    """A plain function as a target; the module's docstring says what it takes and returns.

    Sizes (layers, heads, vocabulary) are found by tracing the function: nothing runs or compiles.

    Args:
      apply: the model, a pure function of ``params`` and tokens.
      params: its weights, a pytree.
      max_positions: longest sequence that the model can take.
      use_cache: whether ``apply`` takes positions and ``attend``.
      vocab_size: width of the logits; only to check it against what the model returns.
      scale: factor on the attention scores, ``head_dim ** -0.5`` if None.
      windows: sliding window of each layer, None for a layer without; () for none at all.
      embed: ``(params, tokens [...]) -> [..., D]``; for drafters that share the embedding.
      unembed: ``(params, hidden [..., D], *, norm) -> [..., V]``; for drafters that share the
        head. ``norm`` says whether the final norm comes first or has been applied already.

    Returns:
      The target, and ``params`` unchanged.

    Raises:
      ValueError: the model does not fit its description.
    """
    if max_positions < 1:
        raise ValueError(f"max_positions={max_positions} must be at least 1.")
    probe.check_takes(apply, use_cache, "params")
    common = (max_positions, embed, unembed)
    if use_cache:
        width, entries = probe.cached(apply, params, max_positions)
        target = CachedTarget(apply, width, *common, entries, scale, tuple(windows))
        probe.check_windows(target.windows, len(entries))
    else:
        if windows or scale is not None:
            raise ValueError(
                "scale and windows belong to use_cache=True; a model that brings its own "
                "attention applies its own."
            )
        target = StatelessTarget(apply, probe.stateless(apply, params, max_positions), *common)
    if vocab_size not in (None, target.vocab_size):
        raise ValueError(
            f"vocab_size={vocab_size}, but the model's logits have {target.vocab_size} columns; "
            "drop vocab_size, or pass the padded size."
        )
    probe.check_hashable(target)
    return target, params


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
    """A Flax Linen module as a target; its call takes what ``apply`` does, but for ``params``.

    Args:
      module: unbound; its fields must be hashable (tuples, not lists).
      variables: what ``module.init`` gave: parameters, running averages.
      method: the method to call, ``__call__`` if None.
      options: keyword arguments of every call, such as ``{"deterministic": True}``.
      embed: a method's name, or a function ``(module, tokens)``.
      unembed: a method's name, or a function ``(module, hidden, *, norm)``.
      **settings: those of ``from_function``; ``max_positions`` is required.

    Raises:
      ValueError: as ``from_function``; or the call draws random numbers or updates variables.
    """
    from flax import linen  # whoever has a module has imported it; others need not

    _check_kind(module, linen.Module, "from_linen")
    bind = lambda method, options=(): _LinenCall(module, method, options)
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
    """A Flax NNX module as a target; its call takes what ``apply`` does, but for ``params``.

    The module is split once, and merged again only while tracing. Dropout and batch statistics are
    put in inference mode, in the target and not in ``module``. What comes back as ``params`` is a
    snapshot of its variables as nested dicts: training ``module`` on does not change it.

    Args:
      module: an ``nnx.Module``.
      method: the method to call, ``__call__`` if None.
      options: keyword arguments of every call.
      embed: a method's name, or a function ``(module, tokens)``.
      unembed: a method's name, or a function ``(module, hidden, *, norm)``.
      **settings: those of ``from_function``; ``max_positions`` is required.

    Raises:
      ValueError: as ``from_function``; or the call updates variables or draws random numbers. That
        is not seen inside ``nnx.jit`` and ``nnx.remat``, which rewrite every variable.
    """
    from flax import nnx  # whoever has a module has imported it; others need not

    _check_kind(module, nnx.Module, "from_nnx")
    quiet = nnx.merge(*nnx.split(module))
    quiet.eval()
    graph, state = nnx.split(quiet)
    bind = lambda method, options=(): _NNXCall(graph, method, options)
    params = nnx.to_pure_dict(state)
    return _from_module(module, bind, params, method, options, embed, unembed, settings)


def _from_module(module, bind, params, method, options, embed, unembed, settings):
    """The target of ``bind(method, options)``, a function of (params, …)."""
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
            f"{module!r:.80}; there are from_linen, from_nnx and from_function."
        )


@dataclasses.dataclass(frozen=True)
class _LinenCall:
    """A Linen module as a function of (variables, …)."""

    module: Any
    method: Callable | str | None
    options: tuple[tuple[str, Hashable], ...]

    def __call__(self, variables: Any, *args: Any, **more: Any) -> Any:
        options = dict(self.options) | more
        try:
            return self.module.apply(variables, *args, method=self.method, **options)
        except (flax_errors.InvalidRngError, flax_errors.ModifyScopeVariableError) as error:
            raise ValueError(
                f"{type(self.module).__name__} is not a pure function of its variables: {error} "
                f"To make a target of it, {_INFERENCE}; options={{'deterministic': True}} passes "
                "such a switch on."
            ) from error


@dataclasses.dataclass(frozen=True)
class _NNXCall:
    """An NNX module as a function of (state, …)."""

    graph: Any
    method: Callable | str | None
    options: tuple[tuple[str, Hashable], ...]

    def __call__(self, state: Any, *args: Any, **more: Any) -> Any:
        from flax import nnx

        module = nnx.merge(self.graph, state)
        values = lambda: {
            path: (variable, variable.get_value())
            for path, variable in nnx.to_flat_state(nnx.state(module))
        }
        before = values()
        name = self.method or "__call__"
        function = getattr(type(module), name) if isinstance(name, str) else name
        result = function(module, *args, **dict(self.options), **more)
        after = values()
        changed = [path for path, (_, old) in before.items() if after[path][1] is not old]
        # Where even parameters are new, a transformation has rewritten them all, unchanged.
        if changed and not any(isinstance(before[path][0], nnx.Param) for path in changed):
            names = ", ".join(".".join(map(str, path)) for path in changed)
            raise ValueError(
                f"{type(module).__name__} changes its variables when it is called: {names}. To "
                f"make a target of it, {_INFERENCE}."
            )
        return result
