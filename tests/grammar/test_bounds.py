"""Bounds of structured output: sizes, time and memory, and readers that leave."""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time

import pytest

from jspec import SamplingParams
from jspec.api.async_llm import AsyncLLM
from jspec.grammar import automata, followed, limits, outputs
from jspec.util import leaving
from jspec.util.leaving import Left
from jspec.util.results import Results
from jspec.util.threads import DaemonThreads
from tests import llm_fixtures
from tests.plain_processors import Spelling

TOKENIZER = Spelling(("", "a", "b", "ab", '"'))
ENDLESS = "[ab]*a[ab]{%d}"  # its automaton has 2**n states


def compiled(pattern):
    return automata.compiled(pattern, TOKENIZER, frozenset({0}), 5)


def doubled(levels):
    """Return a schema that doubles with each reference."""
    both = lambda name: {key: {"$ref": f"#/$defs/{name}"} for key in ("a", "b")}
    definitions = {
        f"d{level}": {"type": "object", "properties": both(f"d{level + 1}")}
        for level in range(levels)
    }
    return {"$defs": {**definitions, f"d{levels}": {"type": "string"}}, "$ref": "#/$defs/d0"}


# ------------------------------------------------------------------------------------------- sizes


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        (
            {"regex": "(.{1,500}){1,500}"},
            "parts of regex with repeats=250000, and may have at most",
        ),
        ({"regex": "((a{1,50}){1,50}){1,50}"}, "parts of regex with repeats=125000, and may have"),
        ({"regex": "[0-9]{100000}"}, "parts of regex with repeats=100000"),
        ({"regex": "a" * 200_000}, "len(regex)=200000, and may have at most 131072"),
        ({"regex": "(" * 300 + "a" + ")" * 300}, "levels of groups of regex=201"),
        ({"choice": ["a"] * 30_000}, "len(choice)=30000, and may have at most 20000"),
        ({"choice": ["a" * 2_000_000]}, "characters of choice=2000000"),
        ({"grammar": "a" * 2_000_000}, "len(grammar)=2000000"),
        ({"structural_tag": {"a": "b" * 2_000_000}}, "len(structural_tag)=2000009"),
        ({"json": {"enum": list(range(50_000))}}, "len(enum)=50000, and may have at most 20000"),
        ({"json": {"title": "a" * 2_000_000}}, "len(json)=2000013, and may have at most 1048576"),
        ({"json": {"type": "string", "minLength": 1e9}}, "minLength=1000000000.0, and may have"),
        ({"json": {"items": {"minItems": 10**9}}}, "minItems=1000000000, and may have at most"),
        ({"json": {"minProperties": 10**9}}, "minProperties=1000000000"),
        (
            {"json": {"type": "string", "pattern": "(a{300}){300}"}},
            "parts of pattern with repeats=",
        ),
        (
            {"json": {"properties": {str(index): {} for index in range(6000)}}},
            "len(properties)=6000",
        ),
        ({"json": {"anyOf": [{"$ref": "#/$defs/a"}] * 5000}}, "references ($ref)=5000"),
        (
            {"json": '{"items":' * 900 + "{}" + "}" * 900},
            "levels of json=401, and may have at most",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_each_size_has_a_limit_that_is_checked_at_once(setting, words):
    begin = time.process_time()
    with pytest.raises(ValueError, match="structured_outputs has") as error:
        SamplingParams(structured_outputs=setting)
    assert words in str(error.value)
    assert time.process_time() - begin < 0.5


@pytest.mark.parametrize(
    "pattern",
    ["[{100000}]", r"\{100000}", "[]{9}]{2}", "[^]a]", r"\(" * 1000, "(a|b{3,}){10,20}", "a{,5}"],
)
def test_what_only_looks_large_is_no_large_pattern(pattern):
    limits.check("regex", pattern)


def test_checks_cost_the_length_of_the_pattern():
    for part in ("[", "{1", "{1,", "(a)", "\\", "{11111111111111111111"):
        begin = time.process_time()
        with contextlib.suppress(ValueError):
            limits.check("regex", part * (100_000 // len(part)))
        assert time.process_time() - begin < 1


@pytest.mark.parametrize(
    "setting",
    [
        {"json": {"enum": [f"value number {index}" for index in range(3000)]}},
        {"choice": [f"{index}" for index in range(3000)]},
        {"json": {"type": "string", "maxLength": 10**9}},
        {"json": {"type": "array", "items": {"type": "string"}, "maxItems": 10**6}},
        {"json": doubled(5)},
        {"json": doubled(30)},
        {
            "json": {
                "type": "object",
                "properties": {
                    f"property number {index}": {
                        "type": "string",
                        "description": "some words about it " * 10,
                    }
                    for index in range(400)
                },
            }
        },
    ],
    ids=["enum", "choice", "length", "items", "doubled", "doubled often", "100 kB"],
)
def test_large_settings_of_real_use_are_taken(setting):
    SamplingParams(structured_outputs=setting)


def test_a_schema_that_doubles_with_each_reference_is_refused_for_an_automaton():
    begin = time.process_time()
    with pytest.raises(ValueError, match="4294967294 subschemas when references are written out"):
        automata.pattern_of({"json": doubled(30)})
    assert time.process_time() - begin < 1
    with pytest.raises(ValueError, match=r"contains itself by \$ref '#/\$defs/d0'"):
        loop = doubled(30)["$defs"] | {"d30": {"type": "array", "items": {"$ref": "#/$defs/d0"}}}
        automata.pattern_of({"json": {"$defs": loop, "$ref": "#/$defs/d0"}})


# --------------------------------------------------------------------------------- time and memory


def test_other_grammars_compile_while_one_takes_long():
    left = threading.Event()
    errors = []

    def compile_endless():
        try:
            compiled(ENDLESS % 40)
        except BaseException as error:
            errors.append(error)

    slow = threading.Thread(target=leaving.watched(compile_endless, left), daemon=True)
    slow.start()
    time.sleep(0.1)
    assert compiled("(ab)+").start >= 0
    assert slow.is_alive()
    left.set()
    slow.join(5)
    assert not slow.is_alive() and isinstance(errors[0], Left)
    assert compiled("(ab)+a?").start >= 0  # in a child that replaced the one that was killed


def test_a_plain_request_runs_while_a_grammar_of_another_thread_compiles(root):
    llm = llm_fixtures.llm(root, "none")
    plain = SamplingParams(max_tokens=4, temperature=0)
    [expected] = llm.generate("the", plain)
    left = threading.Event()
    given = SamplingParams(structured_outputs={"regex": ENDLESS % 41})

    def ask():
        with pytest.raises(Left):
            llm.generate("the", given)

    slow = threading.Thread(target=leaving.watched(ask, left), daemon=True)
    slow.start()
    time.sleep(0.1)
    [output] = llm.generate("the", plain)
    assert slow.is_alive() and output.outputs[0].text == expected.outputs[0].text
    left.set()
    slow.join(5)
    assert not slow.is_alive()


def test_a_refusal_for_time_is_cached(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.1)
    with pytest.raises(ValueError, match="more than memory or time allow"):
        compiled(ENDLESS % 42)
    begin = time.monotonic()
    with pytest.raises(ValueError, match="more than memory or time allow"):
        compiled(ENDLESS % 42)
    assert time.monotonic() - begin < 0.5


def test_a_grammar_that_a_busy_machine_did_not_compile_may_be_sent_again(monkeypatch):
    pattern = ENDLESS % 10
    with monkeypatch.context() as busy:
        busy.setattr(limits, "WAIT_SECONDS", -1)
        with pytest.raises(ValueError, match="cannot be compiled now: the grammar took longer"):
            compiled(pattern)
    assert compiled(pattern).first.size > 2**10


def test_a_grammar_of_the_host_that_takes_hours_is_refused(monkeypatch):
    monkeypatch.setattr(limits, "FOLLOWED_SECONDS", 0.1)
    parts = [{"type": "string", "pattern": f"[ab]*a[ab]{{{20 + i}}}"} for i in range(20)]
    with pytest.raises(ValueError, match="followed: it needs more than memory or time allow"):
        followed.source_of({"json": {"allOf": parts}})


def test_an_automaton_that_takes_too_long_is_followed_by_the_host_without_its_own_time(monkeypatch):
    monkeypatch.setattr(limits, "SECONDS", 0.1)
    tokenizer = llm_fixtures_tokenizer()
    (grammar,) = outputs.resolved({"regex": ENDLESS % 43}, tokenizer, frozenset({0}), 5).values()
    assert isinstance(grammar, followed.FollowedGrammar)


def llm_fixtures_tokenizer():
    class Encoding(Spelling):
        def encode(self, text, **_):
            return [self.texts.index(char) for char in text if char in self.texts]

    return Encoding(TOKENIZER.texts)


# ----------------------------------------------------------------------------------------- readers


def test_work_that_another_reader_waits_for_goes_on():
    results, is_done, found = Results(100), threading.Event(), []

    def make(is_read):
        while not is_done.is_set():
            if not is_read():
                raise Left
            time.sleep(0.01)
        return "result"

    ask = lambda: found.append(results.get("key", make, len))
    first_left = threading.Event()
    first = threading.Thread(target=leaving.watched(ask, first_left))
    second = threading.Thread(target=leaving.watched(ask, threading.Event()))
    first.start()
    time.sleep(0.05)
    second.start()
    time.sleep(0.05)
    first_left.set()
    time.sleep(0.1)
    assert second.is_alive()
    is_done.set()
    first.join(5), second.join(5)
    assert "result" in found


def test_results_are_cached_up_to_a_number_of_bytes():
    results, made = Results(10), []

    def get(key, size):
        return results.get(key, lambda _: made.append(key) or "x" * size, len)

    for key, size in (("a", 4), ("b", 4), ("a", 4), ("c", 4), ("a", 4), ("b", 4), ("large", 11)):
        get(key, size)
    assert made == ["a", "b", "c", "b", "large"]
    get("large", 11)
    assert made[-2:] == ["large", "large"]

    def refuse(_):
        made.append("refused")
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            results.get("d", refuse, len)
    assert made.count("refused") == 1


def test_closed_threads_end_the_work_that_watches_its_reader():
    threads = DaemonThreads(1, "test", "they are closed")
    running = threads.submit(lambda: compiled(ENDLESS % 44))
    waiting = threads.submit(lambda: 1)
    time.sleep(0.1)
    threads.close()
    for future in (running, waiting):
        with pytest.raises(RuntimeError, match="they are closed"):
            future.result(5)
    with pytest.raises(RuntimeError, match="they are closed"):
        threads.submit(lambda: 1)


_ENDS = """
import sys, threading, time
from jspec.grammar import automata
from jspec.util.threads import DaemonThreads
from tests.plain_processors import Spelling
threads = DaemonThreads(2, "test", "closed")
call = lambda: automata.compiled("[ab]*a[ab]{45}", Spelling(("", "a", "b")), frozenset({0}), 3)
threads.submit(call)
time.sleep(1)
print(time.time(), flush=True)
"""


@pytest.mark.slow
def test_a_process_ends_while_a_grammar_compiles():
    ran = subprocess.run([sys.executable, "-c", _ENDS], capture_output=True, timeout=60, text=True)
    assert ran.returncode == 0, ran.stderr
    assert time.time() - float(ran.stdout) < 3


def test_requests_that_left_take_their_grammars_with_them(root):
    llm = llm_fixtures.llm(root, "none")
    endless = [{"regex": ENDLESS % (50 + index)} for index in range(20)]

    async def ask(served):
        params = [SamplingParams(structured_outputs=each) for each in endless]
        left = [asyncio.ensure_future(served.submit("the", each)) for each in params]
        await asyncio.sleep(0.2)
        assert not any(task.done() for task in left)
        for task in left:
            task.cancel()
        await asyncio.wait(left)
        given = SamplingParams(max_tokens=4, structured_outputs={"choice": ["a", "b"]})
        running = await served.submit("the", given)
        return [output async for output in running][-1]

    with AsyncLLM(llm) as served:
        output = asyncio.run(asyncio.wait_for(ask(served), 25))
    assert output.outputs[0].text in ("a", "b")
