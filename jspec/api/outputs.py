"""Results of a request, with the fields of vLLM's ``RequestOutput``."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

from jspec.api import detokenizer, metrics
from jspec.api.sampling_params import SamplingParams
from jspec.core.logprobs import Logprobs
from jspec.engine import answers
from jspec.engine.answers import Answer

# The settings that forbid tokens.
_LIMITS = ("structured_outputs", "allowed_token_ids", "bad_words", "min_tokens", "logit_bias")
_LIMITS += ("logits_processors",)


@dataclasses.dataclass
class Logprob:
    """The target's score of a token at one position."""

    logprob: float  # its kind is named by ``LLM``'s ``logprobs_mode``
    rank: int | None = None  # 1 for the likeliest token
    decoded_token: str | None = None  # its text alone; None without detokenization


@dataclasses.dataclass
class CompletionOutput:
    """One generated text.

    ``finish_reason`` is "stop", "length", None while it runs, or "error" if every token had
    probability 0 (NaN or fully masked logits). The text before the error is there, and
    ``stop_reason`` is a sentence that names the cause.
    """

    index: int  # among the request's ``n`` texts
    text: str  # without the stop string or token, unless ``include_stop_str_in_output``
    token_ids: list[int]  # includes the stop token, or the token that completed a stop string
    cumulative_logprob: float | None = None  # sum over ``token_ids``, if logprobs were requested
    logprobs: list[dict[int, Logprob]] | None = None  # by token id, the token itself first
    finish_reason: str | None = None
    stop_reason: int | str | None = None  # stop string or token; None for the model's own end
    speculative_decoding_stats: dict[str, Any] | None = None  # see ``metrics.request_stats``

    def finished(self) -> bool:
        """Return whether the text is complete."""
        return self.finish_reason is not None


