"""The names of the tensors of a decoder, and the conversion between files and params.

Files store each projection separately as [out, in]. jspec stores them as [in, out], with q, k, v
joined in one matrix and gate, up in another.
"""

import dataclasses
import functools
import math
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Array
from jspec.core.weights import Transposed, Weight, as_array
from jspec.models.blocks.experts import MoeParams
from jspec.models.blocks.latent_attention import MlaParams
from jspec.models.decoder import DecoderConfig, DecoderParams, LayerParams

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"  # files of tied models may repeat the embedding under this name
HARMLESS = ("rotary_emb.inv_freq",)  # ends of the names of buffers that the config determines

_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_OUTPUT = ("self_attn.o_proj",)
_GATE_UP = ("mlp.gate_proj", "mlp.up_proj")
_DOWN = ("mlp.down_proj",)
_OF_BLOCKS = [("layers", field) for field in ("qkv", "output", "gate_up", "down")]  # matrices


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of the params, and the tensors of the file that make it up.

    Attributes:
      path: the fields, and the indices in tuples, that lead to the array.
      names: names of the tensors. They are joined along their first stored axis (the outputs),
        which is the last axis in memory.
      shapes: shapes as stored, [out, in].
      transpose: whether the array is stored transposed.
      stack: number of such arrays along a new first axis; None for a single one without it.
      float32: whether the array is float32 regardless of the dtype of the others.
    """

    path: tuple[str | int, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    transpose: bool = False
    stack: int | None = None
    float32: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in memory."""
        shapes = self.shapes[: len(self.shapes) // (self.stack or 1)]
        joined = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        joined = joined[::-1] if self.transpose else joined
        return (self.stack, *joined) if self.stack else joined

    def dtype(self, others: np.dtype) -> np.dtype:
        """Return the dtype of this array for a dtype of the others."""
        return np.dtype(np.float32) if self.float32 else others

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def join(self, tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
        """Return the array in memory as a C-contiguous copy of the tensors of a file."""
        out = np.empty(self.shape, self.dtype(dtype))
        for name, part in zip(self.names, self._parts(out), strict=True):
            _copy(part, tensors[name])
        return out

    def split(self, array: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
        """Yield the tensors of the file, C-contiguous copies: the inverse of ``join``."""
        for shape, part in zip(self.shapes, self._parts(array), strict=True):
            out = np.empty(shape, self.dtype(dtype))
            _copy(out, part)
            yield out

    def _parts(self, array: np.ndarray) -> list[np.ndarray]:
        """Return views of ``array`` [in, out], each shaped like one tensor of the file."""
        count = len(self.shapes) // (self.stack or 1)
        cuts = np.cumsum([shape[0] for shape in self.shapes[:count]])[:-1]
        parts = []
        for matrix in array if self.stack else (array,):
            parts += np.split(matrix.T if self.transpose else matrix, cuts)
        return parts

    def read(self, tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> Array | Weight:
        """Return the array on the device, laid out as the device multiplies fastest."""
        is_faster = jax.default_backend() == "cpu" and self.dtype(dtype) == jnp.bfloat16
        if is_faster and (self.path[0], *self.path[2:]) in _OF_BLOCKS:
            stored = dataclasses.replace(self, transpose=False).join(tensors, dtype)
            return Transposed(jnp.asarray(stored))
        return jnp.asarray(self.join(tensors, dtype))

    def pick(self, params: Any) -> Array | None:
        """Return this entry's array in ``params``, or None."""
        step = lambda node, key: node[key] if isinstance(key, int) else getattr(node, key)
        picked = functools.reduce(step, self.path, params)
        return as_array(picked)

    @property
    def label(self) -> str:
        """The path as an expression: ``layers[0].norm``."""
        return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)[1:]


def _copy(out: np.ndarray, source: np.ndarray, block: int = 64) -> None:
    """Copy and cast in blocks of rows, which stay in the CPU's caches.

    One assignment of a transposed matrix is 4 times slower, and with a cast 2 times.
    """
    for row in range(0, len(out), block):
        out[row : row + block] = source[row : row + block].astype(out.dtype, copy=False)


def vector(path: tuple[str | int, ...], name: str, size: int) -> Entry:
    """Return the entry of a vector."""
    return Entry(path, (name,), ((size,),))


def matrix(path: tuple[str | int, ...], name: str, outputs: int, inputs: int) -> Entry:
    """Return the entry of a projection, [inputs, outputs] in memory."""
    return Entry(path, (name,), ((outputs, inputs),), transpose=True)


def llama_table(config: DecoderConfig) -> tuple[Entry, ...]:
    """Return the entries of a decoder under Llama's names, which all families keep."""
    hidden, vocab = config.hidden_size, config.vocab_size
    entries = [Entry(("embedding",), (EMBEDDING,), ((vocab, hidden),))]
    for layer in range(config.num_layers):
        entries += block_table(config, layer, f"model.layers.{layer}")
    entries.append(vector(("norm",), "model.norm.weight", hidden))
    if not config.tie_embeddings:
        entries.append(matrix(("head",), HEAD, vocab, hidden))
    return tuple(entries)


def block_table(
    config: DecoderConfig,
    layer: int,
    prefix: str,
    inputs: int | None = None,
    input_norm: bool = True,
) -> list[Entry]:
    """Return the entries of one block, ``params.layers[layer]``, under a prefix.

    ``inputs`` is the input width of its attention, None for ``hidden_size``. ``input_norm`` says
    whether the block norms that input.
    """
    hidden, entry = config.hidden_size, functools.partial(_entry, ("layers", layer), prefix)
    entries = [entry("attention_norm", ("input_layernorm",), (hidden,))] if input_norm else []
    entries += _latent_table(config, entry) if config.mla else _qkv_table(config, entry, inputs)
    entries += [
        entry("output", _OUTPUT, (hidden,), config.mixed_size),
        entry("mlp_norm", ("post_attention_layernorm",), (hidden,)),
    ]
    if config.output_bias:
        entries.append(entry("output_bias", _OUTPUT, (hidden,), kind="bias"))
    if config.has_experts(layer):
        return entries + _experts_table(config, ("layers", layer), prefix)
    wide = config.intermediate_size
    entries += [
        entry("gate_up", _GATE_UP, (wide, wide), hidden),
        entry("down", _DOWN, (hidden,), wide),
    ]
    if config.mlp_bias:
        entries.append(entry("gate_up_bias", _GATE_UP, (wide, wide), kind="bias"))
        entries.append(entry("down_bias", _DOWN, (hidden,), kind="bias"))
    return entries


def _entry(owner, prefix, field, modules, sizes, inputs=None, kind="weight", **options) -> Entry:
    """Return the entry of matrices with ``inputs`` columns as stored, or of vectors if None."""
    names = tuple(f"{prefix}.{module}.{kind}" for module in modules)
    shapes = tuple((size,) if inputs is None else (size, inputs) for size in sizes)
    path = (*owner, *field.split("."))
    return Entry(path, names, shapes, **{"transpose": inputs is not None} | options)


def _qkv_table(config: DecoderConfig, entry, inputs: int | None) -> list[Entry]:
    """Return the entries of multi-head attention, without its output."""
    q_size, kv_size = config.qkv_sizes
    sizes, head_dim = (q_size, kv_size, kv_size), config.head_dim
    entries = [entry("qkv", _QKV, sizes, inputs or config.hidden_size)]
    if config.qkv_bias:
        entries.append(entry("qkv_bias", _QKV, sizes, kind="bias"))
    if config.qk_norm:
        entries.append(entry("q_norm", ("self_attn.q_norm",), (head_dim,)))
        entries.append(entry("k_norm", ("self_attn.k_norm",), (head_dim,)))
    return entries


def _latent_table(config: DecoderConfig, entry) -> list[Entry]:
    """Return the entries of latent attention, without its output."""
    mla, hidden = config.mla, config.hidden_size
    at = lambda *parts: tuple(f"self_attn.{part}" for part in parts)
    queries = config.num_heads * mla.head_dim
    if mla.q_rank:
        down = at("q_a_proj", "kv_a_proj_with_mqa")
        entries = [
            entry("mla.down", down, (mla.q_rank, mla.width), hidden),
            entry("mla.q_norm", at("q_a_layernorm"), (mla.q_rank,)),
            entry("mla.q_up", at("q_b_proj"), (queries,), mla.q_rank),
        ]
    else:
        entries = [
            entry("mla.down", at("kv_a_proj_with_mqa"), (mla.width,), hidden),
            entry("mla.q_up", at("q_proj"), (queries,), hidden),
        ]
    up = config.num_heads * (mla.nope_dim + mla.value_dim)
    return [
        *entries,
        entry("mla.kv_norm", at("kv_a_layernorm"), (mla.kv_rank,)),
        entry("mla.kv_up", at("kv_b_proj"), (up,), mla.kv_rank, transpose=False),
    ]


def _experts_table(config: DecoderConfig, path: tuple, prefix: str) -> list[Entry]:
    """Return the entries of a mixture of experts."""
    moe, hidden, entry = config.moe, config.hidden_size, functools.partial(_entry, path, prefix)
    wide, count, shared = moe.intermediate_size, moe.num_experts, "mlp.shared_experts"
    experts = [f"mlp.experts.{index}" for index in range(count)]
    gate_up = [f"{expert}.{part}_proj" for expert in experts for part in ("gate", "up")]
    down = [f"{expert}.down_proj" for expert in experts]
    shared_gate_up = (f"{shared}.gate_proj", f"{shared}.up_proj")
    bias = "e_score_correction_bias"
    return [
        entry("moe.router", ("mlp.gate",), (count,), hidden),
        entry("moe.gate_up", gate_up, (wide,) * len(gate_up), hidden, stack=count),
        entry("moe.down", down, (hidden,) * count, wide, stack=count),
        entry("gate_up", shared_gate_up, (moe.shared_size,) * 2, hidden),
        entry("down", (f"{shared}.down_proj",), (hidden,), moe.shared_size),
        entry("moe.bias", ("mlp.gate",), (count,), kind=bias, float32=True),
    ]


def mtp_prefixes(config: DecoderConfig, raw: dict) -> tuple[str, ...]:
    """Return the prefixes of the names of MTP modules, which a decoder does not read."""
    count = raw.get("num_nextn_predict_layers") or 0
    pairs = [(f"layers.{config.num_layers + k}", f"mtp_layers.{k}") for k in range(count)]
    return tuple(f"model.{name}." for pair in pairs for name in pair)


def nest(entries: tuple[Entry, ...], arrays: list) -> dict:
    """Return one array for each entry in nested dicts: {"norm": …, "layers": {0: {"qkv": …}}}."""
    root: dict = {}
    for entry, array in zip(entries, arrays, strict=True):
        *owners, last = entry.path
        node = functools.reduce(lambda node, key: node.setdefault(key, {}), owners, root)
        node[last] = array
    return root


def blocks(nested: dict) -> tuple[LayerParams, ...]:
    """Pop the blocks from the result of ``nest``."""
    layers = nested.pop("layers")

    def block(fields: dict) -> LayerParams:
        kinds = {"mla": MlaParams, "moe": MoeParams}
        parts = {name: kinds[name](**fields[name]) for name in kinds.keys() & fields.keys()}
        return LayerParams(**{"attention_norm": None, "qkv": None} | fields | parts)

    return tuple(block(layers[index]) for index in sorted(layers))


def assemble(entries: tuple[Entry, ...], arrays: list) -> DecoderParams:
    """Return the params of one array for each entry."""
    nested = nest(entries, arrays)
    return DecoderParams(layers=blocks(nested), **nested)
