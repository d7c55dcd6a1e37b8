"""Checkpoints in every quantised format: weights to the bit, texts, and files that are damaged."""

import chex
import jax
import numpy as np
import pytest

import jspec
from jspec.checkpoints import checkpoint
from jspec.checkpoints.families.names import Entry
from jspec.checkpoints.quantised import formats, reading
from jspec.core.weights import Weight, as_array, linear
from jspec.engine.memory import bytes_of
from jspec.models import decoder
from tests import eight_devices, networks
from tests.checkpoints import quantised_writing
from tests.checkpoints.quantised_writing import CASES, FP8, RNG, files_of, write

CONFIG = networks.build(
    vocab_size=64,
    hidden_size=64,
    intermediate_size=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=256,
)


@pytest.fixture(scope="module")
def floats(tmp_path_factory):
    params = networks.loud(decoder.init_params(jax.random.key(0), CONFIG))
    directory = tmp_path_factory.mktemp("floats")
    checkpoint.save_pretrained(directory, CONFIG, params)
    return directory


@pytest.fixture(scope="module")
def both(floats, tmp_path_factory):
    """Return a function: directories of a quantised checkpoint, and of its floats."""
    made = {}

    def get(name):
        if name not in made:
            case, folder = CASES[name], tmp_path_factory.mktemp("both")
            made[name] = quantised_writing.write_both(
                floats, folder, case, lambda key: "proj" in key or (case.head and "lm_head" in key)
            )
        return made[name]

    return get


@pytest.mark.parametrize("name", CASES)
def test_weights_are_to_the_bit_those_of_the_formula(both, name):
    quantised, plain = (jspec.load(path) for path in both(name))
    leaves = jax.tree.leaves_with_path(plain.params)
    for (path, expected), actual in zip(
        leaves, map(as_array, jax.tree.leaves(quantised.params, is_leaf=is_weight)), strict=True
    ):
        np.testing.assert_array_equal(actual, expected, err_msg=jax.tree_util.keystr(path))
    assert is_weight(quantised.params.layers[1].mixer.qkv)
    assert is_weight(quantised.params.head) == CASES[name].head
    tokens = np.array([[1, 2, 3, 4, 5, 9, 7]])
    np.testing.assert_allclose(quantised.logits(tokens), plain.logits(tokens), rtol=1e-4, atol=2e-4)
    outlined = bytes_of(checkpoint.outline(both(name)[0])[1])
    # Powers of two may be in float32 too, which the config does not say.
    assert outlined == bytes_of(quantised.params) or "powers" in name


def is_weight(leaf):
    return isinstance(leaf, Weight)


@pytest.mark.parametrize("name", ["gptq act-order", "fp8 blocks"])
def test_texts_with_speculation_are_those_without(both, name):
    texts = generated(both(name)[0])
    assert texts[0] == texts[1]


def generated(directory, quantization=None):
    """Return the texts of a checkpoint without speculation and with it."""
    params = jspec.SamplingParams(temperature=0, max_tokens=24, ignore_eos=True, detokenize=False)
    texts = []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 3}):
        settings = dict(max_num_seqs=2, max_model_len=64, block_size=16, num_gpu_blocks_override=8)
        llm = jspec.LLM(str(directory), config, quantization=quantization, **settings)
        answers = llm.generate([[1, 2, 3, 4, 1, 2, 3], [5, 6, 7]], params)
        texts.append([each.outputs[0].token_ids for each in answers])
    return texts


