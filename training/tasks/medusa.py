"""The method ``medusa``: Medusa heads (arXiv 2401.10774), on a frozen target or together with it.

Head i reads the target's last hidden state h_j, after its norm, and predicts t_{j+2+i}. Medusa-1
leaves the target unchanged. Medusa-2 (``--joint``) trains it too, from heads of an earlier run
(``--heads RUN/export``), and exports both. Drafter: ``jspec.drafters.medusa``.
"""

import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
from flax import struct

from jspec.checkpoints import checkpoint, loading
from jspec.checkpoints.loading import LoadedModel
from jspec.core.types import Array
from jspec.drafters.medusa import Medusa
from jspec.models.decoder import DecoderConfig, DecoderParams
from jspec.models.heads import medusa
from jspec.models.heads.medusa import MedusaConfig, MedusaParams
from training import trainer
from training.data.batch import Batch
from training.data.settings import Data
from training.export import MedusaFormat
from training.losses import unrolled
from training.losses.chunks import next_token_loss
from training.losses.distances import GUESS_LOSSES, GuessLoss
from training.losses.guesses import judge
from training.networks.forward import Frozen, draft_output, head_of, packed_states
from training.networks.linear import LINEARS
from training.tasks import method
from training.trainer import TrainerSettings
from training.trainer.task import Metrics
from training.util.errors import bad_option, check_choice, check_least

# The authors' rate and schedule; the number of steps is ours.
_TRAINER = dataclasses.replace(method.HEADS, learning_rate=1e-3, warmup=2000)


@dataclasses.dataclass(frozen=True)
class MedusaRecipe:
    """Losses of the heads; the defaults are the paper's."""

    # labels (cross-entropy with the text, as published) or a distance from the target's
    # distribution
    medusa_loss: GuessLoss = "labels"
    head_decay: float = 0.8  # weight of a head's loss relative to the head before
    # weight of the heads' loss beside the target's own next-token loss (Medusa-2)
    heads_weight: float = 0.2

    def __post_init__(self):
        check_choice(self, "medusa_loss", GUESS_LOSSES)
        check_least(self, 0, "head_decay", "heads_weight")


@struct.dataclass
class JointParams:
    """Weights of Medusa-2; ``target`` is None while it stays frozen (Medusa-1)."""

    heads: MedusaParams
    target: DecoderParams | None = None


@dataclasses.dataclass(frozen=True)
class MedusaTask:
    """Medusa heads in training: a ``training.trainer.task.Task``."""

    heads: MedusaConfig  # sizes of the heads
    target: DecoderConfig  # sizes of the target
    recipe: MedusaRecipe  # losses
    joint: bool = False  # whether the target is trained too (Medusa-2)
    compute: str = "bfloat16"
    remat: bool = False

    def init(self, key: Array, frozen: Frozen) -> JointParams:
        """Return initial heads; fresh ones predict what the target's output matrix does."""
        heads = frozen.start
        if heads is None:
            outputs = (draft_output(frozen),) * self.heads.num_outputs
            heads = medusa.init_params(key, self.heads).replace(outputs=outputs)
        heads = method.float32(heads.replace(draft_to_target=None))
        return JointParams(heads, method.float32(frozen.target) if self.joint else None)

    def loss(
        self, params: JointParams, frozen: Frozen, batch: Batch, key: Array
    ) -> tuple[Array, Metrics]:
        """Return ``loss``, ``heads_loss``, ``accepted_i``, and ``next_token_loss`` if joint."""
        linear = LINEARS[self.compute]
        states = lambda weights: packed_states(
            weights, self.target, batch, self.compute, remat=self.remat
        )[1]
        normed = states(frozen.target if params.target is None else params.target)
        original = normed if params.target is None else states(frozen.target)
        rows, heads = normed[:, :-1].astype(jnp.float32), params.heads
        guesses = unrolled.align([medusa.stream(blocks, rows, linear) for blocks in heads.blocks])
        original, steps = jax.lax.stop_gradient(original), guesses.shape[2]
        means = judge(
            guesses,
            unrolled.rows_of(original, batch, steps, self.recipe.head_decay),
            heads.outputs,
            frozen=frozen,
            linear=linear,
            loss=self.recipe.medusa_loss,
        )
        means["heads_loss"] = heads_loss = means["loss"]
        if params.target is None:
            return heads_loss, means
        output, labels = head_of(params.target), batch.tokens[:, 1:]
        text = next_token_loss(normed[:, :-1], output, labels, linear, batch.label_weights)
        loss = text + self.recipe.heads_weight * heads_loss
        return loss, means | {"next_token_loss": text, "loss": loss}


