"""Tests that malicious or damaged checkpoints load or raise one line that names the problem."""

import json
import os
import struct

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from jspec.api import config
from jspec.checkpoints import checkpoint, families
from jspec.checkpoints.families import common
from jspec.checkpoints.files import model_files, safetensors_files
from tests.checkpoints import test_families
from tests.hostile import checkpoints
from tests.hostile.junk import anything, few, refused

KEYS = """num_hidden_layers hidden_size intermediate_size num_attention_heads
num_key_value_heads head_dim vocab_size max_position_embeddings rms_norm_eps rope_theta
rope_scaling rope_parameters layer_types sliding_window use_sliding_window tie_word_embeddings
partial_rotary_factor n_routed_experts num_experts num_experts_per_tok n_group
first_k_dense_replace kv_lora_rank q_lora_rank full_attention_interval model_type architectures
dtype torch_dtype eos_token_id quantization_config mask_token_id pard_token
num_nextn_predict_layers max_window_layers draft_vocab_size eagle_config dflash_config
transformer_layer_config n_predict inner_dim block_size"""
ROPE_KEYS = """rope_type factor rope_theta short_factor long_factor type
original_max_position_embeddings low_freq_factor high_freq_factor mscale mscale_all_dim
attention_factor truncate beta_fast"""
ROPE = st.dictionaries(
    st.sampled_from(ROPE_KEYS.split()),
    st.sampled_from(["yarn", "llama3", "longrope", "dynamic", "linear", 4.0, 1e299, 1e-299, 2])
    | anything(),
    max_size=4,
)
VALUE = st.integers(0, 9) | ROPE | anything()
CHANGES = st.lists(st.tuples(st.sampled_from(KEYS.split()) | st.integers(0, 40), VALUE), max_size=3)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    return tmp_path_factory.mktemp("kinds")


@pytest.fixture
def outside(tmp_path):
    """Yield a file outside the checkpoint, and check that it did not change."""
    file = tmp_path / "outside" / "precious"
    file.parent.mkdir()
    file.write_text("as it was")
    yield file
    assert file.read_text() == "as it was"
    assert [other.name for other in file.parent.iterdir()] == ["precious"]


def changed(raw, changes):
    """Return config.json with changed values, None if it is not JSON.

    A key is given by name, or by its index among the existing keys.
    """
    raw = dict(raw)
    for key, value in changes:
        key = key if isinstance(key, str) else sorted(raw)[key % len(raw)]
        raw[key] = value
    try:
        return json.dumps(raw).encode()
    except (TypeError, ValueError, RecursionError):
        return None


@pytest.mark.parametrize("family", families.FAMILIES)
@few(8)
@given(changes=CHANGES)
def test_changed_configs_of_a_family_are_read_or_raise(tmp_path_factory, family, changes):
    raw = {"model_type": family, **test_families.SIZES, **test_families.MORE.get(family, {})}
    if text := changed(raw, changes):
        directory = tmp_path_factory.getbasetemp() / "config"
        checkpoints.write(directory, {"config.json": text})
        refused(checkpoint.load_config, directory)
        refused(checkpoint.eos_token_ids, directory)
        refused(config.read, {"model": str(directory), "num_speculative_tokens": 2})


@pytest.mark.parametrize("kind", checkpoints.KINDS)
@few(3)
@given(changes=CHANGES)
def test_checkpoints_with_a_changed_config_are_loaded_or_raise(
    root, tmp_path_factory, kind, changes
):
    files = checkpoints.contents(checkpoints.saved(root, kind))
    if text := changed(json.loads(files["config.json"]), changes):
        directory = tmp_path_factory.getbasetemp() / "changed"
        checkpoints.write(directory, files | {"config.json": text})
        refused(checkpoints.opener(kind), directory, longest=10_000)


@pytest.mark.parametrize("kind", checkpoints.KINDS)
@few(3)
@given(data=st.data())
def test_damaged_checkpoints_are_loaded_or_raise(root, tmp_path_factory, kind, data):
    files = checkpoints.contents(checkpoints.saved(root, kind))
    name = data.draw(st.sampled_from(sorted(files)))
    content = bytearray(files[name])
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)) :]
    for _ in range(data.draw(st.integers(0, 4))):
        near = data.draw(st.sampled_from([64, 2000, len(content) + 1]))
        index = data.draw(st.integers(-near, near))
        if -len(content) <= index < len(content):
            content[index] = data.draw(st.integers(0, 255))
    directory = tmp_path_factory.getbasetemp() / "damaged"
    checkpoints.write(directory, files | {name: bytes(content)})
    refused(checkpoints.opener(kind), directory, longest=10_000)


