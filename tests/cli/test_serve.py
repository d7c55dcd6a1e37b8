"""``jspec serve`` and ``jspec run-batch``: flags, the file of flags, and a server's whole life."""

import contextlib
import inspect
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import jax
import pytest
import typer

import jspec
from jspec.api import engine_args
from jspec.checkpoints import stitching
from jspec.checkpoints.heads import mtp as mtp_format
from jspec.cli import main
from jspec.models.blocks.experts import Experts
from jspec.models.blocks.latent_attention import LatentAttention
from jspec.models.heads import mtp
from tests import llm_fixtures, networks

ROOT = Path(__file__).parents[2]
SERVING = ROOT / "docs" / "serving.md"
OF_VLLM = ("--allowed-origins", "--allowed-methods", "--allowed-headers", "--allow-credentials")
OF_VLLM += ("--enable-force-include-usage", "--uds", "--ssl-ca-certs", "--ssl-cert-reqs")
OF_VLLM += ("--disable-fastapi-docs", "--default-chat-template-kwargs", "--middleware")
OF_VLLM += ("--override-generation-config", "--model")
_READY = re.compile(r"(?:tiny|dsv3) at (http\S+) \(Ctrl-C ends\) \([\d.]+ s\)")
# vLLM's flags for DeepSeek-V3 on NPUs, as people type them.
_DEEPSEEK = """--port 0 --data-parallel-size 1 --tensor-parallel-size 2 --enable-expert-parallel
--seed 1024 --served-model-name dsv3 --max-model-len 256 --max-num-batched-tokens 5000
--max-num-seqs 10 --trust-remote-code --gpu-memory-utilization 0.9
--compilation-config '{"cudagraph_mode": "FULL_DECODE_ONLY"}'
--speculative-config '{"num_speculative_tokens": 2, "method": "deepseek_mtp",
"disable_padded_drafter_batch": "False"}'"""


@pytest.fixture(scope="module")
def target(root):
    return llm_fixtures.checkpoints(root)["target"]


