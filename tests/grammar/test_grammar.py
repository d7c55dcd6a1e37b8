"""Tests of structured output: automata, drafts along branches, and generated texts."""

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import regex

from jspec import SamplingParams
from jspec.core import token_fsm, trees
from jspec.core.types import Draft, History, Params
from jspec.engine import functional as host
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile, request_of
from jspec.engine.sequences import SequenceParams
from jspec.grammar import automata, limits
from tests import llm_fixtures, tiny
from tests.drafters.several import DRAFTERS
from tests.fakes import OnePassDrafter, run_rows, script, whole
from tests.plain_processors import Spelling

END = 0
SPELLED = ("", "a", "b", "ab", "ba", "aa", '"', "1", "2", "12", "{", "}", ":", "x", " ")


TOKENIZER = Spelling(SPELLED)


def compiled(pattern, vocab_size=64):
    return automata.compiled(pattern, TOKENIZER, frozenset({END}), vocab_size)


def completes(pattern, text):
    """Return whether some match begins with ``text``."""
    return regex.fullmatch(pattern, text, partial=True) is not None


PATTERNS = [r"(ab)+1?", r"a{2,4}b*", r"(1|2)+x", r"[ab]*1"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_exactly_the_tokens_that_continue_some_match_are_allowed(pattern):
    rules = automata.joined([compiled(pattern), None])
    rng = np.random.default_rng(0)
    state, text = jnp.array(rules.start), ""
    for _ in range(8):
        allowed = np.array(token_fsm.allowed(rules, state[:, None], 64))[:, 0]
        assert allowed[1].all()  # a row without a grammar
        expected = {
            id for id, token in enumerate(SPELLED) if token and completes(pattern, text + token)
        }
        expected |= {END} if re.fullmatch(pattern, text) else set()
        assert set(np.flatnonzero(allowed[0])) == expected
        exists = token_fsm.find(rules, jnp.full(64, state[0]), jnp.arange(64))[1]
        np.testing.assert_array_equal(exists, allowed[0])
        if not expected - {END}:
            break
        token = int(rng.choice(sorted(expected - {END})))
        state, text = token_fsm.find(rules, state, jnp.array([token, 5]))[0], text + SPELLED[token]


def test_memory_does_not_grow_with_the_vocabulary():
    # One state allows almost every token, so it lists the forbidden ones.
    rules = automata.joined([compiled('"[^"]*"', 100_000), compiled("(ab){20}", 100_000)])
    assert sum(part.nbytes for part in jax.tree.leaves(rules)) < 8_000


LINES = [r"(ab)+1?", r'\{"(a|b)+":[12]{1,9}\}', None, r"(aa|x )*2"]


def requests(temperature):
    return [
        SequenceParams(
            prompt,
            max_tokens=24,
            temperature=temperature,
            stream=index,
            stop_token_ids=(END,),
            grammar=pattern and compiled(pattern),
        )
        for index, (prompt, pattern) in enumerate(
            zip(tiny.prompts((1, 9, 5, 3)), LINES, strict=True)
        )
    ]


@pytest.fixture(scope="module")
def plain():
    plan = Plan(tiny.TARGET, tiny.NONE)
    return {t: host.generate_sequences(plan, tiny.params(), requests(t)) for t in (0.0, 0.9)}


def test_finished_texts_match_and_truncated_texts_are_prefixes_of_matches(plain):
    for answers in plain.values():
        for pattern, answer in zip(LINES, answers, strict=True):
            if pattern is None:
                continue
            tokens = answer.tokens.tolist()
            text = "".join(SPELLED[token] for token in tokens if token != END)
            if answer.finish_reason == "stop":
                assert re.fullmatch(pattern, text), text
            else:
                assert len(tokens) == 24 and completes(pattern, text), text
    assert any(answer.finish_reason == "stop" for answer in plain[0.9])


def test_a_batch_may_have_no_grammar(plain):
    plan = Plan(tiny.TARGET, tiny.NONE)
    alone = host.generate_sequences(plan, tiny.params(), requests(0.9), max_num_seqs=1)
    assert [one.tokens.tolist() for one in alone] == [one.tokens.tolist() for one in plain[0.9]]


def test_end_tokens_beyond_the_vocabulary_are_ignored():
    ends = frozenset({END, 500})
    with_it, without = (
        automata.compiled("ab|b*", TOKENIZER, given, 64) for given in (ends, frozenset({END}))
    )
    np.testing.assert_array_equal(with_it.tokens, without.tokens)
    with pytest.raises(ValueError, match="needs a token that ends the text"):
        automata.compiled("ab", TOKENIZER, frozenset({500}), 64)


@pytest.mark.parametrize(
    "name",
    [
        name if name in ("ngram", "eagle2") else pytest.param(name, marks=pytest.mark.slow)
        for name in DRAFTERS
    ],
)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_speculation_changes_no_structured_text(name, temperature, plain):
    drafter, weights = DRAFTERS[name]
    params = Params(tiny.params().target, weights)
    plan = whole(tiny.TARGET, drafter, "coupled")
    answers = host.generate_sequences(plan, params, requests(temperature), profile=tiny.NODES)
    for pattern, answer, expected in zip(LINES, answers, plain[temperature], strict=True):
        assert answer.tokens.tolist() == expected.tokens.tolist()
        if pattern is None:
            continue
        # Children of the root that the grammar forbids were never drafted.
        text, tokens = "", answer.tokens.tolist()
        for accepted, nodes, parents in zip(*answer.trace, strict=True):
            for token in nodes[(parents == 0) & (nodes >= 0) & (np.arange(nodes.size) > 0)]:
                assert token == END or completes(pattern, text + SPELLED[token])
            text += "".join(SPELLED[token] for token in tokens[: accepted + 1])
            tokens = tokens[accepted + 1 :]


@pytest.mark.parametrize("tree", ["chain", "best_first"])
def test_a_one_pass_head_follows_the_grammar_on_every_branch(tree, plain):
    drafter = OnePassDrafter(4, tiny.VOCAB, tree)
    rows, texts = requests(0.0), plain[0.0]
    params = Params(tiny.params().target, script(rows, texts, length=128))
    plan = whole(tiny.TARGET, drafter)
    for answer, expected in zip(run_rows(plan, params, rows), texts, strict=True):
        assert answer.tokens.tolist() == expected.tokens.tolist()
        assert set(answer.trace[0][:-1].tolist()) == {4}


def test_forced_tokens_are_drafted_without_a_drafter():
    plan = whole(tiny.TARGET, tiny.NGRAM)
    rows = [
        SequenceParams(
            prompt,
            max_tokens=24,
            temperature=t,
            stop_token_ids=(END,),
            grammar=compiled(r"[12](:x){7}(ab|ba)"),
        )
        for prompt, t in zip(tiny.prompts((9, 5)), (0.0, 1.0), strict=True)
    ]
    for answer in host.generate_sequences(plan, tiny.params(), rows, profile=tiny.NODES):
        text = "".join(SPELLED[token] for token in answer.tokens.tolist())
        assert re.fullmatch(r"[12](:x){7}(ab|ba)", text) and answer.finish_reason == "stop"
        # One token is free and forces 14; then up to two are free, and they force the end.
        accepted, nodes, _ = answer.trace
        assert (nodes[1, 1:] >= 0).all() and accepted[1:4].tolist() == [4, 4, 4]
        assert answer.rounds <= 7


def test_forbidden_lookup_nodes_are_dropped_with_their_descendants():
    row = SequenceParams((1,), grammar=compiled(r"(ab)+1?"), stop_token_ids=(END,))
    request, _ = request_of([row], Profile().grown([row]), 64)
    history = History(
        jnp.ones((1, 8), jnp.int32),
        jnp.ones(1, jnp.int32),
        jnp.array(request.sampling.automaton.start),
    )
    parents = np.array([-1, 0, 0, 1, 2, 4], np.int32)
    tokens = jnp.array([[1, 1, 2, 2, 1, 2]], jnp.int32)  # a(b) and b(a(b))
    tree = trees.broadcast(trees.from_parents(parents, 3), 1)
    draft = Draft(tokens, parents, jnp.ones((1, 6), bool), max_depth=3)
    valid = token_fsm.prune(request.sampling.automaton, history, draft, tree).valid
    assert valid.tolist() == [[True, True, False, True, False, False]]
    drawn = draft.replace(logits=jnp.zeros((1, 6, 64)))
    assert token_fsm.prune(request.sampling.automaton, history, drawn, tree).valid.all()


SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 4}, "size": {"enum": [1, 22, 333]}},
    "required": ["name", "size"],
}