@pytest.mark.parametrize(("name", "most"), [("w8a8 int8", 127.5), ("w8a8 fp8", 448)])
def test_w8a8_quantises_rows_each_with_its_own_scale(both, name, most):
    weight = jspec.load(both(name)[0], quantization="w8a8").params.layers[0].feed_forward.down
    x = RNG.normal(size=(5, 128)).astype(np.float32)
    scales = np.abs(x).max(1, keepdims=True) / np.float32(most)
    rounded = (x / scales).clip(-127, 127).round() if most < 200 else (x / scales).astype(FP8)
    expected = rounded.astype(np.float32) * scales @ np.asarray(weight.array())
    for product in (linear, jax.jit(linear)):
        np.testing.assert_allclose(product(x, weight), expected, rtol=1e-4, atol=1e-4)
    apart = np.concatenate([linear(row[None], weight) for row in x])
    np.testing.assert_allclose(linear(x, weight), apart, rtol=1e-6, atol=1e-6)
    texts = generated(both(name)[0], "w8a8")
    assert texts[0] == texts[1] and bytes_of(
        checkpoint.outline(both(name)[0], quantization="w8a8")[1]
    ) == bytes_of(checkpoint.outline(both(name)[0])[1])
    for other in ("w8a16", "awq", "fp8 tensors"):
        with pytest.raises(ValueError, match="'w8a8' is for configs of compressed-tensors with"):
            checkpoint.outline(both(other)[0], quantization="w8a8")


@pytest.mark.parametrize("module", ["", "{}_proj."])
def test_scales_of_fp8_caches_are_read_past(both, module, tmp_path):
    raw, tensors = quantised_writing.files_of(both("w8a8 fp8")[0])
    raw["quantization_config"]["kv_cache_scheme"] = {"num_bits": 8, "type": "float"}
    for kind in "kv":
        name = f"model.layers.0.self_attn.{module.format(kind)}{kind}_scale"
        tensors[name] = np.full(1, 0.5, np.float32)
    with_scales = checkpoint.load_pretrained(quantised_writing.write(tmp_path, raw, tensors))[1]
    chex.assert_trees_all_equal(with_scales, checkpoint.load_pretrained(both("w8a8 fp8")[0])[1])


def test_a_method_may_be_named_and_no_scheme_comes_on_top(both):
    directory = str(both("awq")[0])
    assert bytes_of(checkpoint.outline(directory, quantization="awq")[1]) == bytes_of(
        checkpoint.outline(directory)[1]
    )
    with pytest.raises(ValueError, match=r"'int8' is for weights that are not quantised.*'awq'"):
        checkpoint.outline(directory, quantization="int8")


def test_group_numbers_of_gptq_count_without_desc_act(both, tmp_path):
    raw, tensors = files_of(both("gptq act-order")[0])
    raw["quantization_config"]["desc_act"] = False
    tokens, plain = np.array([[1, 2, 3]]), jspec.load(both("gptq act-order")[1])
    np.testing.assert_allclose(
        jspec.load(write(tmp_path, raw, tensors)).logits(tokens), plain.logits(tokens), atol=2e-4
    )
    tensors["model.layers.0.mlp.up_proj.g_idx"] = np.zeros(32, np.int32)
    with pytest.raises(ValueError, match=r"up_proj.g_idx is int32\[32\], not int32\[64\]"):
        jspec.load(write(tmp_path, raw, tensors))


@pytest.mark.parametrize(
    ("name", "change", "error"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, r"\(quant_method 'bitsandbytes'\) are not read"),
        ("awq", {"bits": 3}, "quant_method 'awq': bits=3 is not supported, only 4"),
        ("awq", {"group_size": 48}, "group_size 48 does not divide the 64 inputs of model.layers"),
        ("awq", {"group_size": 64}, r"qzeros is int32\[2, 8\], not int32\[1, 8\]"),
        ("gptq", {"group_size": "x"}, "group_size='x' must be -1, or a whole number"),
        ("gptq", {"desc_act": 1}, "desc_act=1 is not supported, only True or False"),
        (
            "gptq",
            {"dynamic": {"+:.*up.*": {"bits": 8}}},
            r"dynamic has '\+:.*' with settings of its",
        ),
        ("fp8 blocks", {"weight_block_size": [0]}, r"weight_block_size=\[0\] must be two whole"),
        ("fp8 blocks", {"weight_block_size": [48, 24]}, "group_size 24 does not divide the 64"),
        ("w4a16", {"format": "marlin-24"}, "format='marlin-24' is not supported"),
        ("w4a16", {"config_groups": {}}, r"config_groups=\{\} must have one group"),
        ("w4a16", {"ignore": ["re:("]}, r"ignore has 're:\(', which is no pattern"),
    ],
)
def test_configs_that_do_not_fit_are_refused_in_one_line(both, tmp_path, name, change, error):
    raw, tensors = files_of(both(name)[0])
    raw["quantization_config"] |= change
    with pytest.raises(ValueError, match=error) as caught:
        checkpoint.load_pretrained(write(tmp_path, raw, tensors))
    assert "\n" not in str(caught.value)


