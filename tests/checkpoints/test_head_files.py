"""EAGLE and Medusa heads in files: exact round trips in every layout, and named errors."""

import dataclasses
import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints import checkpoint, loading
from jspec.checkpoints.files import safetensors_files, torch_files
from jspec.checkpoints.heads import head_files
from jspec.models import decoder
from jspec.models.heads import eagle, medusa
from jspec.models.heads.eagle import EagleConfig
from jspec.models.heads.medusa import MedusaConfig
from tests import networks
from tests.checkpoints import directories

VOCAB, REDUCED, WIDTH, LAYERS = 32, 12, 16, 8
TARGET = networks.build(
    vocab_size=VOCAB,
    hidden_size=WIDTH,
    intermediate_size=24,
    num_layers=LAYERS,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=64,
)
NETWORK = networks.changed(TARGET, num_layers=1, norm_eps=1e-5)
EAGLE1 = EagleConfig(NETWORK, 1, (LAYERS,), WIDTH, VOCAB)
EAGLE3 = EagleConfig(
    dataclasses.replace(NETWORK, vocab_size=REDUCED), 3, (2, 4, 5), WIDTH, VOCAB, separate_head=True
)
MEDUSA = MedusaConfig(3, 2, WIDTH, VOCAB, VOCAB, (LAYERS,), num_outputs=3)


def changed(config, network=(), **changes):
    """Return the config with other settings of its network and of its own."""
    network = networks.changed(config.network, **dict(network))
    return dataclasses.replace(config, network=network, **changes)


TWO_LAYERS = {"num_layers": 2, "qk_norm": True, "qkv_bias": True, "output_bias": True}
HEADS = {
    "eagle": ("eagle", EAGLE1),
    "eagle, everything": (
        "eagle",
        changed(
            EAGLE1,
            {"num_layers": 2, "qkv_bias": True},
            fc_bias=True,
            norm_inputs=True,
            separate_embedding=True,
            separate_head=True,
        ),
    ),
    "eagle3": ("eagle3", EAGLE3),
    "eagle3, whole vocabulary": (
        "eagle3",
        changed(
            EAGLE3,
            {"vocab_size": VOCAB, "head_dim": 16},
            separate_embedding=True,
            separate_head=False,
            capture_layers=(2, 5, 7),
            feature_norms=True,
        ),
    ),
    "eagle3, narrow": (
        "eagle3",
        changed(
            EAGLE3,
            {"hidden_size": 8, "qkv_bias": True, "output_bias": True},
            separate_embedding=True,
            norm_before_residual=True,
            norm_output=True,
            input_norm=True,
            capture_layers=(1, 4, 5, 6),
        ),
    ),
    "speculators": ("speculators", changed(EAGLE3, separate_embedding=True)),
    "speculators, everything": (
        "speculators",
        changed(
            EAGLE3,
            TWO_LAYERS | {"windows": (7, None)},
            separate_embedding=True,
            feature_norms=True,
            norm_before_residual=True,
            norm_output=True,
            capture_layers=(0, 3, 6),
        ),
    ),
    "medusa": ("medusa", MEDUSA),
    "medusa, no outputs": ("medusa", dataclasses.replace(MEDUSA, num_outputs=0)),
    "medusa-vllm": ("medusa-vllm", MEDUSA),
    "medusa-vllm, reduced": (
        "medusa-vllm",
        dataclasses.replace(
            MEDUSA,
            vocab_size=REDUCED,
            num_outputs=1,
            bias=False,
        ),
    ),
}


def random_head(config):
    """Return weights without two equal numbers, so that no swap goes unnoticed."""
    module = medusa if isinstance(config, MedusaConfig) else eagle
    shapes = jax.eval_shape(lambda: module.init_params(jax.random.key(0), config))
    rng = np.random.default_rng(0)
    params = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), shapes)
    if params.draft_to_target is not None:
        ids = np.sort(rng.permutation(VOCAB)[:REDUCED]).astype(np.int32)
        params = params.replace(draft_to_target=jnp.asarray(ids))
    return params


def save(directory, name, **options):
    layout, config = HEADS[name]
    return directories.save(directory, (config, random_head(config)), TARGET, layout, **options)


