"""Trains an EAGLE-3 head on the standard library in minutes, to measure trees with.

    python -m benchmarks.quick_head --target DIR --out DIR

The recipe of EAGLE-3 (arXiv 2503.01840) and no more: the head is unrolled on its own outputs over
teacher-forced tokens, the loss is cross-entropy against the target, weighted 0.8^k at step k.
"""

import argparse
import dataclasses
import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.progress import track

from benchmarks.workload import HELD_OUT
from jspec import head_files, loading
from jspec.models import decoder
from jspec.models.decoder import DecoderConfig, DecoderParams
from jspec.models.heads import eagle
from jspec.models.heads.eagle import EagleConfig, EagleParams
from jspec.types import Array
from training import data, objective
from training.data.tokenizer import encode_documents

LENGTH, BATCH = 256, 8  # tokens of a window, windows of a step
UNROLL, DECAY = 5, 0.8  # steps on the head's own outputs, and the weight of each after the last
LEARNING_RATE = 2e-3


def head_config(target: DecoderConfig) -> EagleConfig:
    """One block of the target's shape, reading three depths as EAGLE-3's default does."""
    layers = target.num_layers
    return EagleConfig(
        network=dataclasses.replace(target, num_layers=1, windows=()),
        generation=3,
        capture_layers=(2, layers // 2, layers - 3),
        target_hidden_size=target.hidden_size,
        target_vocab_size=target.vocab_size,
        own_head=True,
    )


def unrolled_attention(q: Array, keys: list[Array], values: list[Array]) -> Array:
    """Training-time test: causal over the rows of step 0, then each row's own later steps.

    q [B, H, T, D]; keys and values of the steps so far, [B, Hkv, T, D] each; returns [B, H, T, D].
    """
    repeat = lambda x: jnp.repeat(x, q.shape[1] // x.shape[1], axis=1)
    keys, values = map(repeat, keys), list(map(repeat, values))
    q = q * q.shape[-1] ** -0.5
    causal = jnp.tril(jnp.ones((q.shape[2], q.shape[2]), bool))
    first = jnp.where(causal, jnp.einsum("bhid,bhjd->bhij", q, next(keys)), -jnp.inf)
    later = [jnp.einsum("bhid,bhid->bhi", q, key)[..., None] for key in keys]
    weights = jax.nn.softmax(jnp.concatenate([first, *later], -1), -1)
    length = q.shape[2]
    mixed = jnp.einsum("bhij,bhjd->bhid", weights[..., :length], values[0])
    for step, value in enumerate(values[1:]):
        mixed += weights[..., length + step, None] * value
    return mixed


def loss_of(
    head: EagleParams, config: EagleConfig, target: DecoderParams, sizes: DecoderConfig,
    windows: Array,
) -> tuple[Array, Array]:  # fmt: skip
    """The weighted loss over windows [B, T + 1], and acceptance sum(min(p, q)) of each step [S]."""
    linear = objective.linear_bfloat16
    positions = jnp.broadcast_to(jnp.arange(windows.shape[1]), windows.shape)
    x, captured = decoder.trunk(
        target, sizes, decoder.embed(target, sizes, windows), positions,
        objective.causal_attention, linear=linear, capture_layers=config.capture_layers,
    )  # fmt: skip
    normed = decoder.rms_norm(x, target.norm, sizes.norm_eps)
    # Row i: feature i, token i + 1 and, from the target, the law of token i + 2.
    rows = windows.shape[1] - 1
    features = eagle.fuse(head, config, tuple(x[:, :rows] for x in captured), linear=linear)
    keys, values, streams, taught, weights = [], [], [], [], []

    def attend(_: int, q: Array, k: Array, v: Array) -> Array:
        keys.append(k)
        values.append(v)
        return unrolled_attention(q, keys, values)

    for step in range(UNROLL):
        shifted = lambda x, by=step + 1: jnp.roll(x, -by, axis=1)[:, :rows]
        embedded = decoder.embed(target, sizes, shifted(windows))
        features = eagle.blocks(
            head, config, embedded, features, positions[:, :rows] + step, attend, linear=linear
        )
        inside = jnp.arange(rows) + step + 1 < windows.shape[1]
        streams.append(decoder.rms_norm(features, head.norm, config.network.norm_eps))
        taught.append(shifted(normed))
        weights.append(jnp.broadcast_to(jnp.where(inside, DECAY**step, 0.0), windows[:, 1:].shape))

    output = objective.head_of(target)
    steps = jnp.broadcast_to(jnp.arange(UNROLL)[:, None, None], (UNROLL, *windows[:, 1:].shape))

    def score(x: Array, matrix: Array, given) -> dict[str, Array]:
        taught, weight, step = given
        log_q = jax.nn.log_softmax(linear(x, matrix))
        log_p = jax.nn.log_softmax(linear(taught, output))
        overlap = jnp.minimum(jnp.exp(log_p), jnp.exp(log_q)).sum(-1)
        means = {"loss": -weight * (jnp.exp(log_p) * log_q).sum(-1)}
        return means | {f"{k}": UNROLL * jnp.where(step == k, overlap, 0) for k in range(UNROLL)}

    flat = lambda parts: jnp.stack(parts).reshape(-1, *parts[0].shape[2:])
    given = jax.lax.stop_gradient((flat(taught), flat(weights), steps.reshape(-1)))
    means = objective.mean_by_chunks(score, flat(streams), head.head, given)
    return UNROLL * means["loss"], jnp.stack([means[f"{k}"] for k in range(UNROLL)])


def initial(config: EagleConfig, target: DecoderParams) -> EagleParams:
    """A head that hands on the deepest feature to the target's output matrix: an early exit."""
    head = eagle.init_params(jax.random.key(0), config)
    size = config.target_hidden_size
    early_exit = head.fc.at[-size:].add(jnp.eye(size))
    return head.replace(
        fc=early_exit, norm=target.norm.astype(jnp.float32),
        head=objective.head_of(target).astype(jnp.float32),
    )  # fmt: skip


def train(target: loading.LoadedModel, steps: int) -> tuple[EagleConfig, EagleParams]:
    """The head after ``steps`` steps on the standard library but for the held-out modules."""
    documents = data.find_documents(["stdlib"])
    held_out = {name.split(".")[0] for name in HELD_OUT}
    texts = (each.text for each in documents if each.module not in held_out)
    tokenizer = target.tokenizer.backend_tokenizer
    tokens = np.concatenate([np.asarray(ids) for ids in encode_documents(tokenizer, texts)])
    windows = data.Windows(tokens, LENGTH)

    config = head_config(target.config)
    head = initial(config, target.params)
    schedule = optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, steps // 10, steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, b2=0.95))

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(head, state, batch):
        grads, accepted = jax.grad(loss_of, has_aux=True)(
            head, config, target.params, target.config, batch
        )
        updates, state = optimizer.update(grads, state, head)
        return optax.apply_updates(head, updates), state, accepted

    state = optimizer.init(head)
    for index in track(range(steps), "training"):
        head, state, accepted = step(head, state, windows.batch(index, BATCH))
        if index % 100 == 99:
            print(index + 1, "accepted by position", np.round(np.asarray(accepted), 3))
    return config, head


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="a quickly trained EAGLE-3 head")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=600)
    arguments = parser.parse_args()
    target = loading.load(arguments.target, "float32")
    head_files.save_head(arguments.out, *train(target, arguments.steps), target.config)


if __name__ == "__main__":
    main()
