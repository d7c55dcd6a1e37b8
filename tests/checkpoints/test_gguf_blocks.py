"""GGUF blocks that stay quantised: their numbers are to the bit those of the ``gguf`` package."""

import dataclasses
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints import gguf_blocks
from jspec.checkpoints.families.names import Entry, matrix
from jspec.checkpoints.gguf_files import GgufTensor
from jspec.checkpoints.quantised import reading
from jspec.checkpoints.quantised.stored import StoredTensor
from jspec.core.quantized import Joined
from jspec.core.weights import Weight, linear, look_up, size_of
from jspec.models.quantised import ForKernel

gguf = pytest.importorskip("gguf")
RNG = np.random.default_rng(3)
INPUTS, OUTPUTS = 512, 48
BITS = {"MXFP4": 4.25, "Q8_0": 8.5, "Q4_0": 4.5, "Q4_1": 5.0, "Q4_K": 4.625, "Q6_K": 8.5625}


def drawn(kind, outputs=OUTPUTS, order=None):
    """Return a tensor of random blocks whose factors are plain numbers, and its floats."""
    kind = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[kind]
    data = RNG.integers(0, 256, (outputs, INPUTS // block, size)).astype(np.uint8)
    factors = RNG.uniform(0.01, 0.1, (*data.shape[:2], 2)).astype(np.float16).view(np.uint8)
    if kind.name == "MXFP4":
        data[..., 0] = 120 + data[..., 0] % 8  # powers of two
    elif kind.name == "Q6_K":
        data[..., -2:] = factors[..., :2]
    else:
        count = 4 if kind.name in ("Q4_1", "Q4_K") else 2
        data[..., :count] = factors[..., :count]
    tensor = GgufTensor(data.reshape(outputs, -1), kind, (outputs, INPUTS), order)
    return tensor, tensor[:]


@pytest.mark.parametrize("kind", gguf_blocks.KINDS)
def test_blocks_are_kept_and_their_numbers_are_those_of_the_package(kind):
    tensor, floats = drawn(kind, order=RNG.permutation(OUTPUTS))
    stored = gguf_blocks.opened({"w.weight": tensor})
    assert isinstance(stored["w.weight"], StoredTensor)
    np.testing.assert_array_equal(stored["w.weight"][3:9, 32:70], floats[3:9, 32:70])
    for entry in (matrix(("w",), "w.weight", OUTPUTS, INPUTS), table_of("w.weight")):
        weight = reading.read(entry, stored, np.dtype(np.float32))
        assert isinstance(weight, Weight) and weight.shape == entry.shape
        expected = floats.T if entry.transpose else floats
        np.testing.assert_array_equal(weight.array(), expected)
        parts = weight.stored if entry.transpose else weight
        size = sum(size_of(x) for x in (parts.values, *leaves(parts.scales), *leaves(parts.minima)))
        assert 8 * size / (INPUTS * OUTPUTS) == BITS[kind]
    np.testing.assert_array_equal(look_up(weight, np.array([5, 0])), floats[[5, 0]])


@pytest.mark.parametrize("kind", gguf_blocks.KINDS)
def test_blocks_are_read_for_the_kernel_on_hopper_in_as_many_bytes(kind, monkeypatch):
    gpu = SimpleNamespace(compute_capability="9.0", device_kind="NVIDIA H200")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "devices", lambda: [gpu])
    tensor, floats = drawn(kind, outputs=64)
    stored = gguf_blocks.opened({"w.weight": tensor})
    weight = reading.read(matrix(("w",), "w.weight", 64, INPUTS), stored, jnp.dtype(jnp.bfloat16))
    assert isinstance(weight.stored, ForKernel)
    np.testing.assert_array_equal(weight.array(), jnp.bfloat16(floats.T))
    size = sum(map(size_of, jax.tree.leaves(weight)))
    assert 8 * size / (INPUTS * 64) == BITS[kind]


def table_of(name):
    return Entry(("embedding",), (name,), ((OUTPUTS, INPUTS),))


def leaves(factors):
    return [] if factors is None else [x for x in (factors.inner, factors.outer) if x is not None]


def test_tensors_of_several_kinds_are_joined_and_multiplied_apart():
    kinds = {"q": "Q4_K", "k": "Q4_K", "v": "Q6_K"}
    pairs = {f"{name}.weight": drawn(kind) for name, kind in kinds.items()}
    tensors = gguf_blocks.opened({name: tensor for name, (tensor, _) in pairs.items()})
    entry = matrix(("w",), "q.weight", OUTPUTS, INPUTS)
    entry = dataclasses.replace(entry, names=tuple(pairs), shapes=((OUTPUTS, INPUTS),) * 3)
    weight = reading.read(entry, tensors, np.dtype(np.float32))
    expected = np.concatenate([floats for _, floats in pairs.values()]).T
    assert isinstance(weight, Joined) and weight.shape == expected.shape
    np.testing.assert_array_equal(weight.array(), expected)
    x = RNG.normal(size=(5, INPUTS)).astype(np.float32)
    close = dict(rtol=1e-4, atol=1e-3 * np.abs(x @ expected).max())
    np.testing.assert_allclose(linear(x, weight), x @ expected, **close)
    back = RNG.normal(size=(5, 3 * OUTPUTS)).astype(np.float32)
    out = linear(back, weight, transposed=True)
    np.testing.assert_allclose(out, back @ expected.T, rtol=1e-4, atol=1e-3 * np.abs(out).max())
    outlined = reading.outlined(entry, tensors, np.dtype(np.float32))
    assert outlined.shape == weight.shape
