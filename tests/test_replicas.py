"""Data parallelism: engines on devices of their own give the texts of one."""

import json
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import openai
import pytest

import jspec
from jspec.models.blocks.experts import Experts
from tests import eight_devices, house, llm_fixtures, networks, on_replicas


@pytest.fixture(scope="module")
def cases(tmp_path_factory):
    folder = str(tmp_path_factory.mktemp("models"))
    one, *several = eight_devices.printed("tests.on_replicas", folder, 1, 4)
    return one, several


def test_texts_of_two_engines_are_those_of_one_on_one_device(cases):
    one, several = cases
    assert [each["tensor"] for each in several] == [1, 4]
    for each in several:
        assert each["texts"] == each["again"] == each["together"] == one["texts"]


def test_each_engine_has_its_arrays_on_devices_of_its_own(cases):
    assert [each["devices"] for each in cases[1]] == [[[0], [1]], [[0, 1, 2, 3], [4, 5, 6, 7]]]


def test_metrics_and_launches_are_those_of_all_engines(cases):
    one, several = cases
    for each in several:
        for name in ("generation_tokens", "prompt_tokens", "prefix_cache_queries"):
            assert each["counted"][f"vllm:{name}"] == one["counted"][f"vllm:{name}"]
        assert each["launches"] >= 4


def test_prometheus_sees_the_pages_of_all_engines(cases):
    sizes = [re.findall(r'num_gpu_blocks="(\d+)"', each["metrics"]) for each in cases[1]]
    assert sizes == [[str(each["pages"])] for each in cases[1]]


def test_a_trace_runs_on_the_first_engine(cases):
    for each in cases[1]:
        assert each["traced"] == cases[0]["texts"][0]


def test_the_shared_state_of_several_engines_is_not_saved(cases):
    for each in cases[1]:
        assert each["refusal"] == (
            "save_shared writes the state of one engine, but data_parallel_size=2; save it from "
            "an LLM with data_parallel_size=1."
        )


@pytest.mark.slow
def test_a_server_of_two_engines_of_two_devices_answers_the_openai_client(root):
    """The command as people type it, with a port and sizes that start fast."""
    command = [
        sys.executable,
        "-m",
        "jspec",
        "serve",
        str(llm_fixtures.checkpoints(root)["target"]),
    ]
    command += ["--tensor-parallel-size", "2", "--data-parallel-size", "2"]
    command += ["--speculative-config", json.dumps(on_replicas.NGRAM)]
    command += ["--max-num-seqs", "1", "--max-model-len", "64", "--served-model-name", "tiny"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    served = subprocess.Popen(
        [*command, "--port", str(port)], env=eight_devices.environment(), cwd=house.ROOT
    )
    try:
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0)
        until = time.monotonic() + 900
        while not is_ready(port):
            assert served.poll() is None and time.monotonic() < until
            time.sleep(0.2)
        settings = dict(model="tiny", max_tokens=20, temperature=0)
        answers = client.completions.create(prompt=on_replicas.PROMPTS, **settings)
        expected = llm_fixtures.llm(root, "ngram").generate(
            on_replicas.PROMPTS, jspec.SamplingParams(temperature=0, max_tokens=20)
        )
        texts = [output.outputs[0].text for output in expected]
        assert [choice.text for choice in answers.choices] == texts
        served.send_signal(signal.SIGINT)
        assert served.wait(60) in (0, 130)
    finally:
        served.kill()


@pytest.mark.slow
@pytest.mark.parametrize("tool", ["certify", "bench", "tune"])
def test_tools_measure_and_certify_the_split_target(tmp_path, tool):
    experts = Experts(num_experts=4, experts_per_token=2, intermediate_size=16, shared_size=32)
    model = tmp_path / "experts"
    llm_fixtures.write_tokenizer(model)
    target = networks.changed(llm_fixtures.TARGET, feed_forward=experts)
    llm_fixtures.write_model(model, target, 0)
    prompts, results = tmp_path / "prompts.txt", tmp_path / "results.json"
    prompts.write_text("the quick brown")
    config = json.dumps(on_replicas.NGRAM)
    words = {
        "certify": ["--speculative-config", config, "--prompt", "the quick", "--num-drafts", "100"],
        "bench": ["--config", config, "--data-parallel-size", "2", "--no-peers"],
        "tune": ["--config", "token_recycling", "--max-speculative-tokens", "2"],
    }[tool]
    words += ["--engine"] if tool == "certify" else ["--repeats", "1", "--questions", str(prompts)]
    words += ["--max-tokens", "8", "--tensor-parallel-size", "2", "--enable-expert-parallel"]
    command = [sys.executable, "-m", "jspec", tool, "--model", model, *words, "--json", results]
    ran = subprocess.run(
        command, cwd=house.ROOT, env=eight_devices.environment(), capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    setting = json.loads(results.read_text())["setting"]
    assert int(setting["tensor_parallel_size"]) == 2
    assert str(setting["enable_expert_parallel"]) == "True"


def is_ready(port: int) -> bool:
    """Return whether a server answers at a port of this machine."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health") as answer:
            return answer.status == 200
    except OSError:
        return False