# Round trips.


@pytest.mark.parametrize("name", HEADS)
def test_a_saved_head_is_loaded_again_as_it_was(tmp_path, name):
    config, params = save(tmp_path / "a", name)
    head = head_files.load_head(tmp_path / "a", TARGET)
    assert head.layout == HEADS[name][0] and head.kind == name.split(",")[0].split("-")[0].replace(
        "speculators", "eagle3"
    )
    assert head.config == config
    directories.assert_same(head.params, params)


@pytest.mark.parametrize("name", HEADS)
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_loaded_head_is_saved_tensor_for_tensor(tmp_path, name, dtype):
    save(tmp_path, name, dtype=dtype)
    directories.assert_saved_again(tmp_path, TARGET)


def test_maps_of_a_reduced_vocabulary_are_never_cast(tmp_path):
    _, params = save(tmp_path / "a", "eagle3", dtype="bfloat16")
    tensors, raw = directories.read(tmp_path / "a")
    ids = np.asarray(params.draft_to_target)
    assert tensors["d2t"].dtype == np.int64 and tensors["t2d"].dtype == np.bool_
    np.testing.assert_array_equal(tensors["d2t"] + np.arange(REDUCED), ids)
    np.testing.assert_array_equal(np.flatnonzero(tensors["t2d"]), ids)
    assert (raw["draft_vocab_size"], raw["vocab_size"]) == (REDUCED, VOCAB)
    head = head_files.load_head(tmp_path / "a", TARGET)
    assert head.params.draft_to_target.dtype == jnp.int32
    assert head.params.head.dtype == jnp.bfloat16


