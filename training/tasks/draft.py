"""The method ``draft``: a small decoder learns the distribution of a larger one.

The draft model is a checkpoint with the target's vocabulary (``--draft DIR``), or starts as a few
layers of the target. It is trained on text, on answers of the target, or on its own continuations
(on-policy, arXiv 2310.08461), which the weights of the step sample inside the step. With
``--parallel`` it learns to guess several tokens in one pass (PARD). Drafters:
``jspec.drafters.draft_model.sequential`` and ``jspec.drafters.draft_model.parallel``.
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jspec.checkpoints import checkpoint, loading
from jspec.checkpoints.heads.mask_token import SERVED, mask_token_id
from jspec.checkpoints.loading import LoadedModel
from jspec.core import kv_cache, trees
from jspec.core.types import Array
from jspec.core.weights import as_arrays
from jspec.drafters.draft_model.parallel import ParallelDraftModel
from jspec.drafters.draft_model.sequential import DraftModel
from jspec.drafters.draft_model.vocabularies import check_same
from jspec.models import decoder
from jspec.models.blocks.delta_rule import DeltaRule
from jspec.models.decoder import DecoderConfig, DecoderParams
from training.data.batch import Batch
from training.data.settings import Data
from training.losses.chunks import take
from training.losses.distances import LOSSES, LossName
from training.losses.guesses import Rows, judge
from training.losses.slots import SlotRecipe, attend_to, choose
from training.networks.forward import Frozen, head_of, packed_states
from training.networks.linear import LINEARS
from training.networks.target import check, in_order, split
from training.tasks import method
from training.trainer import TrainerSettings
from training.trainer.task import Metrics
from training.util.errors import bad_option, check_choice, check_each, check_least, check_positive


@dataclasses.dataclass(frozen=True)
class DraftRecipe:
    """Losses and texts of a draft model."""

    loss: LossName = "kl"  # distance between the target's distribution and the draft's
    text_weight: float = 0.0  # share of the next-token loss in the objective
    on_policy: float = 0.0  # share of a batch's windows that the draft model continues by itself
    on_policy_prompt: int = 64  # tokens of such a window that stay
    on_policy_temperature: float = 1.0  # temperature of the continuations

    def values(self, log_p: Array, log_q: Array, x, states, labels: Array) -> dict[str, Array]:
        """Return the objective ``loss``, ``next_token_loss`` of the labels, and ``kl`` of rows."""
        text, distance = -take(log_q, labels), LOSSES[self.loss](log_p, log_q)
        loss = (1 - self.text_weight) * distance + self.text_weight * text
        return {"loss": loss, "next_token_loss": text, "kl": LOSSES["kl"](log_p, log_q)}

    def __post_init__(self):
        check_choice(self, "loss", LOSSES)
        check_each(self, ["text_weight", "on_policy"], lambda x: 0 <= x <= 1, "take 0 to 1")
        check_least(self, 1, "on_policy_prompt")
        check_positive(self, "on_policy_temperature")


@dataclasses.dataclass(frozen=True)
class DraftTask:
    """A draft model in training: a ``training.trainer.task.Task``."""

    draft: DecoderConfig  # sizes of the draft model
    # sizes of the target. If one vocabulary is padded, only the common part counts.
    target: DecoderConfig
    recipe: DraftRecipe  # losses and texts
    compute: str = "bfloat16"
    remat: bool = False

    def init(self, key: Array, frozen: Frozen) -> DecoderParams:
        """Return the initial weights."""
        return method.float32(frozen.start)

    def loss(
        self, params: DecoderParams, frozen: Frozen, batch: Batch, key: Array | None
    ) -> tuple[Array, Metrics]:
        """Return ``loss`` and, as ``Ratio``, ``next_token_loss``, ``kl`` and ``accepted``.

        ``next_token_loss`` is that of the text, including continuations; ``accepted`` is the
        probability that a drafted token is accepted. With several guesses a pass ``accepted_k`` is
        that of a guess at depth k.
        """
        batch = self._continued(params, batch, key)
        _, states = packed_states(frozen.target, self.target, batch, self.compute)
        x, rows = self._guesses(params, batch, states[:, :-1], key)
        means = judge(
            x[:, :, None],
            rows,
            (head_of(params),),
            frozen=frozen,
            linear=LINEARS[self.compute],
            loss=self.recipe.loss,
            values=self.recipe.values,
            vocab_size=min(self.draft.vocab_size, self.target.vocab_size),
        )
        return means["loss"], means

    def _guesses(
        self, params: DecoderParams, batch: Batch, states: Array, key: Array | None
    ) -> tuple[Array, Rows]:
        """Return normed last hidden states [B, R, D], and the target's R rows with ``states``."""
        _, x = packed_states(params, self.draft, batch, self.compute, remat=self.remat)
        weights = batch.label_weights[..., None]
        return x[:, :-1], Rows(states, batch.tokens[:, 1:], weights, None)

    def _continued(self, params: DecoderParams, batch: Batch, key: Array | None) -> Batch:
        """Return the batch; in training the draft model continues its first windows."""
        count = round(self.recipe.on_policy * len(batch.tokens))
        if key is None or not count:
            return batch
        length = min(self.recipe.on_policy_prompt, batch.tokens.shape[1] - 1)
        written = sample_continuations(
            params,
            self.draft,
            batch.tokens[:count, :length],
            batch.tokens.shape[1],
            key,
            self.recipe.on_policy_temperature,
            min(self.draft.vocab_size, self.target.vocab_size),
        )
        new = Batch(
            tokens=written,
            segments=jnp.ones_like(written),
            weights=jnp.broadcast_to(jnp.arange(written.shape[1]) >= length, written.shape) * 1.0,
        )
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b[count:]]), new, batch)


