"""The KV cache of an ``LLM``: cached prefixes, memory settings, and calls that share the pages."""

import concurrent.futures

import pytest

import jspec
from jspec import SamplingParams
from jspec.api.engine_args import EngineArgs
from tests import llm_fixtures

GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
LONG = "the quick brown fox jumps over the lazy dog. " * 2
SMALL = dict(block_size=8)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3}


@pytest.fixture(scope="module")
def both(root):
    return llm_fixtures.loaded(root)


def texts(outputs):
    return [each.text for output in outputs for each in output.outputs]


def value(llm, name):
    return next(each.value for each in llm.get_metrics() if each.name == f"vllm:{name}")


def complaint(call, *arguments, **keywords):
    with pytest.raises(ValueError) as error:
        call(*arguments, **keywords)
    return str(error.value)


def test_a_conversation_reads_what_it_has_said_from_the_cache(both):
    llm = jspec.LLM(both["target"], NGRAM, **SMALL)
    fresh = jspec.LLM(both["target"], NGRAM, enable_prefix_caching=False, **SMALL)
    text = LONG
    for turn in range(3):
        before = value(llm, "prefix_cache_hits")
        (answer,) = texts(llm.generate(text, GREEDY))
        assert [answer] == texts(fresh.generate(text, GREEDY))
        assert (value(llm, "prefix_cache_hits") > before) == (turn > 0)
        text += answer + " and then "
    assert value(fresh, "prefix_cache_hits") == 0
    assert value(llm, "kv_cache_usage_perc") == 0 == value(llm, "num_preemptions")
    before = value(llm, "prefix_cache_hits")
    assert llm.reset_prefix_cache() is True
    llm.generate(LONG, GREEDY)
    assert value(llm, "prefix_cache_hits") == before


def test_a_salt_keeps_the_cache_of_tenants_apart(both):
    llm = jspec.LLM(both["target"], **SMALL)
    hits = []
    for salt in ("a", "b", "a"):
        llm.generate({"prompt": LONG, "cache_salt": salt}, GREEDY)
        hits.append(value(llm, "prefix_cache_hits"))
    assert hits[0] == hits[1] == 0 < hits[2]
    message = complaint(llm.generate, {"prompt": LONG, "cache_salt": 3}, GREEDY)
    assert message == "prompt 0 has cache_salt=3, which must be text; leave it out for none."


def test_a_small_cache_preempts_and_the_texts_are_the_same(both):
    prompts = [LONG, "def add(x, y):", "grüße", LONG[:60]]
    expected = texts(jspec.LLM(both["target"], NGRAM).generate(prompts, GREEDY))
    llm = jspec.LLM(both["target"], NGRAM, num_gpu_blocks_override=14, **SMALL)
    many = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
    streamed = {}
    for output in llm.stream(prompts, many, rounds=1):
        streamed[output.request_id] = output
    assert texts(streamed[str(index)] for index in range(4)) == expected
    assert texts(llm.generate(prompts, many)) == expected
    assert value(llm, "num_preemptions") > 0
    message = complaint(llm.generate, [[1, 2, 3]], SamplingParams(max_tokens=200))
    assert (
        "203 tokens together, which need 26 pages of 8, but the KV cache has at most 14" in message
    )


def test_a_call_inside_a_stream_joins_its_batch_and_runs_both_to_the_end(both):
    llm = jspec.LLM(both["target"], num_gpu_blocks_override=10, **SMALL)
    expected = texts(llm.generate(LONG, GREEDY))
    stream = llm.stream(LONG, GREEDY, rounds=1)
    next(stream)
    assert texts(llm.generate([LONG, "x"], GREEDY))[0] == expected[0]
    (last,) = stream  # all that is left
    assert texts([last]) == expected and last.finished
    stream = llm.stream(LONG, GREEDY, rounds=1)
    next(stream)
    stream.close()
    assert value(llm, "kv_cache_usage_perc") == 0


def test_threads_share_a_small_cache(both):
    llm = jspec.LLM(both["target"], {"method": "suffix"}, num_gpu_blocks_override=14, **SMALL)
    prompts = [LONG, "def add(x, y):", "the the", LONG[:60]]
    expected = [texts(llm.generate(prompt, GREEDY)) for prompt in prompts]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        assert list(
            pool.map(
                lambda prompt: [texts(llm.generate(prompt, GREEDY)) for _ in range(4)], prompts
            )
        ) == [[each] * 4 for each in expected]
    assert value(llm, "kv_cache_usage_perc") == 0


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (dict(block_size=0), "block_size=0 must be a whole number of at least 1"),
        (dict(kv_cache_memory_bytes=2.5), "kv_cache_memory_bytes=2.5 must be a whole number"),
        (dict(gpu_memory_utilization=1.5), "gpu_memory_utilization=1.5 must be a number from 0 to"),
        (
            dict(num_gpu_blocks_override=10**9),
            "num_gpu_blocks_override asks for 1,000,000,000 pages, which take",
        ),
        (dict(num_gpu_blocks_override=2**31), "least 1, and at most 2147483646."),
        (dict(kv_cache_memory_bytes=2**60), "kv_cache_memory_bytes asks for"),
        (dict(kv_cache_memory_bytes=10), "kv_cache_memory_bytes leaves 10 bytes, but one page of"),
        (dict(enable_prefix_caching=1), "enable_prefix_caching=1 must be True, False or None"),
        (
            dict(deterministic=True, block_size=8),
            "block_size=8 needs a KV cache with pages, which BatchInvariantDecoder with NoDrafter",
        ),
        (
            dict(deterministic=True, enable_prefix_caching=True),
            "enable_prefix_caching=True needs a KV cache with pages",
        ),
    ],
)
def test_settings_of_the_cache_are_checked(both, settings, message):
    assert message in complaint(jspec.LLM, both["target"], **settings)


def test_bytes_of_the_cache_may_be_beyond_int32():
    assert EngineArgs(kv_cache_memory_bytes=2**33).kv_cache_memory_bytes == 2**33
