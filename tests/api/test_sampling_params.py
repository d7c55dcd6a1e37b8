"""SamplingParams: vLLM's names and defaults, and what is refused."""

import dataclasses
import warnings
from pathlib import Path

import numpy as np
import pytest

from jspec.api.sampling_fields import FIELDS
from jspec.api.sampling_params import SamplingParams
from jspec.engine.sequences import PARAMETERS
from jspec.util import neutral

PAGE = Path(__file__).parents[2] / "docs/sampling_params.md"


@dataclasses.dataclass
class Unhashable:
    """A logits processor whose fields may change."""

    def __call__(self, logits, ids, length):
        return logits


def test_defaults_are_those_of_vllm():
    params = SamplingParams()
    assert (params.temperature, params.top_p, params.top_k, params.min_p) == (1.0, 1.0, 0, 0.0)
    assert (params.n, params.max_tokens, params.seed) == (1, 16, None)
    assert (params.stop, params.stop_token_ids, params.ignore_eos) == ((), (), False)


def test_every_registered_parameter_is_a_field_whose_default_changes_nothing():
    params = SamplingParams(temperature=0)
    assert params.parameters == {name: entry.neutral for name, entry in PARAMETERS.items()}


def rows():
    """Return the table of docs/sampling_params.md."""
    return [
        f"| `{name}` | `{field.default}` | {field.metadata['about']} |"
        for name, field in FIELDS.items()
    ]


def test_the_page_has_the_table_of_parameters():
    assert "\n".join(rows()) in PAGE.read_text(encoding="utf-8")


def test_one_stop_string_is_a_list_of_one_and_ids_are_listed_once():
    params = SamplingParams(stop="a", stop_token_ids=[7, 3, 7])
    assert params.stop == ("a",)
    assert params.stop_token_ids == (7, 3)
    assert SamplingParams(stop=None, stop_token_ids=None) == SamplingParams()


def test_minus_one_switches_top_k_and_the_seed_off_as_in_vllm():
    assert SamplingParams(top_k=-1, seed=-1).seed is None


def test_numbers_of_numpy_are_those_of_python_from_the_start():
    with warnings.catch_warnings(action="error"):
        params = SamplingParams(temperature=np.float32(0.5), max_tokens=np.int64(3))
    assert params == SamplingParams(temperature=0.5, max_tokens=3)
    assert type(params.temperature) is float
    with pytest.raises(
        ValueError, match=r"temperature=9\.99.*e-06 must be 0 \(greedy\).* too close to 0"
    ):
        SamplingParams(temperature=np.float32(1e-5))  # as a float: 9.999999747378752e-06


def test_settings_can_be_replaced():
    params = SamplingParams(stop=["x"], max_tokens=None)
    assert dataclasses.replace(params, temperature=0).stop == ("x",)


@pytest.mark.parametrize("name", neutral.SAMPLING)
def test_unsupported_parameters_are_accepted_without_an_effect(name):
    values, _ = neutral.SAMPLING[name]
    assert {SamplingParams(**{name: value}) for value in (None, *values)} == {SamplingParams()}


def test_none_and_empty_values_are_the_defaults():
    assert SamplingParams(bad_words=[], logit_bias={}, structured_outputs={}) == SamplingParams()
    names = (
        "presence_penalty",
        "frequency_penalty",
        "repetition_penalty",
        "min_tokens",
        "logit_bias",
        "bad_words",
        "allowed_token_ids",
        "logits_processors",
    )
    assert SamplingParams(**dict.fromkeys(names)) == SamplingParams()


