"""Checkpoints: exact round trips, one error for all faults, and no half-written files."""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.checkpoints import checkpoint
from jspec.checkpoints.families.names import Entry
from jspec.checkpoints.files import model_files, safetensors_files
from jspec.core.weights import Transposed, as_arrays
from jspec.models.decoder import init_params
from tests import networks

CONFIG = networks.small(vocab_size=32, hidden_size=16, intermediate_size=24, qk_norm=True)
DEMO = Path(jspec.__file__).with_name("assets") / "demo" / "target"
DTYPES = ("float32", "bfloat16", "float16")


@pytest.fixture(scope="module")
def params():
    return init_params(jax.random.key(0), CONFIG)


@pytest.fixture
def saved(tmp_path, params):
    """A fresh single-file checkpoint."""
    checkpoint.save_pretrained(tmp_path / "model", CONFIG, params)
    return tmp_path / "model"


def assert_same(params, expected, dtype="float32"):
    params = as_arrays(params)
    cast = jax.tree.map(lambda x: x.astype(dtype), expected)
    assert jax.tree.structure(params) == jax.tree.structure(cast)
    for ours, theirs in zip(jax.tree.leaves(params), jax.tree.leaves(cast), strict=True):
        assert ours.dtype == theirs.dtype
        np.testing.assert_array_equal(np.asarray(ours), np.asarray(theirs))


