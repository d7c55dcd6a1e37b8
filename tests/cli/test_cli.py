"""The command line, mostly run in this process."""

import dataclasses
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata

import pytest

from jspec import drafters, verify
from jspec.api.config import keys as config_keys
from jspec.api.llm import LLM
from jspec.api.outputs import CompletionOutput, RequestOutput
from jspec.api.sampling_params import SamplingParams
from jspec.cli import demo, main, show
from jspec.tools.trace import names, trace
from tests import llm_fixtures

PROMPT = "def add(x, y):"
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return llm_fixtures.checkpoints(tmp_path_factory.mktemp("models"))


@pytest.fixture
def jspec(monkeypatch, capsys):
    """Return a function that runs a command and returns exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["jspec", *map(str, arguments)])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        printed = capsys.readouterr()
        return stopped.value.code, printed.out, printed.err

    return run


def test_generate_prints_the_text_and_nothing_else(jspec, models):
    code, out, _ = jspec("generate", models["target"], PROMPT, "--max-tokens", 12)
    answer = LLM(models["target"]).generate(PROMPT, SamplingParams(temperature=0, max_tokens=12))
    assert code == 0
    assert out == answer[0].outputs[0].text + "\n"


def test_every_source_of_a_prompt_gives_the_same_text(jspec, models, tmp_path, monkeypatch):
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT)
    marked = tmp_path / "marked.txt"
    marked.write_text(PROMPT, encoding="utf-8-sig")
    ids = LLM(models["target"]).get_tokenizer().encode(PROMPT)
    start = ("generate", models["target"], "--max-tokens", 12)
    texts = {
        jspec(*start, PROMPT)[1],
        jspec(*start, "--prompt-file", file)[1],
        jspec(*start, "--prompt-file", marked)[1],
        jspec(*start, "--token-ids", ",".join(map(str, ids)))[1],
        jspec(*start, PROMPT, "--stream")[1],
        jspec(*start, PROMPT, "--stream", "--speculative-config", json.dumps(NGRAM))[1],
    }
    assert len(texts) == 1


def test_a_message_goes_through_the_chat_template(jspec, models):
    llm = LLM(models["target"])
    greedy = SamplingParams(temperature=0, max_tokens=12)
    [answer] = llm.chat([{"role": "user", "content": "fox"}], greedy)
    start = models["target"], "fox", "--chat", "--max-tokens", 12
    assert jspec("generate", *start)[1] == jspec("generate", *start, "--stream")[1]
    assert jspec("generate", *start)[1] == answer.outputs[0].text + "\n"
    [prompt] = llm.chat_prompts([{"role": "user", "content": "fox"}])
    shown = jspec("trace", *start)[1]
    for number, each in enumerate(trace(llm, prompt, greedy).rounds, 1):
        assert f"round {number} adds 1: “{each.pieces[0].label}”" in shown
    ids = models["target"], "--token-ids", "5,6", "--chat"
    assert "leave it or --token-ids out" in _complaint(jspec("generate", *ids))
    without = demo.ASSETS / "target", "fox", "--chat"
    assert "no chat template; leave --chat out" in _complaint(jspec("generate", *without))


def test_stats_follow_the_text_under_the_names_of_vllm(jspec, models):
    code, out, _ = jspec(
        "generate",
        models["target"],
        PROMPT,
        "--stats",
        "--max-tokens",
        12,
        "--speculative-config",
        json.dumps(NGRAM),
    )
    plain = jspec("generate", models["target"], PROMPT, "--max-tokens", 12)[1]
    assert code == 0 and out.startswith(plain)
    assert re.search(r"^mean_acceptance_length +\d\.\d{3} *$", out, re.M)
    assert "num_draft_tokens" in out and "per_step" not in out


def test_several_texts_are_numbered(jspec, models):
    code, out, _ = jspec(
        "generate", models["target"], PROMPT, "-n", 2, "--temperature", 1, "--max-tokens", 4
    )
    assert code == 0
    assert out.startswith("text 1 of 2\n") and "\ntext 2 of 2\n" in out


def test_a_model_without_tokenizer_reads_and_prints_token_ids(jspec, tmp_path):
    llm_fixtures.write_model(tmp_path, llm_fixtures.TARGET, 0)
    code, out, _ = jspec("generate", tmp_path, "--token-ids", "5,6,7", "--max-tokens", 4)
    assert code == 0 and re.fullmatch(r"\d+(,\d+)*\n", out)
    assert "tokenizer" in _complaint(jspec("generate", tmp_path, "text"))


def _complaint(ran):
    """Return the one line on stderr about bad input."""
    code, out, err = ran
    assert (code, out) == (2, "")
    assert re.fullmatch(r"jspec: .+\n", err), err
    return err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["nowhere/at/all", "x"], "nowhere/at/all"),
        (["TARGET"], "give one prompt"),
        (["TARGET", "x", "--token-ids", "1"], "give one prompt"),
        (["TARGET", "x", "--prompt-file", "y"], "give one prompt"),
        (["TARGET", "--prompt-file", "missing.txt"], "--prompt-file missing.txt cannot be"),
        (["TARGET", "--prompt-file", "BYTES"], "is not UTF-8: "),
        (["TARGET", "--token-ids", "1,two"], "'1,two'"),
        (["TARGET", "--token-ids", "999999"], "999999"),
        (["TARGET", ""], "empty"),
        (["TARGET", "x", "--speculative-config", "{method: ngram}"], "not JSON"),
        (
            ["TARGET", "x", "--speculative-config", '{"method": "suffix", "method": "ngram"}'],
            "the key 'method' stands twice",
        ),
        (["TARGET", "x", "--speculative-config", "[]"], "must be a dict"),
        (["TARGET", "x", "--speculative-config", '{"method": "ngrams"}'], "did you mean 'ngram'"),
        (["TARGET", "x", "--temperature", "-1"], "temperature=-1.0"),
        (["TARGET", "x", "--max-tokens", "many"], "--max-tokens"),
        (["TARGET", "x", "--dtype", "float7"], "float7"),
        (["TARGET", "x", "--max-model-len", "9999"], "9999"),
        (["TARGET", "x", "--stream", "-n", "2", "--temperature", "1"], "--stream"),
        (["TARGET", "x", "--no-such-option"], "--no-such-option"),
        ([], "model"),
        ([], "(jspec generate --help shows the usage)"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(jspec, models, tmp_path, arguments, words):
    (tmp_path / "bytes").write_bytes(b"caf\xe9")
    named = {"TARGET": models["target"], "BYTES": str(tmp_path / "bytes")}
    given = [named.get(word, word) for word in arguments]
    assert words in _complaint(jspec("generate", *given))


def test_a_closed_standard_input_is_refused(jspec, models, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)  # as after <&-
    complaint = _complaint(jspec("generate", models["target"], "--prompt-file", "-"))
    assert "standard input is closed" in complaint


def test_debug_shows_the_traceback(monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jspec", "generate", "nowhere/at/all", "x", "--debug"])
    with pytest.raises(ValueError, match="nowhere/at/all"):
        main.main()


def test_an_interrupt_is_quiet(jspec, models, monkeypatch):
    def interrupt(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(LLM, "generate", interrupt)
    code, out, _ = jspec("generate", models["target"], "x")
    assert (code, out) == (130, "")


def test_an_interrupt_during_garbage_collection_is_not_lost():
    """Python drops exceptions that callbacks of the collector raise."""
    program = (
        "import gc, os, signal, sys, time; from jspec.cli import main as cli\n"
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored in the background
        "def _xla_gc_callback(*_): gc.callbacks.clear(); os.kill(os.getpid(), signal.SIGINT)\n"
        "def app(*_, **__):\n"
        "  gc.callbacks.append(_xla_gc_callback); gc.collect()\n"
        "  for _ in range(3000): time.sleep(0.01)\n"  # Python handles signals between two calls
        "cli.app = app; sys.argv = ['jspec']; cli.main()"
    )
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.returncode, ran.stdout, ran.stderr) == (130, "", "")


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.05, 0.2, 0.4])
def test_an_interrupt_while_programs_compile_ends_the_process_with_130(models, tmp_path, seconds):
    """XLA compiles in threads of its own, and uses the devices that Python's end would free."""
    words = "import signal; from jspec.cli.main import run\n"
    words += (
        "signal.signal(signal.SIGINT, signal.default_int_handler)\n"  # ignored if in background
    )
    command = [sys.executable, "-c", words + "run()", "generate", models["target"], PROMPT]
    settings = {**os.environ, "JAX_LOG_COMPILES": "1", "JAX_ENABLE_COMPILATION_CACHE": "false"}
    settings["XLA_FLAGS"] = ""  # those of tests compile in less time than is waited here
    log = tmp_path / "log"
    with log.open("w") as stderr:
        ran = subprocess.Popen(command, env=settings, stdout=subprocess.PIPE, stderr=stderr)
    try:
        while "Compiling jit(launch)" not in log.read_text() and ran.poll() is None:
            time.sleep(0.02)
        time.sleep(seconds)
        ran.send_signal(signal.SIGINT)
        assert (ran.wait(120), ran.stdout.read()) == (130, b"")
    finally:
        ran.kill()


