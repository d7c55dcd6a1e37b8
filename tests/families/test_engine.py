"""Every family through ``LLM``: pages, prefix cache, chains and trees give transformers' text."""

import functools

import jax
import pytest

import jspec
from jspec.checkpoints.heads.head_files import LoadedHead
from jspec.checkpoints.loading import LoadedModel
from jspec.models.decoder import DecoderConfig
from jspec.models.heads import eagle
from tests import networks
from tests.families import models, table
from tests.families.prompts import PROMPTS

DEPTH = 3
METHODS = {
    "ngram": {"method": "ngram", "prompt_lookup_max": 2, "prompt_lookup_min": 1},
    "chain": {"method": "eagle3"},
    "tree": {"method": "eagle3", "tree": "eagle2", "tree_size": 8, "tree_top_k": 3},
}


def head_for(target: DecoderConfig) -> LoadedHead:
    """Return a random EAGLE-3 head of one small layer for a target."""
    network = networks.build(
        vocab_size=target.vocab_size,
        hidden_size=target.hidden_size,
        intermediate_size=32,
        num_layers=1,
        num_heads=2,
        num_kv_heads=1,
        head_dim=16,
        max_positions=target.max_positions,
    )
    layers = (0, 1, target.num_layers)
    config = eagle.EagleConfig(
        network, 3, layers, target.hidden_size, target.vocab_size, separate_head=True
    )
    params = networks.loud(eagle.init_params(jax.random.key(2), config))
    return LoadedHead("eagle3", "eagle3", config, params, {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.getbasetemp() / "families"


@functools.cache
def loaded(case, folder) -> LoadedModel:
    return jspec.load(models.saved(case, folder))


@pytest.mark.parametrize("case", table.ENGINE)
@pytest.mark.parametrize("method", METHODS)
def test_texts_with_speculation_equal_those_of_transformers(case, method, folder):
    target = loaded(case, folder)
    config = METHODS[method] | {"num_speculative_tokens": DEPTH}
    if config["method"] == "eagle3":
        config["model"] = head_for(target.config)
    llm = jspec.LLM(
        target,
        config,
        max_num_seqs=2,
        max_model_len=96,
        block_size=8,
    )
    settings = jspec.SamplingParams(
        temperature=0, max_tokens=models.NEW_TOKENS, detokenize=False, ignore_eos=True
    )
    prompts = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
    expected = [tokens for tokens, _ in models.generated(case)]
    for _ in range(2):  # the second time from the prefix cache
        outputs = llm.generate(prompts, settings)
        assert [list(output.outputs[0].token_ids) for output in outputs] == expected
