"""Researchers' mistakes: each is told by its name and with its remedy, before anything runs."""

import dataclasses
from collections.abc import Callable
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest

import jspec
from jspec import topology
from jspec.drafters import Hybrid, ParallelDraftModel
from jspec.drafters.adaptive import Adaptive
from jspec.generate import Row, generate_rows, start
from jspec.logprobs import Scoring
from jspec.models.decoder import Decoder
from jspec.verify import RULES
from tests import tiny
from tests.drafters import heads

PROMPT = [3, 1, 4]
WEIGHTS = tiny.params()
PLAIN = jspec.Plan(tiny.TARGET, tiny.NONE)
PICKY = Row((1,), 2, temperature=0.8, allowed_token_ids=(1, 2))
EAGLE = heads.drafter("eagle", 4)


def generate(prompts=(PROMPT,), target=tiny.TARGET, params=WEIGHTS.target, **settings):
    return jspec.generate(target, params, prompts, **{"max_new_tokens": 4, **settings})


def refused(*words, **mistake):
    with pytest.raises(ValueError) as error:
        generate(**mistake)
    for word in words:
        assert word in str(error.value), f"{word!r} is not in: {error.value}"


# --- What is handed over ------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Listing(jspec.NoDrafter):
    """A setting that is a list: no key of a compiled program."""

    words: list


LOADED = SimpleNamespace(target=tiny.TARGET, params=WEIGHTS.target)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        (Decoder, ["target=Decoder is a class", "Decoder(...)"]),
        (WEIGHTS.target, ["has no vocab_size", "jspec.load(...).target"]),
        (LOADED, ["pass its .target, and its .params as the weights"]),
        (None, ["target=None has no vocab_size"]),
    ],
)
def test_what_is_no_target_is_told_what_it_lacks(target, words):
    refused(*words, target=target)


@pytest.mark.parametrize(
    ("drafter", "words"),
    [
        (jspec.NGram, ["drafter=NGram is a class", "NGram(...)"]),
        ("ngram", ["drafter='ngram'", "speculative_config", "jspec.NGram(4, 2, 5)"]),
        ("", ["drafter=''"]),
        (tiny.TARGET, ["jspec.DraftModel(model.config, num_speculative_tokens)"]),
        (LOADED, ["jspec.DraftModel(model.config, num_speculative_tokens)", "drafter_params"]),
        (Listing([1]), ["drafter=Listing must be hashable", "tuples and frozensets"]),
    ],
)
def test_what_is_no_drafter_is_told_what_it_lacks(drafter, words):
    refused(*words, drafter=drafter)


@pytest.mark.parametrize("make", [jspec.DraftModel, lambda c, k: jspec.Eagle(c, tiny.TARGET, k)])
def test_a_model_in_place_of_its_sizes_is_told_where_they_are(make):
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
def test_weights_of_another_target_are_refused(params, words):
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
        (Adaptive(tiny.DRAFT, (0, 4)), None, ["Adaptive", "DraftModel: pass DecoderParams"]),
        (Hybrid((tiny.NGRAM, EAGLE)), None, ["Hybrid", "Eagle: pass EagleParams, not None"]),
        (Hybrid((tiny.NGRAM, EAGLE)), heads.random_params("eagle"), ["pass a pair"]),
    ],
)
def test_weights_of_another_drafter_are_refused(drafter, params, words):
    refused(*words, drafter=drafter, drafter_params=params)


def test_weights_that_are_no_params_are_refused_by_generate_rows():
    with pytest.raises(ValueError, match=r"params is a DecoderParams; pass jspec\.Params\("):
        generate_rows(PLAIN, WEIGHTS.target, [Row((1,))])


# --- Prompts and settings -----------------------------------------------------------------------


@pytest.mark.parametrize("prompts", [[1, 2, 3], ["abc"], "abc", [[1.5]], [["1"]], [np.eye(2)]])
def test_prompts_that_are_no_lists_of_token_ids_are_refused(prompts):
    refused("each must be a list of token ids, as in [[1, 2, 3]]", prompts=prompts)


def test_prompts_may_be_arrays_of_any_kind():
    listed = generate()[0].tokens.tolist()
    for prompts in (np.array([PROMPT]), jnp.array([PROMPT]), [bytes(PROMPT)], (tuple(PROMPT),)):
        assert generate(prompts)[0].tokens.tolist() == listed


