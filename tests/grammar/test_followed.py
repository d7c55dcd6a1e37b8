"""Grammars that the host follows: they allow what automata allow, with any drafter."""

import json

import jax
import numpy as np
import pytest
from transformers import AutoTokenizer

from jspec import SamplingParams
from jspec.engine import functional as host
from jspec.engine.engine import Engine
from jspec.engine.pages import Pool
from jspec.engine.plan import Plan
from jspec.grammar import automata, followed
from jspec.grammar.followed import Follower
from tests import llm_fixtures, tiny

END = 0
PATTERNS = [
    r"(ab|c){2,9}x?",
    r"[^\"\x00]{3}\"",
    r"the (quick|lazy) (fox|dog)s?",
    "ü+|你好|[0-9]{2}",
]
NODE = {
    "type": "object",
    "properties": {
        "v": {"enum": [0, 7]},
        "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/n"}]},
    },
    "required": ["v", "next"],
    "additionalProperties": False,
}
RECURSIVE = {"$defs": {"n": NODE}, "$ref": "#/$defs/n"}
EBNF = 'root ::= "[" item ("," item)* "]"\nitem ::= "a" | "[" root "]"'
TAGS = {
    "structures": [{"begin": "<f>", "schema": {"enum": [1, 2]}, "end": "</f>"}],
    "triggers": ["<f>"],
}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    root = tmp_path_factory.getbasetemp() / "followed"
    return AutoTokenizer.from_pretrained(llm_fixtures.checkpoints(root)["target"])


def grammar_of(tokenizer, vocab_size=llm_fixtures.VOCAB, **outputs):
    return followed.followed(outputs, tokenizer, frozenset({END}), vocab_size)


def unpacked(bits, vocab_size):
    return np.unpackbits(bits.view(np.uint8), axis=-1, bitorder="little")[..., :vocab_size] > 0


def allowed_by(automaton, state, vocab_size):
    listed = np.zeros(vocab_size, bool)
    listed[automaton.listed[state]] = True
    return listed ^ automaton.forbids[state]


# ------------------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_those_of_an_automaton_unless_a_single_byte_may_follow(tokenizer, pattern):
    size, random = llm_fixtures.VOCAB, np.random.default_rng(0)
    automaton = automata.compiled(pattern, tokenizer, frozenset({END}), size)
    follower = Follower(grammar_of(tokenizer, regex=pattern))
    spelled_as = automata.token_bytes(tokenizer, size, frozenset({END})).items()
    spelling_of = {END: b""} | {token: text for text, tokens in spelled_as for token in tokens}
    text, state = [], automaton.start
    for _ in range(12):
        # A chain of tokens that the automaton allows, of which the text takes the first two.
        branch, states = [], [state]
        for _ in range(3):
            begin, end = automaton.first[states[-1]], automaton.first[states[-1] + 1]
            choices = np.flatnonzero(automaton.tokens[begin:end] != END)
            if not choices.size:
                break
            taken = begin + random.choice(choices)
            branch.append(int(automaton.tokens[taken]))
            states.append(automaton.following[taken])
        nodes = np.array([-1, *branch]), np.arange(-1, len(branch)), np.ones(len(states), bool)
        masks = unpacked(follower.masks(text, *nodes), size)
        for mask, here in zip(masks, states, strict=True):
            allowed = allowed_by(automaton, here, size)
            assert mask.any() and not (mask & ~allowed).any()
            if len({spelling_of[token][:1] for token in np.flatnonzero(allowed)}) > 1:
                np.testing.assert_array_equal(mask, allowed)
        if not branch:
            break
        text, state = text + branch[:2], states[min(2, len(branch))]


def test_siblings_and_nodes_that_cannot_be_accepted_do_not_disturb_each_other(tokenizer):
    size = llm_fixtures.VOCAB
    a, b, x = (tokenizer.convert_tokens_to_ids(token) for token in "abx")
    follower = Follower(grammar_of(tokenizer, regex="aab|abx"))
    tokens = np.array([a, a, b, x, b, b])  # the last one follows x, which follows nothing
    parents = np.array([-1, 0, 0, 0, 1, 3])
    masks = unpacked(follower.masks([a], tokens, parents, np.array([1, 1, 1, 1, 0, 1], bool)), size)
    assert [np.flatnonzero(masks[node]).tolist() for node in (1, 2)] == [[b], [x]]
    assert {a, b} <= set(np.flatnonzero(masks[0]).tolist())
    assert masks[3:].all()


# ------------------------------------------------------------------------------------------ engine

DRAFTERS = {"none": tiny.NONE, "ngram": tiny.NGRAM, "draft_model": tiny.DRAFT}


def spelled():
    """Return a tokenizer of the tiny target's 64 tokens: the end, and characters."""
    from tokenizers import Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    letters = [chr(code) for code in range(48, 48 + 63)]
    model = models.WordLevel({"<end>": 0} | {letter: 1 + i for i, letter in enumerate(letters)})
    inner = Tokenizer(model)
    inner.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<end>")


def rows(grammars):
    return [
        host.SequenceParams(
            prompt,
            max_tokens=18,
            temperature=0.9 * (stream % 2),
            stop_token_ids=(END,),
            stream=stream,
            **grammars(stream),
        )
        for stream, prompt in enumerate(tiny.prompts((3, 9, 5, 17)))
    ]