def test_biases_are_read_as_json_writes_them_and_stay_within_a_hundred():
    params = SamplingParams(logit_bias={"7": 250, 3: -1.5}, bad_words="no", allowed_token_ids=[4])
    assert params.logit_bias == ((3, -1.5), (7, 100.0))
    assert params.bad_words == ("no",) and params.allowed_token_ids == (4,)
    assert dataclasses.replace(params, seed=1).logit_bias == params.logit_bias


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"temperature": -0.1}, "temperature=-0.1 must be 0 (greedy), or 1e-05 to 1e+30; val"),
        ({"temperature": float("nan")}, "temperature=nan must be"),
        ({"temperature": float("inf")}, "temperature=inf must be"),
        (
            {"temperature": 1e-7},
            "temperature=1e-07 must be 0 (greedy), or 1e-05 to 1e+30; values between 0 and 1e-05 "
            "are too close to 0 to divide by.",
        ),
        ({"temperature": "hot"}, "temperature='hot' must be"),
        ({"top_p": 0}, "top_p=0 must be in (0, 1]; 1 turns it off."),
        ({"top_p": 1.5}, "top_p=1.5 must be"),
        ({"top_k": -2}, "top_k=-2 must be a whole number from 1 to 2**31 - 1, or 0"),
        ({"top_k": 2.5}, "top_k=2.5 must be"),
        ({"min_p": 2}, "min_p=2 must be in [0, 1]; 0 turns it off."),
        ({"max_tokens": 0}, "max_tokens=0 must be a whole number from 1"),
        ({"max_tokens": True}, "max_tokens=True must be"),
        ({"n": 0}, "n=0 must be a whole number from 1 to 16384."),
        ({"n": 2, "temperature": 0}, "n must be 1 when using greedy sampling, got 2"),
        ({"seed": 2**64}, "must be None or a whole number of at most 64 bits."),
        ({"seed": 0.5}, "seed=0.5 must be"),
        ({"stop": ["a", ""]}, "stop=['a', ''] must be a string or a list of strings"),
        ({"stop": 5}, "stop=5 must be a list."),
        ({"stop_token_ids": ["a"]}, "stop_token_ids=['a'] must be a list of token ids."),
        ({"stop_token_ids": [-1]}, "stop_token_ids=[-1] must be"),
        ({"stop_token_ids": [[1]]}, "stop_token_ids=[[1]] must be"),
        ({"stop_token_ids": [2**31]}, "stop_token_ids=[2147483648] must be"),
        ({"top_k": 2**40}, "top_k=1099511627776 must be"),
        ({"ignore_eos": "no"}, "ignore_eos='no' must be a bool."),
        ({"min_tokens": -1}, "min_tokens=-1 must be a whole number of at least 0."),
        ({"min_tokens": 17}, "min_tokens must be less than or equal to max_tokens=16, got 17."),
        ({"presence_penalty": 2.5}, "presence_penalty=2.5 must be in [-2, 2]; 0 turns it off."),
        ({"frequency_penalty": "a"}, "frequency_penalty='a' must be in [-2, 2]"),
        (
            {"repetition_penalty": 0},
            "repetition_penalty=0 must be 1e-06 to 1e+06; 1 turns it off.",
        ),
        ({"logit_bias": {"a": 1}}, "logit_bias={'a': 1} must be a dict of token ids to numbers."),
        ({"logit_bias": {-3: 1}}, "logit_bias={-3: 1} must be"),
        ({"allowed_token_ids": []}, "allowed_token_ids=[] must be None for all, or a list"),
        ({"bad_words": ["a", " "]}, "bad_words=['a', ' '] must be a string or a list of strings"),
        (
            {"logits_processors": [3]},
            "logits_processors=[3] must be a list of hashable functions.",
        ),
        (
            {"logits_processors": [Unhashable()]},
            "logits_processors=[Unhashable()] must be a list of hashable functions.",
        ),
        ({"structured_outputs": {"lark": "x"}}, "must hold one of json, regex, choice, json_ob"),
        ({"logprobs": -2}, "logprobs=-2 must be None, -1 or a whole number of at least 0."),
        ({"prompt_logprobs": 1.5}, "prompt_logprobs=1.5 must be None, -1 or"),
        (
            {"n": 3, "best_of": 2},
            "best_of=2 must be None or a whole number of at least n=3, and at most 16384.",
        ),
        ({"best_of": 2, "temperature": 0}, "best_of must be 1 when using greedy sampling, got 2"),
        ({"stop": "a", "detokenize": False}, "stop strings are only supported when detokenize"),
        ({"length_penalty": 2}, "length_penalty=2 is not supported: it belongs to beam search."),
        ({"use_beam_search": True}, "use_beam_search=True is not supported: draw with best_of"),
        ({"guided_json": {"type": "object"}}, "is not supported: give structured_outputs."),
        ({"temprature": 1}, "has no 'temprature'; did you mean 'temperature'?"),
        ({"max_new_tokens": 1}, "has no 'max_new_tokens'; did you mean 'max_tokens'?"),
        ({"stop_tokens": 1}, "has no 'stop_tokens'; did you mean 'stop"),
    ],
)
def test_a_wrong_name_or_value_is_named_with_its_remedy(given, message):
    with pytest.raises(ValueError) as error:
        SamplingParams(**given)
    assert message in str(error.value)
    assert "\n" not in str(error.value)
