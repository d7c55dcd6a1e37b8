"""The shared state of a drafter in one safetensors file, with one tensor for each array."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.files import safetensors_files
from jspec.core.types import Shared
from jspec.util import atomic_files
from jspec.util.atomic_files import check_output


def save(path: str | os.PathLike, shared: Shared) -> None:
    """Write every array of ``shared``; an interrupted call leaves the old file whole.

    If the path is a link, the call writes the file that it points to.

    Raises:
      ValueError: the drafter has no shared state, or the path cannot be written.
    """
    path, arrays = Path(path), _named(shared)
    if not arrays:
        raise ValueError("the method learns nothing from requests; there is nothing to save.")
    if atomic_files.is_stream(path):
        raise ValueError(f"path {path} is a device or a pipe, which stores nothing; name a file.")
    check_output("path", path)
    arrays = jax.device_get(arrays)
    layout = [(name, array.shape, array.dtype) for name, array in arrays.items()]
    with atomic_files.aside(atomic_files.followed(path)) as partial:
        safetensors_files.write(partial, layout, iter(arrays.values()))


def load(path: str | os.PathLike, like: Shared) -> Shared:
    """Load a state that ``save`` wrote, with the arrays of ``like``.

    Raises:
      ValueError: there is no such file, it is damaged, or its arrays differ from those of ``like``.
    """
    tensors, arrays = safetensors_files.read(path), _named(like)
    shapes = lambda named: {name: (x.shape, np.dtype(x.dtype)) for name, x in named.items()}
    stored, expected = shapes(tensors), shapes(arrays)
    if stored != expected:
        names = {*stored, *expected}
        wrong = sorted(name for name in names if stored.get(name) != expected.get(name))
        raise ValueError(
            f"{path} was saved by another method or with other settings: {', '.join(wrong)} "
            "differ in shape; use those settings, or start without the file."
        )
    leaves = [jnp.array(tensors[name]) for name in arrays]
    # Copy now, so that no request waits for the transfer.
    return jax.block_until_ready(jax.tree.unflatten(jax.tree.structure(like), leaves))


def _named(shared: Shared) -> dict[str, jax.Array]:
    leaves, _ = jax.tree.flatten_with_path(shared)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
