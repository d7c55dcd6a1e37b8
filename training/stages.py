"""Training heads that guess one token after another: MLP speculators and Hydra heads.

Stage k at row i reads what stage k - 1 handed on there (stage 0 the target's hidden state, or what
Hydra++'s prefix layer makes of it) and the true token t_{i+1+k}, and guesses t_{i+2+k}. Every stage
is computed for all rows at once by the functions that serve.
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
from training import ahead
from training.attention import attend_within
from training.batches import Batch
from training.linear import LINEARS
from training.objective import feature_scale, head_of, packed_states
from training.task import Frozen, Metrics
from training.trainer.settings import bad_option

HeadConfig = HydraConfig | MlpSpeculatorConfig | LstmSpeculatorConfig


@dataclasses.dataclass(frozen=True)
class StagesRecipe:
    """How heads are trained; ``PUBLISHED`` has the authors' settings.

    Attributes:
      loss: labels (cross-entropy with the text) or a distance from the target's law at the guessed
        token; tvd, lk and overlap are made of the chance of acceptance itself
      stage_decay: weight of a stage's loss relative to the stage before

    Raises:
      ValueError: a value is out of range.
    """

    loss: ahead.GuessLoss = "labels"
    stage_decay: float = 1.0

    def __post_init__(self):
        ahead.check_loss("loss", self.loss)
        if not 0 <= self.stage_decay < float("inf"):
            raise bad_option("stage_decay", self.stage_decay, "it must be at least 0")


PUBLISHED = {
    "ibm": StagesRecipe(),  # arXiv 2404.19124, section 3
    "arctic": StagesRecipe(),  # ArcticTraining
    "arctic-lstm": StagesRecipe(),
    "hydra": StagesRecipe(),  # arXiv 2402.05109, section 3
    "hydra++": StagesRecipe(loss="ce"),  # section 4
}


class _Network(NamedTuple):
    """How a kind of config is run."""

    module: ModuleType
    outputs: Callable[[Any], tuple[tuple[Array, ...], tuple[Array, ...]]]  # matrices and biases


_NETWORKS = {
    HydraConfig: _Network(hydra, lambda params: (params.outputs, params.output_biases)),
    MlpSpeculatorConfig: _Network(mlp_speculator, lambda params: (params.heads, ())),
    LstmSpeculatorConfig: _Network(arctic, lambda params: ((params.head,), ())),
}


@dataclasses.dataclass(frozen=True)
class StagesTask:
    """An MLP speculator or Hydra heads in training: a ``training.task.Task``.

    Attributes:
      head: sizes of the speculator or the heads.
      target: sizes of the target.
      recipe: losses.
      compute: factors of every matmul, a name in ``linear.LINEARS``.
      remat: whether the backward pass computes the stages again, to save memory.

    Raises:
      ValueError: the prefix layer has experts, through which there is no gradient on every device.
    """

    head: HeadConfig
    target: DecoderConfig
    recipe: StagesRecipe
    compute: str = "bfloat16"
    remat: bool = False

    def __post_init__(self):
        if self._prefix is not None and self._prefix.moe is not None:
            raise ValueError(
                "a prefix layer like the target's has experts here, which are not trained yet; "
                "take heads without one (--variant hydra)"
            )

    def init(self, key: Array, frozen: Frozen) -> Any:
        """First weights: random as published, but Hydra heads as ``early_exit`` says."""
        if frozen.start is not None:
            return jax.tree.map(lambda x: jnp.array(x, jnp.float32), frozen.start)
        params = self._network.module.init_params(key, self.head)
        if not isinstance(self.head, HydraConfig):
            return params
        return early_exit(params, frozen, self.target)

    def loss(self, params: Any, frozen: Frozen, batch: Batch, key: Array) -> tuple[Array, Metrics]:
        """See ``Task``. Metrics: ``loss``, and ``accepted_k`` = mean sum(min(p, q)) of stage k,
        over the rows that count."""
        del key
        (hidden,), normed = packed_states(
            frozen.target, self.target, batch, self.compute, capture_layers=self.head.capture_layers
        )
        hidden, normed = jax.lax.stop_gradient((hidden[:, :-1].astype(jnp.float32), normed))
        outputs, biases = self._network.outputs(params)
        means = ahead.teach(
            ahead.align(self._unroll(params, frozen, batch, hidden)),
            outputs,
            biases,
            loss=self.recipe.loss,
            decay=self.recipe.stage_decay,
            linear=LINEARS[self.compute],
            target_output=head_of(frozen.target),
            normed=normed,
            batch=batch,
        )
        return means["loss"], means

    def _unroll(self, params: Any, frozen: Frozen, batch: Batch, hidden: Array) -> list[Array]:
        """What the output of each stage takes [B, T, ...], by the row that it starts from."""
        state, outputs = self._start(params, batch, hidden), []
        for stage in range(self._count):
            tokens = jnp.pad(batch.tokens[:, stage + 1 :], ((0, 0), (0, stage)))
            if isinstance(self.head, HydraConfig):
                given = decoder.embed(frozen.target, self.target, tokens).astype(jnp.float32)
            else:
                given = tokens
            state, x = self._step(stage)(params, state, given)
            outputs.append(x)
        return outputs

    def _start(self, params: Any, batch: Batch, hidden: Array) -> Any:
        """What the first stage takes, of the target's hidden states [B, T, D]."""
        if not isinstance(self.head, HydraConfig):
            return self._network.module.start(self.head, hidden)
        if self._prefix is None:
            return hidden
        attend = attend_within(batch.segments[:, :-1], self._prefix.windows)
        _, (out,) = decoder.trunk(
            params.prefix,
            self._prefix,
            hidden,
            batch.positions[:, :-1],
            attend,
            linear=LINEARS[self.compute],
            capture_layers=(1,),
            remat=self.remat,
        )
        return out

    def _step(self, stage: int) -> Callable[[Any, Any, Array], tuple[Any, Array]]:
        step, linear = self._network.module.step, LINEARS[self.compute]
        run = lambda params, state, given: step(
            params, self.head, state, given, stage, linear=linear
        )
        return jax.checkpoint(run) if self.remat else run

    @property
    def _network(self) -> _Network:
        return _NETWORKS[type(self.head)]

    @property
    def _prefix(self) -> DecoderConfig | None:
        return getattr(self.head, "network", None)

    @property
    def _count(self) -> int:
        hydra_heads = isinstance(self.head, HydraConfig)
        return self.head.num_heads if hydra_heads else self.head.n_predict


def early_exit(params: HydraParams, frozen: Frozen, target: DecoderConfig) -> HydraParams:
    """Heads that say what the target's own output matrix would, whatever was drafted; about that
    where there is a prefix layer, whose block is random.

    So training begins where the target left off, and not at the uniform law.
    """
    size = frozen.target.norm.shape[0]
    keep = lambda residual: jnp.zeros_like(residual).at[:size].set(jnp.eye(size))
    output = jnp.array(head_of(frozen.target), jnp.float32)
    prefix = params.prefix
    if prefix is not None:
        scale = feature_scale(frozen.target, target)
        prefix = prefix.replace(norm=target.norm_weight(size, jnp.float32, scale))
    return params.replace(
        joining=tuple(each.replace(residual=keep(each.residual)) for each in params.joining),
        outputs=(output,) * len(params.outputs),
        prefix=prefix,
    )
