"""Weights that several devices share: each part of a file is read once, and the parts are all."""

import dataclasses
import json

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import jspec
from jspec.checkpoints import checkpoint
from jspec.checkpoints.families.names import Entry
from tests import eight_devices, llm_fixtures, test_several_processes

RNG = np.random.default_rng(0)
ENTRIES = {
    "vector": Entry(("norm",), ("a",), ((16,),)),
    "embedding": Entry(("embedding",), ("a",), ((16, 8),)),
    "joined": Entry(("qkv",), ("a", "b", "c"), ((16, 8), (4, 8), (4, 8)), transpose=True),
    "joined bias": Entry(("bias",), ("a", "b"), ((16,), (8,))),
    "stack": Entry(("gate_up",), tuple("abcdefgh"), ((8, 16),) * 8, transpose=True, stack=4),
    "fused outputs": Entry(("a",), ("a",), ((8, 16),), transpose=True, stack=4, fused="outputs"),
    "fused inputs": Entry(("a",), ("a",), ((8, 16),), transpose=True, stack=4, fused="inputs"),
    "fused bias": Entry(("a",), ("a",), ((8,),), stack=4, fused="inputs"),
}


@dataclasses.dataclass
class Counted:
    """A tensor of a file that counts the numbers that are read of it."""

    data: np.ndarray
    counts: np.ndarray

    @property
    def shape(self):
        return self.data.shape

    def __getitem__(self, index):
        self.counts[index] += 1
        return self.data[index]


def counted(entry):
    arrays = [RNG.normal(size=shape).astype(np.float32) for shape in entry.stored_shapes]
    return {
        name: Counted(array, np.zeros(array.shape, int))
        for name, array in zip(entry.names, arrays, strict=True)
    }


def expected(entry, tensors):
    """Return the array in memory, by plain NumPy."""
    if entry.fused:
        data = tensors["a"].data
        return data.swapaxes(1, 2) if entry.fused == "outputs" else data
    stack, matrices = entry.stack or 1, [tensors[name].data for name in entry.names]
    each = len(matrices) // stack
    joined = [np.concatenate(matrices[i * each : (i + 1) * each]) for i in range(stack)]
    joined = [matrix.T if entry.transpose else matrix for matrix in joined]
    return np.stack(joined) if entry.stack else joined[0]


@pytest.mark.parametrize("name", ENTRIES)
def test_parts_along_an_axis_read_each_number_once(name):
    entry = ENTRIES[name]
    for axis in range(len(entry.shape)):
        tensors, count = counted(entry), 4
        whole = [(0, size) for size in entry.shape]
        step = entry.shape[axis] // count
        parts = []
        for index in range(count):
            bounds = (*whole[:axis], (index * step, (index + 1) * step), *whole[axis + 1 :])
            before = sum(each.counts.sum() for each in tensors.values())
            parts.append(entry.part(tensors, np.dtype(np.float32), bounds))
            read = sum(each.counts.sum() for each in tensors.values()) - before
            assert read == parts[-1].size == entry.size // count
            assert parts[-1].flags.c_contiguous
        whole_array = expected(entry, tensors)
        np.testing.assert_array_equal(np.concatenate(parts, axis), whole_array)
        for name, again in zip(entry.names, entry.split(whole_array, np.float32), strict=True):
            np.testing.assert_array_equal(again, tensors[name].data)
        assert all((each.counts == 1).all() for each in tensors.values())