def test_settings_that_generate_has_not_are_named_and_not_overruled():
    refused("no setting 'temprature'; did you mean 'temperature'?", temprature=0.8)
    refused("no setting 'max_tokens'; give max_new_tokens", max_tokens=3)
    refused("no setting 'stream'", stream=3)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: start(PLAIN, WEIGHTS, []), "rows=[] are none; give at least one"),
        (lambda: start(PLAIN, WEIGHTS, Row((1,))), "rows=Row(prompt=(1,), "),
        (lambda: generate_rows(PLAIN, WEIGHTS, Row((1,))), "must be a list of jspec.generate.Row"),
        (lambda: generate_rows(PLAIN, WEIGHTS, [(1,)]), "rows=[(1,)] must be a list of jspec."),
        (lambda: Row((1,), grammar="[a-z]"), "grammar='[a-z]' must be what jspec.grammar.compiled"),
        (lambda: Scoring(1.5), "count=1.5 must be a whole number, 0 or more"),
        (lambda: start(PLAIN, WEIGHTS, [PICKY], scoring=Scoring(65)), "count=65 of Scoring must"),
    ],
)
def test_rows_and_what_is_to_be_known_of_them_are_told_what_they_should_be(call, words):
    with pytest.raises(ValueError) as error:
        call()
    assert words in str(error.value)


def test_no_rows_have_no_answers():
    assert generate_rows(PLAIN, WEIGHTS, []) == []


@pytest.mark.parametrize(
    ("warps", "words"),
    [
        ((), "warps=() lack 'allowed_token_ids', 'temperature', which the rows ask for; add"),
        (("temperature",), "lack 'allowed_token_ids', which"),
        (("temprature",), "warps=('temprature',) must be a tuple of names among 'structured_out"),
        ("temperature", "warps='temperature' must be a tuple of names among"),
        (3, "warps=3 must be a tuple"),
    ],
)
def test_warps_without_one_that_a_row_asks_for_are_refused(warps, words):
    with pytest.raises(ValueError) as error:
        start(PLAIN, WEIGHTS, [PICKY], warps=warps)
    assert words in str(error.value)


def test_warps_in_any_order_are_those_of_one_program():
    names = start(PLAIN, WEIGHTS, [PICKY], warps=["top_k", "temperature", "allowed_token_ids"])
    assert names.request.sampling.names == ("temperature", "top_k")


# --- What a drafter of one's own gives ----------------------------------------------------------


def _draft(size=5, batch=1, depth=4, **changed):
    draft = jspec.Draft(
        jnp.zeros((batch, size), jnp.int32),
        topology.chain(size - 1),
        jnp.ones((batch, size), bool),
        max_depth=depth,
    )
    return draft.replace(**changed)


@dataclasses.dataclass(frozen=True)
class Own(jspec.NoDrafter):
    """A chain of 4 tokens, as one mistakes it."""

    give: Callable = lambda memory: (_draft(), memory)
    learn: Callable = lambda memory, shared: (memory, shared)

    max_depth: int = 4

    tree_size = 5

    def init(self, params, request, capacity):
        return {"seen": jnp.zeros(1, jnp.int32)}

    def propose(self, params, request, shared, memory, history):
        return self.give(memory)

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        return self.learn(memory, shared)


DRAFTS = {
    "no root": (_draft(4), ["tokens of int32[1, 4] in place of int32[1, 5]", "the root included"]),
    "no batch": (_draft(tokens=jnp.zeros(5, jnp.int32)), ["tokens of int32[5]", "B=1 rows"]),
    "floats": (_draft(tokens=jnp.zeros((1, 5))), ["tokens of float32[1, 5]", "int32[1, 5]"]),
    "valid of the row": (_draft(valid=jnp.ones(5, bool)), ["valid of bool[5]", "bool[1, 5]"]),
    "valid as numbers": (_draft(valid=jnp.ones((1, 5))), ["valid of float32[1, 5]"]),
    "few parents": (_draft(parents=np.array([-1, 0])), ["parents of int", "int32[5]"]),
    "parents behind": (
        _draft(parents=np.array([-1, 2, 0, 2, 3], np.int32)),
        ["parents=[-1, 2, 0, 2, 3]", "node 1 does not stand behind its parent"],
    ),
    "narrow logits": (_draft(logits=jnp.zeros((1, 5, 8))), ["logits of float32[1, 5, 8]", "64]"]),
    "flat logits": (_draft(logits=jnp.zeros(64)), ["logits of float32[64]", "[1, 5, 64]"]),
    "drawn at no node": (_draft(sampled=jnp.ones(5, bool)), ["sampled of bool[5]"]),
    "another depth": (_draft(depth=3), ["max_depth=3", "the drafter has max_depth=4"]),
}


@pytest.mark.parametrize("mistake", DRAFTS)
def test_a_misshapen_draft_is_told_what_it_should_be(mistake):
    draft, words = DRAFTS[mistake]
    refused("Own.propose", *words, drafter=Own(lambda memory: (draft, memory)))


def test_a_draft_that_is_deeper_than_its_drafter_says_is_refused():
    shallow = Own(lambda memory: (_draft(depth=3), memory), max_depth=3)
    refused("parents=[-1, 0, 1, 2, 3], 4 deep, but the drafter has max_depth=3", drafter=shallow)


