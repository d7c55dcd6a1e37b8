"""``AsyncLLM``: requests of asyncio tasks join one batch, leave it, and have their own texts."""

import asyncio
import contextlib
import itertools
import queue
import subprocess
import sys

import jax
import pytest
from transformers import PreTrainedTokenizerFast

import jspec
from jspec.api.async_llm import AsyncLLM
from jspec.engine.engine import Engine
from jspec.engine.loop import launch
from tests import llm_fixtures

PROMPTS = ["the quick brown", "def add(x, y):", "grüße", "the the the the", "x", "for i in range("]


CONFIG = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 1}


@pytest.fixture(scope="module")
def llm(root):
    target = llm_fixtures.loaded(root)["target"]
    return jspec.LLM(target, CONFIG, max_num_seqs=3, max_model_len=96)


@pytest.fixture(scope="module")
def expected(llm):
    return [llm.generate(prompt, params(index))[0].outputs for index, prompt in enumerate(PROMPTS)]


@pytest.fixture
def served(llm):
    with AsyncLLM(llm) as served:
        yield served


def params(index, **options):
    given = dict(max_tokens=16 + 5 * index, temperature=0.8 * (index % 2), seed=index)
    return jspec.SamplingParams(**(given | options))


def texts(outputs):
    return [(each.text, each.token_ids, each.finish_reason) for each in outputs]


async def last(served, *request, **options):
    outputs = [output async for output in served.generate(*request, **options)]
    return outputs[-1]


def test_requests_that_come_one_after_another_have_the_texts_of_generate(served, expected):
    async def one(index):
        await asyncio.sleep(0.02 * index)
        return await last(served, PROMPTS[index], params(index), f"request-{index}")

    async def all_of_them():
        return await asyncio.gather(*map(one, range(len(PROMPTS))))

    outputs = asyncio.run(all_of_them())
    assert [texts(each.outputs) for each in outputs] == list(map(texts, expected))
    assert [each.request_id for each in outputs] == [f"request-{i}" for i in range(len(PROMPTS))]
    assert all(each.finished for each in outputs) and served.num_running == 0


def test_a_stream_grows_to_the_text_of_generate(served, expected):
    async def stream():
        return [output async for output in served.generate(PROMPTS[3], params(3))]

    outputs = asyncio.run(stream())
    shown = [output.outputs[0].text for output in outputs]
    assert len(shown) > 1 and all(b.startswith(a) for a, b in itertools.pairwise(shown))
    assert texts(outputs[-1].outputs) == texts(expected[3])


def test_a_slow_reader_has_the_last_output(served, expected):
    async def read():
        shown = []
        async for output in served.generate(PROMPTS[3], params(3)):
            shown.append(output.outputs[0].text)
            await asyncio.sleep(0.3)  # the text ends meanwhile
        return output, shown

    output, shown = asyncio.run(read())
    assert output.finished and texts(output.outputs) == texts(expected[3])
    assert len(set(shown)) == len(shown) < 4


def test_several_texts_of_a_request_and_the_best_of_some(llm, served):
    for options in (dict(n=2), dict(n=1, best_of=3)):
        given = params(1, **options)
        output = asyncio.run(last(served, PROMPTS[1], given))
        assert texts(output.outputs) == texts(llm.generate(PROMPTS[1], given)[0].outputs)


def test_a_reader_that_leaves_aborts_its_request_and_no_other(served, expected):
    async def both():
        other = asyncio.create_task(last(served, PROMPTS[5], params(5)))
        async with contextlib.aclosing(
            served.generate(PROMPTS[0], params(0, max_tokens=80))
        ) as stream:
            async for _ in stream:
                break
        task = asyncio.create_task(last(served, PROMPTS[2], params(2, max_tokens=80)))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return await other

    assert texts(asyncio.run(both()).outputs) == texts(expected[5])
    asyncio.run(
        last(served, "x", params(0, max_tokens=1))
    )  # the abort of those who left has arrived
    assert served.num_running == 0 and served.llm.runtime.pools[0].blocks.num_used == 0


def test_no_page_is_held_after_the_end(llm):
    async def begin(served, seconds):
        running = await served.submit("x", params(0, max_tokens=80, ignore_eos=True))
        await anext(running)
        prompts = [{"prompt_token_ids": list(range(1, 20 + 7 * index))} for index in range(9)]
        await served.submit_all(prompts, params(0, max_tokens=9, ignore_eos=True))
        await asyncio.sleep(seconds)

    for count in range(30):  # the end comes before, while or after prompts are read
        with AsyncLLM(llm, launch_seconds=0.001) as served:
            asyncio.run(begin(served, 0.0005 * count))
        assert llm.runtime.pools[0].blocks.num_used == 0


