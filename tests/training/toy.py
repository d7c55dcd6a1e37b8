"""A task that compiles fast, and data for it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from training import data, trainer
from training.data.batch import Batch
from training.trainer import TrainerSettings
from training.trainer.task import Ratio

VOCAB, WIDTH, LENGTH = 16, 8, 12


@dataclasses.dataclass(frozen=True)
class Bigrams:
    """Prediction of a token from the one before: frozen table, noise, matrix, output matrix."""

    noise: float = 0.1

    def init(self, key, frozen):
        inner, head = jax.random.split(key)
        return {
            "layers": 0.1 * jax.random.normal(inner, (WIDTH, 2 * WIDTH)),
            "norm": jnp.ones((WIDTH,)),
            "head": 0.1 * jax.random.normal(head, (2 * WIDTH, VOCAB)),
        }

    def loss(self, params, frozen, batch, key):
        x = frozen["table"][batch.tokens[:, :-1]] * params["norm"]
        if key is not None:
            x = x + self.noise * jax.random.normal(key, x.shape)
        log_p = jax.nn.log_softmax(jnp.tanh(x @ params["layers"]) @ params["head"])
        taken = jnp.take_along_axis(log_p, batch.tokens[:, 1:, None], -1)[..., 0]
        weights = batch.weights[:, 1:]
        loss = -(weights * taken).mean()
        likely = Ratio((weights * jnp.exp(taken)).mean(), weights.mean())
        return loss, {"loss": loss, "likely": likely}


FROZEN = {"table": np.random.default_rng(1).normal(size=(VOCAB, WIDTH)).astype(np.float32)}


class Rows:
    """Windows in which each token is mostly three more than the one before."""

    def __init__(self, count: int = 40, seed: int = 0):
        random = np.random.default_rng(seed)
        steps = np.where(random.random((count, LENGTH)) < 0.9, 3, random.integers(0, VOCAB))
        first = random.integers(0, VOCAB, (count, 1))
        self._tokens = np.concatenate([first, first + steps.cumsum(1)], 1).astype(np.int32) % VOCAB
        self._weights = (random.random((count, LENGTH + 1)) < 0.8).astype(np.float32)

    def __len__(self):
        return len(self._tokens)

    def __getitem__(self, index):
        tokens = self._tokens[index]
        return Batch(tokens, np.ones_like(tokens), self._weights[index])


def settings(**options) -> TrainerSettings:
    """Return settings of ten steps of eight windows."""
    usual = {
        "batch": 8,
        "accumulate": 2,
        "steps": 10,
        "warmup": 1,
        "learning_rate": 0.03,
        "schedule": "constant",
        "compute": "float32",
        "log_every": 1,
        "eval_every": 5,
    }
    return TrainerSettings(**usual | options)


def run(out, task=None, **options):
    """Train ``task`` on the toy data; options are those of ``train`` or of the settings."""
    names = ("held_out", "measure", "identity", "best", "bar", "stop_after", "batches", "facts")
    given = {name: options.pop(name) for name in names if name in options}
    made = settings(**options)
    given.setdefault("held_out", data.held_out(Rows(seed=1), batch=8, limit=16))
    if "batches" not in given:
        given["batches"] = data.batches(Rows(), batch=made.batch, seed=made.seed)
    return trainer.train(task or Bigrams(), FROZEN, settings=made, out=out, **given)
