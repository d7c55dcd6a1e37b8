"""Hydra heads: memory, files, errors."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints.files import torch_files
from jspec.checkpoints.heads import head_files
from jspec.core.types import Params
from tests import tiny
from tests.drafters import hydras, rounds

TARGET = tiny.TARGET.config


def params_of(name, trained=True):
    weights = hydras.trained_params if trained else hydras.random_params
    return Params(tiny.params().target, weights(name))


def save(directory, name, params=None, **options):
    config = hydras.CONFIGS[name]
    params = hydras.random_params(name) if params is None else params
    head_files.save_head(directory, config, params, TARGET, target_name="someone/model", **options)
    return config, params


def test_the_memory_of_a_prefix_layer_equals_that_of_one_pass_over_the_text():
    drafter = hydras.drafter("prefix", 3, tree="sampled", tree_size=8)
    params = params_of("prefix")
    texts, lengths, state = rounds.after_rounds(drafter, params)
    fresh = rounds.recomputed(drafter, params, texts, lengths)
    np.testing.assert_allclose(state.memory.hidden[:3], fresh.hidden, atol=2e-4)
    rounds.assert_same_rows(state.memory.cache, fresh.cache, lengths - 1)


# Files.


def files(directory):
    """Return copies of a file's tensors, and its config.json."""
    tensors = torch_files.read(directory / "hydra_lm_head.pt")
    copies = {name: np.array(tensor) for name, tensor in tensors.items()}
    return copies, json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", hydras.CONFIGS)
def test_saved_heads_are_loaded_unchanged(tmp_path, name, dtype):
    config, params = save(tmp_path / "a", name, dtype=dtype)
    head = head_files.load_head(tmp_path / "a", TARGET)
    assert (head.kind, head.layout, head.config) == ("hydra", "hydra", config)
    assert jax.tree.structure(head.params) == jax.tree.structure(params)
    for ours, theirs in zip(*map(jax.tree.leaves, (head.params, params)), strict=True):
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs.astype(dtype)))
    head_files.save_head(
        tmp_path / "b", head.config, head.params, TARGET, target_name="someone/model"
    )
    (first, raw), (second, again) = files(tmp_path / "a"), files(tmp_path / "b")
    assert raw == again and list(first) == list(second)
    for tensor, other in zip(first.values(), second.values(), strict=True):
        assert tensor.dtype == other.dtype
        np.testing.assert_array_equal(tensor, other)


def test_names_and_keys_are_those_of_the_authors(tmp_path):
    save(tmp_path / "a", "mlp deep")
    tensors, raw = files(tmp_path / "a")
    ends = ("weight", "bias")
    blocks = {f"hydra_mlp.{i}.{j}.linear.{end}" for i in (0, 1) for j in range(4) for end in ends}
    first = {f"hydra_mlp.{i}.0.res_connection.{end}" for i in (0, 1) for end in ends}
    assert set(tensors) == blocks | first | {f"hydra_lm_head.{i}.{e}" for i in (0, 1) for e in ends}
    assert tensors["hydra_mlp.1.0.linear.weight"].shape == (32, 96)
    wanted = {
        "hydra_num_heads": 2,
        "hydra_num_layers": 4,
        "hydra_head_arch": "mlp",
        "grounded_heads": True,
        "hidden_state_offset": 1,
        "base_model_name_or_path": "someone/model",
    }
    assert raw | wanted == raw
    save(tmp_path / "b", "prefix deep")
    tensors, raw = files(tmp_path / "b")
    assert {
        "hydra_mlp.1.5.linear.bias",
        "hydra_lm_head.1.1.weight",
        "prefix_embeding_layer.layers.0.self_attn.q_proj.weight",
        "prefix_embeding_layer.norm.weight",
    } < set(tensors)
    assert raw["hydra_head_arch"] == "prefix-mlp"


