"""Loaded models: network, weights, tokenizer and end-of-text tokens in one value."""

import copy
import dataclasses
import functools
import os
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints import checkpoint
from jspec.checkpoints.files import model_files
from jspec.checkpoints.heads import head_files, mask_token
from jspec.checkpoints.heads.base import PlacementsOf
from jspec.checkpoints.heads.head_files import LoadedHead
from jspec.core import trees
from jspec.core.types import Array
from jspec.core.weights import as_array
from jspec.models.decoder import Decoder, DecoderConfig, DecoderParams
from jspec.models.heads.network import SharingSizes
from jspec.util.messages import shown
from jspec.util.promotion import standard_promotion


@dataclasses.dataclass(frozen=True, eq=False)
class LoadedModel:
    """A model and its weights, made by ``load``; ``raw_config`` is its config.json."""

    path: str | os.PathLike  # its directory or hub id
    config: DecoderConfig
    params: DecoderParams = dataclasses.field(repr=False)
    raw_config: dict = dataclasses.field(repr=False)

    @property
    def target(self) -> Decoder:
        """The network as the ``Target`` of a ``Plan``."""
        return Decoder(self.config)

    @functools.cached_property
    def tokenizer(self) -> Any:
        """The tokenizer, read at first use; raises ValueError if there is none to read."""
        return checkpoint.load_tokenizer(self.path)

    @functools.cached_property
    def eos_token_ids(self) -> tuple[int, ...]:
        """The end-of-text ids of config.json and generation_config.json."""
        return checkpoint.eos_token_ids(self.path)

    def with_params(self, params: DecoderParams) -> "LoadedModel":
        """Return the model with other weights, and with the tokenizer if it was read."""
        model = copy.copy(self)
        object.__setattr__(model, "params", params)
        return model

    def logits(self, token_ids: Any) -> Array:
        """Return the logits of a plain forward pass, float32 [B, T, V], of token ids [B, T].

        Under ``jax.jit`` ids may be traced; then their values are not checked.

        Raises:
          ValueError: ``token_ids`` are not a [B, T] block of ids of the vocabulary, or too long.
        """
        traced = isinstance(token_ids, jax.core.Tracer)  # a tracer has no values
        tokens = token_ids if traced else np.asarray(token_ids)
        if tokens.ndim != 2 or 0 in tokens.shape or not np.issubdtype(tokens.dtype, np.integer):
            raise ValueError(
                f"token_ids must be whole numbers [B, T], got {tokens.dtype}{list(tokens.shape)}; "
                "score texts of different lengths one by one."
            )
        wrong = () if traced else tokens[(tokens < 0) | (tokens >= self.config.vocab_size)]
        if len(wrong):
            raise ValueError(
                f"token_ids hold {wrong[0]}, outside the vocabulary of {self.config.vocab_size}."
            )
        if tokens.shape[1] > self.config.max_positions:
            raise ValueError(
                f"token_ids are {tokens.shape[1]} long, but the model has "
                f"{self.config.max_positions} positions."
            )
        return _logits(self.target, self.params, jnp.asarray(tokens, jnp.int32))


@functools.partial(jax.jit, static_argnames="target")
@standard_promotion
def _logits(target: Decoder, params: DecoderParams, tokens: Array) -> Array:
    """Run a text as a chain of nodes after an empty prefix."""
    batch, length = tokens.shape
    tree = trees.from_parents(trees.chain(length - 1), length - 1)
    return target.forward(params, tokens, tree, target.init_cache(batch, 0)).logits


