"""MTP: the caches hold rows of committed text alone; depths, files."""

import functools
import itertools
import json

import jax
import numpy as np
import pytest

from jspec.checkpoints import checkpoint, stitching
from jspec.checkpoints.heads import head_files
from jspec.core.types import Params
from jspec.drafters import Mtp
from jspec.engine import chunks
from jspec.engine import functional as host
from tests import tiny
from tests.drafters import heads, mtps, rounds

PATHS = ((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 2, 0), (0, 2, 0, 0))
CASES = {
    "one-chain": ("one", dict(num_speculative_tokens=6)),
    "two raw-paths": ("two raw", dict(tree=PATHS)),
    "raw-paths": ("raw", dict(tree=PATHS)),
    "two-chain": ("two", dict(num_speculative_tokens=4)),
}
FAST = ("one-chain", "two raw-paths")
TRAINED = ("one",)
SIZES = {
    "num_hidden_layers": tiny.TARGET.config.num_layers,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 32,
    "rms_norm_eps": 1e-6,
}


def params_of(name):
    weights = mtps.trained_params if name in TRAINED else mtps.random_params
    return Params(tiny.params().target, weights(name))


@functools.cache
def ran(case):
    """Return the drafter, its weights, and a finished batch of greedy answers."""
    name, settings = CASES[case]
    drafter = mtps.drafter(name, **settings, draft_sample_method="greedy")
    params = params_of(name)
    plan = rounds.plan_of(drafter)
    batch = host.start(plan, params, rounds.ROWS, profile=tiny.NODES)
    return drafter, params, host.advance(plan, params, batch)


@pytest.mark.slow
def test_drafted_distributions_equal_those_of_torch():
    torch = pytest.importorskip("torch")
    drafter, params = mtps.drafter("two"), params_of("two")
    head, text = mtps.torch_reference("two", params.drafter), np.array(rounds.plain()[1])[:12]
    features, _ = heads.hidden_states(text[None], drafter.capture_layers)
    outs = mtps.rows_of_text(params.drafter, drafter.config, text[None], features[0])
    features = torch.tensor(np.asarray(features[0][0]))
    for module, out in enumerate(outs):
        recorded = heads_logits(params, drafter, module, out)[0]
        for row, logits in enumerate(recorded):
            count = row + 1  # features; later tokens of the module are drafted at random
            tokens = text[1 : count + 1 + module].tolist()
            expected = head.draft_logits(features[:count], tokens).numpy()
            np.testing.assert_allclose(logits, expected, atol=1e-4)


def heads_logits(params, drafter, module, out):
    return mtps.mtp.unembed(params.drafter, drafter.config, module, out, tiny.TARGET, params.target)


@pytest.mark.parametrize(
    "case", ["two raw-paths", pytest.param("one-chain", marks=pytest.mark.slow)]
)
def test_the_memory_equals_that_of_one_pass_over_the_text(case):
    """No drafted row is left in the cache, whatever was accepted."""
    drafter, params, batch = ran(case)
    memory, history = batch.state.memory, batch.state.history
    for row, length in enumerate(np.asarray(history.length)[: len(rounds.ROWS)]):
        text = np.asarray(history.tokens)[row : row + 1, :length]
        features, _ = heads.hidden_states(text, drafter.capture_layers)
        outs = mtps.rows_of_text(params.drafter, drafter.config, text, features[0])
        for module, (part, out) in enumerate(zip(memory, outs, strict=True)):
            assert part.cache.length[row] == length - 1 - module
            np.testing.assert_allclose(part.hidden[row], out[:, -1], atol=2e-4)


@pytest.mark.slow
def test_a_prompt_prefilled_in_chunks_gives_the_memory_of_one_prefilled_at_once(monkeypatch):
    drafter = mtps.drafter("two", 2)
    params = Params(tiny.params().target, mtps.random_params("two"))
    rows = [
        host.SequenceParams(prompt, max_tokens=8) for prompt in tiny.prompts((1, 2, 17, 18, 40))
    ]
    whole = host.start(rounds.plan_of(drafter), params, rows).state.memory
    monkeypatch.setattr(chunks, "TOTALS", (16,))
    parts = host.start(rounds.plan_of(drafter), params, rows).state.memory
    for module, (part, one) in enumerate(zip(parts, whole, strict=True)):
        lengths = np.maximum(np.array([0, 1, 16, 17, 39]) - module, 0)
        assert part.cache.length[:5].tolist() == one.cache.length[:5].tolist() == lengths.tolist()
        pairs = zip(*(jax.tree.leaves(x.cache.layers) for x in (part, one)), strict=True)
        for (left, right), (row, length) in itertools.product(pairs, enumerate(lengths)):
            np.testing.assert_allclose(left[row, :, :length], right[row, :, :length], atol=1e-5)
        there = lengths > 0
        np.testing.assert_allclose(part.hidden[:5][there], one.hidden[:5][there], atol=1e-5)


def test_the_depth_is_the_number_of_modules_or_a_multiple():
    assert mtps.drafter("two").max_depth == 2
    assert mtps.drafter("two", 4).max_depth == 4
    assert mtps.drafter("two", 1).max_depth == 1
    with pytest.raises(ValueError, match="num_speculative_tokens:3 must be divisible by n_predict"):
        Mtp(mtps.CONFIGS["two"], tiny.TARGET, 3)


def test_files_name_the_server_class_that_reads_them(tmp_path):
    config, params, sizes = mtps.CONFIGS["one"], mtps.random_params("one"), tiny.TARGET.config
    head_files.save_head(tmp_path, config, params, sizes)
    raw = json.loads((tmp_path / "config.json").read_text())
    assert (raw["model_type"], raw["num_nextn_predict_layers"]) == ("mimo_mtp", config.n_predict)
    loaded = head_files.load_head(tmp_path, sizes, kind="mtp")
    assert loaded.config == config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)


def test_modules_in_the_files_of_their_target_need_no_config_of_it(tmp_path):
    config, params = mtps.CONFIGS["one"], mtps.random_params("one")
    checkpoint.save_pretrained(tmp_path / "target", tiny.TARGET.config, tiny.params().target)
    stitching.stitch(tmp_path / "both", tmp_path / "target", config, params)
    loaded = head_files.load_head(tmp_path / "both", None)
    assert loaded.config == head_files.load_head(tmp_path / "both", tiny.TARGET.config).config
    jax.tree.map(np.testing.assert_array_equal, loaded.params, params)
    head_files.save_head(tmp_path / "alone", config, params, tiny.TARGET.config)
    with pytest.raises(ValueError, match=r"is not a target's .*pass the target_config"):
        head_files.load_head(tmp_path / "alone", None)
