"""The names of the tensors of a decoder, and the conversion between files and params.

Files store each projection separately as [out, in]. jspec stores them as [in, out], with q, k, v
joined in one matrix and gate, up in another.
"""

import collections
import dataclasses
import functools
import itertools
import math
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Array
from jspec.core.weights import Transposed, Weight, as_array
from jspec.models.blocks.layer_inputs import LayerInputsParams
from jspec.models.blocks.tensors import Tensor, norm_of
from jspec.models.decoder import DecoderConfig, DecoderParams, LayerParams, init_layers
from jspec.sharding.placement import Placement

EMBEDDING = "model.embed_tokens.weight"
HEAD = "lm_head.weight"  # files of tied models may repeat the embedding under this name
# The bounds of a part: on each axis the first index, and the one behind the last.
Bounds = tuple[tuple[int, int], ...]
_NONE: Mapping[str, str] = types.MappingProxyType({})
HARMLESS = ("rotary_emb.inv_freq",)  # ends of the names of buffers that the config determines


@dataclasses.dataclass(frozen=True)
class Entry(Tensor):
    """One array of the params, with the whole names of its tensors; see ``Tensor``."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape in memory."""
        shapes = self.shapes[: self.per_matrix]
        if not shapes[0]:
            return ()
        joined = (sum(shape[0] for shape in shapes), *shapes[0][1:])
        joined = joined[::-1] if self.transpose else joined
        return (self.stack, *joined) if self.stack else joined

    @property
    def stored_shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the tensors of a file."""
        if not self.fused:
            return self.shapes
        order = -1 if self.fused == "inputs" else 1
        return tuple((self.stack, *shape[::order]) for shape in self.shapes)

    def dtype(self, others: np.dtype) -> np.dtype:
        """Return the dtype of this array for a dtype of the others."""
        return np.dtype(np.float32) if self.float32 else others

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    def join(self, tensors: Mapping[str, np.ndarray], dtype: np.dtype) -> np.ndarray:
        """Return the array in memory as a C-contiguous copy of the tensors of a file."""
        return self.part(tensors, dtype, tuple((0, size) for size in self.shape))

    def part(
        self,
        tensors: Mapping[str, np.ndarray],
        dtype: np.dtype,
        bounds: Bounds,
        order: np.ndarray | None = None,
    ) -> np.ndarray:
        """Return a C-contiguous part of the array in memory; nothing else of the file is read.

        ``bounds`` count the outputs in their ``order`` in memory, None for that of the names.
        """
        if not self.shape:
            return np.array(tensors[self.names[0]], self.dtype(dtype))
        out = np.empty([end - begin for begin, end in bounds], self.dtype(dtype))
        matrices, stacked = (range(*bounds[0]), out) if self.stack else ((0,), (out,))
        axes = bounds[1:] if self.stack else bounds
        outputs, *others = axes[::-1] if self.transpose else axes
        inputs = tuple(slice(*pair) for pair in others)
        runs = [outputs] if order is None else _runs(order[slice(*outputs)])
        count = self.per_matrix
        for number, matrix in zip(matrices, stacked, strict=True):
            stored, done = matrix.T if self.transpose else matrix, 0
            for first, last in runs:
                begin = 0
                for nth in range(count):
                    index = nth if self.fused else number * count + nth
                    end = begin + self.shapes[index][0]
                    low, size = max(first, begin), min(last, end) - max(first, begin)
                    if size > 0:
                        source = tensors[self.names[index]]
                        if self.fused:
                            source = _OfStack(source, number, self.fused == "inputs")
                        _copy(stored[done : done + size], source, low - begin, inputs)
                        done += size
                    begin = end
        return out

    def split(self, array: np.ndarray, dtype: np.dtype) -> Iterator[np.ndarray]:
        """Yield the tensors of the file, C-contiguous copies: the inverse of ``join``."""
        if not self.shape:
            yield np.array(array, self.dtype(dtype))
            return
        for shape, part in zip(self.stored_shapes, self._parts(array), strict=True):
            out = np.empty(shape, self.dtype(dtype))
            _copy(out, part)
            yield out

    def _parts(self, array: np.ndarray) -> list[np.ndarray]:
        """Return views of ``array`` [in, out], each shaped like one tensor of the file."""
        cuts = np.cumsum([shape[0] for shape in self.shapes[: self.per_matrix]])[:-1]
        if self.fused:
            is_stored = array.ndim == 2 or self.transpose == (self.fused == "inputs")
            axis = -2 if array.ndim == 3 and self.fused == "outputs" else -1
            return np.split(array if is_stored else array.swapaxes(1, 2), cuts, axis)
        parts = []
        for matrix in array if self.stack else (array,):
            parts += np.split(matrix.T if self.transpose else matrix, cuts)
        return parts

    def read(
        self,
        tensors: Mapping[str, np.ndarray],
        dtype: np.dtype,
        placement: Placement | None = None,
    ) -> Array | Weight:
        """Return the array on the device, laid out as the device multiplies fastest.

        With a ``placement`` it is there, and a plain array. Each part is read once, and the host
        holds one part at a time.
        """
        if placement is not None:
            return placement.laid(self._on_devices(tensors, dtype, placement))
        is_faster = jax.default_backend() == "cpu" and self.dtype(dtype) == jnp.bfloat16
        if is_faster and self.by_linear:
            stored = dataclasses.replace(self, transpose=False).join(tensors, dtype)
            return Transposed(jax.block_until_ready(jax.device_put(stored)))
        return jax.block_until_ready(jax.device_put(self.join(tensors, dtype)))

    def _on_devices(
        self, tensors: Mapping[str, np.ndarray], dtype: np.dtype, placement: Placement
    ) -> Array:
        shape, sharding = list(self.shape), placement.sharding
        if placement.order is not None:
            shape[self.outputs_axis] = len(placement.order)
        devices = collections.defaultdict(list)  # by the part that they hold
        for device, index in sharding.addressable_devices_indices_map(tuple(shape)).items():
            pairs = zip(index, shape, strict=True)
            devices[tuple(each.indices(size)[:2] for each, size in pairs)].append(device)
        arrays = []
        for bounds, holders in devices.items():
            part = self.part(tensors, dtype, bounds, placement.order)
            arrays += jax.block_until_ready([jax.device_put(part, each) for each in holders])
        return jax.make_array_from_single_device_arrays(tuple(shape), sharding, arrays)

    def pick(self, params: Any) -> Array | None:
        """Return this entry's array in ``params``, or None."""
        for key in self.path:
            params = params[key] if isinstance(key, int) else getattr(params, key)
        return as_array(params)

    @property
    def label(self) -> str:
        """The path as an expression: ``layers[0].norm``."""
        return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in self.path)[1:]


