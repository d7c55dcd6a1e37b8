"""Tests that random settings of every entry point work, or raise one line that names the key."""

import dataclasses
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

import jspec
from jspec import SamplingParams
from jspec.api import config, prompts
from jspec.api.config.keys import KEYS, METHOD_ALIASES, RULE_NAMES
from jspec.cli import main
from jspec.drafters import METHODS
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams
from jspec.util import values
from tests import llm_fixtures, tiny
from tests.hostile.junk import anything, few, nested, refused

METHOD = st.sampled_from([*METHODS, *METHOD_ALIASES, "cascade", "custom_class"])
COUNT = st.integers(1, 9) | st.sampled_from([40, 1024, 1025]) | anything()
TREE = (
    st.sampled_from(["chain", "eagle2", "best_first", "sampled", "medusa_mc_sim_7b_63"])
    | st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=2), min_size=1, max_size=3)
    | anything()
)
PLAUSIBLE = {
    "num_speculative_tokens": COUNT,
    "tree": TREE,
    "tree_size": COUNT,
    "tree_depth": COUNT,
    "tree_top_k": COUNT,
    "prompt_lookup_min": COUNT,
    "prompt_lookup_max": COUNT,
    "max_model_len": COUNT,
    "rejection_sample_method": st.sampled_from([*RULE_NAMES]),
    "draft_sample_method": st.sampled_from(["greedy", "probabilistic", "top_plus_one"]),
    "adaptive_length": st.just(True) | st.lists(st.integers(0, 5)),
    "enable_adaptive_verification": st.booleans(),
    "num_speculative_tokens_per_batch_size": st.just([[1, 4, 3], [5, 64, 2]]),
    "synthetic_acceptance_rates": st.lists(st.floats(0, 1), max_size=4),
    "synthetic_acceptance_length": st.floats(1, 9),
    "posterior_alpha": st.floats(0, 2),
    "suffix_decoding_max_tree_depth": COUNT,
    "suffix_decoding_min_token_prob": st.floats(0, 1),
}
ONE_KEY = st.sampled_from(list(KEYS)).flatmap(
    lambda key: st.tuples(st.just(key), PLAUSIBLE.get(key, anything()) | anything())
)
SENSIBLE = st.builds(
    lambda method, keys: {"method": method, "model": "some/model"} | dict(keys),
    METHOD,
    st.lists(ONE_KEY, max_size=3),
)
LOOKING_UP = st.builds(
    lambda method, keys: {"method": method} | keys,
    st.sampled_from(["ngram", "suffix", "token_recycling"]),
    st.fixed_dictionaries({"num_speculative_tokens": COUNT}, optional={"tree": TREE}),
)
COMBINED = st.builds(
    lambda method, first, second: {"method": method, "parts": [first, second]},
    st.just("hybrid"),
    LOOKING_UP | SENSIBLE,
    SENSIBLE,
)
WILD = st.dictionaries(st.sampled_from(list(KEYS)) | st.text(max_size=6), anything(), max_size=5)


def plan_of(given):
    """Build the plan of a config that needs no head checkpoint."""
    speculative = config.read(given)
    if any(part.needs_head for part in (speculative, *speculative.parts)):
        return
    network = tuple(_network(part) for part in speculative.parts) or _network(speculative)
    hash(Plan(tiny.TARGET, speculative.drafter(network, tiny.TARGET), speculative.rule))


def _network(speculative):
    return tiny.DRAFT_CONFIG if speculative.needs_model else None


@few(120)
@given(SENSIBLE | LOOKING_UP | COMBINED | WILD | anything())
def test_a_speculative_config_gives_a_plan_or_one_line(given):
    refused(plan_of, given)


@pytest.mark.parametrize("key", KEYS)
@few(4)
@given(value=anything())
def test_errors_name_the_key_of_an_invalid_value(key, value):
    if KEYS[key].standing == "works" and key not in ("method", "model", "parts"):
        drafts = {"method": "draft_model", "model": "a/b", "num_speculative_tokens": 3}
        other = {
            "tree_depth": ("num_speculative_tokens",),
            "tree": ("path", "speculative"),
            "adaptive_length": ("K=",),
        }
        refused(config.read, drafts | {key: value}, names=(key, *other.get(key, ())))


def test_deeply_nested_configs_raise():
    deep = nested(50_000, lambda inner: {"method": "hybrid", "parts": [inner, {"method": "ngram"}]})
    assert "parts[0] has the method 'hybrid'" in refused(config.read, deep)


