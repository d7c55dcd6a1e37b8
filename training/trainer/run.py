"""One call of ``train``: what it holds, and what it does after every step."""

import dataclasses
import math
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from training.batches import Batch
from training.trainer import mesh as meshes
from training.trainer.checkpointing import Checkpoints
from training.trainer.errors import TrainingError
from training.trainer.metrics import Log, Means
from training.trainer.programs import Programs, TrainState
from training.trainer.progress import Bar
from training.trainer.settings import TrainerSettings, bad_option
from training.trainer.signals import Signals

CONTINUE, SAVE, STOP = range(3)  # what a process wishes; the strongest wish of all is done


@dataclasses.dataclass
class Run:
    """A run under way; ``begin`` it before all else."""

    settings: TrainerSettings
    mesh: Mesh
    programs: Programs
    frozen: Any
    batches: grain.DatasetIterator[Batch]
    checkpoints: Checkpoints
    out: Path
    held_out: Iterable[Batch]
    measure: Callable[[Any], dict[str, float]] | None
    best: tuple[str, str]
    bar: Bar | None
    step: int = 0
    state: TrainState | None = None
    record: dict = dataclasses.field(default_factory=dict)
    wish: int = CONTINUE

    def begin(self, identity: dict, free: dict) -> None:
        """Takes up the newest checkpoint, or step 0."""
        if self.checkpoints.latest is None:
            self.state = self.programs.init(self.frozen)
            self.record = {"segments": [], "evaluations": [], "best": None, "seconds": 0.0}
        else:
            self.record = self.checkpoints.record()
            self.state = self.checkpoints.restore(self.programs.layout, self.batches)
            self.step = int(self.state.step)
        self.record["identity"] = identity
        if self.step < self.settings.steps:
            self.record["segments"].append({"from_step": self.step} | free)
        self._before, self._begun = self.record["seconds"], time.monotonic()
        self._saved = self._begun

    def go(self, last: int) -> None:
        """Trains until step ``last`` or a signal, and saves."""
        if self.step >= last:
            return
        self._means, self._shown = self._new_means(), {}
        self._mark: tuple[int, float] | None = None  # where tokens a second are counted from
        self._log = Log(self.out, self.step, jax.process_index() == 0)
        try:
            with Signals() as signals:
                while self.step < last and self.wish < STOP:
                    self._advance(signals)
                    better = self._evaluates(self.step) and self._evaluate()
                    if better or self.wish == SAVE or self._saves(self.step):
                        self._save()
            if self.checkpoints.latest != self.step:
                self._save()
        finally:
            self._log.close()

    def place(self) -> str:
        """Where the run is and what is left of it, for messages."""
        saved = self.checkpoints.latest
        left = "there is no checkpoint yet" if saved is None else f"checkpoint {saved} is whole"
        return f"at step {self.step} ({left})"

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Mean metrics of the weights over batches, each weighed by its rows."""
        means = self._new_means()
        for batch in batches:
            placed = meshes.place_batch(batch, self.mesh)
            rows = placed.tokens.shape[0] * (placed.tokens.shape[1] - 1)
            means.add(self.programs.metrics(self.state.params, self.frozen, placed), rows)
        means.flush()
        return means.take()

    def _new_means(self) -> Means:
        # CPU devices that talk to each other share few threads, and run what does not depend on
        # each other at once: two programs in flight can wait for each other for ever.
        cpu = self.mesh.devices.flat[0].platform == "cpu"
        return Means(ahead=not (cpu and self.mesh.size > 1))

    def _evaluates(self, step: int) -> bool:
        return step % self.settings.eval_every == 0 or step == self.settings.steps

    def _saves(self, step: int) -> bool:
        return bool(self.settings.save_every) and step % self.settings.save_every == 0

    def _advance(self, signals: Signals) -> None:
        """One step, and what the one before it told."""
        batch = self._next_batch()
        late = time.monotonic() - self._saved > 60 * self.settings.save_minutes
        mine = STOP if signals.asked else SAVE if late else CONTINUE
        several = jax.process_count() > 1
        votes = self._votes(mine) if several else None
        self.state, metrics = self.programs.step(self.state, self.frozen, batch, votes)
        self._hear(self.step, self._means.add(metrics))
        self.step += 1
        if not several:
            self.wish = STOP if signals.asked else mine

    def _next_batch(self) -> Batch:
        batch = next(self.batches, None)
        if batch is None:
            raise TrainingError(
                f"the data ended {self.place()}; give more data, or batches without an end"
            )
        rows = len(batch.tokens) * jax.process_count()
        if rows != self.settings.batch:
            raise bad_option("batch", self.settings.batch, f"the data comes {rows} at a time")
        self._tokens = rows * (batch.tokens.shape[1] - 1)
        return meshes.place_batch(batch, self.mesh)

    def _votes(self, mine: int) -> jax.Array:
        """This process's wish beside those of all others, int32 [devices]."""
        spec = NamedSharding(self.mesh, PartitionSpec(meshes.AXES))
        return jax.make_array_from_process_local_data(
            spec, np.full(jax.local_device_count(), mine, np.int32)
        )

    def _hear(self, step: int, values: dict[str, float] | None) -> None:
        """Takes in the metrics of ``step``; all processes hear the same, so all do the same."""
        if values is None:
            return
        self._check(values, step)
        self.wish = max(self.wish, int(values.pop("wish", CONTINUE)))
        self._shown |= values
        if self._mark is None:  # the first step compiles
            self._mark = step, time.monotonic()
        if step % self.settings.log_every == 0 and not self._evaluates(step):
            self._write(step, {})
        if self.bar is not None:
            self.bar(step, self._shown)

    def _check(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            if not math.isfinite(value):
                raise self._diverged(f"{name} became {value} at step {step}")

    def _diverged(self, what: str) -> TrainingError:
        s, saved = self.settings, self.checkpoints.latest
        left = "" if saved is None else f" (checkpoint {saved} is whole)"
        return TrainingError(
            f"{what}{left}; start in a new folder with a lower --learning-rate (was "
            f"{s.learning_rate}), a longer --warmup (was {s.warmup}) or a smaller --clip-at (was "
            f"{s.clip_at} of {s.clip})"
        )

    def _write(self, step: int, found: dict[str, float]) -> None:
        """A line of the log: means since the last one, speed, and what an evaluation found."""
        now = time.monotonic()
        entry = self._means.take() | found | {"seconds": round(self._seconds(), 1)}
        entry.pop("wish", None)
        if self._mark is not None and step > self._mark[0]:
            done = (step - self._mark[0]) * self._tokens
            entry["tokens_per_second"] = round(done / max(now - self._mark[1], 1e-9), 1)
        entry = {name: float(f"{value:.6g}") for name, value in entry.items()}
        self._mark = step, now
        self._shown |= entry
        self._log.write({"step": step} | entry)

    def _seconds(self) -> float:
        return self._before + time.monotonic() - self._begun

    def _evaluate(self) -> bool:
        """Held-out metrics and measurements of this step; whether they are the best so far."""
        self._hear(self.step, self._means.flush())
        held_out = {f"heldout_{k}": v for k, v in self.evaluate(self.held_out).items()}
        self._check(held_out, self.step)
        found = held_out | (self.measure(self.state.params) if self.measure else {})
        self._write(self.step, found)
        if not found:
            return False
        self._mark = self.step, time.monotonic()
        self.record["evaluations"].append({"step": self.step} | self._shown)
        if self.bar is not None:
            self.bar(self.step, self._shown)
        name, mode = self.best
        if name not in found:
            raise ValueError(f"best {name!r} is not evaluated; take one of {', '.join(found)}")
        value, before = found[name], self.record["best"]
        better = before is None or (value <= before[1] if mode == "min" else value >= before[1])
        if better:
            self.record["best"] = [self.step, value]
        return better

    def _save(self) -> None:
        """Checkpoint of this step, unless something in it is not finite."""
        self._hear(self.step, self._means.flush())
        if not self.programs.is_finite(self.state):
            raise self._diverged(f"weights or the optimiser's state overflowed by step {self.step}")
        evaluations = self.record["evaluations"]
        newest = evaluations[-1] if evaluations and evaluations[-1]["step"] == self.step else None
        self.record["seconds"] = round(self._seconds(), 1)
        self.checkpoints.save(self.step, self.state, self.record, self.batches, newest)
        self._saved = time.monotonic()
        self._mark = self.step, self._saved
        self.wish = STOP if self.wish == STOP else CONTINUE
