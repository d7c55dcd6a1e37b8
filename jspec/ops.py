"""The only door to kernels: one operation, one function.

``implementation=None`` takes the default of the device, a name forces one.
"""

import functools
import importlib
from collections.abc import Callable
from types import ModuleType

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from jspec.core import trees
from jspec.core.types import Array, Draft, Sampling, Tree
from jspec.kernels.rejection_sampling import distributions
from jspec.kernels.rejection_sampling import reference as rejection_sampling_reference
from jspec.kernels.tree_attention import ordered, reference

# XLA's CPU matmul for bfloat16 reaches its fast path from two rows on, and gives rows that are
# bit-equal from three rows on; one padded row count makes a token's logits independent of N.
_BFLOAT16_ROWS = 4

# Slots of a cache that ``ordered_attention`` reads come in whole blocks.
ORDERED_BLOCK = ordered.BLOCK

IMPLEMENTATIONS = ("reference", "pallas_tpu", "pallas_gpu")
REJECTION_SAMPLING_RULES = ("rejection", "block")


def linear(x: Array, w: Array, *, transposed: bool = False) -> Array:
    """``x @ w`` for x [..., I] and w [I, O], accumulated and returned in float32 (or wider).

    ``transposed`` takes w as [O, I], which spares a tied head a copy of the embedding. A narrow
    ``w`` is never widened in memory: x is rounded to its dtype instead. float32 weights multiply at
    full precision on every device.
    """
    dtype = jnp.promote_types(w.dtype, jnp.float32)
    rows = x.reshape(-1, x.shape[-1]).astype(w.dtype)
    count = rows.shape[0]
    if w.dtype == jnp.bfloat16 and count < _BFLOAT16_ROWS:
        rows = jnp.pad(rows, ((0, _BFLOAT16_ROWS - count), (0, 0)))
    precision = lax.Precision.HIGHEST if w.dtype == jnp.float32 else None
    contracted = (((1,), (1 if transposed else 0,)), ((), ()))
    out = lax.dot_general(rows, w, contracted, precision=precision, preferred_element_type=dtype)
    return out[:count].reshape(*x.shape[:-1], out.shape[-1])


@jax.custom_jvp
def look_up(table: Array, ids: Array) -> Array:
    """Rows [..., D] of a table [V, D] of embeddings, by int32 ids [...].

    XLA's CPU backend gathers no bfloat16: it would widen the whole table, in every launch, and in
    every round for a lookup in a branch. There the bits of narrow numbers are gathered.
    """
    if table.dtype.itemsize >= 4:
        return table[ids]
    return lax.platform_dependent(table, ids, cpu=_rows_by_bits, default=_rows)


def _rows(table: Array, ids: Array) -> Array:
    return table[ids]


def _rows_by_bits(table: Array, ids: Array) -> Array:
    # Tied to the ids, the table is read in the loop that they are of, and not copied before it.
    table, ids = lax.optimization_barrier((table, ids))
    words = lax.bitcast_convert_type(table, f"uint{8 * table.dtype.itemsize}")
    return lax.bitcast_convert_type(words[ids], table.dtype)


@look_up.defjvp
def _look_up_jvp(primals: tuple[Array, Array], tangents: tuple[Array, Array]):
    table, ids = primals
    return look_up(table, ids), tangents[0][ids]


