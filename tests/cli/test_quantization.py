"""``--quantization`` of the commands that load a model."""

import json
import re
import sys

import pytest

from jspec.api.llm import LLM
from jspec.api.sampling_params import SamplingParams
from jspec.cli import main
from tests import llm_fixtures

PROMPT = "def add(x, y):"
REQUEST = {
    "custom_id": "a",
    "method": "POST",
    "url": "/v1/completions",
    "body": {"prompt": PROMPT, "max_tokens": 8, "temperature": 0},
}


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return str(llm_fixtures.checkpoints(tmp_path_factory.mktemp("models"))["target"])


@pytest.fixture(scope="module")
def text(target):
    """The text of eight tokens behind the prompt, by weights of 8 bits."""
    llm = LLM(target, quantization="int8")
    return llm.generate(PROMPT, SamplingParams(temperature=0, max_tokens=8))[0].outputs[0].text


@pytest.fixture
def files(tmp_path, target):
    """Return the words of a command with their files."""
    (tmp_path / "requests").write_text(json.dumps(REQUEST))
    (tmp_path / "questions").write_text(json.dumps({"prompt": PROMPT}))

    def named(words):
        names = {name: str(tmp_path / name) for name in ("requests", "questions", "answers")}
        return [{"TARGET": target, **names}.get(word, word) for word in words.split()]

    return named


@pytest.fixture
def run(monkeypatch, capsys):
    """Return a function that runs a command and returns exit code, stdout and stderr."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["jspec", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main.main()
        return stopped.value.code, *capsys.readouterr()

    return run


@pytest.mark.parametrize(
    "words",
    [
        "generate TARGET x",
        "trace TARGET x",
        "chat TARGET",
        "run-batch TARGET -i requests -o answers",
        "tune TARGET --questions questions",
        'certify --model TARGET --speculative-config {"method":"suffix"}',
    ],
)
def test_a_command_names_the_quantisations_that_there_are(run, files, words):
    code, out, err = run(*files(words), "--quantization", "ascend")
    assert code == 2 and out == ""
    assert re.fullmatch(r"jspec: quantization='ascend' .+ 'int8', 'fp8', 'int4'.*\n", err), err


@pytest.mark.parametrize("words", ["generate TARGET", "generate TARGET --kv-cache-dtype float32"])
def test_generate_prints_the_text_of_quantised_weights(run, files, text, words):
    code, out, _ = run(*files(words), PROMPT, *("--max-tokens", "8", "--quantization", "int8"))
    assert (code, out) == (0, f"{text}\n")


def test_a_batch_file_is_answered_by_quantised_weights(run, files, text, tmp_path):
    words = "run-batch TARGET -i requests -o answers --served-model-name m --quantization int8"
    assert run(*files(words))[0] == 0
    answer = json.loads((tmp_path / "answers").read_text())
    assert answer["response"]["body"]["choices"][0]["text"] == text


def test_a_quantised_model_with_a_narrow_cache_is_certified(run, files, tmp_path):
    words = 'certify --model TARGET --speculative-config {"method":"suffix"} --json answers'
    words += " --quantization int8 --kv-cache-dtype fp8 --max-tokens 8 --num-drafts 128"
    code, out, _ = run(*files(words), "--prompt", PROMPT)
    setting = json.loads((tmp_path / "answers").read_text())["setting"]
    assert code == 0 and "all passed" in out
    assert setting["kv_cache_dtype"] == "fp8" and setting["quantization"] == "int8"


def test_a_form_of_the_model_belongs_to_the_certificate_of_a_model(run):
    for option, value in (("quantization", "int8"), ("kv-cache-dtype", "fp8"), ("dtype", "auto")):
        code, _, err = run("certify", f"--{option}", value)
        name = option.replace("-", "_")
        assert code == 2 and err.startswith(f"jspec: {name}='{value}' is of a model; ")
