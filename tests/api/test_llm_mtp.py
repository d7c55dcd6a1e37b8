"""LLM with MTP modules, in the target's files and in separate files."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jspec
from jspec.checkpoints import loading, stitching
from jspec.checkpoints.heads import head_files
from jspec.checkpoints.heads import mtp as mtp_format
from jspec.models.heads import mtp
from tests import llm_fixtures

TARGET = llm_fixtures.TARGET
CONFIG = mtp_format.config_for(TARGET, "mimo")
PROMPTS = ["the quick", "def add(x", "grüße", "over the lazy dog"]
GREEDY = jspec.SamplingParams(temperature=0.0, max_tokens=17, ignore_eos=True)


@functools.cache
def modules(seed=3):
    shapes = jax.eval_shape(lambda: mtp.init_params(jax.random.key(0), CONFIG))
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda x: rng.normal(0, 0.2, x.shape).astype(np.float32), shapes)


@functools.cache
def stitched(root):
    """The directory of the target with modules in its files."""
    source = llm_fixtures.checkpoints(root)["target"]
    stitching.stitch(root / "stitched", source, CONFIG, modules())
    return root / "stitched"


def test_greedy_text_with_modules_in_the_targets_files_is_that_of_plain_decoding(root):
    llm = jspec.LLM(str(stitched(root)), {"method": "mimo_mtp", "num_speculative_tokens": 3})
    results = llm.generate(PROMPTS, GREEDY)
    plain = jspec.LLM(llm_fixtures.loaded(root)["target"]).generate(PROMPTS, GREEDY)
    texts = lambda outputs: [output.outputs[0].token_ids for output in outputs]
    assert texts(results) == texts(plain)
    stats = results[0].outputs[0].speculative_decoding_stats
    assert stats["num_draft_tokens"] > 16


def test_a_target_keeps_its_tensors_and_other_files_when_modules_are_stitched_in(root, tmp_path):
    source = llm_fixtures.checkpoints(root)["target"]
    before = load_file(source / "model.safetensors")
    after = load_file(stitched(root) / "model.safetensors")
    assert all(np.array_equal(after[name], tensor) for name, tensor in before.items())
    assert all(name.startswith("model.mtp_layers.0.") for name in after.keys() - before.keys())
    raw = json.loads((stitched(root) / "config.json").read_text())
    assert raw["num_nextn_predict_layers"] == 1
    assert (stitched(root) / "tokenizer.json").is_file()
    # Other modules replace them.
    stitching.stitch(tmp_path, stitched(root), CONFIG, modules(seed=4), dtype="bfloat16")
    again = head_files.load_head(tmp_path, TARGET, kind="mtp")
    wanted = jax.tree.map(lambda x: x.astype(jax.numpy.bfloat16), modules(seed=4))
    assert jax.tree.all(jax.tree.map(np.array_equal, again.params, wanted))
    assert loading.load(tmp_path).config == TARGET


def test_a_target_without_modules_is_refused_with_what_to_do(root, monkeypatch):
    monkeypatch.setattr(loading, "load", lambda *_: pytest.fail("weights were loaded"))
    with pytest.raises(ValueError, match=r"has no modules for later tokens .*distill mtp"):
        jspec.LLM(llm_fixtures.loaded(root)["target"], {"method": "mtp"})


def test_modules_that_do_not_fit_are_refused(root, tmp_path):
    wide = dataclasses.replace(TARGET, hidden_size=64)
    with pytest.raises(ValueError, match="made for another target: they are 32 wide"):
        head_files.load_head(stitched(root), wide, kind="mtp")
    raw = json.loads((stitched(root) / "config.json").read_text())
    tensors = load_file(stitched(root) / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw | {"speculators_model_type": "mtp"}))
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="of the speculators library are not supported"):
        head_files.load_head(tmp_path, TARGET, kind="mtp")
    changed = dataclasses.replace(CONFIG, feeds_normed=False)
    with pytest.raises(ValueError, match="layout='mimo' cannot express"):
        stitching.stitch(tmp_path, stitched(root), changed, modules())