def test_tensors_that_a_config_promises_must_be_there(both, tmp_path):
    raw, tensors = files_of(both("gptq act-order")[0])
    lost = "model.layers.1.mlp.down_proj.qzeros"
    del tensors[lost]
    tensors["model.layers.0.self_attn.o_proj.g_idx"] = np.zeros(64, np.int32) + 1
    with pytest.raises(ValueError, match=r"must name each of its 2 groups of inputs equally often"):
        checkpoint.load_pretrained(write(tmp_path, raw, tensors))
    del tensors["model.layers.0.self_attn.o_proj.g_idx"]
    with pytest.raises(ValueError, match=r"o_proj.g_idx is missing, .*down_proj.qzeros is missing"):
        checkpoint.load_pretrained(write(tmp_path, raw, tensors))


def test_compressed_tensors_unpacks_the_same_weights():
    packing = pytest.importorskip("compressed_tensors.compressors.pack_quantized.helpers")
    torch = pytest.importorskip("torch")
    values = torch.randint(-8, 8, (24, 40), dtype=torch.int8)
    words = packing.pack_to_int32(values, 4).numpy()
    ours = quantised_writing._packed(values.numpy().astype(np.int64) + 8)
    np.testing.assert_array_equal(words, ours)


def test_two_devices_have_half_of_the_groups_each_and_give_the_same_texts(both, floats):
    names = ("gptq act-order", "fp8 blocks", "w4a16 asymmetric", "gptq v2, 8 bits")
    directories = [both(name)[0] for name in names]
    module = "tests.checkpoints.quantised_on_a_mesh"
    ((*pairs, refusal),) = eight_devices.printed(module, *directories, floats)
    for name, (is_same, share) in zip((*names[:-1], "int4"), pairs, strict=True):
        assert is_same and share < 0.75, (name, share)  # Norms, orders and few scales are whole.
    assert "4 devices cannot divide the 2 groups of a quantised weight" in refusal


@pytest.mark.parametrize("transpose", [True, False])
def test_stacks_of_experts_in_mxfp4_are_those_of_the_formula(transpose):
    count, inputs, outputs = 3, 64, 24
    blocks = RNG.integers(0, 256, (count, outputs, inputs // 32, 16)).astype(np.uint8)
    scales = RNG.integers(115, 130, blocks.shape[:3]).astype(np.uint8)
    table = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    table = np.concatenate([table, -table])
    floats = np.stack([table[blocks & 15], table[blocks >> 4]], -1).reshape(*scales.shape, 32)
    floats = np.ldexp(floats, scales[..., None].astype(np.int32) - 127)
    floats = floats.reshape(count, outputs, inputs)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    entry = Entry(
        ("layers", 0, "feed_forward", "gate_up"),
        (name,),
        ((outputs, inputs),),
        transpose=transpose,
        stack=count,
        fused="inputs",
    )
    kind = formats.of({"quantization_config": {"quant_method": "mxfp4"}})
    files = {f"{name}_blocks": blocks, f"{name}_scales": scales}
    opened = formats.opened(kind, (entry,), files, "here")
    assert list(opened) == [name]
    np.testing.assert_array_equal(opened[name][1:, 3:9, 2:20], floats.swapaxes(1, 2)[1:, 3:9, 2:20])
    weight = reading.read(entry, opened, np.dtype(np.float32))
    assert is_weight(weight) and weight.shape == entry.shape
    expected = floats.swapaxes(1, 2) if transpose else floats
    np.testing.assert_array_equal(weight.array(), expected)
    with pytest.raises(ValueError, match="gate_up_proj_scales is missing"):
        formats.opened(kind, (entry,), {f"{name}_blocks": blocks}, "here")
