"""gpt-oss with experts in MXFP4, as published, is that of transformers."""

import json
import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

import jspec
from jspec.checkpoints import checkpoint
from jspec.checkpoints.files import safetensors_files
from jspec.core import trees
from jspec.core.weights import Weight, as_array
from jspec.models import decoder
from tests.families import models
from tests.families.prompts import PROMPTS

GROUP = 32
NOT_CONVERTED = ["model.layers.*.self_attn", "model.layers.*.mlp.router"]
torch = models.torch


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    """Return a directory in MXFP4, and the model of transformers with the same numbers."""
    from transformers.integrations import mxfp4

    model = models.model("gpt_oss")
    rng, state, tensors = np.random.default_rng(0), dict(model.state_dict()), {}
    for name, x in state.items():
        if not name.endswith(("gate_up_proj", "down_proj")):
            tensors[name] = x.numpy()
            continue
        count, inputs, outputs = x.shape
        blocks = rng.integers(0, 256, (count, outputs, inputs // GROUP, GROUP // 2), np.uint8)
        scales = rng.integers(122, 127, blocks.shape[:-1]).astype(np.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        state[name] = mxfp4.convert_moe_packed_tensors(
            torch.from_numpy(blocks), torch.from_numpy(scales), dtype=torch.float32
        )
    other = models.transformers.AutoModelForCausalLM.from_config(model.config).eval()
    other.load_state_dict(state)
    directory = tmp_path_factory.mktemp("mxfp4")
    method = {"quant_method": "mxfp4", "modules_to_not_convert": NOT_CONVERTED}
    raw = model.config.to_dict() | {"quantization_config": method, "dtype": "float32"}
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    layout = [(name, x.shape, x.dtype) for name, x in tensors.items()]
    safetensors_files.write(directory / "model.safetensors", layout, tensors.values())
    return directory, other


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_experts_stay_in_half_a_byte_and_are_equal_to_the_bit(published, dtype):
    directory, model = published
    _, params, _ = checkpoint.load_pretrained(directory, dtype)
    for index, layer in enumerate(params.layers):
        experts = model.model.layers[index].mlp.experts
        for field in ("gate_up", "down"):
            weight = getattr(layer.feed_forward, field)
            assert isinstance(weight, Weight)
            stored = sum(x.nbytes for x in jax.tree.leaves(weight))
            assert stored <= math.prod(weight.shape) * (0.5 + 4 / GROUP)
            theirs = getattr(experts, f"{field}_proj").detach().numpy()
            numbers = np.asarray(as_array(weight))
            expected = theirs if dtype == "float32" else theirs.astype(ml_dtypes.bfloat16)
            np.testing.assert_array_equal(numbers, expected)


def test_logits_are_those_of_transformers_with_the_same_numbers(published):
    directory, model = published
    config, params, _ = checkpoint.load_pretrained(directory)
    for prompt in PROMPTS[:2]:
        tokens = jnp.asarray([prompt], jnp.int32)
        tree, cache = trees.chain_tree(*tokens.shape), decoder.init_cache(config, 1, 0)
        logits = jax.jit(decoder.forward, static_argnums=1)(params, config, tokens, tree, cache)
        with torch.no_grad():
            theirs = model(torch.tensor([prompt])).logits[0].numpy()
        np.testing.assert_allclose(logits.logits[0], theirs, atol=2e-4 * np.abs(theirs).max())


def test_texts_with_speculation_are_those_without(published):
    directory, _ = published
    ngram = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    settings = jspec.SamplingParams(temperature=0, max_tokens=24, detokenize=False, ignore_eos=True)
    prompts = [{"prompt_token_ids": [*prompt]} for prompt in PROMPTS[:2]]
    texts = []
    for config in (None, ngram):
        llm = jspec.LLM(str(directory), config, max_num_seqs=2, max_model_len=64, block_size=8)
        outputs = llm.generate(prompts, settings)
        texts.append([list(output.outputs[0].token_ids) for output in outputs])
    assert texts[0] == texts[1]
