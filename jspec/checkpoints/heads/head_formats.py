"""The formats of draft heads: whose layout a file has, and how it becomes a config and weights."""

import dataclasses
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any, Literal

import jax.numpy as jnp
import numpy as np

from jspec.checkpoints import model_files
from jspec.checkpoints.heads import (
    arctic,
    dflash,
    eagle,
    hydra,
    medusa,
    mlp_speculator,
    mtp,
    vocabulary,
)
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.arctic import LstmSpeculatorConfig, LstmSpeculatorParams
from jspec.models.heads.dflash import DFlashConfig, DFlashParams
from jspec.models.heads.eagle import EagleConfig, EagleParams
from jspec.models.heads.hydra import HydraConfig, HydraParams
from jspec.models.heads.medusa import MedusaConfig, MedusaParams
from jspec.models.heads.mlp_speculator import MlpSpeculatorConfig, MlpSpeculatorParams
from jspec.models.heads.mtp import MtpConfig, MtpParams
from jspec.util.messages import printable

Kind = Literal["eagle", "eagle3", "medusa", "mlp_speculator", "hydra", "dflash", "dspark", "mtp"]
Layout = Literal[
    "eagle",
    "eagle3",
    "peagle",
    "speculators",
    "medusa",
    "medusa-vllm",
    "mlp_speculator",
    "arctic-rnn",
    "arctic-lstm",
    "hydra",
    "dflash",
    "dflash-speculators",
    "mimo",
    "deepseek",
]
HeadConfig = (
    EagleConfig
    | MedusaConfig
    | MlpSpeculatorConfig
    | LstmSpeculatorConfig
    | HydraConfig
    | DFlashConfig
    | MtpConfig
)
HeadParams = (
    EagleParams
    | MedusaParams
    | MlpSpeculatorParams
    | LstmSpeculatorParams
    | HydraParams
    | DFlashParams
    | MtpParams
)
Tensors = Mapping[str, np.ndarray]

# What trainers leave in the files and no head uses.
_TRAINING_ONLY = ("verifier_lm_head.weight", "verifier_norm.weight")


@dataclasses.dataclass(frozen=True)
class HeadFormat:
    """The layouts of one kind of config.

    Attributes:
      name: of such heads, in messages.
      module: says which tensors there are, and their names.
      layouts: that it can be written in, the most widely read one first.
    """

    name: str
    module: ModuleType
    layouts: tuple[Layout, ...]


FORMATS = {
    EagleConfig: HeadFormat("EAGLE", eagle, ("eagle", "eagle3", "peagle", "speculators")),
    MedusaConfig: HeadFormat("Medusa", medusa, ("medusa-vllm", "medusa")),
    MlpSpeculatorConfig: HeadFormat(
        "MLP speculator", mlp_speculator, ("mlp_speculator", "arctic-rnn")
    ),
    LstmSpeculatorConfig: HeadFormat("LSTM speculator", arctic, ("arctic-lstm",)),
    HydraConfig: HeadFormat("Hydra", hydra, ("hydra",)),
    DFlashConfig: HeadFormat("DFlash", dflash, ("dflash", "dflash-speculators")),
    MtpConfig: HeadFormat("MTP", mtp, ("mimo", "deepseek")),
}
# These layouts name the target.
NAMING_TARGETS = (
    "speculators",
    "medusa",
    "arctic-rnn",
    "arctic-lstm",
    "hydra",
    "dflash-speculators",
)
TORCH_FILES = {
    "medusa": "medusa_lm_head.pt",
    "hydra": "hydra_lm_head.pt",
}  # all others are safetensors


def recognise(directory: Any, raw: dict, tensors: Tensors) -> tuple[Kind, Layout]:
    """The method that drafts with such tensors, and their layout.

    Raises:
      ValueError: they are not a draft head's.
    """
    for kind, module in (
        ("medusa", medusa),
        ("mlp_speculator", arctic),
        ("mlp_speculator", mlp_speculator),
        ("hydra", hydra),
        ("mtp", mtp),
    ):
        layout = module.layout(tensors)
        if layout is not None:
            return kind, layout
    layout = dflash.layout(raw, tensors)
    if layout is not None:
        return dflash.kind(raw, tensors), layout
    layout = eagle.layout(raw, tensors)
    if layout is not None:
        return "eagle" if layout == "eagle" else "eagle3", layout
    if "layers.0.input_layernorm.weight" in tensors:
        raise ValueError(
            f"{directory} holds a whole language model, not a draft head; draft with it by method "
            "'draft_model'"
        )
    hydra.check_architecture(raw)
    some = ", ".join(map(printable, sorted(tensors)[:4]))
    raise ValueError(
        f"{directory} holds no draft head of a known kind (EAGLE-1, -2, -3, Medusa, Hydra, DFlash, "
        f"MLP or LSTM speculator, MTP): its tensors are {some}, …"
    )


def read(
    raw: dict,
    tensors: Tensors,
    target: DecoderConfig,
    layout: Layout,
    dtype: Any = None,
    embedding: Any = None,
) -> tuple[HeadConfig, HeadParams]:
    """The head of a config.json and its tensors; arguments as for ``head_files.load_head``.

    Raises:
      ValueError: a key is malformed or not supported, the head was made for another target, or
        tensors are missing, unexpected or misshapen.
    """
    return _READERS[layout](raw, tensors, target, layout, dtype, embedding)


def _read_eagle(raw, tensors, target, layout, dtype, embedding):
    del layout
    if eagle.MASK in tensors:  # [1, 1, n], [1, n] or [n]
        mask = tensors[eagle.MASK].reshape(1, 1, -1)
        tensors = {**tensors, eagle.MASK: mask}
    config = eagle.read(raw, tensors, target)
    if config.fc_bias and not np.any(tensors.get("fc.bias", True)):
        config = dataclasses.replace(config, fc_bias=False)  # as ``save_head`` writes it
        tensors = {name: tensor for name, tensor in tensors.items() if name != "fc.bias"}
    return _read_sharing(eagle, config, tensors, dtype, embedding)


