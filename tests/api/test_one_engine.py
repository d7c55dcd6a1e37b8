"""One engine for all callers of an ``LLM``: its threads, streams, and every ``AsyncLLM``."""

import asyncio
import concurrent.futures
import dataclasses
import itertools
import signal
import threading

import jax
import pytest
from transformers import PreTrainedTokenizerFast

import jspec
from jspec.api.async_llm import AsyncLLM
from jspec.engine.engine import Engine
from jspec.engine.loop import launch, prefill
from jspec.engine.sequences import SequenceParams
from jspec.util.interrupts import Uninterrupted
from tests import llm_fixtures

CONFIG = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}
PROMPTS = ["the quick brown", "def add(x, y):", "grüße", "the the the the"]


class ThreadsOfTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that records the threads that decode."""

    def decode(self, ids, **options):
        THREADS.append(threading.current_thread().name)
        return super().decode(ids, **options)


THREADS = []


@pytest.fixture(scope="module")
def target(root):
    return llm_fixtures.loaded(root)["target"]


@pytest.fixture(scope="module")
def llm(target):
    tokenizer = ThreadsOfTokenizer.from_pretrained(target.path)
    return jspec.LLM(target, CONFIG, max_num_seqs=3, max_model_len=96, tokenizer=tokenizer)


def params(index, **options):
    given = dict(max_tokens=40, temperature=0.8 * (index % 2), seed=index, ignore_eos=True)
    return jspec.SamplingParams(**(given | options))


@pytest.fixture
def interruptible():
    """Python's own handler of Ctrl-C: a process in the background begins without one."""
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, handler)


@pytest.fixture(scope="module")
def expected(llm):
    return [texts(llm.generate(prompt, params(i))[0]) for i, prompt in enumerate(PROMPTS)]


def texts(output):
    return [(each.text, each.token_ids, each.finish_reason) for each in output.outputs]


async def last(served, *request, **options):
    return [output async for output in served.generate(*request, **options)][-1]


def test_threads_and_asyncio_run_in_one_batch_and_have_their_own_texts(llm, expected):
    together, repeat = [], 3

    def see(launch):
        together.append(int((launch.accepted >= 0).any(0).sum()))

    def call(index):
        return [texts(llm.generate(PROMPTS[index], params(index))[0]) for _ in range(repeat)]

    async def serve(served):
        results = [await last(served, PROMPTS[3], params(3)) for _ in range(repeat)]
        return list(map(texts, results))

    with AsyncLLM(llm, on_launch=see) as served, concurrent.futures.ThreadPoolExecutor(2) as pool:
        calls = [pool.submit(call, index) for index in range(2)]
        assert asyncio.run(serve(served)) == [expected[3]] * repeat
        assert [each.result() for each in calls] == [[expected[i]] * repeat for i in range(2)]
    assert max(together) == 3  # a launch had sequences of all three


def test_two_served_at_once_share_the_batch_and_one_may_close_first(llm, expected):
    async def both(first, second):
        stream = second.generate(PROMPTS[1], params(1))
        await anext(stream)
        done = await last(first, PROMPTS[0], params(0))
        await asyncio.to_thread(first.close)
        return done, [output async for output in stream][-1]

    first = AsyncLLM(llm, launch_seconds=1e-9)
    with AsyncLLM(llm, launch_seconds=1e-9) as second:
        outputs = asyncio.run(both(first, second))
    assert list(map(texts, outputs)) == expected[:2]
    assert texts(llm.generate(PROMPTS[2], params(2))[0]) == expected[2]


@pytest.mark.usefixtures("interruptible")
def test_an_interrupted_call_ends_alone(llm, expected, monkeypatch):
    bring, main, has_begun = jax.device_get, threading.main_thread(), threading.Event()

    def interrupted(values):
        if threading.current_thread() is main:
            signal.raise_signal(signal.SIGINT)  # as Ctrl-C in the middle of a step
        return bring(values)

    async def serve(served):
        running = await served.submit(PROMPTS[1], params(1))
        await anext(running)
        has_begun.set()
        return [output async for output in running][-1]

    stream = llm.stream(PROMPTS[3], params(3), rounds=1)
    next(stream)
    served, pool = AsyncLLM(llm, launch_seconds=1e-9), concurrent.futures.ThreadPoolExecutor(1)
    with served, pool:
        other = pool.submit(asyncio.run, serve(served))
        has_begun.wait(60)
        monkeypatch.setattr(jax, "device_get", interrupted)
        with pytest.raises(KeyboardInterrupt):
            llm.generate(PROMPTS[0], params(0))
        monkeypatch.undo()
        assert texts(other.result()) == expected[1]
    *_, last_output = stream
    assert texts(last_output) == expected[3]
    assert llm.runtime.pools[0].blocks.num_used == 0


@pytest.mark.usefixtures("interruptible")
def test_a_second_interruption_does_not_wait():
    steps = []
    with pytest.raises(KeyboardInterrupt), Uninterrupted():
        signal.raise_signal(signal.SIGINT)
        steps.append("after the first")
        signal.raise_signal(signal.SIGINT)
        steps.append("after the second")
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)
    assert steps == ["after the first"]


