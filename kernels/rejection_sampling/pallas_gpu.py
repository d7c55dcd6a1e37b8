"""Rejection sampling for NVIDIA GPUs of the Hopper kind (Pallas on Mosaic GPU): two kernels.

``laws`` gives every row a warpgroup, which reads it from memory once and, where top-k or top-p
search for a threshold, again from the second-level cache. ``masses`` gives every segment of every
row that an acceptance rule asks for a warpgroup of its own, wherever the row lies.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from jspec.kernels.rejection_sampling import acceptance
from jspec.kernels.rejection_sampling import distributions as shared
from jspec.kernels.rejection_sampling.distributions import (
    Distribution,
    DraftDistribution,
    Filters,
    Form,
    Masses,
    Proposal,
    Refusal,
)

Array = jax.Array

THREADS = 128  # of a warpgroup
VECTOR = 4  # logits that a thread reads at a time


@dataclasses.dataclass(frozen=True)
class Blocks:
    """How the work is cut; sizes are multiples of 512."""

    chunk: int = 2048  # tokens of a row at a time: 16 a thread
    segment: int = 2048  # tokens that a mass is the sum of
    # Of a threshold, decided in one pass: three sums should cost about what the reading does.
    pass_bits: int = 2


BLOCKS = Blocks()


def rejection_sampling(
    logits: Array,
    filters: Filters,
    proposal: Proposal,
    uniforms: Array,
    uniform: Array,
    form: Form,
    *,
    blocks: Blocks = BLOCKS,
    interpret: object = None,
) -> tuple[Array, Array, Array]:
    """As the reference, in float32; ``interpret`` takes Mosaic GPU's interpreter parameters."""
    run = functools.partial(functools.partial, blocks=blocks, interpret=interpret)
    kernels = acceptance.Kernels(run(distributions), run(masses), blocks.segment)
    return acceptance.rejection_sampling(
        kernels, logits, filters, proposal, uniforms, uniform, form
    )


def refusal(logits: Array, draft: Array | None) -> str | None:
    """Why logits [..., V] of target and draft are not taken, or None."""
    if wrong := shared.wrong_dtype(logits, draft):
        return wrong
    if jax.default_backend() == "gpu" and (wrong := wrong_device(jax.devices()[0])):
        return wrong
    vocab = logits.shape[-1]
    least = max(BLOCKS.chunk, BLOCKS.segment)
    if vocab % VECTOR or vocab < least:
        return f"takes vocabularies of {least} tokens or more, a multiple of {VECTOR}, not {vocab}"
    return None


def wrong_device(device: jax.Device) -> str | None:
    """Why a GPU does not run the kernels: Mosaic begins with Hopper."""
    if int(device.compute_capability.split(".")[0]) >= 9:
        return None
    return (
        f"needs a GPU of compute capability 9 or more, not {device.compute_capability} "
        f"({device.device_kind})"
    )


def distributions(
    logits: Array, filters: Filters | None, *, blocks: Blocks = BLOCKS, interpret: object = None
) -> Distribution:
    """The warped law of every row of ``logits`` [R, V]; ``filters`` [R], None for none."""
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
    return shared.distribution_of(filters, *measured)


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
    """(float32 logits of a row from ``nominal`` on, their tokens).

    A chunk that would reach past the end is pulled back; what it repeats is -inf.
    """
    start = jnp.minimum(nominal, ref.shape[1] - width)
    layout = plgpu.Layout.WG_STRIDED((width,), VECTOR)
    x = plgpu.layout_cast(ref[row, pl.ds(start, width)], layout).astype(jnp.float32)
    token = start + plgpu.broadcasted_iota(jnp.int32, (width,), 0, layout=layout)
    return jnp.where(token >= nominal, x, -jnp.inf), token


