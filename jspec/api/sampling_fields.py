"""``SamplingFields``: the parameters of a request, of which flags and HTTP's fields are made.

It loads no JAX. The ranges of numeric parameters are beside their filters, in ``jspec.core``.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

from jspec.util import limits
from jspec.util.arguments import argument
from jspec.util.values import are_whole, is_function, is_whole

_MOST_TEXTS = limits.TEXTS.most
_ALL_TEXTS = "a string or a list of strings, none of them empty"
_ROOM = "a whole number from 1 to 2**31 - 1, or None for all the room there is"
_TEXTS = (lambda texts: all(isinstance(text, str) and text for text in texts), _ALL_TEXTS)
_WORDS = (lambda texts: all(isinstance(text, str) and text.strip() for text in texts), _ALL_TEXTS)
_IDS = (lambda ids: are_whole(ids, 0), "a list of token ids")
_SOME_IDS = (
    lambda ids: ids and are_whole(ids, 0),
    "None for all, or a list of at least one token id",
)
_TOKENS = (lambda value: value is None or is_whole(value, 1), _ROOM)
_SEED = (
    lambda value: is_whole(value, -(2**63), 2**64 - 1),
    "None or a whole number of at most 64 bits",
)
_LEAST = (lambda value: is_whole(value, 0), "a whole number of at least 0")
_NUM_TEXTS = (
    lambda value: is_whole(value, 1, _MOST_TEXTS),
    f"a whole number from 1 to {_MOST_TEXTS}",
)
_SCORES = (lambda value: is_whole(value, -1), "None, -1 or a whole number of at least 0")
_FUNCTIONS = (lambda calls: all(map(is_function, calls)), "a list of hashable functions")
_BOOL = (lambda value: isinstance(value, bool), "a bool")


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingFields:
    """The parameters of ``SamplingParams``, which checks them, with their defaults.

    Each has its text in docs/sampling_params.md. Those with a ``help`` are flags of ``jspec
    generate``. All are fields of requests, except those that ``jspec.server.fields`` names.
    """

    max_tokens: int | None = argument(
        16,
        "Most tokens of a text.",
        about="to generate at most; `None` for as many as the model has room for",
        check=_TOKENS,
        kind=int,
        default=128,
    )
    temperature: float = argument(1.0, "0 is greedy.", about="0 is greedy", default=0.0)
    top_p: float = argument(
        1.0, "1 keeps all tokens.", about="probability of the likeliest tokens to keep; 1: all"
    )
    top_k: int = argument(
        0, "0 keeps all tokens.", about="number of likeliest tokens to keep; 0 or -1: all"
    )
    min_p: float = argument(
        0.0, "0 keeps all tokens.", about="least probability, relative to the likeliest; 0: any"
    )
    seed: int | None = argument(
        None,
        "Default: the same in every run.",
        about="same seed, prompt and settings: same text; `None`: anew for each request",
        check=_SEED,
    )
    min_tokens: int = argument(
        0,
        "Least tokens of a text.",
        about="until then no stop token, no end of text (even with `ignore_eos`), no stop string",
        check=_LEAST,
    )
    presence_penalty: float = argument(
        0.0, "-2 to 2.", about="subtracted from the logits of generated tokens; -2 to 2"
    )
    frequency_penalty: float = argument(
        0.0, "-2 to 2.", about="subtracted for each occurrence of a generated token; -2 to 2"
    )
    repetition_penalty: float = argument(
        1.0, "1 is off.", about="divides positive, multiplies negative logits of tokens so far"
    )
    logit_bias: tuple[tuple[int, float], ...] = argument(
        (),
        'JSON: {"token id": bias}.',
        about="token ids to numbers from -100 to 100 (clipped)",
        kind=str | None,
        default=None,
    )
    bad_words: tuple[str, ...] = argument(
        (),
        "Forbid a word; may be repeated.",
        about="not in the answer, with or without a space before; the prompt may begin one",
        check=_WORDS,
    )
    stop: tuple[str, ...] = argument(
        (),
        "End before a string; may be repeated.",
        about="strings that end the text before them; one string or a list",
        check=_TEXTS,
    )
    ignore_eos: bool = argument(
        False,
        "Continue after the end of a text.",
        about="whether the model's own end-of-text tokens do not end the text",
        check=_BOOL,
    )
    n: int = argument(
        1,
        "Number of texts.",
        about="texts to return, each with its own noise",
        check=_NUM_TEXTS,
        names=["-n"],
    )
    best_of: int | None = argument(
        None, about="texts to draw; those of largest `cumulative_logprob` return"
    )
    stop_token_ids: tuple[int, ...] = argument(
        (), about="end the text; part of `token_ids`, not of `text`", check=_IDS
    )
    include_stop_str_in_output: bool = argument(
        False, about="whether `text` has the stop string or token", check=_BOOL
    )
    allowed_token_ids: tuple[int, ...] | None = argument(
        None, about="the only tokens to generate; `None` for all", check=_SOME_IDS
    )
    logits_processors: tuple[Callable, ...] = argument(
        (),
        about="`(logits [V], token ids [T], their number) -> logits [V]`, traced, one by one",
        check=_FUNCTIONS,
    )
    structured_outputs: Any = argument(
        None, about="one of `json`, `regex`, `choice`, `json_object`, `grammar`, `structural_tag`"
    )
    logprobs: int | None = argument(
        None, about="scores of each token and this many likeliest; -1: all tokens", check=_SCORES
    )
    prompt_logprobs: int | None = argument(
        None, about="the same for the prompt's tokens except the first", check=_SCORES
    )
    detokenize: bool = argument(True, about="whether there is a `text`", check=_BOOL)
    skip_special_tokens: bool = argument(
        True, about="whether `text` leaves special tokens out", check=_BOOL
    )


FIELDS = {field.name: field for field in dataclasses.fields(SamplingFields)}