def test_abort_ends_the_text_as_it_is(served):
    async def abort():
        stream = served.generate(PROMPTS[0], params(0, max_tokens=80, ignore_eos=True), "mine")
        outputs = [await anext(stream)]
        served.abort("mine")
        served.abort("unknown")
        outputs += [output async for output in stream]
        return outputs

    outputs = asyncio.run(abort())
    (first, *_), [end] = outputs[0].outputs, outputs[-1].outputs
    assert end.finish_reason == "abort" and end.text.startswith(first.text)
    assert len(end.token_ids) < 80


def test_bad_requests_are_refused_alone(llm, expected):
    async def attempts():
        good = asyncio.create_task(last(served, PROMPTS[1], params(1)))
        for prompt, options, words in (
            ("", {}, "empty"),
            (["a", "b"], {}, "2 prompts"),
            ({"prompt_token_ids": [1] * 500}, {}, "max_model_len=\\s*96"),
            ("x", dict(logprobs=99), "max allowed"),
        ):
            with pytest.raises(ValueError, match=words):
                await last(served, prompt, params(0, **options))
        long = params(0, max_tokens=80, ignore_eos=True)
        stream = served.generate(PROMPTS[0], long, "twice")
        await anext(stream)
        with pytest.raises(ValueError, match="'twice' is running"):
            await last(served, "x", params(0), "twice")
        return await good, [output async for output in stream][-1]

    with AsyncLLM(llm, launch_seconds=1e-9) as served:  # one round a launch
        good, twice = asyncio.run(attempts())
    assert texts(good.outputs) == texts(expected[1]) and twice.finished


def test_a_full_queue_refuses_the_next_request(llm):
    async def many():
        tasks = [last(served, "the the", params(0, max_tokens=60)) for _ in range(12)]
        return await asyncio.gather(*tasks, return_exceptions=True)

    with AsyncLLM(llm, max_num_queued=2) as served:
        results = asyncio.run(many())
    refused = [each for each in results if isinstance(each, queue.Full)]
    assert refused and len(refused) < 12 and "max_num_queued=2" in str(refused[0])
    done = {tuple(each.outputs[0].token_ids) for each in results if each not in refused}
    assert len(done) == 1


def test_after_close_requests_are_refused_and_running_ones_end_with_an_error(llm):
    async def close():
        served = AsyncLLM(llm, launch_seconds=1e-9)
        stream = served.generate(PROMPTS[0], params(0, max_tokens=80, ignore_eos=True))
        await anext(stream)
        await asyncio.to_thread(served.close)
        with pytest.raises(RuntimeError, match="closed"):
            await anext(stream)
            await anext(stream)
        with pytest.raises(RuntimeError, match="closed"):
            await last(served, "x", params(0))

    asyncio.run(close())
    assert llm.runtime.pools[0].blocks.num_used == 0
    assert llm.generate("x", params(0))[0].finished


@pytest.mark.slow
def test_a_program_that_does_not_close_it_ends_in_the_middle_of_a_text(llm):
    program = f"""
import asyncio, jspec
from jspec.api.async_llm import AsyncLLM
from jspec.engine.engine import Engine
llm = jspec.LLM({str(llm.build.model.path)!r}, max_num_seqs=2, max_model_len=256)
served = AsyncLLM(llm)
async def first():
    running = await served.submit("x", jspec.SamplingParams(max_tokens=200, ignore_eos=True))
    print((await anext(running)).finished)
asyncio.run(first())
"""
    for _ in range(5):  # it crashed in one of five runs
        ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
        assert (ran.returncode, ran.stdout, ran.stderr) == (0, "False\n", "")


def test_a_step_that_fails_while_nothing_runs_ends_the_requests_and_not_the_thread(
    llm, expected, monkeypatch
):
    async def both():
        tasks = [last(served, prompt, params(0)) for prompt in PROMPTS[:2]]
        return await asyncio.gather(*tasks, return_exceptions=True)

    def fail(engine):
        raise ZeroDivisionError("a mistake of the model's author")

    with AsyncLLM(llm) as served:
        with monkeypatch.context() as patch:
            patch.setattr(Engine, "dispatch", fail)
            results = asyncio.run(both())
        later = asyncio.run(last(served, PROMPTS[1], params(1)))
        assert served.error is None and served.num_running == 0
    assert [type(each) for each in results] == [ZeroDivisionError] * 2
    assert texts(later.outputs) == texts(expected[1])