@pytest.mark.parametrize(("name", "unit"), [("joined", 4), ("joined bias", 1)])
def test_shares_of_joined_columns_read_only_theirs(name, unit):
    entry = dataclasses.replace(ENTRIES[name], divided="outputs", unit=unit)
    tensors, order = counted(entry), entry.parts(4)
    whole, width = expected(entry, tensors), len(order) // 4
    inputs = [(0, entry.shape[0])] * (len(entry.shape) - 1)
    for share in range(4):  # the second and third tensors of "joined" have one unit
        before = sum(each.counts.sum() for each in tensors.values())
        bounds = (*inputs, (share * width, (share + 1) * width))
        part = entry.part(tensors, np.dtype(np.float32), bounds, order)
        np.testing.assert_array_equal(part, np.take(whole, order[slice(*bounds[-1])], -1))
        assert sum(each.counts.sum() for each in tensors.values()) - before == part.size


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_K"])
def test_columns_of_a_quantised_tensor_are_those_of_all_of_it(kind):
    gguf = pytest.importorskip("gguf")
    from jspec.checkpoints.gguf_files import GgufTensor

    type_ = gguf.GGMLQuantizationType[kind]
    if kind == "Q4_K":  # the package reads it, but does not write it
        block, size = gguf.GGML_QUANT_SIZES[type_]
        data = RNG.integers(0, 60, (12, 3 * size), np.uint8)
        shape = (12, 3 * block)
    else:
        shape = (12, 96)
        data = gguf.quantize(RNG.normal(size=shape).astype(np.float32), type_)
    tensor = GgufTensor(data, type_, shape, order=RNG.permutation(12))
    for begin, end in ((0, shape[1]), (0, 32), (40, 77), (shape[1] - 1, shape[1])):
        np.testing.assert_array_equal(tensor[3:9, begin:end], tensor[3:9][:, begin:end])


def test_a_sharding_of_one_device_gives_the_weights_of_none(root):
    path = llm_fixtures.checkpoints(root)["target"]
    asked, sharding = [], SingleDeviceSharding(jax.devices()[0])
    loaded = checkpoint.load_pretrained(path, sharding=lambda path: asked.append(path) or sharding)
    plain = checkpoint.load_pretrained(path)
    jax.tree.map(np.testing.assert_array_equal, loaded[1], plain[1])
    assert {("embedding",), ("layers", 0, "mixer", "qkv"), ("head",)} <= set(asked)


@pytest.fixture(scope="module")
def printed(root, tmp_path_factory):
    pytest.importorskip("gguf")
    from tests.checkpoints import test_gguf

    head, gguf = tmp_path_factory.mktemp("head"), tmp_path_factory.mktemp("gguf") / "model.gguf"
    llm_fixtures.write_eagle3_head(head)
    test_gguf.write(gguf)
    target = llm_fixtures.checkpoints(root)["target"]
    return eight_devices.printed("tests.checkpoints.loaded_on_a_mesh", target, head, gguf)


@pytest.mark.parametrize("kind", ["safetensors", "gguf"])
def test_the_host_reads_each_part_once_and_no_whole_array_that_devices_share(printed, kind):
    counted = printed[kind == "gguf"]
    assert counted["read"] == counted["held"] == counted["weights"]
    assert counted["largest"] == counted["largest shard"] == counted["largest array"] // 4


def test_each_of_two_processes_reads_only_the_parts_of_its_devices(root):
    target, port = llm_fixtures.checkpoints(root)["target"], test_several_processes.free_port()
    module = "tests.checkpoints.loaded_on_a_mesh"
    commands = [(module, target, port, index) for index in (0, 1)]
    with test_several_processes.pair(*commands) as both:
        for process in both:
            lines, errors = process.communicate(timeout=600)
            assert process.returncode == 0, errors
            counted = json.loads(lines.splitlines()[-1])
            assert counted["read"] == counted["held"] < 0.6 * counted["weights"]  # norms are whole
            assert counted["largest"] == counted["largest array"] // 4


def test_texts_of_weights_that_are_read_in_parts_are_those_of_whole_ones(printed):
    one, whole_head, split_head = printed[2]
    assert one == whole_head == split_head and [len(text) for text in one] == [24, 24]


def test_a_missing_file_of_an_index_is_named_before_anything_is_read(root, tmp_path, monkeypatch):
    target, head = llm_fixtures.loaded(root)["target"], tmp_path / "head"
    checkpoint.save_pretrained(tmp_path, target.config, target.params, max_shard_bytes=50_000)
    llm_fixtures.write_eagle3_head(head)
    lost = sorted(tmp_path.glob("model-*.safetensors"))[1]
    lost.unlink()
    monkeypatch.setattr(np, "memmap", lambda *_, **__: pytest.fail("a file was read"))
    with pytest.raises(ValueError, match=f"lacks {lost.name} of the . files that .*index.json"):
        jspec.LLM(tmp_path, {"method": "eagle3", "model": str(head), "num_speculative_tokens": 2})