@dataclasses.dataclass(frozen=True)
class HeadSettings:
    """The network of the heads."""

    num_heads: int = 5  # tokens guessed ahead, beside the target's own next one
    head_layers: int = 1  # residual blocks of each head
    draft_vocab_size: int = 0  # size of the heads' vocabulary, the data's most frequent (0: all)
    heads: str = ""  # folder of heads to start from, which then decide all of the above

    def __post_init__(self):
        check_least(self, 1, "num_heads", "head_layers")
        check_least(self, 0, "draft_vocab_size")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(method.DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line."""

    trainer: TrainerSettings = _TRAINER
    head: HeadSettings = dataclasses.field(default_factory=HeadSettings)
    recipe: MedusaRecipe = dataclasses.field(default_factory=MedusaRecipe)
    joint: bool = False  # whether the target is trained too (Medusa-2)
    # layout of the exported heads: medusa-vllm, or medusa (the authors')
    format: MedusaFormat = "medusa-vllm"

    def __post_init__(self):
        super().__post_init__()
        if self.joint and self.target_dtype == "bfloat16":
            raise bad_option("target_dtype", "bfloat16", "a target that is trained needs float32")
        if self.joint and self.trainer.tensor > 1:
            remedy = "it splits a frozen target, and --joint trains it; take --fsdp"
            raise bad_option("tensor", self.trainer.tensor, remedy)
        if self.format == "medusa" and self.head.draft_vocab_size:
            remedy = "the authors' layout has no reduced vocabulary; take --format medusa-vllm"
            raise bad_option("draft_vocab_size", self.head.draft_vocab_size, remedy)
        if not self.head.heads:
            method.check_heads(self, self.head.num_heads)

    @property
    def weights_dtype(self) -> str:
        """See ``DistillSettings``."""
        return "float32" if self.joint else super().weights_dtype

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        head, recipe = method.decided(self.head, "heads"), {}
        if not head and self.head.num_heads == 1:
            recipe["head_decay"] = "there is one head; leave it out"
        if not self.joint:
            recipe["heads_weight"] = "only --joint has another loss beside theirs; leave it out"
        return super().idle() | {"head": head, "recipe": recipe}


def _fresh_config(head: HeadSettings, target: DecoderConfig) -> MedusaConfig:
    return MedusaConfig(
        num_heads=head.num_heads,
        num_layers=head.head_layers,
        hidden_size=target.hidden_size,
        vocab_size=method.draft_vocab(head.draft_vocab_size, target),
        target_vocab_size=target.vocab_size,
        capture_layers=(target.num_layers,),
        num_outputs=head.num_heads,
    )


def build(settings: Settings, target: LoadedModel, data: Data) -> method.Build:
    """Prepare a run; see ``Method``."""
    sizes, folder, joint = target.config, settings.head.heads, settings.joint
    if folder:
        loaded = loading.load_head(folder, sizes, kind="medusa", dtype="float32")
        config, start, vocabulary = loaded.config, loaded.params, loaded.params.draft_to_target
        method.check_length(settings, config.num_heads + 1, f"--heads {folder}")
    else:
        config, start = _fresh_config(settings.head, sizes), None
        vocabulary = method.frequent_tokens(data, config.vocab_size, config.target_vocab_size)
    finished = lambda params: params.heads.replace(draft_to_target=vocabulary)
    heads = method.head_build(
        settings,
        target,
        config,
        start,
        functools.partial(MedusaTask, joint=joint),
        Medusa,
        name="heads",
        identity={"joint": joint},
        vocabulary=vocabulary,
        format=settings.format,
        finished=finished,
    )
    if not joint:
        return heads

    def export(params: JointParams, directory: Path) -> None:
        folder, dtype = directory / "target", settings.export_dtype
        heads.export(params, directory / "heads")
        checkpoint.save_pretrained(folder, sizes, params.target, target.raw_config, dtype)
        target.tokenizer.save_pretrained(folder)
        config = {"method": "medusa", "model": str(directory / "heads")}
        print(f"exported: LLM({str(folder)!r}, speculative_config={config})")

    return dataclasses.replace(
        heads,
        export=export,
        weights_of=lambda params: (trainer.gather(params.target), finished(params)),
    )


METHOD = method.Method("Train Medusa heads on a target.", Settings, build)
