"""The tensors of GGUF files under the names of their families."""

import dataclasses
import re
from collections.abc import Iterable
from typing import Any

import numpy as np

from jspec.checkpoints import gguf_architectures
from jspec.checkpoints.families.names import Entry
from jspec.checkpoints.gguf_config import FACTORS, FREQUENCIES
from jspec.checkpoints.gguf_files import GgufFile, GgufTensor
from jspec.checkpoints.gguf_tensors import Alternating, Columns, Gathered, KeysAndValues

_EXPERT = re.compile(r"(\.experts)\.\d+\.")
_BLOCK = re.compile(r"blk\.(\d+)\.")
_FUSED = re.compile(r"(.*\.experts)\.gate_up_proj(_bias)?")
_FACTOR = re.compile(r"model\.layers\.(\d+)\.router\.(scale|per_expert_scale)")
_FACTORS = {"scale": "ffn_gate_inp", "per_expert_scale": "ffn_down_exps"}
_XIELU = "mlp.act_fn."


def stacked(entries: Iterable[Entry]) -> tuple[Entry, ...]:
    """Return the entries for files that have all experts of a matrix in one tensor."""
    return tuple(_stacked(entry) if entry.stack else entry for entry in entries)


def _stacked(entry: Entry) -> Entry:
    count, names, shapes = entry.per_matrix, entry.names, entry.shapes
    if entry.fused == "inputs" and len(entry.sections) == 2:  # gates, and then inputs
        (name,), ((_, *inputs),) = names, shapes
        names = tuple(name.replace("gate_up", each) for each in ("gate", "up"))
        shapes = tuple((size, *inputs) for size in entry.sections)
    elif not entry.fused:
        names, shapes = tuple(_EXPERT.sub(r"\1.", name) for name in names[:count]), shapes[:count]
    return dataclasses.replace(entry, names=names, shapes=shapes, fused="outputs")


def tensors(file: GgufFile, raw: dict, entries: Iterable[Entry]) -> dict[str, Any]:
    """Return the tensors under the names of Hugging Face.

    Args:
      file: its tensors.
      raw: config.json.
      entries: ``stacked`` ones. Tensors without one keep the name of the file.
    """
    stored = _Stored(file, raw)
    renamed = {}
    for name in (name for entry in entries for name in entry.names):
        tensor = stored.made(name)
        if tensor is not None:
            renamed[name] = tensor
    return renamed | stored.rest