@pytest.mark.parametrize("size", [0, 1, 7, 8, 9, 63, 64])
def test_files_truncated_in_their_first_bytes_raise(tmp_path, size):
    complete = safetensors_of({"a": np.arange(6, dtype=np.float32)}, tmp_path)
    (tmp_path / "cut").write_bytes(complete[:size])
    assert "not a whole safetensors file" in refused(safetensors_files.read, tmp_path / "cut")


def test_truncated_files_raise(tmp_path):
    tensors = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(3, np.int8)}
    complete, cut = safetensors_of(tensors, tmp_path), tmp_path / "cut"
    for size in range(len(complete)):
        cut.write_bytes(complete[:size])
        assert "not a whole safetensors file" in refused(safetensors_files.read, cut)


def safetensors_of(tensors, directory):
    layout = [(name, tensor.shape, tensor.dtype) for name, tensor in tensors.items()]
    safetensors_files.write(directory / "complete", layout, iter(tensors.values()))
    return (directory / "complete").read_bytes()


NUMBER = st.integers(-2, 20) | st.sampled_from(
    [2**31, 2**62, 2**63 - 1, 2**63, 2**64, 10**30, 1.0, None, "4", True]
)
ENTRY = (
    st.fixed_dictionaries(
        {
            "dtype": st.sampled_from([*safetensors_files.DTYPES, "F4", "", None]) | anything(),
            "shape": st.lists(NUMBER, max_size=3) | st.just([1] * 100) | anything(),
            "data_offsets": st.lists(NUMBER, min_size=2, max_size=2) | anything(),
        }
    )
    | anything()
)


@few(100)
@given(
    header=st.dictionaries(st.text(max_size=3), ENTRY, max_size=3) | anything(),
    length=st.none() | st.integers(0, 2**64 - 1) | st.integers(0, 300),
    body=st.binary(max_size=24),
)
def test_random_headers_are_read_or_raise(tmp_path_factory, header, length, body):
    path = tmp_path_factory.getbasetemp() / "lies.safetensors"
    try:
        text = json.dumps(header).encode()
    except (TypeError, ValueError, RecursionError):
        return
    path.write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)
    results = []
    refused(lambda: results.append(safetensors_files.read(path)))
    for tensor in results[0].values() if results else ():
        assert np.array(tensor).nbytes <= len(body)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * 100_000,
        b'{"a":' * 50_000,
        b"\xff\xfe{}",
        '{"a": 1}'.encode("utf-16"),
        b'{"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},'
        b' "a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [0, 4611686018427387904, 4611686018427387904],'
        b' "data_offsets": [0, 0]}, "b": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}',
        b'{"a": {"dtype": "F32", "shape": [1' + b"0" * 5000 + b'], "data_offsets": [0, 4]}}',
    ],
    ids=["deep list", "deep object", "no UTF-8", "UTF-16", "twice", "huge and empty", "digits"],
)
def test_malformed_headers_raise(tmp_path, text):
    path = tmp_path / "x"
    path.write_bytes(struct.pack("<Q", len(text)) + text + bytes(4))
    assert "not a whole safetensors file" in refused(safetensors_files.read, path)


@pytest.mark.parametrize("names", [[("9" * 5000, "0")], [("0", "99999999")], [("9", "9")]])
def test_head_numbers_beyond_the_number_of_tensors_raise(names):
    assert "no more than 20 tensors" in refused(common.counted, names, 20)


# --- Names and links ---


@pytest.fixture
def target(root, tmp_path):
    """Return a directory with a copy of the target."""
    files = checkpoints.contents(checkpoints.saved(root, "target"))
    return checkpoints.write(tmp_path / "model", files)