def edit_json(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(path, change):
    """Rewrite a safetensors file after ``change`` of its dict of arrays."""
    tensors = {name: array.copy() for name, array in safetensors_files.read(path).items()}
    change(tensors)
    layout = [(name, array.shape, array.dtype) for name, array in tensors.items()]
    safetensors_files.write(path, layout, iter(tensors.values()))


# Round trips.


@pytest.mark.parametrize("dtype", DTYPES)
def test_saved_weights_load_again_bit_for_bit(tmp_path, params, dtype):
    checkpoint.save_pretrained(tmp_path, CONFIG, params, dtype=dtype)
    config, again, raw = checkpoint.load_pretrained(tmp_path)
    assert config == CONFIG
    assert (raw["dtype"], raw["torch_dtype"]) == (dtype, dtype)
    assert_same(again, params, dtype)


@pytest.mark.parametrize("tied", [False, True])
def test_sharded_weights_load_again_and_the_index_names_every_tensor(tmp_path, params, tied):
    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = params.replace(head=None) if tied else params
    checkpoint.save_pretrained(tmp_path, config, params, max_shard_bytes=6000)
    index = json.loads((tmp_path / model_files.INDEX).read_text())
    shards = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert shards == sorted(set(index["weight_map"].values()))
    assert len(shards) > 2 and shards[0] == f"model-00001-of-{len(shards):05d}.safetensors"
    assert index["metadata"]["total_size"] == 4 * sum(x.size for x in jax.tree.leaves(params))
    assert_same(checkpoint.load_pretrained(tmp_path)[1], params)


def test_a_dtype_given_by_the_caller_wins_over_the_config(saved, params):
    _, again, _ = checkpoint.load_pretrained(saved, dtype="bfloat16")
    assert_same(again, params, "bfloat16")


def test_without_a_dtype_in_config_json_the_files_dtype_is_used(saved, params):
    checkpoint.save_pretrained(saved, CONFIG, params, dtype="float16")
    edit_json(saved / "config.json", dtype=None, torch_dtype=None)
    assert checkpoint.load_pretrained(saved)[1].norm.dtype == jnp.float16


def test_a_cpu_holds_the_bfloat16_matrices_of_blocks_as_the_file_does(tmp_path, params):
    checkpoint.save_pretrained(tmp_path / "first", CONFIG, params, dtype="bfloat16")
    config, loaded, _ = checkpoint.load_pretrained(tmp_path / "first")
    mixer, mlp = loaded.layers[0].mixer, loaded.layers[0].feed_forward
    for matrix in (mixer.qkv, mixer.output, mlp.gate_up, mlp.down):
        assert isinstance(matrix, Transposed) and matrix.stored.dtype == jnp.bfloat16
    expected = params.layers[0].feed_forward.down.astype(jnp.bfloat16)
    np.testing.assert_array_equal(mlp.down.stored.T, expected)
    checkpoint.save_pretrained(tmp_path / "second", config, loaded)
    first, second = (tmp_path / name / "model.safetensors" for name in ("first", "second"))
    assert second.read_bytes() == first.read_bytes()


def test_caches_and_activations_are_float32_on_cpu_and_narrow_elsewhere(saved, monkeypatch):
    working = lambda config: (config.cache_dtype, config.activation_dtype)
    assert working(checkpoint.load_pretrained(saved, "bfloat16")[0]) == ("float32",) * 2
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    assert working(checkpoint.load_pretrained(saved, "bfloat16")[0]) == ("bfloat16",) * 2
    assert working(checkpoint.load_config(saved)[0]) == ("float32",) * 2


def test_a_given_config_json_is_written_and_checked(tmp_path, params):
    raw = checkpoint.hf_config(CONFIG) | {"eos_token_id": 7, "my_note": "kept"}
    checkpoint.save_pretrained(tmp_path, CONFIG, params, raw)
    assert checkpoint.load_config(tmp_path)[1] == raw | dict.fromkeys(
        ("dtype", "torch_dtype"), "float32"
    )
    with pytest.raises(ValueError, match="does not describe config: intermediate_size differ"):
        checkpoint.save_pretrained(tmp_path, CONFIG, params, raw | {"intermediate_size": 8})
    with pytest.raises(ValueError, match="raw_config: hidden_size must be a positive integer"):
        checkpoint.save_pretrained(tmp_path, CONFIG, params, raw | {"hidden_size": None})


def test_params_that_do_not_fit_are_not_saved(tmp_path, params):
    broken = params.replace(head=None, norm=params.norm[:3])
    with pytest.raises(ValueError, match=r"norm is \(3,\), not \(16,\); head is None, not"):
        checkpoint.save_pretrained(tmp_path, CONFIG, broken)
    mixed = params.replace(norm=params.norm.astype(jnp.bfloat16))
    with pytest.raises(ValueError, match="params mix bfloat16, float32; pass the dtype"):
        checkpoint.save_pretrained(tmp_path, CONFIG, mixed)
    with pytest.raises(ValueError, match="dtype 'int8' is not supported; pass one of float32"):
        checkpoint.save_pretrained(tmp_path, CONFIG, params, dtype="int8")
    assert not list(tmp_path.iterdir())


# Exchange with transformers.


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tied", "max_shard_bytes"), [(False, 10**9), (True, 6000)])
def test_torch_reads_back_what_we_saved(tmp_path, params, dtype, tied, max_shard_bytes):
    torch = pytest.importorskip("torch")
    from transformers import AutoModelForCausalLM

    config = dataclasses.replace(CONFIG, tie_embeddings=tied)
    params = params.replace(head=None) if tied else params
    checkpoint.save_pretrained(
        tmp_path, config, params, dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info.values())
    assert model.dtype == getattr(torch, dtype)
    model.save_pretrained(tmp_path / "again", max_shard_size="20KB")
    assert_same(checkpoint.load_pretrained(tmp_path / "again")[1], params, dtype)


# Tensors that do not fit.


@pytest.mark.parametrize("num_files", [1, 2])
def test_files_of_torch_load_as_they_are(tmp_path, num_files):
    """Read the files that transformers wrote before safetensors."""
    torch = pytest.importorskip("torch")
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config)
    config.architectures = ["LlamaForCausalLM"]
    config.save_pretrained(tmp_path)
    tensors = list(model.state_dict().items())
    if num_files == 1:
        torch.save(dict(tensors), tmp_path / "pytorch_model.bin")
    else:
        files = [f"pytorch_model-{index + 1:05d}-of-00002.bin" for index in range(2)]
        for index, file in enumerate(files):
            torch.save(dict(tensors[index::2]), tmp_path / file)
        weight_map = {name: files[index % 2] for index, (name, _) in enumerate(tensors)}
        written = json.dumps({"metadata": {}, "weight_map": weight_map})
        (tmp_path / "pytorch_model.bin.index.json").write_text(written)
    config, params, _ = checkpoint.load_pretrained(tmp_path)
    checkpoint.save_pretrained(tmp_path / "again", config, params)
    again = safetensors_files.read(tmp_path / "again" / "model.safetensors")
    assert again.keys() == dict(tensors).keys()
    for name, tensor in tensors:
        np.testing.assert_array_equal(again[name], tensor.numpy())


def test_every_missing_unexpected_and_misshapen_tensor_is_listed_before_any_is_read(
    saved, monkeypatch
):
    def damage(tensors):
        del tensors["model.norm.weight"], tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.2.mlp.up_proj.weight"] = np.zeros((2, 2), np.float32)
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros((4,), np.float32)
        tensors["lm_head.weight"] = tensors["lm_head.weight"].astype(np.int8)

    edit_tensors(saved / model_files.WEIGHTS, damage)
    monkeypatch.setattr(Entry, "read", None)
    with pytest.raises(ValueError) as error:
        checkpoint.load_pretrained(saved)
    message = str(error.value)
    assert "\n" not in message
    assert message.startswith(f"the tensors of {saved} do not fit its config.json: ")
    assert "2 missing: model.layers.1.mlp.up_proj.weight, model.norm.weight;" in message
    assert "1 unexpected: model.layers.2.mlp.up_proj.weight;" in message
    assert "2 misshapen: " in message
    assert "model.layers.0.self_attn.q_norm.weight is float32[4], not [8]" in message
    assert "lm_head.weight is int8[32, 16], not [32, 16]" in message


