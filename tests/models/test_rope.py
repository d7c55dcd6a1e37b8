"""Rotations at published sizes equal those of ``transformers``."""

import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints import families
from jspec.models.blocks import rope as rope_lib

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

PUBLISHED_ROPES = {
    "llama-2": {"rope_type": "default"},
    "llama-3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "rope_theta": 5e5,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "qwen-long": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e6,
        "original_max_position_embeddings": 32768,
    },
    "yarn-without-truncation": {
        "rope_type": "yarn",
        "factor": 32.0,
        "rope_theta": 150000.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn-with-a-ramp-past-the-end": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 524288,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + j / 64 for j in range(64)],
        "long_factor": [1.0 + j for j in range(64)],
    },
}


@pytest.mark.parametrize("name", PUBLISHED_ROPES)
def test_rotations_at_published_sizes_equal_those_of_transformers(name):
    theirs = transformers.LlamaConfig(
        head_dim=128,
        hidden_size=4096,
        max_position_embeddings=131072,
        rope_parameters={"rope_theta": 1e4, **PUBLISHED_ROPES[name]},
    )
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    ours = families.find({"model_type": "llama"}).read(theirs.to_dict())
    for positions in (np.arange(-3, 16), np.array([4095]), np.array([4096, 30000, 131071])):
        expected = rotary(torch.zeros(1), torch.tensor(positions)[None])
        actual = rope_lib.cos_sin(ours.layers[0].mixer.rope, 128, jnp.array(positions, jnp.int32))
        # A relative error of 1e-7 in a frequency rotates the last position by 1e-2.
        tolerance = 1e-6 + 2e-7 * positions.max()
        for half, both in zip(actual, expected, strict=True):
            np.testing.assert_allclose(half, both[0, :, :64].numpy(), atol=tolerance)