def test_config_json_has_the_keys_that_servers_need(tmp_path):
    save(tmp_path / "a", "eagle3", dtype="bfloat16")
    raw = directories.read(tmp_path / "a")[1]
    assert raw["architectures"] == ["LlamaForCausalLMEagle3"] and raw["model_type"] == "llama"
    always = {
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "head_dim": 8,
        "num_key_value_heads": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "norm_before_residual": False,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "dtype": "bfloat16",
        "num_hidden_layers": 1,
    }
    assert raw | always == raw
    # vLLM only checks whether these exist; the default layers need no list.
    absent = {"target_hidden_size", "eagle_aux_hidden_state_layer_ids", "eagle_config", "bias"}
    assert not absent & set(raw)

    save(tmp_path / "b", "speculators")
    raw = directories.read(tmp_path / "b")[1]
    assert raw["speculators_config"]["verifier"] == {
        "name_or_path": directories.TARGET_NAME,
        "architectures": ["LlamaForCausalLM"],
    }
    proposal = raw["speculators_config"]["proposal_methods"][0]
    assert proposal["proposal_type"] == "greedy" and proposal["speculative_tokens"] >= 1
    assert raw["transformer_layer_config"]["model_type"] == "llama"
    assert raw["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]

    save(tmp_path / "c", "medusa-vllm, reduced")
    tensors, raw = directories.read(tmp_path / "c")
    wanted = {
        "model_type": "medusa",
        "architectures": ["MedusaModel"],
        "hidden_size": WIDTH,
        "vocab_size": VOCAB,
        "truncated_vocab_size": REDUCED,
        "num_heads": 3,
        "num_hidden_layers": 2,
        "medusa_fc_bias": False,
        "original_lm_head": True,
    }
    assert raw | wanted == raw and "token_map" in tensors


def test_names_of_layouts_are_those_of_their_authors(tmp_path):
    save(tmp_path / "a", "eagle3")
    block = {
        f"midlayer.{name}.weight"
        for name in (
            "input_layernorm",
            "hidden_norm",
            "post_attention_layernorm",
            "mlp.gate_proj",
            "mlp.up_proj",
            "mlp.down_proj",
            *(f"self_attn.{part}_proj" for part in "qkvo"),
        )
    }
    whole = {"fc.weight", "norm.weight", "lm_head.weight", "d2t", "t2d"}
    assert set(directories.read(tmp_path / "a")[0]) == block | whole
    save(tmp_path / "b", "medusa")
    names = {
        f"{i}.{l}.linear.{kind}" for i in range(3) for l in range(2) for kind in ("weight", "bias")
    }
    assert set(directories.read(tmp_path / "b")[0]) == names | {f"{i}.2.weight" for i in range(3)}


def test_eagle_1_files_have_the_bias_that_sglang_expects(tmp_path):
    save(tmp_path / "a", "eagle")
    tensors, raw = directories.read(tmp_path / "a")
    assert not tensors["fc.bias"].any() and "bias" not in raw
    assert not head_files.load_head(tmp_path / "a", TARGET).config.fc_bias


@pytest.mark.parametrize(
    ("layers", "keys"),
    [
        ((2, 4, 5), {}),
        ((2, 5, 7), {"top": [2, 5, 7], "nested": [1, 4, 6]}),
        ((3, 5, 7), {"top": [3, 5, 7], "nested": [3, 5, 7]}),
        ((1, 4, 5), {"top": [1, 4, 5]}),  # eagle_config would mean outputs of layers
    ],
)
def test_hidden_states_are_written_as_vllm_and_as_sglang_count_them(tmp_path, layers, keys):
    config = changed(EAGLE3, capture_layers=layers)
    head_files.save_head(tmp_path, config, random_head(config), TARGET)
    raw = directories.read(tmp_path)[1]
    name = "eagle_aux_hidden_state_layer_ids"
    assert raw.get(name) == keys.get("top")
    assert raw.get("eagle_config", {}).get(name) == keys.get("nested")
    assert head_files.load_head(tmp_path, TARGET).config.capture_layers == layers


def test_an_embedding_that_equals_the_targets_is_shared(tmp_path):
    config, params = save(tmp_path, "speculators")
    loaded = head_files.load_head(tmp_path, TARGET)
    head = loading.sharing(loaded, params.embedding)
    assert head.params.embedding is None and not head.config.separate_embedding
    assert loading.sharing(loaded, params.embedding + 1).config == config
    # ``save_head`` writes it again if it is given.
    again = tmp_path / "again"
    options = {"layout": "speculators", "target_name": "someone/target"}
    head_files.save_head(
        again, head.config, head.params, TARGET, embedding=params.embedding, **options
    )
    directories.assert_same(head_files.load_head(again, TARGET).params, params)


def test_the_callers_dtype_wins_over_the_files(tmp_path):
    save(tmp_path, "eagle3")
    assert head_files.load_head(tmp_path, TARGET, dtype="bfloat16").params.fc.dtype == jnp.bfloat16
    with pytest.raises(ValueError, match="dtype 'int8' is not supported"):
        head_files.load_head(tmp_path, TARGET, dtype="int8")


def test_sharded_and_torch_files_are_read_too(tmp_path):
    _, params = save(tmp_path, "eagle3")
    tensors, _ = directories.read(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = list(tensors)
    parts = {"pytorch_model-1.bin": names[:5], "pytorch_model-2.bin": names[5:]}
    for file, some in parts.items():
        torch_files.write(tmp_path / file, {name: tensors[name] for name in some})
    weight_map = {name: file for file, some in parts.items() for name in some}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    directories.assert_same(head_files.load_head(tmp_path, TARGET).params, params)
    for file in (*parts, index.name):
        (tmp_path / file).unlink()
    torch_files.write(tmp_path / "pytorch_model.bin", tensors)
    directories.assert_same(head_files.load_head(tmp_path, TARGET).params, params)
    # A new head removes the old file.
    save(tmp_path, "eagle3")
    assert not (tmp_path / "pytorch_model.bin").exists()


def test_a_save_that_dies_leaves_the_old_head_whole(tmp_path, monkeypatch):
    save(tmp_path, "eagle3")
    before = {file.name: file.read_bytes() for file in tmp_path.iterdir()}

    def dying(path, *_):
        path.write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setattr(safetensors_files, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, "eagle3", dtype="bfloat16")
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == before


# Flags with different defaults, and ambiguous indices.


def test_speculators_files_must_state_norm_before_residual(tmp_path):
    save(tmp_path, "speculators")
    directories.edit(tmp_path, norm_before_residual=None)
    with pytest.raises(ValueError, match="norm_before_residual is missing, which vLLM reads as"):
        head_files.load_head(tmp_path, TARGET)
    save(tmp_path, "eagle3")
    directories.edit(tmp_path, norm_before_residual=None)
    assert not head_files.load_head(tmp_path, TARGET).config.norm_before_residual


@pytest.mark.parametrize(
    ("top", "nested", "layers"),
    [
        (None, [], (2, 4, 5)),
        (None, [1, 3, 4], (2, 4, 5)),
        (None, [2, 4, 6], (2, 4, 6)),
        ([1, 3, 4], None, (1, 3, 4)),
        ([3, 5, 7], [2, 4, 6], (3, 5, 7)),
        ([3, 5, 7], [3, 5, 7], (3, 5, 7)),
        (None, [3, 5, 6], "may count hidden states or outputs of layers; state them"),
        (None, [0, 5, 6], "may count hidden states or outputs of layers; state them"),
        ([3, 5, 7], [1, 3, 4], r"and \[3, 5, 7\] at the top of config.json fits neither"),
        (
            [2, 4, 8],
            None,
            "must ascend and lie below the target's 8 layers; state others in "
            "eagle_aux_hidden_state_layer_ids, or use the head's target",
        ),
        ([4, 2, 5], None, "must ascend and lie below"),
        ([2, 2, 5], None, "must ascend and lie below"),
        ([2, 4, 5.0], None, "must be a list of whole numbers"),
        ("2,4,5", None, "must be a list of whole numbers"),
    ],
)
def test_lists_of_hidden_states_are_read_by_their_position(tmp_path, top, nested, layers):
    save(tmp_path, "eagle3")
    name = "eagle_aux_hidden_state_layer_ids"
    directories.edit(
        tmp_path, **{name: top, "eagle_config": None if nested is None else {name: nested}}
    )
    if isinstance(layers, str):
        with pytest.raises(ValueError, match=layers):
            head_files.load_head(tmp_path, TARGET)
    else:
        assert head_files.load_head(tmp_path, TARGET).config.capture_layers == layers


def test_a_full_vocabulary_may_have_identity_maps(tmp_path):
    save(tmp_path, "eagle3, whole vocabulary")
    zeros = {"d2t": np.zeros(VOCAB, np.int64), "t2d": np.ones(VOCAB, bool)}
    directories.edit(tmp_path, lambda tensors: tensors.update(zeros))
    assert head_files.load_head(tmp_path, TARGET).params.draft_to_target is None


# Errors.


def refusal(directory, **options):
    """Return the one-line message of ``load_head``."""
    with pytest.raises(ValueError) as error:
        head_files.load_head(directory, TARGET, **options)
    message = str(error.value)
    assert "\n" not in message and str(directory) in message
    return message


def test_every_missing_unexpected_and_misshapen_tensor_is_listed_at_once(tmp_path):
    save(tmp_path, "eagle3")

    def damage(tensors):
        del tensors["norm.weight"], tensors["midlayer.mlp.up_proj.weight"]
        tensors["layers.1.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["fc.weight"] = np.zeros((16, 32), np.float32)
        tensors["midlayer.hidden_norm.weight"] = np.zeros(16, np.int32)

    directories.edit(tmp_path, damage)
    message = refusal(tmp_path)
    assert "2 missing: layers.0.mlp.up_proj.weight, norm.weight;" in message
    assert "1 unexpected: layers.1.mlp.up_proj.weight;" in message
    assert "fc.weight is float32[16, 32], not [16, 48]" in message
    assert "layers.0.hidden_norm.weight is int32[16], not [16]" in message


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("eagle3", lambda t: t.pop("d2t"), "the file has no d2t that names those tokens"),
        ("eagle3", lambda t: t.update(d2t=t["d2t"][:3]), r"d2t is int64\[3\], not whole numbers"),
        ("eagle3", lambda t: t.update(d2t=t["d2t"] * 1.0), r"d2t is float64\[12\], not whole"),
        ("eagle3", lambda t: t.update(d2t=-t["d2t"] - 1), r"must increase and lie in \[0, 32\)"),
        ("eagle3", lambda t: t.update(d2t=t["d2t"][::-1].copy()), "must increase and lie in"),
        ("eagle3", lambda t: t.update(d2t=t["d2t"] + VOCAB), "must increase and lie in"),
        ("eagle3", lambda t: t.update(t2d=~t["t2d"]), "is not the mask of the 12 ids"),
        ("eagle3", lambda t: t.update(t2d=t["t2d"] | True), "is not the mask of the 12 ids"),
        ("eagle3", lambda t: t.update(t2d=t["t2d"][:-1]), "is not the mask of the 12 ids"),
        ("medusa-vllm, reduced", lambda t: t.pop("token_map"), "the file has no token_map"),
        ("medusa-vllm, reduced", lambda t: t.update(token_map=t["token_map"] * 0), "must increase"),
        ("medusa-vllm", lambda t: t.pop("lm_heads.1.weight"), "1 missing: lm_heads.1.weight"),
        ("medusa-vllm", lambda t: t.pop("blocks.1.layers.0.bias"), "1 missing: blocks.1.layers.0"),
        ("eagle", lambda t: t.update({"norm.weight": np.ones(16)}), "1 unexpected: norm.weight"),
        ("eagle, everything", lambda t: t.pop("embedding_layernorm.weight"), "1 missing: embedd"),
    ],
)
def test_tensors_that_contradict_each_other_are_refused(tmp_path, name, change, message):
    save(tmp_path, name)
    directories.edit(tmp_path, change)
    assert re.search(message, refusal(tmp_path))


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("eagle3", {"hidden_size": 24}, "expects a hidden size of 24 where the target has 16"),
        ("eagle3", {"target_hidden_size": 24}, "expects a hidden size of 24 where the target has"),
        ("eagle3", {"vocab_size": 40}, "expects a vocabulary of 40 where the target has 32"),
        ("eagle3", {"draft_vocab_size": 11}, "misshapen: lm_head.weight is float32[12, 16], not"),
        ("eagle3", {"draft_vocab_size": "12"}, "draft_vocab_size must be a positive integer"),
        ("eagle3", {"hidden_act": "gelu"}, "not supported: hidden_act='gelu'"),
        ("eagle3", {"quantization_config": {"bits": 4}}, "quantised weights (quant_method None)"),
        ("eagle3", {"fc_norm": True}, "3 missing: fc_norm.0.weight, fc_norm.1.weight"),
        ("eagle3", {"fc_norm": True, "norm_before_fc": True}, "exclude each other"),
        ("eagle3", {"norm_output": "yes"}, "norm_output must be true or false, got 'yes'"),
        ("eagle", {"num_hidden_layers": 2}, "9 missing: layers.1.input_layernorm.weight"),
        ("eagle3", {"attention_bias": True}, "4 missing: layers.0.self_attn.q_proj.bias"),
        ("eagle3", {"num_aux_hidden_states": 4}, "num_aux_hidden_states is 4, but"),
        ("eagle3", {"eagle_config": [1]}, "eagle_config must be an object"),
        ("eagle3", {"eagle_config": {"use_aux_hidden_state": False}}, "use_aux_hidden_state=False"),
        ("eagle3", {"rope_scaling": {"rope_type": "new"}}, "rope_type"),
        ("eagle", {"bias": False}, "1 unexpected: fc.bias"),
        ("eagle, nonzero bias", {"bias": False}, "1 unexpected: fc.bias"),
        ("speculators", {"speculators_model_type": "dflash"}, "'dflash' is not supported; known"),
        ("speculators", {"transformer_layer_config": None}, "must be an object, got None"),
        ("speculators", {"transformer_layer_config": {"model_type": "gemma"}}, "'gemma' is not"),
        ("medusa-vllm", {"num_heads": 5}, "num_heads is 5, but the file holds 3"),
        ("medusa-vllm", {"medusa_fc_bias": False}, "6 unexpected: blocks.0.layers.0.bias"),
        ("medusa-vllm", {"logit_scale": 0.5}, "logit_scale=0.5 is not supported"),
        ("medusa-vllm", {"vocab_size": 40}, "vocab_size is 40, and that of the target 32"),
        ("medusa-vllm", {"truncated_vocab_size": 40}, "misshapen: lm_heads.0.weight is float32[32"),
    ],
)
def test_configs_that_do_not_fit_are_refused(tmp_path, name, keys, message):
    name, _, nonzero = name.partition(", ")
    save(tmp_path, name)
    if nonzero:
        directories.edit(tmp_path, lambda tensors: tensors["fc.bias"].__iadd__(1))
    directories.edit(tmp_path, **keys)
    assert message in refusal(tmp_path)


