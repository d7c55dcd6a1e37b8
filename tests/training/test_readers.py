"""Data of every kind, read, checked, tokenised once and split."""

import json
import sys
import types

import numpy as np
import pytest

from tests.training import words
from tests.training.words import ids
from training.data import files, readers, token_file
from training.data.encode import vocabulary_digest
from training.data.ledger import Ledger
from training.data.records import Chat, Text, Tokens, read_record
from training.data.settings import DataSettings, open_data

USER, ANSWER = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "bye"}
SYSTEM = {"role": "system", "content": "be kind"}


def write(path, *lines):
    text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    path.write_text(text + "\n")
    return str(path)


@pytest.fixture
def opened(tmp_path):
    """A function that opens data in windows of 8, with the words' plain template."""
    tokenizer = words.tokenizer(words.PLAIN)

    def open_them(*data, tokenizer=tokenizer, **options):
        given = {"length": 8, "packing": "none", "cache": str(tmp_path / "cache")} | options
        return open_data(DataSettings(data=data, **given), tokenizer, len(words.IDS))

    return open_them


def documents(rows):
    """Return (words, labels) of every window of one document."""
    named = list(words.IDS)
    for row in map(rows.__getitem__, range(len(rows))):
        held = row.segments > 0
        yield "".join(named[i] for i in row.tokens[held]), row.weights[held].astype(int).tolist()