def in_tiles(function: Callable[[Array], Array], x: Array) -> Array:
    """``function`` of the rows of x [..., I], some at a time: for determinism, not for speed.

    Sums over a row round differently in arrays of other shapes. Here all have one, so that a row's
    result is a matter of that row alone, to the bit, wherever a backend computes equal shapes
    alike.

    Args:
      function: of rows [R, I], each by itself, to [R, O].
      x: [..., I].

    Returns:
      [..., O]
    """
    rows = x.reshape(-1, x.shape[-1])
    count, size = rows.shape[0], ordered.TILE
    tiles = -(-count // size)
    rows = jnp.pad(rows, ((0, tiles * size - count), (0, 0))).reshape(tiles, size, -1)
    # Behind a barrier a single tile is not fused with what surrounds it, as several are not.
    alone = lax.optimization_barrier
    out = lax.map(lambda tile: alone(function(alone(tile))), rows)
    return out.reshape(tiles * size, -1)[:count].reshape(*x.shape[:-1], -1)


def ordered_attention(
    q: Array,
    chain_k: Array,
    chain_v: Array,
    cache_k: Array,
    cache_v: Array,
    length: Array,
    *,
    scale: float,
    window: int | None = None,
) -> Array:
    """Attention of a chain that adds up in the order of positions; see the kernels' ``ordered``."""
    return ordered.attention(
        q, chain_k, chain_v, cache_k, cache_v, length, scale=scale, window=window
    )


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
    implementation: str | None = None,
) -> Array:
    """Attention of tree nodes over the committed prefix and each other; see the reference.

    ``implementation`` forces ``"reference"`` (XLA), ``"pallas_tpu"`` or ``"pallas_gpu"`` (Hopper).
    None takes the default of the device, which is the reference everywhere: a kernel becomes the
    default of a device, for the shapes where it wins, once ``benchmarks/kernels.py`` has a row
    measured there that beats XLA, and there is none yet.

    Raises:
      ValueError: ``implementation`` is unknown or does not take these shapes or dtypes,
        ``ancestors`` are not words, or ``window`` comes without ``positions``.
    """
    words = -(-tree_k.shape[2] // 32)
    if ancestors.dtype != jnp.uint32 or ancestors.shape != (q.shape[0], q.shape[2], words):
        raise ValueError(
            f"ancestors is {ancestors.dtype}{list(ancestors.shape)}, but {tree_k.shape[2]} tree "
            f"keys need uint32{[q.shape[0], q.shape[2], words]}; topology.pack_bits makes words of "
            "a mask."
        )
    if window is not None and positions is None:
        raise ValueError(f"window={window} needs the positions of the queries; pass positions.")
    kernel = _kernel_of("tree_attention", reference, implementation, q, tree_k, cache_k)

    def run(*arrays: Array, **blocks: int) -> Array:
        options = dict(scale=scale, window=window, positions=positions, soft_cap=soft_cap)
        return kernel.tree_attention(*arrays, **options, **blocks)

    arrays = (q, tree_k, tree_v, ancestors, cache_k, cache_v, length)
    if kernel is not reference or cache_k is None:
        return run(*arrays)
    rows, slots = q.shape[0] * q.shape[1] * q.shape[2], cache_k.shape[2]
    on_accelerator = functools.partial(run, block=reference.accelerator_block(slots, rows))
    return lax.platform_dependent(*arrays, cpu=run, default=on_accelerator)


def _kernel_of(operation: str, reference: ModuleType, name: str | None, *arrays: Array | None):
    """The module of an implementation. Pallas is imported by those who ask for it only."""
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
    replaced: bool = False,
    max_children: int | None = None,
    implementation: str | None = None,
) -> tuple[Array, Array, Array]:
    """Judges a draft and draws the token after what was accepted; see the reference.

    For the same coins that is what a rule of ``jspec.verify`` and ``sampling.draw`` give, up to
    rounding to float32, but the kernels store no law: raw logits are read where they lie, top-k and
    top-p search for their thresholds instead of sorting, and the token is drawn from one row.

    Args:
      logits: raw logits of the target [B, N, V].
      sampling: the warps of every row.
      draft: the proposal, N rows of ``logits`` with it. Laws over a reduced vocabulary are spread
        over all of V first, which the kernels do not spare.
      tree: its shape.
      coins: uniforms in [0, 1), [B, N]; coin i decides node i, coin 0 is not used.
      uniform: of ``sampling.round_noise``, [B, 2]; draws the token.
      rule: "rejection", or "block": of trees that is traversal verification; static, like all that
        follows.
      replaced: siblings were drawn with replacement.
      max_children: of a node; None: as ``draft.parents`` say, if they are static.
      implementation: forces ``"reference"`` (XLA), ``"pallas_tpu"`` or ``"pallas_gpu"`` (Hopper).
        None is the reference on every device, until a row of ``benchmarks/kernels.py`` measured
        there beats it; there is none yet.

    Returns:
      path int32 [B, max_depth + 1], num_accepted int32 [B], next_token int32 [B].

    Raises:
      ValueError: ``implementation`` or ``rule`` is unknown or does not take this draft, or
        ``max_children`` is not known.
    """
    form = _form_of(draft, tree, rule, replaced, max_children)
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
            f"the kernel lacks the filters {sorted(unknown)}; use implementation=None."
        )
    values = {name: sampling.values[name] for name in ("min_p", "top_k", "top_p")}
    filters = distributions.Filters(temperature, **values, names=sampling.names)
    return kernel.rejection_sampling(logits, filters, proposal, uniforms, uniform, form)


def _form_of(
    draft: Draft, tree: Tree, rule: str, replaced: bool, max_children: int | None
) -> distributions.Form:
    static = isinstance(draft.parents, np.ndarray)
    parents = draft.parents if static else np.zeros(draft.tokens.shape[1], int)
    if rule not in REJECTION_SAMPLING_RULES:
        known = " or ".join(map(repr, REJECTION_SAMPLING_RULES))
        raise ValueError(f"rule={rule!r} is not known; use {known}.")
    if draft.logits is not None and draft.logits.shape[1] != draft.tokens.shape[1]:
        raise ValueError(
            f"draft.logits has {draft.logits.shape[1]} rows for {draft.tokens.shape[1]} nodes; "
            "give every node a row."
        )
    if rule == "block" and not trees.is_chain(draft.parents):
        rule = "traversal"
    if max_children is None and not static:
        raise ValueError(
            "max_children=None, but draft.parents are traced; say how many children a node has at "
            "most, or take a rule without an implementation, which need not know."
        )
    if max_children is None:
        max_children = int(np.bincount(parents[1:], minlength=1).max(initial=0))
    mixed = draft.sampled is not None and draft.logits is not None and max_children > 1
    return distributions.Form(rule, tree.max_depth, max_children, replaced, mixed)


def _over_target_ids(draft: Draft, vocab: int) -> Array | None:
    """The recorded laws over all target ids, [B, N, V]."""
    if draft.logits is None or draft.draft_to_target is None:
        return draft.logits
    spread = jnp.full((*draft.logits.shape[:2], vocab), -jnp.inf, draft.logits.dtype)
    return spread.at[:, :, draft.draft_to_target].set(draft.logits, unique_indices=True)


def default_backend() -> str:
    """The platform programs run on: ``cpu``, ``gpu`` or ``tpu``."""
    return jax.default_backend()
