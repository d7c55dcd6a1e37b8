"""Texts of programs that set JAX to be strict."""

import contextlib

import jax
import pytest

import jspec
from tests import llm_fixtures

STRICT = {
    "ranks": lambda: jax.numpy_rank_promotion("raise"),
    "dtypes": lambda: jax.numpy_dtype_promotion("strict"),
    "keys": lambda: jax.debug_key_reuse(True),
}


@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_a_text_does_not_depend_on_how_strict_jax_is(root, method):
    models = llm_fixtures.loaded(root)
    drafts = {"model": models["draft"], "num_speculative_tokens": 3}
    llm = jspec.LLM(models["target"], None if method == "none" else drafts)
    params = [
        jspec.SamplingParams(temperature=0.8, top_p=0.9, seed=3, max_tokens=8, logprobs=1),
        jspec.SamplingParams(temperature=0, presence_penalty=0.5, max_tokens=8),
    ]
    prompts = ["def add(", "the quick"]
    expected = [output.outputs[0].token_ids for output in llm.generate(prompts, params)]
    with contextlib.ExitStack() as strict:
        for setting in STRICT.values():
            strict.enter_context(setting())
        other = jspec.LLM(models["target"], None if method == "none" else drafts)
        texts = [output.outputs[0].token_ids for output in other.generate(prompts, params)]
        assert models["target"].logits([[1, 2, 3]]).shape == (1, 3, llm_fixtures.VOCAB)
    assert texts == expected
