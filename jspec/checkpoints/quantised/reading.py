"""Quantised tensors of files as weights on devices, and their shapes."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding

from jspec.checkpoints.families.names import Entry
from jspec.checkpoints.quantised.stored import NIBBLES, StoredTensor
from jspec.core.quantized import Factors, Joined, Quantized, stored_nibbles
from jspec.core.quantized_rows import ByToken
from jspec.core.types import Array
from jspec.core.weights import Transposed, Weight
from jspec.models.quantised import for_kernel, kernel_takes
from jspec.sharding.placement import Placement


def read(
    entry: Entry, tensors: Mapping[str, Any], dtype: np.dtype, placement: Placement | None = None
) -> Array | Weight:
    """Return ``entry.read``, quantised if all of its tensors are.

    Tensors in several forms are multiplied apart; several devices get them multiplied out.
    """
    if not is_quantised(entry, tensors, placement):
        return entry.read(tensors, dtype, placement)
    return _joined(entry, tensors, dtype, placement, shapes=False)


def outlined(entry: Entry, tensors: Mapping[str, Any], dtype: np.dtype) -> Any:
    """Return ``read`` with shapes for arrays."""
    if not is_quantised(entry, tensors):
        return jax.ShapeDtypeStruct(entry.shape, entry.dtype(dtype))
    return _joined(entry, tensors, dtype, None, shapes=True)


def is_quantised(
    entry: Entry, tensors: Mapping[str, Any], placement: Placement | None = None
) -> bool:
    """Return whether an entry stays quantised: its tensors are, in forms that can be joined."""
    stored = [tensors.get(name) for name in entry.names]
    if entry.float32 or not all(isinstance(each, StoredTensor) for each in stored):
        return False
    is_split = placement is not None and isinstance(placement.sharding, NamedSharding)
    return len({each.form for each in stored}) == 1 or not (entry.stack or is_split)


def _joined(entry: Entry, tensors: Mapping[str, StoredTensor], *given: Any, shapes: bool) -> Weight:
    """Return the weight of an entry, joined of those of tensors that differ in their forms."""
    if len({tensors[name].form for name in entry.names}) == 1:
        return _made(entry, tensors, *given, shapes=shapes)
    apart = [
        dataclasses.replace(entry, names=(name,), shapes=(shape,), sections=())
        for name, shape in zip(entry.names, entry.shapes, strict=True)
    ]
    made = tuple(_made(each, tensors, *given, shapes=shapes) for each in apart)
    return Joined(made, axis=-1 if entry.transpose else -2)


def _made(
    entry: Entry,
    tensors: Mapping[str, StoredTensor],
    dtype: np.dtype,
    placement: Placement | None,
    *,
    shapes: bool,
) -> Weight:
    first = tensors[entry.names[0]]
    here = jax.default_backend()
    on_cpu = here == "cpu" and placement is None
    swapped = entry.transpose and (on_cpu or here == "gpu")
    if swapped and placement is not None:
        outlined = _made(entry, tensors, dtype, None, shapes=True)
        swapped = not entry.stack and kernel_takes(outlined)
        placement = placement.swapped() if swapped else placement
    laid = dataclasses.replace(entry, transpose=entry.transpose and not swapped)
    axis = -2 if laid.transpose else -1
    groups = first.arrays["scales"].shape[-1]

    def array(name: str) -> Any:
        if name not in first.arrays:
            return None
        part, kind = _of_array(laid, tensors, name), first.arrays[name].dtype
        packs = name == "values" and kind.name in NIBBLES and on_cpu
        if shapes:
            shape = list(part.shape)
            shape[axis] //= 2 if packs else 1
            return jax.ShapeDtypeStruct(tuple(shape), np.uint8 if packs else kind)
        arrays = {each: tensors[each].arrays[name] for each in entry.names}
        if placement is not None:
            return part.read(arrays, kind, placement.of_part(part.shape, len(part.shape)))
        values = part.join(arrays, kind)
        values = stored_nibbles(values, axis, groups, packed=True) if packs else values
        return jax.device_put(values)

    def factors(name: str) -> Factors | None:
        inner = array(name)
        return None if inner is None else Factors(inner, array(f"outer_{name}"))

    weight = (ByToken if first.by_token else Quantized)(
        values=array("values"),
        scales=factors("scales"),
        zeros=array("zeros"),
        minima=factors("minima"),
        order=_order(entry, first, placement, shapes=shapes),
        axis=axis,
        name=entry.dtype(dtype).name,
        code=first.arrays["values"].dtype.name
        if on_cpu and first.arrays["values"].dtype.name in NIBBLES
        else "",
    )
    weight = Transposed(weight) if swapped else weight
    return weight if shapes else jax.block_until_ready(for_kernel(weight, placement=placement))


def _of_array(entry: Entry, tensors: Mapping[str, StoredTensor], name: str) -> Entry:
    """Return the entry of one array of quantised tensors, as wide as that array."""
    width = tensors[entry.names[0]].arrays[name].shape[-1]
    shapes = tuple((shape[0], width) for shape in entry.shapes)
    fused = "outputs" if entry.fused else entry.fused
    return dataclasses.replace(entry, shapes=shapes, fused=fused, by_linear=False)


def _order(entry: Entry, first: StoredTensor, placement: Placement | None, *, shapes: bool) -> Any:
    if first.order is None:
        return None
    order = np.asarray(first.order, np.int32)
    order = np.tile(order, (entry.stack, 1)) if entry.stack else order
    if shapes:
        return jax.ShapeDtypeStruct(order.shape, order.dtype)
    rank = 3 if entry.stack else 2
    return jax.device_put(order) if placement is None else placement.of_part((1,), rank).put(order)
