"""GGUF files of every architecture are the model of the safetensors checkpoint."""

import json
import re

import jax
import numpy as np
import pytest

from jspec.checkpoints import checkpoint
from tests.families import gguf_cases, models

pytest.importorskip("gguf")
safetensors = pytest.importorskip("safetensors.numpy")

from tests.families import gguf_writing  # noqa: E402


def checkpoint_of(name, directory):
    """Save the checkpoint of a case; return its architecture, config.json and tensors."""
    arch, kind, keys = gguf_cases.config_of(name)
    models.made(kind, keys, seed=len(name)).save_pretrained(directory)
    raw = json.loads((directory / "config.json").read_text())
    return arch, raw, safetensors.load_file(directory / "model.safetensors")


def rounded(config):
    """Return a config as text, with the numbers that files have in float32."""
    return re.sub(r"\d+\.\d+(e-?\d+)?", lambda match: f"{float(match[0]):.5g}", repr(config))


@pytest.mark.parametrize("name", gguf_cases.CASES)
def test_a_file_is_the_model_of_its_checkpoint(name, tmp_path):
    arch, raw, tensors = checkpoint_of(name, tmp_path / "saved")
    gguf_writing.write(tmp_path / "model.gguf", arch, raw, tensors)
    expected, weights, _ = checkpoint.load_pretrained(tmp_path / "saved")
    config, params, _ = checkpoint.load_pretrained(tmp_path / "model.gguf")
    assert rounded(config) == rounded(expected)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), params, weights)
