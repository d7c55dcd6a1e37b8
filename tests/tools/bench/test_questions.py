"""Question files of every format are read; errors name file and line."""

import gzip
import json

import jinja2
import pytest

from jspec.tools.bench import report
from jspec.tools.bench.questions import Question, read, requests

FORMS = {
    "spec_bench": {"question_id": 1, "category": "writing", "turns": ["Tell.", "Again."]},
    "HumanEval": {"task_id": "HumanEval/0", "prompt": "def f(x):\n", "test": "…"},
    "gsm8k": {"question": "Two and two?", "answer": "#### 4"},
    "sharegpt": {
        "id": "a",
        "conversations": [
            {"from": "human", "value": "Hi."},
            {"from": "gpt", "value": "Yes?"},
            {"from": "human", "value": "No."},
        ],
    },
    "openai": {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Why?"},
        ]
    },
    "plain": {"text": "Once upon"},
}
READ = {
    "spec_bench": Question("writing", ("Tell.", "Again.")),
    "HumanEval": Question("HumanEval", ("def f(x):\n",), is_chat=False),
    "gsm8k": Question("gsm8k", ("Two and two?",)),
    "sharegpt": Question("sharegpt", ("Hi.",)),
    "openai": Question("openai", ("Why?",), system="Be brief."),
    "plain": Question("plain", ("Once upon",), is_chat=False),
}


class Words:
    """A tokenizer of words, with or without a chat template."""

    def __init__(self, template=None):
        self.chat_template, self.known = template, []

    def encode(self, text, add_special_tokens=True):
        words = text.split()
        self.known += [word for word in words if word not in self.known]
        return [self.known.index(word) for word in words]

    def text(self, ids):
        return " ".join(self.known[index] for index in ids)

    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        assert not tokenize and add_generation_prompt
        return " ".join(f"[{each['role']}] {each['content']}" for each in messages) + " [assistant]"


@pytest.mark.parametrize("form", FORMS)
def test_every_form_is_read_from_json_lines_lists_and_compressed_files(tmp_path, form):
    lines, whole = tmp_path / f"{form}.jsonl", tmp_path / f"{form}.json"
    lines.write_text("\n" + json.dumps(FORMS[form]) + "\n\n" + json.dumps(FORMS[form]))
    whole.write_text(json.dumps([FORMS[form]]))
    packed = tmp_path / f"{form}.jsonl.gz"
    packed.write_bytes(gzip.compress(lines.read_bytes()))
    assert read([lines]) == read([packed]) == [READ[form]] * 2
    assert read([whole, lines], per_category=2) == [READ[form]] * 2


def test_any_other_file_is_one_text(tmp_path):
    (tmp_path / "story.txt").write_text("Once upon\na time")
    questions = read([tmp_path / "story.txt"])
    assert questions == [Question("story", ("Once upon\na time",), is_chat=False)]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"turns": []}', "line 1: there is no question; give turns, messages"),
        ('{"prompt": "x"}\n{"turns": ["a", 5]}', "line 2: 5 must be a text that is not empty"),
        ('{"prompt": "x"}\n{oops}', "line 2: not JSON"),
        (
            '{"prompt": "x"}\n{"prompt": "y", "id": 1' + "0" * 5000 + "}",
            "line 2: not JSON .*5001 digits",
        ),
        ('{"prompt": ' + "[" * 20_000, "line 1: not JSON .nested too deeply"),
        ('["text"]', "item 1: 'text' must be an object with turns"),
        ('{"messages": "x"}', "line 1: messages must be a list of objects"),
        ('{"prompt": "x"}\n{"prompt": "caf\\ud83d"}', "line 2: .* holds half of a surrogate pair"),
        ('{"messages": [{"role": "user", "content": " "}]}', "line 1: ' ' must be a text"),
        (
            '{"messages": [{"role": "assistant", "content": "Hi."}]}',
            "line 1: there is no question",
        ),
        (
            '{"prompt": "x"}\n{"messages": [{"role": "usr", "content": "Hi."}]}',
            "line 2: role 'usr' is unknown; known are system, developer, user, human, assistant",
        ),
        ('{"conversations": [{"value": "Hi."}]}', "line 1: role None is unknown"),
        (
            '{"messages": [{"role": "system", "content": 5}]}',
            "line 1: the system message 5 must be a text",
        ),
        ('{"conversations": 5}', "line 1: conversations must be a list of objects"),
        ('{"conversations": []}', "holds no conversation in which a human speaks"),
        ("", "there is no question in the files given; name one with --questions"),
    ],
)
def test_bad_lines_are_named(tmp_path, text, words):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(ValueError, match=words):
        read([path])


@pytest.mark.parametrize("start", ["", "\ufeff"], ids=["plain", "bom"])
@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_where_json_lines_do(tmp_path, start, end):
    """JSON strings may contain other line breaks of Unicode."""
    texts = ["one\u2028two", "one\u2029two", "one\x85two"]
    lines = [json.dumps({"prompt": text}, ensure_ascii=False) for text in texts]
    (tmp_path / "lines.jsonl").write_bytes((start + end.join([*lines, ""])).encode())
    assert [question.turns for question in read([tmp_path / "lines.jsonl"])] == [
        (text,) for text in texts
    ]


