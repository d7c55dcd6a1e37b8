"""What a drafter learns from requests, on disk: one safetensors file, a tensor for every array."""

import os
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints import safetensors_files
from jspec.core.types import Shared
from jspec.util import atomic_files
from jspec.util.values import check_output


def save(path: str | os.PathLike, shared: Shared) -> None:
    """Writes every array of ``shared``; an older file is replaced as a whole.

    Where the path is a link, it stays one: the file that it leads to is written.

    Raises:
      ValueError: there is nothing to write, as the drafter shares no state, or no file can be
        written there.
    """
    path, arrays = Path(path), _named(shared)
    if not arrays:
        raise ValueError("the method learns nothing from requests: there is nothing to save.")
    if atomic_files.is_stream(path):
        raise ValueError(f"path {path} is a device or a pipe, which keeps nothing; name a file.")
    check_output("path", path)
    arrays = jax.device_get(arrays)
    layout = [(name, array.shape, array.dtype) for name, array in arrays.items()]
    with atomic_files.aside(atomic_files.followed(path)) as partial:
        safetensors_files.write(partial, layout, iter(arrays.values()))


def load(path: str | os.PathLike, like: Shared) -> Shared:
    """What ``save`` wrote, for a drafter whose shared state is shaped ``like`` this.

    Raises:
      ValueError: there is no such file, it is damaged, or what it holds is shaped otherwise.
    """
    tensors, wanted = safetensors_files.read(path), _named(like)
    say = lambda arrays: {name: (x.shape, np.dtype(x.dtype)) for name, x in arrays.items()}
    held, asked = say(tensors), say(wanted)
    if held != asked:
        wrong = sorted(name for name in {*held, *asked} if held.get(name) != asked.get(name))
        raise ValueError(
            f"{path} was saved by another method or with other settings: {', '.join(wrong)} "
            "differ in shape; use those settings, or start without the file."
        )
    leaves = [jnp.array(tensors[name]) for name in wanted]
    # Not while a request waits for it.
    return jax.block_until_ready(jax.tree.unflatten(jax.tree.structure(like), leaves))


def _named(shared: Shared) -> dict[str, jax.Array]:
    found, _ = jax.tree.flatten_with_path(shared)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in found}
