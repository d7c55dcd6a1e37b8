"""Answers of the target do not depend on interruptions or on other answers."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jspec
from jspec import SamplingParams
from jspec.checkpoints import checkpoint
from tests import llm_fixtures
from training import generate_data
from training.data.settings import DataSettings, open_data
from training.util.locks import alone

ROOT = Path(__file__).parents[2]
CHATS = [
    {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": "old"}]}
    for text in ("the quick brown", "def add", "grüße", "the the the", "lazy dog", "x + y")
]
OPTIONS = "--max-new-tokens 12 --batch 2 --temperature 0 1"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    """Return the folder of target and answers."""
    return tmp_path_factory.getbasetemp() / "generate"


@pytest.fixture(scope="module")
def target(root):
    return llm_fixtures.checkpoints(root)["target"]


def write(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def arguments(target, prompts, output, *more):
    files = ["--target", str(target), "--prompts", str(prompts), "--output", str(output)]
    return [*files, *OPTIONS.split(), *more]


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def chats(root):
    root.mkdir(exist_ok=True)
    return write(root / "chats.jsonl", CHATS)


@pytest.fixture(scope="module")
def whole(root, target, chats):
    """The file of an uninterrupted run."""
    path = root / "whole.jsonl"
    assert generate_data.main(arguments(target, chats, path)) == 0
    return path


def test_answers_are_those_of_the_target_to_the_prompt(target, whole):
    lines = lines_of(whole)
    asked = sorted(chat["messages"][0]["content"] for chat in CHATS)
    assert sorted(line["messages"][0]["content"] for line in lines) == asked
    assert {line["temperature"] for line in lines} == {0.0, 1.0}
    assert len({line["seed"] for line in lines}) == len(lines)
    params = [
        SamplingParams(max_tokens=12, temperature=line["temperature"], seed=line["seed"])
        for line in lines
    ]
    outputs = jspec.LLM(target).chat([line["messages"][:1] for line in lines], params)
    for line, output in zip(lines, outputs, strict=True):
        answer = output.outputs[0]
        assert line["prompt_token_ids"] == output.prompt_token_ids
        assert (line["token_ids"], line["text"]) == (answer.token_ids, answer.text)
        assert line["finish_reason"] == answer.finish_reason
        assert line["messages"][1:] == [{"role": "assistant", "content": answer.text}]


@pytest.mark.parametrize("share", [0.0, 0.1, 0.3, 0.5, 0.97])
def test_a_run_cut_off_anywhere_ends_in_the_same_file(target, chats, whole, tmp_path, share):
    path = tmp_path / "cut.jsonl"
    content = whole.read_bytes()
    path.write_bytes(content[: int(share * len(content))])
    beside = whole.with_name("whole.jsonl.provenance.json").read_text()
    path.with_name("cut.jsonl.provenance.json").write_text(beside)
    assert generate_data.main(arguments(target, chats, path)) == 0
    assert path.read_bytes() == content


KILLED = """
import os, signal, sys
from training import generate_data

saved, calls = os.fsync, []

def fsync(file):
    calls.append(file)
    if len(calls) == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    saved(file)

