"""Training of a tokenizer and a small Llama-like model: ``python -m training.pretrain``.

Stop it at any time (Ctrl-C, SIGTERM) and run the same command again to resume: weights, optimiser
and position in the data are restored exactly. At the end ``OUT/export`` holds the model in Hugging
Face layout with a provenance file.
"""

import dataclasses
import functools
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp

from jspec.checkpoints import checkpoint
from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.blocks.attention import Attention
from jspec.models.blocks.mlp import GatedMlp
from jspec.models.decoder import DecoderConfig, DecoderParams, Layer
from training import data, trainer
from training.data.batch import Batch
from training.data.tokenizer import END_OF_TEXT, save_tokenizer
from training.losses.chunks import next_token_loss
from training.networks.forward import head_of, hidden_states
from training.networks.linear import LINEARS
from training.trainer import TrainerSettings
from training.util.command import end, run_command
from training.util.errors import bad_option, check_each, check_least, refuse_idle
from training.util.provenance import provenance, without_folders, write_provenance


@dataclasses.dataclass(frozen=True)
class ModelSettings:
    """Sizes of the network."""

    vocab_size: int = 4096  # tokens of the tokenizer
    hidden_size: int = 256  # width of the residual stream
    intermediate_size: int = 704  # width of the feed-forward
    layers: int = 8  # blocks
    heads: int = 4  # query heads
    kv_heads: int = 2  # key and value heads
    head_dim: int = 64  # width of a head
    max_positions: int = 1024  # longest sequence that the exported model promises

    def __post_init__(self):
        check_least(self, 1, *vars(self))
        check_each(self, ["vocab_size"], lambda x: 257 <= x <= 65536, "take 257 to 65536")
        if self.heads % self.kv_heads:
            raise bad_option("kv_heads", self.kv_heads, f"it must divide --heads {self.heads}")
        remedy = "it must be even (rotary positions)"
        check_each(self, ["head_dim"], lambda x: x % 2 == 0, remedy)

    def config(self) -> DecoderConfig:
        """Return the sizes of a Llama with tied embeddings."""
        mixer = Attention(self.heads, self.kv_heads, self.head_dim)
        layer = Layer(mixer, GatedMlp(self.intermediate_size))
        return DecoderConfig(
            vocab_size=self.vocab_size,
            hidden_size=self.hidden_size,
            layers=(layer,) * self.layers,
            max_positions=self.max_positions,
            tie_embeddings=True,
        )


@dataclasses.dataclass(frozen=True)
class CorpusSettings:
    """Text and its windows."""

    data: tuple[str, ...] = ()  # sources: stdlib, package:NAME, a path or a glob
    holdout: tuple[str, ...] = ()  # top-level modules held out of training
    package_paths: tuple[str, ...] = ()  # more folders in which package:NAME is searched
    source_megabytes: float = 0.0  # maximum text of one source (0: all)
    corpus: str = ""  # folder of the tokenised data (default: OUT/corpus)
    length: int = 512  # tokens of a training window
    # tokens that attention sees in training: windows are cut to it (0: whole windows); may grow
    # when a run is resumed
    context: int = 0
    eval_windows: int = 64  # windows of a held-out loss during training (the last one takes all)

    def __post_init__(self):
        check_least(self, 1, "length", "eval_windows")
        check_least(self, 0, "context")
        if not self.data and not self.corpus:
            raise bad_option("data", (), "name files, folders, stdlib or package:NAME")
        if self.context and self.length % self.context:
            raise bad_option("context", self.context, f"it must divide --length {self.length}")


@dataclasses.dataclass(frozen=True)
class Settings:
    """One run; every field, and every field of its parts, is an option of the command line."""

    text: CorpusSettings
    model: ModelSettings
    trainer: TrainerSettings
    out: str  # folder of the run: checkpoints, logs, curves, and the exported model
    export_dtype: Literal["bfloat16", "float32"] = "bfloat16"  # dtype of the exported weights

    def __post_init__(self):
        refuse_idle(self.trainer, vars(TrainerSettings()), self.trainer.idle())
        longest = self.model.max_positions
        if self.text.length > longest:
            raise bad_option("length", self.text.length, f"at most --max-positions {longest}")
        if self.text.data and not self.text.holdout:
            remedy = "name a module (a file or folder at the top of --data) for the held-out loss"
            raise bad_option("holdout", (), remedy)


