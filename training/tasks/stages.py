"""Losses of heads that guess one token after another: MLP speculators and Hydra heads.

Stage k at row i reads the state of stage k - 1 there (stage 0 the target's hidden state, or the
output of Hydra++'s prefix layer) and the true token t_{i+1+k}, and predicts t_{i+2+k}. The
functions that serve compute each stage for all rows at once.
"""

import dataclasses
from collections.abc import Callable
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.decoder import DecoderConfig
from jspec.models.heads import arctic, hydra, mlp_speculator
from jspec.models.heads.arctic import LstmSpeculatorConfig
from jspec.models.heads.hydra import HydraConfig, HydraParams
from jspec.models.heads.mlp_speculator import MlpSpeculatorConfig
from training.data.batch import Batch
from training.losses import unrolled
from training.losses.distances import GUESS_LOSSES, GuessLoss
from training.losses.guesses import judge
from training.networks.attention import attend_within
from training.networks.forward import Frozen, feature_scale, head_of, packed_states
from training.networks.linear import LINEARS
from training.tasks.method import float32
from training.trainer.task import Metrics
from training.util.errors import check_choice, check_least

HeadConfig = HydraConfig | MlpSpeculatorConfig | LstmSpeculatorConfig


@dataclasses.dataclass(frozen=True)
class StagesRecipe:
    """Losses of the stages; the defaults are the published settings of the variant."""

    # labels (cross-entropy with the text) or a distance from the target's distribution; tvd, lk and
    # overlap train the probability of acceptance
    loss: GuessLoss = "labels"
    stage_decay: float = 1.0  # weight of a stage's loss relative to the stage before

    def __post_init__(self):
        check_choice(self, "loss", GUESS_LOSSES)
        check_least(self, 0, "stage_decay")


class _Network(NamedTuple):
    """The functions of a kind of config."""

    module: ModuleType
    outputs: Callable[[Any], tuple[tuple[Array, ...], tuple[Array, ...]]]  # matrices and biases


_NETWORKS = {
    HydraConfig: _Network(hydra, lambda params: (params.outputs, params.output_biases)),
    MlpSpeculatorConfig: _Network(mlp_speculator, lambda params: (params.heads, ())),
    LstmSpeculatorConfig: _Network(arctic, lambda params: ((params.head,), ())),
}


@dataclasses.dataclass(frozen=True)
class StagesTask:
    """An MLP speculator or Hydra heads in training: a ``training.trainer.task.Task``."""

    head: HeadConfig  # sizes of the speculator or the heads
    target: DecoderConfig  # sizes of the target
    recipe: StagesRecipe  # losses
    compute: str = "bfloat16"
    remat: bool = False

    def __post_init__(self):
        if self._prefix is not None and self._prefix.has_experts:
            raise ValueError(
                "a prefix layer like the target's has experts, which cannot be trained; take heads "
                "without one (--variant hydra)"
            )

    def init(self, key: Array, frozen: Frozen) -> Any:
        """Return initial weights: random as published; Hydra heads see ``early_exit``."""
        if frozen.start is not None:
            return float32(frozen.start)
        params = self._network.module.init_params(key, self.head)
        return early_exit(params, frozen) if isinstance(self.head, HydraConfig) else params

    def loss(self, params: Any, frozen: Frozen, batch: Batch, key: Array) -> tuple[Array, Metrics]:
        """Return ``loss`` and, over the rows that count, ``accepted_k`` = mean sum(min(p, q))."""
        (hidden,), normed = packed_states(
            frozen.target, self.target, batch, self.compute, capture_layers=self.head.capture_layers
        )
        hidden, normed = jax.lax.stop_gradient((hidden[:, :-1].astype(jnp.float32), normed))
        guesses = unrolled.align(self._unroll(params, frozen, batch, hidden))
        means = judge(
            guesses,
            unrolled.rows_of(normed, batch, guesses.shape[2], self.recipe.stage_decay),
            *self._network.outputs(params),
            frozen=frozen,
            linear=LINEARS[self.compute],
            loss=self.recipe.loss,
        )
        return means["loss"], means

    def _unroll(self, params: Any, frozen: Frozen, batch: Batch, hidden: Array) -> list[Array]:
        """Return the input of each stage's output matrix [B, T, ...], by its first row."""
        module, linear = self._network.module, LINEARS[self.compute]
        run = lambda stage, params, *inputs: module.step(
            params, self.head, *inputs, stage, linear=linear
        )
        run = jax.checkpoint(run, static_argnums=0) if self.remat else run
        state, outputs = self._start(params, batch, hidden), []
        is_hydra = isinstance(self.head, HydraConfig)
        for stage in range(self.head.num_heads if is_hydra else self.head.n_predict):
            tokens = jnp.pad(batch.tokens[:, stage + 1 :], ((0, 0), (0, stage)))
            if is_hydra:
                tokens = decoder.embed(frozen.target, self.target, tokens).astype(jnp.float32)
            state, x = run(stage, params, state, tokens)
            outputs.append(x)
        return outputs

    def _start(self, params: Any, batch: Batch, hidden: Array) -> Any:
        """Return the input of the first stage, given the target's hidden states [B, T, D]."""
        if not isinstance(self.head, HydraConfig):
            return self._network.module.start(self.head, hidden)
        if self._prefix is None:
            return hidden
        _, (out,) = decoder.trunk(
            params.prefix,
            self._prefix,
            hidden,
            batch.positions[:, :-1],
            attend_within(batch.segments[:, :-1]),
            linear=LINEARS[self.compute],
            capture_layers=(1,),
            remat=self.remat,
        )
        return out

    @property
    def _network(self) -> _Network:
        return _NETWORKS[type(self.head)]

    @property
    def _prefix(self) -> DecoderConfig | None:
        return self.head.network if isinstance(self.head, HydraConfig) else None


def early_exit(params: HydraParams, frozen: Frozen) -> HydraParams:
    """Return heads that predict what the target's output matrix does, whatever was drafted.

    So training begins near the target's distribution and not at the uniform one. A prefix layer
    has a random block, so its heads agree with the target only approximately.
    """
    size = frozen.target.norm.shape[0]
    joining = tuple(
        join.replace(residual=jnp.zeros_like(join.residual).at[:size].set(jnp.eye(size)))
        for join in params.joining
    )
    output, prefix = float32(head_of(frozen.target)), params.prefix
    if prefix is not None:
        prefix = prefix.replace(norm=jnp.full((size,), feature_scale(frozen.target), jnp.float32))
    return params.replace(
        joining=joining,
        outputs=(output,) * len(params.outputs),
        prefix=prefix,
    )
