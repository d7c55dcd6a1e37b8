"""Norms round as those of ``transformers`` do, in bfloat16."""

import importlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.models.blocks.norms import LayerNorm, RmsNorm
from tests.families import models

torch = models.torch
WIDTH = 64
NORMS = {
    "llama.LlamaRMSNorm": RmsNorm(1e-5),
    "olmo2.Olmo2RMSNorm": RmsNorm(1e-5, wide=True),
    "gemma2.Gemma2RMSNorm": RmsNorm(1e-5, centred=True),
    "qwen3_next.Qwen3NextRMSNorm": RmsNorm(1e-5, centred=True),
    "cohere2.Cohere2LayerNorm": LayerNorm(1e-5),
}


@pytest.mark.parametrize("name", NORMS)
def test_a_norm_rounds_as_that_of_transformers(name):
    family, _, kind = name.partition(".")
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    theirs = vars(module)[kind](WIDTH, eps=1e-5).to(torch.bfloat16)
    rng = np.random.default_rng(0)
    x, weight = (rng.normal(0, 3, shape).astype(np.float32) for shape in ((512, WIDTH), WIDTH))
    with torch.no_grad():
        theirs.weight.copy_(torch.tensor(weight))
        expected = theirs(torch.tensor(x).to(torch.bfloat16)).float().numpy()
    narrow = [jnp.asarray(each, jnp.bfloat16) for each in (x, weight)]
    actual = np.asarray(jax.jit(NORMS[name])(*narrow), np.float32)
    # Means are summed in another order, which moves a few results by a step.
    assert (actual == expected).mean() > 0.998
    np.testing.assert_allclose(actual, expected, rtol=2**-7)


def test_a_norm_with_a_bias_has_both_in_one_array():
    norm, rng = LayerNorm(1e-5, bias=True), np.random.default_rng(1)
    x, weight = rng.normal(size=(3, 8)), rng.normal(size=16)
    expected = torch.nn.functional.layer_norm(
        torch.tensor(x), (8,), torch.tensor(weight[:8]), torch.tensor(weight[8:]), 1e-5
    )
    np.testing.assert_allclose(norm(jnp.asarray(x), jnp.asarray(weight)), expected, atol=1e-5)
    assert norm.init(8, jnp.float32).shape == (16,)
