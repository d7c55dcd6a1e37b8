"""Losses of a draft model on a frozen target, on text or on its own continuations."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.core import kv_cache, trees
from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.decoder import DecoderConfig, DecoderParams
from training.batches import Batch
from training.errors import bad_option, check_choice, check_least, check_positive
from training.forward import head_of, packed_states
from training.linear import LINEARS
from training.losses.chunks import mean_by_chunks, take
from training.losses.distances import LOSSES, LossName, overlap_of
from training.task import Frozen, Metrics, Ratio
from training.tasks.method import float32


@dataclasses.dataclass(frozen=True)
class DraftRecipe:
    """Losses and texts of a draft model."""

    loss: LossName = "kl"  # distance between the target's distribution and the draft's
    text_weight: float = 0.0  # share of the next-token loss in the objective
    on_policy: float = 0.0  # share of a batch's windows that the draft model continues by itself
    on_policy_prompt: int = 64  # tokens of such a window that stay
    on_policy_temperature: float = 1.0  # temperature of the continuations

    def values(self, log_p: Array, log_q: Array, labels: Array) -> dict[str, Array]:
        """Return the objective ``loss``, ``next_token_loss`` of the labels, and ``kl`` of rows."""
        text, distance = -take(log_q, labels), LOSSES[self.loss](log_p, log_q)
        loss = (1 - self.text_weight) * distance + self.text_weight * text
        return {"loss": loss, "next_token_loss": text, "kl": LOSSES["kl"](log_p, log_q)}

    def __post_init__(self):
        check_choice(self, "loss", LOSSES)
        for name in ("text_weight", "on_policy"):
            if not 0 <= vars(self)[name] <= 1:
                raise bad_option(name, vars(self)[name], "take 0 to 1")
        check_least(self, 1, "on_policy_prompt")
        check_positive(self, "on_policy_temperature")


@dataclasses.dataclass(frozen=True)
class DraftTask:
    """A draft model in training: a ``training.task.Task``."""

    draft: DecoderConfig  # sizes of the draft model
    # sizes of the target. If one vocabulary is padded, only the common part counts.
    target: DecoderConfig
    recipe: DraftRecipe  # losses and texts
    compute: str = "bfloat16"
    remat: bool = False

    def init(self, key: Array, frozen: Frozen) -> DecoderParams:
        """Return the initial weights."""
        return float32(frozen.start)

    def loss(
        self, params: DecoderParams, frozen: Frozen, batch: Batch, key: Array | None
    ) -> tuple[Array, Metrics]:
        """Return ``loss`` and, as ``Ratio``, ``next_token_loss``, ``kl`` and ``accepted``.

        ``next_token_loss`` is that of the text, including continuations; ``accepted`` is the
        probability that a drafted token is accepted.
        """
        batch = self._continued(params, batch, key)
        _, x = packed_states(params, self.draft, batch, self.compute, remat=self.remat)
        _, states = packed_states(frozen.target, self.target, batch, self.compute)
        output, linear, recipe = head_of(frozen.target), LINEARS[self.compute], self.recipe
        common = min(self.draft.vocab_size, self.target.vocab_size)

        def score(x: Array, head: Array, fixed: Any) -> Metrics:
            states, labels, weight = fixed
            log_q = jax.nn.log_softmax(linear(x, head)[..., :common])
            log_p = jax.nn.log_softmax(linear(states, output)[..., :common])
            counts = (weight > 0).astype(x.dtype)
            values = recipe.values(log_p, log_q, labels)
            values["accepted"] = overlap_of(log_p, log_q)
            loss = weight * values.pop("loss")
            ratios = {name: Ratio(counts * value, counts) for name, value in values.items()}
            return {"loss": loss} | ratios

        fixed = jax.lax.stop_gradient((states[:, :-1], batch.tokens[:, 1:], batch.label_weights))
        means = mean_by_chunks(score, x[:, :-1], head_of(params), fixed)
        return means["loss"], means

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
    every = lambda size: jnp.broadcast_to(jnp.arange(size), (batch, size))

    def feed(cache: kv_cache.KVCache, tokens: Array) -> tuple[kv_cache.KVCache, Array]:
        size = tokens.shape[1]
        tree = trees.from_parents(trees.chain(size - 1), size - 1)
        out = decoder.forward(params, config, tokens, tree, cache)
        count = jnp.full((batch,), size, jnp.int32)
        return kv_cache.append(cache, out.tree_kv, every(size), count), out.logits[:, -1]

    def step(carry, key):
        cache, logits = carry
        drawn = jax.random.categorical(key, logits[:, :vocab_size] / temperature)
        token = drawn.astype(jnp.int32)
        return feed(cache, token[:, None]), token

    start = feed(decoder.init_cache(config, batch, length), prompts)
    _, written = jax.lax.scan(step, start, jax.random.split(key, length - prompt_length))
    return jnp.concatenate([prompts, written.T], 1)