class _OfStack(NamedTuple):
    """One matrix [out, in] or vector of a stack in a file, which slices read."""

    stack: np.ndarray
    number: int
    transposed: bool

    def __getitem__(self, slices: tuple[slice, ...]) -> np.ndarray:
        if self.transposed:
            return self.stack[(self.number, *slices[::-1])].T
        return self.stack[(self.number, *slices)]


def _runs(numbers: np.ndarray) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers: the first of each, and the one behind the last."""
    cuts = np.flatnonzero(np.diff(numbers) != 1) + 1
    return [(int(run[0]), int(run[-1]) + 1) for run in np.split(numbers, cuts)]


def _copy(
    out: np.ndarray,
    source: np.ndarray | _OfStack,
    first: int = 0,
    others: tuple[slice, ...] = (),
    block: int = 64,
) -> None:
    """Copy and cast ``source`` from row ``first`` on, with ``others`` as slices of its other axes.

    Blocks of rows stay in the CPU's caches. One assignment of a transposed matrix is 4 times
    slower, and with a cast 2 times.
    """
    for row in range(0, len(out), block):
        rows = slice(first + row, first + min(row + block, len(out)))
        out[row : row + block] = source[(rows, *others)].astype(out.dtype, copy=False)


def vector(path: tuple[str | int, ...], name: str, size: int) -> Entry:
    """Return the entry of a vector."""
    return Entry(path, (name,), ((size,),))


def matrix(path: tuple[str | int, ...], name: str, outputs: int, inputs: int) -> Entry:
    """Return the entry of a projection, [inputs, outputs] in memory."""
    return Entry(path, (name,), ((outputs, inputs),), transpose=True)


def llama_table(config: DecoderConfig, renamed: Mapping[str, str] = _NONE) -> tuple[Entry, ...]:
    """Return the entries of a decoder under Llama's names.

    ``renamed`` has modules of a layer that a family names otherwise; see ``Family``.
    """
    hidden, vocab = config.hidden_size, config.vocab_size
    entries = [Entry(("embedding",), (EMBEDDING,), ((vocab, hidden),))]
    if config.layer_inputs is not None:
        inputs = config.layer_inputs.tensors(vocab, hidden, config.num_layers)
        entries += [Entry(**vars(tensor)) for tensor in _within("layer_inputs", inputs)]
    for layer in range(config.num_layers):
        entries += block_table(config, layer, f"model.layers.{layer}", renamed=renamed)
    entries += [Entry(**vars(x)) for x in norm_of("norm", "model.norm", config.norm, hidden)]
    if not config.tie_embeddings:
        entries.append(matrix(("head",), HEAD, vocab, hidden))
    if config.head_bias:
        entries.append(vector(("head_bias",), "lm_head.bias", vocab))
    return tuple(entries)


def block_table(
    config: DecoderConfig,
    layer: int,
    prefix: str,
    inputs: int | None = None,
    input_norm: bool = True,
    renamed: Mapping[str, str] = _NONE,
) -> list[Entry]:
    """Return the entries of one block, ``params.layers[layer]``, under a prefix.

    ``inputs`` is the input width of its attention, None for ``hidden_size``. ``input_norm`` says
    whether the block norms that input. ``renamed`` is that of ``llama_table``.
    """
    hidden, kind = config.hidden_size, config.layers[layer]
    mixer = _within("mixer", kind.mixer.tensors(hidden, inputs))
    late = [tensor for tensor in mixer if tensor.path[1:] == ("output_bias",)]
    before, output = kind.norm if input_norm else None, kind.output_norm
    tensors = [
        *norm_of("mixer_norm", "input_layernorm", before, hidden),
        *(tensor for tensor in mixer if tensor not in late),
        *norm_of("mixer_output_norm", "post_self_attn_layernorm", output, hidden),
        *norm_of("feed_forward_norm", "post_attention_layernorm", kind.inner_norm, hidden),
        *late,  # Files have this bias behind the second norm.
        *_within("feed_forward", kind.feed_forward.tensors(hidden)),
        *norm_of("feed_forward_output_norm", "post_mlp_layernorm", output, hidden),
        *_within("input_gate", kind.input_gate.tensors(hidden) if kind.input_gate else ()),
        *([Tensor(("scale",), ("layer_scalar",), ((1,),))] if kind.scaled else []),
    ]
    path = ("layers", layer)
    return [_entry(tensor, path, prefix, renamed) for tensor in tensors]


def _within(part: str, tensors: Iterable[Tensor]) -> list[Tensor]:
    """Return the tensors of a part of a layer, with paths from the layer on."""
    return [dataclasses.replace(tensor, path=(part, *tensor.path)) for tensor in tensors]


def _entry(
    tensor: Tensor, path: tuple[str | int, ...], prefix: str, renamed: Mapping[str, str]
) -> Entry:
    """Return the entry of a layer's tensor, given the path to the layer and its prefix.

    Neighbours that get the same name are one tensor of the file.
    """

    def name_of(pair: tuple[str, tuple[int, ...]]) -> str:
        module, dot, kind = pair[0].rpartition(".")
        return f"{prefix}.{renamed.get(module, module)}{dot}{kind}"

    pairs = zip(tensor.names, tensor.shapes, strict=True)
    named = {name: [x for _, x in group] for name, group in itertools.groupby(pairs, name_of)}
    joined = (
        (sum(x[0] for x in xs), *xs[0][1:]) if len(xs) > 1 else xs[0] for xs in named.values()
    )
    fields = {"path": (*path, *tensor.path), "names": tuple(named), "shapes": tuple(joined)}
    return Entry(**vars(tensor) | fields)


def mtp_prefixes(config: DecoderConfig, raw: dict) -> tuple[str, ...]:
    """Return the prefixes of the names of MTP modules, which a decoder does not read."""
    count = raw.get("num_nextn_predict_layers") or 0
    pairs = [(f"layers.{config.num_layers + k}", f"mtp_layers.{k}") for k in range(count)]
    return ("mtp.", *(f"model.{name}." for pair in pairs for name in pair))


def shared_prefixes(config: DecoderConfig) -> tuple[str, ...]:
    """Return the prefixes of keys and values of layers that read those of another layer.

    Published files may have them, GGUF files too, but no decoder reads them.
    """
    sources = [getattr(layer.mixer, "source", None) for layer in config.layers]
    readers = [index for index, source in enumerate(sources) if source is not None]
    names = ("self_attn.k_proj", "self_attn.v_proj", "self_attn.k_norm")
    stored = ("attn_k", "attn_v", "attn_k_norm")
    ours = [f"model.layers.{index}.{name}." for index in readers for name in names]
    return (*ours, *(f"blk.{index}.{name}." for index in readers for name in stored))


def as_stored(entries: tuple[Entry, ...], names: Collection[str]) -> tuple[Entry, ...]:
    """Return the entries for a file with ``names``, which may have all experts in one tensor."""

    def one(entry: Entry) -> Entry:
        experts, _, _ = entry.names[0].partition(".experts.")
        fused = f"{experts}.experts.{entry.path[-1]}_proj"  # gate_up or down
        if not entry.stack or entry.names[0] in names or fused not in names:
            return entry
        outputs = sum(shape[0] for shape in entry.shapes[: entry.per_matrix])
        shapes = ((outputs, *entry.shapes[0][1:]),)
        return dataclasses.replace(entry, names=(fused,), shapes=shapes, fused="outputs")

    return tuple(map(one, entries))


def nest(entries: tuple[Entry, ...], arrays: list) -> dict:
    """Return one array for each entry in nested dicts: {"norm": …, "layers": {0: {"qkv": …}}}."""
    root: dict = {}
    for entry, array in zip(entries, arrays, strict=True):
        *owners, last = entry.path
        node = functools.reduce(lambda node, key: node.setdefault(key, {}), owners, root)
        node[last] = array
    return root


def blocks(nested: dict, config: DecoderConfig) -> tuple[LayerParams, ...]:
    """Pop the blocks of ``config`` from the result of ``nest``."""
    layers = nested.pop("layers")
    forms = jax.eval_shape(functools.partial(init_layers, config=config), jax.random.key(0))
    return tuple(_filled(form, layers[index]) for index, form in enumerate(forms))


def _filled(form: Any, fields: dict) -> Any:
    """Return a pytree of weights like ``form``, with the arrays of nested ``fields``."""
    return type(form)(
        **{
            name: _filled(vars(form)[name], value) if isinstance(value, dict) else value
            for name, value in (dict.fromkeys(vars(form)) | fields).items()
        }
    )


def assemble(config: DecoderConfig, entries: tuple[Entry, ...], arrays: list) -> DecoderParams:
    """Return the params of one array for each entry."""
    nested = nest(entries, arrays)
    if config.layer_inputs is not None:
        nested["layer_inputs"] = LayerInputsParams(**nested["layer_inputs"])
    return DecoderParams(layers=blocks(nested, config), **nested)