def test_the_fit_of_the_tensors_is_checked_before_maps_of_a_reduced_vocabulary(tmp_path):
    for name, token_ids in (("eagle3", "d2t"), ("medusa-vllm, reduced", "token_map")):

        def damage(tensors, token_ids=token_ids):
            del tensors[token_ids]
            tensors["other.weight"] = np.zeros(2, np.float32)

        save(tmp_path / token_ids, name)
        directories.edit(tmp_path / token_ids, damage)
        assert "1 unexpected: other.weight" in refusal(tmp_path / token_ids)


@pytest.mark.parametrize("last", ["lm_head.weight", "lm_heads.0.weight"])
@pytest.mark.parametrize("name", ["medusa-vllm", "medusa-vllm, reduced"])
def test_vllms_one_output_precedes_that_of_the_first_head(tmp_path, name, last):
    _, params = save(tmp_path, name)

    def add(tensors):
        first = tensors.pop("lm_heads.0.weight")
        pair = {"lm_head.weight": first, "lm_heads.0.weight": first + 1}
        tensors |= {**pair, last: pair.pop(last)}

    directories.edit(tmp_path, add)
    directories.assert_same(head_files.load_head(tmp_path, TARGET).params, params)


def test_an_unexpected_output_of_published_medusa_heads_is_named_as_in_the_file(tmp_path):
    save(tmp_path, "medusa")
    tensors, _ = directories.read(tmp_path)
    tensors["lm_head.weight"] = np.zeros((VOCAB, WIDTH), np.float32)
    torch_files.write(tmp_path / directories.TORCH_FILE, tensors)
    assert "1 unexpected: lm_head.weight" in refusal(tmp_path)


