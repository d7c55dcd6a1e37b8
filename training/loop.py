"""The training loop: one jitted step, held-out losses, checkpoints, a bar."""

import dataclasses
import functools as ft
import json
import signal
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import struct

from jspec.models import decoder
from jspec.models.decoder import DecoderParams
from jspec.types import Array
from training import objective
from training.checkpointing import Checkpoints
from training.data import Corpus, Windows, cut
from training.optim import make_optimizer, make_schedule
from training.settings import Settings, check_resumable


@struct.dataclass
class TrainState:
    """Everything that a step changes; the data's position is ``step`` itself."""

    step: Array  # int32 []
    params: DecoderParams  # float32
    optimizer: Any


@dataclasses.dataclass(frozen=True)
class Trainer:
    """The pure functions of a run, and the two constants that they need.

    ``loss(params, windows [B, T + 1], extra)`` gives (objective, metrics); ``extra`` is the
    teacher's weights, or ().
    """

    settings: Settings
    loss: Callable[..., tuple[Array, dict[str, Array]]]
    extra: Any

    @ft.cached_property
    def optimizer(self) -> optax.GradientTransformation:
        """The optimiser with its schedule."""
        s = self.settings
        schedule = make_schedule(
            s.schedule, s.learning_rate, steps=s.steps, warmup=s.warmup, decay=s.decay
        )
        return make_optimizer(s.optimizer, schedule, s.weight_decay)

    def init(self) -> TrainState:
        """Step 0."""
        config = self.settings.model_config()
        params = decoder.init_params(jax.random.key(self.settings.seed), config)
        return TrainState(jnp.int32(0), params, self.optimizer.init(params))

    @ft.cached_property
    def step(self) -> Callable[[TrainState, Array, Any], tuple[TrainState, dict[str, Array]]]:
        """(state, windows [batch, T + 1], extra) to (next state, mean metrics); jitted."""
        return jax.jit(self._step, donate_argnums=0)

    def _step(self, state: TrainState, windows: Array, extra: Any):
        parts = self.settings.accumulate
        windows = windows.reshape(parts, -1, windows.shape[-1])

        def accumulate(total, part):
            grads, metrics = jax.grad(self.loss, has_aux=True)(state.params, part, extra)
            return jax.tree.map(jnp.add, total, grads), metrics

        zeros = jax.tree.map(jnp.zeros_like, state.params)
        grads, metrics = jax.lax.scan(accumulate, zeros, windows)
        grads = jax.tree.map(lambda grad: grad / parts, grads)
        updates, optimizer = self.optimizer.update(grads, state.optimizer, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics = jax.tree.map(jnp.mean, metrics)
        return TrainState(state.step + 1, params, optimizer), metrics

    @ft.cached_property
    def _measure(self):
        return jax.jit(lambda params, windows, extra: self.loss(params, windows, extra)[1])

    def evaluate(self, params: DecoderParams, windows: Windows, limit: int | None = None) -> dict:
        """Mean metrics over evenly spread windows, all of them without ``limit``."""
        size = self.settings.batch // self.settings.accumulate
        wanted = windows.count if limit is None else min(limit, windows.count)
        picked = np.linspace(0, windows.count - 1, wanted).astype(int)
        picked = picked[: max(wanted // size, 1) * size]
        batches = [picked[i : i + size] for i in range(0, len(picked), size)]
        totals = [
            self._measure(params, np.stack([windows.at(i) for i in batch]), self.extra)
            for batch in batches
        ]
        return {name: float(np.mean([total[name] for total in totals])) for name in totals[0]}


def make_trainer(settings: Settings, teacher=None) -> Trainer:
    """A trainer; ``teacher`` is (DecoderConfig, DecoderParams) to distil from, or None."""
    config = settings.model_config()
    if teacher is None:
        loss = lambda params, windows, _: objective.next_token_loss(
            params, config, windows, settings.compute
        )
        return Trainer(settings, loss, ())
    taught = objective.Teacher(teacher[0], settings.teacher_weight, settings.teacher_distance)
    loss = lambda params, windows, extra: objective.distillation_loss(
        params, config, windows, settings.compute, taught, extra
    )
    return Trainer(settings, loss, teacher[1])


def train(
    trainer: Trainer, corpus: Corpus, *, stop_after: int | None = None, bar: Any = None
) -> tuple[TrainState, dict]:
    """Runs, or resumes, to ``settings.steps``; SIGTERM and Ctrl-C save and return.

    Args:
      stop_after: steps to do in this call at most.
      bar: called with (step, metrics) after every step.

    Returns:
      The last state, and the record kept in its checkpoint: settings, losses by step, seconds.
    """
    settings = trainer.settings
    checkpoints = Checkpoints(settings.out_dir / "checkpoints")
    state, record = _start(trainer, checkpoints, corpus)
    windows = Windows(corpus.train, settings.length, settings.seed)
    held_out = Windows(corpus.holdout, settings.length)
    first = step = int(state.step)
    if first < settings.steps:
        changing = (
            "steps",
            "decay",
            "context",
            "teacher",
            "teacher_distance",
        )  # what a resumed run may change
        options = {name: getattr(settings, name) for name in changing}
        record["segments"].append({"from_step": first} | options)
    last = settings.steps if stop_after is None else min(settings.steps, first + stop_after)
    asked_to_stop: list[int] = []
    with _signals(asked_to_stop), (settings.out_dir / "log.jsonl").open("a") as log:
        saved = begun = time.monotonic()
        while step < last and not asked_to_stop:
            batch = cut(windows.batch(step, settings.batch), settings.context or settings.length)
            state, metrics = trainer.step(state, batch, trainer.extra)
            step += 1
            entry = {"step": step} | {name: float(value) for name, value in metrics.items()}
            if step % settings.eval_every == 0 or step == settings.steps:
                held = trainer.evaluate(state.params, held_out, settings.eval_windows)
                entry |= {f"heldout_{name}": value for name, value in held.items()}
                record["losses"].append(entry)
            entry["seconds"] = round(record["seconds"] + time.monotonic() - begun, 1)
            log.write(json.dumps(entry) + "\n")
            log.flush()
            if bar is not None:
                bar(step, entry)
            if time.monotonic() - saved > 60 * settings.save_minutes:
                checkpoints.save(step, state, record | {"seconds": entry["seconds"]})
                saved = time.monotonic()
        record["seconds"] += round(time.monotonic() - begun, 1)
    if step > first:
        checkpoints.save(step, state, record)
    checkpoints.close()
    return state, record


def _start(trainer: Trainer, checkpoints: Checkpoints, corpus: Corpus) -> tuple[TrainState, dict]:
    """The newest checkpoint, or step 0."""
    settings, state = trainer.settings, trainer.init()
    text = corpus.description["train"]["sha256"]
    record = {
        "settings": dataclasses.asdict(settings), "corpus": text, "segments": [], "losses": [],
        "seconds": 0.0,
    }  # fmt: skip
    if checkpoints.latest is None:
        return state, record
    before = checkpoints.record()
    check_resumable(settings, before["settings"])
    if before["corpus"] != text:
        raise ValueError(f"out {settings.out!r} was trained on other data; give a new --out")
    state, before = checkpoints.restore(state)
    return state, before | {"settings": record["settings"]}


class _signals:
    """While open, SIGTERM and SIGINT only append to ``asked``: the loop ends after its step."""

    def __init__(self, asked: list[int]):
        self.asked = asked

    def __enter__(self):
        keep = lambda number, _: self.asked.append(number)
        self.before = {n: signal.signal(n, keep) for n in (signal.SIGTERM, signal.SIGINT)}

    def __exit__(self, *error):
        for number, handler in self.before.items():
            signal.signal(number, handler)
