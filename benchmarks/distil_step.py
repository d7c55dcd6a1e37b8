"""Cost of a training step of an EAGLE-3 head, relative to its necessary matmuls.

    python -m benchmarks.distil_step [--shape demo] [--unroll 1 2 4] [--out benchmarks/results/...]

The benchmark times a step of the trainer (target forward, unrolled head, loss, gradients,
optimiser) over random windows, and two programs with the work that it cannot avoid: ::

    ratio = step / (target's forward with its logits + only the head's matmuls, forward and back)

The head's matmuls are its linear layers, its output matrix and the two products of its attention
over the keys up to each query. The ratio measures the rest: norms, softmax, loss and optimiser. The
programs take turns; the best sample of each counts.
"""

import argparse
import dataclasses
import json
import time
from collections.abc import Callable
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.table import Table

from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.blocks.attention import Attention
from jspec.models.blocks.mlp import GatedMlp
from jspec.models.decoder import DecoderConfig, Layer
from jspec.models.heads.eagle import EagleParams
from jspec.tools.bench import environment
from training.data.batch import Batch
from training.losses.chunks import loss_chunk
from training.networks.attention import QUERY_BLOCK
from training.networks.forward import Frozen, head_of, packed_states
from training.networks.linear import LINEARS
from training.tasks import eagle
from training.tasks.eagle_task import EagleTask, Recipe
from training.trainer import TrainerSettings
from training.trainer.mesh import make_mesh, shard
from training.trainer.programs import make_programs

_RESULTS = Path(__file__).with_name("results")


@dataclasses.dataclass(frozen=True)
class Shape:
    """Sizes of a measurement."""

    target: DecoderConfig
    draft_vocab_size: int
    batch: int
    length: int


SHAPES = {
    "demo": Shape(
        DecoderConfig(
            vocab_size=4096, hidden_size=256, max_positions=1024, tie_embeddings=True,
            layers=(Layer(Attention(4, 2, head_dim=64), GatedMlp(704)),) * 8,
        ), draft_vocab_size=4096, batch=4, length=512,
    ),
    "smollm2": Shape(  # SmolLM2-135M
        DecoderConfig(
            vocab_size=49152, hidden_size=576, max_positions=8192, tie_embeddings=True,
            layers=(Layer(Attention(9, 3, head_dim=64), GatedMlp(1536)),) * 30,
        ), draft_vocab_size=8192, batch=4, length=512,
    ),
    "1b": Shape(  # Llama 3.2 1B
        DecoderConfig(
            vocab_size=128256, hidden_size=2048, max_positions=4096, tie_embeddings=True,
            layers=(Layer(Attention(32, 8, head_dim=64), GatedMlp(8192)),) * 16,
        ), draft_vocab_size=32000, batch=8, length=2048,
    ),
}  # fmt: skip


def random_batch(shape: Shape) -> Batch:
    """Return full windows of random tokens."""
    size = (shape.batch, shape.length + 1)
    tokens = np.random.default_rng(0).integers(0, shape.target.vocab_size, size, np.int32)
    return Batch(jnp.array(tokens), jnp.ones(size, jnp.int32), jnp.ones(size, jnp.float32))


def make_task(shape: Shape, recipe: Recipe, compute: str) -> EagleTask:
    """Return the task of ``training.distill eagle`` for these sizes."""
    settings = eagle.HeadSettings(draft_vocab_size=shape.draft_vocab_size)
    config = eagle.head_config(settings, "eagle3", shape.target)
    return EagleTask(config, shape.target, recipe, compute)


def step_seconds(task: EagleTask, frozen: Frozen, batch: Batch, settings: TrainerSettings):
    """Return a function that runs one step of the trainer and returns its seconds."""
    mesh = make_mesh(settings)
    programs = make_programs(task, frozen, settings, mesh)
    held = shard(frozen, mesh)
    state = [programs.init(held)]

    def run() -> float:
        begin = time.perf_counter()
        state[0], metrics = programs.step(state[0], held, batch, None)
        jax.block_until_ready((state[0], metrics))
        return time.perf_counter() - begin

    return run


def target_seconds(task: EagleTask, frozen: Frozen, batch: Batch) -> Callable[[], float]:
    """Return a function that times the target over the batch, with its logits."""
    linear, layers = LINEARS[task.compute], task.head.capture_layers

    def forward(frozen: Frozen, batch: Batch):
        captured, x = packed_states(
            frozen.target, task.target, batch, task.compute, capture_layers=layers
        )
        output = head_of(frozen.target)
        x = x.reshape(-1, x.shape[-1])[: batch.tokens[:, 1:].size]
        best = jax.lax.map(
            lambda rows: linear(rows, output).max(-1), x.reshape(_chunks(x), -1, x.shape[-1])
        )
        return captured, best

    return _timed(jax.jit(forward), frozen, batch)


def matmul_seconds(task: EagleTask, head: EagleParams, batch: Batch) -> Callable[[], float]:
    """Return a function that times the head's matmuls of a step alone."""
    linear, config = LINEARS[task.compute], task.head
    mixer, mlp, rows = head.layers[0].mixer, head.layers[0].feed_forward, batch.tokens[:, 1:].size

    def step(head: EagleParams, x):
        wide = jnp.concatenate([x] * len(config.capture_layers), -1)
        results = [_both_ways(linear, wide, head.fc)]
        x = results[0][0]
        for _ in range(task.recipe.unroll):
            wide = _product(results, linear, jnp.concatenate([x, x], -1), mixer.qkv)
            results.append(_attention_products(config.network, wide, len(batch.tokens)))
            x = _product(results, linear, wide[:, : mixer.output.shape[0]], mixer.output)
            x = _product(results, linear, x, mlp.gate_up)
            x = _product(results, linear, x[:, : mlp.down.shape[0]], mlp.down)
            chunks = x.reshape(_chunks(x), -1, x.shape[-1])
            zeros = jnp.zeros_like(head.head)
            results.append(
                jax.lax.scan(
                    lambda total, rows: _scored(linear, head.head, total, rows), zeros, chunks
                )
            )
        return results

    return _timed(jax.jit(step), head, jnp.ones((rows, config.hidden_size)))


