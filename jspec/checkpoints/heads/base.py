"""The declaration of a head format, and the steps of reading and writing that formats share."""

import dataclasses
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.families.names import Entry, as_stored, matrix, nest
from jspec.checkpoints.files import model_files
from jspec.checkpoints.heads import vocabulary
from jspec.checkpoints.quantised import formats, reading
from jspec.checkpoints.quantised.stored import StoredTensor
from jspec.models.decoder import DecoderConfig
from jspec.sharding.placement import Placements

Tensors = Mapping[str, np.ndarray]
Sniff = Callable[[dict, Tensors], tuple[str, str] | None]
PlacementsOf = Callable[[Any], Placements | None]  # by the config of a head
Reduce = Callable[[Any, Tensors, Tensors], tuple[Tensors, np.ndarray | None]]

_BESIDE = ("d2t", "t2d", "verifier_lm_head.weight", "verifier_norm.weight")


class HeadConfig(Protocol):
    """The fields that the configs of all heads have."""

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Indices of the target's hidden states that the head reads."""

    @property
    def target_vocab_size(self) -> int:
        """V of the target."""


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to write the heads of a format.

    Attributes:
      name: name of the layout in options and messages.
      table: returns the entries of a config.
      describe: returns the config.json for (config, target, target_name).
      extra: returns the tensors beside the weights for (config, params, dtype).
      rename: returns the name in the file of a name in ``table``.
      torch_file: file of torch that holds the tensors; None for safetensors.
      names_target: whether config.json names the target.
      holds_embedding: whether the file can hold the target's embedding for a head that shares it.
      holds_output: the same for the target's output matrix.
    """

    name: str
    table: Callable[[Any], tuple[Entry, ...]]
    describe: Callable[[Any, DecoderConfig, str], dict]
    extra: Callable[[Any, Any, np.dtype], dict[str, np.ndarray]] = lambda *_: {}
    rename: Callable[[str], str] = str
    torch_file: str | None = None
    names_target: bool = False
    holds_embedding: bool = False
    holds_output: bool = False

    def entries(self, config: HeadConfig) -> tuple[Entry, ...]:
        """Return the entries of a config under the names in the file."""
        return tuple(
            dataclasses.replace(entry, names=tuple(map(self.rename, entry.names)))
            for entry in self.table(config)
        )


def _refuse_target(_: dict) -> DecoderConfig:
    raise ValueError("config.json does not say all of its target; pass its target_config")


@dataclasses.dataclass(frozen=True)
class HeadFormat:
    """The files of one kind of head; ``head_formats.FORMATS`` lists all formats.

    Attributes:
      title: name of such heads in messages.
      kinds: methods that draft with such heads.
      owns: returns whether a config is of this format.
      layouts: the ways to write it, the most widely read one first.
      sniff: returns the kind and layout of (config.json, tensors), or None for other heads.
      read_config: returns the config of (config.json, tensors, target, layout).
      assemble: returns the params of a config, of its nested arrays and ``draft_to_target``.
      select: returns the tensors of (config.json, tensors, config) that the table names.
      reduce: returns the weights in the order of the draft's ids, and ``draft_to_target`` or None,
        of (config, tensors, selected tensors), which fit.
      read_target: returns the target that config.json describes, for heads in its files.
      default_layout: returns the layout of a config; None for the first of ``layouts``.
      missing: remedy in the message about a directory without such a head.
    """

    title: str
    kinds: tuple[str, ...]
    owns: Callable[[HeadConfig], bool]
    layouts: tuple[Layout, ...]
    sniff: Sniff
    read_config: Callable[[dict, Tensors, DecoderConfig, str], Any]
    assemble: Callable[[Any, dict, Any], Any]
    select: Callable[[dict, Tensors, Any], Tensors]
    reduce: Reduce = lambda _config, _tensors, selected: (selected, None)
    read_target: Callable[[dict], DecoderConfig] = _refuse_target
    default_layout: Callable[[Any], str] | None = None
    missing: str = ""

    def layout(self, name: str | None, config: HeadConfig) -> Layout:
        """Return a layout by name, or the default one of ``config`` if that is None."""
        if name is None:
            name = self.default_layout(config) if self.default_layout else self.layouts[0].name
        layouts = {layout.name: layout for layout in self.layouts}
        if name not in layouts:
            raise ValueError(
                f"layout={name!r} is none of {', '.join(sorted(layouts))}, the layouts of "
                f"{self.title} heads"
            )
        return layouts[name]

    def read(
        self,
        raw: dict,
        tensors: Tensors,
        target: DecoderConfig,
        layout: str,
        dtype: Any,
        placements: PlacementsOf | None = None,
    ) -> tuple[Any, Any]:
        """Return the config and the params of a head; None as dtype keeps that of the file.

        Tensors that ``raw`` has a format for stay quantised. ``placements`` returns those of its
        arrays; None for one device.
        """
        config = self.read_config(raw, tensors, target, layout)
        of_arrays = placements and placements(config)
        selected = self.select(raw, tensors, config)
        entries = as_stored(self.layout(layout, config).table(config), selected)
        selected = formats.opened(formats.of(raw), entries, selected, "the file")
        model_files.check_fit("the file", entries, selected)
        selected, draft_to_target = self.reduce(config, tensors, selected)
        stored = (selected[name] for entry in entries for name in entry.names)
        floats = (x.dtype for x in stored if not isinstance(x, StoredTensor))
        dtype = model_files.known_dtype(dtype or next(floats))
        arrays = []
        for entry in entries:
            placement = of_arrays and of_arrays(entry.path)
            if placement is None and not reading.is_quantised(entry, selected):
                arrays.append(jnp.asarray(entry.join(selected, dtype)))
            else:
                arrays.append(reading.read(entry, selected, dtype, placement))
        ids = draft_to_target
        if ids is not None:
            ids = of_arrays(("draft_to_target",)).put(ids) if of_arrays else jnp.asarray(ids)
        return _with_precision(config, dtype), self.assemble(config, nest(entries, arrays), ids)


def _with_precision(config: Any, dtype: np.dtype) -> Any:
    changes: dict[str, Any] = {}
    if vars(config).get("network") is not None:
        changes["network"] = model_files.with_precision(config.network, dtype)
    if "activation_dtype" in vars(config):
        changes["activation_dtype"] = model_files.working_dtype(dtype)
    return dataclasses.replace(config, **changes)


def by_names(kind: str, patterns: Mapping[str, re.Pattern]) -> Sniff:
    """Return a ``sniff`` that recognises the layout by a pattern of the name of one tensor."""

    def sniff(_: dict, tensors: Tensors) -> tuple[str, str] | None:
        layouts = (name for name, x in patterns.items() if any(map(x.fullmatch, tensors)))
        layout = next(layouts, None)
        return layout and (kind, layout)

    return sniff


def select_weights(_raw: dict, tensors: Tensors, _config: Any) -> dict[str, np.ndarray]:
    """Drop ``d2t``, ``t2d`` and the target's tensors that trainers leave in the file."""
    return {name: tensor for name, tensor in tensors.items() if name not in _BESIDE}


