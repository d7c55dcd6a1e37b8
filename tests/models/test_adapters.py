"""Tests of the adapters for models in plain JAX, Linen and NNX, with and without a cache."""
# ruff: noqa: ARG005 (models that ignore arguments)

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx
from jax import lax

from jspec.core import kv_cache, trees
from jspec.core.history import root_token
from jspec.core.types import Draft, Params
from jspec.drafters import NGram, NoDrafter
from jspec.engine.batch import SequenceParams, generate_sequences
from jspec.engine.loop import decode
from jspec.engine.plan import Plan
from jspec.models import adapters

VOCAB, LAYERS, WIDTH, HEADS, KV_HEADS, HEAD_DIM, POSITIONS = 64, 2, 32, 4, 2, 8, 64
PROMPTS = ((3,), (5, 9, 5, 9, 5, 9, 5), (1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3))  # shortest first
NEW_TOKENS = 20


# --- Models of a user, with their own attention, or ``attend`` if it is given ---


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


@functools.cache
def greedy_text(kind):
    """Return NEW_TOKENS greedy tokens after each prompt, each by a pass over the full text."""
    _, forward = model_of(kind)
    tokens = np.zeros((len(PROMPTS), POSITIONS), np.int32)
    lengths = np.array([len(prompt) for prompt in PROMPTS])
    for row, prompt in enumerate(PROMPTS):
        tokens[row, : len(prompt)] = prompt
    for _ in range(NEW_TOKENS):
        logits = np.asarray(forward(jnp.array(tokens)))
        tokens[np.arange(len(PROMPTS)), lengths] = [
            logits[row, length - 1].argmax() for row, length in enumerate(lengths)
        ]
        lengths += 1
    return tuple(
        tuple(tokens[row, len(prompt) : len(prompt) + NEW_TOKENS].tolist())
        for row, prompt in enumerate(PROMPTS)
    )


@dataclasses.dataclass(frozen=True)
class WindingTree:
    """A drafter of trees in which the text is on changing branches, or absent."""

    text: tuple[tuple[int, ...], ...]  # per row, padding rows of the batch included

    max_depth, tree_size = 2, 7
    capture_layers, proposal, noise = (), "deterministic", "own"

    def init(self, params, request, capacity):
        return ()

    def prefill(self, params, memory, tokens, features, start, valid):
        return memory

    def propose(self, params, request, shared, memory, history):
        parents = np.array([-1, 0, 0, 1, 1, 2, 2], np.int32)
        depth, side = np.array([0, 1, 1, 2, 2, 2, 2]), np.array([0, 0, 1, 0, 1, 0, 1])
        position = history.length[:, None] - 1 + depth
        right = jnp.take_along_axis(jnp.array(self.text), position, 1, mode="clip")
        correct = (position + parents) % 2 == side  # one of two siblings
        drafted = jnp.where(correct & (position % 5 > 0), right, right + 1 + side) % VOCAB
        valid = jnp.ones_like(drafted, dtype=bool)
        drafted = drafted.at[:, 0].set(root_token(history))
        return Draft(drafted, parents, valid, max_depth=2), memory

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        return memory, shared


def drafter_of(name, kind):
    if name == "tree":
        text = [
            (*prompt, *answer) for prompt, answer in zip(PROMPTS, greedy_text(kind), strict=True)
        ]
        longest = max(map(len, text))
        rows = [(*row, *[0] * (longest - len(row))) for row in [*text, (0,)]]
        return WindingTree(tuple(rows))
    return {"none": NoDrafter(), "ngram": NGram(3, 1, 2)}[name]


def generated(target, params, drafter, count=NEW_TOKENS):
    """Return the texts after PROMPTS, with one node bucket because compilation is slow."""
    plan = Plan(target, drafter, node_buckets=(drafter.tree_size,))
    rows = [SequenceParams(prompt, count) for prompt in PROMPTS]
    return generate_sequences(plan, Params(params), rows)


# --- Text ---


# Each kind of model, with and without a cache, and each drafter.
COVER = [
    ("plain", True, "none"),
    ("plain", True, "tree"),
    ("plain", False, "ngram"),
    ("linen", True, "ngram"),
    ("linen", False, "tree"),
    ("nnx", True, "tree"),
    ("nnx", False, "none"),
    ("nnx", True, "ngram"),
]


