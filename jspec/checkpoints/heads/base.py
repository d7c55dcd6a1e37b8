"""The declaration of a head format, and the steps of reading and writing that formats share."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np

from jspec.checkpoints import model_files
from jspec.checkpoints.families.names import Entry
from jspec.checkpoints.heads import vocabulary
from jspec.core.types import Array
from jspec.models.decoder import DecoderConfig

Tensors = Mapping[str, np.ndarray]

# Trainers leave these tensors in the files; no head reads them.
_TRAINING_ONLY = ("verifier_lm_head.weight", "verifier_norm.weight")


class HeadConfig(Protocol):
    """The fields that the configs of all heads have."""

    @property
    def capture_layers(self) -> tuple[int, ...]:
        """Indices of the target's hidden states that the head reads."""

    @property
    def target_vocab_size(self) -> int:
        """V of the target."""


def _no_extra(config: HeadConfig, params: Any, dtype: np.dtype) -> dict[str, np.ndarray]:
    del config, params, dtype
    return {}


@dataclasses.dataclass(frozen=True)
class Layout:
    """One way to write the heads of a format.

    Attributes:
      name: name of the layout in options and messages.
      table: returns the entries of a config, under the names in the file.
      describe: returns the config.json for (config, target, target_name). Raises ValueError if the
        layout cannot express the head.
      extra: returns the tensors beside the weights for (config, params, dtype).
      torch_file: file of torch that holds the tensors; None for safetensors.
      names_target: whether config.json names the target.
      holds_embedding: whether the file can hold the target's embedding for a head that shares it.
      holds_output: the same for the target's output matrix.
    """

    name: str
    table: Callable[[Any], tuple[Entry, ...]]
    describe: Callable[[Any, DecoderConfig, str], dict]
    extra: Callable[[Any, Any, np.dtype], dict[str, np.ndarray]] = _no_extra
    torch_file: str | None = None
    names_target: bool = False
    holds_embedding: bool = False
    holds_output: bool = False


@dataclasses.dataclass(frozen=True)
class HeadFormat:
    """The files of one kind of head; ``head_formats.FORMATS`` lists all formats.

    Attributes:
      title: name of such heads in messages.
      kinds: methods that draft with such heads.
      owns: returns whether a config is of this format.
      layouts: the ways to write it, the most widely read one first.
      sniff: returns the kind and layout of (config.json, tensors), or None for other heads.
      read: returns the config and params of (config.json, tensors, target, layout, dtype). Raises
        ValueError for malformed or unsupported keys, another target, or tensors that do not fit.
      default_layout: returns the layout of a config; None for the first of ``layouts``.
      missing: remedy in the message about a directory without such a head.
    """

    title: str
    kinds: tuple[str, ...]
    owns: Callable[[HeadConfig], bool]
    layouts: tuple[Layout, ...]
    sniff: Callable[[dict, Tensors], tuple[str, str] | None]
    read: Callable[[dict, Tensors, DecoderConfig, str, Any], tuple[HeadConfig, Any]]
    default_layout: Callable[[Any], str] | None = None
    missing: str = ""

    def layout(self, name: str | None, config: HeadConfig) -> Layout:
        """Return a layout by name, or the default one of ``config`` if that is None.

        Raises:
          ValueError: the format has no such layout.
        """
        if name is None:
            name = self.default_layout(config) if self.default_layout else self.layouts[0].name
        layouts = {layout.name: layout for layout in self.layouts}
        if name not in layouts:
            raise ValueError(
                f"layout={name!r} is none of {', '.join(sorted(layouts))}, the layouts of "
                f"{self.title} heads"
            )
        return layouts[name]


# Reading.


def join(
    entries: Sequence[Entry], tensors: Tensors, dtype: Any, ignored: tuple[str, ...] = ()
) -> tuple[np.dtype, list[Array]]:
    """Return the dtype of the weights and one array for each entry.

    Args:
      entries: the tensors that the head needs.
      tensors: the tensors of the file.
      dtype: None keeps that of the file.
      ignored: names that are neither needed nor unexpected.

    Raises:
      ValueError: the tensors do not fit the entries, or the dtype is not supported.
    """
    model_files.check_fit("the file", entries, tensors, ignored)
    dtype = model_files.known_dtype(dtype or tensors[entries[0].names[0]].dtype)
    return dtype, [jnp.asarray(entry.join(tensors, dtype)) for entry in entries]