class _Stored:
    """The tensors of a file that are left, by the names of the file."""

    def __init__(self, file: GgufFile, raw: dict):
        import gguf

        kinds = {name: kind for kind, name in gguf.MODEL_ARCH_NAMES.items()}
        kind = kinds[file.get("general.architecture")]
        layers = raw["num_hidden_layers"]
        blocks = ((name, _BLOCK.match(name)) for name in file.tensors)
        later = {name for name, match in blocks if match and int(match[1]) >= layers}
        self.rest = {name: x for name, x in file.tensors.items() if name not in later}
        for name in (FREQUENCIES, *FACTORS):
            self.rest.pop(name, None)
        self._file, self._raw = file, raw
        self._architecture = gguf_architectures.find(file)
        self._table = gguf.get_tensor_name_map(kind, layers)

    def made(self, name: str) -> Any:
        """Return the tensor of a name, or None; it is not left any more."""
        if _XIELU in name:
            return self._number(name)
        if match := _FUSED.fullmatch(name):
            joined = self._taken(name)
            return joined or self._gate_up(match[1], "bias" if match[2] else "weight")
        if name.endswith("kv_b_proj.weight"):
            return self._keys_and_values(name)
        if "linear_attn." in name:
            return self._linear_attention(name)
        tensor, part = self._taken(name), name.split(".")[-2]
        if tensor is None:
            return self._half(name) if ".experts." in name else None
        if self._architecture.permuted and part in ("q_proj", "k_proj"):
            tensor = _halves(part, tensor, self._raw)
        if self._architecture.centred and part.endswith("norm"):
            tensor = dataclasses.replace(tensor, offset=-1.0)
        return tensor

    def _taken(self, name: str) -> GgufTensor | None:
        """Return the tensor that llama.cpp's table has for a name."""
        name = name.replace("e_score_correction_bias", "e_score_correction.bias")
        name = name.replace("linear_attn.dt_bias", "linear_attn.dt_proj.bias")
        name = re.sub(r"(\.experts\.\w+)_bias$", r"\1.bias", name)
        if match := _FACTOR.fullmatch(name):  # Gemma 4's, which the table lacks
            return self.rest.pop(f"blk.{match[1]}.{_FACTORS[match[2]]}.scale", None)
        stored = self._table.get_name(name, (".weight", ".bias"))
        if stored is not None and stored not in self.rest:
            stored += ".weight"
        return self.rest.pop(stored, None)

    def _gate_up(self, experts: str, kind: str) -> Alternating | None:
        """Return the gates and the inputs of all experts, of gpt-oss."""
        parts = tuple(self._taken(f"{experts}.{each}_proj.{kind}") for each in ("gate", "up"))
        return None if None in parts or parts[0].shape != parts[1].shape else Alternating(parts)

    def _half(self, name: str) -> GgufTensor | None:
        """Return the gates or the inputs of all experts of a file that has both in one tensor."""
        joined = re.sub(r"\.(gate|up)_proj\.weight$", ".gate_up_proj.weight", name)
        stored = None if joined == name else self._table.get_name(joined, (".weight",))
        tensor = self._file.tensors.get(stored)
        if tensor is None or len(tensor.shape) != 3:
            return None
        self.rest.pop(stored, None)
        count, rows, inputs = tensor.shape
        part = slice(rows // 2, None) if ".up_proj" in name else slice(rows // 2)
        data = tensor.data[:, part]
        return dataclasses.replace(tensor, data=data, shape=(count, data.shape[1], inputs))

    def _keys_and_values(self, name: str) -> GgufTensor | KeysAndValues | None:
        if (joined := self._taken(name)) is not None:
            return joined
        both = [self._taken(name.replace("kv_b", f"{each}_b")) for each in "kv"]
        if None in both or [len(tensor.shape) for tensor in both] != [3, 3]:
            return None
        return KeysAndValues(*both)

    def _number(self, name: str) -> np.ndarray | None:
        """Return a number of xIELU, which the metadata have for each layer."""
        layer, key = int(name.split(".")[2]), name.rpartition(".")[2]
        given = self._file.get(f"xielu.{key}")
        given = given if isinstance(given, list) else [given] * self._raw["num_hidden_layers"]
        if layer >= len(given) or given[layer] is None:
            return None
        return np.full((1,) if key.startswith("alpha") else (), given[layer], np.float32)

    def _linear_attention(self, name: str) -> Any:
        """Return a tensor of the gated delta rule in the family's form and order.

        Files have decays as they are multiplied, no axis of one in the convolution, and in Qwen3.5
        the heads of values in an order in which those of keys alternate.
        """
        sizes, part = _Sizes.of(self._raw), name.split("linear_attn.")[1].split(".")[0]
        tensor = self._taken(name)
        if tensor is None and part == "in_proj_qkvz":
            both = [self._taken(name.replace("qkvz", each)) for each in ("qkv", "z")]
            return None if None in both else Gathered(tuple(both), sizes.by_key_heads())
        if tensor is None or part == "norm":
            return tensor
        if self._architecture.family != "qwen3_next" and sizes.keys != sizes.values:
            if part == "out_proj":
                return Columns(tensor, sizes.grouped(sizes.value_dim))
            wide = sizes.value_dim if part in ("in_proj_qkv", "in_proj_z", "conv1d") else 1
            before = 2 * sizes.keys * sizes.key_dim if part in ("in_proj_qkv", "conv1d") else 0
            order = np.concatenate([np.arange(before), before + sizes.grouped(wide)])
            if len(order) == tensor.shape[0]:
                tensor = dataclasses.replace(tensor, order=order)
        if part == "A_log":
            return np.log(-tensor[:])
        return tensor[:][:, None] if part == "conv1d" else tensor


@dataclasses.dataclass(frozen=True)
class _Sizes:
    """Sizes of the gated delta rule."""

    keys: int  # heads
    values: int  # heads
    key_dim: int
    value_dim: int

    @classmethod
    def of(cls, raw: dict) -> "_Sizes":
        """Return the sizes of a config.json."""
        names = "num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim"
        return cls(*(raw[f"linear_{name}"] for name in names))

    def grouped(self, width: int) -> np.ndarray:
        """Return the stored row of each row of heads of values, ``width`` rows a head."""
        each = self.values // self.keys
        stored = np.arange(self.values * width).reshape(each, self.keys, width)
        return stored.swapaxes(0, 1).reshape(-1)

    def by_key_heads(self) -> np.ndarray:
        """Return the row in queries, keys, values and gates of each row in the order by heads."""
        keys, wide = self.keys * self.key_dim, self.values * self.value_dim
        ends = np.cumsum([keys, keys, wide])
        parts = np.split(np.arange(2 * keys + 2 * wide), ends)
        return np.concatenate([part.reshape(self.keys, -1) for part in parts], 1).reshape(-1)


def _halves(part: str, tensor: GgufTensor, raw: dict) -> GgufTensor:
    """Undo llama.cpp's order of q and k, which has features i and i + d/2 as neighbours."""
    heads = raw["num_attention_heads"]
    heads = raw.get("num_key_value_heads", heads) if part == "k_proj" else heads
    rows = tensor.shape[0]
    if rows % (2 * heads):
        return tensor  # its shape is refused later
    stored = np.arange(rows).reshape(heads, rows // heads // 2, 2)
    return dataclasses.replace(tensor, order=stored.swapaxes(1, 2).reshape(-1))