@pytest.mark.parametrize(("kind", "use_cache", "name"), COVER)
def test_an_adapted_model_gives_the_text_of_its_greedy_loop(kind, use_cache, name):
    target, params = model_of(kind)[0](use_cache)
    answers = generated(target, params, drafter_of(name, kind))
    assert tuple(tuple(answer.tokens.tolist()) for answer in answers) == greedy_text(kind)
    if name == "tree":  # nodes on changing branches were accepted
        assert min(answer.acceptance_length for answer in answers) > 1.8


def test_a_text_may_fill_every_position_of_a_model_without_a_cache():
    target, params = model_of("plain")[0](False)
    count = POSITIONS - len(PROMPTS[-1])
    answers = generated(target, params, drafter_of("ngram", "plain"), count)
    assert [len(answer.tokens) for answer in answers] == [count] * len(PROMPTS)
    texts = tuple(tuple(answer.tokens[:NEW_TOKENS].tolist()) for answer in answers)
    assert texts == greedy_text("plain")


# --- Logits and hidden states ---

CHAIN = trees.from_parents(trees.chain(8), 8)
TEXT = np.random.default_rng(3).integers(0, VOCAB, (2, 9), np.int32)


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "stateless"])
def test_captured_states_of_a_tree_equal_those_of_plain_text(use_cache):
    target, params = model_of("plain")[0](use_cache)
    start = np.array([4, 2])
    tree = trees.from_parents(np.array([-1, 0, 0, 2, 1, 3]), 3)  # 0, 2, 3, 5 are the text
    nodes, positions = np.array([0, 2, 3, 5]), start[:, None] + tree.depth
    drafted = np.take_along_axis(TEXT, positions, 1)
    drafted[:, [1, 4]] = 7

    @jax.jit
    def run(params):
        empty = target.init_cache(2, 16)
        filled = target.forward(params, jnp.array(TEXT), CHAIN, empty)
        rows = jnp.broadcast_to(jnp.arange(9), TEXT.shape)
        cache = kv_cache.append(empty, filled.tree_kv, rows, jnp.array(start))
        out = target.forward(params, jnp.array(drafted), tree, cache, capture_layers=(2, 0))
        logits, hidden = plain_model(params, TEXT)
        return (out.logits, *out.features), (logits, hidden[2], hidden[0])

    for actual, expected in zip(*run(params), strict=True):
        expected = np.take_along_axis(np.asarray(expected), positions[:, :, None], 1)
        np.testing.assert_allclose(actual[:, nodes], expected[:, nodes], atol=1e-5)


def test_sliding_windows_and_a_scale_reach_the_attention():
    params, windows = plain_init(0), (3, None)
    scaled = lambda attend: lambda i, q, k, v: attend(i, q * HEAD_DIM**-0.5, k, v)

    def model(params, tokens, positions, attend):
        return plain_model(params, tokens, positions, scaled(attend))

    target, _ = adapters.from_function(
        model, params, max_positions=POSITIONS, windows=windows, scale=1.0
    )

    @jax.jit
    def run(params):
        out = target.forward(params, jnp.array(TEXT), CHAIN, target.init_cache(2, 16))
        return out.logits, plain_model(params, TEXT, windows=windows)[0]

    np.testing.assert_allclose(*run(params), atol=1e-5)


def test_embed_and_unembed_call_the_functions_of_the_user():
    params = plain_init(0)
    target, _ = adapters.from_function(
        plain_model,
        params,
        max_positions=POSITIONS,
        embed=lambda params, tokens: params["embedding"][tokens],
    )
    np.testing.assert_array_equal(
        target.embed(params, jnp.array([3])), params["embedding"][jnp.array([3])]
    )
    with pytest.raises(ValueError, match="give unembed="):
        target.unembed(params, jnp.zeros((1, WIDTH)))

    module, (_, variables) = LinenModel(), model_of("linen")[0](True)
    target, _ = adapters.from_linen(
        module, variables, max_positions=POSITIONS, options={"train": False}, embed="one_hot"
    )
    assert target.embed(variables, jnp.array([3]))[0, 3] == 1

    module, rms = nnx_model(2), norm
    target, params = adapters.from_nnx(
        module,
        max_positions=POSITIONS,
        unembed=lambda module, x, *, norm: module.head(rms(x) if norm else x),
    )
    x = jnp.arange(1.0, WIDTH + 1)[None]
    np.testing.assert_allclose(target.unembed(params, x), module.head(rms(x)), rtol=1e-6)
    np.testing.assert_allclose(target.unembed(params, x, norm=False), module.head(x), rtol=1e-6)


