"""One call of ``train``: its state, and the work after every step."""

import dataclasses
import math
import signal
import threading
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import grain
import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from training.data.batch import Batch
from training.trainer import mesh as meshes
from training.trainer.checkpointing import Checkpoints
from training.trainer.metrics import Log, Means
from training.trainer.programs import Programs, TrainState
from training.trainer.settings import TrainerSettings
from training.util.errors import TrainingError, bad_option
from training.util.progress import Bar

# Request of a process; the largest of all processes is followed. A larger one is the number of the
# signal that stops the run.
CONTINUE, SAVE = range(2)


@dataclasses.dataclass
class Run:
    """A run in progress; call ``begin`` first."""

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
        """Restore the newest checkpoint, or start at step 0."""
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

    def go(self, stop_after: int | None) -> None:
        """Train to the end, for ``stop_after`` steps, or until a signal, and save."""
        last = self.settings.steps
        if stop_after is not None:
            last = min(last, self.step + stop_after)
        if self.step >= last:
            return
        self._means, self._shown = self._new_means(), {}
        self._mark: tuple[int, float] | None = None  # (step, time) at which the rate is reset
        self._log = Log(self.out, self.step, jax.process_index() == 0)
        try:
            with Signals() as signals:
                while self.step < last and self.signal is None:
                    self._advance(signals)
                    better = self._evaluates(self.step) and self._evaluate()
                    every = self.settings.save_every
                    due = every and self.step % every == 0
                    if better or due or self.wish == SAVE:
                        self._save()
            if self.checkpoints.latest != self.step:
                self._save()
        finally:
            self._log.close()

    @property
    def signal(self) -> int | None:
        """Number of the signal that stops the run; of any process."""
        return self.wish if self.wish > SAVE else None

    def where(self) -> str:
        """Return the step and the newest checkpoint, for messages."""
        saved = self.checkpoints.latest
        left = "there is no checkpoint yet" if saved is None else f"checkpoint {saved} is whole"
        return f"at step {self.step} ({left})"

    def evaluate(self, batches: Iterable[Batch]) -> dict[str, float]:
        """Return mean metrics of the weights over the rows of batches."""
        means = self._new_means()
        for batch in batches:
            placed = meshes.place_batch(batch, self.mesh)
            rows = placed.tokens.shape[0] * (placed.tokens.shape[1] - 1)
            means.add(self.programs.metrics(self.state.params, self.frozen, placed), rows)
        means.flush()
        return means.take()

    def _new_means(self) -> Means:
        # CPU devices that communicate share few threads and run independent programs at once: two
        # programs in flight can deadlock.
        cpu = self.mesh.devices.flat[0].platform == "cpu"
        return Means(ahead=not (cpu and self.mesh.size > 1))

    def _evaluates(self, step: int) -> bool:
        return step % self.settings.eval_every == 0 or step == self.settings.steps

    def _advance(self, signals: "Signals") -> None:
        """Run one step, and read the metrics of the step before."""
        batch = self._next_batch()
        late = time.monotonic() - self._saved > 60 * self.settings.save_minutes
        wish = signals.received or (SAVE if late else CONTINUE)
        several = jax.process_count() > 1
        wishes = self._all_wishes(wish) if several else None
        self.state, metrics = self.programs.step(self.state, self.frozen, batch, wishes)
        self._read(self.step, self._means.add(metrics))
        self.step += 1
        if not several:
            self.wish = signals.received or wish

    def _next_batch(self) -> Batch:
        batch = next(self.batches, None)
        if batch is None:
            raise TrainingError(f"the data ended {self.where()}; give more data, or repeat it")
        rows = len(batch.tokens) * jax.process_count()
        if rows != self.settings.batch:
            raise bad_option("batch", self.settings.batch, f"the data comes {rows} at a time")
        self._tokens = rows * (batch.tokens.shape[1] - 1)
        return meshes.place_batch(batch, self.mesh)

    def _all_wishes(self, wish: int) -> jax.Array:
        """Return the wishes of all processes, int32 [devices]."""
        spec = NamedSharding(self.mesh, PartitionSpec(meshes.AXES))
        return jax.make_array_from_process_local_data(
            spec, np.full(jax.local_device_count(), wish, np.int32)
        )

    def _read(self, step: int, values: dict[str, float] | None) -> None:
        """Process the metrics of ``step``, which are the same in all processes."""
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

    def _diverged(self, event: str) -> TrainingError:
        s, saved = self.settings, self.checkpoints.latest
        left = "" if saved is None else f" (checkpoint {saved} is whole)"
        return TrainingError(
            f"{event}{left}; start in a new folder with a lower --learning-rate (was "
            f"{s.learning_rate}), a longer --warmup (was {s.warmup}) or a smaller --clip-at (was "
            f"{s.clip_at} of {s.clip})"
        )

    def _write(self, step: int, measured: dict[str, float]) -> None:
        """Write a line of the log: means since the last line, rate, and measurements."""
        now = time.monotonic()
        entry = self._means.take() | measured | {"seconds": round(self._seconds(), 1)}
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
        """Measure this step on held-out data; return whether it is the best so far."""
        self._read(self.step, self._means.flush())
        held_out = {f"heldout_{k}": v for k, v in self.evaluate(self.held_out).items()}
        self._check(held_out, self.step)
        measured = held_out | (self.measure(self.state.params) if self.measure else {})
        self._write(self.step, measured)
        if not measured:
            return False
        self._mark = self.step, time.monotonic()
        self.record["evaluations"].append({"step": self.step} | self._shown)
        if self.bar is not None:
            self.bar(self.step, self._shown)
        name, mode = self.best
        if name not in measured:
            raise ValueError(f"best={name!r} is not measured; take one of {', '.join(measured)}")
        value, before = measured[name], self.record["best"]
        better = before is None or (value <= before[1] if mode == "min" else value >= before[1])
        if better:
            self.record["best"] = [self.step, value]
        return better

    def _save(self) -> None:
        """Save a checkpoint of this step; refuse values that are not finite."""
        self._read(self.step, self._means.flush())
        if not self.programs.is_finite(self.state):
            raise self._diverged(f"weights or the optimiser's state overflowed by step {self.step}")
        evaluations = self.record["evaluations"]
        newest = evaluations[-1] if evaluations and evaluations[-1]["step"] == self.step else None
        self.record["seconds"] = round(self._seconds(), 1)
        self.checkpoints.save(self.step, self.state, self.record, self.batches, newest)
        self._saved = time.monotonic()
        self._mark = self.step, self._saved
        self.wish = CONTINUE if self.signal is None else self.wish


class Signals:
    """Context in which the first SIGTERM or SIGINT only sets ``received`` to its number.

    The next one acts as usual. Outside the main thread, in which Python handles signals, it does
    nothing.
    """

    def __init__(self):
        self.received = 0
        self._before: dict = {}

    def __enter__(self):
        if threading.current_thread() is threading.main_thread():
            numbers = (signal.SIGTERM, signal.SIGINT)
            self._before = {number: signal.signal(number, self._receive) for number in numbers}
        return self

    def _receive(self, number, frame):
        self.received = number
        self.__exit__()

    def __exit__(self, *error):
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}