def complaint(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["jspec", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    assert stopped.value.code == 2
    *stages, line = capsys.readouterr().err.splitlines()
    # A busy machine prints stages.
    assert all(each.startswith(("loading (", "memory ")) for each in stages)
    return line


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--max-model-length", "5"], "no --max-model-length; did you mean 'max-model-len'?"),
        (["--tensor-parallel-size", "99"], "tensor_parallel_size=99 needs 99 devices"),
        (["--quantization=awq"], "quantization='awq' is not supported"),
        (["--quantization", "ascend"], "use one of 'int8', 'fp8', 'int4'"),
        (["--pipeline-parallel-size", "2"], "pipeline_parallel_size=2 is not supported"),
        (["--frobnicate"], "jspec serve has no 'frobnicate'"),
        (["more"], "'more' is no flag"),
        (["--log-format", "xml"], "--log-format 'xml' must be one of json, text"),
        (["--tool-call-parser", "x"], "'x' must be one of deepseek_v3, hermes, llama3_json, mist"),
        (["--reasoning-parser", "x"], "--reasoning-parser 'x' must be one of deepseek_r1, qwen3"),
        (["--chat-template-content-format", "x"], "'x' must be one of auto, openai, string"),
        (["--chat-template", "no.jinja"], "--chat-template: chat_template='no.jinja' is neither"),
        (["--chat-template", "{% for %}"], "--chat-template: chat_template is no Jinja: "),
        (["--ssl-keyfile", "key.pem"], "belong together"),
        (["--ssl-ca-certs", "ca.pem"], "need --ssl-certfile"),
        (["--allowed-origins", "*"], "--allowed-origins is not JSON"),
        (["--allowed-origins", '"*"'], "must be a JSON list of texts"),
        (["--allow-credentials"], "--allow-credentials needs --allowed-origins"),
        (["--middleware", "no.where"], "--middleware='no.where' cannot be imported"),
        (["--override-generation-config", "[]"], "must be a JSON object"),
        (["--override-generation-config", '{"temp": 1}'], "has no 'temp'"),
        (["--override-generation-config", '{"top_p": 2}'], "top_p=2"),
        (["--override-generation-config", '{"max_new_tokens": 0}'], "max_new_tokens=0 must be"),
        (
            ["--default-chat-template-kwargs", '{"messages": []}'],
            "'messages', which is an argument",
        ),
        (["--model", "other"], "give one of them"),
        (["--ssl-keyfile", "no.pem", "--ssl-certfile", "no.pem"], "there is no such file"),
        (["--speculative-config", "{"], "--speculative-config is not JSON"),
        (["--host", "999.1.1.1"], "--host '999.1.1.1' --port 8000: "),
        (["--port", "99999"], "--port"),
        (["--config", "none.yaml"], "--config none.yaml: "),
        (["--max-num-seqs", "99999999"], "max_num_seqs of at most"),  # for the memory of a machine
        (["--generation-config", "nowhere"], "nowhere"),
        (["--max-model-len", "100000"], "max_model_len=100000 must be"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_bad_flag_is_one_line(monkeypatch, capsys, target, flags, words):
    assert words in complaint(monkeypatch, capsys, "serve", target, *flags)


@pytest.mark.parametrize(
    "words",
    [
        ["MODEL", "--disable-log-requests"],
        ["--disable-log-requests", "MODEL"],
        ["--enable-chunked-prefill", "--uvicorn-log-level", "info", "MODEL"],
        ["--disable-log-requests", "--model", "MODEL"],
        ["--config", "FILE", "--disable-log-requests"],
        ["--config", "OTHER", "--model", "MODEL"],
        ["--config", "OTHER", "MODEL"],
    ],
    ids=" ".join,
)
def test_flags_without_an_effect_stand_before_the_model_or_behind(
    monkeypatch, capsys, tmp_path, words
):
    missing = str(tmp_path / "missing")
    (tmp_path / "file.yaml").write_text(f"model: {missing}")
    (tmp_path / "other.yaml").write_text("model: other")
    names = {"MODEL": missing, "FILE": tmp_path / "file.yaml", "OTHER": tmp_path / "other.yaml"}
    named = [names.get(word, word) for word in words]
    assert f"{missing}" in complaint(monkeypatch, capsys, "serve", "--port", 0, *named)


def test_a_taken_port_is_said_before_the_model_is_loaded(monkeypatch, capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        words = complaint(monkeypatch, capsys, "serve", "/no/model", "--port", port)
    assert f"--port {port}: Address already in use" in words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("max-model-length: 5", "no --max-model-length; did you mean"),
        ("port: 99999", "--port"),
        ("[1]", "must hold names of flags"),
        ("{", "--config"),
        ('speculative-config: {"method": "ngrams"}', "did you mean 'ngram'?"),
    ],
)
def test_a_file_of_flags_has_their_errors(monkeypatch, capsys, tmp_path, target, text, words):
    file = tmp_path / "serve.yaml"
    file.write_text(text)
    assert words in complaint(monkeypatch, capsys, "serve", target, "--config", file)


@pytest.fixture(scope="module")
def deepseek(tmp_path_factory):
    """Return a tiny DeepSeek-V3 with an MTP module in its files."""
    mixer = LatentAttention(num_heads=4, kv_rank=16, q_rank=12, nope_dim=8, rope_dim=8, value_dim=8)
    experts = Experts(num_experts=4, experts_per_token=2, intermediate_size=16, shared_size=32)
    config = networks.changed(llm_fixtures.TARGET, mixer=mixer, feed_forward=experts)
    plain, folder = (tmp_path_factory.mktemp(name) for name in ("plain", "deepseek"))
    llm_fixtures.write_model(plain, config, 0)
    llm_fixtures.write_tokenizer(plain)
    head = mtp_format.config_for(config, "deepseek")
    stitching.stitch(folder, plain, head, mtp.init_params(jax.random.key(0), head))
    return folder


@contextlib.contextmanager
def process(*arguments, cwd):
    command = [sys.executable, "-m", "jspec", *map(str, arguments)]
    pipes = dict(stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd)
    pipes["env"] = os.environ | {"PYTHONPATH": str(ROOT)}
    running = subprocess.Popen(command, **pipes)
    try:
        yield running
    finally:
        running.kill()
        running.communicate()


def address(server):
    """Return the address that a server of "tiny" prints when it is ready."""
    return next(found[1] for line in server.stderr if (found := _READY.search(line)))


def test_the_help_documents_the_flags_of_vllm(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    monkeypatch.setattr(sys, "argv", ["jspec", "serve", "--help"])
    with pytest.raises(SystemExit):
        main.main()
    printed, page = capsys.readouterr().out, SERVING.read_text(encoding="utf-8")
    for flag in OF_VLLM:
        assert f" {flag} " in printed, flag
        assert f"`{flag}`" in page, flag


def test_every_argument_of_an_engine_is_one_of_llm_and_those_with_a_help_are_flags():
    command = typer.main.get_command(main.app).get_command(None, "serve")
    arguments = inspect.signature(jspec.LLM).parameters
    for name, field in engine_args.FIELDS.items():
        assert arguments[name].default == field.default
        assert (name in {option.name for option in command.params}) == bool(field.metadata["help"])


@pytest.mark.parametrize("command", ["chat", "generate", "trace", "bench", "tune", "run-batch"])
def test_each_command_takes_its_model_as_a_flag_too(monkeypatch, capsys, tmp_path, command):
    (tmp_path / "in.jsonl").write_text('{"custom_id": "a", "url": "/v1/completions", "body": {}}')
    (tmp_path / "questions.txt").write_text("x")
    asked = ["--config", "ngram", "--questions", tmp_path / "questions.txt", "--num-questions", 1]
    more = {
        "run-batch": ["-i", tmp_path / "in.jsonl", "-o", tmp_path / "out"],
        "generate": ["--token-ids", "1"],
        "trace": ["--token-ids", "1"],
        "bench": [*asked, "-k", 2, "--no-peers"],
        "tune": asked,
    }.get(command, [])
    missing = tmp_path / "missing"
    words = complaint(monkeypatch, capsys, command, "--model", missing, *more)
    assert f"{missing}" in words and "one of them" not in words
    if command in ("generate", "trace"):  # the one argument is the prompt then
        assert "give one prompt" in complaint(
            monkeypatch, capsys, command, "prompt", "--model", missing, *more
        )
        more = ["prompt"]
    words = complaint(monkeypatch, capsys, command, "other", "--model", missing, *more)
    assert "give one of them" in words


def test_a_server_answers_and_then_drains(target, tmp_path):
    config = {"speculative-config": {"method": "ngram", "num_speculative_tokens": 2}}
    config |= {"max_num_seqs": 2, "max-model-len": 96, "log-format": "json", "port": 0}
    config |= {"allowed-origins": ["https://a.example"], "allowed-methods": ["POST"]}
    config |= {"override-generation-config": {"temperature": 0, "max_new_tokens": 70}}
    config |= {"default-chat-template-kwargs": {"a": 1}, "enable-force-include-usage": True}
    config |= {"allowed-headers": ["x-mine"], "allow-credentials": True}
    config |= {"disable-fastapi-docs": True, "middleware": ["tests.server.test_operators.Marks"]}
    (tmp_path / "serve.yaml").write_text(json.dumps(config | {"model": str(target)}))
    flags = "--config", "serve.yaml", "--served-model-name", "tiny", "--disable-log-requests"
    with process("serve", *flags, cwd=tmp_path) as server:
        url = address(server)
        body = {"prompt": "def", "max_tokens": 80, "ignore_eos": True, "stream": True}
        page = {"Origin": "https://a.example"}
        asked = dict(json=body, headers=page, timeout=60)
        with httpx.stream("POST", f"{url}/completions", **asked) as response:
            assert response.headers["access-control-allow-origin"] == page["Origin"]
            assert response.headers["x-marked"] == "yes"
            lines = response.iter_lines()
            next(lines)
            server.send_signal(signal.SIGTERM)
            *_, usage, end = [line for line in lines if line]
        assert end == "data: [DONE]"
        assert json.loads(usage.removeprefix("data: "))["usage"]["completion_tokens"] == 70
        logged = server.stderr.read().splitlines()
        assert server.wait(30) == 0
    entries = [json.loads(line) for line in logged]
    access = [entry for entry in entries if entry["message"] == "request"]
    assert [(entry["route"], entry["status"]) for entry in access] == [("/v1/completions", 200)]
    assert all(entry["request_id"] for entry in entries)
    assert "def" not in "".join(logged) and str(target) not in "".join(logged)


def test_the_command_that_people_type_for_deepseek_answers(deepseek, tmp_path, monkeypatch):
    flags = f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2"
    monkeypatch.setenv("XLA_FLAGS", flags)
    with process("serve", deepseek, *shlex.split(_DEEPSEEK), cwd=tmp_path) as server:
        body = {"model": "dsv3", "prompt": "def", "max_tokens": 8, "ignore_eos": True}
        answer = httpx.post(f"{address(server)}/completions", json=body, timeout=60).json()
    assert answer["usage"]["completion_tokens"] == 8


def test_a_batch_file_is_answered_by_the_command(target, tmp_path):
    body = {"model": "target", "prompt": "def", "max_tokens": 4}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": body}
    (tmp_path / "in.jsonl").write_text(json.dumps(line))
    flags = "-i", "in.jsonl", "-o", "out.jsonl", "--max-num-seqs", 1, "--max-model-len", 64
    with process("run-batch", "--model", target, *flags, cwd=tmp_path) as batch:
        _, printed = batch.communicate(timeout=120)
    assert batch.returncode == 0 and "1 answers in out.jsonl" in printed
    answer = json.loads((tmp_path / "out.jsonl").read_text())
    assert answer["custom_id"] == "a" and answer["response"]["status_code"] == 200


@pytest.mark.slow
def test_a_batch_that_is_killed_is_completed_by_the_next_run(target, tmp_path):
    bodies = [
        {"model": "target", "prompt": f"def f{i}(", "max_tokens": 60, "seed": i} for i in range(24)
    ]
    lines = [
        {"custom_id": f"r{i}", "method": "POST", "url": "/v1/completions", "body": body}
        for i, body in enumerate(bodies)
    ]
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, lines)))
    flags = "-i", "in.jsonl", "--max-num-seqs", 1, "--max-model-len", 96, "--dtype", "float32"
    partial = tmp_path / "out.jsonl.partial"
    with process("run-batch", target, *flags, "-o", "out.jsonl", cwd=tmp_path) as batch:
        while not partial.exists() or partial.read_bytes().count(b"\n") < 3:
            assert batch.poll() is None
        batch.kill()
        batch.wait()
    assert 3 <= partial.read_bytes().count(b"\n") < 24
    texts = {}
    for name in ("out.jsonl", "whole.jsonl"):
        with process("run-batch", target, *flags, "-o", name, cwd=tmp_path) as batch:
            batch.communicate(timeout=120)
        assert batch.returncode == 0
        answers = list(map(json.loads, (tmp_path / name).read_text().splitlines()))
        assert sorted(each["custom_id"] for each in answers) == sorted(f"r{i}" for i in range(24))
        choices = {each["custom_id"]: each["response"]["body"]["choices"] for each in answers}
        texts[name] = {id: choice["text"] for id, (choice,) in choices.items()}
    assert texts["out.jsonl"] == texts["whole.jsonl"]


@pytest.mark.slow
def test_a_client_that_retries_after_a_kill_gets_the_same_text(target, tmp_path):
    flags = "--served-model-name", "tiny", "--max-model-len", 192, "--dtype", "float32"
    body = {"prompt": "def", "max_tokens": 150, "ignore_eos": True, "seed": 5, "stream": True}
    texts = []
    for is_killed in (True, False, False):
        with process("serve", target, *flags, "--port", 0, cwd=tmp_path) as server:
            url = address(server)
            with httpx.stream("POST", f"{url}/completions", json=body, timeout=60) as response:
                texts.append("")
                for line in response.iter_lines():
                    if line.startswith("data: {"):
                        texts[-1] += json.loads(line[6:])["choices"][0]["text"]
                    if is_killed and texts[-1]:
                        server.kill()
                        break
    cut, again, whole = texts
    assert again == whole and whole.startswith(cut) and len(cut) < len(whole)
