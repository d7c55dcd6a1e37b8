"""Rejection sampling for NVIDIA GPUs of the Hopper kind (Pallas on Mosaic GPU): two kernels.

``distributions`` assigns a warpgroup to every row. It reads the row from memory once, and again
from the second-level cache to search the thresholds of top-k and top-p. ``masses`` assigns a
warpgroup to every segment of every row that a rule needs.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

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

THREADS = 128  # per warpgroup
VECTOR = 4  # logits per read of a thread


# Multiples of 512; chunks of 16 tokens per thread. Three sums per pass should cost about as much as
# the read.
BLOCKS = Blocks(chunk=2048, segment=DRAW_BLOCK, pass_bits=2)


def rejection_sampling(
    *arguments: Any, blocks: Blocks = BLOCKS, interpret: object = None
) -> tuple[Array, Array, Array]:
    """Judge and draw; ``arguments`` are those of the reference, and of ``acceptance``."""
    run = functools.partial(functools.partial, blocks=blocks, interpret=interpret)
    kernels = acceptance.Kernels(run(distributions), run(masses), blocks.segment)
    return acceptance.rejection_sampling(kernels, *arguments)


def refusal(logits: Array, draft_logits: Array | None) -> str | None:
    """Return the reason why logits [..., V] of target and draft are not taken, or None."""
    if wrong := shared.wrong_dtype(logits, draft_logits):
        return wrong
    if jax.default_backend() == "gpu" and (wrong := wrong_device(jax.devices()[0])):
        return wrong
    vocab = logits.shape[-1]
    least = max(BLOCKS.chunk, BLOCKS.segment)
    if vocab % VECTOR or vocab < least:
        return f"takes vocabularies of {least} tokens or more, a multiple of {VECTOR}, not {vocab}"
    return None


def wrong_device(device: jax.Device) -> str | None:
    """Return the reason why a GPU does not run the kernels: Mosaic needs Hopper or newer."""
    if int(device.compute_capability.split(".")[0]) >= 9:
        return None
    capability = f"{device.compute_capability} ({device.device_kind})"
    return f"needs a GPU of compute capability 9 or more, not {capability}"


def distributions(
    logits: Array, filters: Filters | None, *, blocks: Blocks = BLOCKS, interpret: object = None
) -> TargetDistribution:
    """Measure every row of ``logits`` [R, V] under ``filters`` [R], or None."""
    rows = logits.shape[0]
    names = None if filters is None else filters.names
    settings = () if filters is None else filters[:4]
    of_rows = lambda dtype: jax.ShapeDtypeStruct((rows,), dtype)
    measured = _kernel(
        functools.partial(_distributions_kernel, names=names, blocks=blocks),
        out_type=(*[of_rows(jnp.float32)] * 3, of_rows(jnp.int32)),
        grid=(rows,),
        grid_names=("row",),
        interpret=interpret,
    )(logits, *settings)
    return shared.target_distribution(filters, *measured)


def _kernel(body, *, interpret, **options):
    if interpret is not None:
        options["interpret"] = interpret
    return plgpu.kernel(body, **options)


def _distributions_kernel(logits, *refs, names, blocks):
    row = lax.axis_index("row")
    filters = None if names is None else Filters(*(ref[row] for ref in refs[:4]), names)
    measured = shared.measure(_Streamed(logits, row, blocks), filters)
    for ref, value in zip(refs[-4:], measured, strict=True):
        ref[row] = value


def _chunk(ref, row: Array, nominal: Array, width: int) -> tuple[Array, Array]:
    """Float32 logits of a row from ``nominal`` on, and their tokens.

    A chunk that would reach past the end is pulled back; repeated logits are -inf.
    """
    start = jnp.minimum(nominal, ref.shape[1] - width)
    layout = plgpu.Layout.WG_STRIDED((width,), VECTOR)
    x = plgpu.layout_cast(ref[row, pl.ds(start, width)], layout).astype(jnp.float32)
    token = start + plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)
    return jnp.where(token >= nominal, x, -jnp.inf), token


class _Streamed(shared.Row):
    """A row of logits in memory; scalars are scalars."""

    def __init__(self, ref, row: Array, blocks: Blocks):
        super().__init__(ref, blocks)
        self.row = row

    def as_float(self, bits: Array) -> Array:
        """Return the float32 with the same bits; only vectors can be reinterpreted."""
        layout = plgpu.Layout.WG_STRIDED((THREADS,), 1)
        vector = plgpu.layout_cast(jnp.full((THREADS,), bits), layout)
        return jnp.max(lax.bitcast_convert_type(vector, jnp.float32))

    def fold(self, term: Callable, join: Callable, reduce: Callable) -> list[Array]:
        """Fold chunk by chunk, threads separate until the end."""
        chunk = lambda i: term(*_chunk(self.ref, self.row, i * self.chunk, self.chunk))

        def joined(i, carry):
            return [join(a, b) for a, b in zip(carry, chunk(i), strict=True)]

        folded = lax.fori_loop(1, pl.cdiv(self.vocab, self.chunk), joined, chunk(jnp.int32(0)))
        return [reduce(x) for x in folded]


def masses(
    logits: Array,
    draft_logits: Array | None,
    rows: Array,
    target: TargetDistribution,
    draft: DraftDistribution | None,
    refusals: Sequence[Refusal],
    *,
    blocks: Blocks = BLOCKS,
    interpret: object = None,
) -> Masses:
    """Sum residuals over segments, as ``pallas_tpu.masses`` does.

    ``interpret`` takes Mosaic GPU's interpreter parameters.
    """
    count, segments = rows.shape[0], pl.cdiv(logits.shape[1], blocks.segment)
    facts = [jnp.stack(columns, 1) for columns in shared.pack(target, draft, refusals)]
    absent = 0 if draft is None else len(draft.absent)
    streams = [x for x in (logits, draft_logits) if x is not None]
    options = dict(width=blocks.segment, drafted=draft is not None, absent=absent)
    out = jax.ShapeDtypeStruct((count, segments), jnp.float32)
    masses = _kernel(
        functools.partial(_masses_kernel, **options),
        out_type=(out,) * len(Masses._fields),
        grid=(count, segments),
        grid_names=("index", "segment"),
        interpret=interpret,
    )(rows, *facts, *streams)
    return Masses(*masses)


def _masses_kernel(rows, floats, ints, x, *refs, width, drafted, absent):
    y, outs = refs[0] if drafted else None, refs[drafted:]
    index, segment = lax.axis_index("index"), lax.axis_index("segment")
    row, nominal = rows[index], segment * width
    columns = [[ref[index, i] for i in range(ref.shape[1])] for ref in (floats, ints)]
    target, draft, refusals = shared.unpack(*columns, drafted, absent)
    logits, token = _chunk(x, row, nominal, width)
    log_weights = _chunk(y, row, nominal, width)[0] if drafted else None
    values = shared.weights(logits, log_weights, token, target, draft, refusals)
    for out, value in zip(outs, values, strict=True):
        out[index, segment] = jnp.sum(jnp.where(token >= nominal, value, 0.0))
