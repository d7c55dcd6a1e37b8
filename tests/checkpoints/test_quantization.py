"""``quantization=``: matrices of any checkpoint are quantised as they are read."""

import jax
import numpy as np
import pytest

import jspec
from jspec.api.engine_args import EngineArgs
from jspec.checkpoints import checkpoint
from jspec.core.quantized import SCHEMES
from jspec.core.weights import Transposed, as_arrays
from jspec.engine.memory import bytes_of
from jspec.models import decoder
from jspec.tools.plan import plan
from tests import networks

CONFIG = networks.build(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=256,
)
NOISE = {"int8": 0.02, "fp8": 0.08, "int4": 0.6}  # Relative to the size of logits.
PROMPTS = [[1, 2, 3, 4, 1, 2, 3], [5, 6, 7]]


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    params = networks.loud(decoder.init_params(jax.random.key(0), CONFIG))
    directory = tmp_path_factory.mktemp("model")
    checkpoint.save_pretrained(directory, CONFIG, params)
    return directory


@pytest.mark.parametrize("name", SCHEMES)
def test_a_quantised_model_is_near_its_floats_and_as_small_as_planned(saved, name):
    tokens = np.array([PROMPTS[0]])
    exact, model = jspec.load(saved).logits(tokens), jspec.load(saved, quantization=name)
    assert isinstance(model.params.layers[0].mixer.qkv, Transposed)
    error = np.abs(model.logits(tokens) - exact).mean() / np.abs(exact).mean()
    assert 0 < error < NOISE[name]
    plain = model.with_params(as_arrays(model.params)).logits(tokens)
    np.testing.assert_allclose(model.logits(tokens), plain, rtol=1e-4, atol=1e-4)
    report = plan(str(saved), "v5e", quantization=name)
    assert report.memory.weights == bytes_of(model.params) < bytes_of(jspec.load(saved).params) / 2


def test_texts_of_a_quantised_target_with_speculation_are_those_without(saved):
    params = jspec.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    configs = (
        None,
        {"method": "ngram", "num_speculative_tokens": 3},
        {"model": str(saved), "num_speculative_tokens": 3, "quantization": "int4"},
    )
    settings = dict(quantization="int8", max_num_seqs=2, max_model_len=64, block_size=16)
    texts = []
    for config in configs:
        llm = jspec.LLM(str(saved), config, num_gpu_blocks_override=8, **settings)
        texts.append([each.outputs[0].token_ids for each in llm.generate(PROMPTS, params)])
    assert texts[0] == texts[1] == texts[2]


def test_what_no_scheme_can_do_is_refused_in_one_line(saved, tmp_path):
    for name in ("awq", "int5", 8):
        with pytest.raises(ValueError, match=r"quantization=.* is not supported; use one of"):
            jspec.LLM(str(saved), quantization=name)
    with pytest.raises(ValueError, match="is for models that are not loaded; give it to jspec"):
        jspec.LLM(jspec.load(saved), quantization="int8")
    odd = networks.changed(CONFIG, intermediate_size=80)
    checkpoint.save_pretrained(tmp_path, odd, decoder.init_params(jax.random.key(0), odd))
    with pytest.raises(ValueError, match="128 or 64 or 32 inputs, which do not divide the 80 of"):
        checkpoint.outline(tmp_path, quantization="int4")
    assert EngineArgs(quantization="fp8").quantization == "fp8"
