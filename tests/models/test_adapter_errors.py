"""Tests that the adapters refuse models that do not match their description."""
# ruff: noqa: ARG005 (models that ignore arguments)

import functools

import jax
import jax.numpy as jnp
import pytest
from flax import linen, nnx

from jspec.core import trees
from jspec.models import adapters
from tests.models.user_models import (
    POSITIONS,
    VOCAB,
    LinenModel,
    model_of,
    nnx_model,
    plain_init,
    plain_model,
)


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
        r"(?s)^the model must be hashable.*Listed.*; use tuples and frozen dataclasses for the set",
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