def test_texts_are_decoded_outside_the_engines_thread(llm, expected):
    THREADS.clear()
    with AsyncLLM(llm) as served:
        output = asyncio.run(last(served, PROMPTS[0], params(0, logprobs=1)))
    assert [each[:2] for each in texts(output)] == [each[:2] for each in expected[0]]
    assert "jspec-text" in THREADS and "jspec-engine" not in THREADS


def test_a_slow_tokenizer_delays_no_launch(llm, monkeypatch):
    """The engine generates all tokens while the first piece of text is being decoded."""
    is_over, seen = threading.Event(), []

    def see(launch):
        if launch.done.any():
            is_over.set()

    decode = ThreadsOfTokenizer.decode

    def slow(tokenizer, ids, **options):
        if threading.current_thread().name == "jspec-text" and not seen:
            seen.append(is_over.wait(60))
        return decode(tokenizer, ids, **options)

    monkeypatch.setattr(ThreadsOfTokenizer, "decode", slow)
    with AsyncLLM(llm, launch_seconds=1e-9, on_launch=see) as served:
        output = asyncio.run(last(served, PROMPTS[0], params(0)))
    assert seen == [True] and len(output.outputs[0].token_ids) == 40


@pytest.mark.parametrize("options", [{}, {"include_stop_str_in_output": True}, {"n": 2}])
def test_texts_with_stop_strings_are_equal_however_they_are_read(llm, expected, options):
    asked, pairs = [], []
    for index in (1, 3):
        text = expected[index][0][0]
        pairs += [next(p for p in map("".join, itertools.pairwise(text[9:])) if "\ufffd" not in p)]
        asked += [params(index, stop=["never met", pairs[-1]], **options)]
    prompts = [PROMPTS[1], PROMPTS[3]]
    whole = llm.generate(prompts, asked)
    streamed = {each.prompt: each for each in llm.stream(prompts, asked, rounds=2)}

    async def serve(served):
        calls = (last(served, *each) for each in zip(prompts, asked, strict=True))
        return await asyncio.gather(*calls)

    with AsyncLLM(llm) as served:
        outputs = asyncio.run(serve(served))
        assert served.num_running == 0
    for output, prompt, entire, pair in zip(outputs, prompts, whole, pairs, strict=True):
        assert output.outputs == streamed[prompt].outputs == entire.outputs
        assert (entire.outputs[0].finish_reason, entire.outputs[0].stop_reason) == ("stop", pair)
    assert llm.runtime.pools[0].blocks.num_used == 0


def test_an_abort_ends_a_text_that_waits_for_a_slot(llm):
    async def abort(served):
        long = params(0, max_tokens=80)
        running = await served.submit_all(PROMPTS[:3], long)
        asked = params(0, logprobs=1, prompt_logprobs=1, stop="never met")
        waiting = await served.submit("x", asked, "mine")
        served.abort("mine")
        output = await anext(waiting)
        for each in running:
            each.close()
        return output

    with AsyncLLM(llm, launch_seconds=1e-9) as served:
        output = asyncio.run(abort(served))
    assert output.finished and output.outputs[0].finish_reason == "abort"
    assert output.outputs[0].token_ids == [] == output.outputs[0].logprobs


def test_nothing_is_compiled_again_because_a_context_grew(target):
    long = dataclasses.replace(target.config, max_positions=2048)
    llm = jspec.LLM(dataclasses.replace(target, config=long), CONFIG, max_num_seqs=2)
    sizes = []
    for length in (10, 300, 1000, 40, 500, 1500):
        prompt = {"prompt_token_ids": [1 + (index * length) % 290 for index in range(length)]}
        llm.generate(prompt, params(1, max_tokens=8))
        sizes.append((launch._cache_size(), prefill._cache_size()))
    assert len({launches for launches, _ in sizes}) == 1
    assert sizes[2] == sizes[-1]  # passes have few sizes, which the first prompts have used


def test_a_request_is_not_checked_in_the_turn_of_the_engine(llm, monkeypatch):
    seen, read = [], SequenceParams.token_ids.fget

    def counted(sequence):
        seen.append(threading.current_thread().name)
        return read(sequence)

    monkeypatch.setattr(SequenceParams, "token_ids", property(counted))
    asked = params(1, n=20, max_tokens=2, logit_bias={token: 1.0 for token in range(99)})
    with AsyncLLM(llm) as served:
        asyncio.run(last(served, "x", asked))
    assert len(seen) == 1 and seen[0] != "jspec-engine"


def test_a_batch_of_which_one_is_refused_leaves_nothing_behind(llm, expected, monkeypatch):
    submit, count = Engine.submit, itertools.count()

    def refused(engine, *arguments, **options):
        if next(count) == 3:
            raise ValueError("refused")
        return submit(engine, *arguments, **options)

    with AsyncLLM(llm) as served, monkeypatch.context() as patch:
        patch.setattr(Engine, "submit", refused)
        with pytest.raises(ValueError, match="refused"):
            asyncio.run(served.submit_all(PROMPTS[:2], params(1, n=2)))
        output = asyncio.run(last(served, PROMPTS[0], params(0)))
        assert texts(output) == expected[0] and served.num_running == 0