@pytest.mark.parametrize(
    "keys", [{"architectures": {"DSpark": 1}}, {"architectures": "x"}, {"hydra_head_arch": "x"}]
)
def test_keys_of_other_heads_do_not_matter(tmp_path, keys):
    _, params = save(tmp_path, "eagle3")
    directories.edit(tmp_path, **keys)
    head = head_files.load_head(tmp_path, TARGET)
    assert head.kind == "eagle3"
    directories.assert_same(head.params, params)


def test_an_unsupported_architecture_of_hydra_heads_is_refused(tmp_path):
    weight = np.zeros((WIDTH, 2 * WIDTH), np.float32)
    torch_files.write(tmp_path / "hydra_lm_head.pt", {"hydra_mlp.0.0.linear.weight": weight})
    (tmp_path / "config.json").write_text(json.dumps({"hydra_head_arch": "cross-attn"}))
    assert f"{tmp_path}: hydra_head_arch='cross-attn' is not supported" in refusal(tmp_path)
    with pytest.raises(ValueError, match="holds a head of method 'hydra', not 'eagle'"):
        head_files.load_head(tmp_path, TARGET, kind="eagle")


def test_a_head_needs_the_config_of_its_target(tmp_path):
    save(tmp_path, "eagle3")
    with pytest.raises(ValueError, match="does not say all of its target; pass its target_config"):
        head_files.load_head(tmp_path, None)