@dataclasses.dataclass
class RequestOutput:
    """The texts generated for one prompt.

    ``prompt_logprobs`` has the form of a text's ``logprobs``. Its first item is None, since the
    first token has no predecessor.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int | None = None  # tokens of the prompt that the prefix cache held

    @property
    def speculative_decoding_stats(self) -> dict[str, Any] | None:
        """The statistics of the first text; each of ``outputs`` has its own."""
        return self.outputs[0].speculative_decoding_stats


def _why_no_token(params: SamplingParams, num_tokens: int) -> str:
    """Return why every token had probability 0, as far as settings decide it."""
    start = f"after {num_tokens} tokens every token has probability 0"
    names = [name for name in _LIMITS if getattr(params, name)]
    if not names:
        return f"{start}: the model's logits are NaN; check its weights."
    together = f"{' and '.join(names)} forbid" if len(names) > 1 else f"{names[0]} forbids"
    return f"{start}: {together} them all, or the model's logits are NaN; allow more."


class Transcript:
    """The text of one sequence, decoded from its answers and ended at a stop string.

    ``text``, ``finish_reason`` and ``stop_reason`` are as in ``CompletionOutput``. ``answer`` is
    the last one that was read, cut where the text ended; None before the first.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], tokenizer: Any, eos: frozenset[int]
    ):
        self._params, self._eos, self._prompt = params, eos, prompt
        self._detokenizer, self._text_of = None, lambda _: None
        if params.detokenize:
            skip = params.skip_special_tokens
            self._detokenizer = detokenizer.Detokenizer(tokenizer, prompt, skip)
            self._text_of = functools.cache(lambda token: tokenizer.decode([token]))
        self._stops = detokenizer.StopStrings(params.stop)
        self._num_read = 0
        self._token_ids: list[int] = []  # tokens of the answer, as Python's numbers
        self._listed: list[dict[int, Logprob]] = []  # logprobs of the tokens read so far
        self._listed_prompt: list[dict[int, Logprob] | None] = []
        self.answer: Answer | None = None
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def read(self, answer: Answer) -> bool:
        """Decode the answer so far; return whether a stop string just ended the text.

        The device does not see stop strings: the caller must end such a sequence.
        """
        if self.finish_reason or answer is self.answer:
            return False
        self.answer = answer
        if self._detokenizer and self._read_text(answer):
            return True
        self._num_read = len(answer.tokens)
        rest = self._detokenizer.flush() if answer.finish_reason and self._detokenizer else ""
        if rest and self._stopped(rest, answer, len(answer.tokens)):
            return True
        self.finish_reason = answer.finish_reason
        if answer.finish_reason == "error":
            self.stop_reason = _why_no_token(self._params, len(answer.tokens))
        if answer.stop_token is not None and answer.stop_token not in self._eos:
            self.stop_reason = answer.stop_token
        return False

    @property
    def cumulative_logprob(self) -> float:
        """The sum over the tokens so far; 0 before the first scores."""
        return 0.0 if self._scores is None else float(self._scores.chosen.sum())

    @property
    def _scores(self) -> Logprobs | None:
        return None if self.answer is None else self.answer.logprobs

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Return the scores of the prompt's tokens, if requested."""
        count = self._params.prompt_logprobs
        if count is None or self.answer is None or self.answer.prompt_logprobs is None:
            return None
        if not self._listed_prompt:
            scores = self.answer.prompt_logprobs
            self._listed_prompt = [None, *self._list(self._prompt[1:], scores, count)]
        return self._listed_prompt.copy()

    def _ids(self) -> list[int]:
        """Return the token ids so far; only new ones are converted."""
        self._token_ids += self.answer.tokens[len(self._token_ids) :].tolist()
        return self._token_ids[: len(self.answer.tokens)]

    def _logprobs(self) -> list[dict[int, Logprob]]:
        """Return the scores of the tokens so far; only new ones are converted."""
        known = len(self._listed)
        if self._scores is not None:
            tokens, scores = self.answer.tokens[known:], self._scores[known:]
            self._listed += self._list(tokens, scores, self._params.logprobs)
        return self._listed[: len(self.answer.tokens)]

    def _list(self, ids: Sequence[int], scores: Logprobs, count: int) -> list[dict[int, Logprob]]:
        """List each of ``ids`` with the ``count`` likeliest tokens; -1 for all."""
        count = scores.count if count == -1 else count
        listed = []
        for index, token in enumerate(map(int, ids)):
            ranked = {token: (scores.chosen[index], scores.rank[index])}
            top = zip(scores.top_ids[index, :count], scores.top[index, :count], strict=True)
            for rank, (other, value) in enumerate(top, 1):
                ranked.setdefault(int(other), (value, rank))
            listed.append(
                {
                    id: Logprob(float(value), int(rank), self._text_of(id))
                    for id, (value, rank) in ranked.items()
                }
            )
        return listed

    def _read_text(self, answer: Answer) -> bool:
        """Decode the new tokens; return whether a stop string ended the text."""
        hidden = answer.stop_token is not None and not self._params.include_stop_str_in_output
        shown = len(answer.tokens) - hidden
        for count in range(self._num_read, shown):
            piece = self._detokenizer.feed(answer.tokens[count])
            if piece and self._stopped(piece, answer, count + 1):
                return True
        return False

    def _stopped(self, piece: str, answer: Answer, count: int) -> bool:
        """Add a piece of text; end the text after ``count`` tokens if a stop string ends."""
        stop = self._stops.feed(piece, may_end=count > self._params.min_tokens)
        if not stop:
            self.text += piece
            return False
        end, self.stop_reason = stop
        self.text += piece[:end]
        if not self._params.include_stop_str_in_output:
            self.text = self.text[: len(self.text) - len(self.stop_reason)]
        self.finish_reason = "stop"
        self.answer = answers.cut(answer, count)
        return True

    def output(self, index: int, detailed: bool) -> CompletionOutput:
        """Return the text so far, without an end that may become a stop string."""
        shown = self.text
        if not self.finish_reason and not self._params.include_stop_str_in_output:
            shown = shown[: len(shown) - self._stops.held]
        if self.answer is None:
            return CompletionOutput(index, shown, [])
        has_scores = self._params.logprobs is not None
        return CompletionOutput(
            index,
            shown,
            self._ids(),
            self.cumulative_logprob if has_scores else None,
            self._logprobs() if has_scores else None,
            self.finish_reason,
            self.stop_reason,
            metrics.request_stats(self.answer, detailed),
        )