# --- Equality and purity ---


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "stateless"])
@pytest.mark.parametrize("kind", ["plain", "linen", "nnx"])
def test_adapters_made_twice_are_equal(kind, use_cache):
    first, second = (model_of(kind)[0](use_cache)[0] for _ in range(2))
    assert first == second
    assert hash(first) == hash(second)


def test_equal_modules_with_other_weights_share_a_program():
    texts, sizes = [], []
    for seed in (2, 12):
        target, params = adapters.from_nnx(nnx_model(seed), max_positions=POSITIONS)
        answers = generated(target, params, drafter_of("ngram", "nnx"))
        texts.append(answers[0].tokens.tolist())
        sizes.append(decode._cache_size())
    assert sizes[0] == sizes[1]
    assert texts[0] != texts[1]


def test_an_nnx_module_keeps_training_and_its_snapshot_does_not_change():
    module = nnx.clone(nnx_model(2))
    _, params = adapters.from_nnx(module, max_positions=POSITIONS)
    before = params["head"]["bias"]
    module.head.bias[...] = before + 1
    assert not module.blocks[0].dropout.deterministic
    np.testing.assert_array_equal(params["head"]["bias"], before)


# --- Refusals, all before anything compiles ---


def cached(model):
    return adapters.from_function(model, plain_init(0), max_positions=POSITIONS)


def stateless(model):
    return adapters.from_function(model, plain_init(0), max_positions=POSITIONS, use_cache=False)


def with_attend(change):
    """Return the target of the plain model with changed calls of attend."""
    return cached(
        lambda params, tokens, positions, attend: plain_model(
            params, tokens, positions, functools.partial(change, attend)
        )
    )