@pytest.mark.parametrize("prefixed", [False, True])
def test_files_that_torch_wrote_are_read_as_torch_reads_them(tmp_path, prefixed):
    """Return the modules as the authors stack them: one block three times, dropouts in between."""
    torch = pytest.importorskip("torch")
    torch.manual_seed(0)
    size, count = TARGET.hidden_size, 2

    class Block(torch.nn.Module):
        def __init__(self, joined):
            super().__init__()
            self.linear = torch.nn.Linear(joined * size, size)
            if joined > 1:
                self.res_connection = torch.nn.Linear(joined * size, size)

    def stack(head):
        blocks = [Block(2 + head), *[Block(1)] * 3]
        parts = [part for block in blocks for part in (torch.nn.Dropout(0.0), block)]
        return torch.nn.Sequential(*(parts if prefixed else blocks))

    output = lambda: torch.nn.Linear(size, tiny.VOCAB)
    wrapped = lambda: torch.nn.Sequential(torch.nn.Dropout(0.0), output())
    module = torch.nn.Module()
    module.hydra_mlp = torch.nn.ModuleList([stack(head) for head in range(count)])
    module.hydra_lm_head = torch.nn.ModuleList(
        [wrapped() if prefixed else output() for _ in range(count)]
    )
    module.input_embed_fn = torch.nn.Embedding(tiny.VOCAB, size)  # the target's, stored as a part
    tensors = module.state_dict()
    if prefixed:
        written = save(tmp_path / "other", "prefix")[1].prefix and files(tmp_path / "other")[0]
        tensors_of_head = {
            name: torch.tensor(np.array(tensor))
            for name, tensor in written.items()
            if name.startswith("prefix_")
        }
        tensors |= tensors_of_head | {
            "prefix_embeding_layer.embed_tokens.weight": torch.zeros(64, size)
        }
    torch.save(tensors, tmp_path / "hydra_lm_head.pt")
    raw = {"hydra_num_heads": 9, "base_model_name_or_path": "someone/model"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    head = head_files.load_head(tmp_path, TARGET)
    assert (head.config.num_heads, head.config.num_layers) == (count, 4)
    assert head.config.tie_blocks and (head.config.network is not None) == prefixed

    embedding = torch.tensor(np.asarray(tiny.params().target.embedding))
    reference = hydras.reference()(tensors, embedding, hydras.RAW_TARGET if prefixed else None)
    features, fed = torch.randn(5, size), [3, 8]
    with torch.inference_mode():
        expected = reference.draft_logits(features, fed).numpy()
    state = jnp.asarray(features.numpy())
    if prefixed:
        empty = hydras.decoder.init_cache(head.config.network, 1, 0)
        state = hydras.hydra.prefill(head.params, head.config, state[None], empty)[0][0]
    state, logits_of_heads = state[-1], []
    for index, token in enumerate(fed):
        embedded = jnp.asarray(embedding[token].numpy())
        state, x = hydras.hydra.step(head.params, head.config, state, embedded, index)
        logits_of_heads.append(hydras.hydra.unembed(head.params, x, index))
    np.testing.assert_allclose(logits_of_heads, expected, atol=1e-4, rtol=0)


def _lame(tensors):
    return {name: x for name, x in tensors.items() if ".res_connection." not in name}


@pytest.mark.parametrize(
    ("name", "change", "keys", "message"),
    [
        ("mlp", None, {"hydra_head_arch": "eagle-attn"}, "hydra_head_arch='eagle-attn' is not sup"),
        ("mlp", None, {"hydra_head_arch": "prefix-mlp"}, "'prefix-mlp', but the tensors are those"),
        ("mlp", None, {"hidden_state_offset": 5}, "offset is 5, but the target has 2 layers"),
        ("mlp", _lame, {}, "heads that do not read the drafted tokens (grounded_heads=False)"),
        (
            "mlp",
            lambda t: {n: x for n, x in t.items() if n != "hydra_lm_head.1.weight"},
            {},
            "1 missing: hydra_lm_head.1.weight",
        ),
        (
            "prefix",
            lambda t: {n: x for n, x in t.items() if "q_proj" not in n},
            {},
            "1 missing: prefix_embeding_layer.layers.0.self_attn.q_proj.weight",
        ),
    ],
)
def test_files_that_contradict_themselves_are_refused(tmp_path, name, change, keys, message):
    save(tmp_path, name)
    tensors, raw = files(tmp_path)
    torch_files.write(tmp_path / "hydra_lm_head.pt", (change or dict)(tensors))
    (tmp_path / "config.json").write_text(json.dumps(raw | keys))
    with pytest.raises(ValueError, match=re.escape(message)):
        head_files.load_head(tmp_path, TARGET)


def test_a_tree_deeper_than_there_are_heads_is_refused():
    with pytest.raises(ValueError, match="the tree is 7 deep, but there are 6 heads"):
        hydras.drafter("prefix", 7)
    with pytest.raises(ValueError, match="needs num_speculative_tokens"):
        hydras.drafter("prefix")
