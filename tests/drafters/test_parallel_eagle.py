"""P-EAGLE heads: drafts equal to torch's in every round, memory, files, and config keys."""

import dataclasses
import functools
import json

import jax
import numpy as np
import pytest

from jspec.api import config
from jspec.checkpoints.heads import head_files
from jspec.core.types import Params
from jspec.drafters import Eagle, ParallelEagle
from jspec.engine.plan import Plan
from jspec.models.heads import eagle
from tests import tiny
from tests.drafters import heads, rounds
from tests.drafters.peagle import CONFIG, MASK, NETWORK, weights

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from jspec.engine import functional as host  # noqa: E402
from tests.models.torch_heads import Eagle3Ref  # noqa: E402

DEPTH = 3
TREES = {
    "chain": dict(num_speculative_tokens=DEPTH),
    "best first": dict(num_speculative_tokens=DEPTH, tree="best_first", tree_size=32),
}


class PEagleRef(Eagle3Ref):
    """P-EAGLE in plain torch, from its files, without a cache: masks follow all rows."""

    def __init__(self, tensors, raw):
        super().__init__(tensors, raw)
        self.mask, self.hidden = raw["mask_token_id"], tensors["mask_hidden"]

    @torch.inference_mode()
    def guesses(self, features, tokens):
        """Return logits [K, Vd] after features [n, C, D] and the n tokens that follow them."""
        masked = self.hidden.reshape(1, features.shape[1], -1)
        rows = torch.cat([self.fuse(features), self.fuse(masked).expand(DEPTH - 1, -1)])
        out = self.forward(rows, torch.as_tensor([*tokens, *[self.mask] * (DEPTH - 1)]))
        return self.logits(out)[len(tokens) - 1 :]


def files(directory, layout):
    """Return the head's tensors and config.json in a layout."""
    head_files.save_head(
        directory, CONFIG, weights(), tiny.TARGET.config, layout=layout, target_name="target"
    )
    raw = json.loads((directory / "config.json").read_text())
    return load_file(directory / "model.safetensors"), raw


@pytest.mark.parametrize(("tree", "layout"), [("chain", "peagle"), ("best first", "speculators")])
def test_every_round_drafts_and_accepts_what_torch_does(tree, layout, tmp_path):
    drafter = ParallelEagle(CONFIG, tiny.TARGET, **TREES[tree], draft_sample_method="greedy")
    reference, params = PEagleRef(*files(tmp_path, layout)), weights()

    def in_torch(text):
        states = heads.torch_states(text, CONFIG.capture_layers)
        guesses = functools.cache(lambda root: reference.guesses(states[:root], text[1 : root + 1]))
        return lambda root, path: heads.over_all_tokens(guesses(root)[len(path)], params)

    total = rounds.compare_all(drafter, Params(tiny.params().target, params), in_torch)
    assert tree == "chain" or total


def test_logits_and_memory_are_those_of_committed_rows_and_masks(tmp_path):
    drafter = ParallelEagle(CONFIG, tiny.TARGET, DEPTH)
    params = Params(tiny.params().target, weights())
    rows = [dataclasses.replace(row, temperature=0.7) for row in rounds.ROWS]
    plan = Plan(tiny.TARGET, drafter, node_buckets=(drafter.tree_size,))
    state = host.advance(plan, params, host.start(plan, params, rows), 6).state
    lengths = np.asarray(state.history.length)
    assert state.memory.cache.length.tolist() == (lengths - 1).tolist()
    logits = eagle.unembed(
        weights(), CONFIG, state.memory.hidden, tiny.TARGET, tiny.params().target
    )
    reference = PEagleRef(*files(tmp_path, "peagle"))
    for row, length in enumerate(lengths):
        text = np.asarray(state.history.tokens)[row, :length]
        states = heads.torch_states(text, CONFIG.capture_layers)[: length - 1]
        expected = reference.guesses(states, text[1:].tolist())
        np.testing.assert_allclose(logits[row], expected, atol=1e-4)


# ------------------------------------------------------------------------------------------- files