# ------------------------------------------------------------------------ an error stays its own

RARE = 299  # a token that no text of ``PROMPTS`` has


class Panic(BaseException):
    """An error as Rust's libraries raise it."""


class RaisingTokenizer(PreTrainedTokenizerFast):
    """A tokenizer that cannot decode one token: in a text, or by itself for logprobs."""

    error, in_texts = KeyError, True

    def decode(self, ids, **options):
        if RARE in ids and bool(options) == self.in_texts:
            raise self.error("no such token")
        return super().decode(ids, **options)


def raises_in_a_batch(logits, tokens, length):
    """Raise when a launch is traced, and not when the function is checked alone."""
    if "Batch" in type(logits).__name__:
        raise ZeroDivisionError("of a user")
    return logits


async def beside(served, *attempts):
    """Return the results of awaitables that run beside all of ``PROMPTS``, and those of these."""
    others = [last(served, prompt, params(index)) for index, prompt in enumerate(PROMPTS)]
    results = await asyncio.gather(*others, *attempts, return_exceptions=True)
    return results[len(others) :], [texts(each.outputs) for each in results[: len(others)]]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (dict(priority=None), r"priority=None must be a whole number of at most 64 bits; leave"),
        (dict(priority=2**63), "priority=9223372036854775808 must be"),
        (dict(priority=0.5), "priority=0.5 must be"),
        (dict(request_id=7), r"request_ids=\[7\] must be a list of str, or None"),
    ],
)
def test_an_argument_of_another_type_is_refused_alone(served, expected, options, words):
    wrong = last(served, "bad", params(0), **options)
    [error], others = asyncio.run(beside(served, wrong))
    with pytest.raises(ValueError, match=words):
        raise error
    assert others == list(map(texts, expected)) and served.error is None


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ("ab", "request_ids='ab' must be a list of str"),
        (["a"], "request_ids has 1 names for 2 prompts; give one for each"),
        (["a", "a"], "request_id='a' is running already; take another one"),
    ],
)
def test_names_of_several_requests_are_checked(served, names, words):
    with pytest.raises(ValueError, match=words):
        asyncio.run(served.submit_all(["x", "y"], params(0), names))
    assert served.num_running == 0


@pytest.mark.parametrize(
    ("error", "in_texts", "options"),
    [
        (KeyError, True, {}),
        (Panic, True, {}),
        (KeyError, False, dict(logprobs=0)),
        (Panic, False, dict(logprobs=0)),
    ],
)
def test_a_text_that_cannot_be_decoded_ends_its_own_request(
    llm, expected, error, in_texts, options
):
    llm = jspec.LLM(
        llm.build.model,
        CONFIG,
        max_num_seqs=3,
        max_model_len=96,
        tokenizer=RaisingTokenizer.from_pretrained(llm.build.model.path),
    )
    tokenizer = llm.get_tokenizer()
    tokenizer.error, tokenizer.in_texts = error, in_texts
    rare = params(0, allowed_token_ids=[RARE], **options)
    with AsyncLLM(llm) as served:
        [first, again], others = asyncio.run(
            beside(served, last(served, "x", rare), last(served, "y", rare))
        )
        later = asyncio.run(last(served, PROMPTS[1], params(1)))
        assert served.error is None and served.num_running == 0
    for raised in (first, again):
        assert isinstance(raised, KeyError if error is KeyError else RuntimeError)
        assert "no such token" in str(raised)
    assert others == list(map(texts, expected)) and texts(later.outputs) == others[1]
    assert llm.runtime.pools[0].blocks.num_used == 0


def test_a_function_that_raises_when_a_launch_is_traced_ends_its_own_request(served, expected):
    guilty = params(1, logits_processors=[raises_in_a_batch])
    [error], others = asyncio.run(beside(served, last(served, "x", guilty)))
    with pytest.raises(RuntimeError, match="ran alone: ZeroDivisionError: of a user; what it asks"):
        raise error
    assert others == list(map(texts, expected)) and served.error is None


def test_an_observer_that_raises_is_logged_and_harms_no_request(llm, expected, caplog):
    def fail(launch):
        raise KeyError("an observer's")

    with AsyncLLM(llm, on_launch=fail) as served:
        output = asyncio.run(last(served, PROMPTS[1], params(1)))
    assert texts(output.outputs) == texts(expected[1]) and "on_launch failed" in caplog.text