def shard(directory, name):
    """Move the weights to a shard that the index calls ``name``."""
    weights = directory / model_files.WEIGHTS
    names = dict.fromkeys(safetensors_files.read(weights), name)
    (directory / model_files.INDEX).write_text(json.dumps({"weight_map": names}))
    return weights.rename(directory / "shard")


@pytest.mark.parametrize(
    "name",
    [
        "../shard",
        "{outside}",
        ".",
        "..",
        "",
        "a/b",
        "a\0b",
        "shard\n",
        "x" * 5000,
        "/dev/zero",
        "missing",
        "folder",
        "pipe",
        "dangling",
        "circle",
    ],
)
def test_an_index_must_not_leave_its_folder(target, outside, name):
    shard(target, name.format(outside=outside))
    (target / "folder").mkdir()
    os.mkfifo(target / "pipe")
    (target / "dangling").symlink_to("nowhere")
    (target / "circle").symlink_to("circle")
    message = refused(checkpoint.load_pretrained, target)
    assert "weight_map" in message or "lacks" in message


def test_weights_behind_links_are_read_like_in_the_hub_cache(target, tmp_path):
    shard(target, "linked").rename(tmp_path / "blob")
    (target / "linked").symlink_to(tmp_path / "blob")
    assert refused(checkpoint.load_pretrained, target) is None


@pytest.mark.parametrize("index", [[], {}, {"weight_map": []}, {"weight_map": {"a": 1}}, 7])
def test_a_malformed_index_raises(target, index):
    shard(target, "shard")
    (target / model_files.INDEX).write_text(json.dumps(index))
    refused(checkpoint.load_pretrained, target, names=("weight_map", "JSON object"))


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "generation_config.json"])
@pytest.mark.parametrize("what", ["pipe", "device", "folder"])
def test_pipes_devices_and_folders_raise_without_blocking(target, name, what):
    (target / name).unlink(missing_ok=True)
    if what == "pipe":
        os.mkfifo(target / name)
    elif what == "device":
        (target / name).symlink_to("/dev/zero")
    else:
        (target / name).mkdir()
    message = refused(checkpoint.load_pretrained, target)
    refused(checkpoint.eos_token_ids, target)
    assert (message is None) == (name == "generation_config.json")


@pytest.mark.parametrize(
    "manifest",
    [
        ["../outside/precious"],
        ["{outside}"],
        [".."],
        ["."],
        [""],
        ["a\0b"],
        [7],
        {"a": 1},
        "../outside/precious",
        [".jspec-saved"],
        None,
    ],
    ids=str,
)
def test_a_foreign_save_folder_raises_and_moves_nothing(target, outside, manifest):
    saved = target / ".jspec-saved"
    saved.mkdir()
    (saved / "precious").write_text("planted")
    text = json.dumps(manifest).replace("{outside}", str(outside))
    (saved / "files.json").write_text("[" * 100_000 if manifest is None else text)
    before = sorted(file.name for file in target.iterdir())
    assert "remove that folder" in refused(checkpoint.load_pretrained, target)
    assert sorted(file.name for file in target.iterdir()) == before


def test_a_linked_save_folder_is_not_moved(target, outside):
    planted = outside.parent.parent / "planted"
    planted.mkdir()
    (planted / "files.json").write_text('["config.json"]')
    (planted / "config.json").write_text("{}")
    (target / ".jspec-saved").symlink_to(planted)
    assert "remove that folder" in refused(checkpoint.load_pretrained, target)
    assert (planted / "config.json").exists()


def test_a_save_does_not_write_through_links(target, outside):
    config, params, _ = checkpoint.load_pretrained(target)
    for name in ("config.json", "model.safetensors"):
        (target / name).unlink()
        (target / name).symlink_to(outside)
    checkpoint.save_pretrained(target, config, params)
    assert not (target / "config.json").is_symlink()
    jax.tree.map(np.testing.assert_array_equal, params, checkpoint.load_pretrained(target)[1])


def test_sizes_beyond_the_files_raise_before_allocation(target):
    raw = json.loads((target / "config.json").read_text())
    for key, value in (("num_hidden_layers", 4096), ("hidden_size", 2**30), ("vocab_size", 2**30)):
        (target / "config.json").write_text(json.dumps(raw | {key: value}))
        assert refused(checkpoint.load_pretrained, target, longest=10_000)
