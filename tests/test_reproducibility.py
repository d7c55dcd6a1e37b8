"""The same seed gives the same text, with any drafter, any neighbours and any number of devices.

Unlike the fakes of ``test_equality``, real decoders round differently in other shapes. The compared
texts have no near-ties; ``jspec certify`` detects those.
"""

import functools
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

import jspec
from jspec import ops
from jspec.drafters import DraftModel, TokenRecycling
from jspec.engine.engine import Engine
from jspec.engine.functional import SequenceParams, generate_sequences
from jspec.engine.plan import Plan
from jspec.models.batch_invariant import BatchInvariantDecoder
from jspec.verify import RULES
from tests import llm_fixtures, tiny

ROOT = Path(__file__).resolve().parents[1]
LENGTHS, TEMPERATURES = (1, 9, 23, 5, 3, 7, 14, 2), (1.0, 0.0, 0.7, 1.3, 0.0, 1.0, 0.9, 1.0)


def sequences(max_tokens=20):
    """Ragged sequences, greedy and sampled."""
    return [
        SequenceParams(prompt, max_tokens, temperature=temperature, stream=stream)
        for stream, (prompt, temperature) in enumerate(
            zip(tiny.prompts(LENGTHS), TEMPERATURES, strict=True)
        )
    ]


def texts(plan, params, inputs, **settings):
    """Texts in the order of streams."""
    answers = generate_sequences(plan, params, inputs, **settings)
    pairs = sorted(
        zip([sequence.stream for sequence in inputs], answers, strict=True), key=lambda x: x[0]
    )
    return [answer.tokens.tolist() for _, answer in pairs]


@functools.cache
def plain():
    return texts(Plan(tiny.TARGET, tiny.NONE), tiny.params(), sequences())


@pytest.mark.parametrize(
    "drafter",
    [
        tiny.NGRAM,
        tiny.DRAFT,
        DraftModel(tiny.DRAFT_CONFIG, 2),
        TokenRecycling(tiny.VOCAB, num_speculative_tokens=3),
    ],
    ids=["ngram", "draft_model", "a shorter K", "a tree"],
)
def test_coupled_text_is_that_of_plain_sampling_for_every_method_and_order(drafter):
    plan = Plan(tiny.TARGET, drafter, "coupled")
    assert texts(plan, tiny.params(), sequences()[::-1]) == plain()


@pytest.mark.parametrize("rule", [name for name, rule in RULES.items() if rule.lossless])
def test_text_of_every_rule_does_not_depend_on_the_batch_at_a_fixed_k(rule):
    plan = Plan(tiny.TARGET, tiny.DRAFT, rule)
    together = texts(plan, tiny.params(), sequences())
    assert texts(plan, tiny.params(), sequences()[::-1], max_num_seqs=2) == together


@pytest.mark.parametrize("rule", ["rejection", "block"])
def test_sampled_text_does_not_depend_on_who_arrives_when(rule):
    inputs, plan = sequences(), Plan(tiny.TARGET, tiny.DRAFT, rule)
    engine = Engine(plan, tiny.params(), num_slots=4, capacity=64)
    together = engine.run(inputs)
    tickets = []
    for sequence in inputs:
        tickets.append(engine.submit(sequence, rounds=2))
        engine.step()
    while not engine.is_idle:
        engine.step()
    for ticket, answer in zip(tickets, together, strict=True):
        assert ticket.answer.tokens.tolist() == answer.tokens.tolist()


def test_deterministic_text_in_bfloat16_is_that_of_plain_decoding_for_every_method():
    target = BatchInvariantDecoder(tiny.TARGET.config)
    params = jax.jit(lambda tree: jax.tree.map(lambda x: x.astype("bfloat16"), tree))(tiny.params())
    expected = texts(Plan(target, tiny.NONE), params, sequences(60), max_num_seqs=1)
    for drafter in (tiny.NGRAM, tiny.DRAFT):
        assert texts(Plan(target, drafter, "coupled"), params, sequences(60)[::-1]) == expected


@pytest.mark.parametrize("heads", [1, 2, 3, 4])
def test_ordered_attention_of_a_sequence_is_equal_to_the_bit_in_every_batch(heads):
    keys = iter(jax.random.split(jax.random.key(0), 5))
    shapes = [(8, heads, 5, 16)] * 3 + [(8, heads, 64, 16)] * 2
    arrays = [jax.random.normal(next(keys), shape) for shape in shapes]
    attention = jax.jit(functools.partial(ops.ordered_attention, scale=0.25))
    run = lambda count: attention(*(array[:count] for array in arrays), jnp.full(count, 20))
    alone = run(1)[0]
    for count in (2, 3, 8):
        assert (run(count)[0] == alone).all()


def test_a_deterministic_llm_takes_chains_alone(tmp_path_factory):
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3}
    tree = {"method": "token_recycling", "num_speculative_tokens": 3}
    model = llm_fixtures.loaded(tmp_path_factory.getbasetemp())["target"]
    params = jspec.SamplingParams(max_tokens=17)
    prompts = ["the quick brown fox", "def add(", "über"]
    speculative = jspec.LLM(model, config, deterministic=True).generate(prompts, params)
    ordinary = jspec.LLM(model, deterministic=True).generate(prompts[0], params)
    assert speculative[0].outputs[0].token_ids == ordinary[0].outputs[0].token_ids
    with pytest.raises(ValueError, match="deterministic=True takes chains, but method='token_rec"):
        jspec.LLM(model, tree, deterministic=True)
    with pytest.raises(ValueError, match="deterministic='yes' must be True or False"):
        jspec.LLM(model, deterministic="yes")


@pytest.fixture(scope="module")
def on_devices():
    """The output of tests/on_devices.py on eight virtual devices."""
    environment = os.environ | {
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    ran = subprocess.run(
        [sys.executable, "-m", "tests.on_devices"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert ran.returncode == 0, ran.stderr
    return [json.loads(line) for line in ran.stdout.splitlines()]


def test_a_batch_cut_over_eight_devices_gives_the_text_of_one(on_devices):
    assert [case["dtype"] for case in on_devices] == ["float32", "bfloat16"]
    for case in on_devices:
        assert case["eight"] == case["one"] and len(case["one"]) == 8, case["dtype"]
        assert case["devices"] == 8