def read_network_head(
    config: Any, entries: Sequence[Entry], tensors: Tensors, dtype: Any, assemble: Callable
) -> tuple[Any, Any]:
    """Return config and params of a head of decoder blocks, with ``d2t`` and ``t2d`` if any.

    Raises:
      ValueError: the tensors do not fit, or the two maps are malformed.
    """
    dtype, arrays = join(entries, tensors, dtype, ("d2t", "t2d", *_TRAINING_ONLY))
    ids = vocabulary.from_offsets(
        tensors.get("d2t"), tensors.get("t2d"), config.vocab_size, config.target_vocab_size
    )
    network = model_files.with_precision(config.network, dtype)
    ids = None if ids is None else jnp.asarray(ids)
    return dataclasses.replace(config, network=network), assemble(entries, arrays, ids)


def without_repeats(repeats: Mapping[str, str], tensors: Tensors) -> dict[str, np.ndarray]:
    """Drop the copies that tied weights leave in a file.

    Args:
      repeats: the name of every copy, and the name that it is a copy of.
      tensors: the tensors of the file.

    Raises:
      ValueError: a copy differs from its original.
    """
    for name, first in repeats.items():
        if name in tensors and first in tensors and not _same(tensors[name], tensors[first]):
            raise ValueError(
                f"{name} differs from {first}, but config.json says that the two are tied"
            )
    return {name: tensor for name, tensor in tensors.items() if name not in repeats}


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other)


def check_target(*sizes: tuple[str, int, int]) -> None:
    """Check (name, size that the head expects, size of the target).

    Raises:
      ValueError: two sizes differ.
    """
    wrong = [
        f"{name} of {expected} where the target has {size}"
        for name, expected, size in sizes
        if expected != size
    ]
    if wrong:
        raise ValueError(f"the head was made for another target: it expects {' and '.join(wrong)}")


def check_width(heads: str, width: tuple[int, ...], target: DecoderConfig) -> None:
    """Check the last axis of a weight against the target's hidden size.

    Raises:
      ValueError: they differ.
    """
    if width != (target.hidden_size,):
        raise ValueError(
            f"the {heads} were made for another target: they are {', '.join(map(str, width))} wide "
            f"where the target has {target.hidden_size}"
        )


def check_layers(layers: tuple[int, ...], num_layers: int) -> None:
    """Check the hidden states that a head reads.

    The last hidden state is excluded, because readers disagree whether it is normed.

    Raises:
      ValueError: they do not ascend, or lie outside of the target's layers.
    """
    ascending = all(a < b for a, b in itertools.pairwise(layers))
    if not ascending or not 0 <= layers[0] <= layers[-1] < num_layers:
        raise ValueError(
            f"the head reads hidden states {list(layers)}, which must ascend and lie below the "
            f"target's {num_layers} layers; state others, or use the head's target"
        )


# Writing.


def refuse(layout: str, features: Mapping[str, bool], remedy: str) -> None:
    """Check that a head has no feature that a layout cannot express.

    Raises:
      ValueError: it has some; the message names them.
    """
    present = [name for name, value in features.items() if value]
    if present:
        raise ValueError(f"layout={layout!r} cannot express {', '.join(present)}; {remedy}")


def split(entries: Sequence[Entry], params: Any, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return the tensors of a file by name."""
    return {
        name: piece
        for entry in entries
        for name, piece in zip(
            entry.names, entry.split(np.asarray(entry.pick(params)), dtype), strict=True
        )
    }


def copies(
    repeats: Mapping[str, str], entries: Sequence[Entry], params: Any, dtype: np.dtype
) -> dict[str, np.ndarray]:
    """Return the copies of tied weights that a file must hold; ``repeats`` as above."""
    firsts = set(repeats.values())
    originals = split([e for e in entries if firsts & set(e.names)], params, dtype)
    return {name: originals[first] for name, first in repeats.items()}


def vocabulary_maps(config: Any, params: Any, dtype: np.dtype) -> dict[str, np.ndarray]:
    """Return ``d2t`` and ``t2d`` of a reduced vocabulary, whatever the dtype of the weights."""
    del dtype
    if params.draft_to_target is None:
        return {}
    return {
        "d2t": vocabulary.to_offsets(params.draft_to_target),
        "t2d": vocabulary.to_mask(params.draft_to_target, config.target_vocab_size),
    }


def prefixed(entries: Sequence[Entry], prefix: str) -> tuple[Entry, ...]:
    """Return the entries with a prefix before every name."""
    return tuple(
        dataclasses.replace(entry, names=tuple(prefix + name for name in entry.names))
        for entry in entries
    )


def by_index(nested: Mapping[int, Any]) -> tuple:
    """Return the values of a dict in the order of their integer keys."""
    return tuple(nested[index] for index in sorted(nested))