def test_a_head_for_a_narrower_target_is_refused(tmp_path):
    save(tmp_path, "medusa")
    narrow = dataclasses.replace(TARGET, hidden_size=8)
    with pytest.raises(ValueError, match="they are 16 wide where the target has"):
        head_files.load_head(tmp_path, narrow)


def test_files_of_no_head_or_another_one_are_refused(tmp_path):
    save(tmp_path / "eagle", "eagle")
    assert "holds a head of method 'eagle', not 'eagle3'" in refusal(
        tmp_path / "eagle", kind="eagle3"
    )
    save(tmp_path / "eagle3", "eagle3")
    assert "holds a head of method 'eagle3', not 'eagle'" in refusal(
        tmp_path / "eagle3", kind="eagle"
    )
    params = decoder.init_params(jax.random.key(0), TARGET)
    checkpoint.save_pretrained(tmp_path / "model", TARGET, params)
    assert "holds a whole language model, not a draft head; draft with it by method" in refusal(
        tmp_path / "model"
    )
    directories.edit(tmp_path / "eagle", lambda tensors: tensors.pop("fc.weight"))
    assert "holds no draft head of a known kind" in refusal(tmp_path / "eagle")
    (tmp_path / "eagle" / "model.safetensors").unlink()
    assert "has none of model.safetensors, " in refusal(tmp_path / "eagle")
    (tmp_path / "eagle" / "config.json").unlink()
    assert "config.json does not exist" in refusal(tmp_path / "eagle")