@dataclasses.dataclass(frozen=True)
class ParallelDraftTask(DraftTask):
    """A draft model that learns to guess K tokens in one pass: PARD (arXiv 2504.18583).

    Guess (a, k) is made by the k-th mask token behind the text's token a, or by that token itself
    for k = 0. It stands at position a + k and predicts token a + k + 1.
    """

    # number of tokens guessed in one pass, and which guesses are trained.
    slots: SlotRecipe = dataclasses.field(default_factory=SlotRecipe)
    mask_token_id: int = 0  # id of the masks

    def __post_init__(self):
        self.slots.check_windows(self.draft.windows)

    def _guesses(
        self, params: DecoderParams, batch: Batch, states: Array, key: Array | None
    ) -> tuple[Array, Rows]:
        length, segments = states.shape[1], batch.segments[:, :-1]
        slots = choose(self.slots, segments, batch.label_weights, length, 0, key)
        tokens = jnp.where(slots.depths > 0, self.mask_token_id, slots.of_anchors(batch.tokens))
        x, _ = decoder.trunk(
            params,
            self.draft,
            decoder.embed(params, self.draft, tokens),
            slots.of_anchors(batch.positions) + slots.depths,
            attend_to(slots, segments),
            linear=LINEARS[self.compute],
            remat=self.remat,
            tokens=tokens,
        )
        return self.draft.norm(x, params.norm), slots.rows_of(states, batch.tokens[:, 1:])


def sample_continuations(
    params: DecoderParams,
    config: DecoderConfig,
    prompts: Array,
    length: int,
    key: Array,
    temperature: float,
    vocab_size: int,
) -> Array:
    """Continue int32 prompts [B, P] to [B, length] with samples of the model; no gradient flows.

    Samples are among the first ``vocab_size`` tokens; the rest pads the vocabulary.
    """
    batch, prompt_length = prompts.shape
    params = jax.lax.stop_gradient(params)

    def feed(cache: kv_cache.KVCache, tokens: Array) -> tuple[kv_cache.KVCache, Array]:
        size = tokens.shape[1]
        tree = trees.from_parents(trees.chain(size - 1), size - 1)
        out = decoder.forward(params, config, tokens, tree, cache)
        count = jnp.full((batch,), size, jnp.int32)
        every = jnp.broadcast_to(jnp.arange(size), (batch, size))
        return kv_cache.append(cache, out.tree_kv, every, count), out.logits[:, -1]

    def step(carry, key):
        cache, logits = carry
        drawn = jax.random.categorical(key, logits[:, :vocab_size] / temperature)
        token = drawn.astype(jnp.int32)
        return feed(cache, token[:, None]), token

    start = feed(decoder.init_cache(config, batch, length), prompts)
    _, written = jax.lax.scan(step, start, jax.random.split(key, length - prompt_length))
    return jnp.concatenate([prompts, written.T], 1)


