"""``benchmarks.deeper``: a deeper target gives the same texts, and its head the same drafts."""

import sys

import jax
import numpy as np
import pytest

import jspec
from benchmarks import deeper
from jspec.checkpoints import loading
from jspec.checkpoints.heads import head_files
from jspec.models.heads import eagle
from tests import llm_fixtures, networks

BIASES = dict.fromkeys(("qkv_bias", "output_bias", "mlp_bias"), True)
CONFIG = networks.changed(llm_fixtures.TARGET, num_layers=2, **BIASES)
PROMPTS = ["the quick brown", "def add(x, y"]


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Target and head of two blocks under ``plain``, of six under ``deep``."""
    root = tmp_path_factory.mktemp("deeper")
    plain, deep = root / "plain", root / "deep"
    llm_fixtures.write_model(plain / "target", CONFIG, 0)
    llm_fixtures.write_tokenizer(plain / "target")
    sizes = (llm_fixtures.TARGET, 3, (0, 1), CONFIG.hidden_size, CONFIG.vocab_size)
    head = eagle.EagleConfig(*sizes, separate_head=True)
    params = eagle.init_params(jax.random.key(3), head)
    head_files.save_head(plain / "eagle3", head, params, CONFIG, target_name="target")
    run(plain / "target", plain / "eagle3", deep, times=3)
    return plain, deep


def run(target, head, output, times):
    words = ["--target", target, "--eagle3", head, "--output", output]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["deeper", *map(str, words), "--times", str(times)])
        deeper.main()


def test_a_deeper_target_has_the_same_distribution_in_transformers(models):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    read = transformers.AutoModelForCausalLM.from_pretrained
    plain, deep = (read(each / "target", dtype=torch.float32) for each in models)
    assert (plain.config.num_hidden_layers, deep.config.num_hidden_layers) == (2, 6)
    tokens = torch.arange(20, 60)[None]
    with torch.no_grad():
        same = [model(tokens).logits.numpy() for model in (plain, deep)]
    np.testing.assert_array_equal(*same)


def test_its_head_reads_the_same_hidden_states_and_drafts_as_before(models):
    results = []
    for each in models:
        config = {"method": "eagle3", "model": str(each / "eagle3"), "num_speculative_tokens": 2}
        llm = jspec.LLM(each / "target", config)
        outputs = llm.generate(PROMPTS, jspec.SamplingParams(max_tokens=16, temperature=0))
        results.append([(x.outputs[0].token_ids, x.speculative_decoding_stats) for x in outputs])
    assert results[0] == results[1]
    deep = models[1]
    head = loading.load_head(deep / "eagle3", loading.load(deep / "target").config)
    assert head.config.capture_layers == (0, 3)


def test_targets_that_cannot_be_deepened_are_refused_before_anything_is_written(
    models, tmp_path, capsys
):
    plain, _ = models
    for times, head, message in [
        (1, "eagle3", "--times 1 makes nothing deeper; take 2 or more"),
        (2, "target", "not a draft head"),
    ]:
        with pytest.raises(SystemExit):
            run(plain / "target", plain / head, tmp_path / "out", times)
        assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
