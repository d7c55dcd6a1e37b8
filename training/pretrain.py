"""Trains a tokenizer and a small Llama-like language model: ``python -m training.pretrain``.

Run the same command again to resume: weights, optimiser and place in the data come back exactly.
Nothing is lost by stopping it (Ctrl-C, SIGTERM). At the end ``OUT/export`` holds the model in
Hugging Face layout with a provenance file.
"""

import dataclasses
import json
import platform
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jspec.checkpoints import checkpoint
from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.decoder import DecoderConfig, DecoderParams
from training import data, objective, trainer
from training.batches import Batch
from training.data.tokenizer import END_OF_TEXT, save_tokenizer
from training.trainer import TrainerSettings, bad_option, refuse_idle


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Sizes of the network.

    Attributes:
      vocab_size: tokens of the tokenizer
      hidden_size: width of the residual stream
      intermediate_size: width of the feed-forward
      layers: blocks
      heads: query heads
      kv_heads: key and value heads
      head_dim: width of a head
      max_positions: longest sequence that the exported model promises
    """

    vocab_size: int = 4096
    hidden_size: int = 256
    intermediate_size: int = 704
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    max_positions: int = 1024

    def __post_init__(self):
        for name, value in dataclasses.asdict(self).items():
            if value < 1:
                raise bad_option(name, value, "it must be at least 1")
        if self.vocab_size > 65536 or self.vocab_size < 257:
            raise bad_option("vocab_size", self.vocab_size, "take 257 to 65536")
        if self.heads % self.kv_heads:
            raise bad_option("kv_heads", self.kv_heads, f"it must divide --heads {self.heads}")
        if self.head_dim % 2:
            raise bad_option("head_dim", self.head_dim, "it must be even (rotary positions)")

    def config(self) -> DecoderConfig:
        """Llama's layout, tied embeddings."""
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