@pytest.mark.parametrize("given", [None, _draft(), (jnp.zeros((1, 5)), ()), (_draft(), (), ())])
def test_what_is_no_draft_with_a_memory_is_refused(given):
    refused("Own.propose must return (jspec.Draft, memory), not ", drafter=Own(lambda _: given))


MEMORIES = {
    "another shape": ({"seen": jnp.zeros(2, jnp.int32)}, "memory['seen'] of int32[2], but began"),
    "another dtype": ({"seen": jnp.zeros(1)}, "memory['seen'] of float32[1], but began with mem"),
    "another name": ({"met": jnp.zeros(1, jnp.int32)}, "memory['met'], but began with memory['s"),
    "no memory": ((), "a round of Own ends with nothing, but began with memory['seen']"),
}


@pytest.mark.parametrize("mistake", MEMORIES)
def test_a_memory_that_changes_its_form_is_refused(mistake):
    memory, words = MEMORIES[mistake]
    refused(words, drafter=Own(lambda _: (_draft(), memory)))
    refused(words, drafter=Own(learn=lambda _, shared: (memory, shared)))


def test_update_must_give_back_memory_and_what_is_shared():
    memory_alone = Own(learn=lambda memory, _: memory)
    refused("Own.update must return (memory, shared), not a dict", drafter=memory_alone)
    sharing = Own(learn=lambda memory, _: (memory, jnp.zeros(1)))
    refused("ends with memory['seen'], shared, but began with memory['seen'];", drafter=sharing)


# --- What a target of one's own gives -----------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Wrong(Decoder):
    """The tiny target, as one mistakes it."""

    give: Callable = lambda out: out

    def forward(self, *arguments):
        return self.give(super().forward(*arguments))


@pytest.mark.parametrize(
    ("give", "drafter", "words"),
    [
        (lambda out: out.logits, tiny.NONE, ["Wrong.forward must return a jspec.types.TargetOut"]),
        (
            lambda out: out.replace(logits=out.logits[:, -1]),
            tiny.NONE,
            ["Wrong.forward gave logits of float32[1, 64] in place of float32[1, 16, 64]"],
        ),
        (
            lambda out: out.replace(features=()),
            EAGLE,
            ["Wrong.forward gave 0 features", "capture_layers=(2,): one [B, N, D] of each"],
        ),
    ],
)
def test_what_a_target_fails_to_give_is_named(give, drafter, words):
    target = Wrong(tiny.TARGET.config, give)
    weights = None if drafter is tiny.NONE else heads.random_params("eagle")
    refused(*words, target=target, drafter=drafter, drafter_params=weights)


# --- What a rule of one's own gives -------------------------------------------------------------


def ruled(name, walk, **changes):
    return dataclasses.replace(RULES[name], name="mine", walk=walk, **changes)


def likeliest(law, draft, tree, _):
    """The walk of ``match`` over the likeliest tokens, and a law after every node, not the last."""
    draws = law.argmax(-1).astype(jnp.int32)
    return *RULES["match"].walk(law, draft, tree, draws)[:2], law


@dataclasses.dataclass
class Listed:
    """A walk with a setting that is a list."""

    setting: list

    def __call__(self, *given):
        return likeliest(*given)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        (likeliest, ["rule=<function likeliest", "jspec.verify.Rule", "what it is exact for"]),
        (3, ["rule=3 must be a name in jspec.RULES"]),
        (
            ruled("match", Listed([]), exact_for=frozenset({"chain"})),
            ["rule=Rule must be hashable", "frozen"],
        ),
        (ruled("match", likeliest, point_rule="matchh"), ["point_rule='matchh' of rule='mine'"]),
        (
            ruled("match", lambda *given: given[0]),
            ["the walk of rule 'mine' must return (path, num_accepted, next_logits), not "],
        ),
        (
            ruled("match", lambda *given: (given[3], given[3][:, 0] > 0, None)),
            ["the walk of rule 'mine' gave num_accepted of bool[1] in place of int32[1]"],
        ),
        (
            ruled("match", lambda *given: (given[3][0], given[3][:, 0], None)),
            ["gave path of int32[1] in place of int32[1, 1]"],
        ),
        (
            ruled("rejection", likeliest),
            ["gave next_logits of float32[1, 1, 64] in place of float32[1, 64]"],
        ),
    ],
)
def test_what_is_no_rule_is_told_what_it_should_be(rule, words):
    drafting = dict(drafter=tiny.DRAFT, drafter_params=WEIGHTS.drafter, temperature=0.8)
    refused(*words, rule=rule, **drafting)


def test_a_drafter_without_mistakes_gives_the_text_of_plain_decoding():
    drafted, plain = generate(drafter=Own())[0], generate()[0]
    assert drafted.tokens.tolist() == plain.tokens.tolist() and drafted.drafted > 0
