"""Everything that changes the text of a conversation is read, and only answers are learned."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.training import thinking, words
from tests.training.thinking import ANSWER, CALL, DIALOGUE, LAST, LATER, RESULT, TOOLS, USER
from training.data import readers
from training.data.encode import Encoder
from training.data.ledger import Ledger
from training.data.messages import without_weights
from training.data.prompts import read_prompts
from training.data.records import Chat, read_record
from training.data.settings import DataSettings, open_data


def encoded(line, template=thinking.OBJECTS, tokenizer=None):
    """Return (all text, learned text) of each example of a line, and the account."""
    tokenizer = tokenizer or thinking.tokenizer(template)
    ledger = Ledger()
    record = read_record(line, "file:1")
    documents = Encoder(tokenizer, len(tokenizer)).encode([record], ledger)
    texts = [
        (tokenizer.decode(document.ids), tokenizer.decode(document.ids[document.learned]))
        for document in documents
    ]
    return texts, ledger


def served(messages, tools, template=thinking.OBJECTS):
    """Return the prompt of the last message when it is served."""
    return thinking.tokenizer(template).apply_chat_template(
        messages, tools=tools, tokenize=False, add_generation_prompt=True
    )


CALLED = '<think>\nI add.\n</think>\n\n<call>add{"a": 2}</call><|im_end|>'


@pytest.mark.parametrize("template", [thinking.OBJECTS, thinking.TEXTS, thinking.MARKED])
def test_reasoning_and_calls_are_learned_behind_the_prompt_that_is_served(template):
    texts, ledger = encoded({"messages": DIALOGUE[:4], "tools": TOOLS}, template)
    assert len(texts) == 1  # nothing of a turn changes before the next question
    ((text, learned),) = texts
    assert learned == CALLED + "<think>\nThe tool says 4.\n</think>\n\nIt is 4.<|im_end|>"
    assert text.startswith(served([USER], TOOLS, template) + CALLED)
    assert text.rstrip().endswith(learned[len(CALLED) :])
    assert list(ledger.source.unused) == ["the key 'tool_call_id' of messages"]


@pytest.mark.parametrize("template", [thinking.OBJECTS, thinking.MARKED])
def test_each_turn_follows_the_text_of_its_prompt_where_earlier_reasoning_is_dropped(template):
    texts, _ = encoded({"messages": DIALOGUE, "tools": TOOLS}, template)
    assert [learned for _, learned in texts] == [
        CALLED,
        "<think>\nThe tool says 4.\n</think>\n\nIt is 4.<|im_end|>",
        "<think>\nEasy.\n</think>\n\n6<|im_end|>",
    ]
    called = CALL | {
        "content": "",
        "tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}],
    }
    asked = ([USER], [USER, called, RESULT], [USER, called, RESULT, ANSWER, LATER])
    for (text, learned), messages in zip(texts, asked, strict=True):
        assert text == served(messages, TOOLS, template) + learned + "\n"
    assert "I add." not in texts[-1][0]


TEXT = st.text("ab {}<>\n", min_size=1, max_size=6)
SPOKEN = st.fixed_dictionaries(
    {"role": st.just("assistant"), "content": TEXT},
    optional={"reasoning_content": TEXT, "weight": st.sampled_from([0, 1])},
)
CALLING = SPOKEN.map(lambda answer: answer | {"tool_calls": CALL["tool_calls"]})
TURN = st.tuples(
    TEXT.map(lambda text: [{"role": "user", "content": text}]),
    st.lists(CALLING, max_size=2).map(lambda calls: [m for call in calls for m in (call, RESULT)]),
    SPOKEN.map(lambda answer: [answer]),
)


@given(turns=st.lists(TURN, min_size=1, max_size=3), marked=st.booleans())
@settings(max_examples=60)
def test_what_is_learned_continues_the_prompts_that_are_served(turns, marked):
    template = thinking.MARKED if marked else thinking.OBJECTS
    messages = [message for turn in turns for part in turn for message in part]
    learned = [i for i, m in enumerate(messages) if m["role"] == "assistant" and m.get("weight", 1)]
    try:
        texts, _ = encoded({"messages": messages}, template)
    except ValueError as error:
        assert not learned and "all answers have 'weight' 0" in str(error)
        return
    # Calls as the template reads them, and no weights.
    read = without_weights(read_record({"messages": messages}, "file:1").messages)
    prompts = [served(read[:turn], None, template) for turn in learned]
    closed = [served(read[: turn + 1], None, template) for turn in learned]
    opening = "<|im_start|>assistant\n"
    answers = [
        text.removeprefix(prompt).removesuffix(opening).removesuffix("\n")
        for text, prompt in zip(closed, prompts, strict=True)
    ]
    assert "".join(part for _, part in texts) == "".join(answers)
    if len(texts) == len(learned):
        for (text, part), prompt, answer in zip(texts, prompts, answers, strict=True):
            assert part == answer and text == f"{prompt}{answer}\n"
    else:
        ((text, _),) = texts
        assert all(text.startswith(p + a) for p, a in zip(prompts, answers, strict=True))


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_reasoning_is_read_under_each_of_its_names(name):
    answer = {"role": "assistant", "content": "4", name: "I add."}
    (_, learned), *_ = encoded({"messages": [USER, answer]})[0]
    assert learned == "<think>\nI add.\n</think>\n\n4<|im_end|>"


def test_tools_and_calls_are_read_as_text_or_as_objects():
    called = CALL | {"tool_calls": [{"function": {"name": "add", "arguments": {"a": 2}}}]}
    texts = encoded({"messages": [USER, CALL], "tools": TOOLS})[0]
    assert encoded({"messages": [USER, called], "tools": json.dumps(TOOLS)})[0] == texts
    assert '"name": "add"' in texts[0][0]


PLAIN = [
    {"role": "user", "content": "hi"},
    {"role": "assistant", "content": "there"},
    {"role": "user", "content": "how"},
    {"role": "assistant", "content": "fine"},
]


def weighed(*weights):
    """Return the plain dialogue with the weights of its two answers."""
    weights = iter(weights)
    return {
        "messages": [m | ({"weight": next(weights)} if i % 2 else {}) for i, m in enumerate(PLAIN)]
    }


@pytest.mark.parametrize("template", [words.PLAIN, words.MARKED])
@pytest.mark.parametrize(
    ("weights", "learned"),
    [
        ((1, 1), ["there<end>fine<end>"]),
        ((0, 1), ["fine<end>"]),
        ((0.0, 1.0), ["fine<end>"]),
        ((1, 0), ["there<end>"]),
    ],
)
def test_an_answer_of_weight_0_is_context_and_not_learned(weights, learned, template):
    texts, ledger = encoded(weighed(*weights), tokenizer=words.tokenizer(template))
    assert [part for _, part in texts] == learned
    assert ("messages behind the last learned answer" in ledger.source.unused) == (weights[1] == 0)
    assert all("weight" not in name for name in ledger.source.unused)
    if weights[1]:
        assert "there<end>" in texts[0][0]


def test_an_answer_of_weight_0_is_not_learned_where_each_turn_is_an_example():
    texts, _ = encoded(weighed(0, 1), tokenizer=words.tokenizer(words.FORGETFUL))
    assert [part for _, part in texts] == ["hmm\nfine<end>"]


def test_a_greeting_that_is_not_learned_may_come_first():
    greeting = {"role": "assistant", "content": "hi", "weight": 0}
    texts, _ = encoded({"messages": [greeting, *PLAIN[:2]]}, tokenizer=words.tokenizer(words.PLAIN))
    assert [part for _, part in texts] == ["there<end>"]


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        ({"weight": 0.5}, "'weight' is 0.5; it must be 0 or 1"),
        ({"weight": True}, "'weight' is True; it must be 0 or 1"),
        ({"weight": "0"}, "'weight' is '0'; it must be 0 or 1"),
        ({"role": "user", "weight": 1}, "'weight' of user is 1; only the assistant's messages"),
        ({"reasoning_content": ["a"]}, r"'reasoning_content' is \['a'\]; it must be a text"),
        (
            {"tool_calls": [{"name": "add"}]},
            "'tool_calls' .* functions whose arguments are JSON",
        ),
        ({"tool_calls": [{"function": {"name": "add", "arguments": "{"}}]}, "arguments are JSON"),
        ({"tool_calls": 7}, "'tool_calls' is 7; it must hold functions"),
        ({"content": None}, "the content of assistant is None; it must be a text"),
    ],
)
def test_a_damaged_part_of_a_message_is_refused_by_its_key(message, reason):
    with pytest.raises(ValueError, match=reason):
        read_record({"messages": [USER, {"role": "assistant", "content": "a"} | message]}, "file:1")


@pytest.mark.parametrize("tools", ["[", 7, [7], '{"a": 1}'])
def test_tools_that_are_no_list_of_functions_are_refused(tools):
    with pytest.raises(ValueError, match=r"'tools' is .*; it must be a list of functions"):
        read_record({"messages": [USER, ANSWER], "tools": tools}, "file:1")


def test_a_message_of_the_developer_is_one_of_the_system():
    record = read_record({"messages": [{"role": "developer", "content": "be kind"}]}, "file:1")
    assert record == Chat("file:1", ({"role": "system", "content": "be kind"},))


def test_a_key_that_nothing_uses_is_named_once_with_its_count(tmp_path):
    named = [message | {"name": "Ada"} for message in PLAIN]
    lines = [{"messages": named, "id": number, "category": None} for number in range(120)]
    lines += [{"messages": PLAIN, "tools": TOOLS, "input": "hi"}] * 3
    path = tmp_path / "chat.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = DataSettings(data=(str(path),), cache=str(tmp_path / "cache"))
    for _ in range(2):  # also with tokens in the cache
        data = open_data(options, words.tokenizer(words.PLAIN), len(words.IDS))
        (source,) = data.description["read"]
        assert source["records"] == 123 and source["unused"] == {
            "the key 'id'": 120,
            "the key 'name' of messages": 120,
            "the key 'tools'": 3,
            "the key 'input'": 3,
        }


def test_a_key_with_an_effect_in_some_records_is_used():
    tokenizer = thinking.tokenizer(thinking.OBJECTS)
    encoder, ledger = Encoder(tokenizer, len(tokenizer)), Ledger()
    lines = [{"messages": [USER, LAST]}] * 3 + [{"messages": [USER, CALL], "tools": TOOLS}] * 3
    list(encoder.encode([read_record(line, "file:1") for line in lines], ledger))
    assert not ledger.source.unused


def test_a_key_with_an_effect_in_an_earlier_turn_is_used():
    messages = [USER, ANSWER, LATER, {"role": "assistant", "content": "6"}]
    texts, ledger = encoded({"messages": messages})
    assert "The tool says 4." in texts[0][1] and not ledger.source.unused


@pytest.mark.parametrize("name", ["content", "reasoning_content"])
def test_a_part_of_an_answer_that_the_template_drops_is_named(name):
    dropped = thinking.OBJECTS.replace(f"message.{name}", "''").replace("'' or ''", "''")
    template = dropped.replace(
        "+ message.role + '\\n' + ''", "+ message.role + '\\n' + message.content"
    )
    _, ledger = encoded({"messages": [USER, ANSWER]}, template)
    assert f"{name!r} of answers, which the chat template changes" in ledger.source.unused


def asked(tmp_path, *lines, **options):
    """Return the prompts of lines as texts."""
    path = tmp_path / "prompts.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = thinking.tokenizer(thinking.OBJECTS)
    encoder = Encoder(tokenizer, len(tokenizer))
    sources, _ = readers.find([str(path)], readers.SourceSettings())
    prompts = read_prompts(sources, encoder, Ledger(), max_positions=10_000, **options)
    return [tokenizer.decode(prompt.encoded((), encoder)) for prompt in prompts], prompts


def test_the_target_answers_the_prompts_that_are_learned_from(tmp_path, capsys):
    lines = [{"messages": DIALOGUE[:count], "tools": TOOLS, "id": 7} for count in (2, 4, 6)]
    texts, prompts = asked(tmp_path, *lines)
    for text, line in zip(texts, lines, strict=True):
        (*_, (whole, learned)), _ = encoded(line)
        answer = whole.removeprefix(text).removesuffix("\n")
        assert whole.startswith(text) and learned.endswith(answer)
    assert prompts[0].tools == tuple(TOOLS)
    printed = capsys.readouterr().err
    assert printed == "without effect in prompts.jsonl: the key 'id' (3 records)\n"


def test_results_of_tools_are_not_answered_turn_by_turn(tmp_path):
    with pytest.raises(
        ValueError, match=r"prompts\.jsonl:1: holds results of tools, .* leave --ev"
    ):
        asked(tmp_path, {"messages": DIALOGUE}, every_turn=True)