@pytest.mark.parametrize(
    ("line", "messages"),
    [
        ({"messages": [SYSTEM, USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        (
            {"conversations": [{"from": "human", "value": "hi"}, {"from": "gpt", "value": "bye"}]},
            [USER, ANSWER],
        ),
        (
            {"conversations": [{"from": "system", "value": "be kind"}, USER, ANSWER], "id": 7},
            [SYSTEM, USER, ANSWER],
        ),
        ({"system": "be kind", "messages": [USER, ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"prompt": "hi", "response": "bye"}, [USER, ANSWER]),
        ({"prompt": "hi", "completion": "bye"}, [USER, ANSWER]),
        ({"prompt": [SYSTEM, USER], "completion": [ANSWER]}, [SYSTEM, USER, ANSWER]),
        ({"question": "hi", "answer": "bye"}, [USER, ANSWER]),
        (
            {"instruction": "hi", "input": "you", "output": "bye"},
            [{"role": "user", "content": "hi\n\nyou"}, ANSWER],
        ),
        ({"instruction": "hi", "input": "", "output": "bye"}, [USER, ANSWER]),
        ({"prompt": "hi", "prompt_id": 3, "messages": [USER, ANSWER]}, [USER, ANSWER]),
        ({"turns": ["hi", "hi"], "category": "writing"}, [USER, USER]),
        ({"prompt": "hi"}, [USER]),
    ],
)
def test_conversations_are_read_in_every_common_spelling(line, messages):
    assert read_record(line, "file:1") == Chat("file:1", tuple(messages))


def test_texts_and_tokens_are_read():
    assert read_record({"text": "hi", "meta": 1}, "a:1") == Text("a:1", "hi")
    assert read_record({"token_ids": [1, 2]}, "a:2") == Tokens("a:2", (), (1, 2))
    line = {"key": "f-1", "prompt_token_ids": [3], "token_ids": [1], "text": "hi", "messages": []}
    assert read_record(line, "a:3") == Tokens("a:3", (3,), (1,), "f-1")
    assert read_record({"prompt": "hi"}, "a:4", "text") == Text("a:4", "hi")


def test_what_may_be_read_in_two_ways_is_read_as_asked():
    line = {"text": "hi bye", "messages": [USER, ANSWER]}
    with pytest.raises(ValueError, match=r"may be read as text or chat, .* say which with --d"):
        read_record(line, "a:1")
    assert read_record(line, "a:1", "text") == Text("a:1", "hi bye")
    assert read_record(line, "a:1", "chat") == Chat("a:1", (USER, ANSWER))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ([1], r"\[1\] is no JSON object"),
        ({"content": "hi"}, r"no known keys among \['content'\]; known are text; messages"),
        ({"text": ""}, "'text' is ''; it must be a text that is not empty"),
        ({"messages": []}, r"'messages' is \[\]; it must be a list of turns"),
        ({"messages": [USER], "conversations": [USER]}, "two conversations, 'messages' and"),
        ({"messages": [USER], "prompt": "hi", "response": "bye"}, "and a question with its answer"),
        ({"messages": ["hi"]}, "turn 'hi' is no object with 'role' and 'content'"),
        ({"messages": [{"role": "pirate", "content": "hi"}]}, "role 'pirate' is unknown; known"),
        ({"messages": [{"role": "user", "content": [1]}]}, r"the content of user is \[1\]"),
        ({"prompt": "hi", "response": "a", "completion": "b"}, "more than one question or answer"),
        ({"token_ids": []}, "'token_ids' is empty"),
        ({"token_ids": [1, True]}, "'token_ids' holds True; token ids are whole numbers from 0"),
        ({"token_ids": "12"}, "'token_ids' is '12'; it must be a list of token ids"),
    ],
)
def test_a_line_that_cannot_be_read_says_why(line, message):
    with pytest.raises(ValueError, match=message):
        read_record(line, "file:1")


def test_every_kind_becomes_windows_with_its_labels(opened, tmp_path):
    text = write(tmp_path / "text.jsonl", {"text": "hi there"})
    chat = write(tmp_path / "chat.jsonl", {"prompt": "hi", "response": "bye"})
    line = {"prompt_token_ids": ids("hi", " "), "token_ids": ids("you", "<end>"), "key": "k"}
    data = opened(text, chat, write(tmp_path / "tokens.jsonl", line))
    assert sorted(documents(data.train)) == [
        ("<user>hi<end>\n<assistant>bye<end>\n", [0, 0, 0, 0, 0, 1, 1, 0]),
        ("hi there<end>", [0, 1, 1, 1]),
        ("hi you<end>", [0, 0, 1, 1]),
    ]
    facts = data.description["train"]
    assert facts["windows"] == 3 and facts["tokens"] == 16 and len(data.description["sha256"]) == 64
    assert facts["from"]["sources"] == ["text.jsonl", "chat.jsonl", "tokens.jsonl"]


def test_a_file_is_recognised_by_what_it_holds(opened, tmp_path):
    json_lines = write(tmp_path / "lines.txt", {"text": "hi"})
    json_list = tmp_path / "list.json"
    json_list.write_text(json.dumps([{"text": "bye"}, {"text": "you"}], indent=1))
    plain = write(tmp_path / "plain", "{hi", "there")
    read = dict(documents(opened(json_lines, str(json_list), plain).train))
    assert set(read) == {"hi<end>", "bye<end>", "you<end>", "hmm\nthere\n<end>"}


def test_a_long_plain_text_is_read_in_sections_that_are_one_document(opened, tmp_path, monkeypatch):
    monkeypatch.setattr(files, "_SECTION", 16)
    lines = ["hi there", "how are you", "", "fine", "bye"] * 3
    path = write(tmp_path / "text.txt", *lines)
    (source,), _ = readers.find([path], readers.SourceSettings())
    records = [record for _, record in source.read(Ledger())]
    assert "".join(record.text for record in records) == "\n".join(lines) + "\n"
    assert len(records) > 3 and all(len(record.text) <= 16 for record in records)
    assert [r.begins for r in records] == [True] + [False] * (len(records) - 1)
    assert [r.ends for r in records] == [False] * (len(records) - 1) + [True]
    text = "".join(text for text, _ in documents(opened(path, length=64).train))
    assert text.count("<end>") == 1 and text.endswith("bye\n<end>")


def test_source_trees_are_read_without_their_held_out_modules(opened, sources):
    data = opened(str(sources), held_out_modules=("secret",), length=64)
    assert data.train.file.description["documents"] == 2
    assert data.held_out.file.description["documents"] == 1
    with pytest.raises(ValueError, match=r"--held-out-modules \['nothing'\] are in no source tree"):
        opened(str(sources), held_out_modules=("nothing",))
    with pytest.raises(ValueError, match="it leaves nothing to train on"):
        opened(str(sources), held_out_modules=("secret", "alpha", "beta"))


def test_a_folder_gives_what_its_files_would_give_if_each_were_named(opened, tmp_path, monkeypatch):
    folder = tmp_path / "folder"
    (folder / "test").mkdir(parents=True)
    write(folder / "test" / "chat.jsonl", {"prompt": "hi", "response": "bye"})
    write(folder / "text.txt", "how are you")
    write(folder / "table.jsonl", {"rows": 1})
    write(folder / "settings.json", {"text": "hi"})
    data = opened(str(folder))
    assert sorted(text for text, _ in documents(data.train)) == [
        "<user>hi<end>\n<assistant>bye<end>\n",
        "how are you\n<end>",
    ]
    assert data.description["left_out"] == {"*.jsonl": 1, "*.json": 1}
    held = opened(str(folder), held_out_modules=("test",))
    assert [text for text, _ in documents(held.train)] == ["how are you\n<end>"]
    assert len(list(documents(held.held_out))) == 1
    monkeypatch.setattr(readers.sources, "MAX_BYTES", 10)
    monkeypatch.setattr(files, "_SECTION", 8)
    write(folder / "text.txt", "hi", "how are you", "fine")  # longer than a section
    source = readers.find([str(folder)], readers.SourceSettings())[0][0]
    texts = [record for _, record in source.read(Ledger())]
    assert [record.text for record in texts] == ["hi\n", "how are you\n", "fine\n"]
    assert [record.ends for record in texts] == [False, False, True]


def test_bad_lines_are_named_counted_and_skipped_up_to_the_limit(opened, tmp_path, capsys):
    lines = [{"text": "hi"}, "{hi", {"text": "bye"}, {"messages": [USER, ANSWER]}, {"words": 1}]
    path = write(tmp_path / "mixed.jsonl", *lines)
    data = opened(path, max_bad_lines=3)
    assert sorted(text for text, _ in documents(data.train)) == ["bye<end>", "hi<end>"]
    assert data.description["train"]["from"]["bad_lines"] == 3
    printed = capsys.readouterr().err
    assert "skipped mixed.jsonl:2: no JSON" in printed
    assert "skipped mixed.jsonl:4: is chat, but what came before is text" in printed
    assert "skipped mixed.jsonl:5: no known keys" in printed
    with pytest.raises(ValueError, match="3 bad lines, and --max-bad-lines is 2"):
        opened(path, max_bad_lines=2)  # also with tokens in the cache
    fresh = str(tmp_path / "fresh")
    with pytest.raises(ValueError, match=r"mixed.jsonl:2: no JSON .* mend the data or raise"):
        opened(path, cache=fresh)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ({"token_ids": [1, 99]}, "holds token id 99, outside the model's vocabulary of 17"),
        ({"token_ids": [1]}, "is a single token"),
        ({"prompt_token_ids": [], "token_ids": [5]}, "is a single token"),
        ({"messages": [USER]}, "the assistant says nothing in it"),
    ],
)
def test_a_record_without_labels_is_a_bad_line(opened, tmp_path, line, message):
    with pytest.raises(ValueError, match=f"one.jsonl:1: .*{message}"):
        opened(write(tmp_path / "one.jsonl", line))


