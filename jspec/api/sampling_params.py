"""``SamplingParams``: the settings of a request, with vLLM's names, defaults and meanings."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jspec.core.logits_processors import LogitsProcessor
from jspec.engine.sequences import PARAMETERS
from jspec.grammar import automata
from jspec.util.messages import did_you_mean, shown
from jspec.util.values import INT32, are_whole, is_function, is_whole, listed, plain

# vLLM's parameters that jspec lacks, with their defaults. Only the defaults are accepted.
NOT_YET: dict[str, Any] = {
    "early_stopping": False,
    "extra_args": None,
    "flat_logprobs": False,
    "guided_decoding": None,
    "length_penalty": 1.0,
    "logprob_token_ids": None,
    "output_kind": None,
    "prompt_logprob_start": None,
    "prompt_logprob_token_ids": None,
    "repetition_detection": None,
    "routed_experts_prompt_start": 0,
    "skip_clone": False,
    "skip_reading_prefix_cache": None,
    "spaces_between_special_tokens": True,
    "stream_interval": None,
    "thinking_token_budget": None,
    "trace_decode_token_ids": None,
    "truncate_prompt_tokens": None,
    "use_beam_search": False,
}

_MOST_TEXTS = 16384  # vLLM's limit
_OVER_HTTP_NONE = ("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty")
_LISTS = ("stop", "stop_token_ids", "bad_words", "logits_processors")

# The allowed values of the other parameters: (name, test, words of the error).
_NUM_TEXTS = f"a whole number of at least 1, and at most {_MOST_TEXTS}"
_SEED = "None or a whole number of at most 64 bits"
_MAX_TOKENS = "a whole number from 1 to 2**31 - 1, or None for all the room there is"
_STOPS = "a string or a list of strings, none of them empty"
_WORDS = "a list of strings, none of them empty"
_IDS = "None for all, or a list of at least one token id"
_COUNT = "None, -1 or a whole number of at least 0"
_FUNCTIONS = "a list of functions that can be hashed"
_is_bool = lambda value: isinstance(value, bool)
_is_count = lambda value: value is None or is_whole(value, -1)
_is_text = lambda value: isinstance(value, str) and bool(value)
_CHECKS = (
    ("n", lambda n: is_whole(n, 1, _MOST_TEXTS), _NUM_TEXTS),
    ("seed", lambda seed: seed is None or is_whole(seed, -(2**63), 2**64 - 1), _SEED),
    ("stop", lambda texts: all(map(_is_text, texts)), _STOPS),
    ("stop_token_ids", lambda ids: are_whole(ids, 0), "a list of token ids"),
    ("max_tokens", lambda most: most is None or is_whole(most, 1), _MAX_TOKENS),
    ("min_tokens", lambda least: is_whole(least, 0), "a whole number of at least 0"),
    ("allowed_token_ids", lambda ids: ids is None or (ids and are_whole(ids, 0)), _IDS),
    ("bad_words", lambda words: all(_is_text(word) and word.strip() for word in words), _WORDS),
    ("logprobs", _is_count, _COUNT),
    ("prompt_logprobs", _is_count, _COUNT),
    ("logits_processors", lambda functions: all(map(is_function, functions)), _FUNCTIONS),
    ("ignore_eos", _is_bool, "a bool"),
    ("include_stop_str_in_output", _is_bool, "a bool"),
    ("detokenize", _is_bool, "a bool"),
    ("skip_special_tokens", _is_bool, "a bool"),
)


@dataclasses.dataclass(frozen=True, init=False)
class SamplingParams:
    """Settings of one request, given by keyword and checked at once.

    Attributes:
      n: texts to generate, each with its own noise.
      temperature: 0 is greedy.
      top_p: keep the likeliest tokens that hold this much probability; 1 keeps all.
      top_k: keep this many of the likeliest tokens; 0 or -1 keeps all.
      min_p: keep tokens at least this likely relative to the likeliest; 0 keeps all.
      seed: same seed, prompt and settings: same text. None draws anew for every request.
      stop: strings that end the text, which then ends before them; one string or a list.
      stop_token_ids: ids that end the text; part of ``token_ids``, not of ``text``.
      ignore_eos: whether the model's own end-of-text tokens do not end the text.
      max_tokens: most tokens to generate; None for as many as the model has room for.
      include_stop_str_in_output: whether ``text`` includes the stop string or token.
      detokenize: whether to decode the tokens to text.
      skip_special_tokens: whether ``text`` omits special tokens.
      min_tokens: tokens to generate before the text may end. Until then no stop token is drawn, nor
        the model's end of text even with ``ignore_eos``, and stop strings are ignored.
      presence_penalty: subtracted from the logits of generated tokens; -2 to 2.
      frequency_penalty: subtracted for each occurrence among generated tokens; -2 to 2.
      repetition_penalty: divides positive and multiplies negative logits of tokens in the prompt or
        the answer; 1 changes nothing.
      logit_bias: added to the logits of token ids, -100 to 100 (clipped).
      allowed_token_ids: the only tokens that may be generated; None for all.
      bad_words: words that may not be generated, in any spelling with or without a space before.
      logits_processors: functions (logits [V], token ids [T], their number) -> logits [V], traced
        by JAX and applied in turn, see ``jspec.core.logits_processors.LogitsProcessor``.
      structured_outputs: a grammar of the text: {"json": schema}, {"regex": text},
        {"choice": [texts]} or {"json_object": True}, see ``jspec.grammar.automata.pattern_of``.
      logprobs: return the log-probability of each token of the answer, and those of this many
        likeliest ones; 0 for the token alone, -1 for the whole vocabulary, None for nothing.
      prompt_logprobs: the same for the prompt's tokens except the first.
      best_of: texts to draw, of which the ``n`` with the largest ``cumulative_logprob`` are
        returned; None for ``n``.

    Raises:
      ValueError: a value is out of range, a name is unknown, or a parameter of vLLM's that jspec
        lacks (see ``NOT_YET``) is not at its default.
    """

    n: int = 1
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    max_tokens: int | None = 16
    include_stop_str_in_output: bool = False
    detokenize: bool = True
    skip_special_tokens: bool = True
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    structured_outputs: Any = None

    def __init__(self, **given: Any):
        values = {field.name: field.default for field in dataclasses.fields(self)}
        values |= {name: plain(given.pop(name)) for name in values.keys() & given.keys()}
        _refuse(given)
        for name in _OVER_HTTP_NONE:
            if values[name] is None:
                values[name] = getattr(type(self), name)
        for name in ("stop", "bad_words"):
            if isinstance(values[name], str):
                values[name] = (values[name],)
        for name in _LISTS:
            values[name] = listed(name, values[name])
        if values["allowed_token_ids"] is not None:
            values["allowed_token_ids"] = listed("allowed_token_ids", values["allowed_token_ids"])
        values["structured_outputs"] = values["structured_outputs"] or None
        values["logit_bias"] = _biases(values["logit_bias"])
        if values["seed"] == -1:  # vLLM's other spelling of None
            values["seed"] = None
        for name, value in values.items():
            object.__setattr__(self, name, value)
        self._check()
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(self.stop_token_ids)))

    @property
    def num_texts(self) -> int:
        """Texts to draw."""
        return self.n if self.best_of is None else self.best_of

    @property
    def parameters(self) -> dict[str, Any]:
        """The numeric parameters, as ``SequenceParams`` takes them."""
        return {name: parameter.value(self) for name, parameter in PARAMETERS.items()}

    def _check(self) -> None:
        for parameter in PARAMETERS.values():
            parameter.resolve(parameter.value(self))
        for name, holds, words in _CHECKS:
            value = getattr(self, name)
            if not holds(value):
                raise ValueError(f"{name}={_shown(value)} must be {words}.")
        if self.best_of is not None and not is_whole(self.best_of, self.n, _MOST_TEXTS):
            raise ValueError(
                f"best_of={shown(self.best_of)} must be None or a whole number of at least "
                f"n={self.n}, and at most {_MOST_TEXTS}."
            )
        if self.structured_outputs:
            automata.pattern_of(self.structured_outputs)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got "
                f"{self.min_tokens}."
            )
        if self.temperature == 0 and self.num_texts > 1:
            name = "n" if self.n > 1 else "best_of"
            raise ValueError(
                f"{name} must be 1 when using greedy sampling, got {self.num_texts}: all texts "
                "would be equal; set temperature above 0."
            )
        if self.stop and not self.detokenize:
            raise ValueError(
                "stop strings are only supported when detokenize is True. Set detokenize=True to "
                "use stop, or stop at stop_token_ids."
            )


def _refuse(given: dict[str, Any]) -> None:
    """Raise on unknown names, and on unsupported parameters that are not at their default."""
    for name, value in given.items():
        if name not in NOT_YET:
            known = [field.name for field in dataclasses.fields(SamplingParams)]
            kind = name.removeprefix("guided_")
            guess = (
                f'; give structured_outputs={{"{kind}": ...}}'
                if kind in automata.KINDS
                else did_you_mean(name, known)
            )
            raise ValueError(f"SamplingParams has no {shown(name)}{guess}")
        is_default = value is None or value == NOT_YET[name] or value in ([], {}, ())
        if not is_default:
            raise ValueError(
                f"{name}={_shown(value)} is not supported yet; leave it at {NOT_YET[name]!r}."
            )


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs in order of ids, which may be text, as in JSON."""
    if not given:
        return ()
    pairs = given.items() if isinstance(given, Mapping) else given
    try:
        biases = {_id(token): _real(bias) for token, bias in pairs}
    except (TypeError, ValueError, OverflowError):
        biases = None
    fits = lambda token, bias: 0 <= token < INT32 and not math.isnan(bias)
    if biases is None or not all(fits(*pair) for pair in biases.items()):
        raise ValueError(f"logit_bias={_shown(given)} must be a dict of token ids to numbers.")
    return tuple((token, max(-100.0, min(100.0, biases[token]))) for token in sorted(biases))


def _id(token: Any) -> int:
    if not isinstance(token, str) and not is_whole(token):
        raise TypeError
    return int(token)


def _real(value: Any) -> float:
    if isinstance(value, bool):
        raise TypeError
    return float(value)


def _shown(value: Any) -> str:
    return shown(list(value) if isinstance(value, tuple) else value)