os.fsync = fsync
generate_data.main(sys.argv[1:])
"""


def test_a_process_killed_in_the_middle_ends_in_the_same_file(root, target, chats, whole, tmp_path):
    path = tmp_path / "killed.jsonl"
    again = arguments(target, chats, path)
    ended = subprocess.run([sys.executable, "-c", KILLED, *again], cwd=ROOT)
    assert ended.returncode == -signal.SIGKILL and 2 <= len(lines_of(path)) < len(CHATS)
    assert generate_data.main(again) == 0
    assert path.read_bytes() == whole.read_bytes()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_it_with_its_code_and_says_how_to_resume(
    number, code, target, chats, whole, tmp_path, monkeypatch, capsys
):
    path, saved = tmp_path / "stopped.jsonl", os.fsync

    def fsync(file):
        saved(file)
        os.kill(os.getpid(), number)

    usual = signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in the background
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            assert generate_data.main(arguments(target, chats, path)) == code
    finally:
        signal.signal(signal.SIGINT, usual)
    assert capsys.readouterr().err.endswith("stopped; run the same command to resume\n")
    assert not path.with_name("stopped.jsonl.lock").exists()
    assert generate_data.main(arguments(target, chats, path)) == 0
    assert path.read_bytes() == whole.read_bytes()


def test_texts_do_not_depend_on_the_grouping_or_on_speculation(target, chats, whole, tmp_path):
    by_key = lambda path: {line["key"]: line for line in lines_of(path)}
    path = tmp_path / "otherwise.jsonl"
    more = ["--batch", "8", "--speculative-config", json.dumps(NGRAM)]
    assert generate_data.main(arguments(target, chats, path, *more)) == 0
    assert by_key(path) == by_key(whole)


def test_more_prompts_may_be_asked_later(target, whole, chats, tmp_path):
    path = tmp_path / "grown.jsonl"
    some = write(tmp_path / "prompts.jsonl", CHATS[:2])
    assert generate_data.main(arguments(target, some, path)) == 0
    before = path.read_bytes()
    write(some, CHATS[:2] + CHATS[2:3] + CHATS[:1])  # a new one, and a repetition
    assert generate_data.main(arguments(target, some, path)) == 0
    assert path.read_bytes().startswith(before) and len(lines_of(path)) == 4
    keys = [line["key"] for line in lines_of(path)]
    assert sum("-1" in key for key in keys) == 1 and len(set(keys)) == 4


def test_every_turn_is_answered_behind_the_answers_before_it(target, tmp_path):
    asked = ["the quick", "brown fox"]
    prompts = write(tmp_path / "turns.jsonl", [{"turns": asked}, {"turns": ["lazy dog"]}])
    path = tmp_path / "answers.jsonl"
    assert generate_data.main(arguments(target, prompts, path, "--every-turn")) == 0
    lines = [line for line in lines_of(path) if line["turns"] == 2]
    assert len(lines_of(path)) == 3 and len({line["key"] for line in lines}) == 1
    assert [line["turn"] for line in lines] == [0, 1]
    texts = [line["text"] for line in lines]
    render = lambda *parts: "".join(parts) + "[a]"
    tokenizer = jspec.load(target).tokenizer
    for turn, line in enumerate(lines):
        history = [part for i in range(turn) for part in (f"[u]{asked[i]}", f"[a]{texts[i]}")]
        text = render(*history, f"[u]{asked[turn]}")
        assert line["prompt_token_ids"] == tokenizer.encode(text, add_special_tokens=False)


def test_conversations_that_outgrow_the_target_are_counted(target, tmp_path, capsys):
    turns = [["the quick", "x" * 600], ["lazy dog", "fox"]]
    prompts = write(tmp_path / "turns.jsonl", [{"turns": each} for each in turns])
    path = tmp_path / "answers.jsonl"
    assert generate_data.main(arguments(target, prompts, path, "--every-turn")) == 0
    assert sorted(line["turns"] for line in lines_of(path)) == [1, 2, 2]
    printed = capsys.readouterr().err
    assert "1 conversations ended before their last turn: they had grown to the target's" in printed


def test_texts_are_cut_into_prompts(target, tmp_path):
    text = "the quick brown fox jumps over the lazy dog. " * 6
    prompts = write(tmp_path / "text.jsonl", [{"text": text}])
    path = tmp_path / "answers.jsonl"
    assert generate_data.main(arguments(target, prompts, path, "--prompt-tokens", "5")) == 0
    ids = jspec.load(target).tokenizer.encode(text)
    expected = [ids[start : start + 5] for start in range(0, len(ids) - 4, 5 + 12)]
    assert sorted(line["prompt_token_ids"] for line in lines_of(path)) == sorted(expected)
    assert "messages" not in lines_of(path)[0]


def test_the_readers_read_the_answers_and_only_learn_them(target, whole, tmp_path):
    settings = DataSettings(
        data=(str(whole),), length=63, packing="none", cache=str(tmp_path / "cache")
    )
    model = jspec.load(target)
    rows = open_data(settings, model.tokenizer, model.config.vocab_size).train
    rows_read = {
        (tuple(row.tokens[row.segments > 0]), tuple(row.tokens[row.weights > 0]))
        for row in map(rows.__getitem__, range(len(rows)))
    }
    assert rows_read == {
        (tuple(line["prompt_token_ids"] + line["token_ids"]), tuple(line["token_ids"]))
        for line in lines_of(whole)
    }


def test_another_run_is_not_continued_by_mistake(target, chats, whole, capsys):
    before = whole.read_bytes()
    assert generate_data.main(arguments(target, chats, whole, "--seed", "1")) == 2
    printed = capsys.readouterr().err
    assert "holds answers of another run: seed 1 (was 0); give a new one" in printed
    assert whole.read_bytes() == before


def test_another_target_or_template_does_not_continue_a_file(target, chats, tmp_path, capsys):
    template, path = tmp_path / "template.jinja", tmp_path / "answers.jsonl"
    template.write_text(jspec.load(target).tokenizer.chat_template)
    run = arguments(target, chats, path, "--chat-template", str(template))
    assert generate_data.main(run) == 0
    before = path.read_bytes()
    model = jspec.load(target)
    other = shutil.copytree(target, tmp_path / Path(target).name)
    again = jax.tree.map(lambda leaf: -leaf, model.params)
    checkpoint.save_pretrained(other, model.config, again, model.raw_config)
    assert generate_data.main([*run, "--target", str(other)]) == 2
    message = r"holds answers of another run: weights 'sha256 {0}' \(was 'sha256 {0}'\); give"
    message = message.replace("{0}", "[^']+")
    assert re.search(message, capsys.readouterr().err)
    template.write_text(template.read_text() + " ")
    assert generate_data.main(run) == 2
    assert re.search(message.replace("weights", "template"), capsys.readouterr().err)
    assert path.read_bytes() == before


def test_a_file_without_recorded_weights_continues_once_they_are_added(
    target, chats, whole, tmp_path, capsys
):
    path = tmp_path / "early.jsonl"
    path.write_bytes(whole.read_bytes())
    facts = json.loads(whole.with_name("whole.jsonl.provenance.json").read_text())
    missing = {name: facts.pop(name) for name in ("weights", "template")}
    beside = path.with_name("early.jsonl.provenance.json")
    beside.write_text(json.dumps(facts))
    assert generate_data.main(arguments(target, chats, path)) == 2
    printed = capsys.readouterr().err
    assert (
        f"are unchanged, add {json.dumps(missing)[1:-1]} to that file" in printed
        and printed.count("\n") == 1
    )
    beside.write_text(json.dumps(facts | missing))
    assert generate_data.main(arguments(target, chats, path)) == 0


def test_a_target_that_differs_in_all_rows_but_the_first_does_not_continue_a_file(
    target, chats, whole, tmp_path, capsys
):
    model = jspec.load(target)
    other = shutil.copytree(target, tmp_path / Path(target).name)
    last = lambda x: (*(0,) * (x.ndim - 2), slice(1, None))
    params = jax.tree.map(
        lambda x: x.at[last(x)].set(x[last(x)][::-1]) if x.ndim > 1 else x, model.params
    )
    checkpoint.save_pretrained(other, model.config, params, model.raw_config)
    assert generate_data.main(arguments(other, chats, whole)) == 2
    assert "holds answers of another run: weights " in capsys.readouterr().err


def test_a_file_of_an_earlier_version_continues_and_then_records_all_weights(
    target, chats, whole, tmp_path, capsys
):
    path = tmp_path / "early.jsonl"
    path.write_bytes(whole.read_bytes()[:-1])
    facts = json.loads(whole.with_name("whole.jsonl.provenance.json").read_text())
    beside = path.with_name("early.jsonl.provenance.json")
    beside.write_text(json.dumps(facts | {"weights": "sha256 0123"}))
    assert generate_data.main(arguments(target, chats, path)) == 2
    assert "(was 'sha256 0123')" in capsys.readouterr().err
    beside.write_text(json.dumps(facts | {"weights": facts["weights"].partition(",")[0]}))
    assert generate_data.main(arguments(target, chats, path)) == 0
    assert json.loads(beside.read_text()) == facts
    assert path.read_bytes() == whole.read_bytes()


def test_two_processes_do_not_write_one_file(target, chats, whole, tmp_path, capsys):
    before = whole.read_bytes()
    with alone(whole):  # refused before the prompts are read
        assert generate_data.main(arguments(target, tmp_path / "nothing", whole)) == 2
    assert "'whole.jsonl' is being written by another process" in capsys.readouterr().err
    assert whole.read_bytes() == before
    assert generate_data.main(arguments(target, chats, whole)) == 0


def test_a_line_damaged_before_the_last_is_not_cut_off(target, chats, whole, tmp_path, capsys):
    path = tmp_path / "damaged.jsonl"
    content = whole.read_bytes().replace(b'"key"', b'"ke', 1)
    path.write_bytes(content)
    beside = whole.with_name("whole.jsonl.provenance.json").read_text()
    path.with_name("damaged.jsonl.provenance.json").write_text(beside)
    assert generate_data.main(arguments(target, chats, path)) == 2
    assert "damaged.jsonl:1 is damaged, and is not the last line" in capsys.readouterr().err
    assert path.read_bytes() == content


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--batch", "0"], "--batch 0 does not work; it must be at least 1"),
        (["--temperature", "-1"], "--temperature -1.0 does not work; temperature=-1.0 must be 0"),
        (["--speculative-config", "{"], "--speculative-config '{' does not work; it is not JSON"),
        (
            [
                "--speculative-config",
                json.dumps(
                    NGRAM
                    | {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 2}
                ),
            ],
            "changes the answers' distribution; take a lossless one",
        ),
        (["--output", ""], "--output '' does not work; give one"),
    ],
)
def test_bad_options_give_one_line_and_exit_code_2(
    target, chats, tmp_path, capsys, options, message
):
    assert generate_data.main(arguments(target, chats, tmp_path / "out.jsonl", *options)) == 2
    printed = capsys.readouterr().err
    assert message in printed and printed.count("\n") == 1 and not (tmp_path / "out.jsonl").exists()


def test_prompts_that_cannot_be_asked_are_bad_lines(target, tmp_path, capsys):
    lines = [
        {"turns": ["hi", "you"]},
        {"prompt": "x" * 600},
        {"messages": [{"role": "system", "content": "a"}]},
    ]
    prompts = write(tmp_path / "prompts.jsonl", [*lines, *CHATS[:2]])
    path = tmp_path / "out.jsonl"
    assert generate_data.main(arguments(target, prompts, path, "--max-bad-lines", "2")) == 2
    assert generate_data.main(arguments(target, prompts, path, "--max-bad-lines", "3")) == 0
    printed = capsys.readouterr().err
    assert (
        "prompts.jsonl:1: the user speaks twice in a row" in printed and "--every-turn" in printed
    )
    assert (
        "prompts.jsonl:2: the prompt has" in printed and "the target has 256 positions" in printed
    )
    assert "prompts.jsonl:3: no message of the user leads to an answer" in printed
    assert len(lines_of(path)) == 2
