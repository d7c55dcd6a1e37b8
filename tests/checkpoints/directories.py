"""Helpers of the tests that read and change the files of a head."""

import json

import jax
import numpy as np

from jspec.checkpoints.files import safetensors_files, torch_files
from jspec.checkpoints.heads import head_files

TORCH_FILE, TARGET_NAME = "medusa_lm_head.pt", "someone/model"


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


def save(directory, head, target, layout=None, **options):
    """Write (config, params) of a head, and return them."""
    options = {"layout": layout, "target_name": TARGET_NAME} | options
    head_files.save_head(directory, *head, target, **options)
    return head


def assert_saved_again(directory, target):
    """Check that a head is loaded and saved with equal tensors in the same order."""
    head = head_files.load_head(directory, target)
    save(directory / "again", (head.config, head.params), target, head.layout)
    (first, raw), (second, again) = read(directory), read(directory / "again")
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