def load(
    model: str | os.PathLike | LoadedModel,
    dtype: str | None = None,
    sharding: checkpoint.Shardings | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """Load a checkpoint in the Hugging Face layout; return a loaded model as it is.

    Args:
      model: a local directory or a hub id.
      dtype: "float32", "bfloat16" or "float16"; None or "auto" for the checkpoint's own.
      sharding: as of ``checkpoint.load_pretrained``.
      quantization: "int8", "fp8" or "int4", of the matrices of layers; "gguf" or "w8a8", of files
        that are quantised so (docs/compatibility.md).

    Raises:
      ValueError: it cannot be read.
    """
    if isinstance(model, LoadedModel):
        _check_loaded(quantization)
        return model
    checkpoint.eos_token_ids(_path(model))  # raises before the weights are read, which takes long
    dtype = _chosen(dtype)
    return LoadedModel(model, *checkpoint.load_pretrained(model, dtype, sharding, quantization))


def _check_loaded(quantization: str | None) -> None:
    if quantization is not None:
        raise ValueError(
            f"quantization={shown(quantization)} is for models that are not loaded; give it to "
            "jspec.load."
        )


def check_files(model: str | os.PathLike | LoadedModel) -> None:
    """Raise ValueError if a local directory lacks files that its index names; this is quick."""
    if isinstance(model, str | os.PathLike) and os.path.isdir(model):
        model_files.check_complete(Path(model))


def outline(
    model: str | os.PathLike | LoadedModel,
    dtype: str | None = None,
    quantization: str | None = None,
) -> LoadedModel:
    """Return ``load`` with shapes and dtypes for weights, from a config.json alone."""
    if isinstance(model, LoadedModel):
        _check_loaded(quantization)
        return model
    return LoadedModel(model, *checkpoint.outline(_path(model), _chosen(dtype), quantization))


def _chosen(dtype: Any) -> Any:
    return None if isinstance(dtype, str) and dtype == "auto" else dtype


def load_head(
    head: str | os.PathLike | LoadedHead,
    target: DecoderConfig,
    *,
    kind: str | None = None,
    dtype: str | None = None,
    placements: PlacementsOf | None = None,
) -> LoadedHead:
    """Load a draft head for ``target``; return a loaded one as it is.

    ``kind`` is the required method, such as "eagle3"; None for any. ``placements`` returns those of
    its arrays by its config. A head that cannot be read, is of another method or was made for
    another target raises ValueError.
    """
    if not isinstance(head, LoadedHead):
        return head_files.load_head(
            _path(head), target, kind=kind, dtype=_chosen(dtype), placements=placements
        )
    if kind not in (None, head.kind):
        raise ValueError(
            f"the head is of method {head.kind!r}, not {kind!r}; ask for {head.kind!r}."
        )
    config = head.config
    width = config.target_hidden_size if isinstance(config, SharingSizes) else config.hidden_size
    fits = (config.target_vocab_size, width) == (target.vocab_size, target.hidden_size)
    if not fits or max(config.capture_layers) > target.num_layers:
        raise ValueError("the head was made for another target.")
    return head


def sharing(head: LoadedHead, embedding: Array) -> LoadedHead:
    """Drop the head's embedding if it equals the target's, to hold one copy in memory.

    It is taken to be equal to a shape without values.
    """
    if not (isinstance(head.config, SharingSizes) and head.config.separate_embedding):
        return head
    copy = head.params.embedding
    if copy.shape != embedding.shape:
        return head
    has_values = not isinstance(jax.tree.leaves(embedding)[0], jax.ShapeDtypeStruct)
    if has_values and not (copy == as_array(embedding)).all():
        return head
    config = dataclasses.replace(head.config, separate_embedding=False)
    return dataclasses.replace(head, config=config, params=head.params.replace(embedding=None))


def sizes(model: str | os.PathLike | LoadedModel) -> DecoderConfig:
    """Return the sizes of a model's network, without loading its weights."""
    if isinstance(model, LoadedModel):
        return model.config
    return checkpoint.load_config(_path(model))[0]


def mask_token_id(model: str | os.PathLike | LoadedModel) -> int | None:
    """Return the mask token of a parallel draft model, or None."""
    loaded = isinstance(model, LoadedModel)
    raw = model.raw_config if loaded else checkpoint.load_config(_path(model))[1]
    return mask_token.mask_token_id(raw, mask_token.SERVED)


def tokenizer_if_any(model: str | os.PathLike | LoadedModel) -> Any:
    """Return a model's tokenizer, or None if it has no readable one."""
    try:
        loaded = isinstance(model, LoadedModel)
        return model.tokenizer if loaded else checkpoint.load_tokenizer(model)
    except ValueError:
        return None


def text_ends(model: LoadedModel, tokenizer: Any = None) -> tuple[int, ...]:
    """Return the end-of-text ids of checkpoint and tokenizer (None: the model's), ascending."""
    tokenizer = tokenizer_if_any(model) if tokenizer is None else tokenizer
    of_tokenizer = None if tokenizer is None else tokenizer.eos_token_id
    return tuple(sorted({*model.eos_token_ids, of_tokenizer} - {None}))


def _path(model: Any) -> str | os.PathLike:
    if not isinstance(model, str | os.PathLike):
        raise ValueError(f"model={shown(model)} must be a local directory or an id on the hub.")
    return model
