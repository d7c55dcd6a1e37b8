"""Quantised checkpoints by the formulas of their formats, with the floats that they stand for."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import ml_dtypes
import numpy as np

from jspec.checkpoints.files import safetensors_files

RNG = np.random.default_rng(7)
FP8 = ml_dtypes.float8_e4m3fn
_AWQ = [0, 2, 4, 6, 1, 3, 5, 7]


class Case(NamedTuple):
    """A format: its ``quantization_config``, and the tensors and floats of a module.

    ``head`` says whether the output matrix is quantised too.
    """

    config: dict
    write: Callable[[tuple[int, int]], tuple[dict[str, np.ndarray], np.ndarray]]
    head: bool = False


def _scales(shape, dtype, inputs):
    return (RNG.uniform(0.2, 0.4, shape) / inputs**0.5).astype(dtype)


def _spread(factors, inputs):
    return np.repeat(factors.astype(np.float32), inputs // factors.shape[-1], -1)


def _packed(values, bits=4):
    """Return whole numbers from 0 on in int32 words along the last axis, the first in low bits."""
    count = 32 // bits
    words = np.zeros((*values.shape[:-1], -(-values.shape[-1] // count)), np.uint32)
    for index in range(values.shape[-1]):
        words[..., index // count] |= values[..., index].astype(np.uint32) << bits * (index % count)
    return words.view(np.int32)


def _fp8(block=None, name="weight_scale_inv", by_output=False, whole=False):
    """Return a case's ``write``; ``whole`` scales are powers of two."""

    def scales(shape, inputs):
        drawn = _scales(shape, np.float32, inputs)
        return drawn.astype(ml_dtypes.float8_e8m0fnu) if whole else drawn

    def write(shape):
        outputs, inputs = shape
        weight = (RNG.normal(size=shape) * 3).astype(FP8)
        if block:
            scale = scales((-(-outputs // block[0]), inputs // block[1]), inputs)
            rows = np.repeat(scale, block[0], 0)[:outputs]
        else:
            scale = scales((outputs, 1) if by_output else (), inputs)
            rows = np.broadcast_to(scale.reshape(-1, 1), (outputs, 1))
        floats = weight.astype(np.float32) * _spread(rows, inputs)
        return {"weight": weight, name: scale}, floats

    return write


def _awq(group):
    def write(shape):
        outputs, inputs = shape
        q, z = (
            RNG.integers(0, 16, (inputs, outputs)),
            RNG.integers(0, 16, (inputs // group, outputs)),
        )
        scales = _scales((inputs // group, outputs), np.float16, inputs)

        def words(x):
            result = np.zeros((len(x), outputs // 8), np.uint32)
            for column in range(outputs // 8):
                for i in range(8):
                    codes = x[:, column * 8 + _AWQ[i]].astype(np.uint32)
                    result[:, column] |= codes << 4 * i
            return result.view(np.int32)

        floats = (q - np.repeat(z, group, 0)) * np.repeat(scales.astype(np.float32), group, 0)
        return {"qweight": words(q), "qzeros": words(z), "scales": scales}, floats.T

    return write


def _gptq(group, bits=4, act_order=False, version=1):
    # Modules with the same input have the same order of their columns.
    orders = {}

    def write(shape):
        outputs, inputs = shape
        groups = inputs // group
        most = 2**bits
        q = RNG.integers(0, most, (inputs, outputs))
        z = RNG.integers(0, most, (groups, outputs))
        scales = _scales((groups, outputs), np.float16, inputs * (4 ** (bits - 4)) ** 2)
        number = np.arange(inputs) // group
        if act_order:
            number = orders.setdefault(inputs, RNG.permutation(number))
        ones = np.uint32({4: 0x11111111, 8: 0x01010101}[bits] if version == 1 else 0)
        tensors = {
            "qweight": _packed(q.T, bits).T.copy(),
            "qzeros": (_packed(z, bits).view(np.uint32) - ones).view(np.int32),
            "scales": scales,
            "g_idx": number.astype(np.int32),
        }
        return tensors, ((q - z[number]) * scales[number].astype(np.float32)).T

    return write


def _compressed(bits, *, group=None, symmetric=True, packed=True, act_order=False, fp8=False):
    orders = {}

    def write(shape):
        outputs, inputs = shape
        groups = inputs // group if group else 1
        scales = _scales((outputs, groups), ml_dtypes.bfloat16, inputs * (4 ** (bits - 4)) ** 2)
        half = 2 ** (bits - 1)
        if fp8:
            q = (RNG.normal(size=shape) * 3).astype(FP8)
            scales = _scales((outputs, groups), ml_dtypes.bfloat16, inputs)
        else:
            q = RNG.integers(-half, half, shape)
        number = np.arange(inputs) // (inputs // groups)
        if act_order:
            number = orders.setdefault(inputs, RNG.permutation(number))
        zeros = RNG.integers(-half, half, scales.shape) * (not symmetric)
        floats = (q.astype(np.float32) - zeros[:, number]) * scales.astype(np.float32)[:, number]
        tensors = {"weight_scale": scales}
        if not packed:
            return tensors | {"weight": q if fp8 else q.astype(np.int8)}, floats
        tensors["weight_packed"] = _packed(q + half, bits)
        tensors["weight_shape"] = np.array(shape)
        if not symmetric:
            tensors["weight_zero_point"] = _packed((zeros + half).T, bits).T.copy()
        if act_order:
            tensors["weight_g_idx"] = number.astype(np.int32)
        return tensors, floats

    return write


def _group(kind, bits, ignore=("lm_head",), activations=None, **weights):
    weights = {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "channel"} | weights
    return {
        "quant_method": "compressed-tensors",
        "format": kind,
        "ignore": [*ignore],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": weights,
                "input_activations": activations,
            }
        },
    }


def _by_token(kind):
    return dict(num_bits=8, type=kind, strategy="token", dynamic=True, symmetric=True)


_GROUPED = {"strategy": "group", "group_size": 32}
CASES = {
    "fp8 blocks": Case(
        {"quant_method": "fp8", "weight_block_size": [48, 32], "activation_scheme": "dynamic"},
        _fp8((48, 32)),
    ),
    "fp8 blocks, powers of two": Case(
        {"quant_method": "fp8", "weight_block_size": [32, 64], "scale_fmt": "ue8m0"},
        _fp8((32, 64), whole=True),
    ),
    "fp8 tensors": Case(
        {"quant_method": "fp8", "activation_scheme": "static"}, _fp8(name="weight_scale")
    ),
    "fp8 tensors of transformers": Case({"quant_method": "fp8"}, _fp8()),
    "fp8 outputs": Case({"quant_method": "fbgemm_fp8"}, _fp8(name="weight_scale", by_output=True)),
    "awq": Case(
        {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"},
        _awq(32),
    ),
    "gptq": Case({"quant_method": "gptq", "bits": 4, "group_size": 32}, _gptq(32)),
    "gptq act-order": Case(
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": True, "lm_head": True},
        _gptq(32, act_order=True),
        head=True,
    ),
    "gptq v2, 8 bits": Case(
        {"quant_method": "gptq", "bits": 8, "group_size": 64, "checkpoint_format": "gptq_v2"},
        _gptq(64, 8, version=2),
    ),
    "w4a16": Case(_group("pack-quantized", 4, **_GROUPED), _compressed(4, group=32)),
    "w4a16 asymmetric": Case(
        _group("pack-quantized", 4, symmetric=False, **_GROUPED),
        _compressed(4, group=32, symmetric=False),
    ),
    "w4a16 act-order": Case(
        _group("pack-quantized", 4, actorder="group", **_GROUPED),
        _compressed(4, group=32, act_order=True),
    ),
    "w8a16": Case(_group("pack-quantized", 8, ignore=()), _compressed(8), head=True),
    "w4a8": Case(_group("int-quantized", 4, **_GROUPED), _compressed(4, group=32, packed=False)),
    "w8a8 int8": Case(
        _group("int-quantized", 8, activations=_by_token("int")), _compressed(8, packed=False)
    ),
    "w8a8 fp8": Case(
        _group("float-quantized", 8, type="float", activations=_by_token("float")),
        _compressed(8, packed=False, fp8=True),
    ),
}


def files_of(directory: Path) -> tuple[dict, dict[str, np.ndarray]]:
    """Return the config.json and the tensors of a directory."""
    raw = json.loads((directory / "config.json").read_text())
    return raw, dict(safetensors_files.read(directory / "model.safetensors"))


def write(directory: Path, raw: dict, tensors: dict[str, np.ndarray]) -> Path:
    """Write a config.json and tensors, and return the directory."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    tensors = {name: np.ascontiguousarray(x) for name, x in tensors.items()}
    layout = [(name, x.shape, x.dtype) for name, x in tensors.items()]
    safetensors_files.write(directory / "model.safetensors", layout, tensors.values())
    return directory


def write_both(
    source: Path, folder: Path, case: Case, takes: Callable[[str], bool]
) -> tuple[Path, Path]:
    """Write a checkpoint with other matrices where ``takes`` says so: quantised, and their floats.

    Return the two directories, which are in ``folder``.
    """
    raw, tensors = files_of(source)
    quantised, plain = dict(tensors), dict(tensors)
    for key in filter(takes, tensors):
        parts, floats = case.write(tensors[key].shape)
        plain[key] = floats.astype(np.float32)
        del quantised[key]
        module = key.removesuffix(".weight")
        quantised |= {f"{module}.{end}": part for end, part in parts.items()}
    own = raw | {"quantization_config": case.config}
    return write(folder / "quantised", own, quantised), write(folder / "plain", raw, plain)
