"""How a request wants its text drawn: vLLM's ``SamplingParams``, names, defaults and meanings."""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from jspec.engine.sequences import COLDEST, HOTTEST, LEAST_REPETITION
from jspec.grammar import automata
from jspec.util.messages import did_you_mean, shown
from jspec.util.values import INT32, are_whole, is_function, is_real, is_whole, listed, plain

# What vLLM has and jspec has not, with the value that asks for nothing. Accepted at that value.
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


@dataclasses.dataclass(frozen=True, init=False)
class SamplingParams:
    """Settings of one request, given by name. Checked when made.

    Attributes:
      n: texts to generate, each with noise of its own.
      temperature: 0 is greedy.
      top_p: keep the likeliest tokens that hold this much probability; 1 keeps all.
      top_k: keep this many of the likeliest tokens; 0 or -1 keeps all.
      min_p: keep tokens at least this likely relative to the likeliest; 0 keeps all.
      seed: same seed, prompt and settings: same text. None draws anew for every request.
      stop: strings that end the text, which then ends before them; one string or a list.
      stop_token_ids: ids that end the text; kept in ``token_ids``, not shown in ``text``.
      ignore_eos: whether to go on after the model's own end-of-text tokens.
      max_tokens: most tokens to generate; None for as many as the model has room for.
      include_stop_str_in_output: whether ``text`` shows what ended it.
      detokenize: whether to make text at all.
      skip_special_tokens: whether ``text`` leaves out special tokens.
      min_tokens: tokens to generate before the text may end: until then no stop token is drawn, nor
        the model's end of text even with ``ignore_eos``, and no stop string is looked for.
      presence_penalty: taken off the logits of tokens that were generated; -2 to 2.
      frequency_penalty: taken off for each time that they were; -2 to 2.
      repetition_penalty: divides the logits of tokens that are in the prompt or were generated, and
        multiplies negative ones; 1 changes nothing.
      logit_bias: what to add to the logits of token ids, -100 to 100 (more counts as that).
      allowed_token_ids: the only tokens that may be generated; None for all.
      bad_words: words that may not be generated, in any spelling with or without a space before.
      logits_processors: functions (logits [V], token ids [T], their number) -> logits [V], traced
        by JAX and applied in turn, see ``jspec.core.logits_processors.LogitsProcessor``.
      structured_outputs: a grammar that the text keeps to: {"json": schema}, {"regex": text},
        {"choice": [texts]} or {"json_object": True}, see ``jspec.grammar.automata.pattern_of``.
      logprobs: for every token of the answer, its log-probability and those of this many likeliest;
        0 for the token's alone, -1 for the whole vocabulary, None for nothing.
      prompt_logprobs: the same of the prompt's tokens, the first one excepted.
      best_of: texts to draw, of which the ``n`` of largest ``cumulative_logprob`` come back; None
        for ``n``.

    Raises:
      ValueError: a value is out of range, a name is unknown, or a setting of vLLM's that jspec does
        not support (see ``NOT_YET``) asks for something.
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
    logits_processors: tuple[Callable, ...] = ()
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    best_of: int | None = None
    structured_outputs: Any = None

    def __init__(self, **given: Any):
        for field in dataclasses.fields(self):
            object.__setattr__(self, field.name, plain(given.pop(field.name, field.default)))
        _refuse(given)
        stop = (self.stop,) if isinstance(self.stop, str) else listed("stop", self.stop)
        object.__setattr__(self, "stop", stop)
        ids = listed("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", ids)
        words = (self.bad_words,) if isinstance(self.bad_words, str) else self.bad_words
        object.__setattr__(self, "bad_words", listed("bad_words", words))
        object.__setattr__(self, "structured_outputs", self.structured_outputs or None)
        functions = listed("logits_processors", self.logits_processors)
        object.__setattr__(self, "logits_processors", functions)
        for name in ("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty"):
            if getattr(self, name) is None:  # as requests over HTTP have it
                object.__setattr__(self, name, getattr(type(self), name))
        if self.allowed_token_ids is not None:
            allowed = listed("allowed_token_ids", self.allowed_token_ids)
            object.__setattr__(self, "allowed_token_ids", allowed)
        object.__setattr__(self, "logit_bias", _biases(self.logit_bias))
        if self.seed == -1:  # vLLM's other spelling of None
            object.__setattr__(self, "seed", None)
        self._check()
        object.__setattr__(self, "stop_token_ids", tuple(dict.fromkeys(ids)))

    @property
    def num_texts(self) -> int:
        """Texts to draw."""
        return self.n if self.best_of is None else self.best_of

    def _check(self) -> None:
        whole, real = is_whole, is_real
        checks = (
            (
                "n",
                whole(self.n, 1, _MOST_TEXTS),
                f"a whole number of at least 1, and at most {_MOST_TEXTS}",
            ),
            (
                "temperature",
                real(self.temperature) and 0 <= self.temperature <= HOTTEST,
                f"0 (greedy) or more, at most {HOTTEST}",
            ),
            ("top_p", real(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]; 1 turns it off"),
            (
                "top_k",
                whole(self.top_k, -1),
                "a whole number from 1 to 2**31 - 1, or 0 to turn it off",
            ),
            ("min_p", real(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]; 0 turns it off"),
            (
                "seed",
                self.seed is None or whole(self.seed, -(2**63), 2**64 - 1),
                "None or a whole number of at most 64 bits",
            ),
            (
                "stop",
                all(isinstance(text, str) and text for text in self.stop),
                "a string or a list of strings, none of them empty",
            ),
            ("stop_token_ids", are_whole(self.stop_token_ids, 0), "a list of token ids"),
            (
                "max_tokens",
                self.max_tokens is None or whole(self.max_tokens, 1),
                "a whole number from 1 to 2**31 - 1, or None for all the room there is",
            ),
            ("min_tokens", whole(self.min_tokens, 0), "a whole number of at least 0"),
            (
                "presence_penalty",
                real(self.presence_penalty) and -2 <= self.presence_penalty <= 2,
                "in [-2, 2]; 0 turns it off",
            ),
            (
                "frequency_penalty",
                real(self.frequency_penalty) and -2 <= self.frequency_penalty <= 2,
                "in [-2, 2]; 0 turns it off",
            ),
            (
                "repetition_penalty",
                real(self.repetition_penalty)
                and LEAST_REPETITION <= self.repetition_penalty <= 1 / LEAST_REPETITION,
                f"more than 0, {LEAST_REPETITION} to {1 / LEAST_REPETITION:.0e}; 1 turns it off",
            ),
            (
                "allowed_token_ids",
                self.allowed_token_ids is None
                or (self.allowed_token_ids and are_whole(self.allowed_token_ids, 0)),
                "None for all, or a list of at least one token id",
            ),
            (
                "bad_words",
                all(isinstance(word, str) and word.strip() for word in self.bad_words),
                "a list of strings, none of them empty",
            ),
            ("logprobs", _counts(self.logprobs), "None, -1 or a whole number of at least 0"),
            (
                "prompt_logprobs",
                _counts(self.prompt_logprobs),
                "None, -1 or a whole number of at least 0",
            ),
            (
                "best_of",
                self.best_of is None
                or (
                    whole(self.best_of, 1, _MOST_TEXTS) and whole(self.n) and self.best_of >= self.n
                ),
                f"None or a whole number of at least n={shown(self.n)}, and at most {_MOST_TEXTS}",
            ),
            (
                "logits_processors",
                all(map(is_function, self.logits_processors)),
                "a list of functions that can be hashed",
            ),
        )
        switches = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")
        checks += tuple(
            (name, isinstance(getattr(self, name), bool), "a bool") for name in switches
        )
        for name, holds, wanted in checks:
            if not holds:
                raise ValueError(f"{name}={_shown(getattr(self, name))} must be {wanted}.")
        if self.structured_outputs:
            automata.pattern_of(self.structured_outputs)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ValueError(
                f"min_tokens must be less than or equal to max_tokens={self.max_tokens}, got "
                f"{self.min_tokens}."
            )
        if 0 < self.temperature < COLDEST:
            raise ValueError(
                f"temperature={self.temperature} is too close to 0 to divide by; use 0 for greedy "
                f"sampling, or at least {COLDEST}."
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
    """Raises on every setting that would change the text and is not supported."""
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
        asks_nothing = value is None or value == NOT_YET[name] or value in ([], {}, ())
        if not asks_nothing:
            raise ValueError(
                f"{name}={_shown(value)} is not supported yet; leave it at {NOT_YET[name]!r}."
            )


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """(token id, bias) pairs in order of ids; ids may be written as text, as in JSON."""
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


def _counts(value: Any) -> bool:
    return value is None or is_whole(value, -1)