def test_the_version_is_that_of_the_distribution(jspec):
    code, out, _ = jspec("--version")
    assert (code, out) == (0, f"jspec {metadata.version('jspec-decoding')}\n")


def test_a_fresh_process_prints_only_the_text(models):
    command = [sys.executable, "-m", "jspec", "generate", models["target"], "x", "--max-tokens=2"]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")


@pytest.mark.parametrize(("platform", "extra"), [("cuda", "[cuda]"), ("no-such", "")])
def test_a_platform_that_is_not_there_is_one_line(models, platform, extra):
    command = [sys.executable, "-m", "jspec", "generate", models["target"], "x"]
    environment = os.environ | {"JAX_PLATFORMS": platform}
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    complaint = _complaint((ran.returncode, ran.stdout, ran.stderr))
    assert f"JAX_PLATFORMS={platform} names a platform that JAX cannot start" in complaint
    assert extra in complaint and "leave JAX_PLATFORMS unset" in complaint


def test_a_console_without_a_character_shows_another(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(main, "app", lambda *_, **__: print("gr\u00fc\u00dfe"))
    with pytest.raises(SystemExit) as stopped:
        main.main()
    sys.stdout.flush()
    assert (stopped.value.code, written.getvalue()) == (0, b"gr??e\n")


def test_help_imports_neither_jax_nor_the_engine():
    names = {"jax", "jspec.api.llm", "jspec.engine", "pydantic"}
    program = f"import sys; from jspec.cli import main; print({names} & {{*sys.modules}})"
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("set()\n", "")


def test_methods_lists_both_registries(jspec):
    code, out, _ = jspec("methods")
    assert code == 0
    for name in (*drafters.METHODS, *config_keys.RULE_NAMES, "prompt_lookup_max=5"):
        assert name in out
    assert set(config_keys.RULE_NAMES.values()) == set(verify.RULES)


def test_the_last_token_of_a_clipped_round_counts_as_drafted():
    stats = {"per_step_accepted": [1, 1], "per_step_drafted_token_ids": [[5, 9], [7, 8]]}
    assert show.drafted_tokens([5, 6, 7, 8], stats) == [True, False, True, True]
    assert show.drafted_tokens([5, 6, 7, 4], stats) == [True, False, True, False]


def test_the_demo_asks_an_instruct_model_that_is_installed(jspec, models, monkeypatch):
    plain = [setting for setting in demo.SETTINGS if setting.title.endswith("e, float32, greedy")]
    rows = [row for row in demo.INSTRUCT_SETTINGS if row.method != "eagle3" and not row.temperature]
    monkeypatch.setattr(demo, "SETTINGS", plain)
    monkeypatch.setattr(demo, "INSTRUCT_SETTINGS", rows)
    monkeypatch.setattr(demo, "_instruct_model", lambda: models["target"])
    code, out, _ = jspec("demo", "--max-tokens", 5, "--repeats", 1)
    assert code == 0
    first, second = out.split(" is installed. ")
    assert "float32, greedy" in first and "bfloat16, greedy" not in first
    assert demo.QUESTION in " ".join(second.split()) and "bfloat16, greedy" in second
    assert re.findall(r"^ +(autoregressive|ngram) ", second, re.M) == ["autoregressive", "ngram"]


def test_the_demo_compares_every_setting_with_its_baseline(jspec, tmp_path, monkeypatch):
    few = {  # the other rows would only compile more
        "autoregressive, float32, greedy",
        "eagle3, float32, greedy",
        "autoregressive, float32, T = 0.8",
        "draft_model, float32, T = 0.8",
    }
    settings = [setting for setting in demo.SETTINGS if setting.title in few]
    monkeypatch.setattr(demo, "SETTINGS", settings)
    monkeypatch.setattr(demo, "_instruct_model", lambda: None)
    monkeypatch.setattr(demo, "PROMPT", tmp_path / "prompt.txt")
    demo.PROMPT.write_text(PROMPT)
    for name, config, key in (("target", llm_fixtures.TARGET, 0), ("draft", llm_fixtures.DRAFT, 1)):
        llm_fixtures.write_model(tmp_path / name, config, key)
        llm_fixtures.write_tokenizer(tmp_path / name)
    llm_fixtures.write_eagle3_head(tmp_path / "eagle3")
    code, out, _ = jspec("demo", "--assets", tmp_path, "--max-tokens", 12, "--repeats", 1)
    assert code == 0
    assert "float32, greedy" in out and "float32, T = 0.8" in out
    for method, end in (("autoregressive", r"1\.00"), ("eagle3|draft_model", "identical")):
        rows = re.findall(rf"^ +({method}) .* {end} *$", out, re.M)
        assert len(rows) == 2, out


def test_a_different_text_is_shown_with_the_gap_of_the_target():
    output = lambda ids: RequestOutput("0", None, [7], [CompletionOutput(0, "", ids)], True)
    setting = lambda dtype: demo.Setting("ngram", dtype, 0.0, NGRAM)
    run = lambda dtype, ids: demo.Run(setting(dtype), output(ids), again=None)
    asked = []
    gap = lambda dtype, ids: asked.append((dtype, ids)) or 0.0123
    base = run("bfloat16", [1, 2, 3, 4])
    assert demo.verdict(run("bfloat16", [1, 2, 3, 4]), base, gap).plain == "identical"
    assert demo.verdict(run("bfloat16", [1, 2, 9, 4]), base, gap).plain == (
        "differs at token 2, gap 0.012"
    )
    assert asked == [("bfloat16", [7, 1, 2])]
    sampled = dataclasses.replace(setting("bfloat16"), temperature=0.8)
    block = dataclasses.replace(sampled, config={"rejection_sample_method": "block"})
    other = [1, 2, 9, 4]
    words = lambda setting: demo.verdict(demo.Run(setting, output(other), None), base, gap).plain
    assert (words(sampled), words(block)) == ("differs at token 2", "same probs")
    assert "red" in demo.verdict(run("float32", [1, 2, 9, 4]), base, gap).style


def test_the_demo_names_missing_files_and_bad_numbers(jspec, tmp_path):
    assert str(tmp_path / "target") in _complaint(jspec("demo", "--assets", tmp_path))
    assert "repeats=0" in _complaint(jspec("demo", "--repeats", 0))
    assert "max_tokens=0" in _complaint(jspec("demo", "--max-tokens", 0))
    assert "for '--num-questions'" in _complaint(jspec("bench", "--num-questions", -1))
    assert demo.PROMPT.is_file()


TRACE = ("--max-tokens", 12, "--speculative-config", json.dumps(NGRAM))


def test_trace_prints_every_round_and_the_text_of_generate(jspec, models):
    code, out, _ = jspec("trace", models["target"], PROMPT, *TRACE)
    text = jspec("generate", models["target"], PROMPT, "--max-tokens", 12)[1]
    rounds = re.findall(r"^round (\d+) adds (\d+)", out, re.M)
    assert code == 0 and [int(number) for number, _ in rounds] == list(range(1, len(rounds) + 1))
    assert sum(int(added) for _, added in rounds) == 12
    assert names.printed(text).split()[0] in out
    assert f"passes of the target     {len(rounds)} " in out


def test_trace_without_a_model_writes_a_page_of_the_embedded_one(
    jspec, models, tmp_path, monkeypatch
):
    monkeypatch.setattr(demo, "ASSETS", models["target"].parent)
    monkeypatch.setattr(demo, "EAGLE3", NGRAM)
    monkeypatch.setattr(demo, "PROMPT", tmp_path / "prompt.txt")
    demo.PROMPT.write_text(PROMPT)
    code, out, _ = jspec("trace", "--max-tokens", 12, "--html", tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert (code, out) == (0, f"{tmp_path / 'page.html'}\n")
    assert PROMPT in page and "12 tokens in" in page and "NGram" in page


_WRITES = """
import sys
from pathlib import Path
from jspec.util import atomic_files
print("before")
atomic_files.check_output("--json", Path("/dev/stdout"))
atomic_files.write(Path("/dev/stdout"), b"results\\n")
print("after")
"""


@pytest.mark.parametrize("pipe", [False, True])
def test_results_on_standard_output_follow_earlier_prints(tmp_path, pipe):
    command, file = [sys.executable, "-c", _WRITES], tmp_path / "printed.txt"
    if pipe:
        file.write_bytes(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)
    else:
        with file.open("w") as printed:
            subprocess.run(command, stdout=printed, check=True)
    assert file.read_text().splitlines() == ["before", "results", "after"]


def test_a_page_on_standard_output_comes_without_its_path(jspec, models):
    start = "trace", models["target"], PROMPT, "--max-tokens", 4
    code, out, _ = jspec(*start, "--html", "/dev/null")
    assert (code, out) == (0, "")


@pytest.mark.parametrize(
    "arguments",
    [
        ["trace", "TARGET", "x", "--html"],
        ["certify", "--json"],
        ["bench", "--json"],
        ["bench", "--output"],
        ["tune", "--output"],
        ["tune", "--json"],
    ],
)
def test_unwritable_outputs_are_refused_before_the_work(
    jspec, models, tmp_path, monkeypatch, arguments
):
    monkeypatch.setattr("jspec.checkpoints.loading.load", None)  # not called
    given = [models["target"] if word == "TARGET" else word for word in arguments]
    (tmp_path / "file").touch()
    complaint = _complaint(jspec(*given, str(tmp_path / "file" / "results")))
    assert complaint.startswith(f"jspec: {arguments[-1]} ")
    assert "is a file, not a folder" in complaint
    if arguments != ["bench", "--output"]:
        assert "is a folder; name a file in it" in _complaint(jspec(*given, str(tmp_path)))
        # Root may write everywhere, so the folder's mode has no effect.
        monkeypatch.setattr("os.access", lambda path, _: path != tmp_path)
        refusal = f"{tmp_path} may not be written; name another place"
        assert refusal in _complaint(jspec(*given, str(tmp_path / "file")))


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["TARGET"], "give one prompt"),
        (["TARGET", "x", "--html", "no/such/folder/page.html"], "no/such/folder"),
        (["TARGET", "x", "--speculative-config", "{method: ngram}"], "not JSON"),
        (["TARGET", "x", "--max-tokens", "0"], "max_tokens=0"),
        (["nowhere/at/all", "x"], "nowhere/at/all"),
    ],
)
def test_bad_input_of_trace_is_one_line_and_exit_code_2(jspec, models, arguments, words):
    given = [models["target"] if word == "TARGET" else word for word in arguments]
    assert words in _complaint(jspec("trace", *given))