@dataclasses.dataclass(frozen=True)
class LanguageModel:
    """A language model in training: a ``training.trainer.task.Task``."""

    config: DecoderConfig  # sizes of the network
    compute: str  # factors of every matmul, as in ``TrainerSettings``
    context: int = 0  # tokens that attention sees; 0 for whole windows
    remat: bool = False  # as in ``TrainerSettings``

    def init(self, key: Array, frozen: Any) -> DecoderParams:
        """Return random weights."""
        return decoder.init_params(key, self.config)

    def loss(
        self, params: DecoderParams, frozen: Any, batch: Batch, key: Array
    ) -> tuple[Array, dict[str, Array]]:
        """Return the next-token loss in nats."""
        windows = cut(batch.tokens, self.context or batch.tokens.shape[1] - 1)
        x = hidden_states(params, self.config, windows[:, :-1], self.compute, self.remat)
        loss = next_token_loss(x, head_of(params), windows[:, 1:], LINEARS[self.compute])
        return loss, {"loss": loss}


def cut(windows: Array, context: int) -> Array:
    """Cut windows [B, T + 1] into [B * T / context, context + 1], with the same labels."""
    inputs, targets = (part.reshape(-1, context) for part in (windows[:, :-1], windows[:, 1:]))
    return jnp.concatenate([inputs, targets[:, -1:]], axis=1)


def run(
    settings: Settings, argv: Sequence[str] = (), *, stop_after: int | None = None
) -> trainer.Result:
    """Prepare the data, train to the end or to a signal, and export a finished run.

    ``argv`` goes into the provenance; this call does at most ``stop_after`` steps.

    Raises:
      Stopped: a signal ended the run, which is saved.
    """
    trainer.start(settings.trainer)
    text, optimiser = settings.text, settings.trainer
    task = LanguageModel(settings.model.config(), optimiser.compute, text.context, optimiser.remat)
    corpus = trainer.first_process_first(lambda: open_corpus(settings))
    rows, apart = (data.Windows(x, text.length) for x in (corpus.train, corpus.holdout))
    part = optimiser.batch // optimiser.accumulate
    digest = corpus.description["train"]["sha256"][:16]
    with trainer.progress("training", optimiser.steps) as bar:
        result = trainer.train(
            task,
            (),
            data.batches(rows, batch=optimiser.batch, seed=optimiser.seed),
            optimiser,
            out=Path(settings.out),
            bar=bar,
            stop_after=stop_after,
            facts=provenance("training.pretrain", argv) | {"data": _describe(corpus)},
            held_out=data.held_out(apart, batch=part, limit=text.eval_windows),
            identity=dataclasses.asdict(settings.model)
            | {"length": text.length, "data": f"sha256 {digest}"},
            free={"context": text.context},
        )
    trainer.check_stopped(result)
    if result.finished:
        facts = result.provenance | {
            "tokens_seen": result.step * optimiser.batch * text.length,
            "heldout": result.evaluate(data.held_out(apart, batch=part)),
        }
        _export(settings, trainer.gather(result.params), corpus, facts)
    return result


def open_corpus(settings: Settings) -> data.Corpus:
    """Return the run's tokenised data, built at first use.

    Raises:
      ValueError: the data cannot be read, or the corpus holds none or another vocabulary.
    """
    text = settings.text
    folder = Path(text.corpus) if text.corpus else Path(settings.out) / "corpus"
    if text.data:
        return data.prepare(
            folder,
            text.data,
            text.holdout,
            vocab_size=settings.model.vocab_size,
            package_paths=text.package_paths,
            source_megabytes=text.source_megabytes,
            max_length=settings.model.max_positions,
        )
    files = [folder / name for name in ("corpus.json", "train.bin", "holdout.bin")]
    if not all(file.is_file() and file.stat().st_size for file in files):
        remedy = "it holds no corpus; name --data to build one there"
        raise bad_option("corpus", text.corpus, remedy)
    corpus = data.open_corpus(folder)
    known, tokens = settings.model.vocab_size, corpus.tokenizer.get_vocab_size()
    if tokens > known:
        remedy = f"the corpus {folder.name!r} has {tokens} tokens; take as many"
        raise bad_option("vocab_size", known, remedy)
    return corpus


def _describe(corpus: data.Corpus) -> dict[str, Any]:
    """Return a description of the data without paths of the machine."""
    request = corpus.description["request"]
    sources = [
        f"Python {platform.python_version()} standard library" if source == "stdlib" else source
        for source in map(without_folders, request["sources"])
    ]
    return {"sources": sources, "heldout_modules": request["holdout"]} | {
        part: corpus.description[part]
        for part in ("left_out", "train", "holdout")
        if part in corpus.description
    }


def _export(settings: Settings, params: DecoderParams, corpus: data.Corpus, facts: dict) -> None:
    """Write weights, tokenizer, generation defaults and provenance, in the first process."""
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
    write_provenance(directory, facts)


main = functools.partial(
    run_command,
    Settings,
    run,
    module="training.pretrain",
    description="Train a tokenizer and a small Llama-like language model. Run it again with "
    "the same options to resume.",
)

if __name__ == "__main__":
    end(main())
