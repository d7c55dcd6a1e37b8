"""Labels of conversations, compared with spans derived by hand."""

import pytest

from tests.training import words
from tests.training.words import DIALOGUE, ids
from training.data import chat
from training.data.records import Chat

FIRST = ["<user>", "hi", " ", "there", "<end>", "\n", "<assistant>"]
SECOND = ["how", " ", "are", " ", "you", "<end>"]  # the model emits the end of the turn
THIRD = ["\n", "<user>", "fine", "<end>", "\n", "<assistant>"]
FOURTH = ["bye", "<end>"]


def examples(template, messages=DIALOGUE, **options):
    opened = chat.open_template(words.tokenizer(template), **options)
    (examples,) = opened.examples([Chat("file:1", tuple(messages))], refuse)
    return [(list(tokens), mask.tolist()) for tokens, mask in examples]


def refuse(_, reason):
    raise reason


def learned(*parts):
    """Return (token ids, mask) of parts; every second part is a label."""
    tokens = [token for part in parts for token in part]
    return ids(*tokens), [bool(i % 2) for i, part in enumerate(parts) for _ in part]


@pytest.mark.parametrize("template", [words.PLAIN, words.MARKED])
def test_the_assistants_turns_are_learned_to_the_token_that_ends_them(template):
    assert examples(template) == [learned(FIRST, SECOND, THIRD, FOURTH, ["\n"])]


@pytest.mark.parametrize("template", [words.PLAIN, words.MARKED])
def test_the_last_message_of_the_user_is_left_out(template):
    assert examples(template, DIALOGUE[:3]) == [learned(FIRST, SECOND, ["\n"])]


def test_a_system_message_is_not_learned():
    messages = ({"role": "system", "content": "be kind"}, *DIALOGUE[:2])
    system = ["<system>", "be", " ", "kind", "<end>", "\n"]
    assert examples(words.PLAIN, messages) == [learned(system + FIRST, SECOND, ["\n"])]


def test_a_template_that_rewrites_earlier_turns_gives_each_turn_an_example_of_its_own():
    thought = ["hmm", "\n"]
    assert examples(words.FORGETFUL) == [
        learned(FIRST, thought + SECOND, ["\n"]),
        learned([*FIRST, *SECOND, *THIRD], thought + FOURTH, ["\n"]),
    ]


def test_a_turn_that_ends_in_plain_text_is_learned_to_its_last_character():
    opening = ["<user>", "hi", " ", "there", "\n", "###", "\n", "<assistant>"]
    assert examples(words.WORDY, DIALOGUE[:2]) == [
        learned(opening, [*SECOND[:-1], "\n", "###", "\n"])
    ]


def test_the_prompt_of_an_answer_ends_with_the_opening_of_its_turn():
    template = chat.open_template(words.tokenizer(words.PLAIN))
    assert template.prompt(DIALOGUE[:1]) == ids(*FIRST)


def test_a_template_can_be_given_as_a_file(tmp_path):
    (tmp_path / "template.jinja").write_text(words.PLAIN)
    given = examples(None, path=str(tmp_path / "template.jinja"))
    assert given == examples(words.PLAIN)


def test_one_refused_conversation_leaves_the_others_as_they_are():
    refused = []
    template = chat.open_template(words.tokenizer(words.PLAIN))
    chats = [Chat("file:1", messages) for messages in (DIALOGUE, DIALOGUE[:1], DIALOGUE[:2])]
    examples = template.examples(chats, lambda *why: refused.append(why))
    assert [len(each) for each in examples] == [1, 0, 1]
    assert [number for number, _ in refused] == [1]
    ((tokens, mask),) = examples[2]
    assert (tokens, mask.tolist()) == learned(FIRST, SECOND, ["\n"])


@pytest.mark.parametrize(
    ("template", "messages", "message"),
    [
        (words.BROKEN, DIALOGUE, r"give --chat-template a template with \{% generation %\} marks"),
        (words.PLAIN, DIALOGUE[:1], "the assistant says nothing in it"),
        (words.PLAIN, DIALOGUE[1:], "the assistant speaks first"),
        ("{{ raise_exception('no  such\nrole') }}", DIALOGUE, "refuses it: no such role"),
        (words.MARKED.replace("'assistant'", "'robot'"), DIALOGUE, "marks hold nothing of it"),
    ],
)
def test_a_conversation_that_cannot_be_learned_from_is_refused(template, messages, message):
    with pytest.raises(ValueError, match=message):
        examples(template, messages)


def test_a_tokenizer_without_a_template_is_refused_with_the_remedy():
    with pytest.raises(ValueError, match="has no chat template; give one with --chat-template"):
        chat.open_template(words.tokenizer())
    with pytest.raises(ValueError, match="'nowhere' is no file"):
        chat.open_template(words.tokenizer(), "nowhere")


def test_a_template_that_is_not_utf8_is_named(tmp_path):
    (tmp_path / "template.jinja").write_bytes(b"{{ '\xff' }}")
    with pytest.raises(ValueError, match=r"template\.jinja' cannot be read: it is no UTF-8"):
        chat.open_template(words.tokenizer(), str(tmp_path / "template.jinja"))