@pytest.mark.parametrize("layout", ["peagle", "speculators"])
def test_a_head_is_read_as_it_was_written(layout, tmp_path):
    tensors, raw = files(tmp_path, layout)
    assert tensors["mask_hidden"].shape == (1, 1, 2 * NETWORK.hidden_size)
    assert "layers.1.input_layernorm.weight" in tensors
    assert raw["mask_token_id"] == MASK and raw["norm_before_residual"] is True
    loaded = head_files.load_head(tmp_path, tiny.TARGET.config)
    assert (loaded.kind, loaded.layout, loaded.config) == ("eagle3", layout, CONFIG)
    for one, other in zip(*map(jax.tree.leaves, (loaded.params, weights())), strict=True):
        np.testing.assert_array_equal(one, other)
    if layout == "speculators":
        assert raw["speculators_model_type"] == "peagle"
        assert raw["architectures"] == ["PEagleSpeculator"]
    else:
        assert raw["architectures"] == ["PEagleDraftModel"] and raw["pard_token"] == MASK
    asked = {"model": str(tmp_path), "num_speculative_tokens": 2}
    read = config.read(asked)
    assert read.method == "eagle3" and read.needs_head
    assert isinstance(read.drafter(loaded.config, tiny.TARGET), ParallelEagle)
    stepwise = config.read(asked | {"parallel_drafting": False})
    assert type(stepwise.drafter(loaded.config, tiny.TARGET)) is Eagle


def test_a_mask_goes_by_any_of_its_names_and_shapes(tmp_path):
    tensors, raw = files(tmp_path, "peagle")
    for key in ("mask_token_id", "pard_token"):
        del raw[key]
    flat = tensors | {"mask_hidden": tensors["mask_hidden"].reshape(1, -1)}
    save_file(flat, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(raw | {"ptd_token_id": MASK}))
    assert head_files.load_head(tmp_path, tiny.TARGET.config).config == CONFIG
    for keys, message in (
        ({}, "names no mask token under any of pard_token, ptd_token_id, mask_token_id"),
        ({"pard_token": 3, "mask_token_id": 4}, "several mask tokens"),
        ({"pard_token": 64}, "mask_token_id=64 is none of the target's 64 tokens"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(raw | keys))
        with pytest.raises(ValueError, match=message):
            head_files.load_head(tmp_path, tiny.TARGET.config)


def test_settings_that_a_layout_cannot_express_are_refused(tmp_path):
    save = functools.partial(head_files.save_head, tmp_path, target_config=tiny.TARGET.config)
    with pytest.raises(ValueError, match="'eagle3' cannot express a second block, the mask of P"):
        save(CONFIG, weights(), layout="eagle3")
    sharing = dataclasses.replace(CONFIG, separate_embedding=False)
    with pytest.raises(ValueError, match="layout='peagle' needs an embedding"):
        save(sharing, weights().replace(embedding=None), layout="peagle")
    plain = dataclasses.replace(CONFIG, mask_token_id=None)
    with pytest.raises(ValueError, match="'peagle' cannot express a head without a mask"):
        save(plain, weights().replace(mask_hidden=None), layout="peagle")


def test_a_head_without_a_mask_cannot_draft_in_one_pass():
    asked = {"method": "eagle3", "model": "head", "num_speculative_tokens": 2}
    plain = dataclasses.replace(CONFIG, mask_token_id=None)
    assert type(config.read(asked).drafter(plain, tiny.TARGET)) is Eagle
    with pytest.raises(ValueError, match="the head must have a mask_hidden"):
        config.read(asked | {"parallel_drafting": True}).drafter(plain, tiny.TARGET)
    with pytest.raises(ValueError, match="parallel_drafting=True is not used by method='eagle'"):
        config.read(asked | {"method": "eagle", "parallel_drafting": True})
    with pytest.raises(ValueError, match="and this one does not: use 'best_first'"):
        ParallelEagle(CONFIG, tiny.TARGET, 2, tree="eagle2")
    with pytest.raises(ValueError, match="mask_token_id do not belong to EAGLE-1"):
        dataclasses.replace(heads.CONFIGS["eagle"], mask_token_id=0)


@pytest.mark.parametrize("name", ["org/Qwen3-8B-P-EAGLE", "peagle-x"])
def test_a_models_name_says_its_method(name):
    assert config.read({"model": name, "num_speculative_tokens": 2}).method == "eagle3"
