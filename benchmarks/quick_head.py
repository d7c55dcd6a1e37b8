"""Trains an EAGLE-3 head on the standard library, to measure trees with.

    python -m benchmarks.quick_head --target DIR --out DIR

No checkpoints, no evaluation: half an hour for a head that is good enough to compare trees. For one
to use, see ``python -m training.distill_eagle``.
"""

import argparse
import dataclasses
import functools
from pathlib import Path

import jax
import numpy as np
import optax
from rich.progress import track

from benchmarks.workload import HELD_OUT
from jspec import head_files, loading
from jspec.models.heads.eagle import EagleConfig, EagleParams
from training import data
from training.data.tokenizer import encode_documents
from training.eagle import EagleTask, Frozen, Recipe
from training.trainer import TrainerSettings
from training.trainer.optim import make_optimizer

LENGTH, BATCH = 256, 8  # tokens of a window, windows of a step
RECIPE = Recipe(unroll=4, step_decay=0.8, loss="overlap")


def make_task(target: loading.LoadedModel) -> EagleTask:
    """One block of the target's shape, reading three depths as EAGLE-3's default does."""
    sizes = target.config
    layers = sizes.num_layers
    config = EagleConfig(
        network=dataclasses.replace(sizes, num_layers=1, windows=()),
        generation=3,
        capture_layers=(2, layers // 2, layers - 3),
        target_hidden_size=sizes.hidden_size,
        target_vocab_size=sizes.vocab_size,
        own_head=True,
    )
    return EagleTask(config, sizes, RECIPE)


def read_windows(target: loading.LoadedModel, packages: list[str]) -> data.Windows:
    """Standard library and ``packages`` but for the held-out modules."""
    held_out = sorted({name.split(".")[0] for name in HELD_OUT})
    sources = ["stdlib", *(f"package:{name}" for name in packages)]
    documents = data.find_documents(sources, first=held_out)
    texts = (each.text for each in documents if each.module not in held_out)
    tokenizer = target.tokenizer.backend_tokenizer
    tokens = np.concatenate([np.asarray(ids) for ids in encode_documents(tokenizer, texts)])
    return data.Windows(tokens, LENGTH)


def train(target: loading.LoadedModel, windows: data.Windows, steps: int) -> EagleParams:
    """The head after ``steps`` steps."""
    task, frozen = make_task(target), Frozen(target.params)
    head = task.init(jax.random.key(0), frozen)
    settings = TrainerSettings(
        optimizer="muon", schedule="wsd", learning_rate=3e-3, weight_decay=0.05, steps=steps,
        warmup=steps // 50, decay=steps // 2,
    )  # fmt: skip
    optimizer = make_optimizer(settings)

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(head, state, frozen, batch, key):
        grads, means = jax.grad(task.loss, has_aux=True)(head, frozen, batch, key)
        updates, state = optimizer.update(grads, state, head)
        return optax.apply_updates(head, updates), state, means

    state = optimizer.init(head)
    dealt = data.batches(windows, batch=BATCH, seed=0)
    for index in track(range(steps), "training"):
        head, state, means = step(head, state, frozen, next(dealt), jax.random.key(index))
        if index % 100 == 99:
            accepted = [float(means[f"accepted_{k}"]) for k in range(RECIPE.unroll)]
            print(index + 1, "accepted by position", np.round(accepted, 3), flush=True)
    return head


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="a quickly trained EAGLE-3 head")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--packages", nargs="*", default=["jax", "numpy", "scipy"])
    parser.add_argument("--steps", type=int, default=4000)
    arguments = parser.parse_args()
    target = loading.load(arguments.target, "float32")
    windows = read_windows(target, arguments.packages)
    print(f"{len(windows.tokens) / 1e6:.1f} million tokens", flush=True)
    head = train(target, windows, arguments.steps)
    head_files.save_head(arguments.out, make_task(target).head, head, target.config)


if __name__ == "__main__":
    main()