def test_conversations_need_a_template_whatever_the_limit(opened, tmp_path):
    path = write(tmp_path / "chat.jsonl", {"messages": [USER, ANSWER]})
    with pytest.raises(ValueError, match="has no chat template; give one with --chat-template"):
        opened(path, tokenizer=words.tokenizer(), max_bad_lines=9)


def test_a_share_of_the_documents_is_held_out_the_same_ones_each_time(opened, tmp_path):
    lines = [{"token_ids": [4 + i % 13, 4 + i // 13, 5]} for i in range(150)]
    path = write(tmp_path / "many.jsonl", *lines, *lines)  # every document twice
    split = opened(path, held_out_share=0.2)
    train, held = ({text for text, _ in documents(rows)} for rows in (split.train, split.held_out))
    assert not train & held and len(train | held) == 150 and 15 < len(held) < 50
    again = opened(path, held_out_share=0.2, cache=str(tmp_path / "other"))
    assert {text for text, _ in documents(again.held_out)} == held
    assert again.description == split.description
    assert opened(path).description["sha256"] != split.description["sha256"]


def test_held_out_data_are_not_trained_on_even_where_they_are_named_twice(opened, tmp_path):
    both = write(tmp_path / "both.jsonl", {"text": "hi"}, {"text": "bye"}, {"text": "you"})
    held = write(tmp_path / "held.jsonl", {"text": "bye"})
    data = opened(both, held_out_data=(held,))
    assert sorted(text for text, _ in documents(data.train)) == ["hi<end>", "you<end>"]
    assert [text for text, _ in documents(data.held_out)] == ["bye<end>"]
    with pytest.raises(ValueError, match="all of it is held out"):
        opened(held, held_out_data=(both,))
    with pytest.raises(ValueError, match="it holds out none of 1 documents; raise it"):
        opened(held, held_out_share=1e-9)


def test_data_are_tokenised_once_and_again_for_anything_that_matters(opened, tmp_path):
    path = write(tmp_path / "chat.jsonl", {"messages": [USER, ANSWER]})
    made = lambda: {folder.name for folder in (tmp_path / "cache").iterdir()}
    opened(path)
    first = made()
    opened(path, length=4)  # packing is not cached
    assert made() == first and len(first) == 1
    opened(path, tokenizer=words.tokenizer(words.MARKED))
    second = made()
    write(tmp_path / "chat.jsonl", {"messages": [ANSWER, USER, ANSWER][1:]})  # the same content
    opened(path)
    assert made() == second and len(second) == 2
    write(tmp_path / "chat.jsonl", {"messages": [SYSTEM, USER, ANSWER]})
    opened(path)
    assert len(made()) == 3


def test_a_half_written_cache_is_never_used(opened, tmp_path, monkeypatch):
    path = write(tmp_path / "text.jsonl", {"text": "hi"}, {"text": "bye"})

    def power_cut(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as broken, pytest.raises(KeyboardInterrupt):
        broken.setattr(token_file.np, "save", power_cut)
        opened(path)
    (tmp_path / "cache" / "building-1").mkdir()  # left by a process that was killed
    assert len(list(documents(opened(path).train))) == 2


def test_tokens_of_another_tokenizer_are_refused(opened, tmp_path):
    line = {"token_ids": ids("hi", "bye"), "messages": [USER, ANSWER]}
    path = write(tmp_path / "made.jsonl", line)
    beside = tmp_path / "made.jsonl.provenance.json"
    beside.write_text(json.dumps({"vocabulary": vocabulary_digest(words.tokenizer())}))
    assert [text for text, _ in documents(opened(path).train)] == ["hibye"]
    beside.write_text(json.dumps({"vocabulary": "another"}))
    with pytest.raises(ValueError, match=r"'made\.jsonl' hold tokens of another tokenizer"):
        opened(path)
    ((text, _),) = documents(opened(path, data_format="chat").train)
    assert text == "<user>hi<end>\n<assistant>bye<end>\n"


class Dataset(list):
    """The part of ``datasets.Dataset`` that the readers use."""

    _fingerprint = "one"


def test_datasets_are_read_by_the_same_rules(opened, monkeypatch, tmp_path):
    asked = []

    def load_dataset(name, split):
        asked.append((name, split))
        return Dataset([{"messages": [USER, ANSWER], "text": None}])

    fake = types.SimpleNamespace(
        load_dataset=load_dataset,
        DatasetDict=dict,
        load_from_disk=lambda _: {"train": Dataset([{"text": "hi"}])},
    )
    monkeypatch.setitem(sys.modules, "datasets", fake)
    ((text, _),) = documents(opened("hf:someone/chats:train_sft").train)
    assert text == "<user>hi<end>\n<assistant>bye<end>\n"
    assert asked == [("someone/chats", "train_sft")]
    saved = tmp_path / "saved"
    saved.mkdir()
    (saved / "dataset_dict.json").write_text("{}")
    assert [text for text, _ in documents(opened(str(saved)).train)] == ["hi<end>"]


def test_datasets_that_are_not_installed_are_missed_by_name(opened, monkeypatch):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ValueError, match=r"needs the package datasets, .* pip install data"):
        opened("hf:someone/chats")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"data": ()}, r"--data \(\) does not work; name files"),
        ({"max_bad_lines": -1}, "--max-bad-lines -1 does not work; it must be at least 0"),
        ({"length": 0}, "--length 0 does not work; it must be at least 1"),
        ({"held_out_share": 1.0}, "--held-out-share 1.0 does not work; take 0, or more and below"),
        (
            {"held_out_share": 0.1, "held_out_data": ("a",)},
            "--held-out-share 0.1 does not work; le",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        DataSettings(**({"data": ("a",)} | options))


def test_data_that_are_not_there_are_refused(opened, tmp_path):
    with pytest.raises(ValueError, match="matches no file; give an existing path"):
        opened(str(tmp_path / "nothing*.jsonl"))
    (tmp_path / "folder").mkdir()
    write(tmp_path / "folder" / "text.txt", "how are you")
    with pytest.raises(ValueError, match="matches folders; name one of them, or files"):
        opened(str(tmp_path / "fold*"))
    (tmp_path / "empty.jsonl").write_text("")
    with pytest.raises(ValueError, match=r"'empty\.jsonl' is empty"):
        opened(str(tmp_path / "empty.jsonl"))
    (tmp_path / "list.json").write_text("[{")
    with pytest.raises(ValueError, match=r"'list\.json' is damaged"):
        opened(str(tmp_path / "list.json"))


def test_large_vocabularies_take_four_bytes_a_token(tmp_path):
    path = write(tmp_path / "big.jsonl", {"token_ids": [70_000, 5]})
    settings = DataSettings(data=(path,), length=4, cache=str(tmp_path))
    data = open_data(settings, words.tokenizer(), 100_000)
    assert data.train.file.tokens.dtype == np.uint32 and data.train[0].tokens[0] == 70_000
