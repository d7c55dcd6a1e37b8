"""``SamplingParams``: the settings of a request, with vLLM's names, defaults and meanings."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jspec.core.logits_processors import LogitsProcessor
from jspec.engine.sequences import PARAMETERS
from jspec.grammar import outputs
from jspec.util import limits, neutral
from jspec.util.messages import shown
from jspec.util.values import are_whole, encodes, is_function, is_whole, listed, plain

_MOST_TEXTS = limits.TEXTS.most
_OVER_HTTP_NONE = ("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty")
_LISTS = ("stop", "stop_token_ids", "bad_words", "logits_processors")
_BOOLS = ("ignore_eos", "include_stop_str_in_output", "detokenize", "skip_special_tokens")

# The allowed values of the other parameters: (name, test, words of the error).
_TEXTS = "a string or a list of strings, none of them empty"
_IDS = "None for all, or a list of at least one token id"
_ROOM = "a whole number from 1 to 2**31 - 1, or None for all the room there is"
_SEED = "None or a whole number of at most 64 bits"
_FUNCTIONS = "a list of hashable functions"
_COUNT = "None, -1 or a whole number of at least 0"
_is_count = lambda value: value is None or is_whole(value, -1)
_CHECKS = (
    ("n", lambda n: is_whole(n, 1, _MOST_TEXTS), f"a whole number from 1 to {_MOST_TEXTS}"),
    ("seed", lambda n: n is None or is_whole(n, -(2**63), 2**64 - 1), _SEED),
    ("stop", lambda texts: all(isinstance(text, str) and text for text in texts), _TEXTS),
    ("stop_token_ids", lambda ids: are_whole(ids, 0), "a list of token ids"),
    ("max_tokens", lambda n: n is None or is_whole(n, 1), _ROOM),
    ("min_tokens", lambda n: is_whole(n, 0), "a whole number of at least 0"),
    ("allowed_token_ids", lambda ids: ids is None or (ids and are_whole(ids, 0)), _IDS),
    ("bad_words", lambda texts: all(isinstance(t, str) and t.strip() for t in texts), _TEXTS),
    ("bad_words", lambda texts: all(map(encodes, texts)), "text without halves of surrogate pairs"),
    ("logprobs", _is_count, _COUNT),
    ("prompt_logprobs", _is_count, _COUNT),
    ("logits_processors", lambda calls: all(map(is_function, calls)), _FUNCTIONS),
    *((name, lambda value: isinstance(value, bool), "a bool") for name in _BOOLS),
)


@dataclasses.dataclass(frozen=True, init=False)
class SamplingParams:
    """Settings of one request, given by keyword and checked at once; see docs/sampling_params.md.

    Raises:
      ValueError: a value is out of range, a name is unknown, or a parameter of vLLM's that jspec
        lacks has an effect (see ``jspec.util.neutral``).
    """

    n: int = 1  # texts to generate, each with its own noise
    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0  # keep the likeliest tokens that hold this much probability; 1 keeps all
    top_k: int = 0  # keep this many of the likeliest tokens; 0 or -1 keeps all
    min_p: float = 0.0  # keep tokens at least this likely relative to the likeliest; 0 keeps all
    seed: int | None = None  # same seed, prompt and settings: same text; None: anew per request
    stop: tuple[str, ...] = ()  # strings that end the text before them; one string or a list
    stop_token_ids: tuple[int, ...] = ()  # end the text; part of ``token_ids``, not of ``text``
    ignore_eos: bool = False  # whether the model's own end-of-text tokens do not end the text
    max_tokens: int | None = 16  # to generate at most; None for as many as the model has room for
    include_stop_str_in_output: bool = False  # whether ``text`` has the stop string or token
    detokenize: bool = True
    skip_special_tokens: bool = True  # in ``text``
    # Tokens to generate before the text may end. Until then no stop token is drawn, nor the model's
    # end of text even with ``ignore_eos``, and stop strings are ignored.
    min_tokens: int = 0
    # Subtracted from the logits of generated tokens, and for each occurrence among them; -2 to 2.
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    # Divides positive and multiplies negative logits of tokens in the prompt or the answer.
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()  # by token id, -100 to 100 (clipped)
    allowed_token_ids: tuple[int, ...] | None = None  # the only tokens to generate; None for all
    bad_words: tuple[str, ...] = ()  # may not be generated, with or without a space before
    # (logits [V], token ids [T], their number) -> logits [V]; traced by JAX and applied in turn.
    logits_processors: tuple[LogitsProcessor, ...] = ()
    # Return the log-probability of each token of the answer, and those of this many likeliest ones:
    # 0 for the token alone, -1 for the whole vocabulary, None for nothing.
    logprobs: int | None = None
    prompt_logprobs: int | None = None  # the same for the prompt's tokens except the first
    best_of: int | None = None  # texts to draw; the ``n`` of largest ``cumulative_logprob`` return
    structured_outputs: Any = None  # a grammar of the text, see ``automata.setting_of``

    def __init__(self, **given: Any):
        defaults = {field.name: field.default for field in dataclasses.fields(self)}
        unknown = {name: value for name, value in given.items() if name not in defaults}
        neutral.check("SamplingParams", unknown, neutral.SAMPLING, known=defaults)
        values = defaults | {
            name: plain(value) for name, value in given.items() if name in defaults
        }
        for name in _OVER_HTTP_NONE:
            if values[name] is None:
                values[name] = defaults[name]
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
        vars(self).update(values)
        self._check()

    @property
    def num_texts(self) -> int:
        """Texts to draw."""
        return self.n if self.best_of is None else self.best_of

    @property
    def has_text(self) -> bool:
        """True if the request needs a tokenizer."""
        return bool(self.detokenize or self.bad_words or self.structured_outputs)

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
        vars(self)["stop_token_ids"] = tuple(dict.fromkeys(self.stop_token_ids))
        self._check_sizes()
        if self.best_of is not None and not is_whole(self.best_of, self.n, _MOST_TEXTS):
            raise ValueError(
                f"best_of={shown(self.best_of)} must be None or a whole number of at least "
                f"n={self.n}, and at most {_MOST_TEXTS}."
            )
        if self.structured_outputs:
            outputs.check(self.structured_outputs)
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

    def _check_sizes(self) -> None:
        """Raise ValueError if a list, or a text in it, is above its limit."""
        limits.STOP_STRINGS.check(len(self.stop))
        limits.STOP_CHARACTERS.check(max(map(len, self.stop), default=0))
        limits.STOP_TOKENS.check(len(self.stop_token_ids))
        limits.BAD_WORDS.check(len(self.bad_words))
        limits.BAD_WORD_CHARACTERS.check(max(map(len, self.bad_words), default=0))


def _biases(given: Any) -> tuple[tuple[int, float], ...]:
    """Return (token id, bias) pairs in order of ids, which may be text, as in JSON."""
    try:
        pairs = list(given.items() if isinstance(given, Mapping) else given or ())
        is_id = lambda token: isinstance(token, str) or is_whole(token)
        are_valid = all(is_id(token) and not isinstance(bias, bool) for token, bias in pairs)
        biases = {int(token): float(bias) for token, bias in pairs}
    except (TypeError, ValueError, OverflowError):
        are_valid, biases = False, {}
    if not are_valid or not are_whole(list(biases), 0) or any(map(math.isnan, biases.values())):
        raise ValueError(f"logit_bias={_shown(given)} must be a dict of token ids to numbers.")
    return tuple((token, max(-100.0, min(100.0, biases[token]))) for token in sorted(biases))


def _shown(value: Any) -> str:
    return shown(list(value) if isinstance(value, tuple) else value)