_TRAINER = dataclasses.replace(
    method.HEADS,
    learning_rate=3e-4,
    warmup=500,
    learning_rate_floor=0.1,
    beta2=0.95,
    weight_decay=0.1,
)
# With --parallel: PARD's (arXiv 2504.18583), which is trained on text that the target wrote.
_PARALLEL = {
    "trainer": dataclasses.replace(
        _TRAINER, schedule="constant", learning_rate=3e-5, weight_decay=0.0
    ),
    "recipe": DraftRecipe(text_weight=1.0),
    "parallel": method.ParallelSettings(parallel=True),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings(method.DistillSettings):
    """One run; every field, and every field of its parts, is an option of the command line."""

    trainer: TrainerSettings = _TRAINER
    recipe: DraftRecipe = dataclasses.field(default_factory=DraftRecipe)
    parallel: method.ParallelSettings = dataclasses.field(default_factory=method.ParallelSettings)
    draft: str = ""  # model to start from, with the target's vocabulary
    draft_layers: tuple[int, ...] = ()  # layers of the target to start from instead, from 0 on

    def __post_init__(self):
        super().__post_init__()
        self.parallel.check(self.depth)
        if self.parallel.parallel:
            depths = self.parallel.slots.depths
            method.check_length(self, depths, f"--depths {depths}")
        if bool(self.draft) == bool(self.draft_layers):
            remedy = "give either --draft DIR or --draft-layers 0 3 ..."
            raise bad_option("draft", self.draft, remedy)
        recipe, part = self.recipe, self.trainer.batch // self.trainer.accumulate
        if recipe.on_policy and not round(recipe.on_policy * part):
            remedy = f"that is none of the {part} windows of --batch / --accumulate"
            raise bad_option("on_policy", recipe.on_policy, remedy)
        if recipe.on_policy and recipe.on_policy_prompt >= self.data.length:
            remedy = f"keep fewer than --length {self.data.length}"
            raise bad_option("on_policy_prompt", recipe.on_policy_prompt, remedy)

    def check_models(self) -> DecoderConfig:
        """See ``DistillSettings``."""
        target = super().check_models()
        option, layers = ("draft", None) if self.draft else ("draft_layers", self.draft_layers)
        draft = check("draft", self.draft) if self.draft else target
        picked = [x for i, x in enumerate(draft.layers) if layers is None or i in layers]
        causes = {
            "layers with experts cannot be trained": draft.has_experts,
            "layers with a state cannot be trained with --parallel": self.parallel.parallel
            and any(isinstance(layer.mixer, DeltaRule) for layer in picked),
            "layers with an input of their own cannot be taken apart": layers is not None
            and draft.layer_inputs is not None,
        }
        for cause, is_there in causes.items():
            if is_there:
                remedy = f"{cause}; give a --draft of plain blocks"
                raise bad_option(option, vars(self)[option], remedy)
        return target

    def idle(self) -> dict[str, dict[str, str]]:
        """See ``DistillSettings``."""
        recipe = {}
        if self.recipe.text_weight == 1:
            recipe["loss"] = "--text-weight 1 trains on the text alone; leave one out"
        if not self.recipe.on_policy:
            remedy = "the draft model writes nothing without --on-policy; leave it out"
            recipe |= dict.fromkeys(("on_policy_prompt", "on_policy_temperature"), remedy)
        return super().idle() | {"recipe": recipe}


def initial_model(
    settings: Settings, target: LoadedModel
) -> tuple[DecoderConfig, DecoderParams, dict]:
    """Return sizes, weights and config.json of the draft model before training."""
    if settings.draft:
        draft = loading.load(settings.draft, "float32")
        check_same(
            target.config.vocab_size, draft.config.vocab_size, target.tokenizer, draft.tokenizer
        )
        return draft.config, as_arrays(draft.params), draft.raw_config
    picked, layers = settings.draft_layers, target.config.num_layers
    if not all(0 <= layer < layers for layer in picked) or list(picked) != sorted(set(picked)):
        remedy = f"name ascending ones of the target's {layers}, from 0 on"
        raise bad_option("draft_layers", picked, remedy)
    config = dataclasses.replace(
        target.config,
        layers=tuple(target.config.layers[layer] for layer in picked),
        cache_dtype="float32",
        activation_dtype="float32",
    )
    params = in_order(target.params, target.config, settings.trainer.tensor)
    params = params.replace(layers=tuple(params.layers[layer] for layer in picked))
    return config, params, checkpoint.hf_config(config)


def build(settings: Settings, target: LoadedModel, data: Data) -> method.Build:
    """Prepare a run; see ``Method``."""
    config, start, raw = initial_model(settings, target)
    depth, parallel, trainer = settings.depth, settings.parallel, settings.trainer
    sizes = split(target.config, trainer.tensor)
    task = DraftTask(config, sizes, settings.recipe, trainer.compute, trainer.remat)
    drafter, identity = DraftModel(config, depth, vocab_size=target.config.vocab_size), {}
    if parallel.parallel:
        mask = _mask(settings, data, config, raw)
        raw |= {"pard_token": mask, "spd_type": "pard"}
        task = ParallelDraftTask(**vars(task), slots=parallel.slots, mask_token_id=mask)
        drafter = ParallelDraftModel(config, target.target, depth, mask_token_id=mask)
        identity = dataclasses.asdict(parallel)

    def export(params: DecoderParams, directory: Path) -> None:
        checkpoint.save_pretrained(directory, config, params, raw, settings.export_dtype)
        target.tokenizer.save_pretrained(directory)

    return method.Build(
        task=task,
        frozen=Frozen(target.params, start),
        drafter=drafter,
        identity=dataclasses.asdict(settings.recipe)
        | {"draft": method.described(config, start)}
        | identity,
        export=export,
        weights_of=lambda params: (target.params, params),
    )


def _mask(settings: Settings, data: Data, config: DecoderConfig, raw: dict) -> int:
    """Return the mask token of the options, of the initial model, or an unused one."""
    token, served = settings.parallel.mask_token, mask_token_id(raw, SERVED)
    token = served if token < 0 and served is not None else token
    return method.mask_token(token, data, config.vocab_size)


def defaults(argv: Sequence[str]) -> dict[str, Any]:
    """Return the published settings of --parallel."""
    return _PARALLEL if method.asks_for_parallel(argv) else {}


METHOD = method.Method("Distil a draft model from a frozen target.", Settings, build, defaults)