class Noisy(nnx.Module):
    """A model that draws random numbers in every mode."""

    def __init__(self, rngs):
        self.rngs = rngs
        self.embedding = nnx.Embed(VOCAB, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        return self.embedding(tokens) + jax.random.normal(self.rngs(), (VOCAB,))


class Listed(linen.Module):
    sizes: list[int]

    @linen.compact
    def __call__(self, tokens):
        return linen.Embed(VOCAB, self.sizes[0])(tokens)


REFUSALS = {
    "a function without attend given as cached": (
        lambda: cached(lambda params, tokens: None),
        r"use_cache=False",
    ),
    "a function with attend given as stateless": (
        lambda: stateless(lambda params, tokens, positions, attend: None),
        r"use_cache=True",
    ),
    "a model that does not attend": (
        lambda: cached(lambda params, tokens, positions, attend: params["embedding"][tokens]),
        r"never called attend",
    ),
    "heads after nodes": (
        lambda: with_attend(
            lambda attend, i, q, k, v: attend(i, *(x.swapaxes(1, 2) for x in (q, k, v)))
        ),
        r"swapaxes\(1, 2\)",
    ),
    "query heads that are no multiple of key heads": (
        lambda: with_attend(lambda attend, i, q, k, v: attend(i, q[:, :3], k, v)),
        r"multiple",
    ),
    "keys and values of two dtypes": (
        lambda: with_attend(lambda attend, i, q, k, v: attend(i, q, k, v.astype(jnp.bfloat16))),
        r"one dtype",
    ),
    "a layer visited twice": (
        lambda: with_attend(lambda attend, i, q, k, v: attend(0, q, k, v)),
        r"twice for layer 0",
    ),
    "layers numbered from one": (
        lambda: with_attend(lambda attend, i, q, k, v: attend(i + 1, q, k, v)),
        r"from 0 on",
    ),
    "a traced layer": (
        lambda: with_attend(lambda attend, i, q, k, v: attend(jnp.int32(i), q, k, v)),
        r"Python int",
    ),
    "attend inside a transformation": (
        lambda: with_attend(
            lambda attend, i, q, k, v: jax.checkpoint(functools.partial(attend, i))(q, k, v)
        ),
        r"jax.checkpoint",
    ),
    "logits without a batch": (
        lambda: stateless(lambda params, tokens: params["embedding"][tokens[0]]),
        r"logits \[2, 3, V\].*float32\[3, 32\]",
    ),
    "logits of the last token alone": (
        lambda: stateless(lambda params, tokens: params["embedding"][tokens][:, -1:]),
        r"logits \[2, 3, V\]",
    ),
    "integer logits": (
        lambda: stateless(lambda params, tokens: tokens[..., None]),
        r"floating point",
    ),
    "a returned cache in place of hidden states": (
        lambda: stateless(lambda params, tokens: (params["embedding"][tokens], {"cache": tokens})),
        r"\(logits, hidden\)",
    ),
    "misshapen hidden states": (
        lambda: stateless(lambda params, tokens: (params["embedding"][tokens], [tokens])),
        r"hidden state 0",
    ),
    "another vocabulary": (
        lambda: adapters.from_function(
            plain_model, plain_init(0), max_positions=POSITIONS, vocab_size=65
        ),
        r"vocab_size=65.*64 columns",
    ),
    "no positions": (
        lambda: adapters.from_function(plain_model, plain_init(0), max_positions=0),
        r"max_positions=0",
    ),
    "windows of another number of layers": (
        lambda: adapters.from_function(
            plain_model, plain_init(0), max_positions=POSITIONS, windows=(3,)
        ),
        r"1 entries for 2 layers",
    ),
    "windows without a cache": (
        lambda: adapters.from_function(
            plain_model, plain_init(0), max_positions=POSITIONS, windows=(3, 3), use_cache=False
        ),
        r"belong to use_cache",
    ),
    "linen dropout": (
        lambda: adapters.from_linen(
            LinenModel(), model_of("linen")[0](True)[1], max_positions=POSITIONS, use_cache=False
        ),
        r"LinenModel is not a pure function.*(deterministic|running)",
    ),
    "linen fields that cannot be hashed": (
        lambda: adapters.from_linen(
            Listed([VOCAB]),
            {"params": {"Embed_0": {"embedding": jnp.zeros((VOCAB, VOCAB))}}},
            max_positions=POSITIONS,
            use_cache=False,
        ),
        r"(?s)hashable.*tuples",
    ),
    "nnx random numbers": (
        lambda: adapters.from_nnx(Noisy(nnx.Rngs(0)), max_positions=POSITIONS, use_cache=False),
        r"Noisy changes its variables.*count",
    ),
    "an unknown option": (
        lambda: adapters.from_nnx(nnx_model(2), max_positions=POSITIONS, options={"train": False}),
        r"train",
    ),
    "the wrong constructor": (
        lambda: adapters.from_nnx(LinenModel(), max_positions=POSITIONS),
        r"from_linen",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_errors_name_the_mismatch_of_a_model(case):
    make, message = REFUSALS[case]
    with pytest.raises(ValueError, match=message):
        make()


def test_capturing_states_that_a_model_does_not_return_raises():
    target, params = model_of("nnx")[0](False)
    chain = trees.from_parents(trees.chain(1), 1)
    run = lambda target, params, layers: target.forward(
        params, jnp.zeros((1, 2), jnp.int32), chain, target.init_cache(1, 4), layers
    )
    with pytest.raises(ValueError, match=r"\(1,\).*logits alone"):
        run(target, params, (1,))
    target, params = model_of("plain")[0](False)
    with pytest.raises(ValueError, match=r"returns 3 of them"):
        run(target, params, (1, 3))


def test_an_error_of_the_model_itself_keeps_its_type_and_gains_a_note():
    def broken(params, tokens):
        return params["no such weight"]

    with pytest.raises(KeyError) as caught:
        stateless(broken)
    assert "int32 tokens [2, 3]" in "".join(caught.value.__notes__)


# --- The check that runs a model ---


@pytest.mark.parametrize("use_cache", [True, False], ids=["cached", "stateless"])
def test_check_passes_a_pure_causal_model(use_cache):
    target, params = model_of("plain")[0](use_cache)
    assert adapters.check(target, params) < 1e-5


def test_check_detects_a_model_that_sees_the_future():
    def model(params, tokens):
        x = params["embedding"][tokens]
        return (x + x.mean(1, keepdims=True)) @ params["embedding"].T

    target, params = stateless(model)
    with pytest.raises(ValueError, match="causal"):
        adapters.check(target, params)


def test_check_detects_a_model_that_numbers_its_tokens_itself():
    def model(params, tokens, positions, attend):
        return plain_model(params, tokens, None, attend)

    target, params = cached(model)
    with pytest.raises(ValueError, match="positions it is given"):
        adapters.check(target, params)