async def crowd(served):
    prompts = [{"prompt_token_ids": [6 + index] * 50} for index in range(3)]
    tasks = (last(served, prompt, params(1, max_tokens=40)) for prompt in prompts)
    await asyncio.gather(*tasks)


@pytest.mark.parametrize("lengths", [None, [0, 2, 3]])
def test_what_is_compiled_first_serves_requests_of_all_lengths(llm, lengths):
    if lengths:
        config = {"method": "ngram", "num_speculative_tokens": 3, "adaptive_length": lengths}
        llm = jspec.LLM(llm.build.model, config, max_num_seqs=3, max_model_len=96)
    with AsyncLLM(llm) as served:
        served.warm_up()
        before = launch._cache_size(), llm.get_metrics()
        for length in (1, 20, 40, 60):
            given = params(1, max_tokens=4, top_p=0.9, presence_penalty=0.3)
            asyncio.run(last(served, {"prompt_token_ids": [5] * length}, given))
        asyncio.run(crowd(served))
        assert launch._cache_size() == before[0]
    counted = {metric.name: metric.value for metric in before[1] if hasattr(metric, "value")}
    after = {metric.name: metric.value for metric in llm.get_metrics() if hasattr(metric, "value")}
    prompts, queries = "vllm:prompt_tokens", "vllm:prefix_cache_queries"
    assert after[prompts] == counted[prompts] + 271
    assert after[queries] == counted[queries] + 271 - 7  # a prompt's last token is not looked up


@pytest.fixture
def compiling_threads(caplog):
    """Return the names of the threads that have compiled large programs."""

    def names():
        programs = "Compiling jit(launch)", "Compiling jit(prefill)"
        found = [each for each in caplog.records if each.getMessage().startswith(programs)]
        return [record.threadName for record in found]

    jax.config.update("jax_log_compiles", True)  # in all threads
    yield names
    jax.config.update("jax_log_compiles", False)


@pytest.mark.parametrize(
    "options",
    [{"structured_outputs": {"regex": "[ab]{3}c*"}}, {"logprobs": 2}, {"prompt_logprobs": 1}],
)
def test_a_request_that_needs_a_new_program_holds_up_no_other(llm, options, compiling_threads):
    llm = jspec.LLM(llm.build.model, CONFIG, max_num_seqs=4, max_model_len=96)
    given, plain = params(1, **options), params(2, max_tokens=60)

    async def both():
        tasks = [last(served, "x", plain)]
        await asyncio.sleep(0.05)
        return await asyncio.gather(*tasks, last(served, "x", given))

    with AsyncLLM(llm) as served:
        served.warm_up()
        before = len(compiling_threads())
        outputs = asyncio.run(both())
        threads = set(compiling_threads()[before:])
    expected = [llm.generate("x", settings)[0].outputs for settings in (plain, given)]
    assert threads and all(name.startswith("jspec-compiler") for name in threads)
    assert [texts(each.outputs) for each in outputs] == list(map(texts, expected))


def test_what_is_prepared_is_there_for_requests_and_changes_no_text(llm, compiling_threads):
    given = jspec.SamplingParams(max_tokens=8, structured_outputs={"regex": "[a-z]*(de|fg){9}"})
    smaller = jspec.SamplingParams(max_tokens=8, structured_outputs={"choice": ["de", "fg"]})
    llm, other = (
        jspec.LLM(llm.build.model, CONFIG, max_num_seqs=5, max_model_len=96, seed=3)
        for _ in range(2)
    )
    with AsyncLLM(llm) as served:
        served.warm_up()
        served.prepare(given).result(60)
        before = len(compiling_threads())
        output = asyncio.run(last(served, "x", given))
        asyncio.run(last(served, "x", smaller))
        assert len(compiling_threads()) == before
        refused = served.prepare(jspec.SamplingParams(structured_outputs={"regex": "("}))
        assert "cannot be compiled" in str(refused.exception(60))
    assert texts(output.outputs) == texts(other.generate("x", given)[0].outputs)


def test_settings_out_of_range_are_refused(llm, served):
    with pytest.raises(RuntimeError, match="call warm_up first"):
        served.prepare(jspec.SamplingParams())
    for seconds in (0, float("inf"), "1"):
        with pytest.raises(ValueError, match=r"launch_seconds=.* must be a number above 0"):
            AsyncLLM(llm, launch_seconds=seconds)
    with pytest.raises(ValueError, match="max_num_queued=0"):
        AsyncLLM(llm, max_num_queued=0)