def reduce_by_offsets(
    config: Any, tensors: Tensors, selected: Tensors
) -> tuple[Tensors, np.ndarray | None]:
    """Return the weights unchanged, and ``draft_to_target`` from ``d2t`` and ``t2d``."""
    return selected, vocabulary.from_offsets(
        tensors.get("d2t"), tensors.get("t2d"), config.vocab_size, config.target_vocab_size
    )


def without_repeats(repeats: Mapping[str, str], tensors: Tensors) -> dict[str, np.ndarray]:
    """Drop the copies that tied weights leave; ``repeats`` maps the copies to their originals.

    A copy without its original stays.
    """
    copies = [name for name, first in repeats.items() if {name, first} <= tensors.keys()]
    for name in copies:
        copy, first = tensors[name], tensors[repeats[name]]
        if copy.dtype != first.dtype or not np.array_equal(copy, first):
            raise ValueError(
                f"{name} differs from {repeats[name]}, but config.json says that the two are tied"
            )
    return {name: tensor for name, tensor in tensors.items() if name not in copies}


def check_target(*sizes: tuple[str, int, int]) -> None:
    """Raise ValueError if sizes differ: (name, size that the head expects, size of the target)."""
    names = {name: (head, size) for name, head, size in sizes if head != size}
    wrong = [f"{name} of {head} where the target has {x}" for name, (head, x) in names.items()]
    if wrong:
        raise ValueError(f"the head was made for another target: it expects {' and '.join(wrong)}")


