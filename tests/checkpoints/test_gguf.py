"""GGUF files: weights, sizes and ends of text, against transformers and the gguf package."""

import sys

import gguf
import numpy as np
import pytest

import jspec
from jspec.checkpoints import checkpoint, gguf_files
from tests.checkpoints import gguf_writing

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 32.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
CASES = {
    "llama": {"rms_norm_eps": 1e-5, "num_key_value_heads": 4},
    "llama 3": {"rope_parameters": LLAMA3, "tie_word_embeddings": True},
    "other divisors": {"rope_parameters": LLAMA3 | {"original_max_position_embeddings": 16}},
}


def model_of(case):
    config = transformers.LlamaConfig(**SIZES | CASES[case])
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.2)
    return model


def state_of(model):
    return {name: tensor.numpy() for name, tensor in model.state_dict().items()}


def write(path, case="llama", change=None, **options):
    model = model_of(case)
    state = state_of(model)
    if change is not None:
        change(state)
    gguf_writing.write(path, model.config, state, **options)
    return model


def refusal(path):
    with pytest.raises(ValueError) as error:
        jspec.load(path)
    return str(error.value)


@pytest.mark.parametrize("case", CASES)
def test_a_model_has_the_logits_of_transformers(tmp_path, case):
    model = write(tmp_path / "model.gguf", case)
    loaded = jspec.load(tmp_path / "model.gguf")
    tokens = np.random.default_rng(0).integers(0, SIZES["vocab_size"], (2, 40))
    expected = model(torch.tensor(tokens)).logits.detach().numpy()
    np.testing.assert_allclose(loaded.logits(tokens), expected, atol=1e-4, rtol=1e-4)
    assert (
        loaded.config.max_positions
        == checkpoint.load_config(tmp_path / "model.gguf")[0].max_positions
    )


def test_the_file_is_named_where_it_does_not_allow_a_quantization(tmp_path):
    write(tmp_path / "model.gguf")
    for open_model in (jspec.load, checkpoint.outline):
        with pytest.raises(ValueError) as error:
            open_model(tmp_path / "model.gguf", quantization="w8a8")
        assert str(error.value) == (
            "quantization='w8a8' needs a checkpoint whose quantization_config quantises "
            "activations, not a GGUF file; use one of 'int8', 'fp8', 'int4', 'gguf', or leave it "
            "out."
        )
        with pytest.raises(ValueError, match=r"'awq' is not supported; use one of .* 'gguf', or"):
            open_model(tmp_path / "model.gguf", quantization="awq")


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_weights_are_those_that_the_gguf_package_dequantises(tmp_path, kind):
    type_ = gguf.GGMLQuantizationType[kind]

    def round_trip(state):
        for name, tensor in state.items():
            if tensor.ndim > 1:
                state[name] = gguf.dequantize(gguf.quantize(tensor, type_), type_)

    write(tmp_path / "rounded.gguf", change=round_trip)
    write(tmp_path / "model.gguf", kind=kind)
    expected = jspec.load(tmp_path / "rounded.gguf", "float32").params
    actual = jspec.load(tmp_path / "model.gguf", "float32").params
    np.testing.assert_array_equal(actual.embedding, expected.embedding)
    np.testing.assert_array_equal(actual.layers[1].mixer.qkv, expected.layers[1].mixer.qkv)
    dtype = jspec.load(tmp_path / "model.gguf").params.embedding.dtype
    assert dtype == ("float16" if kind == "F16" else "bfloat16")


@pytest.mark.parametrize("kind", ["Q4_K", "Q5_K", "Q6_K"])
def test_rows_of_superblocks_are_dequantised_where_they_are_read(kind):
    type_ = gguf.GGMLQuantizationType[kind]
    size = gguf.GGML_QUANT_SIZES[type_][1]
    stored = np.random.default_rng(0).integers(0, 60, (6, 2 * size), np.uint8)
    order = np.array([3, 0, 5, 1, 4, 2])
    tensor = gguf_files.GgufTensor(stored, type_, (6, 512), order)
    np.testing.assert_array_equal(tensor[1:4], gguf.dequantize(stored, type_)[order[1:4]])


