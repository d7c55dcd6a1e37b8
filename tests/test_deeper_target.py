"""``benchmarks.deeper``: a target of more blocks says what it said, its head drafts as before."""

import dataclasses
import json
import sys

import jax
import numpy as np
import pytest

import jspec
from benchmarks import deeper
from jspec import head_files
from jspec.models.heads import eagle
from tests import llm_fixtures

CONFIG = dataclasses.replace(llm_fixtures.TARGET, num_layers=2)
PROMPTS = ["the quick brown", "def add(x, y"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Target and head of two blocks under ``plain``, of six under ``deep``."""
    root = tmp_path_factory.mktemp("deeper")
    plain, deep = root / "plain", root / "deep"
    llm_fixtures.write_model(plain / "target", CONFIG, 0)
    llm_fixtures.write_tokenizer(plain / "target")
    sizes = (llm_fixtures.TARGET, 3, (0, 1), CONFIG.hidden_size, CONFIG.vocab_size)
    head = eagle.EagleConfig(*sizes, own_head=True)
    params = eagle.init_params(jax.random.key(3), head)
    head_files.save_head(plain / "eagle3", head, params, CONFIG, target_name="target")
    words = ["--target", plain / "target", "--eagle3", plain / "eagle3", "--times", "3"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["deeper", *map(str, words), "--output", str(deep)])
        deeper.main()
    return plain, deep


def test_a_deeper_target_has_its_law_in_transformers_too(models):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    read = transformers.AutoModelForCausalLM.from_pretrained
    plain, deep = (read(each / "target", dtype=torch.float32) for each in models)
    assert (plain.config.num_hidden_layers, deep.config.num_hidden_layers) == (2, 6)
    tokens = torch.arange(20, 60)[None]
    with torch.no_grad():
        same = [model(tokens).logits.numpy() for model in (plain, deep)]
    np.testing.assert_array_equal(*same)


def test_its_head_reads_the_same_hidden_states_and_drafts_as_before(models):
    found = []
    for each in models:
        config = {"method": "eagle3", "model": str(each / "eagle3"), "num_speculative_tokens": 2}
        llm = jspec.LLM(each / "target", config)
        outputs = llm.generate(PROMPTS, jspec.SamplingParams(max_tokens=16, temperature=0))
        found.append([(x.outputs[0].token_ids, x.speculative_decoding_stats) for x in outputs])
    assert found[0] == found[1]
    raw = json.loads((models[1] / "eagle3" / "config.json").read_text())
    assert raw["eagle_aux_hidden_state_layer_ids"] == [0, 3] and "eagle_config" not in raw