def test_rotary_buffers_of_old_exports_are_ignored(saved, params):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit_tensors(saved / model_files.WEIGHTS, lambda t: t.update({name: np.ones(4, np.float32)}))
    assert_same(checkpoint.load_pretrained(saved)[1], params)


def test_a_head_repeated_by_a_tied_model_must_equal_its_embedding(saved, params):
    edit_json(saved / "config.json", tie_word_embeddings=True)
    with pytest.raises(ValueError, match=r"lm_head.weight differs from model.embed_tokens.weight"):
        checkpoint.load_pretrained(saved)
    edit_tensors(
        saved / model_files.WEIGHTS,
        lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"]}),
    )
    assert_same(checkpoint.load_pretrained(saved)[1], params.replace(head=None))


# Damaged files.


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("config.json", None, "config.json does not exist"),
        ("config.json", "{", "config.json is not valid JSON"),
        ("config.json", "\udcff", "config.json is not valid JSON"),
        ("config.json", "[]", "config.json is not a JSON object"),
        ("config.json", "{}", "config.json: architecture unnamed"),
        ("model.safetensors", None, "has none of model.safetensors, model.safetensors.index"),
        ("model.safetensors", "short", "model.safetensors is not a whole safetensors file"),
    ],
)
def test_damaged_files_are_named_in_one_line(saved, file, content, message):
    (saved / file).unlink()
    if content is not None:
        (saved / file).write_bytes(content.encode(errors="surrogateescape"))
    with pytest.raises(ValueError, match=message) as error:
        checkpoint.load_pretrained(saved)
    assert str(saved) in str(error.value) and "\n" not in str(error.value)


def test_shards_that_are_missing_or_out_of_place_are_named(tmp_path, params):
    checkpoint.save_pretrained(tmp_path, CONFIG, params, max_shard_bytes=6000)
    index = tmp_path / model_files.INDEX
    weight_map = json.loads(index.read_text())["weight_map"]
    other = weight_map["model.norm.weight"]
    edit_json(index, weight_map=weight_map | {"model.embed_tokens.weight": other})
    with pytest.raises(
        ValueError,
        match=r"1 missing: model.embed_tokens.weight; 1 unexpected: "
        r"model-00001-of-\d+.safetensors:model.embed_tokens.weight",
    ):
        checkpoint.load_pretrained(tmp_path)
    (tmp_path / other).unlink()
    with pytest.raises(ValueError, match=f"lacks {other} of the"):
        checkpoint.load_pretrained(tmp_path)
    for wrong in (None, {"a": "../b.safetensors"}, {"a": 1}):
        edit_json(index, weight_map=wrong)
        with pytest.raises(ValueError, match="has no weight_map of names to files beside it"):
            checkpoint.load_pretrained(tmp_path)


def test_an_unknown_dtype_is_refused_unless_the_caller_names_another(saved):
    with pytest.raises(ValueError, match="dtype 'float8' is not supported; pass one of float32"):
        checkpoint.load_pretrained(saved, dtype="float8")
    edit_json(saved / "config.json", dtype="float64")
    with pytest.raises(ValueError, match="dtype 'float64' is not supported"):
        checkpoint.load_pretrained(saved)
    assert checkpoint.load_pretrained(saved, dtype=np.float32)[1].norm.dtype == np.float32


# Interrupted saves.


@pytest.mark.parametrize("writes_before_death", [0, 1, 2])
def test_a_save_that_dies_while_writing_leaves_the_old_files_whole(
    saved, params, monkeypatch, writes_before_death
):
    before = {file.name: file.read_bytes() for file in saved.iterdir()}
    write, calls = safetensors_files.write, []

    def dying(path, layout, tensors):
        calls.append(path)
        if len(calls) > writes_before_death:
            path.write_bytes(b"half")
            raise KeyboardInterrupt
        write(path, layout, tensors)

    monkeypatch.setattr(safetensors_files, "write", dying)
    with pytest.raises(KeyboardInterrupt):
        checkpoint.save_pretrained(saved, CONFIG, params, dtype="bfloat16", max_shard_bytes=6000)
    assert {file.name: file.read_bytes() for file in saved.iterdir()} == before


@pytest.mark.parametrize("moves_before_death", range(5))
def test_a_save_that_dies_while_moving_files_is_finished_by_the_next_reader(
    saved, params, monkeypatch, moves_before_death
):
    replace, moves = os.replace, []

    def dying(source, target):
        if len(moves) > moves_before_death:  # the first move is the commit
            raise KeyboardInterrupt
        moves.append(target)
        replace(source, target)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(os, "replace", dying)
        checkpoint.save_pretrained(saved, CONFIG, params, dtype="bfloat16", max_shard_bytes=6000)
    assert_same(checkpoint.load_pretrained(saved)[1], params, "bfloat16")
    assert not [file.name for file in saved.iterdir() if file.name.startswith(".")]


