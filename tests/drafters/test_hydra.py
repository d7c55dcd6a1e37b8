"""Hydra heads: drafts equal to torch's in every round, distributions, memory, files, errors."""

import functools
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints.files import torch_files
from jspec.checkpoints.heads import head_files
from jspec.core.types import Params
from jspec.engine import functional as host
from jspec.engine import loop
from jspec.engine.plan import Plan
from tests import shipped, tiny
from tests.drafters import heads, hydras, rounds
from tests.drafters.rounds import ROWS, plain, plan_of

TARGET = tiny.TARGET.config
CASES = {
    "paths": ("mlp", dict(tree=((0,), (1,), (3,), (0, 0), (0, 2), (1, 0), (0, 2, 0)))),
    "prefix chain": ("prefix", dict(num_speculative_tokens=6)),
    "prefix dynamic": (
        "prefix",
        dict(num_speculative_tokens=3, tree="eagle2", tree_size=8, tree_top_k=3),
    ),
}
RAW_TARGET = {
    "num_attention_heads": TARGET.layers[0].mixer.num_heads,
    "num_key_value_heads": TARGET.layers[0].mixer.num_kv_heads,
    "head_dim": TARGET.layers[0].mixer.head_dim,
    "hidden_size": TARGET.hidden_size,
    "rms_norm_eps": TARGET.norm.eps,
    "rope_theta": 10000.0,
}


def params_of(name, trained=True):
    weights = hydras.trained_params if trained else hydras.random_params
    return Params(tiny.params().target, weights(name))


def save(directory, name, params=None, **options):
    config = hydras.CONFIGS[name]
    params = hydras.random_params(name) if params is None else params
    head_files.save_head(directory, config, params, TARGET, target_name="someone/model", **options)
    return config, params


def reference_of(name, params, directory):
    """Return the heads in torch, from the file that jspec writes of them."""
    torch = pytest.importorskip("torch")
    config, _ = save(directory, name, params)
    tensors = torch.load(directory / "hydra_lm_head.pt", weights_only=True)
    embedding = torch.tensor(np.asarray(tiny.params().target.embedding))
    raw = RAW_TARGET if config.network is not None else None
    return hydras.reference()(tensors, embedding, raw)


@pytest.mark.parametrize("case", CASES)
def test_every_round_drafts_and_accepts_what_torch_does(case, tmp_path):
    torch = pytest.importorskip("torch")
    name, settings = CASES[case]
    drafter = hydras.drafter(name, **settings, draft_sample_method="greedy")
    params = params_of(name)
    answers = host.generate_sequences(plan_of(drafter), params, ROWS, profile=tiny.NODES)
    reference = reference_of(name, params.drafter, tmp_path)
    total = 0
    for row, text, answer in zip(ROWS, plain(), answers, strict=True):
        features = heads.hidden_states(np.array([text]), drafter.capture_layers)[0][0][0]
        features = torch.tensor(np.asarray(features))

        @functools.cache
        @torch.inference_mode()
        def distribution(root, path):
            logits = reference.draft_logits(features[:root], [text[root], *path])  # noqa: B023
            return logits[-1].log_softmax(-1).numpy()

        total += rounds.compare(answer, row.prompt, text, drafter.draft_tree, distribution)
    assert total > 15  # so that features of accepted paths are tested too


@pytest.mark.parametrize("name", hydras.CONFIGS)
def test_recorded_distributions_equal_those_of_torch(name, tmp_path):
    torch = pytest.importorskip("torch")
    drafter = hydras.drafter(name, hydras.CONFIGS[name].num_heads)
    params = params_of(name, trained=False)
    prompt = tiny.prompts((9,))[0]
    draft, _ = rounds.draft_after(drafter, params, prompt)
    features = heads.hidden_states(np.array([prompt]), drafter.capture_layers)[0][0][0]
    reference = reference_of(name, params.drafter, tmp_path)
    with torch.inference_mode():
        features = torch.tensor(np.asarray(features))[:-1]
        expected = reference.draft_logits(features, np.asarray(draft.tokens[0, :-1]).tolist())
    rounds.assert_same_distributions(draft.logits[0, :-1], expected.numpy())


def test_the_memory_of_a_prefix_layer_equals_that_of_one_pass_over_the_text():
    drafter = hydras.drafter("prefix", 3, tree="sampled", tree_size=8)
    params = params_of("prefix")
    texts, lengths, state = rounds.after_rounds(drafter, params)
    fresh = rounds.recomputed(drafter, params, texts, lengths)
    np.testing.assert_allclose(state.memory.hidden[:3], fresh.hidden, atol=2e-4)
    rounds.assert_same_rows(state.memory.cache, fresh.cache, lengths - 1)


def test_the_loop_copies_neither_the_targets_cache_nor_the_prefix_layers():
    plan = Plan(tiny.TARGET, hydras.drafter("prefix", 2))
    params = params_of("prefix", trained=False)
    batch = host.start(
        plan, params, [host.SequenceParams(ROWS[1].prompt, max_tokens=9, temperature=0.9)]
    )
    arguments = (plan, params, batch.request, ())
    lowered = loop.decode.lower(*arguments, batch.state, np.int32(9))
    text = shipped.compiled(lowered).as_text()
    for cache in (batch.state.cache, batch.state.memory.cache):
        dims = ",".join(map(str, jax.tree.leaves(cache.layers)[0].shape))
        assert not re.findall(rf"f32\[{dims}\]\S* copy(?:-start)?\(", text)


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
    reference = hydras.reference()(tensors, embedding, RAW_TARGET if prefixed else None)
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


def test_a_head_of_an_architecture_that_is_not_supported_is_named(tmp_path):
    torch_files.write(tmp_path / "hydra_lm_head.pt", {"layers.0.x": np.zeros((2, 2), np.float32)})
    (tmp_path / "config.json").write_text(json.dumps({"hydra_head_arch": "cross-attn"}))
    with pytest.raises(ValueError, match="hydra_head_arch='cross-attn' is not supported, only"):
        head_files.load_head(tmp_path, TARGET)


def test_a_tree_deeper_than_there_are_heads_is_refused():
    with pytest.raises(ValueError, match="the tree is 7 deep, but there are 6 heads"):
        hydras.drafter("prefix", 7)
    with pytest.raises(ValueError, match="needs num_speculative_tokens"):
        hydras.drafter("prefix")
