"""Rejection sampling for TPU (Pallas on Mosaic TPU): two kernels, each one pass over HBM.

``distributions`` holds eight rows in vector memory, where it searches the thresholds of top-k and
top-p bit by bit instead of sorting. ``masses`` streams the rows that a rule needs, and sums their
residuals in every segment of the vocabulary.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jspec.core.sampling import DRAW_BLOCK
from jspec.kernels.rejection_sampling import acceptance
from jspec.kernels.rejection_sampling import distributions as shared
from jspec.kernels.rejection_sampling.distributions import (
    Blocks,
    DraftDistribution,
    Filters,
    Masses,
    Refusal,
    TargetDistribution,
)

Array = jax.Array

TILE_ROWS = 8
RESIDENT_BYTES = 48 * 2**20  # vector memory for eight rows, and for the next eight
OTHER_BYTES = 8 * 2**20


# A chunk takes 16 registers per value. Vector memory is near, and more bits per pass would spill
# registers.
BLOCKS = Blocks(chunk=2048, segment=DRAW_BLOCK, pass_bits=1)


def rejection_sampling(
    *arguments: Any, blocks: Blocks = BLOCKS, interpret: bool | pltpu.InterpretParams = False
) -> tuple[Array, Array, Array]:
    """Judge and draw; ``arguments`` are those of the reference, and of ``acceptance``."""
    run = functools.partial(functools.partial, blocks=blocks, interpret=interpret)
    kernels = acceptance.Kernels(run(distributions), run(masses), blocks.segment)
    return acceptance.rejection_sampling(kernels, *arguments)


def refusal(logits: Array, draft_logits: Array | None) -> str | None:
    """Return the reason why logits [..., V] of target and draft are not taken, or None."""
    if wrong := shared.wrong_dtype(logits, draft_logits):
        return wrong
    resident = 2 * TILE_ROWS * logits.shape[-1] * logits.dtype.itemsize
    if resident > RESIDENT_BYTES:
        return f"holds entire rows in vector memory, too small for {logits.shape[-1]} tokens"
    return None


def distributions(
    logits: Array,
    filters: Filters | None,
    *,
    blocks: Blocks = BLOCKS,
    interpret: bool | pltpu.InterpretParams = False,
) -> TargetDistribution:
    """Measure every row of ``logits`` [R, V] under ``filters`` [R], or None."""
    rows, vocab = logits.shape
    names = None if filters is None else filters.names
    settings = () if filters is None else filters[:4]
    tile = min(rows, TILE_ROWS)
    of_row = pl.BlockSpec((tile, 1), lambda i: (i, 0))
    column = lambda dtype: jax.ShapeDtypeStruct((rows, 1), dtype)
    measured = pl.pallas_call(
        functools.partial(_distributions_kernel, names=names, blocks=blocks),
        out_shape=[*[column(jnp.float32)] * 3, column(jnp.int32)],
        grid=(pl.cdiv(rows, tile),),
        in_specs=[pl.BlockSpec((tile, vocab), lambda i: (i, 0)), *[of_row] * len(settings)],
        out_specs=[of_row] * 4,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel",),
            vmem_limit_bytes=2 * tile * vocab * logits.dtype.itemsize + OTHER_BYTES,
        ),
        cost_estimate=_distributions_cost(logits, names or (), blocks.pass_bits),
        interpret=interpret,
        name="rejection_sampling_distributions",
    )(logits, *(x[:, None] for x in settings))
    return shared.target_distribution(filters, *(x[:, 0] for x in measured))


def _distributions_cost(logits: Array, names: Sequence[str], pass_bits: int) -> pl.CostEstimate:
    """The cost of one read of the logits, and of the passes over them in vector memory."""
    bits = shared.SIGN_AND_EXPONENT_BITS + jnp.finfo(logits.dtype).nmant
    searches = [-(-bits // pass_bits) * (name in names) for name in ("top_k", "top_p")]
    return pl.CostEstimate(
        flops=logits.size * (8 + 3 * sum(searches)),
        transcendentals=logits.size * (1 + searches[1]),
        bytes_accessed=logits.size * logits.dtype.itemsize,
    )


def _distributions_kernel(logits, *refs, names, blocks):
    filters = None if names is None else Filters(*(ref[...] for ref in refs[:4]), names)
    measured = shared.measure(_Resident(logits, blocks), filters)
    for ref, value in zip(refs[-4:], measured, strict=True):
        ref[...] = value


class _Resident(shared.Row):
    """Rows [tile, V] in vector memory; scalars are columns [tile, 1]."""

    def as_float(self, bits: Array) -> Array:
        """Return the float32 with the same bits."""
        return lax.bitcast_convert_type(bits, jnp.float32)

    def fold(self, term: Callable, join: Callable, reduce: Callable) -> list[Array]:
        """Fold chunk by chunk, lanes separate until the end; the last chunk may be shorter."""

        def chunk(start, width: int):
            x = self.ref[:, pl.ds(start, width)].astype(jnp.float32)
            return term(x, start + lax.broadcasted_iota(jnp.int32, x.shape, 1))

        whole, rest = divmod(self.vocab, self.chunk)
        parts = []
        if whole:
            folded = lax.fori_loop(
                1,
                whole,
                lambda i, carry: list(map(join, carry, chunk(i * self.chunk, self.chunk))),
                chunk(0, self.chunk),
            )
            parts.append([reduce(x, -1, keepdims=True) for x in folded])
        if rest:
            parts.append([reduce(x, -1, keepdims=True) for x in chunk(whole * self.chunk, rest)])
        return [functools.reduce(join, values) for values in zip(*parts, strict=True)]


def masses(
    logits: Array,
    draft_logits: Array | None,
    rows: Array,
    target: TargetDistribution,
    draft: DraftDistribution | None,
    refusals: Sequence[Refusal],
    *,
    blocks: Blocks = BLOCKS,
    interpret: bool | pltpu.InterpretParams = False,
) -> Masses:
    """Sum the residuals of ``rows`` [M] after ``refusals`` [M] over segments of the vocabulary.

    ``rows`` are those of raw logits and of the draft's log-weights [R, V]; ``target`` and ``draft``
    [M] belong to these rows. Both of the draft are None without one.
    """
    # Eight rows share a tile of memory: a gather costs less than reading eight rows for one.
    streams = [jnp.take(x, rows, axis=0) for x in (logits, draft_logits) if x is not None]
    count, vocab = streams[0].shape
    tile, width = min(count, TILE_ROWS), min(vocab, blocks.segment)
    segments = pl.cdiv(vocab, width)
    facts = [jnp.stack(columns, 1) for columns in shared.pack(target, draft, refusals)]
    of_row = lambda size: pl.BlockSpec((tile, size), lambda i, _: (i, 0))
    of_block = pl.BlockSpec((tile, width), lambda i, s: (i, s))
    absent = 0 if draft is None else len(draft.absent)
    kernel = functools.partial(
        _masses_kernel, vocab=vocab, drafted=draft is not None, absent=absent
    )
    masses = pl.pallas_call(
        kernel,
        out_shape=[jax.ShapeDtypeStruct((count, segments), jnp.float32)] * len(Masses._fields),
        grid=(pl.cdiv(count, tile), segments),
        in_specs=[*(of_row(x.shape[1]) for x in facts), *[of_block] * len(streams)],
        out_specs=[of_row(segments)] * len(Masses._fields),
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        cost_estimate=_masses_cost(streams, len(refusals)),
        interpret=interpret,
        name="rejection_sampling_masses",
    )(*facts, *streams)
    return Masses(*masses)


def _masses_cost(streams: Sequence[Array], refusals: int) -> pl.CostEstimate:
    """The cost of reading the rows once."""
    return pl.CostEstimate(
        flops=streams[0].size * (8 + 6 * refusals),
        transcendentals=sum(x.size for x in streams),
        bytes_accessed=sum(x.size * x.dtype.itemsize for x in streams),
    )


def _masses_kernel(floats, ints, x, *refs, vocab, drafted, absent):
    y, outs = refs[0] if drafted else None, refs[drafted:]
    segment = pl.program_id(1)
    token = segment * x.shape[1] + lax.broadcasted_iota(jnp.int32, x.shape, 1)
    columns = [[ref[:, i : i + 1] for i in range(ref.shape[1])] for ref in (floats, ints)]
    target, draft, refusals = shared.unpack(*columns, drafted, absent)
    values = shared.weights(x[...], y[...] if drafted else None, token, target, draft, refusals)
    lane = lax.broadcasted_iota(jnp.int32, outs[0].shape, 1)
    for out, value in zip(outs, values, strict=True):
        # The last block reaches past the vocabulary, where memory is undefined.
        mass = jnp.where(token < vocab, value, 0.0).sum(-1, keepdims=True)
        previous = jnp.where(segment == 0, 0.0, out[...])  # segments before this one
        out[...] = jnp.where(lane == segment, mass, previous)
