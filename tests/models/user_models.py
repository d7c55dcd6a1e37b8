"""Language models of a user in plain JAX, Linen and NNX, and their targets."""

import functools

import jax
import jax.numpy as jnp
from flax import linen, nnx
from jax import lax

from jspec.models import adapters

VOCAB, LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 64, 2, 32, 4, 2, 8, 64


def separate_attention(q, k, v, window=None):
    """Return causal attention of q [B, H, T, D] and k, v [B, Hkv, T, D], without jspec."""
    k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
    index = jnp.arange(q.shape[2])
    mask = index[:, None] >= index
    if window is not None:
        mask &= index[:, None] - index < window
    scores = jnp.where(mask, q @ k.swapaxes(2, 3) * q.shape[-1] ** -0.5, -jnp.inf)
    return jax.nn.softmax(scores, -1) @ v


def split_heads(fused):
    """Split [B, T, (H + 2 Hkv) D] into q, k, v with heads before tokens."""
    heads = fused.reshape(*fused.shape[:2], -1, HEAD_DIM).swapaxes(1, 2)
    return jnp.split(heads, [HEADS, HEADS + KV_HEADS], axis=1)


def join_heads(mixed):
    return mixed.swapaxes(1, 2).reshape(mixed.shape[0], mixed.shape[2], HEADS * HEAD_DIM)


@functools.cache
def plain_init(seed):
    return jax.jit(draw_weights, static_argnums=0)(seed)


def draw_weights(seed):
    keys = iter(jax.random.split(jax.random.key(seed), 20))
    normal = lambda *shape: jax.random.normal(next(keys), shape) * shape[0] ** -0.5
    layer = lambda: {
        "qkv": normal(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM),
        "out": normal(HEADS * HEAD_DIM, WIDTH),
        "up": normal(WIDTH, 2 * WIDTH),
        "down": normal(2 * WIDTH, WIDTH),
    }
    return {
        "embedding": 3 * normal(VOCAB, WIDTH),
        "positions": 2 * normal(POSITIONS, WIDTH),
        "layers": [layer() for _ in range(LAYERS)],
    }


def norm(x):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6)


def plain_model(params, tokens, positions=None, attend=None, windows=(None, None)):
    positions = jnp.arange(tokens.shape[1])[None] if positions is None else positions
    x = params["embedding"][tokens] + params["positions"][positions]
    hidden = [x]
    for index, layer in enumerate(params["layers"]):
        q, k, v = split_heads(norm(x) @ layer["qkv"])
        mixed = attend(index, q, k, v) if attend else separate_attention(q, k, v, windows[index])
        x = x + join_heads(mixed) @ layer["out"]
        x = x + jax.nn.gelu(norm(x) @ layer["up"]) @ layer["down"]
        hidden.append(x)
    return norm(x) @ params["embedding"].T, hidden


class LinenModel(linen.Module):
    """A model with dropout and a batch norm, which inference mode turns off."""

    sizes: tuple[int, ...] = (2 * WIDTH,) * LAYERS

    @linen.compact
    def __call__(self, tokens, positions=None, attend=None, *, train=True):
        positions = jnp.arange(tokens.shape[1])[None] if positions is None else positions
        embedding = linen.Embed(VOCAB, WIDTH, embedding_init=linen.initializers.normal(0.5))
        x = embedding(tokens) + linen.Embed(POSITIONS, WIDTH)(positions)
        for index, size in enumerate(self.sizes):
            q, k, v = split_heads(
                linen.Dense((HEADS + 2 * KV_HEADS) * HEAD_DIM)(linen.RMSNorm()(x))
            )
            mixed = attend(index, q, k, v) if attend else separate_attention(q, k, v)
            x = x + linen.Dropout(0.1, deterministic=not train)(
                linen.Dense(WIDTH)(join_heads(mixed))
            )
            x = linen.BatchNorm(use_running_average=not train)(x)
            x = x + linen.Dense(WIDTH)(jax.nn.gelu(linen.Dense(size)(linen.RMSNorm()(x))))
        return embedding.attend(linen.RMSNorm()(x))

    def one_hot(self, tokens):
        return jax.nn.one_hot(tokens, VOCAB)


def rotate(x, positions):
    """Rotate x [B, H, T, D] by positions [B or 1, T]."""
    angles = positions[:, None, :, None] / 100.0 ** jnp.linspace(0, 1, HEAD_DIM // 2)
    left, right = jnp.split(x, 2, -1)
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)


class NNXBlock(nnx.Module):
    def __init__(self, rngs):
        self.qkv = nnx.Linear(WIDTH, (HEADS + 2 * KV_HEADS) * HEAD_DIM, rngs=rngs)
        self.out = nnx.Linear(HEADS * HEAD_DIM, WIDTH, rngs=rngs)
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.batch_norm = nnx.BatchNorm(WIDTH, rngs=rngs)

    def __call__(self, x, positions, index, attend):
        q, k, v = split_heads(self.qkv(norm(x)))
        q, k = rotate(q, positions), rotate(k, positions)
        mixed = attend(index, q, k, v) if attend else separate_attention(q, k, v)
        x = self.batch_norm(x + self.dropout(self.out(join_heads(mixed))))
        return x + self.down(jax.nn.gelu(self.up(norm(x))))


class NNXModel(nnx.Module):
    def __init__(self, rngs):
        self.embedding = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NNXBlock(rngs) for _ in range(LAYERS)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens, positions=None, attend=None):
        positions = jnp.arange(tokens.shape[1])[None] if positions is None else positions
        x = self.embedding(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x, positions, index, attend)
        return self.head(norm(x))


@functools.cache
def nnx_model(seed):
    return nnx.jit(lambda key: NNXModel(nnx.Rngs(key)))(jax.random.key(seed))


# --- Their targets, and an independent forward pass ---


@functools.cache
def model_of(kind):
    """Return a function use_cache -> (target, params), and the forward pass tokens -> logits."""
    sizes = {"max_positions": POSITIONS, "vocab_size": VOCAB}
    if kind == "plain":
        params = plain_init(0)
        make = lambda use_cache: adapters.from_function(
            plain_model, params, use_cache=use_cache, **sizes
        )
        forward = lambda tokens: plain_model(params, tokens)[0]
    elif kind == "linen":
        module = LinenModel()
        init = jax.jit(functools.partial(module.init, train=False))
        variables = init(jax.random.key(1), jnp.zeros((1, POSITIONS), jnp.int32))
        make = lambda use_cache: adapters.from_linen(
            module, variables, use_cache=use_cache, options={"train": False}, **sizes
        )
        forward = lambda tokens: module.apply(variables, tokens, train=False)
    else:
        module = nnx_model(2)
        make = lambda use_cache: adapters.from_nnx(module, use_cache=use_cache, **sizes)
        inference = nnx.view(module, deterministic=True, use_running_average=True)
        forward = lambda tokens: inference(tokens)
    return make, jax.jit(forward)
