"""``SamplingParams``: the settings of a request, with vLLM's names, defaults and meanings."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jspec.api.sampling_fields import FIELDS, SamplingFields
from jspec.engine.sequences import PARAMETERS
from jspec.grammar import outputs
from jspec.util import arguments, limits, neutral
from jspec.util.messages import shown
from jspec.util.values import are_whole, encodes, is_whole, listed, plain

_OVER_HTTP_NONE = ("min_tokens", "presence_penalty", "frequency_penalty", "repetition_penalty")
_LISTS = ("stop", "stop_token_ids", "bad_words", "logits_processors")


@dataclasses.dataclass(frozen=True, init=False)
class SamplingParams(SamplingFields):
    """Settings of one request, given by keyword and checked at once; see docs/sampling_params.md.

    Raises:
      ValueError: a value is out of range, a name is unknown, or a parameter of vLLM's that jspec
        lacks has an effect (see ``jspec.util.neutral``).
    """

    def __init__(self, **given: Any):
        defaults = {name: field.default for name, field in FIELDS.items()}
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
        arguments.check(self)
        if not all(map(encodes, self.bad_words)):
            raise ValueError(
                f"bad_words={shown(list(self.bad_words))} must be text without halves of "
                "surrogate pairs."
            )
        vars(self)["stop_token_ids"] = tuple(dict.fromkeys(self.stop_token_ids))
        self._check_sizes()
        if self.best_of is not None and not is_whole(self.best_of, self.n, limits.TEXTS.most):
            raise ValueError(
                f"best_of={shown(self.best_of)} must be None or a whole number of at least "
                f"n={self.n}, and at most {limits.TEXTS.most}."
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
        are_valid = all(
            (isinstance(token, str) or is_whole(token)) and not isinstance(bias, bool)
            for token, bias in pairs
        )
        biases = {int(token): float(bias) for token, bias in pairs}
    except (TypeError, ValueError, OverflowError):
        are_valid, biases = False, {}
    if not are_valid or not are_whole(list(biases), 0) or any(map(math.isnan, biases.values())):
        raise ValueError(f"logit_bias={shown(given)} must be a dict of token ids to numbers.")
    return tuple((token, max(-100.0, min(100.0, biases[token]))) for token in sorted(biases))
