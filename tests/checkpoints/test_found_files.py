"""Directories that people have: files of other names, adapters, tokenizers of other kinds."""

import json
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.checkpoints import checkpoint, families
from jspec.models.decoder import init_params
from tests import llm_fixtures
from tests.checkpoints.test_checkpoint import CONFIG


@pytest.fixture(scope="module")
def params():
    return init_params(jax.random.key(0), CONFIG)


@pytest.fixture
def saved(tmp_path, params):
    checkpoint.save_pretrained(tmp_path / "model", CONFIG, params)
    return tmp_path / "model"


def refusal(call, *arguments):
    with pytest.raises(ValueError) as error:
        call(*arguments)
    return str(error.value)


@pytest.mark.parametrize(
    "name", ["model-00001-of-00001.safetensors", "consolidated.safetensors", "weights.safetensors"]
)
def test_one_safetensors_file_of_any_name_is_a_model(saved, params, name):
    (saved / "model.safetensors").rename(saved / name)
    np.testing.assert_array_equal(jspec.load(saved).params.embedding, params.embedding)


def test_several_files_without_an_index_are_one_model_if_they_share_no_tensor(
    tmp_path, saved, params
):
    checkpoint.save_pretrained(tmp_path / "parts", CONFIG, params, max_shard_bytes=2000)
    (tmp_path / "parts" / "model.safetensors.index.json").unlink()
    np.testing.assert_array_equal(jspec.load(tmp_path / "parts").params.norm, params.norm)
    next((tmp_path / "parts").glob("model-00002-*")).unlink()
    assert "lacks 1 of the " in refusal(jspec.load, tmp_path / "parts")
    (saved / "model.safetensors").rename(saved / "a.safetensors")
    shutil.copy(saved / "a.safetensors", saved / "b.safetensors")
    message = refusal(jspec.load, saved)
    assert "has several files with a tensor" in message and "a.safetensors, b.safetens" in message


def test_an_adapter_is_sent_to_its_model(tmp_path):
    adapter = {"base_model_name_or_path": "owner/model", "peft_type": "LORA"}
    (tmp_path / "adapter_config.json").write_text(json.dumps(adapter))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    message = refusal(jspec.load, tmp_path)
    assert "is a LoRA adapter of 'owner/model', not a model; merge it" in message


@pytest.mark.parametrize(
    ("scaling", "plain"),
    [
        ({"type": "yarn", "factor": 4.0, "finetuned": True}, {"type": "yarn", "factor": 4.0}),
        ({"type": "yarn", "factor": 2.0, "attn_factor": 1.0}, {"type": "yarn", "factor": 2.0}),
        (
            {"type": "yarn", "factor": 2.0, "extrapolation_factor": 1},
            {"type": "yarn", "factor": 2.0},
        ),
        (
            {"type": "su", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
            {"type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4},
        ),
    ],
)
def test_rotary_keys_that_transformers_does_not_read_change_nothing(scaling, plain):
    raw = checkpoint.hf_config(CONFIG)
    raw.pop("rope_parameters")
    read = families.find(raw).read
    original = {"original_max_position_embeddings": 32}
    assert read(raw | {"rope_scaling": scaling | original}) == read(
        raw | {"rope_scaling": plain | original}
    )


def test_rotary_keys_with_an_effect_elsewhere_are_refused():
    raw = checkpoint.hf_config(CONFIG)
    raw.pop("rope_parameters")
    raw["rope_scaling"] = {"type": "yarn", "factor": 2.0, "attn_factor": 0.8}
    assert "not understood: 'attn_factor'" in refusal(families.find(raw).read, raw)


def test_the_code_of_a_checkpoint_is_refused_by_name_and_never_run(tmp_path, monkeypatch):
    target = llm_fixtures.checkpoints(tmp_path)["target"]
    settings = json.loads((target / "tokenizer_config.json").read_text())
    settings |= {"auto_map": {"AutoTokenizer": ["tok.Mine", None]}, "tokenizer_class": "Mine"}
    (target / "tokenizer_config.json").write_text(json.dumps(settings))
    ran = tmp_path / "ran"
    (target / "tok.py").write_text(f"open({str(ran)!r}, 'w')\nclass Mine: pass\n")

    def ask(*_):
        raise AssertionError("nobody may be asked")

    monkeypatch.setattr("builtins.input", ask)
    message = refusal(checkpoint.load_tokenizer, target)
    assert "is Python code of the checkpoint ('tok.Mine'), which jspec never runs" in message
    (target / "tok.py").unlink()
    refusal(checkpoint.load_tokenizer, target)
    assert not ran.exists()


def test_logits_of_a_loaded_model_may_be_traced(saved):
    ids = jnp.array([[1, 2, 3]])
    model = jspec.load(saved)
    np.testing.assert_allclose(jax.jit(model.logits)(ids), model.logits(ids), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(
        jax.jit(lambda tokens: jspec.load(saved).logits(tokens))(ids), model.logits(ids), atol=1e-5
    )
    with pytest.raises(ValueError, match=r"must be whole numbers \[B, T\]"):
        jax.jit(model.logits)(ids * 1.0)


def test_a_tokenizer_model_alone_is_read_by_sentencepiece(tmp_path, monkeypatch):
    sentencepiece = pytest.importorskip("sentencepiece")
    lines = Path(__file__).read_text().splitlines()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(line for line in lines if line),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=400,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama"}))
    theirs = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    ours = checkpoint.load_tokenizer(tmp_path)
    assert ours.encode("Hello w\u00f6rld", add_special_tokens=False) == theirs.encode(
        "Hello w\u00f6rld"
    )
    monkeypatch.setattr(checkpoint.importlib.util, "find_spec", lambda _: None)
    message = refusal(checkpoint.load_tokenizer, tmp_path)
    assert "pip install 'jspec-decoding[sentencepiece]'" in message
