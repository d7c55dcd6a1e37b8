"""The only access to kernels: one function per operation, and the table of their back-ends."""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from jspec import sharding
from jspec.core import weights
from jspec.core.narrow import Narrow
from jspec.core.types import Array, Draft, Sampling, Tree
from jspec.kernels.tree_attention import cpu_sizes, ordered

# Products with weights, plain or not; ``core.weights`` has their kinds.
linear, look_up = weights.linear, weights.look_up

# Attention of a chain, summed in the order of positions; it reads a cache in whole blocks of slots.
ordered_attention = ordered.attention
ORDERED_BLOCK, ORDERED_TILE = ordered.BLOCK, ordered.TILE

REJECTION_SAMPLING_RULES = ("rejection", "block")


class Backend(NamedTuple):
    """A back-end of an operation: a module of ``kernels/<operation>``, and its conditions."""

    name: str  # Users choose by it; back-ends of one name are for different platforms.
    module: str
    platform: str | None = None  # JAX's name of the only platform that it runs on; None for all
    # Whether it, the first argument, is the default for arrays as of ``refusal``; None for never.
    default: Callable[..., bool] | None = None
    refuses: bool = False  # Whether its module has ``refusal``, the reason against some arrays.
    interpreted: bool = False  # Whether Pallas' interpreter runs it, on any device: for proofs.

    @property
    def options(self) -> dict[str, bool]:
        """Arguments of the module's function."""
        return {"interpret": True} if self.interpreted else {}

    def load(self, operation: str) -> ModuleType:
        """Return the module; Pallas is imported only on demand."""
        return importlib.import_module(f"jspec.kernels.{operation}.{self.module}")

    def refusal(self, operation: str, *arrays: Array | None) -> str | None:
        """Return the reason why it does not take such arrays, with the remedy, or None."""
        return self.load(operation).refusal(*arrays) if self.refuses else None


def _by_evidence(backend: Backend, *arrays: Array | None) -> bool:
    """Return whether ``kernels/tree_attention/defaults.py`` lists such arrays on this device."""
    if jax.default_backend() == "cpu":
        return False
    defaults = importlib.import_module("jspec.kernels.tree_attention.defaults")
    is_listed = defaults.lists(backend.module, *arrays)
    return is_listed and not backend.refusal("tree_attention", *arrays)


def _where_better(backend: Backend, *arrays: Array | None) -> bool:
    """Return whether a TPU runs the kernel of a quantised matrix, rather than XLA."""
    if jax.default_backend() != "tpu" or backend.refusal("quantized_matmul", *arrays):
        return False
    return backend.load("quantized_matmul").is_better(*arrays)


def _on(platform: str, operation: str) -> Callable[..., bool]:
    """Return whether a device takes some arrays, for a kernel that is better wherever it runs."""

    def takes(backend: Backend, *arrays: Array | None) -> bool:
        return jax.default_backend() == platform and not backend.refusal(operation, *arrays)

    return takes


# The back-ends of every operation. The first default for the platform and the arrays runs, or the
# one that is named. XLA's form of rejection sampling is the walk of a rule (``jspec.verify``).
BACKENDS: dict[str, tuple[Backend, ...]] = {
    "tree_attention": (
        Backend("pallas_gpu", "pallas_gpu", "cuda", default=_by_evidence, refuses=True),
        Backend("pallas_tpu", "pallas_tpu", "tpu", default=_by_evidence, refuses=True),
        Backend("xla", "xla_cpu", "cpu", default=lambda _, *arrays: cpu_sizes.differs(*arrays)),
        Backend("xla", "xla", default=lambda *_: True),
        Backend("pallas_tpu_interpreted", "pallas_tpu", refuses=True, interpreted=True),
        Backend("reference", "reference"),
    ),
    "grouped_matmul": (
        Backend(
            "pallas_gpu", "pallas_gpu", "cuda", default=_on("gpu", "grouped_matmul"), refuses=True
        ),
        Backend(
            "pallas_tpu", "pallas_tpu", "tpu", default=_on("tpu", "grouped_matmul"), refuses=True
        ),
        Backend("xla", "xla", default=lambda *_: True),
        Backend("reference", "reference"),
    ),
    "quantized_matmul": (
        Backend(
            "pallas_gpu", "pallas_gpu", "cuda", default=_on("gpu", "quantized_matmul"), refuses=True
        ),
        Backend("pallas_tpu", "pallas_tpu", "tpu", default=_where_better, refuses=True),
        Backend("xla", "xla", default=lambda *_: True),
        Backend("reference", "reference"),
    ),
    "rejection_sampling": (
        Backend("pallas_tpu", "pallas_tpu", "tpu", refuses=True),
        Backend("pallas_gpu", "pallas_gpu", "cuda", refuses=True),
        Backend("pallas_tpu_interpreted", "pallas_tpu", refuses=True, interpreted=True),
        Backend("reference", "reference"),
    ),
}