def test_a_save_leaves_no_stale_weights_and_keeps_other_files(saved, params):
    (saved / "tokenizer.json").write_text("{}")
    checkpoint.save_pretrained(saved, CONFIG, params, max_shard_bytes=6000)
    assert not (saved / model_files.WEIGHTS).exists()
    checkpoint.save_pretrained(saved, CONFIG, params)
    assert sorted(file.name for file in saved.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


# Paths, tokenizers and token ids.


def test_a_path_that_is_neither_directory_nor_id_is_refused(saved):
    for path in (saved / "config.json", saved / "nothing" / "here", "", "a/b/c", "../up"):
        with pytest.raises(ValueError, match="is neither a directory nor an id on the hub"):
            checkpoint.load_pretrained(path)


def test_a_hub_id_is_fetched_and_a_failure_names_the_remedy(saved, monkeypatch):
    import huggingface_hub

    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(saved))
    assert checkpoint.load_config("someone/model")[0] == CONFIG

    def offline(*_, **__):
        raise ConnectionError("no route to host\nand more")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"no route to host\); check the name") as error:
        checkpoint.load_config("someone/model")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("published", "read"),
    [
        (["model.safetensors", "pytorch_model.bin"], ["model.safetensors"]),
        (
            ["model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"],
            ["model-1.safetensors", "model-2.safetensors"],
        ),
        (["pytorch_model.bin"], ["pytorch_model.bin"]),
        (
            ["part-1.bin", "part-2.bin", "pytorch_model.bin.index.json"],
            ["part-1.bin", "part-2.bin"],
        ),
    ],
)
def test_only_the_weights_that_are_read_are_fetched(tmp_path, monkeypatch, published, read):
    import huggingface_hub

    hub, cache, fetched = tmp_path / "hub", tmp_path / "cache", set()
    hub.mkdir()
    cache.mkdir()
    others = ["config.json", "consolidated.safetensors", "optimizer.bin", "training_args.bin"]
    for name in (*published, *others):
        (hub / name).write_text("{}")
    for index in hub.glob("*.index.json"):
        index.write_text(json.dumps({"weight_map": dict(zip("ab", read, strict=True))}))

    def fetch(_, allow_patterns):
        for file in hub.iterdir():
            if any(file.match(pattern) for pattern in allow_patterns):
                shutil.copy(file, cache)
                fetched.add(file.name)
        return str(cache)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)
    assert model_files.locate_weights("someone/model") == cache
    assert sorted(name for name in fetched if not name.endswith(".json")) == read


def test_a_tokenizer_loads_and_a_missing_one_is_explained(saved):
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    with pytest.raises(ValueError, match=r"has no tokenizer \(none of tokenizer\.json, "):
        checkpoint.load_tokenizer(saved)
    (saved / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match="transformers cannot read the tokenizer in ") as error:
        checkpoint.load_tokenizer(saved)
    assert "\n" not in str(error.value)
    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(saved)
    assert checkpoint.load_tokenizer(saved)("b a b").input_ids == [1, 0, 1]


def test_a_llamas_tokenizer_is_the_one_of_transformers():
    from transformers import AutoTokenizer

    ours, theirs = checkpoint.load_tokenizer(DEMO), AutoTokenizer.from_pretrained(DEMO)
    assert type(ours) is type(theirs)
    assert ours("def f(x):\n").input_ids == theirs("def f(x):\n").input_ids


def test_reading_a_llamas_tokenizer_does_not_wait_for_torch_to_be_imported():
    script = (
        "import sys; from jspec.checkpoints import checkpoint\n"
        f"checkpoint.load_tokenizer({str(DEMO)!r})\n"
        "sys.exit('torch was imported' if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert not done.returncode, done.stderr


def test_end_tokens_come_from_both_configs_and_the_familys_default(saved):
    assert checkpoint.eos_token_ids(saved) == ()
    edit_json(saved / "config.json", eos_token_id=9)
    assert checkpoint.eos_token_ids(saved) == (9,)
    (saved / "generation_config.json").write_text('{"eos_token_id": [3, 9]}')
    assert checkpoint.eos_token_ids(saved) == (3, 9)
    assert checkpoint.eos_token_ids({"model_type": "llama"}) == (2,)
    with pytest.raises(ValueError, match="eos_token_id must be a token id or a list of them"):
        checkpoint.eos_token_ids({"model_type": "llama", "eos_token_id": "</s>"})


def test_a_moved_checkpoint_still_loads(saved, params):
    shutil.move(saved, saved.with_name("elsewhere"))
    assert_same(checkpoint.load_pretrained(str(saved.with_name("elsewhere")))[1], params)
