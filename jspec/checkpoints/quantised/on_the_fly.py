"""``quantization=`` "int8", "fp8" and "int4": matrices are quantised one by one as they are read.

Embedding, output matrix and routers keep their dtype, and so do vectors.
"""

import functools
from typing import Any

import jax

from jspec.checkpoints.families.names import Entry
from jspec.checkpoints.quantised.format import GGUF, W8A8
from jspec.core.quantized import SCHEMES, Scheme, quantize
from jspec.core.types import Array
from jspec.core.weights import Weight, as_array
from jspec.models.quantised import for_kernel, kernel_takes
from jspec.sharding.placement import Placement
from jspec.util.messages import did_you_mean, shown

# The files that a ``quantization`` other than a scheme is for.
_NEEDED = {
    GGUF: "a GGUF file",
    W8A8: "a checkpoint whose quantization_config quantises activations",
}
_WHOLE = ("head", "router")  # The last fields of paths that keep their dtype.


def scheme_of(name: Any, method: Any = None) -> Scheme | None:
    """Return the scheme of a ``quantization``; None for none.

    ``method`` is that of weights that are quantised, "gguf" for a GGUF file; it may be named too.

    Raises:
      ValueError: there is none of that name, or the weights are quantised otherwise.
    """
    if name in (None, method) or (name == W8A8 and method not in (None, GGUF)):
        return None
    schemes, is_plain = list(SCHEMES), method in (None, GGUF)
    if name in schemes and is_plain:
        return SCHEMES[name]
    if name in schemes:
        raise ValueError(
            f"quantization={name!r} is for weights that are not quantised, but these are "
            f"({shown(method)}); leave it out."
        )
    known = (schemes if is_plain else []) + ([] if method is None else [method])
    use = f"use one of {', '.join(map(shown, known))}, or leave it out"
    if name in list(_NEEDED):
        other = ", not a GGUF file" if method == GGUF else ""
        raise ValueError(f"quantization={name!r} needs {_NEEDED[name]}{other}; {use}.")
    meant = did_you_mean(name, SCHEMES) or "."
    raise ValueError(
        f"quantization={shown(name)} is not supported; {use} for files that are quantised{meant}"
    )


def takes(entry: Entry) -> bool:
    """Return whether the array of an entry is quantised."""
    return entry.transpose and not entry.float32 and entry.path[-1] not in _WHOLE


def check(entries: tuple[Entry, ...], scheme: Scheme | None) -> None:
    """Raise ValueError if no group of a scheme divides the inputs of a matrix."""
    for entry in filter(takes, entries if scheme else ()):
        inputs = entry.shape[-2]
        if scheme.group(inputs) is None:
            sizes = " or ".join(map(str, scheme.groups))
            raise ValueError(
                f"quantization={scheme.name!r} has groups of {sizes} inputs, which do not divide "
                f"the {inputs} of {entry.label}; use 'int8' or 'fp8'."
            )


def quantised(
    entry: Entry, weight: Array | Weight, scheme: Scheme | None, placement: Placement | None = None
) -> Array | Weight:
    """Return the weight of an entry as a scheme has it, at its placement."""
    if scheme is None or not takes(entry):
        return weight
    here, whole = jax.default_backend(), as_array(weight)
    make = functools.partial(quantize, whole, scheme=scheme, packed=here == "cpu")
    swapped = here == "gpu" or (here == "cpu" and placement is None)
    if swapped and placement is not None:
        outlined = jax.eval_shape(functools.partial(make, swapped=True))
        swapped = whole.ndim == 2 and kernel_takes(outlined)
        placement = placement.swapped() if swapped else placement
    made = for_kernel(make(swapped=swapped), placement=placement)
    if placement is not None:
        rank = len(made.shape)
        made = jax.tree.map(
            lambda x: jax.device_put(x, placement.of_part(x.shape, rank).sharding), made
        )
    return jax.block_until_ready(made)


def outlined(entry: Entry, shape: Any, scheme: Scheme | None) -> Any:
    """Return ``quantised`` with shapes for arrays."""
    if scheme is None or not takes(entry):
        return shape
    packed = jax.default_backend() == "cpu"
    return jax.eval_shape(functools.partial(quantize, scheme=scheme, packed=packed), shape)