def backend_names(operation: str) -> tuple[str, ...]:
    """Return the names of an operation's back-ends."""
    return tuple(dict.fromkeys(each.name for each in BACKENDS[operation]))


def backends_for(operation: str, name: str | None, *arrays: Array | None) -> list[Backend]:
    """Return the back-ends that a platform decides between; the last is that of all others.

    Raises:
      ValueError: there is none of that name, or it does not take such arrays.
    """
    named = [each for each in BACKENDS[operation] if name in (None, each.name)]
    if not named:
        known = ", ".join(map(repr, backend_names(operation)))
        raise ValueError(f"implementation={name!r} is not known; use None or one of {known}.")
    defaults = [each for each in named if each.default and each.default(each, *arrays)]
    for each in () if defaults else named:
        if reason := each.refusal(operation, *arrays):
            raise ValueError(f"implementation={name!r} {reason}; leave it out.")
    return defaults or named


def grouped_matmul(
    x: Array,
    weights: Array,
    sizes: Array,
    scales: Array | None = None,
    zeros: Array | None = None,
    *,
    implementation: str | None = None,
) -> Array:
    """Return the product of each row with the matrix of its group; see the reference.

    With ``scales``, matrices are quantised. XLA splits no kernel among devices: run this where each
    device has its own ``weights``.

    Raises:
      ValueError: ``implementation`` is unknown or does not support these matrices.
    """
    chosen = backends_for("grouped_matmul", implementation, x, weights, sizes, scales, zeros)
    forms = {each.platform: each.load("grouped_matmul").grouped_matmul for each in chosen}
    return _by_platform(forms)(x, weights, sizes, scales, zeros)


def quantized_matmul(
    x: Array, *matrix: Array | None, offset: int = 0, implementation: str | None = None
) -> Array:
    """Return the product of rows with a quantised matrix, on one device; see the reference.

    ``matrix`` are the arrays of the reference after ``x``.

    Raises:
      ValueError: ``implementation`` is unknown or does not support this matrix or so many rows.
    """
    chosen = backends_for("quantized_matmul", implementation, x, *matrix)
    forms = {each.platform: each.load("quantized_matmul").quantized_matmul for each in chosen}
    forms = {name: functools.partial(form, offset=offset) for name, form in forms.items()}
    return _by_platform(forms)(x, *matrix)


def has_kernel(operation: str, implementation: str | None, *arrays: Array | None) -> bool:
    """Return whether a kernel runs on some platform; XLA splits none among devices by itself."""
    return any(each.refuses for each in backends_for(operation, implementation, *arrays))


