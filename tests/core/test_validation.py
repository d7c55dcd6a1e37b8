"""Tests of argument checks: each error names the argument and a remedy, before anything runs."""

import dataclasses
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec.core.logprobs import Scoring
from jspec.drafters import Hybrid, ParallelDraftModel
from jspec.engine.functional import SequenceParams, generate_sequences, start
from jspec.engine.profile import Profile
from jspec.models.decoder import Decoder
from tests import tiny
from tests.drafters import custom, heads

PROMPT = [3, 1, 4]
WEIGHTS = tiny.params()
PLAIN = jspec.Plan(tiny.TARGET, tiny.NONE)
PICKY = SequenceParams((1,), 2, temperature=0.8, allowed_token_ids=(1, 2))
EAGLE = heads.drafter("eagle", 4)


def generate(prompts=(PROMPT,), target=tiny.TARGET, params=WEIGHTS.target, **settings):
    return jspec.generate(target, params, prompts, **{"max_new_tokens": 4, **settings})


def refused(*words, **mistake):
    with pytest.raises(ValueError) as error:
        generate(**mistake)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


# --- Targets and drafters -----------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Depthless(jspec.Drafter):
    """A drafter that declares too little."""

    tree_size = 1

    def propose(self, params, request, shared, memory, history):
        return None


@dataclasses.dataclass(frozen=True)
class Listing(jspec.NoDrafter):
    """A drafter that is not hashable, because a setting is a list."""

    words: list


@dataclasses.dataclass(frozen=True)
class Sizeless(jspec.Target):
    """A target without a limit of its length."""

    vocab_size = 4

    def init_cache(self, batch, capacity):
        return ()

    def forward(self, params, tokens, tree, cache, capture_layers):
        return None


LOADED = SimpleNamespace(target=tiny.TARGET, params=WEIGHTS.target)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Decoder, ["target=Decoder is a class", "Decoder(...)"]),
        (WEIGHTS.target, ["is no jspec.Target", "jspec.load(...).target"]),
        (LOADED, ["pass its .target, and its .params as the weights"]),
        (None, ["target=None is no jspec.Target", "inherit from jspec.Target"]),
        (Sizeless(), ["Sizeless has no max_positions; declare it in the class"]),
    ],
)
def test_errors_say_why_a_value_is_no_target(target, words):
    refused(*words, target=target)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (jspec.NGram, ["drafter=NGram is a class", "NGram(...)"]),
        ("ngram", ["drafter='ngram'", "speculative_config", "jspec.NGram(4, 2, 5)"]),
        ("", ["drafter=''"]),
        (tiny.TARGET, ["jspec.DraftModel(model.config, num_speculative_tokens)"]),
        (LOADED, ["jspec.DraftModel(model.config, num_speculative_tokens)", "drafter_params"]),
        (custom.Duck(), ["drafter=Duck() is no jspec.Drafter", "inherits from jspec.Drafter"]),
        (Depthless(), ["Depthless has no max_depth, proposal; declare it in the class"]),
        (Listing([1]), ["drafter=Listing must be hashable", "tuples and frozensets"]),
    ],
)
def test_errors_say_why_a_value_is_no_drafter(drafter, words):
    refused(*words, drafter=drafter)


@pytest.mark.parametrize("make", [jspec.DraftModel, lambda c, k: jspec.Eagle(c, tiny.TARGET, k)])
def test_a_model_in_place_of_its_config_raises(make):
    with pytest.raises(ValueError, match=r"is a Decoder; pass its \.config\.$"):
        make(Decoder(tiny.DRAFT_CONFIG), 4)


# --- Weights ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "words"),
    [
        (None, ["the weights do not fit Decoder: pass DecoderParams, not None"]),
        (WEIGHTS, ["pass DecoderParams, not a Params"]),
        (WEIGHTS.drafter, ["64, 32, 2, but theirs 64, 16, 1", "another checkpoint"]),
    ],
)
def test_weights_of_another_target_raise(params, words):
    refused(*words, params=params)