def test_a_split_file_is_one_model_by_any_of_its_parts(tmp_path):
    model = write(tmp_path / "model.gguf", split_max_tensors=9)
    parts = sorted(tmp_path.iterdir())
    assert len(parts) > 2
    expected = model.model.embed_tokens.weight.detach().numpy()
    for path in (parts[0], parts[-1], tmp_path):
        np.testing.assert_array_equal(jspec.load(path, "float32").params.embedding, expected)
    parts[1].unlink()
    assert f"lacks its other parts {parts[1].name}; fetch them" in refusal(parts[0])


def test_a_directory_may_hold_one_gguf_file_beside_a_config(tmp_path):
    write(tmp_path / "a.gguf")
    (tmp_path / "config.json").write_text("{}")
    assert jspec.load(tmp_path).config.num_layers == 2
    write(tmp_path / "b.gguf")
    assert "several GGUF files (a.gguf, b.gguf); give one of them" in refusal(tmp_path)


@pytest.mark.parametrize("size", [3, 200, 5_000, -1])
def test_a_file_cut_short_is_refused(tmp_path, size):
    path = tmp_path / "model.gguf"
    write(path)
    path.write_bytes(path.read_bytes()[:size])
    message = refusal(path)
    assert message.startswith(f"{path} is not a whole GGUF file (") and "\n" not in message


def test_files_that_are_not_understood_are_refused_by_name(tmp_path):
    def written(architecture="llama", kind="F32", **metadata):
        writer = gguf.GGUFWriter(tmp_path / "model.gguf", architecture)
        for key, value in metadata.items():
            getattr(writer, f"add_{key}")(value)
        type_ = gguf.GGMLQuantizationType[kind]
        data = np.zeros((2, gguf.GGML_QUANT_SIZES[type_][1]), np.uint8)
        writer.add_tensor("token_embd.weight", data, raw_dtype=type_)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return refusal(tmp_path / "model.gguf")

    assert "architecture 'mamba' is not supported in GGUF files; known: llama, qwen2" in written(
        "mamba"
    )
    assert "tensors of type Q8_1, which the gguf package does not dequantise" in written(
        kind="Q8_1"
    )
    assert "its metadata lack llama.block_count, llama.embedding_length" in written()
    assert "of type 'adapter', not a model; merge it into its model first" in written(
        type="adapter"
    )
    assert "not supported: qwen2.expert_count=8" in written("qwen2", expert_count=8)
    assert "does not exist; give a GGUF file" in refusal(tmp_path / "none.gguf")


def test_tensors_that_do_not_fit_are_listed_at_once(tmp_path):
    def damage(state):
        state["model.norm.weight"] = np.ones(8, np.float32)
        del state["model.layers.1.mlp.up_proj.weight"]

    write(tmp_path / "model.gguf", change=damage)
    message = refusal(tmp_path / "model.gguf")
    assert "1 missing: model.layers.1.mlp.up_proj.weight" in message
    assert "1 misshapen: model.norm.weight is float32[8], not [64]" in message


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    write(tmp_path / "model.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    assert "pip install 'jspec-decoding[gguf]'" in refusal(tmp_path / "model.gguf")


def test_the_text_of_a_file_is_that_of_its_safetensors(tmp_path):
    model = write(tmp_path / "model.gguf")
    model.save_pretrained(tmp_path / "saved")
    params = jspec.SamplingParams(max_tokens=12, ignore_eos=True, detokenize=False)
    prompt = {"prompt_token_ids": [5, 6, 7, 5, 6]}
    texts = [
        jspec.LLM(path, dtype="float32", speculative_config=config).generate([prompt], params)
        for path, config in (
            (str(tmp_path / "model.gguf"), {"method": "ngram", "num_speculative_tokens": 3}),
            (str(tmp_path / "saved"), None),
        )
    ]
    assert texts[0][0].outputs[0].token_ids == texts[1][0].outputs[0].token_ids