def _both_ways(product: Callable, x: Array, y: Array) -> tuple[Array, Array, Array]:
    """Return a product and its two gradients, as if the loss were half its square."""
    out, back = jax.vjp(product, x, y)
    return out, *back(out)


def _product(results: list, product: Callable, x: Array, y: Array) -> Array:
    """Return the product; store it with its gradients, or the compiler would drop them."""
    results.append(_both_ways(product, x, y))
    return results[-1][0]


def _attention_products(config: DecoderConfig, qkv: Array, batch: int) -> list:
    """Return the products of attention with their gradients, a block of queries at a time."""
    mixer = config.layers[0].mixer
    heads, kv_heads, width = mixer.num_heads, mixer.num_kv_heads, mixer.head_dim
    parts = jnp.moveaxis(qkv.reshape(batch, -1, heads + 2 * kv_heads, width), 2, 1)
    q, k, v = jnp.split(parts, (heads, heads + kv_heads), 1)
    q = q.reshape(batch, kv_heads, heads // kv_heads, -1, width)
    by_keys = lambda q, k: jnp.einsum("bhqd,bhkd->bhqk", q, k)
    by_values = lambda s, v: jnp.einsum("bhqk,bhkd->bhqd", s, v)
    results = []
    for start in range(0, k.shape[2], QUERY_BLOCK):
        end = min(start + QUERY_BLOCK, k.shape[2])
        rows = q[..., start:end, :].reshape(batch, kv_heads, -1, width)
        scores = _product(results, by_keys, rows, k[:, :, :end])
        results[-1] = results[-1][1:]
        results.append(_both_ways(by_values, scores, v[:, :, :end])[1:])
    return results


def _scored(linear: Callable, weight: Array, total: Array, rows: Array) -> tuple[Array, Array]:
    _, grad_rows, grad_weight = _both_ways(linear, rows, weight)
    return total + grad_weight, grad_rows


def _chunks(x: Array) -> int:
    """Return the number of chunks of rows in which the logits are computed, as in training."""
    return max(x.shape[0] // loss_chunk(), 1)


def _timed(program, *arguments) -> Callable[[], float]:
    jax.block_until_ready(program(*arguments))

    def run() -> float:
        begin = time.perf_counter()
        jax.block_until_ready(program(*arguments))
        return time.perf_counter() - begin

    return run


def measure(shape: Shape, unroll: int, arguments: argparse.Namespace) -> dict:
    """Return milliseconds of the three programs, best of the repeats, and their ratio."""
    recipe = Recipe(unroll=unroll, loss=arguments.loss)
    task = make_task(shape, recipe, arguments.compute)
    dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
    target = decoder.init_params(jax.random.key(0), shape.target, jnp.dtype(dtype))
    known = shape.draft_vocab_size
    full = known == shape.target.vocab_size
    vocabulary = None if full else jnp.arange(known, dtype=jnp.int32)
    frozen, batch = Frozen(target, None, vocabulary), random_batch(shape)
    settings = TrainerSettings(
        steps=1000,
        batch=shape.batch,
        optimizer=arguments.optimizer,
        accumulate=1,
        compute=arguments.compute,
    )
    head = task.init(jax.random.key(1), frozen)
    runs = {
        "step": step_seconds(task, frozen, batch, settings),
        "target_forward": target_seconds(task, frozen, batch),
        "head_matmuls": matmul_seconds(task, head, batch),
    }
    runs["step"]()
    best = dict.fromkeys(runs, float("inf"))
    for _ in range(arguments.repeats):
        best = {name: min(best[name], run()) for name, run in runs.items()}
    return {
        "unroll": unroll,
        "milliseconds": {name: round(1e3 * seconds, 1) for name, seconds in best.items()},
        "ratio": round(best["step"] / (best["target_forward"] + best["head_matmuls"]), 3),
        "tokens_per_second": round(shape.batch * shape.length / best["step"]),
    }


def main() -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="cost of a training step of an EAGLE-3 head")
    parser.add_argument("--shape", choices=SHAPES, default="demo")
    parser.add_argument("--unroll", type=int, nargs="+", default=(1, 4, 7))
    parser.add_argument("--loss", default="ce")
    parser.add_argument("--optimizer", choices=("adamw", "muon"), default="adamw")
    parser.add_argument("--compute", choices=tuple(LINEARS), default="bfloat16")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--out", type=Path, default=_RESULTS / "distil_step.json")
    arguments = parser.parse_args()
    rows = [measure(SHAPES[arguments.shape], unroll, arguments) for unroll in arguments.unroll]
    options = {name: vars(arguments)[name] for name in ("shape", "loss", "optimizer", "compute")}
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    document = environment.describe() | options | {"rows": rows}
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    table = Table("unroll", "step ms", "target's forward", "head's matmuls", "ratio", "tokens/s")
    for row in rows:
        parts = [f"{value:.0f}" for value in row["milliseconds"].values()]
        table.add_row(
            str(row["unroll"]), *parts, f"{row['ratio']:.2f}", f"{row['tokens_per_second']}"
        )
    Console().print(table)


if __name__ == "__main__":
    main()
