"""The table of head formats. A new format is one file, with its ``FORMAT``, and its name here."""

from pathlib import Path

from jspec.checkpoints.heads import (
    arctic,
    dflash,
    dspark,
    eagle,
    hydra,
    medusa,
    mlp_speculator,
    mtp,
)
from jspec.checkpoints.heads.base import HeadConfig, HeadFormat, Tensors
from jspec.util.messages import printable

# In the order in which they are tried: each recognises less specific names than those before it.
_MODULES = (medusa, arctic, mlp_speculator, hydra, mtp, dspark, dflash, eagle)
FORMATS: tuple[HeadFormat, ...] = tuple(module.FORMAT for module in _MODULES)


def of(config: HeadConfig) -> HeadFormat:
    """Return the format of a head's config."""
    return next(format for format in FORMATS if format.owns(config))


def sniff(directory: Path, raw: dict, tensors: Tensors) -> tuple[HeadFormat, str, str]:
    """Return the format, the kind and the layout of a config.json and its tensors."""
    for format in FORMATS:
        match = format.sniff(raw, tensors)
        if match is not None:
            return format, *match
    packed = sorted(name for name in tensors if name.endswith((".weight_packed", ".qweight")))
    if packed and any(name.startswith("fc.") for name in tensors):
        raise ValueError(
            f"{directory} holds a draft head with packed weights ({printable(packed[0])}, …), "
            "which are not read for heads; take the head in bfloat16, in fp8 or in w8a8"
        )
    if "layers.0.input_layernorm.weight" in tensors:
        raise ValueError(
            f"{directory} holds a whole language model, not a draft head; draft with it by method "
            "'draft_model'"
        )
    hydra.check_architecture(raw)  # the tensors of the others have other names
    names = ", ".join(map(printable, sorted(tensors)[:4]))
    titles = ", ".join(format.title for format in FORMATS)
    raise ValueError(
        f"{directory} holds no draft head of a known kind ({titles}): its tensors are {names}, …"
    )