def run(plan, sequences, **options):
    engine = Engine(plan, tiny.params(), num_slots=3, capacity=64, **options)
    return [answer.tokens.tolist() for answer in engine.run(sequences)]


@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_are_those_under_an_automaton_on_the_device(name, paged):
    plan, known = Plan(tiny.TARGET, DRAFTERS[name], "coupled"), (spelled(), frozenset({END}), 64)
    pattern = "(ab?|[C-H]{2,3})+Z?"
    of_device = {"grammar": automata.compiled(pattern, *known)}
    of_host = {"followed_grammar": followed.followed({"regex": pattern}, *known)}
    expected = run(plan, rows(lambda stream: of_device if stream != 2 else {}))
    pool = Pool(plan, tiny.params(), num_pages=40, page_size=8) if paged else None
    texts = run(plan, rows(lambda stream: of_host if stream != 2 else {}), pool=pool)
    assert texts == expected
    assert pool is None or pool.blocks.num_used == 0
    alone = run(Plan(tiny.TARGET, tiny.NONE), rows(lambda _: of_host)[:1])
    assert alone == expected[:1]


def test_a_text_keeps_its_grammar_through_a_preemption_and_a_failed_launch(monkeypatch):
    plan, known = Plan(tiny.TARGET, tiny.DRAFT, "coupled"), (spelled(), frozenset({END}), 64)
    grammar = {"followed_grammar": followed.followed({"regex": "[A-Z]{3,40}"}, *known)}
    expected = run(plan, rows(lambda _: grammar))
    pool = Pool(plan, tiny.params(), num_pages=40, page_size=8)
    engine = Engine(plan, tiny.params(), num_slots=3, capacity=64, pool=pool)
    tickets = [engine.submit(row) for row in rows(lambda _: grammar)]
    for number in range(200):
        if number == 4:
            engine.preempt(), engine.preempt()
        with monkeypatch.context() as patch:
            if number == 7:

                def failed(*_):
                    raise jax.errors.JaxRuntimeError("INTERNAL: gone")

                patch.setattr("jspec.engine.worker.verify_alone", failed)
            engine.step()
        if engine.is_idle:
            break
    assert [ticket.answer.tokens.tolist() for ticket in tickets] == expected


def test_a_batch_by_hand_refuses_a_grammar_that_only_an_engine_follows():
    grammar = followed.followed({"regex": "a+"}, spelled(), frozenset({END}), 64)
    row = host.SequenceParams((1,), followed_grammar=grammar)
    with pytest.raises(ValueError, match=r"grammar of prompt 0 .* has no automaton, so an Engine"):
        host.start(Plan(tiny.TARGET, tiny.NONE), tiny.params(), [row])


# --------------------------------------------------------------------------------------------- LLM


def levels(value):
    return 0 if value is None else 1 + levels(value["next"])


@pytest.mark.parametrize("method", ["none", "ngram"])
def test_a_recursive_schema_is_followed_with_speculation(root, method):
    llm = llm_fixtures.llm(root, method)
    params = SamplingParams(
        max_tokens=60, temperature=1.0, seed=3, n=8, structured_outputs={"json": RECURSIVE}
    )
    [output] = llm.generate("the quick", params)
    ended = [each.text for each in output.outputs if each.finish_reason == "stop"]
    assert ended and max(levels(json.loads(text)) for text in ended) >= 2


@pytest.mark.parametrize(
    ("outputs", "begins"),
    [
        ({"json": {"type": "string", "maxLength": 5000}}, '"'),
        ({"json": {}}, ""),
        ({"json": {"type": "integer", "minimum": 100, "maximum": 120}}, "1"),
        ({"grammar": EBNF}, "["),
        ({"structural_tag": TAGS}, ""),
        ({"structural_tag": json.dumps(TAGS)}, ""),
    ],
)
def test_settings_without_an_automaton_are_followed(root, outputs, begins):
    llm = llm_fixtures.llm(root, "none")
    params = SamplingParams(max_tokens=12, structured_outputs=outputs)
    [output] = llm.generate("the quick", params)
    [text] = output.outputs
    assert text.text.startswith(begins) and text.finish_reason in ("stop", "length")


@pytest.mark.parametrize(
    ("outputs", "message"),
    [
        ({"grammar": "root ::= ("}, "cannot be followed: "),
        ({"grammar": 3}, "must be a schema"),
        ({"structural_tag": {"structures": [], "triggers": []}}, "it holds no structure"),
        (
            {"structural_tag": TAGS | {"triggers": ["<g>"]}},
            "'<f>' starts with none of the triggers",
        ),
        ({"structural_tag": TAGS | {"structures": [{"begin": 1}]}}, "cannot be followed"),
        ({"structural_tag": TAGS | {"triggers": [""]}}, "trigger must not be empty"),
        ({"structural_tag": "[1]"}, "cannot be followed"),
        ({"json": {"$ref": "#/$defs/missing"}}, "the JSON schema cannot be followed"),
    ],
)
def test_settings_that_nothing_follows_are_refused_at_once(outputs, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(structured_outputs=outputs)