def test_a_text_has_no_byte_order_mark(tmp_path):
    (tmp_path / "text.txt").write_bytes("\ufeffone\r\ntwo".encode())
    assert read([tmp_path / "text.txt"])[0].turns == ("one\r\ntwo",)


def test_conversations_without_a_human_message_are_skipped(tmp_path):
    silent = [[], [{"from": "gpt", "value": "Hi."}], [{"from": "human", "value": " "}]]
    items = [{"id": "a", "conversations": each} for each in silent]
    (tmp_path / "sharegpt.json").write_text(json.dumps([*items, FORMS["sharegpt"]]))
    assert read([tmp_path / "sharegpt.json"]) == [READ["sharegpt"]]


def test_messages_may_have_the_names_of_openai_or_sharegpt(tmp_path):
    """A list called conversations may hold either."""
    messages = [
        {"role": "developer", "content": "In French."},
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hi."},
        {"role": "critic", "content": "Hm."},
        {"role": "user", "content": "No."},
    ]
    for name in ("messages", "conversations"):
        path = tmp_path / "openai.json"
        path.write_text(json.dumps([{name: messages}, FORMS["sharegpt"]]))
        first = Question("openai", ("Hi.",), system="In French.\n\nBe brief.")
        assert read([path]) == [first, Question("openai", ("Hi.",))]


def test_files_that_cannot_be_read_are_named(tmp_path):
    (tmp_path / "x.jsonl.gz").write_bytes(b"no gzip")
    whole = gzip.compress(b'{"prompt": "x"}')
    (tmp_path / "damaged.jsonl.gz").write_bytes(whole[:10] + b"\xff" * 40)
    (tmp_path / "short.jsonl.gz").write_bytes(whole[:-9])
    (tmp_path / "empty.txt").write_text(" ")
    for name in ("missing.jsonl", "x.jsonl.gz", "damaged.jsonl.gz", "short.jsonl.gz"):
        with pytest.raises(ValueError, match=f"{name} cannot be read"):
            read([tmp_path / name])
    with pytest.raises(ValueError, match=r"empty\.txt is empty"):
        read([tmp_path / "empty.txt"])


@pytest.mark.parametrize(
    ("template", "first", "second"),
    [
        (
            "yes",
            "[user] Tell. [assistant]",
            "[user] Tell. [assistant] said once [user] Again. [assistant]",
        ),
        (None, "Tell.", "Tell. said once Again."),
    ],
)
def test_a_second_turn_follows_the_answer_to_the_first(template, first, second):
    words, asked = Words(template), []

    def answer(prompts):
        asked.append([words.text(prompt) for prompt in prompts])
        return ["said once"] * len(prompts)

    made, left_out = requests([READ["spec_bench"], READ["plain"]], words, answer, longest=99)
    assert [words.text(each.token_ids) for each in made] == [first, "Once upon", second]
    assert [each.category for each in made] == ["writing", "plain", "writing"]
    assert asked[0] == [first] and left_out == 0


def test_a_template_without_system_messages_raises():
    class Gemma(Words):
        def apply_chat_template(self, messages, tokenize, add_generation_prompt):
            raise jinja2.TemplateError("System role\nnot supported")

    refusal = "^the chat template refuses the messages: System role not supported$"
    with pytest.raises(ValueError, match=refusal):
        requests([READ["openai"]], Gemma("yes"), lambda _: [], longest=99)


def test_prompts_that_do_not_fit_are_counted_or_cut():
    long = Question("long", ("a b c d e f",), is_chat=False)
    made, left_out = requests([long, READ["plain"]], Words(), lambda _: [], longest=3)
    assert [each.category for each in made] == ["plain"] and left_out == 1
    made, left_out = requests([long], Words(), lambda _: [], prompt_tokens=3, longest=3)
    assert len(made[0].token_ids) == 3 and left_out == 0


def test_turns_after_one_that_was_cut_are_left_out():
    """Cut to the same prefix, they would repeat the first prompt."""
    short, long = (Question("two", (first, "End.")) for first in ("a", "a b c d e"))
    for answered, prompts in (("f", ["a b c d", "a", "a f End."]), ("f g h", ["a b c d", "a"])):
        words = Words()
        made, left_out = requests(
            [long, short],
            words,
            lambda asked, text=answered: [text] * len(asked),
            prompt_tokens=4,
            longest=99,
        )
        assert [words.text(each.token_ids) for each in made] == prompts
        assert left_out == 4 - len(prompts)
    [note] = report.left_out({"left_out": left_out, "setting": {"prompt_tokens": 4}})
    assert note.startswith("2 prompts were left out") and "as later turns, --prompt-tokens" in note