def test_a_repeated_key_among_very_many_raises_at_once():
    keys = [f"key_{index}" for index in range(50_000)]
    text = "{" + ", ".join(f'"{key}": 1' for key in [*keys, keys[-1]]) + "}"
    begin = time.perf_counter()
    assert "the key 'key_49999' stands twice" in refused(values.json_of, text, unique=True)
    assert time.perf_counter() - begin < 10  # a search of all keys for each takes minutes


FIELDS = [field.name for field in dataclasses.fields(SamplingParams)]
SETTING = st.sampled_from(
    [0, 1, 2, 0.5, 1.5, -1, None, True, [1, 2], {1: 2.0}, {"5": -1}, ["a"], "a", [(3, 1.0)]]
)
GRAMMAR = st.dictionaries(
    st.sampled_from(["regex", "choice", "json_object", "grammar"]), anything(), max_size=2
)


@few(300)
@given(st.dictionaries(st.sampled_from(FIELDS) | st.text(max_size=6), SETTING | anything()))
def test_sampling_params_are_valid_or_errors_name_them(given):
    refused(SamplingParams, **given, names=(*given, "SamplingParams has no", "greedy"))


@few(100)
@given(GRAMMAR)
def test_errors_name_structured_outputs(given):
    refused(SamplingParams, structured_outputs=given, names=("structured_outputs",))


ROW = [field.name for field in dataclasses.fields(SequenceParams)]
ROW = [name for name in ROW if name not in ("prompt", "grammar")]


@few(60)
@given(
    st.lists(st.integers(0, 9), min_size=1) | anything(),
    st.dictionaries(st.sampled_from(ROW), SETTING | anything(), max_size=3),
)
def test_sequence_params_are_valid_or_errors_name_them(prompt, given):
    refused(SequenceParams, prompt=prompt, **given, names=("prompt", *given))


@few(100)
@given(
    st.lists(
        st.dictionaries(st.sampled_from(["prompt", "prompt_token_ids", "x"]), anything())
        | anything(),
        max_size=3,
    )
    | anything()
)
def test_prompts_are_read_or_errors_number_them(given):
    refused(prompts.read, given, lambda text: [1] * len(text), names=("prompt",))


ARGUMENTS = (
    "speculative_config",
    "max_model_len",
    "seed",
    "max_num_seqs",
    "per_request_stats",
    "logprobs_mode",
    "max_logprobs",
    "dtype",
    "tokenizer",
)


@few(40)
@given(given=st.dictionaries(st.sampled_from(ARGUMENTS), anything(), min_size=1, max_size=2))
def test_an_llm_is_built_or_raises_one_line(root, given):
    target = llm_fixtures.loaded(root)["target"]
    refused(jspec.LLM, target, **given)


@few(40)
@given(anything())
def test_invalid_model_arguments_raise(given):
    if not (isinstance(given, str) and given):  # an id would be looked up on the hub
        assert "model" in refused(jspec.load, given)


@pytest.mark.parametrize(
    "options",
    [
        ["--speculative-config", "[" * 100_000],
        ["--speculative-config", '{"num_speculative_tokens": 1' + "0" * 5000 + "}"],
        ["--speculative-config", '{"method": "\\ud800"}'],
        ["--speculative-config", "NaN"],
        ["--logit-bias", '{"1": NaN}'],
        ["--logit-bias", '{"a": 1}'],
        ["--max-tokens", "1" + "0" * 30],
        ["--temperature", "nan"],
        ["--prompt-file", "/"],
        ["--prompt-file", "a\0b"],
        ["--token-ids", "1,,2"],
        ["--token-ids", "9" * 5000],
        ["--no-such-option"],
    ],
    ids=lambda options: " ".join(options)[:40],
)
def test_invalid_options_of_the_command_line_give_one_line(tmp_path, options, capsys, monkeypatch):
    prompt = [] if {"--prompt-file", "--token-ids"} & {*options} else ["hi"]
    monkeypatch.setattr(sys, "argv", ["jspec", "generate", str(tmp_path), *prompt, *options])
    with pytest.raises(SystemExit) as stopped:
        main.main()
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and not printed.out
    assert printed.err.startswith("jspec: ") and printed.err.count("\n") == 1
    assert len(printed.err) < 2000, printed.err[:300]
