"""Contests of products: tokens with the experts that they choose, rows with quantised matrices."""

import argparse
import dataclasses
import functools
from collections.abc import Iterator

import jax
import jax.numpy as jnp

from benchmarks.contests import MOST_COPIES, STEPS, WORKING_SET, XLA, Contest, kernels
from jspec import ops
from jspec.core.weights import bits_of
from jspec.kernels.grouped_matmul.shapes import CASES as EXPERTS
from jspec.kernels.quantized_matmul.shapes import CASES as MATRICES

INTERPRETED = "pallas_gpu, interpreted"
SMALL = 128, 2  # most outputs, and most groups of inputs, of a matrix that is interpreted


def grouped_matmul(settings: argparse.Namespace) -> Iterator[Contest]:
    """Yield the products of tokens with experts that they choose at random."""
    for name in settings.cases:
        if name in EXPERTS:
            yield _experts_contest(name)


def _experts_contest(name: str) -> Contest:
    case = EXPERTS[name]
    keys = jax.random.split(jax.random.key(0), 4)
    chosen = jax.random.randint(keys[0], (case.rows,), 0, case.experts)
    sizes = jnp.bincount(chosen, length=case.experts).astype(jnp.int32)
    x, weights, _, *scales = case.arrays()
    arrays = dict(
        x=_drawn(keys[1], x),
        weights=_drawn(keys[2], weights),
        scales=_drawn(keys[3], *scales) if scales else None,
        sizes=sizes,
        nudge=jnp.zeros((), jnp.bfloat16),
    )
    stored = sum(each.size * bits_of(each.dtype) // 8 for each in (weights, *scales))
    moved = int((sizes > 0).sum()) * stored // case.experts
    moved += case.rows * (2 * case.depth + 4 * case.columns)
    names = [XLA, *_on_gpus()]
    contenders = {each: functools.partial(_multiply, each, **arrays) for each in names}
    return Contest("grouped_matmul", {"case": name}, contenders, STEPS, moved, 1)


@functools.partial(jax.jit, static_argnums=0)
def _multiply(implementation, *, x, weights, scales, sizes, nudge):
    """Run ``STEPS`` products, each of which depends on the one before.

    ``nudge`` is 0. It makes each call depend on the one before, with the same rows.
    """

    def step(_, out):
        moved = x + nudge * out[:, :1].astype(x.dtype)
        return ops.grouped_matmul(moved, weights, sizes, scales, implementation=implementation)

    out = jnp.zeros((len(x), weights.shape[2 if scales is None else 1]), jnp.float32)
    return jax.lax.fori_loop(0, STEPS, step, out)


def quantized_matmul(settings: argparse.Namespace) -> Iterator[Contest]:
    """Yield the products of rows with quantised matrices; on a CPU with their small corners."""
    for name in settings.cases:
        if name in MATRICES:
            yield _quantised_contest(name)


def _quantised_contest(name: str) -> Contest:
    case, on_cpu = MATRICES[name], jax.default_backend() == "cpu"
    if on_cpu:
        outputs, groups = SMALL
        size = case.inputs // case.groups
        groups = min(case.groups, groups)
        case = case._replace(
            outputs=outputs,
            inputs=groups * min(size, 256),
            groups=groups,
            superblocks=min(case.superblocks, 1),
        )
    x, *shapes = case.arrays(-2 if jax.default_backend() == "tpu" else -1)
    moved = sum(each.size * bits_of(each.dtype) // 8 for each in (x, *shapes) if each is not None)
    moved += 4 * case.rows * case.outputs
    copies = 1 if on_cpu else max(1, min(MOST_COPIES, -(-WORKING_SET // moved)))
    keys = iter(jax.random.split(jax.random.key(0), 1 + len(shapes) * copies))
    arrays = dict(
        x=jax.random.normal(next(keys), x.shape, x.dtype),
        matrices=[[_drawn(next(keys), shape) for shape in shapes] for _ in range(copies)],
        nudge=jnp.zeros((), x.dtype),
    )
    names = [XLA, INTERPRETED] if on_cpu else [XLA, *_taken_by(x, *shapes)]
    steps = 1 if on_cpu else STEPS
    contenders = {
        each: functools.partial(_multiply_quantised, each, steps, case.offset, **arrays)
        for each in names
    }
    return Contest("quantized_matmul", {"case": name}, contenders, steps * copies, moved, copies)


def _drawn(key: jax.Array, shape: jax.ShapeDtypeStruct | None) -> jax.Array | None:
    """Return an array of a shape; whole numbers fit into the four bits of the narrowest."""
    if shape is None:
        return None
    if jnp.issubdtype(shape.dtype, jnp.integer):
        return jax.random.randint(key, shape.shape, -8, 8, jnp.int8).astype(shape.dtype)
    if shape.dtype == jnp.float8_e8m0fnu:
        return (2.0 ** jax.random.randint(key, shape.shape, -8, 0)).astype(shape.dtype)
    return jax.random.normal(key, shape.shape, jnp.bfloat16).astype(shape.dtype)


def _taken_by(*arrays: jax.ShapeDtypeStruct | None) -> list[str]:
    """Return the kernels of this device that take a quantised matrix."""
    refused = {
        each.name
        for each in ops.BACKENDS["quantized_matmul"]
        if each.refusal("quantized_matmul", *arrays)
    }
    return [name for name in kernels() if name not in refused]


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _multiply_quantised(implementation, steps, offset, *, x, matrices, nudge):
    """Run ``steps`` products with all matrices, each of which depends on the one before."""
    if implementation == INTERPRETED:
        product = _interpreted
    else:
        product = functools.partial(ops.quantized_matmul, implementation=implementation)

    def step(_, out):
        for matrix in matrices:
            out = product(x + nudge * out[:, :1].astype(x.dtype), *matrix, offset=offset)
        return out

    values, scales, *_ = matrices[0]
    outputs = values.shape[0 if len(values) == len(scales) else 1]
    out = jnp.zeros((len(x), outputs), jnp.float32)
    return jax.lax.fori_loop(0, steps, step, out)


def _interpreted(x: jax.Array, *matrix: jax.Array | None, offset: int) -> jax.Array:
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    from jspec.kernels.quantized_matmul import pallas_gpu

    padded = -(-len(x) // pallas_gpu.ROW_MULTIPLE) * pallas_gpu.ROW_MULTIPLE
    blocks = pallas_gpu.choose_blocks(padded, matrix[0], matrix[1].shape[1])
    blocks = dataclasses.replace(blocks, is_interpreted=True)
    return pallas_gpu.quantized_matmul(
        x, *matrix, offset=offset, blocks=blocks, interpret=InterpretGPUParams()
    )


def _on_gpus() -> tuple[str, ...]:
    """Return the kernels of this device if it is a GPU: products have no others."""
    return kernels() if jax.default_backend() == "gpu" else ()
