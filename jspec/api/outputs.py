"""What a request gives back, in the shape of vLLM's ``RequestOutput``."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jspec.api import detokenizer, metrics
from jspec.api.sampling_params import SamplingParams
from jspec.core.logprobs import Logprobs
from jspec.engine.batch import Answer


@dataclasses.dataclass
class Logprob:
    """How likely the target found a token at a place.

    Attributes:
      logprob: as ``LLM``'s ``logprobs_mode`` says.
      rank: 1 for the likeliest token.
      decoded_token: its text alone; None where no text is made.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclasses.dataclass
class CompletionOutput:
    """One generated text.

    Attributes:
      index: which of the request's ``n`` texts.
      text: without what ended it, unless ``include_stop_str_in_output``.
      token_ids: a stop token included; up to the token that completed a stop string.
      finish_reason: "stop", "length", None while it runs, or "error" where the target gave no token
        any weight: logits of NaN, or all tokens forbidden. What it said before is there.
      stop_reason: the stop string or stop token id that ended it; None for the model's own end of
        text, and for "length".
      speculative_decoding_stats: see ``jspec.api.metrics.request_stats``.
      cumulative_logprob: the sum over ``token_ids``; None unless ``logprobs`` were asked for.
      logprobs: for each of ``token_ids`` a dict of token id to ``Logprob``, the token itself first;
        None unless asked for.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    speculative_decoding_stats: dict[str, Any] | None = None

    def finished(self) -> bool:
        """Whether no more will come."""
        return self.finish_reason is not None


@dataclasses.dataclass
class RequestOutput:
    """The texts generated for one prompt.

    ``prompt_logprobs`` is as ``logprobs`` of a text, for the prompt's tokens; its first item is
    None, as nothing comes before that token.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None

    @property
    def speculative_decoding_stats(self) -> dict[str, Any] | None:
        """Of the first text; each of ``outputs`` has its own."""
        return self.outputs[0].speculative_decoding_stats


class Transcript:
    """The host's side of one row: its tokens become text, which may end it at a stop string.

    Attributes:
      answer: what the row generated so far, cut where it ended; None before its first round.
      text: the text so far.
      finish_reason, stop_reason: as in ``CompletionOutput``.
    """

    def __init__(
        self, params: SamplingParams, prompt: Sequence[int], tokenizer: Any, eos: frozenset[int]
    ):
        self._params, self._eos, self._prompt = params, eos, prompt
        self._tokenizer = tokenizer if params.detokenize else None
        self._detokenizer = None
        if params.detokenize:
            self._detokenizer = detokenizer.Detokenizer(
                tokenizer, prompt, params.skip_special_tokens
            )
        self._num_read = 0
        self._listed: list[dict[int, Logprob]] = []  # of the tokens, as far as they were wanted
        self._listed_prompt: list[dict[int, Logprob] | None] = []
        self._spelled: dict[int, str] = {}  # texts of tokens by themselves
        self.answer: Answer | None = None
        self.text = ""
        self.finish_reason: str | None = None
        self.stop_reason: int | str | None = None

    def read(self, answer: Answer) -> bool:
        """Takes in the row's answer so far. True if a stop string ended it just now.

        The device does not know of stop strings: such a row must then be cancelled.
        """
        if self.finish_reason:
            return False
        self.answer = answer
        if self._detokenizer and self._read_text(answer):
            return True
        self._num_read = len(answer.tokens)
        self.finish_reason = answer.finish_reason
        if self.finish_reason and self._detokenizer:
            self.text += self._detokenizer.flush()
        if answer.stop_token is not None and answer.stop_token not in self._eos:
            self.stop_reason = answer.stop_token
        return False

    @property
    def cumulative_logprob(self) -> float:
        """The sum over the tokens so far; of a row that was scored."""
        return 0.0 if self.answer is None else float(self.answer.logprobs.chosen.sum())

    def prompt_logprobs(self) -> list[dict[int, Logprob] | None] | None:
        """Of the prompt's tokens, where they are wanted."""
        count = self._params.prompt_logprobs
        if count is None or self.answer is None:
            return None
        if not self._listed_prompt:
            scores = self.answer.prompt_logprobs
            self._listed_prompt = [None, *self._list(self._prompt[1:], scores, count)]
        return self._listed_prompt.copy()

    def _logprobs(self) -> list[dict[int, Logprob]]:
        """Of the tokens so far. A stream asks after every slice: only new ones are listed."""
        answer, known = self.answer, len(self._listed)
        self._listed += self._list(
            answer.tokens[known:], answer.logprobs.behind(known), self._params.logprobs
        )
        return self._listed[: len(answer.tokens)]

    def _list(self, ids: Sequence[int], scores: Logprobs, count: int) -> list[dict[int, Logprob]]:
        """For each of ``ids`` itself and the ``count`` likeliest; -1 for all there are."""
        count = scores.count if count == -1 else count
        listed = []
        for place, token in enumerate(map(int, ids)):
            found = {token: (scores.chosen[place], scores.rank[place])}
            top = zip(scores.top_ids[place, :count], scores.top[place, :count], strict=True)
            for rank, (other, value) in enumerate(top, 1):
                found.setdefault(int(other), (value, rank))
            listed.append(
                {
                    each: Logprob(float(value), int(rank), self._text_of(each))
                    for each, (value, rank) in found.items()
                }
            )
        return listed

    def _text_of(self, token: int) -> str | None:
        if self._tokenizer is None:
            return None
        if token not in self._spelled:
            self._spelled[token] = self._tokenizer.decode([token])
        return self._spelled[token]

    def _read_text(self, answer: Answer) -> bool:
        hidden = answer.stop_token is not None and not self._params.include_stop_str_in_output
        shown = len(answer.tokens) - hidden
        for count in range(self._num_read, shown):
            known = len(self.text)
            self.text += self._detokenizer.feed(answer.tokens[count])
            if count + 1 <= self._params.min_tokens:  # what ends in here may not end the text
                continue
            found = detokenizer.find_stop(self.text, known, self._params.stop)
            if found is not None:
                self._end_at(found, count + 1)
                return True
        return False

    def _end_at(self, found: tuple[int, int, str], num_tokens: int) -> None:
        begin, end, self.stop_reason = found
        self.text = self.text[: end if self._params.include_stop_str_in_output else begin]
        self.finish_reason = "stop"
        self.answer = metrics.cut(self.answer, num_tokens)

    def output(self, index: int, detailed: bool) -> CompletionOutput:
        """The row as it stands. Text that may yet belong to a stop string is held back."""
        shown = self.text
        if not self.finish_reason and not self._params.include_stop_str_in_output:
            shown = shown[: len(shown) - detokenizer.held_back(shown, self._params.stop)]
        scored = self._params.logprobs is not None and self.answer is not None
        return CompletionOutput(
            index=index,
            cumulative_logprob=self.cumulative_logprob if scored else None,
            logprobs=self._logprobs() if scored else None,
            text=shown,
            token_ids=[] if self.answer is None else self.answer.tokens.tolist(),
            finish_reason=self.finish_reason,
            stop_reason=self.stop_reason,
            speculative_decoding_stats=(
                None if self.answer is None else metrics.request_stats(self.answer, detailed)
            ),
        )
