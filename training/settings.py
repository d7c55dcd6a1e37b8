"""Settings of a pre-training run, and the command line made from them."""

import argparse
import dataclasses
from collections.abc import Sequence
from pathlib import Path

from jspec.models.decoder import DecoderConfig
from training.objective import DISTANCES, LINEARS
from training.optim import OPTIMIZERS, SCHEDULES


def _option(default, text: str, choices: Sequence[str] = ()):
    return dataclasses.field(default=default, metadata={"help": text, "choices": tuple(choices)})


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run. Every field is an option of the command line: ``--hidden-size 256``.

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    out: str = _option("", "folder of the run: checkpoints, log, and the exported model")
    data: tuple[str, ...] = _option((), "sources: stdlib, package:NAME, a path or a glob")
    holdout: tuple[str, ...] = _option((), "top-level modules kept out of training")
    package_paths: tuple[str, ...] = _option((), "more folders in which package:NAME is searched")
    source_megabytes: float = _option(0.0, "most text taken from one source (0: all)")
    corpus: str = _option("", "folder of the tokenised data (default: OUT/corpus)")
    vocab_size: int = _option(4096, "tokens of the tokenizer")
    hidden_size: int = _option(256, "width of the residual stream")
    intermediate_size: int = _option(704, "width of the feed-forward")
    layers: int = _option(8, "blocks")
    heads: int = _option(4, "query heads")
    kv_heads: int = _option(2, "key and value heads")
    head_dim: int = _option(64, "width of a head")
    max_positions: int = _option(1024, "longest sequence that the exported model promises")
    length: int = _option(512, "tokens of a training window")
    context: int = _option(0, "tokens that attention sees in training: windows are cut to it "
                           "(0: whole windows); may grow when a run is resumed")  # fmt: skip
    batch: int = _option(16, "windows of one step")
    accumulate: int = _option(4, "parts in which a step's windows are computed, to save memory")
    steps: int = _option(2000, "optimiser steps in all")
    schedule: str = _option("cosine", "course of the learning rate", SCHEDULES)
    warmup: int = _option(50, "steps of rising learning rate")
    decay: int = _option(200, "steps of falling learning rate (wsd)")
    learning_rate: float = _option(3e-3, "peak learning rate")
    weight_decay: float = _option(0.1, "decay of the matrices inside the blocks")
    optimizer: str = _option("adamw", "muon: for the blocks' matrices, adamw for the rest",
                             OPTIMIZERS)  # fmt: skip
    compute: str = _option("bfloat16", "factors of every matmul; sums stay float32", LINEARS)
    teacher: str = _option("", "exported model to distil from (same tokenizer)")
    teacher_weight: float = _option(0.8, "share of the distance from the teacher in the loss")
    teacher_distance: str = _option("kl", "kl, or overlap: -log of the chance that speculative "
                                    "sampling accepts a token", DISTANCES)  # fmt: skip
    seed: int = _option(0, "of the first weights and the order of the data")
    eval_every: int = _option(100, "steps between held-out losses")
    eval_windows: int = _option(64, "windows of a held-out loss on the way (the last takes all)")
    save_minutes: float = _option(5.0, "minutes between checkpoints")
    export_dtype: str = _option("bfloat16", "of the exported weights", ("bfloat16", "float32"))

    def __post_init__(self):
        for field in dataclasses.fields(self):
            value, choices = getattr(self, field.name), field.metadata["choices"]
            if choices and value not in choices:
                raise _bad(field.name, value, f"choose one of {', '.join(choices)}")
            counts = field.name not in ("seed", "warmup", "decay", "context")
            if isinstance(value, int) and value < int(counts):
                raise _bad(field.name, value, f"it must be at least {int(counts)}")
        if not self.out:
            raise _bad("out", "", "name the folder of the run")
        if not self.data and not self.corpus:
            raise _bad("data", (), "name files, folders, stdlib or package:NAME")
        self._check_sizes()

    def _check_sizes(self):
        if self.vocab_size > 65536 or self.vocab_size < 257:
            raise _bad("vocab_size", self.vocab_size, "take 257 to 65536")
        if self.heads % self.kv_heads:
            raise _bad("kv_heads", self.kv_heads, f"it must divide --heads {self.heads}")
        if self.head_dim % 2:
            raise _bad("head_dim", self.head_dim, "it must be even (rotary positions)")
        if self.batch % self.accumulate:
            raise _bad("accumulate", self.accumulate, f"it must divide --batch {self.batch}")
        if self.context and self.length % self.context:
            raise _bad("context", self.context, f"it must divide --length {self.length}")
        if self.length > self.max_positions:
            raise _bad("length", self.length, f"at most --max-positions {self.max_positions}")
        if self.warmup + (self.decay if self.schedule == "wsd" else 0) > self.steps:
            raise _bad("steps", self.steps, "warm-up and decay do not fit; take more steps")
        if self.learning_rate <= 0:
            raise _bad("learning_rate", self.learning_rate, "it must be above 0")
        if not 0 <= self.teacher_weight <= 1:
            raise _bad("teacher_weight", self.teacher_weight, "take 0 to 1")

    @property
    def out_dir(self) -> Path:
        """Folder of the run."""
        return Path(self.out)

    @property
    def corpus_dir(self) -> Path:
        """Folder of the tokenised data."""
        return Path(self.corpus) if self.corpus else self.out_dir / "corpus"

    def model_config(self) -> DecoderConfig:
        """Sizes of the network: Llama's layout, tied embeddings."""
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_layers=self.layers,
            num_heads=self.heads,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            max_positions=self.max_positions,
            tie_embeddings=True,
        )


# What must be equal for a resumed run to continue the same run. `steps` and `decay` may change.
IDENTITY = (
    "vocab_size", "hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim",
    "length", "batch", "accumulate", "schedule", "warmup", "learning_rate", "weight_decay",
    "optimizer", "compute", "teacher_weight", "seed",
)  # fmt: skip


def check_resumable(now: Settings, before: dict) -> None:
    """Refuses to continue a run under settings that would make it another one.

    Raises:
      ValueError: naming every option that differs.
    """
    current = dataclasses.asdict(now)
    changed = [name for name in IDENTITY if current[name] != before[name]]
    if now.schedule == "cosine" and now.steps != before["steps"]:
        changed.append("steps")  # the whole cosine depends on it
    if changed:
        listed = ", ".join(
            f"--{name.replace('_', '-')} {current[name]!r} (was {before[name]!r})"
            for name in changed
        )
        raise ValueError(f"out {now.out!r} holds another run: {listed}; give a new --out")


def parse(argv: Sequence[str] | None = None) -> Settings:
    """Settings from a command line."""
    parser = argparse.ArgumentParser(
        prog="python -m training.pretrain",
        description="Trains a tokenizer and a small Llama-like language model; run it again with "
        "the same options to resume.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    for field in dataclasses.fields(Settings):
        many = isinstance(field.default, tuple)
        parser.add_argument(
            f"--{field.name.replace('_', '-')}", default=field.default,
            type=str if many else type(field.default), nargs="*" if many else None,
            choices=field.metadata["choices"] or None, help=field.metadata["help"],
        )  # fmt: skip
    given = vars(parser.parse_args(argv))
    return Settings(**{k: tuple(v) if isinstance(v, list) else v for k, v in given.items()})


def _bad(name: str, value, remedy: str) -> ValueError:
    return ValueError(f"--{name.replace('_', '-')} {value!r} does not work; {remedy}")
