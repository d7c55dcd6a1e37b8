"""Distilling a draft model: a small decoder learns the law of a larger one.

On text, or on what the draft model itself writes (on-policy, arXiv 2310.08461): then it learns
where its own drafts lead. Continuations are sampled inside the step, by the weights of the step.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from jspec.core import kv_cache, trees
from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.decoder import DecoderConfig, DecoderParams
from training.batches import Batch
from training.linear import LINEARS
from training.losses import LOSSES, LossName, overlap_of
from training.objective import head_of, mean_by_chunks, packed_states, take
from training.task import Frozen, Metrics, Ratio
from training.trainer.settings import bad_option


@dataclasses.dataclass(frozen=True)
class DraftRecipe:
    """What a draft model learns from.

    Attributes:
      loss: distance between the target's law and the draft's
      text_weight: share of the next-token loss in the objective
      on_policy: share of a batch's windows that the draft model continues by itself
      on_policy_prompt: tokens of such a window that are kept
      on_policy_temperature: of the draws

    Raises:
      ValueError: a value is out of range.
    """

    loss: LossName = "kl"
    text_weight: float = 0.0
    on_policy: float = 0.0
    on_policy_prompt: int = 64
    on_policy_temperature: float = 1.0

    def __post_init__(self):
        if self.loss not in LOSSES:
            raise bad_option("loss", self.loss, f"choose one of {', '.join(LOSSES)}")
        for name in ("text_weight", "on_policy"):
            if not 0 <= getattr(self, name) <= 1:
                raise bad_option(name, getattr(self, name), "take 0 to 1")
        if self.on_policy_prompt < 1:
            raise bad_option("on_policy_prompt", self.on_policy_prompt, "it must be at least 1")
        if not 0 < self.on_policy_temperature < float("inf"):
            remedy = "it must be above 0"
            raise bad_option("on_policy_temperature", self.on_policy_temperature, remedy)


@dataclasses.dataclass(frozen=True)
class DraftTask:
    """A draft model in training: a ``training.task.Task``.

    Attributes:
      draft: sizes of the draft model.
      target: sizes of the target. Of unlike vocabularies (one is padded) the common part counts.
      recipe: what it learns from.
      compute: factors of every matmul, a name in ``linear.LINEARS``.
      remat: whether the backward pass computes the blocks again, to save memory.
    """

    draft: DecoderConfig
    target: DecoderConfig
    recipe: DraftRecipe
    compute: str = "bfloat16"
    remat: bool = False

    def init(self, key: Array, frozen: Frozen) -> DecoderParams:
        """The weights to start from."""
        return jax.tree.map(lambda x: jnp.array(x, jnp.float32), frozen.start)

    def loss(
        self, params: DecoderParams, frozen: Frozen, batch: Batch, key: Array | None
    ) -> tuple[Array, Metrics]:
        """See ``Task``. Metrics: ``loss``; and as ``Ratio`` over the rows that count
        ``next_token_loss`` of the text (where the draft model continued it, of what it wrote),
        ``kl``, and ``accepted``, the chance that a drafted token is."""
        batch = self._continued(params, batch, key)
        _, x = packed_states(params, self.draft, batch, self.compute, remat=self.remat)
        _, truth = packed_states(frozen.target, self.target, batch, self.compute)
        output, linear, recipe = head_of(frozen.target), LINEARS[self.compute], self.recipe
        common = min(self.draft.vocab_size, self.target.vocab_size)

        def score(x: Array, head: Array, given: Any) -> dict[str, Array]:
            truth, labels, weight = given
            log_q = jax.nn.log_softmax(linear(x, head)[..., :common])
            log_p = jax.nn.log_softmax(linear(truth, output)[..., :common])
            text, counts = -take(log_q, labels), (weight > 0).astype(x.dtype)
            far = LOSSES[recipe.loss](log_p, log_q)
            return {
                "loss": weight * ((1 - recipe.text_weight) * far + recipe.text_weight * text),
                "next_token_loss": counts * text,
                "kl": counts * LOSSES["kl"](log_p, log_q),
                "accepted": counts * overlap_of(log_p, log_q),
                "counts": counts,
            }

        given = jax.lax.stop_gradient((truth[:, :-1], batch.tokens[:, 1:], batch.label_weights))
        means = mean_by_chunks(score, x[:, :-1], head_of(params), given)
        count = means.pop("counts")
        for name in ("next_token_loss", "kl", "accepted"):
            means[name] = Ratio(means[name], count)
        return means["loss"], means

    def _continued(self, params: DecoderParams, batch: Batch, key: Array | None) -> Batch:
        """The batch; in training its first windows are continued by the draft model itself."""
        count = round(self.recipe.on_policy * len(batch.tokens))
        if key is None or not count:
            return batch
        kept = min(self.recipe.on_policy_prompt, batch.tokens.shape[1] - 1)
        written = sample_continuations(
            params,
            self.draft,
            batch.tokens[:count, :kept],
            batch.tokens.shape[1],
            key,
            self.recipe.on_policy_temperature,
            min(self.draft.vocab_size, self.target.vocab_size),
        )
        new = Batch(
            tokens=written,
            segments=jnp.ones_like(written),
            weights=jnp.broadcast_to(jnp.arange(written.shape[1]) >= kept, written.shape) * 1.0,
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
    """int32 prompts [B, P] continued to [B, length] by draws of the model; no gradient flows.

    Only the first ``vocab_size`` tokens are drawn: what pads a vocabulary means nothing.
    """
    batch, kept = prompts.shape
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
    _, written = jax.lax.scan(step, start, jax.random.split(key, length - kept))
    return jnp.concatenate([prompts, written.T], 1)
