"""Conversion of a draft head between layouts of files: ``python -m training.export``.

    python -m training.export --head DIR --target DIR --format speculators --output OTHER

The contents of the files identify the head. Weights keep their values, and their dtype unless
``--dtype`` sets another.
"""

import dataclasses
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import jax

from jspec.checkpoints import loading, stitching
from jspec.checkpoints.heads import head_files, head_formats
from jspec.checkpoints.heads.base import HeadConfig
from jspec.checkpoints.heads.head_files import LoadedHead
from jspec.core.types import Array
from jspec.models.decoder import DecoderConfig
from jspec.models.heads.dflash import DFlashConfig
from jspec.models.heads.eagle import EagleConfig
from jspec.models.heads.mtp import MtpConfig
from training.networks.forward import head_of
from training.util.command import end, run_command
from training.util.errors import bad_option

EagleFormat = Literal["eagle", "sglang", "speculators"]
MedusaFormat = Literal["medusa", "medusa-vllm"]
DFlashFormat = Literal["dflash", "dflash-speculators"]
MtpFormat = Literal["mimo", "deepseek", "stitched"]
OtherFormat = Literal["mlp_speculator", "arctic-rnn", "arctic-lstm", "hydra"]


@dataclasses.dataclass(frozen=True)
class Settings:
    """Options of the command."""

    head: str  # folder of a head, or its id on the hub
    target: str  # model that it drafts for: a directory in Hugging Face layout, or a hub id
    output: str  # folder of the exported head
    # EAGLE heads have eagle (the authors', which vLLM reads too), sglang (eagle with the target's
    # embedding) or speculators; Medusa heads medusa (the authors') or medusa-vllm; MLP speculators
    # mlp_speculator (IBM's) or arctic-rnn; LSTM speculators arctic-lstm; Hydra heads hydra; DFlash
    # and DSpark heads dflash (the authors') or dflash-speculators, which holds the target's
    # embedding and output matrix; MTP modules mimo or deepseek, names in a separate file, or
    # stitched, a copy of the target with the modules
    format: EagleFormat | MedusaFormat | DFlashFormat | MtpFormat | OtherFormat
    target_name: str = ""  # what the files call the target (default: as --target)
    # dtype of the exported weights (default: unchanged)
    dtype: Literal["", "bfloat16", "float32", "float16"] = ""


def check(config: HeadConfig, target: DecoderConfig, format: str | None, target_name: str) -> None:
    """Check before training that the head can be written in ``format``, as in ``Settings``.

    Raises:
      ValueError: the format cannot express the head.
    """
    if isinstance(config, EagleConfig) and format == "speculators":
        config = dataclasses.replace(config, separate_embedding=True)
    if isinstance(config, DFlashConfig) and format == "dflash-speculators":
        config = dataclasses.replace(config, separate_embedding=True, separate_head=True)
    layout = layout_of(format, config)
    head_files.describe_head(config, target, layout=layout, target_name=target_name)


def layout_of(format: str | None, config: HeadConfig) -> str | None:
    """Return the layout of ``head_files`` for a format; None for the most widely read one.

    Raises:
      ValueError: heads of this kind have no such format.
    """
    if format is None:
        return None
    eagle = isinstance(config, EagleConfig)
    head_format = head_formats.of(config)
    names = sorted(layout.name for layout in head_format.layouts)
    names = EagleFormat.__args__ if eagle else names
    if format not in names:
        kind = f"EAGLE-{config.generation}" if eagle else head_format.title
        raise bad_option("format", format, f"{kind} heads have {', '.join(names)}")
    if not eagle or format == "speculators":
        return format
    if config.mask_token_id is not None and format == "sglang":
        raise bad_option("format", format, "P-EAGLE heads have eagle and speculators")
    if config.mask_token_id is not None:
        return "peagle"
    norms = config.feature_norms, config.input_norm, config.norm_before_residual, config.norm_output
    if format == "sglang" and any(norms):
        raise bad_option("format", format, "heads with norms of their own have eagle, speculators")
    return "eagle" if config.generation == 1 else "eagle3"


def run(settings: Settings, _: Sequence[str] = ()) -> None:
    """Read the head and write it."""
    sizes = loading.sizes(settings.target)
    head = loading.load_head(settings.head, sizes)
    if settings.format == "stitched" and isinstance(head.config, MtpConfig):
        dtype = settings.dtype or None
        stitching.stitch(settings.output, settings.target, head.config, head.params, dtype=dtype)
        print(f"{settings.output}: {settings.target} with {head.config.n_predict} MTP modules")
        return
    name = settings.target_name or settings.target
    embedding = output = None
    if isinstance(head.config, DFlashConfig):
        target = loading.load(settings.target).params
        embedding, output = target.embedding, head_of(target)
        head = _sharing_output(loading.sharing(head, embedding), output)
    check(head.config, sizes, settings.format, name)
    if isinstance(head.config, EagleConfig) and settings.format != "eagle":
        embedding = loading.load(settings.target).params.embedding
    head_files.save_head(
        Path(settings.output),
        head.config,
        head.params,
        sizes,
        layout=layout_of(settings.format, head.config),
        target_name=name,
        embedding=embedding,
        output=output,
        dtype=settings.dtype or None,
    )
    count = sum(leaf.size for leaf in jax.tree.leaves(head.params))
    print(f"{settings.output}: {head.kind} head, {count:,} weights, format {settings.format}")


def _sharing_output(head: LoadedHead, output: Array) -> LoadedHead:
    """Drop the output matrix of a head if it equals the target's."""
    matrix = head.params.head
    if matrix is None or matrix.shape != output.shape or not (matrix == output).all():
        return head
    config = dataclasses.replace(head.config, separate_head=False)
    return dataclasses.replace(head, config=config, params=head.params.replace(head=None))


main = functools.partial(
    run_command,
    Settings,
    run,
    module="training.export",
    description="Write a draft head in another layout of files.",
)

if __name__ == "__main__":
    end(main())