@pytest.mark.parametrize("method", ["none", "draft_model"])
def test_texts_of_a_model_follow_a_schema_a_choice_or_a_pattern(root, method):
    llm = llm_fixtures.llm(root, method)
    asked = [
        {"json": SCHEMA},
        {"choice": ["grüße", "a.b"]},
        {"regex": r"\d{3}-\d{2}"},
        {"json": json.dumps(SCHEMA)},
    ]
    params = [
        SamplingParams(temperature=t, seed=2, max_tokens=60, structured_outputs=each)
        for t, each in zip((1.0, 1.0, 0.8, 0.0), asked, strict=True)
    ]
    outputs = [each.outputs[0] for each in llm.generate(["the", "def", "x", "a"], params)]
    assert [each.finish_reason for each in outputs] == ["stop"] * 4
    for each in (outputs[0], outputs[3]):
        value = json.loads(each.text)
        assert len(value["name"]) <= 4 and value["size"] in (1, 22, 333)
    assert outputs[1].text in ("grüße", "a.b")
    assert re.fullmatch(r"\d{3}-\d{2}", outputs[2].text)


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"regex": "("}, "structured_outputs cannot be compiled: Failed to build DFA"),
        ({"regex": ""}, "must be a schema (json), a text that is not empty"),
        ({"choice": []}, "a list of such texts (choice)"),
        ({"grammar": "root ::= ("}, "structured_outputs={'grammar': 'root ::= ('} cannot be"),
        ({"lark": "start: x"}, "must hold one of json, regex, choice, json_object"),
        ({"regex": "a", "choice": ["b"]}, "must hold one of json, regex, choice, json_object"),
        ({"json": "{"}, "the JSON schema cannot be followed"),
        ("a", "structured_outputs='a' must be a dict with one of json, regex, choice"),
    ],
)
def test_unsupported_structured_outputs_raise(root, asked, message):
    with pytest.raises(ValueError) as error:
        llm_fixtures.llm(root, "none").generate("a", SamplingParams(structured_outputs=asked))
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "integer", "minimum": 3}, "the schema has 'minimum', which is not followed"),
        ({"type": "array", "items": {"multipleOf": 2}}, "'items' of the schema has 'multipleOf'"),
        ({"type": "array", "uniqueItems": True}, "has 'uniqueItems'"),
        ({"type": "string", "minLength": 2, "pattern": "a"}, "has 'pattern' and 'minLength', of"),
        ({"allOf": [{"type": "string"}, {"type": "integer"}]}, "has 'allOf' of several"),
        ({"properties": {"a": {}}, "allOf": [{}]}, "has 'allOf' beside 'properties', which is not"),
        ({"properties": {"a": {}}, "required": ["b"]}, "requires ['b'], which are no 'properties'"),
        ({"type": "object", "required": ["a"]}, "has 'required', which is not followed"),
        ({"type": "integer", "enum": ["x"]}, "allows 'x', which is no integer"),
        ({"type": "string", "properties": {}}, "has type 'string', but keywords of an object"),
        ({"prefixItems": [{}], "minItems": 2}, "has 1 'prefixItems', outside minItems"),
        (
            {"$ref": "#/$defs/a", "maxLength": 1, "$defs": {"a": {}}},
            "has 'maxLength' beside '$ref'",
        ),
        ({"$defs": {"a": {"not": {}}}, "$ref": "#/$defs/a"}, "'a' of the schema has 'not'"),
    ],
)
def test_schema_keywords_that_would_be_ignored_raise(schema, words):
    with pytest.raises(ValueError, match="the JSON schema cannot be followed") as error:
        automata.pattern_of({"json": schema})
    assert words in str(error.value)


