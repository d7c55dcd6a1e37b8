"""Two processes that share a model: one device's texts, and one end for both."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time

import httpx
import pytest

import jspec
from tests import house, llm_fixtures, networks

SERVED = ("--max-num-seqs", "2", "--max-model-len", "64", "--tensor-parallel-size", "4")


@pytest.fixture(scope="module")
def target(root):
    return llm_fixtures.checkpoints(root)["target"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def pair(*commands):
    """Start two processes with two devices each; kill what is left of them."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=2"
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *map(str, command)],
            cwd=house.ROOT,
            env=os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for command in commands
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.communicate()


def scripts(case, model):
    port = free_port()
    return [("tests.on_two_processes", case, model, port, index) for index in (0, 1)]


def servers(model, *more, http=0):
    """Return commands of two servers, of which the second one has more flags."""
    port = free_port()
    of_all = "--coordinator", f"localhost:{port}", "--num-processes", 2, "--port", http
    one = "jspec", "serve", model, *SERVED, *of_all
    return [(*one, "--process-id", 0), (*one, "--process-id", 1, *more)]


def ends(processes, seconds=300):
    """Return the exit codes, the last lines on stderr, and what was printed."""
    ended = [process.communicate(timeout=seconds) for process in processes]
    lines = [(error.splitlines() or [""])[-1] for _, error in ended]
    return [process.returncode for process in processes], lines, [output for output, _ in ended]


def check_texts(case, target, count):
    with pair(*scripts(case, target)) as processes:
        codes, lines, (output, _) = ends(processes)
    assert codes == [0, 0], lines
    several, one, preempted, refused = json.loads(output.splitlines()[-1])
    assert several == one and len(one) == count and all(map(len, one))
    assert preempted > 0 or case != "few"
    assert refused.startswith("logits_processors cannot be sent to other processes; leave it out")
    return one


def test_texts_of_two_processes_are_those_of_one_device(target):
    check_texts("few", target, 4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "sizes"), [("gemma3_text", {}), ("qwen3_next", {"linear_num_key_heads": 4})]
)
def test_windows_and_recurrent_states_have_the_texts_of_one_device_too(kind, sizes, tmp_path):
    from tests.families import models, table

    keys = table.CASES[kind][1] | {"vocab_size": llm_fixtures.VOCAB, **sizes}
    models.made(kind, keys, seed=0).save_pretrained(tmp_path)
    llm_fixtures.write_tokenizer(tmp_path)
    check_texts(kind, tmp_path, 4)


@pytest.mark.slow
def test_other_weights_shared_state_scores_and_grammars_of_the_host_reach_both_processes(target):
    one = check_texts("more", target, 8)
    assert one[:4] != one[4:]  # other weights


def test_programs_are_compiled_in_both_processes_before_requests_need_them(target):
    with pair(*scripts("ahead", target)) as processes:
        codes, lines, outputs = ends(processes)
    assert codes == [0, 0], lines
    begin, grammar = json.loads(outputs[0].splitlines()[-2])
    every = [json.loads(output.splitlines()[-1]) for output in outputs]
    for compiled in every:
        before = [name for time, _, name in compiled if time < begin]
        assert before.count("jit(launch)") == 2 and before.count("jit(prefill)") == 2
        later = [(time, thread) for time, thread, _ in compiled if time > begin]
        assert later and all(time > grammar for time, _ in later)
        assert all(thread.startswith("ThreadPool") for _, thread in later)
    first, other = (sorted(name for *_, name in compiled) for compiled in every)
    assert first == other


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_process_that_is_killed_ends_the_other_one(target, killed):
    with pair(*scripts("runs", target)) as processes:
        assert any("runs" in line for line in processes[0].stdout)
        processes[killed].kill()
        begin = time.monotonic()
        codes, lines, _ = ends([processes[1 - killed]], 30)
    assert time.monotonic() - begin < 30 and codes == [1]
    assert lines == [
        f"jspec: process {killed} of 2 has ended, so process {1 - killed} ends too; start all of "
        "them again."
    ]