def attention(
    q: Array,
    tree_k: Array,
    tree_v: Array,
    ancestors: Array,
    cache_k: Array | Narrow | None,
    cache_v: Array | Narrow | None,
    length: Array,
    *,
    scale: float | None = None,
    window: int | None = None,
    positions: Array | None = None,
    soft_cap: float | None = None,
    sinks: Array | None = None,
    table: Array | None = None,
    first_only: Array | None = None,
    implementation: str | None = None,
    is_split: bool = False,
) -> Array:
    """Return attention of tree nodes over the committed prefix and each other; see the reference.

    ``scale`` None stands for ``head_dim ** -0.5``, and ``sinks`` are [H]. ``implementation`` names
    a back-end of ``BACKENDS``; None is the default of the device. With a mesh, each device runs a
    kernel on its own heads if ``is_split``, else on all.

    Raises:
      ValueError: ``implementation`` is unknown or does not support these shapes or dtypes,
        ``ancestors`` are not words, or ``window`` is given without ``positions``.
    """
    words = -(-tree_k.shape[2] // 32)
    if ancestors.dtype != jnp.uint32 or ancestors.shape != (q.shape[0], q.shape[2], words):
        raise ValueError(
            f"ancestors is {ancestors.dtype}{list(ancestors.shape)}, but {tree_k.shape[2]} tree "
            f"keys need uint32{[q.shape[0], q.shape[2], words]}; convert a mask by trees.pack_bits."
        )
    if window is not None and positions is None:
        raise ValueError(f"window={window} needs the positions of the queries; pass positions.")
    chosen = backends_for("tree_attention", implementation, q, tree_k, cache_k, table)
    attend = _by_platform(
        {
            each.platform: functools.partial(
                each.load("tree_attention").tree_attention,
                scale=q.shape[-1] ** -0.5 if scale is None else scale,
                window=window,
                soft_cap=soft_cap,
                **each.options,
            )
            for each in chosen
        }
    )
    if any(each.refuses for each in chosen):
        attend = sharding.over_heads(attend, is_split=is_split)
    return attend(
        q,
        tree_k,
        tree_v,
        ancestors,
        cache_k,
        cache_v,
        length,
        positions,
        table,
        first_only,
        None if sinks is None else sinks[None, :, None, None],
    )


def _by_platform(forms: dict[str | None, Callable[..., Array]]) -> Callable[..., Array]:
    """Return a function that runs the form of its platform; the last is that of all others."""
    *special, (_, default) = forms.items()
    if not special:
        return default
    return functools.partial(lax.platform_dependent, default=default, **dict(special))


def rejection_sampling(
    logits: Array,
    sampling: Sampling,
    draft: Draft,
    tree: Tree,
    uniforms: Array,
    uniform: Array | None,
    *,
    rule: str = "rejection",
    max_children: int | None = None,
    implementation: str,
) -> tuple[Array, Array, Array]:
    """Accept a path of a draft and draw the token after it; see the reference.

    For the same uniforms the result equals that of a rule of ``jspec.verify`` with
    ``sampling.draw``, up to float32 rounding. The kernels store no distribution: they read raw
    logits, search the thresholds of top-k and top-p without sorting, and draw from one row.

    Args:
      logits: raw logits of the target [B, N, V].
      sampling: filters of every row.
      draft: with N rows of ``logits``. A reduced vocabulary is expanded to V first.
      tree: of the draft.
      uniforms: in [0, 1), [B, N]; number i decides node i, number 0 is unused.
      uniform: [B, 2], from ``sampling.round_noise``; the key of the token's noise. None returns the
        weights [B, V] of the next token instead of drawing it, for certificates.
      rule: "rejection", or "block", which is traversal verification for trees; static.
      max_children: of a node; None reads it from ``draft.parents``, if they are static.
      implementation: the name of a back-end; the reference takes concrete arrays alone.

    Returns:
      path int32 [B, max_depth + 1], num_accepted int32 [B], next_token int32 [B].

    Raises:
      ValueError: ``implementation`` or ``rule`` is unknown or does not support this draft,
        ``max_children`` is unknown, or ``sampling.names`` has a filter that no kernel has.
    """
    if rule not in REJECTION_SAMPLING_RULES:
        known = " or ".join(map(repr, REJECTION_SAMPLING_RULES))
        raise ValueError(f"rule={rule!r} is not known; use {known}.")
    inputs = importlib.import_module("jspec.kernels.rejection_sampling.inputs")
    form = inputs.form_of(draft, tree, rule, max_children)
    (chosen,) = backends_for("rejection_sampling", implementation, logits, draft.logits)
    kernel = chosen.load("rejection_sampling").rejection_sampling
    return kernel(
        logits,
        inputs.filters_of(sampling),
        inputs.proposal_of(draft, tree, logits.shape[-1]),
        uniforms,
        uniform,
        form,
        **chosen.options,
    )