@dataclasses.dataclass(frozen=True)
class CorpusSettings:
    """Text, and the windows that it is cut into.

    Attributes:
      data: sources: stdlib, package:NAME, a path or a glob
      holdout: top-level modules kept out of training
      package_paths: more folders in which package:NAME is searched
      source_megabytes: most text taken from one source (0: all)
      corpus: folder of the tokenised data (default: OUT/corpus)
      length: tokens of a training window
      context: tokens that attention sees in training: windows are cut to it (0: whole windows);
        may grow when a run is resumed
      eval_windows: windows of a held-out loss on the way (the last takes all)
    """

    data: tuple[str, ...] = ()
    holdout: tuple[str, ...] = ()
    package_paths: tuple[str, ...] = ()
    source_megabytes: float = 0.0
    corpus: str = ""
    length: int = 512
    context: int = 0
    eval_windows: int = 64

    def __post_init__(self):
        for name, least in (("length", 1), ("context", 0), ("eval_windows", 1)):
            if getattr(self, name) < least:
                raise bad_option(name, getattr(self, name), f"it must be at least {least}")
        if not self.data and not self.corpus:
            raise bad_option("data", (), "name files, folders, stdlib or package:NAME")
        if self.context and self.length % self.context:
            raise bad_option("context", self.context, f"it must divide --length {self.length}")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run; every field, and every field of its parts, is an option of the command line.

    Attributes:
      out: folder of the run: checkpoints, logs, curves, and the exported model
      export_dtype: of the exported weights

    Raises:
      ValueError: a value is out of range; the message names option, value and remedy.
    """

    text: CorpusSettings
    model: ModelSettings
    trainer: TrainerSettings
    out: str
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"

    def __post_init__(self):
        refuse_idle(self.trainer, TrainerSettings(), self.trainer.idle())
        longest = self.model.max_positions
        if self.text.length > longest:
            raise bad_option("length", self.text.length, f"at most --max-positions {longest}")
        if self.text.data and not self.text.holdout:
            remedy = "name a module (a file or folder at the top of --data) for the held-out loss"
            raise bad_option("holdout", (), remedy)

    @property
    def corpus_dir(self) -> Path:
        """Folder of the tokenised data."""
        return Path(self.text.corpus) if self.text.corpus else Path(self.out) / "corpus"


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A decoder that learns to predict tokens: a ``Task``.

    Attributes:
      config: sizes of the network.
      compute: factors of every matmul, as in ``TrainerSettings``.
      context: tokens that attention sees; 0 for whole windows.
      remat: as in ``TrainerSettings``.
    """

    config: DecoderConfig
    compute: str
    context: int = 0
    remat: bool = False

    def init(self, key: Array, frozen: Any) -> DecoderParams:
        """Random weights."""
        return decoder.init_params(key, self.config)

    def loss(
        self, params: DecoderParams, frozen: Any, batch: Batch, key: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Next-token loss in nats."""
        windows = cut(batch.tokens, self.context or batch.tokens.shape[1] - 1)
        return objective.next_token_loss(params, self.config, windows, self.compute, self.remat)


def cut(windows: Array, context: int) -> Array:
    """Windows [B, T + 1] cut into [B * T / context, context + 1]; the same inputs and targets."""
    inputs, targets = (part.reshape(-1, context) for part in (windows[:, :-1], windows[:, 1:]))
    return jnp.concatenate([inputs, targets[:, -1:]], axis=1)


def run(
    settings: Settings, argv: Sequence[str] = (), *, stop_after: int | None = None
) -> trainer.Result:
    """Prepares the data, trains to the end or to a signal, exports a finished run.

    Args:
      settings: of the run.
      argv: words of the command line, for the provenance.
      stop_after: most steps of this call.
    """
    trainer.start_processes(settings.trainer)
    task = LanguageModel(
        settings.model.config(),
        settings.trainer.compute,
        settings.text.context,
        settings.trainer.remat,
    )
    corpus = trainer.first_process_first(lambda: open_corpus(settings))
    rows, apart = (data.Windows(x, settings.text.length) for x in (corpus.train, corpus.holdout))
    mine = {"process_index": jax.process_index(), "process_count": jax.process_count()}
    part = settings.trainer.batch // settings.trainer.accumulate
    facts = trainer.provenance("training.pretrain", argv) | {"data": _describe(corpus)}
    with trainer.progress(settings.trainer.steps) as bar:
        result = trainer.train(
            task,
            (),
            data.batches(rows, batch=settings.trainer.batch, seed=settings.trainer.seed, **mine),
            settings.trainer,
            out=Path(settings.out),
            bar=bar,
            stop_after=stop_after,
            facts=facts,
            held_out=data.held_out(apart, batch=part, limit=settings.text.eval_windows, **mine),
            identity=_identity(settings, corpus),
            free={"context": settings.text.context},
        )
    if result.finished:
        whole = result.evaluate(data.held_out(apart, batch=part, **mine))
        tokens = result.step * settings.trainer.batch * settings.text.length
        _export(
            settings,
            trainer.gather(result.params),
            corpus,
            result.provenance | {"tokens_seen": tokens, "heldout": whole},
        )
    elif jax.process_index() == 0:
        print(f"stopped and saved at step {result.step}; run the same command to resume")
    return result


def open_corpus(settings: Settings) -> data.Corpus:
    """The run's tokenised data, built on first use.

    Raises:
      ValueError: the data cannot be read, or the corpus holds none or another vocabulary.
    """
    text = settings.text
    if not text.data:
        return _given_corpus(settings)
    return data.prepare(
        settings.corpus_dir,
        text.data,
        text.holdout,
        vocab_size=settings.model.vocab_size,
        package_paths=text.package_paths,
        source_megabytes=text.source_megabytes,
        max_length=settings.model.max_positions,
    )


def _given_corpus(settings: Settings) -> data.Corpus:
    folder, given = settings.corpus_dir, settings.text.corpus
    files = [folder / name for name in ("corpus.json", "train.bin", "holdout.bin")]
    if not all(file.is_file() and file.stat().st_size for file in files):
        raise bad_option("corpus", given, "it holds no corpus; name --data to build one there")
    corpus = data.open_corpus(folder)
    known, tokens = settings.model.vocab_size, corpus.tokenizer.get_vocab_size()
    if tokens > known:
        remedy = f"the corpus {folder.name!r} has {tokens} tokens; take as many"
        raise bad_option("vocab_size", known, remedy)
    return corpus


def _identity(settings: Settings, corpus: data.Corpus) -> dict[str, Any]:
    return dataclasses.asdict(settings.model) | {
        "length": settings.text.length,
        "data": f"sha256 {corpus.description['train']['sha256'][:16]}",
    }


def _describe(corpus: data.Corpus) -> dict[str, Any]:
    """The data, without a path of the machine."""
    request = corpus.description["request"]
    sources = [
        f"Python {platform.python_version()} standard library" if source == "stdlib" else source
        for source in map(trainer.without_folders, request["sources"])
    ]
    return {"sources": sources, "heldout_modules": request["holdout"]} | {
        part: corpus.description[part]
        for part in ("left_out", "train", "holdout")
        if part in corpus.description
    }


def _export(settings: Settings, params: DecoderParams, corpus: data.Corpus, facts: dict) -> None:
    """Writes weights, tokenizer, generation defaults and provenance; the first process does."""
    if jax.process_index():
        return
    directory, config = Path(settings.out) / "export", settings.model.config()
    tokenizer = corpus.tokenizer
    ids = dict.fromkeys(("bos_token_id", "eos_token_id"), tokenizer.token_to_id(END_OF_TEXT))
    raw = checkpoint.hf_config(config) | ids
    checkpoint.save_pretrained(directory, config, params, raw, settings.export_dtype)
    save_tokenizer(tokenizer, directory, config.max_positions)
    defaults = json.dumps(ids | {"do_sample": False}, indent=2)
    (directory / "generation_config.json").write_text(defaults + "\n")
    trainer.write_provenance(directory, facts)


def main(argv: Sequence[str] | None = None) -> int:
    """The command; see ``trainer.run_command`` for its exit code."""
    return trainer.run_command(
        Settings,
        run,
        argv,
        module="training.pretrain",
        description="Trains a tokenizer and a small Llama-like language model; run it again with "
        "the same options to resume.",
    )


if __name__ == "__main__":
    sys.exit(main())