def test_schemas_in_the_style_of_pydantic_are_supported():
    person = {
        "$defs": {
            "Pet": {
                "properties": {"kind": {"const": "cat", "type": "string"}},
                "required": ["kind"],
                "title": "Pet",
                "type": "object",
            }
        },
        "properties": {
            "name": {"title": "Name", "type": "string", "maxLength": 8},
            "age": {"anyOf": [{"type": "integer"}, {"type": "null"}], "default": None},
            "pets": {"items": {"$ref": "#/$defs/Pet"}, "maxItems": 2, "type": "array"},
            "place": {
                "prefixItems": [{"type": "number"}, {"type": "number"}],
                "minItems": 2,
                "maxItems": 2,
                "type": "array",
            },
        },
        "required": ["name", "pets"],
        "title": "Person",
        "type": "object",
    }
    pattern = automata.pattern_of({"json": person})
    assert re.fullmatch(pattern, '{"name": "Ann", "age": 7, "pets": [{"kind": "cat"}]}')
    assert not re.fullmatch(pattern, '{"name": "Ann", "pets": [{"kind": "dog"}]}')


def test_exploding_patterns_raise_in_bounded_time(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.1)
    with pytest.raises(ValueError, match="more than memory or time allow, and may have at most"):
        compiled("[ab]*a[ab]{40}")
    monkeypatch.setattr(limits, "SECONDS", 60)
    monkeypatch.setattr(limits, "MOST_STATES", 1000)
    with pytest.raises(ValueError, match="2050 states, and may have at most 1000 states"):
        compiled("[ab]*a[ab]{10}")


def test_a_grammar_without_an_end_is_refused():
    with pytest.raises(ValueError, match="needs a token that ends the text"):
        automata.compiled("a", TOKENIZER, frozenset(), 64)


@pytest.mark.parametrize("kind", ["byte level", "metaspace"])
def test_token_bytes_spell_every_token(kind, tmp_path):
    from tokenizers import Tokenizer as Fast
    from tokenizers import decoders, models
    from transformers import PreTrainedTokenizerFast

    byte_level = kind == "byte level"
    words = ["<s>", "Ġa", "Ã¼", "x"] if byte_level else ["<s>", "\u2581a", "<0xC3>", "x"]
    fast = Fast(models.BPE({word: id for id, word in enumerate(words)}, []))
    fast.decoder = decoders.ByteLevel() if byte_level else decoders.Metaspace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=fast, bos_token="<s>")
    ids_of = automata.token_bytes(wrapped, 4)
    assert ids_of == {b" a": [1], ("ü".encode() if byte_level else b"\xc3"): [2], b"x": [3]}