class _Streamed:
    """A row of logits in memory; scalars are scalars. See ``laws.Row``."""

    def __init__(self, ref, row: Array, blocks: Blocks):
        self.ref, self.row, self.vocab = ref, row, ref.shape[1]
        self.chunk, self.pass_bits = blocks.chunk, blocks.pass_bits
        self.mantissa_bits = jnp.finfo(ref.dtype).nmant

    def sums(self, term: Callable) -> list[Array]:
        """Over the vocabulary, of each value."""
        return self._fold(lambda x, _: term(x), jnp.add, jnp.sum)

    def greatest(self, term: Callable) -> Array:
        """Over the vocabulary."""
        return self._fold(lambda x, _: [term(x)], jnp.maximum, jnp.max)[0]

    def least(self, term: Callable) -> Array:
        """Over the vocabulary."""
        one = lambda x, token: [term(x, token)]
        return self._fold(one, jnp.minimum, jnp.min)[0]

    def as_float(self, bits: Array) -> Array:
        """The float32 of the same bits; only vectors can be reinterpreted."""
        layout = plgpu.Layout.WG_STRIDED((THREADS,), 1)
        vector = plgpu.layout_cast(jnp.full((THREADS,), bits), layout)
        return jnp.max(lax.bitcast_convert_type(vector, jnp.float32))

    def _fold(self, term: Callable, join: Callable, reduce: Callable) -> list[Array]:
        chunk = lambda i: term(*_chunk(self.ref, self.row, i * self.chunk, self.chunk))
        joined = lambda i, carry: [join(a, b) for a, b in zip(carry, chunk(i), strict=True)]
        folded = lax.fori_loop(1, pl.cdiv(self.vocab, self.chunk), joined, chunk(jnp.int32(0)))
        return [reduce(x) for x in folded]


def masses(
    logits: Array,
    draft: Array | None,
    rows: Array | None,
    distribution: Distribution,
    draft_probs: DraftDistribution | None,
    steps: Sequence[Refusal],
    *,
    blocks: Blocks = BLOCKS,
    interpret: object = None,
) -> Masses:
    """What ``steps`` leave of the laws of ``rows``, summed over segments of the vocabulary.

    Args:
      logits: of the target, raw [R, V].
      draft: log-weights [R, V] of the draft's laws, or None.
      rows: int32 [M], rows of ``logits`` and ``draft``; None for all of them.
      law: of these rows, [M].
      draft_law: of these rows of ``draft``, [M]; None without it.
      steps: [M] each.
      blocks: how the work is cut.
      interpret: Mosaic GPU's interpreter parameters, for machines without such a GPU.
    """
    if rows is None:
        rows = jnp.arange(logits.shape[0], dtype=jnp.int32)
    count, segments = rows.shape[0], pl.cdiv(logits.shape[1], blocks.segment)
    facts = [jnp.stack(columns, 1) for columns in shared.pack(distribution, draft_probs, steps)]
    absent = 0 if draft_probs is None else len(draft_probs.absent)
    streams = [x for x in (logits, draft) if x is not None]
    found = _kernel(
        functools.partial(
            _masses_kernel, width=blocks.segment, drafted=draft is not None, absent=absent
        ),
        out_type=tuple(
            jax.ShapeDtypeStruct((count, segments), jnp.float32) for _ in Masses._fields
        ),
        grid=(count, segments),
        grid_names=("place", "segment"),
        interpret=interpret,
    )(rows, *facts, *streams)
    return Masses(*found)


def _masses_kernel(rows, floats, ints, x, *refs, width, drafted, absent):
    y, outs = refs[0] if drafted else None, refs[drafted:]
    place, segment = lax.axis_index("place"), lax.axis_index("segment")
    row, nominal = rows[place], segment * width
    columns = [[ref[place, i] for i in range(ref.shape[1])] for ref in (floats, ints)]
    distribution, draft_probs, steps = shared.unpack(*columns, drafted, absent)
    logits, token = _chunk(x, row, nominal, width)
    log_weights = _chunk(y, row, nominal, width)[0] if drafted else None
    found = shared.weights(logits, log_weights, token, distribution, draft_probs, steps)
    for out, values in zip(outs, found, strict=True):
        out[place, segment] = jnp.sum(jnp.where(token >= nominal, values, 0.0))
