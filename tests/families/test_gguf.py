"""GGUF files of every architecture are the model of the safetensors checkpoint."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints import checkpoint
from jspec.core.weights import Weight, as_array, size_of
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


def test_keys_and_values_that_no_layer_reads_are_left_out(tmp_path):
    arch, raw, tensors = checkpoint_of("gemma4, shared", tmp_path / "saved")
    _, expected, _ = checkpoint.load_pretrained(tmp_path / "saved")
    first = "model.layers.1.self_attn."
    unread = [name for name in tensors if name.startswith((first + "k_", first + "v_"))]
    tensors |= {name.replace("layers.1", "layers.4"): tensors[name] for name in unread}
    safetensors.save_file(tensors, tmp_path / "saved" / "model.safetensors")
    gguf_writing.write(tmp_path / "model.gguf", arch, raw, tensors)
    for path in ("saved", "model.gguf"):
        _, params, _ = checkpoint.load_pretrained(tmp_path / path)
        jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, atol=1e-6), params, expected)


@pytest.mark.parametrize(
    ("name", "kind", "path"),
    [
        ("mixtral", "Q8_0", ("feed_forward", "gate_up")),
        ("gpt-oss", "MXFP4", ("feed_forward", "gate_up")),
        ("qwen3next", "Q8_0", ("mixer", "qkvz")),
        ("qwen35", "Q4_0", ("mixer", "output")),
    ],
)
def test_blocks_of_a_file_are_kept_with_their_numbers(name, kind, path, tmp_path):
    gguf_writing.write(tmp_path / "model.gguf", *checkpoint_of(name, tmp_path / "saved"), kind=kind)
    load = functools.partial(checkpoint.load_pretrained, tmp_path / "model.gguf", "float32")
    expected, kept = load()[1], load(quantization="gguf")[1]
    parts = [functools.reduce(getattr, path, layer) for layer in kept.layers if has(layer, path)]
    assert parts and all(isinstance(part, Weight) for part in parts)
    assert sum(map(size_of, jax.tree.leaves(kept))) < 0.6 * sum(
        map(size_of, jax.tree.leaves(expected))
    )
    outline = checkpoint.outline(tmp_path / "model.gguf", "float32", "gguf")[1]
    assert jax.tree.map(jnp.shape, kept) == jax.tree.map(lambda x: x.shape, outline)
    arrays = jax.tree.map(as_array, kept, is_leaf=lambda x: isinstance(x, Weight))
    jax.tree.map(np.testing.assert_array_equal, arrays, expected)


def has(layer, path):
    """Return whether a layer has a weight."""
    part, field = path
    return getattr(getattr(layer, part), field, None) is not None