def check_width(heads: str, width: tuple[int, ...], target: DecoderConfig) -> None:
    """Raise ValueError if the last axis of a weight is not the target's hidden size."""
    if width != (target.hidden_size,):
        raise ValueError(
            f"the {heads} were made for another target: they are {', '.join(map(str, width))} wide "
            f"where the target has {target.hidden_size}"
        )


def check_layers(layers: tuple[int, ...], num_layers: int, key: str = "") -> None:
    """Raise ValueError if hidden states do not ascend or lie outside of the target's layers.

    The error names the ``key`` of config.json that states them.
    The last hidden state is excluded, because readers disagree whether it is normed.
    """
    ascending = all(a < b for a, b in itertools.pairwise(layers))
    if not ascending or not 0 <= layers[0] <= layers[-1] < num_layers:
        where = f" in {key}" if key else ""
        raise ValueError(
            f"the head reads hidden states {list(layers)}, which must ascend and lie below the "
            f"target's {num_layers} layers; state others{where}, or use the head's target"
        )


def separate(tensors: Tensors) -> dict[str, bool]:
    """Return the fields of a config that say what a file holds beside the head's own blocks."""
    return {
        "separate_embedding": "embed_tokens.weight" in tensors,
        "separate_head": "lm_head.weight" in tensors,
    }


def separate_entries(config: Any) -> list[Entry]:
    """Return the entries of the output matrix and the embedding that a head does not share."""
    hidden, entries = config.hidden_size, []
    if config.separate_head:
        entries.append(matrix(("head",), "lm_head.weight", config.vocab_size, hidden))
    if config.separate_embedding:
        shape = (config.target_vocab_size, hidden)
        entries.append(Entry(("embedding",), ("embed_tokens.weight",), (shape,)))
    return entries


def refuse(layout: str, features: Mapping[str, bool], remedy: str) -> None:
    """Raise ValueError if a head has features that a layout cannot express."""
    present = [name for name, value in features.items() if value]
    if present:
        raise ValueError(f"layout={layout!r} cannot express {', '.join(present)}; {remedy}")


def split(entries: Sequence[Entry], params: Any, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return the tensors of a file by name."""
    tensors: dict[str, np.ndarray] = {}
    for entry in entries:
        tensors |= zip(entry.names, entry.split(np.asarray(entry.pick(params)), dtype), strict=True)
    return tensors


def copies(
    repeats: Mapping[str, str], entries: Sequence[Entry], params: Any, dtype: np.dtype
) -> dict[str, np.ndarray]:
    """Return the copies of tied weights that a file must hold; ``repeats`` as above."""
    originals = split([e for e in entries if {*repeats.values()} & {*e.names}], params, dtype)
    return {name: originals[first] for name, first in repeats.items()}


def vocabulary_maps(config: Any, params: Any, _: np.dtype) -> dict[str, np.ndarray]:
    """Return ``d2t`` and ``t2d`` of a reduced vocabulary, whatever the dtype of the weights."""
    if params.draft_to_target is None:
        return {}
    offsets, mask = vocabulary.to_offsets(params.draft_to_target, config.target_vocab_size)
    return {"d2t": offsets, "t2d": mask}


def by_index(nested: Mapping[int, Any]) -> tuple:
    """Return the values of a dict in the order of their integer keys."""
    return tuple(nested[index] for index in sorted(nested))