@pytest.mark.parametrize(
    ("drafter", "params", "words"),
    [
        (tiny.DRAFT, None, ["DraftModel: pass DecoderParams, not None"]),
        (tiny.DRAFT, WEIGHTS.target, ["DraftModel", "64, 16, 1, but theirs 64, 32, 2"]),
        (
            dataclasses.replace(tiny.DRAFT, use_heterogeneous_vocab=True),
            WEIGHTS.drafter,
            ["pass TranslatingParams, not a DecoderParams"],
        ),
        (
            ParallelDraftModel(tiny.DRAFT_CONFIG, tiny.TARGET, 4, mask_token_id=0),
            heads.random_params("eagle"),
            ["ParallelDraftModel: pass DecoderParams, not an EagleParams"],
        ),
        (EAGLE, None, ["Eagle: pass EagleParams, not None"]),
        (EAGLE, heads.random_params("medusa"), ["pass EagleParams, not a MedusaParams"]),
        (heads.drafter("medusa", 4), heads.random_params("eagle"), ["pass MedusaParams"]),
        (Hybrid((tiny.NGRAM, EAGLE)), None, ["Hybrid", "Eagle: pass EagleParams, not None"]),
        (Hybrid((tiny.NGRAM, EAGLE)), heads.random_params("eagle"), ["must be a pair"]),
    ],
)
def test_weights_of_another_drafter_raise(drafter, params, words):
    refused(*words, drafter=drafter, drafter_params=params)


def test_generate_sequences_needs_params():
    with pytest.raises(ValueError, match=r"params is a DecoderParams; pass jspec\.Params\("):
        generate_sequences(PLAIN, WEIGHTS.target, [SequenceParams((1,))])


# --- Prompts and settings -----------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [[1, 2, 3], ["abc"], "abc", [[1.5]], [["1"]], [np.eye(2)]])
def test_prompts_must_be_lists_of_token_ids(prompts):
    refused("each must be a list of token ids, as in [[1, 2, 3]]", prompts=prompts)


def test_prompts_may_be_arrays_bytes_or_tuples():
    expected = generate()[0].tokens.tolist()
    for prompts in (np.array([PROMPT]), jnp.array([PROMPT]), [bytes(PROMPT)], (tuple(PROMPT),)):
        assert generate(prompts)[0].tokens.tolist() == expected


def test_unknown_settings_of_generate_raise():
    refused("no setting 'temprature'; did you mean 'temperature'?", temprature=0.8)
    refused("no setting 'max_tokens'; give max_new_tokens", max_tokens=3)
    refused("no setting 'stream'", stream=3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: start(PLAIN, WEIGHTS, []), "sequences=[] is empty; give at least one"),
        (lambda: start(PLAIN, WEIGHTS, SequenceParams((1,))), "sequences=SequenceParams("),
        (
            lambda: generate_sequences(PLAIN, WEIGHTS, SequenceParams((1,))),
            "must be a list of SequenceParams",
        ),
        (
            lambda: generate_sequences(PLAIN, WEIGHTS, [(1,)]),
            "sequences=[(1,)] must be a list of",
        ),
        (
            lambda: SequenceParams((1,), grammar="[a-z]"),
            "grammar='[a-z]' must be what jspec.grammar.automata.compiled",
        ),
        (lambda: Scoring(1.5), "count=1.5 must be a whole number, 0 or more"),
        (
            lambda: start(PLAIN, WEIGHTS, [PICKY], profile=Profile(scoring=Scoring(65))),
            "count=65 of Scoring must",
        ),
    ],
)
def test_errors_name_the_invalid_sequence_setting(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value)


def test_no_sequences_give_no_answers():
    assert generate_sequences(PLAIN, WEIGHTS, []) == []


def test_without_filters_those_in_use_are_compiled():
    batch = start(PLAIN, WEIGHTS, [PICKY])
    assert batch.request.sampling.names == ("temperature",)
    assert list(batch.request.sampling.processors.values) == ["allowed_token_ids"]
