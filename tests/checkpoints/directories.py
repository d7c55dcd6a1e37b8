"""Helpers of the tests that read and change the files of a head."""

import json

import jax
import numpy as np

from jspec.checkpoints import safetensors_files, torch_files

TORCH_FILE = "medusa_lm_head.pt"


def read(directory):
    """Return every tensor of a directory, and its config.json."""
    raw = json.loads((directory / "config.json").read_text())
    if (directory / TORCH_FILE).exists():
        tensors = torch_files.read(directory / TORCH_FILE)
    else:
        tensors = safetensors_files.read(directory / "model.safetensors")
    return {name: np.array(tensor) for name, tensor in tensors.items()}, raw


def edit(directory, change=None, **keys):
    """Change tensors by a function of the dict, and keys of config.json; None removes a key."""
    tensors, raw = read(directory)
    if change is not None:
        change(tensors)
    layout = [(name, array.shape, array.dtype) for name, array in tensors.items()]
    safetensors_files.write(directory / "model.safetensors", layout, iter(tensors.values()))
    raw = {key: value for key, value in (raw | keys).items() if value is not None}
    (directory / "config.json").write_text(json.dumps(raw))


def assert_same_files(one, other):
    """Check that two directories hold equal tensors in the same order, and equal configs."""
    (first, raw), (second, again) = read(one), read(other)
    assert raw == again and list(first) == list(second)
    for ours, theirs in zip(first.values(), second.values(), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(ours, theirs)


def assert_same(params, expected):
    """Check that two pytrees have equal structures, dtypes and values."""
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))
