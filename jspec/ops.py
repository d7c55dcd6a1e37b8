"""The only access to kernels: one function per operation.

``implementation=None`` is the default of the device; a name forces one.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import weights
from jspec.core.types import Array, Draft, Sampling, Tree
from jspec.kernels.rejection_sampling import distributions
from jspec.kernels.rejection_sampling import reference as rejection_sampling_reference
from jspec.kernels.tree_attention import ordered, reference

# Products with weights, plain or not; ``core.weights`` has their kinds.
linear, look_up = weights.linear, weights.look_up

# Attention of a chain, summed in the order of positions; it reads a cache in whole blocks of slots.
ordered_attention = ordered.attention
ORDERED_BLOCK = ordered.BLOCK

IMPLEMENTATIONS = ("reference", "pallas_tpu", "pallas_gpu")
REJECTION_SAMPLING_RULES = ("rejection", "block")


def in_tiles(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply ``function`` to x [..., I] in tiles of rows: for determinism, not for speed.

    Sums over a row round differently in arrays of different shapes. All tiles have one shape, so
    the result of a row depends on that row alone, to the bit.

    Args:
      function: maps rows [R, I] to [R, O], each row independently.
      x: [..., I].

    Returns:
      [..., O]
    """
    rows = x.reshape(-1, x.shape[-1])
    count, size = rows.shape[0], ordered.TILE
    tiles = -(-count // size)
    rows = jnp.pad(rows, ((0, tiles * size - count), (0, 0))).reshape(tiles, size, -1)
    # The barrier prevents fusion of a single tile with surrounding operations.
    fence = lax.optimization_barrier
    out = lax.map(lambda tile: fence(function(fence(tile))), rows)
    return out.reshape(tiles * size, -1)[:count].reshape(*x.shape[:-1], -1)


def attention(
    q: Array,
    tree_k: Array,
    tree_v: Array,
    ancestors: Array,
    cache_k: Array | None,
    cache_v: Array | None,
    length: Array,
    *,
    scale: float,
    window: int | None = None,
    positions: Array | None = None,
    soft_cap: float | None = None,
    table: Array | None = None,
    first_only: Array | None = None,
    implementation: str | None = None,
) -> Array:
    """Return attention of tree nodes over the committed prefix and each other; see the reference.

    ``first_only`` speeds up the reference on a CPU alone; others may ignore it.
    ``implementation`` forces ``"reference"`` (XLA), ``"pallas_tpu"`` or ``"pallas_gpu"`` (Hopper).
    None is what measurements of ``benchmarks/kernels.py`` on the device show to be faster: the
    kernel on a single Hopper GPU, for at most 64 nodes over a bfloat16 cache without pages, and
    the reference elsewhere.

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
    if implementation is None and _is_kernel_faster(q, tree_k, cache_k, table):
        named = dict(scale=scale, window=window, positions=positions, soft_cap=soft_cap)
        run = functools.partial(attention, **named, table=table)
        by = lambda name: functools.partial(run, implementation=name)
        arrays = (q, tree_k, tree_v, ancestors, cache_k, cache_v, length)
        return lax.platform_dependent(*arrays, cuda=by("pallas_gpu"), default=by("reference"))
    kernel = _kernel_of("tree_attention", reference, implementation, q, tree_k, cache_k, table)

    options = dict(scale=scale, window=window, soft_cap=soft_cap)
    run = functools.partial(kernel.tree_attention, **options)
    arrays = (q, tree_k, tree_v, ancestors, cache_k, cache_v, length, positions)
    if kernel is not reference or cache_k is None:
        return run(*arrays) if table is None else run(*arrays, table)
    rows = q.shape[0] * q.shape[1] * q.shape[2]
    parts = reference.cpu_parts(q.shape[2], tree_k.shape[2])
    on_cpu = functools.partial(run, parts=parts)
    if table is not None:
        block = reference.accelerator_block(table.shape[1] * cache_k.shape[2], rows)
        on_accelerator = functools.partial(run, block=block)
        on_cpu = functools.partial(on_cpu, by_row=True)
        arrays = (*arrays, table, first_only)
        return lax.platform_dependent(*arrays, cpu=on_cpu, default=on_accelerator)
    slots = cache_k.shape[2]
    block, group = reference.accelerator_block(slots, rows), reference.cpu_group(cache_k)
    is_same = group == len(q) and block >= slots and reference.cpu_block(slots) >= slots
    if is_same and parts == 1:
        return run(*arrays)  # one program for every device: half as much to trace
    if group < len(q):
        on_cpu = functools.partial(_by_groups, on_cpu, group)
    on_accelerator = functools.partial(run, block=block)
    return lax.platform_dependent(*arrays, cpu=on_cpu, default=on_accelerator)


def _by_groups(run: Callable[..., Array], size: int, *arrays: Array | None) -> Array:
    """Run over ``size`` sequences at a time: as a whole they are larger than a CPU's caches."""
    split = lambda x: x.reshape(-1, size, *x.shape[1:])
    out = lax.map(lambda group: run(*group), jax.tree.map(split, arrays))
    return out.reshape(-1, *out.shape[2:])


def _is_kernel_faster(*arrays: Array | None) -> bool:
    if jax.default_backend() != "gpu":
        return False
    return importlib.import_module("jspec.kernels.tree_attention.pallas_gpu").is_faster(*arrays)


def _kernel_of(operation: str, reference: ModuleType, name: str | None, *arrays: Array | None):
    """Return the module of an implementation; Pallas is imported only on demand."""
    if name in (None, "reference"):
        return reference
    if name not in IMPLEMENTATIONS:
        known = ", ".join(map(repr, IMPLEMENTATIONS))
        raise ValueError(f"implementation={name!r} is not known; use None or one of {known}.")
    kernel = importlib.import_module(f"jspec.kernels.{operation}.{name}")
    refusal = kernel.refusal(*arrays)
    if refusal:
        raise ValueError(f"implementation={name!r} {refusal}; 'reference' takes everything.")
    return kernel


def rejection_sampling(
    logits: Array,
    sampling: Sampling,
    draft: Draft,
    tree: Tree,
    uniforms: Array,
    uniform: Array,
    *,
    rule: str = "rejection",
    max_children: int | None = None,
    implementation: str | None = None,
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
      uniform: [B, 2], from ``sampling.round_noise``; the key of the token's noise.
      rule: "rejection", or "block", which is traversal verification for trees; static.
      max_children: of a node; None reads it from ``draft.parents``, if they are static.
      implementation: as for ``attention``.

    Returns:
      path int32 [B, max_depth + 1], num_accepted int32 [B], next_token int32 [B].

    Raises:
      ValueError: ``implementation`` or ``rule`` is unknown or does not support this draft,
        ``max_children`` is unknown, or ``sampling.names`` has a filter that no kernel has.
    """
    form = _form_of(draft, tree, rule, max_children)
    kernel = _kernel_of(
        "rejection_sampling", rejection_sampling_reference, implementation, logits, draft.logits
    )
    proposal = distributions.Proposal(
        draft.tokens,
        jnp.broadcast_to(jnp.asarray(tree.parents), draft.tokens.shape),
        draft.valid,
        draft.drawn,
        _over_target_ids(draft, logits.shape[-1]),
    )
    temperature = sampling.temperature * (not sampling.greedy)
    unknown = set(sampling.names) - set(distributions.Filters._fields)
    if unknown:
        raise ValueError(
            f"rejection_sampling lacks the filters {sorted(unknown)}; use a rule without an "
            "implementation."
        )
    values = {name: sampling.values[name] for name in ("min_p", "top_k", "top_p")}
    filters = distributions.Filters(temperature, **values, names=sampling.names)
    return kernel.rejection_sampling(logits, filters, proposal, uniforms, uniform, form)


def _form_of(draft: Draft, tree: Tree, rule: str, max_children: int | None) -> distributions.Form:
    if rule not in REJECTION_SAMPLING_RULES:
        known = " or ".join(map(repr, REJECTION_SAMPLING_RULES))
        raise ValueError(f"rule={rule!r} is not known; use {known}.")
    if draft.logits is not None and draft.logits.shape[1] != draft.tokens.shape[1]:
        raise ValueError(
            f"draft.logits has {draft.logits.shape[1]} rows for {draft.tokens.shape[1]} nodes; "
            "give every node a row."
        )
    if max_children is None and not isinstance(draft.parents, np.ndarray):
        raise ValueError(
            "max_children=None needs static draft.parents; give the most children of a node, or "
            "use a rule without an implementation."
        )
    if max_children is None:
        max_children = int(np.bincount(draft.parents[1:], minlength=1).max(initial=1))
    mixed = draft.sampled is not None and draft.logits is not None and max_children > 1
    return distributions.Form(rule, tree.max_depth, max_children, mixed)


def _over_target_ids(draft: Draft, vocab: int) -> Array | None:
    """Return the recorded distributions over all target ids, [B, N, V]."""
    if draft.logits is None or draft.draft_to_target is None:
        return draft.logits
    expanded = jnp.full((*draft.logits.shape[:2], vocab), -jnp.inf, draft.logits.dtype)
    return expanded.at[:, :, draft.draft_to_target].set(draft.logits, unique_indices=True)