def _read_dflash(raw, tensors, target, layout, dtype, embedding):
    del layout
    config = dflash.read(raw, tensors, target)
    return _read_sharing(dflash, config, tensors, dtype, embedding)


def _read_mtp(raw, tensors, target, layout, dtype, embedding):
    """Modules, in files of their own or among a target's."""
    del embedding
    config = mtp.read(raw, tensors, target, layout)
    tensors = mtp.own(config, tensors, layout)
    entries = mtp.table(config, layout)
    model_files.check_fit("the file", entries, tensors)
    dtype = model_files.known_dtype(dtype or tensors[entries[0].names[0]].dtype)
    arrays = [jnp.asarray(entry.join(tensors, dtype)) for entry in entries]
    network = model_files.with_precision(config.network, dtype)
    return dataclasses.replace(config, network=network), mtp.assemble(entries, arrays)


def _read_sharing(module, config, tensors, dtype, embedding):
    """Heads that may share the target's embedding, and know only some of its tokens."""
    entries = module.table(config)
    model_files.check_fit("the file", entries, tensors, ("d2t", "t2d", *_TRAINING_ONLY))
    ids = vocabulary.from_offsets(
        tensors.get("d2t"), tensors.get("t2d"), config.vocab_size, config.target_vocab_size
    )
    dtype = model_files.known_dtype(dtype or tensors["fc.weight"].dtype)
    if embedding is not None and config.separate_embedding:
        theirs = tensors["embed_tokens.weight"].astype(dtype)
        if config.hidden_size == config.target_hidden_size and np.array_equal(theirs, embedding):
            config = dataclasses.replace(config, separate_embedding=False)
            entries = module.table(config)
    config = dataclasses.replace(config, network=model_files.with_precision(config.network, dtype))
    arrays = [jnp.asarray(entry.join(tensors, dtype)) for entry in entries]
    ids = None if ids is None else jnp.asarray(ids)
    return config, module.assemble(entries, arrays, ids)


def _read_medusa(raw, tensors, target, layout, dtype, embedding):
    del embedding
    if layout == "medusa-vllm" and "lm_head.weight" in tensors:
        tensors = dict(tensors)
        tensors["lm_heads.0.weight"] = tensors.pop("lm_head.weight")
    config, ids = medusa.read(raw, tensors, target), None
    if layout == "medusa-vllm" and medusa.TOKEN_MAP in tensors and config.reduced:
        ids, order = vocabulary.from_ids(
            tensors[medusa.TOKEN_MAP], config.vocab_size, config.target_vocab_size
        )
        tensors = medusa.reorder(config, tensors, order)
    elif config.reduced:
        raise ValueError(
            f"truncated_vocab_size is {config.vocab_size} of {config.target_vocab_size}, but the "
            "file has no token_map to say which tokens those are"
        )
    entries = medusa.table(config, layout)
    model_files.check_fit("the file", entries, tensors, (medusa.TOKEN_MAP,))
    config, arrays = _open(config, entries, tensors, target, dtype)
    ids = None if ids is None else jnp.asarray(ids)
    return config, medusa.assemble(entries, arrays, ids)


def _read_stages(raw, tensors, target, layout, dtype, embedding):
    """Heads without an embedding or a vocabulary to share: their formats say all."""
    del embedding
    module = next(known.module for known in FORMATS.values() if layout in known.layouts)
    config = module.read(raw, tensors, target)
    tensors = _without_repeats(module.repeats(config), tensors)
    entries = module.table(config, layout)
    model_files.check_fit("the file", entries, tensors, getattr(module, "UNUSED", ()))
    config, arrays = _open(config, entries, tensors, target, dtype)
    return config, module.assemble(entries, arrays)


def _open(config, entries, tensors, target, dtype):
    """The config with the dtype to work in, and one array for each entry."""
    dtype = model_files.known_dtype(dtype or tensors[entries[0].names[0]].dtype)
    working = model_files.with_precision(target, dtype).activation_dtype
    arrays = [jnp.asarray(entry.join(tensors, dtype)) for entry in entries]
    if getattr(config, "network", None) is not None:
        network = model_files.with_precision(config.network, dtype)
        config = dataclasses.replace(config, network=network)
    return dataclasses.replace(config, activation_dtype=working), arrays


def _without_repeats(repeats: Mapping[str, str], tensors: Tensors) -> dict[str, np.ndarray]:
    """The tensors without the copies that tied weights leave in a file."""
    for name, first in repeats.items():
        if name in tensors and first in tensors and not _same(tensors[name], tensors[first]):
            raise ValueError(
                f"{name} differs from {first}, but config.json says that the two are tied"
            )
    return {name: tensor for name, tensor in tensors.items() if name not in repeats}


def _same(one: np.ndarray, other: np.ndarray) -> bool:
    return one.dtype == other.dtype and np.array_equal(one, other)


_READERS: dict[Layout, Callable] = {
    "eagle": _read_eagle,
    "eagle3": _read_eagle,
    "peagle": _read_eagle,
    "speculators": _read_eagle,
    "medusa": _read_medusa,
    "medusa-vllm": _read_medusa,
    "mlp_speculator": _read_stages,
    "arctic-rnn": _read_stages,
    "arctic-lstm": _read_stages,
    "hydra": _read_stages,
    "dflash": _read_dflash,
    "dflash-speculators": _read_dflash,
    "mimo": _read_mtp,
    "deepseek": _read_mtp,
}
