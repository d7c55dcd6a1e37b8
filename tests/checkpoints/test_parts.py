"""Weights that several devices share: each part of a file is read once, and the parts are all."""

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

from jspec.checkpoints import checkpoint
from jspec.checkpoints.families.names import Entry
from tests import llm_fixtures

RNG = np.random.default_rng(0)
ENTRIES = {
    "vector": Entry(("norm",), ("a",), ((16,),)),
    "embedding": Entry(("embedding",), ("a",), ((16, 8),)),
    "joined": Entry(("qkv",), ("a", "b", "c"), ((16, 8), (4, 8), (4, 8)), transpose=True),
    "joined bias": Entry(("bias",), ("a", "b"), ((16,), (8,))),
    "stack": Entry(("gate_up",), tuple("abcdefgh"), ((8, 16),) * 8, transpose=True, stack=4),
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
    arrays = [RNG.normal(size=shape).astype(np.float32) for shape in entry.shapes]
    return {
        name: Counted(array, np.zeros(array.shape, int))
        for name, array in zip(entry.names, arrays, strict=True)
    }


def expected(entry, tensors):
    """Return the array in memory, by plain NumPy."""
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
        np.testing.assert_array_equal(np.concatenate(parts, axis), expected(entry, tensors))
        assert all((each.counts == 1).all() for each in tensors.values())


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


SCRIPT = """
import json, sys, jax, numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from jspec.checkpoints import checkpoint
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "tensor"))
specs = {"qkv": P(None, "tensor"), "output": P("tensor"), "embedding": P(None, "tensor")}
sharding = lambda path: NamedSharding(mesh, specs.get(path[-1], P()))
shared = checkpoint.load_pretrained(sys.argv[1], sharding=sharding)[1]
plain = checkpoint.load_pretrained(sys.argv[1])[1]
jax.tree.map(np.testing.assert_array_equal, shared, plain)
shards = shared.layers[0].mixer.qkv.addressable_shards
print(json.dumps([len(shards), list(shards[0].data.shape), list(plain.layers[0].mixer.qkv.shape)]))
"""


def test_eight_devices_hold_the_parts_of_one(root):
    path = llm_fixtures.checkpoints(root)["target"]
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu"}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(path)],
        capture_output=True,
        text=True,
        env={"PATH": "", "HOME": str(Path.home()), **flags},
        cwd=Path(__file__).parents[2],
        check=False,
    )
    assert run.returncode == 0, run.stderr
    count, part, whole = json.loads(run.stdout)
    assert count == 8 and part == [whole[0], whole[1] // 4]
