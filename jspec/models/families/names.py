"""Where each array of the parameters lives in a checkpoint, and how it gets there and back.

Files store projections one by one and [out, in]; jspec keeps them [in, out], with q, k, v side by
side in one matrix and gate, up in another.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jspec.models.decoder import DecoderConfig, DecoderParams, LayerParams
from jspec.types import Array

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"  # some files of tied models repeat the embedding under this name
HARMLESS = ("rotary_emb.inv_freq",)  # ends of names: buffers that the config determines anyway

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OUTPUT = ("self_attn.o_proj",)
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_DOWN = ("mlp.down_proj",)


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of the parameters, and the tensors of the file that make it up.

    ``path`` are the fields, and the places in tuples, that lead to the array. Several tensors are
    joined along their first stored axis (the outputs), which is the last one in memory.
    """

    path: tuple[str | int, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # as stored, [out, in]
    transpose: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in memory."""
        joined = (sum(shape[0] for shape in self.shapes), *self.shapes[0][1:])
        return joined[::-1] if self.transpose else joined

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def join(self, tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
        """The array in memory from the tensors of a file; always a copy, C-contiguous."""
        out = np.empty(self.shape, dtype)
        for name, part in zip(self.names, self._parts(out), strict=True):
            _copy(part, tensors[name])
        return out

    def split(self, array: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
        """The inverse of ``join``: the tensors of the file one by one, C-contiguous copies."""
        for shape, part in zip(self.shapes, self._parts(array), strict=True):
            out = np.empty(shape, dtype)
            _copy(out, part)
            yield out

    def _parts(self, array: np.ndarray) -> list[np.ndarray]:
        """Views of ``array`` [in, out], each shaped like one tensor of the file."""
        rows = array.T if self.transpose else array
        return np.split(rows, np.cumsum([shape[0] for shape in self.shapes])[:-1])

    def pick(self, params: Any) -> Array | None:
        """This entry's array in ``params``, or None."""
        step = lambda node, key: node[key] if isinstance(key, int) else getattr(node, key)
        return functools.reduce(step, self.path, params)

    @property
    def label(self) -> str:
        """The path as one would write it: ``layers[0].norm``."""
        return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)[1:]


def _copy(out: np.ndarray, source: np.ndarray, block: int = 64) -> None:
    """Copies and casts in blocks of rows, which stay in the CPU's caches while they turn.

    Turning a matrix in one assignment is 4 times slower, casting on the way 2 times.
    """
    for row in range(0, len(out), block):
        out[row : row + block] = source[row : row + block].astype(out.dtype, copy=False)


def llama_table(config: DecoderConfig) -> tuple[Entry, ...]:
    """Names of Llama and of every family that kept them: Mistral, Qwen2, Qwen3."""
    hidden, vocab = config.hidden_size, config.vocab_size
    entries = [Entry(("embedding",), (EMBEDDING,), ((vocab, hidden),))]
    for layer in range(config.num_layers):
        entries += block_table(config, layer, f"model.layers.{layer}")
    entries.append(Entry(("norm",), ("model.norm.weight",), ((hidden,),)))
    if not config.tie_embeddings:
        entries.append(Entry(("head",), (HEAD,), ((vocab, hidden),), transpose=True))
    return tuple(entries)


def block_table(
    config: DecoderConfig,
    layer: int,
    prefix: str,
    inputs: int | None = None,
    input_norm: bool = True,
) -> list[Entry]:
    """Names of one block, ``params.layers[layer]``.

    Args:
      config: sizes.
      layer: which block.
      prefix: what its tensors' names begin with.
      inputs: width that its attention reads, ``hidden_size`` if None.
      input_norm: whether it norms what its attention reads.
    """
    hidden, wide, head_dim = config.hidden_size, config.intermediate_size, config.head_dim
    q_size, kv_size = config.qkv_sizes
    qkv_sizes, gate_up_sizes = (q_size, kv_size, kv_size), (wide, wide)

    def entry(field: str, owners, sizes, inputs: int | None = None, kind: str = "weight") -> Entry:
        """A matrix of ``inputs`` columns as stored, or a vector where that is None."""
        names = tuple(f"{prefix}.{owner}.{kind}" for owner in owners)
        shapes = tuple((size,) if inputs is None else (size, inputs) for size in sizes)
        return Entry(("layers", layer, field), names, shapes, transpose=inputs is not None)

    entries = [entry("attention_norm", ("input_layernorm",), (hidden,))] if input_norm else []
    entries += [
        entry("qkv", _QKV, qkv_sizes, inputs or hidden),
        entry("output", _OUTPUT, (hidden,), q_size),
        entry("mlp_norm", ("post_attention_layernorm",), (hidden,)),
        entry("gate_up", _GATE_UP, gate_up_sizes, hidden),
        entry("down", _DOWN, (hidden,), wide),
    ]
    if config.qkv_bias:
        entries.append(entry("qkv_bias", _QKV, qkv_sizes, kind="bias"))
    if config.output_bias:
        entries.append(entry("output_bias", _OUTPUT, (hidden,), kind="bias"))
    if config.mlp_bias:
        entries.append(entry("gate_up_bias", _GATE_UP, gate_up_sizes, kind="bias"))
        entries.append(entry("down_bias", _DOWN, (hidden,), kind="bias"))
    if config.qk_norm:
        entries.append(entry("q_norm", ("self_attn.q_norm",), (head_dim,)))
        entries.append(entry("k_norm", ("self_attn.k_norm",), (head_dim,)))
    return entries


def nest(entries: tuple[Entry, ...], arrays: list) -> dict:
    """One array for each entry, as nested dicts: {"norm": …, "layers": {0: {"qkv": …}}}."""
    root: dict = {}
    for entry, array in zip(entries, arrays, strict=True):
        *owners, last = entry.path
        node = functools.reduce(lambda node, key: node.setdefault(key, {}), owners, root)
        node[last] = array
    return root


def blocks(nested: dict) -> tuple[LayerParams, ...]:
    """The blocks of what ``nest`` gave."""
    layers = nested.pop("layers")
    return tuple(
        LayerParams(**{"attention_norm": None} | layers[index]) for index in sorted(layers)
    )


def assemble(entries: tuple[Entry, ...], arrays: list) -> DecoderParams:
    """Parameters from one array for each entry."""
    nested = nest(entries, arrays)
    return DecoderParams(layers=blocks(nested), **nested)
