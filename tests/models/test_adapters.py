"""Tests that adapted models give the text, logits and hidden states of the model itself."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jspec.core import kv_cache, trees
from jspec.core.history import root_token
from jspec.core.types import Draft, Drafter, Params
from jspec.drafters import NGram, NoDrafter
from jspec.engine.functional import SequenceParams, generate_sequences
from jspec.engine.loop import launch
from jspec.engine.plan import Plan
from jspec.models import adapters
from tests.models.user_models import (
    HEAD_DIM,
    POSITIONS,
    VOCAB,
    WIDTH,
    LinenModel,
    model_of,
    nnx_model,
    norm,
    plain_init,
    plain_model,
)

PROMPTS = ((3,), (5, 9, 5, 9, 5, 9, 5), (1, 2, 3, 4, 1, 2, 3, 4, 1, 2, 3))  # shortest first
NEW_TOKENS = 20


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
class WindingTree(Drafter):
    """A drafter of trees in which the text is on changing branches, or absent."""

    text: tuple[tuple[int, ...], ...]  # per row, padding rows of the batch included

    max_depth, tree_size = 2, 7
    proposal = "deterministic"

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
        sizes.append(launch._cache_size())
    assert sizes[0] == sizes[1]
    assert texts[0] != texts[1]


def test_an_nnx_module_keeps_training_and_its_snapshot_does_not_change():
    module = nnx.clone(nnx_model(2))
    _, params = adapters.from_nnx(module, max_positions=POSITIONS)
    before = params["head"]["bias"]
    module.head.bias[...] = before + 1
    assert not module.blocks[0].dropout.deterministic
    np.testing.assert_array_equal(params["head"]["bias"], before)
