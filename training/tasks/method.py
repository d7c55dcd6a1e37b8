"""The interface of a training method, and the options and helpers that methods share."""

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.heads import head_files
from jspec.checkpoints.heads.base import HeadConfig
from jspec.checkpoints.loading import LoadedModel
from jspec.core.types import Array, Drafter
from jspec.models.blocks.attention import Attention
from jspec.models.blocks.mlp import GatedMlp
from jspec.models.blocks.norms import RmsNorm
from jspec.models.blocks.rope import RopeConfig
from jspec.models.decoder import DecoderConfig, Layer
from training.data.packing import token_counts
from training.data.settings import Data, DataSettings
from training.export import check, layout_of
from training.losses.slots import SlotRecipe
from training.networks.forward import Frozen, head_of
from training.networks.target import check as check_model
from training.networks.target import split
from training.tasks.acceptance import AcceptanceSettings
from training.trainer import TrainerSettings
from training.trainer.task import Task
from training.util.digests import weights_digest
from training.util.errors import bad_option, check_each, check_least, refuse_idle
from training.util.stored_layers import config_record

Options = type["DistillSettings"]

# Most methods start from these options: AdamW with a cosine schedule and clipped norms.
HEADS = TrainerSettings(
    steps=20_000,
    batch=32,
    accumulate=1,
    learning_rate_floor=0.0,
    beta2=0.999,
    weight_decay=0.0,
    eval_every=1000,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Build:
    """A drafter ready to be trained."""

    task: Task  # the network and its loss
    frozen: Any  # weights that are not trained
    drafter: Drafter  # drafts while acceptance is measured
    identity: Mapping[str, Any]  # options that a resumed run must share
    export: Callable[[Any, Path], None]  # writes trained weights on the host into a folder
    # maps trained weights to the weights of target and drafter.
    weights_of: Callable[[Any], tuple[Any, Any]]
    data: Data | None = None  # replaces the data of the run, if given


@dataclasses.dataclass(frozen=True)
class Method:
    """A training method: a row of ``training.distill.METHODS``."""

    description: str  # first sentence of ``--help``
    settings: Options  # the options
    # prepares a run from its options, the target and the data; raises ValueError if they do not fit
    # each other, or a head to start from does not fit them.
    build: Callable[[Any, LoadedModel, Data], Build]
    # maps the command line to the defaults that depend on it, by field.
    defaults: Callable[[Sequence[str]], Mapping[str, Any]] = lambda argv: {}  # noqa: ARG005

    def options(self, argv: Sequence[str]) -> Options:
        """Return the dataclass of options with the defaults that ``argv`` decides."""
        kind = self.settings
        types = {field.name: field.type for field in dataclasses.fields(kind)}
        parts = [(name, types[name], value) for name, value in self.defaults(argv).items()]
        # tyro looks up the comments of the fields under these names.
        names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
        names["__doc__"] = kind.__doc__
        return dataclasses.make_dataclass(
            kind.__name__, parts, bases=(kind,), frozen=True, kw_only=True, namespace=names
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DistillSettings:
    """Options that all methods share."""

    target: str  # model to draft for: a directory in Hugging Face layout, or a hub id
    output: str  # folder of the run: checkpoints, logs, curves, and in export/ the trained drafter
    data: DataSettings
    acceptance: AcceptanceSettings = dataclasses.field(default_factory=AcceptanceSettings)
    trainer: TrainerSettings
    # dtype of the target's weights (auto: float32 on a CPU, else bfloat16)
    target_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    target_name: str = ""  # name of the target in the exported files (default: as --target)
    eval_windows: int = 32  # held-out windows of an evaluation
    # dtype of the exported weights
    export_dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    # only read the data, past the cache, and show what a run would learn from it; nothing is
    # trained or written
    dry_run: bool = False

    def __post_init__(self):
        usual = defaults_of(type(self))
        for part, names in self.idle().items():
            if not part:
                refuse_idle(self, usual, names)
            elif part in usual:
                refuse_idle(vars(self)[part], vars(usual[part]), names)
        check_least(self, 1, "eval_windows")
        apart = self.data.held_out_share or self.data.held_out_data or self.data.held_out_modules
        if self.measures and not apart:
            remedy = "no data is held out: give --held-out-share 0.02, or 0 to measure nothing"
            raise bad_option("acceptance_prompts", self.acceptance.acceptance_prompts, remedy)

    def idle(self) -> dict[str, dict[str, str]]:
        """Return options without effect by part ("" for none), each with the remedy."""
        return {"trainer": self.trainer.idle()}

    def check_models(self) -> DecoderConfig:
        """Return the sizes of the target; raise OptionError if a model cannot be trained so."""
        return check_model("target", self.target)

    @property
    def weights_dtype(self) -> str:
        """The dtype of the target's weights."""
        if self.target_dtype != "auto":
            return self.target_dtype
        return "float32" if jax.default_backend() == "cpu" else "bfloat16"

    @property
    def depth(self) -> int:
        """Tokens drafted while acceptance is measured; 1 if it is not."""
        return self.acceptance.num_speculative_tokens if self.measures else 1

    @property
    def measures(self) -> bool:
        """True if acceptance is measured."""
        return self.acceptance.acceptance_prompts > 0


@dataclasses.dataclass(frozen=True)
class ParallelSettings:
    """Training of a drafter that guesses several tokens in one pass."""

    # whether the drafter guesses several tokens in one pass; decides other defaults
    parallel: bool = False
    slots: SlotRecipe = dataclasses.field(default_factory=SlotRecipe)  # guesses that are trained
    # id of the masks, which texts must not hold (default: the last one that the data does not hold)
    mask_token: int = -1

    def check(self, depth: int) -> None:
        """Raise OptionError for combinations that cannot work.

        ``depth`` tokens are drafted while acceptance is measured.
        """
        check_each(self, ["mask_token"], lambda x: x >= -1, "it must be a token's id")
        if not self.parallel:
            remedy = "only drafters trained with --parallel have it"
            refuse_idle(self, {"mask_token": -1}, {"mask_token": remedy})
            usual = vars(SlotRecipe())
            refuse_idle(self.slots, usual, dict.fromkeys(usual, remedy))
        elif depth > self.slots.depths:
            remedy = f"no more than --depths {self.slots.depths} tokens are guessed in one pass"
            raise bad_option("num_speculative_tokens", depth, remedy)


def check_length(settings: DistillSettings, least: int, option: str) -> None:
    """Raise OptionError if no row of a window has labels for all its guesses.

    The furthest guess of the first row is about token ``least``, as ``option`` decides.
    """
    if settings.data.length < least:
        remedy = f"with {option} it must be at least {least}, to hold a label for every guess"
        raise bad_option("length", settings.data.length, remedy)


def check_heads(settings: DistillSettings, count: int) -> None:
    """Check the options of ``count`` fresh heads, one for each token, as ``check_length`` does."""
    if settings.depth > count:
        remedy = f"there are --num-heads {count}, one for each token"
        raise bad_option("num_speculative_tokens", settings.depth, remedy)
    check_length(settings, count + 1, f"--num-heads {count}")


def asks_for_parallel(argv: Sequence[str]) -> bool:
    """Return the value of --parallel, which decides the defaults of other options."""
    flags = [word for word in argv if word in ("--parallel", "--no-parallel")]
    return flags[-1:] == ["--parallel"]


def variant_of(argv: Sequence[str], variants: Sequence[str], default: str) -> str:
    """Return the value of --variant, which decides the defaults of other options."""
    for word, following in zip(argv, [*argv[1:], ""], strict=False):
        name, _, value = word.partition("=")
        if name == "--variant" and (value or following) in variants:
            return value or following
    return default


def defaults_of(kind: type) -> dict[str, Any]:
    """Return the defaults of a dataclass by field; fields without one are left out."""
    missing = dataclasses.MISSING
    return {
        field.name: field.default if field.default is not missing else field.default_factory()
        for field in dataclasses.fields(kind)
        if field.default is not missing or field.default_factory is not missing
    }


def head_build(
    settings: Any,
    target: LoadedModel,
    config: HeadConfig,
    start: Any,
    task: Callable[..., Task],
    drafter: Callable[..., Drafter],
    *,
    name: str = "head",
    identity: Mapping[str, Any] | None = None,
    vocabulary: Array | None = None,
    format: str | None = None,
    finished: Callable[[Any], Any] | None = None,
) -> Build:
    """Return the ``Build`` of a draft head with ``config``, and initial weights ``start`` or None.

    ``task`` maps the sizes of head and target, the recipe, ``compute`` and ``remat`` to the task.
    ``finished`` maps trained weights to those of the head; by default they get the ``vocabulary``.
    ``format`` is one of ``training.export``; None for the most widely read one. The identity of the
    run gets the recipe, and the head under ``name``.
    """
    target_name, trainer = settings.target_name or settings.target, settings.trainer
    sizes = split(target.config, trainer.tensor)
    made = task(config, sizes, settings.recipe, compute=trainer.compute, remat=trainer.remat)
    check(config, target.config, format, target_name)
    reduced = {} if vocabulary is None else {"draft_to_target": vocabulary}
    finished = finished or (lambda params: params.replace(**reduced))

    def export(params: Any, directory: Path) -> None:
        head_files.save_head(
            directory,
            config,
            finished(params),
            target.config,
            layout=layout_of(format, config),
            target_name=target_name,
            embedding=None if format == "eagle" else target.params.embedding,
            output=head_of(target.params),
            dtype=settings.export_dtype,
        )

    return Build(
        task=made,
        frozen=Frozen(target.params, start, vocabulary),
        drafter=drafter(config, target.target, num_speculative_tokens=settings.depth),
        identity=dataclasses.asdict(settings.recipe)
        | {name: described(config, start)}
        | dict(identity or {}),
        export=export,
        weights_of=lambda params: (target.params, finished(params)),
    )


def mask_token(token: int, data: Data, vocab_size: int) -> int:
    """Return ``token``, or for -1 the last token that no text holds."""
    if token >= vocab_size:
        raise bad_option("mask_token", token, f"the target has {vocab_size} tokens")
    if token >= 0:
        return token
    parts = [part for part in (data.train, data.held_out) if part is not None]
    counts = sum(token_counts(part, vocab_size, learned=False) for part in parts)
    unused = np.flatnonzero(counts == 0)
    if not unused.size:
        remedy = "the data holds every token of the target; name one that texts can do without"
        raise bad_option("mask_token", token, remedy)
    return int(unused[-1])


def draft_vocab(size: int, target: DecoderConfig) -> int:
    """Return the size of a head's vocabulary; 0 stands for all tokens of the target."""
    if size > target.vocab_size:
        raise bad_option("draft_vocab_size", size, f"the target has {target.vocab_size} tokens")
    return size or target.vocab_size


def capture_layers(
    chosen: tuple[int, ...], published: tuple[int, ...], num_layers: int, first: int
) -> tuple[int, ...]:
    """Return the hidden states that a head reads of a target with ``num_layers`` layers.

    Those of a target that is too shallow for the ``published`` ones are spread evenly. The files of
    the head can name hidden states from ``first`` on.

    Raises:
      OptionError: the target has no such hidden states.
    """
    fits = lambda layers: (
        first <= layers[0] and all(a < b for a, b in itertools.pairwise([*layers, num_layers]))
    )
    if chosen and not fits(chosen):
        remedy = f"they must ascend from {first} or more, below the target's {num_layers} layers"
        raise bad_option("capture_layers", chosen, remedy)
    if num_layers <= first:
        remedy = f"a target with {num_layers} layers has no hidden state to read; take a deeper one"
        raise bad_option("capture_layers", chosen, remedy)
    if chosen or fits(published):
        return chosen or published
    count = min(len(published), num_layers - first)
    lowest = max(first, 1 if num_layers > count else 0)  # 0 is the embedding
    ids = np.linspace(lowest, num_layers - 1, count) if count > 1 else [num_layers - 1]
    return tuple(round(i) for i in ids)


def plain_network(target: DecoderConfig, head: Any, layers: int, qk_norm: bool) -> DecoderConfig:
    """Return the sizes of a head's blocks, given its options; other sizes are the target's."""
    theirs, norm = target.layers[0], RmsNorm(target.norm.eps)
    layer = Layer(
        mixer=Attention(
            theirs.mixer.num_heads,
            theirs.mixer.num_kv_heads,
            theirs.mixer.head_dim,
            theirs.mixer.rope or RopeConfig(),
            qk_norm=norm if qk_norm else None,
        ),
        feed_forward=GatedMlp(head.intermediate_size or theirs.feed_forward.dense_size),
        norm=norm,
    )
    return dataclasses.replace(
        target,
        norm=norm,
        embedding_norm=None,
        embedding_scale=1.0,
        layer_inputs=None,
        vocab_size=draft_vocab(head.draft_vocab_size, target),
        layers=(layer,) * layers,
        tie_embeddings=False,
        activation_dtype="float32",
        cache_dtype="float32",
    )


def decided(head: Any, folder: str) -> dict[str, str]:
    """Return the options that have no effect if the option ``folder`` names a head."""
    others = [name for name in vars(head) if name != folder] if vars(head)[folder] else []
    return dict.fromkeys(others, f"leave it out: --{folder} decides it")


def frequent_tokens(data: Data, count: int, vocab_size: int) -> Array | None:
    """Return the ``count`` most frequent labels, ascending int32; None for all tokens."""
    if count == vocab_size:
        return None
    counts = token_counts(data.train, vocab_size)
    likeliest = np.argsort(-counts, kind="stable")[:count]
    return jnp.asarray(np.sort(likeliest), jnp.int32)


def in_float32(config: Any) -> Any:
    """Return the sizes of a head whose network runs in float32."""
    network = dataclasses.replace(config.network, activation_dtype="float32", cache_dtype="float32")
    return dataclasses.replace(config, network=network)


def float32(tree: Any) -> Any:
    """Return a float32 copy of weights: trained weights are donated, so they share no buffers."""
    return jax.tree.map(lambda x: jnp.array(x, jnp.float32), tree)


def described(config: Any, start: Any | None) -> str:
    """Return the sizes and a hash of the initial weights, which identify a run."""
    record = config_record(config)
    return record if start is None else f"{record} from {weights_digest(start)}"