@pytest.mark.parametrize(
    ("end", "code", "last"),
    [
        ("SystemExit(3)", 3, ""),
        pytest.param("at once", 5, "", marks=pytest.mark.slow),
        pytest.param("SystemExit()", 0, "", marks=pytest.mark.slow),
        pytest.param("SystemExit('nothing')", 1, "nothing", marks=pytest.mark.slow),
        pytest.param("KeyError('fails')", 1, "KeyError: 'fails'", marks=pytest.mark.slow),
    ],
)
def test_the_end_of_the_script_of_the_first_process_is_that_of_all(target, end, code, last):
    with pair(*scripts(end, target)) as processes:
        codes, lines, _ = ends(processes)
    assert codes == [code, code] and lines[0] == last


@pytest.mark.slow
def test_a_taken_port_ends_both_processes_before_the_model_is_loaded(tmp_path):
    with socket.create_server(("localhost", 0)) as taken:
        commands = servers(tmp_path, http=taken.getsockname()[1])
        with pair(*commands) as processes:
            codes, lines, _ = ends(processes)
    assert codes == [2, 2] and all("Address already in use" in line for line in lines), lines


@pytest.mark.slow
@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seed", "7"], "seed differs: process 0 has 0, process 1 has 7; start all processes"),
        (["--dtype", "bfloat16"], "dtype differs: process 0 has 'auto', process 1 has 'bfloat16'"),
    ],
)
def test_processes_that_were_started_otherwise_end_alike(target, flags, words):
    with pair(*servers(target, *flags)) as processes:
        codes, lines, _ = ends(processes)
    assert codes == [2, 2] and lines[0] == lines[1] and words in lines[0]


@pytest.mark.slow
def test_another_model_and_a_missing_one_end_both_processes(target, tmp_path):
    deeper = networks.changed(llm_fixtures.TARGET, num_layers=2)
    llm_fixtures.write_model(tmp_path / "deeper", deeper, 0)
    for other, words in (
        (tmp_path / "deeper", "model differs: process 0 has one whose sizes"),
        (tmp_path / "nothing", "nothing"),
    ):
        first, second = servers(target)
        second = [other if word == target else word for word in second]
        with pair(first, second) as processes:
            codes, lines, _ = ends(processes)
        assert codes == [2, 2] and all(words in line for line in lines), lines


@pytest.mark.slow
def test_a_server_of_two_processes_answers_and_ends_with_both(target):
    with pair(*servers(target)) as (first, second):
        url = ""
        while "http" not in url:
            url = first.stderr.readline()
            assert url, second.communicate()
        url = next(word for word in url.split() if word.startswith("http"))
        body = {"model": target.name, "prompt": "the quick", "max_tokens": 8, "temperature": 0}
        answer = httpx.post(f"{url}/completions", json=body, timeout=300).json()
        for process in (second, first):
            process.send_signal(signal.SIGTERM)
        codes, lines, _ = ends([first, second])
    assert codes == [0, 0], lines
    one = jspec.LLM(str(target), max_model_len=64)
    settings = jspec.SamplingParams(max_tokens=8, temperature=0)
    assert answer["choices"][0]["text"] == one.generate("the quick", settings)[0].outputs[0].text


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"process_id": 1}, "process_id=1 needs coordinator='HOST:PORT'; give it too"),
        ({"coordinator": "auto", "num_processes": 2}, "num_processes=2 needs coordinator='HOST"),
        ({"coordinator": "here"}, "coordinator='here' must be HOST:PORT of process 0, or 'auto'"),
        ({"coordinator": "a:1", "num_processes": 2}, "process_id=None and num_processes=2 belong"),
        (
            {"coordinator": "a:1", "num_processes": 2, "process_id": 2},
            "process_id=2 and num_processes=2 belong to coordinator='a:1'; give both, and count",
        ),
    ],
)
def test_arguments_of_processes_that_do_not_fit_each_other_are_refused(given, words):
    with pytest.raises(ValueError, match=words):
        jspec.LLM("no/such/model", **given)