def test_two_tensors_of_one_name_are_refused(tmp_path):
    save(tmp_path, "eagle3")
    directories.edit(tmp_path, lambda t: t.update({"model.norm.weight": t["norm.weight"]}))
    assert "two tensors that are norm.weight without their prefixes" in refusal(tmp_path)


@pytest.mark.parametrize(
    ("config", "layout", "message"),
    [
        (EAGLE3, "eagle", "layout='eagle' cannot express EAGLE-3"),
        (EAGLE1, "eagle3", "layout='eagle3' cannot express EAGLE-1"),
        (EAGLE1, "speculators", "layout='speculators' cannot express EAGLE-1"),
        (EAGLE1, "medusa", "layout='medusa' is none of eagle, eagle3, peagle, spec"),
        (MEDUSA, "eagle3", "layout='eagle3' is none of medusa, medusa-vllm"),
        (changed(EAGLE3, {"num_layers": 2}), "eagle3", "cannot express a second block"),
        (changed(EAGLE3, {"qk_norm": True}), "eagle3", "express norms of queries and keys"),
        (changed(EAGLE3, {"windows": (4,)}), "eagle3", "cannot express sliding windows"),
        (changed(EAGLE3, {"qkv_bias": True}), "eagle3", "biases of q, k, v without that of o"),
        (EAGLE3, "speculators", "needs an embedding"),
        (changed(EAGLE3, capture_layers=(2, 4, 8)), "eagle3", "must ascend and lie below"),
        (dataclasses.replace(MEDUSA, bias=False), "medusa", "express blocks without biases"),
        (dataclasses.replace(MEDUSA, num_outputs=1), "medusa", "one output for all heads"),
        (dataclasses.replace(MEDUSA, num_outputs=0), "medusa-vllm", "without an output of their"),
    ],
)
def test_a_layout_that_cannot_hold_a_head_is_refused(tmp_path, config, layout, message):
    with pytest.raises(ValueError, match=message):
        head_files.save_head(
            tmp_path,
            config,
            random_head(config),
            TARGET,
            layout=layout,
            target_name="someone/target",
        )
    assert not list(tmp_path.iterdir())


def test_params_that_do_not_fit_are_not_saved(tmp_path):
    params = random_head(EAGLE3).replace(norm=jnp.ones(3), head=None)
    with pytest.raises(ValueError, match=r"norm is \(3,\), not \(16,\); head is None, not"):
        head_files.save_head(tmp_path, EAGLE3, params, TARGET)
    with pytest.raises(ValueError, match="names the target; pass its hub id as target_name"):
        head_files.save_head(tmp_path, MEDUSA, random_head(MEDUSA), TARGET, layout="medusa")
    other = dataclasses.replace(TARGET, vocab_size=40)
    with pytest.raises(ValueError, match="target_config has a vocabulary of 40, but the head is"):
        head_files.save_head(tmp_path, EAGLE3, random_head(EAGLE3), other)
    assert not list(tmp_path.iterdir())


def test_a_midlayer_head_has_one_block_whatever_its_config_counts(tmp_path):
    save(tmp_path, "eagle3")
    directories.edit(tmp_path, num_hidden_layers=40)  # the target's, in the authors' Vicuna head
    assert head_files.load_head(tmp_path, TARGET).config.network.num_layers == 1
