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

from jspec.core.types import Array
from jspec.models.decoder import DecoderConfig, DecoderParams, LayerParams
from jspec.models.mla import MlaParams
from jspec.models.moe import MoeParams

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
    joined along their first stored axis (the outputs), which is the last one in memory. With
    ``stack`` they make up that many such arrays, one after the other, along a first axis.
    """

    path: tuple[str | int, ...]
    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]  # as stored, [out, in]
    transpose: bool = False
    stack: int | None = None
    float32: bool = False  # kept so whatever the dtype of the others, in memory and in files

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in memory."""
        each = self.shapes[: len(self.shapes) // (self.stack or 1)]
        joined = (sum(shape[0] for shape in each), *each[0][1:])
        joined = joined[::-1] if self.transpose else joined
        return (self.stack, *joined) if self.stack else joined

    def dtype(self, others: np.dtype) -> np.dtype:
        """Its dtype where that of the others is ``others``."""
        return np.dtype(np.float32) if self.float32 else others

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def join(self, tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
        """The array in memory from the tensors of a file; always a copy, C-contiguous."""
        out = np.empty(self.shape, self.dtype(dtype))
        for name, part in zip(self.names, self._parts(out), strict=True):
            _copy(part, tensors[name])
        return out

    def split(self, array: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
        """The inverse of ``join``: the tensors of the file one by one, C-contiguous copies."""
        for shape, part in zip(self.shapes, self._parts(array), strict=True):
            out = np.empty(shape, self.dtype(dtype))
            _copy(out, part)
            yield out

    def _parts(self, array: np.ndarray) -> list[np.ndarray]:
        """Views of ``array`` [in, out], each shaped like one tensor of the file."""
        each = len(self.shapes) // (self.stack or 1)
        cuts = np.cumsum([shape[0] for shape in self.shapes[:each]])[:-1]
        parts = []
        for one in array if self.stack else (array,):
            parts += np.split(one.T if self.transpose else one, cuts)
        return parts

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
    hidden, own = config.hidden_size, functools.partial(_entry, ("layers", layer), prefix)
    entries = [own("attention_norm", ("input_layernorm",), (hidden,))] if input_norm else []
    entries += _latent_table(config, own) if config.mla else _qkv_table(config, own, inputs)
    entries += [
        own("output", _OUTPUT, (hidden,), config.mixed_size),
        own("mlp_norm", ("post_attention_layernorm",), (hidden,)),
    ]
    if config.output_bias:
        entries.append(own("output_bias", _OUTPUT, (hidden,), kind="bias"))
    if config.has_experts(layer):
        return entries + _experts_table(config, ("layers", layer), prefix)
    wide = config.intermediate_size
    entries += [
        own("gate_up", _GATE_UP, (wide, wide), hidden),
        own("down", _DOWN, (hidden,), wide),
    ]
    if config.mlp_bias:
        entries.append(own("gate_up_bias", _GATE_UP, (wide, wide), kind="bias"))
        entries.append(own("down_bias", _DOWN, (hidden,), kind="bias"))
    return entries


def _entry(
    owner: tuple,
    prefix: str,
    field: str,
    owners,
    sizes,
    inputs: int | None = None,
    kind: str = "weight",
    **options,
) -> Entry:
    """A matrix of ``inputs`` columns as stored, or a vector where that is None."""
    names = tuple(f"{prefix}.{owner}.{kind}" for owner in owners)
    shapes = tuple((size,) if inputs is None else (size, inputs) for size in sizes)
    path = (*owner, *field.split("."))
    return Entry(path, names, shapes, **{"transpose": inputs is not None} | options)


def _qkv_table(config: DecoderConfig, own, inputs: int | None) -> list[Entry]:
    """Names of the usual attention, but for its output."""
    q_size, kv_size = config.qkv_sizes
    sizes, head_dim = (q_size, kv_size, kv_size), config.head_dim
    entries = [own("qkv", _QKV, sizes, inputs or config.hidden_size)]
    if config.qkv_bias:
        entries.append(own("qkv_bias", _QKV, sizes, kind="bias"))
    if config.qk_norm:
        entries.append(own("q_norm", ("self_attn.q_norm",), (head_dim,)))
        entries.append(own("k_norm", ("self_attn.k_norm",), (head_dim,)))
    return entries


def _latent_table(config: DecoderConfig, own) -> list[Entry]:
    """Names of latent attention, but for its output."""
    mla, hidden = config.mla, config.hidden_size
    at = lambda *parts: tuple(f"self_attn.{part}" for part in parts)
    queries = config.num_heads * mla.head_dim
    if mla.q_rank:
        entries = [
            own("mla.down", at("q_a_proj", "kv_a_proj_with_mqa"), (mla.q_rank, mla.width), hidden),
            own("mla.q_norm", at("q_a_layernorm"), (mla.q_rank,)),
            own("mla.q_up", at("q_b_proj"), (queries,), mla.q_rank),
        ]
    else:
        entries = [
            own("mla.down", at("kv_a_proj_with_mqa"), (mla.width,), hidden),
            own("mla.q_up", at("q_proj"), (queries,), hidden),
        ]
    up = config.num_heads * (mla.nope_dim + mla.value_dim)
    return [
        *entries,
        own("mla.kv_norm", at("kv_a_layernorm"), (mla.kv_rank,)),
        own("mla.kv_up", at("kv_b_proj"), (up,), mla.kv_rank, transpose=False),
    ]


def _experts_table(config: DecoderConfig, path: tuple, prefix: str) -> list[Entry]:
    """Names of a mixture of experts: Qwen's where the shared one has a gate, else DeepSeek's."""
    moe, hidden, own = config.moe, config.hidden_size, functools.partial(_entry, path, prefix)
    wide, experts = moe.intermediate_size, [f"mlp.experts.{e}" for e in range(moe.num_experts)]
    gate_up = [f"{expert}.{part}_proj" for expert in experts for part in ("gate", "up")]
    every = "mlp.shared_experts"
    bias = "e_score_correction_bias"
    return [
        own("moe.router", ("mlp.gate",), (moe.num_experts,), hidden),
        own("moe.gate_up", gate_up, (wide,) * len(gate_up), hidden, stack=moe.num_experts),
        own(
            "moe.down",
            [f"{expert}.down_proj" for expert in experts],
            (hidden,) * moe.num_experts,
            wide,
            stack=moe.num_experts,
        ),
        own("gate_up", (f"{every}.gate_proj", f"{every}.up_proj"), (moe.shared_size,) * 2, hidden),
        own("down", (f"{every}.down_proj",), (hidden,), moe.shared_size),
        own("moe.bias", ("mlp.gate",), (moe.num_experts,), kind=bias, float32=True),
    ]


def mtp_prefixes(config: DecoderConfig, raw: dict) -> tuple[str, ...]:
    """How names begin of modules in a target's file that predict tokens after the next.

    A decoder does not read them; ``jspec.checkpoints.heads.mtp`` does.
    """
    count = raw.get("num_nextn_predict_layers") or 0
    places = [(f"layers.{config.num_layers + k}", f"mtp_layers.{k}") for k in range(count)]
    return tuple(f"model.{name}." for pair in places for name in pair)


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

    def block(fields: dict) -> LayerParams:
        kinds = {"mla": MlaParams, "moe": MoeParams}
        parts = {name: kinds[name](**fields[name]) for name in kinds.keys() & fields.keys()}
        return LayerParams(**{"attention_norm": None, "qkv": None} | fields | parts)

    return tuple(block(layers[index]) for index in sorted(layers))


def assemble(entries: tuple[Entry, ...], arrays: list) -> DecoderParams:
    """Parameters from one array for each entry."""
    nested = nest(entries, arrays)
    return DecoderParams(layers=blocks(nested), **nested)
