"""One request: a prompt and its settings, the sequences that run, and the texts they become."""

import copy
import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from typing import Any

from jspec.api.outputs import RequestOutput, Transcript
from jspec.api.prompts import Prompt
from jspec.api.sampling_params import SamplingParams
from jspec.core.logprobs import Mode, Scoring
from jspec.engine.sequence import EngineSequence
from jspec.engine.sequences import SequenceParams
from jspec.grammar import outputs
from jspec.util import limits
from jspec.util.values import bucket


@dataclasses.dataclass(eq=False)
class GenerationRequest:
    """One request of a caller: its sequences, and the text that becomes of each.

    ``tickets`` are the sequences in the engine, once they were submitted. The engine extends their
    answers, and whoever reads the request turns these into text.
    """

    number: int
    prompt: Prompt
    params: SamplingParams
    sequences: tuple[SequenceParams, ...]
    transcripts: tuple[Transcript, ...]
    id: str  # id of its outputs
    tickets: Sequence[EngineSequence] = ()
    _num_read: int = -1  # tokens of all texts; -1 before each has a first answer

    def read(self) -> bool:
        """Decode what was generated since the last call; return whether texts grew or ended.

        Raises:
          Exception: that ended a sequence, or that the tokenizer raised.
        """
        was_finished = self.finished
        for ticket, text in zip(self.tickets, self.transcripts, strict=False):
            answer = ticket.answer  # before the error, which is written before the last answer
            if ticket.error is not None:
                raise ticket.error
            text.read(answer)
        texts = self.transcripts
        if not all(each.finish_reason or (each.answer and each.answer.rounds) for each in texts):
            return False
        before, self._num_read = self._num_read, sum(len(each.answer.tokens) for each in texts)
        return self._num_read != before or self.finished != was_finished

    @property
    def finished(self) -> bool:
        """True if all texts are complete."""
        return all(text.finish_reason for text in self.transcripts)

    @property
    def overrunning(self) -> list[EngineSequence]:
        """The sequences that run in the engine although their texts are complete."""
        pairs = zip(self.tickets, self.transcripts, strict=False)
        return [ticket for ticket, text in pairs if text.finish_reason and not ticket.finished]

    @property
    def begin(self) -> float | None:
        """When the first sequence left the queue, of ``time.perf_counter``; None: not yet."""
        begins = [ticket.begin for ticket in self.tickets if ticket.begin is not None]
        return min(begins, default=None)

    @property
    def has_candidates(self) -> bool:
        """True if more texts are drawn than returned: the best are chosen at the end."""
        return self.params.num_texts > self.params.n

    @functools.cached_property
    def _prompt_token_ids(self) -> list[int]:
        return list(self.prompt.token_ids)  # once: prompts may be long, and outputs many

    def check_streams(self) -> None:
        """Refuse a request whose texts are chosen at the end."""
        if self.has_candidates:
            raise ValueError(
                f"best_of={self.params.best_of} cannot be streamed: the best texts are "
                "known at the end; use generate, or leave best_of out."
            )

    def output(self, detailed: bool) -> RequestOutput:
        """Return all texts so far, or the best of those that were drawn."""
        drawn = list(self.transcripts)
        if len(drawn) > self.params.n:
            # A broken-off text is likelier for being shorter, so it ranks last.
            drawn.sort(
                key=lambda each: (each.finish_reason != "error", each.cumulative_logprob),
                reverse=True,
            )
            drawn = drawn[: self.params.n]
        texts = [each.output(index, detailed) for index, each in enumerate(drawn)]
        return RequestOutput(
            request_id=self.id,
            prompt=self.prompt.text,
            prompt_token_ids=self._prompt_token_ids,
            outputs=texts,
            finished=all(text.finished() for text in texts),
            prompt_logprobs=drawn[0].prompt_logprobs(),
            num_cached_tokens=max(
                (ticket.answer.num_cached_tokens for ticket in self.tickets), default=0
            ),
        )


def settings_of(
    prompt: Prompt,
    params: SamplingParams,
    *,
    room: int,
    eos: frozenset[int],
    tokenizer: Any,
    vocab_size: int,
) -> SequenceParams:
    """Resolve the settings of one prompt into a sequence, all but its seed. Grammars compile here.

    ``room`` is the number of tokens that still fit the model, ``eos`` the model's end-of-text ids.
    ``tokenizer`` is None without text.
    """
    ends = _ends(params, eos)
    grammar = {}
    if params.structured_outputs:
        stops = frozenset({*eos, *params.stop_token_ids})
        grammar = outputs.resolved(params.structured_outputs, tokenizer, stops, vocab_size)
    return SequenceParams(
        prompt=prompt.token_ids,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        stop_token_ids=tuple(sorted({*params.stop_token_ids, *ends})),
        min_tokens=min(params.min_tokens, room),
        late_token_ids=tuple(sorted(eos - ends)) if params.min_tokens else (),
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids,
        bad_words=_spellings(params.bad_words, tokenizer),
        logits_processors=params.logits_processors,
        **grammar,
        **params.parameters,
    )


def numbered(
    number: int,
    prompt: Prompt,
    params: SamplingParams,
    settings: SequenceParams,
    *,
    seed: int,
    eos: frozenset[int],
    tokenizer: Any,
) -> GenerationRequest:
    """Return the request with a number. It and ``seed`` seed requests without a seed.

    ``settings`` are of ``settings_of``; other arguments are as there.
    """
    noise = _derived_seed(seed, number) if params.seed is None else int(params.seed)
    streams = range(params.num_texts)
    first = dataclasses.replace(settings, seed=noise)
    sequences = tuple(_of_stream(first, stream) for stream in streams)
    ends = _ends(params, eos)
    transcripts = tuple(Transcript(params, prompt.token_ids, tokenizer, ends) for _ in streams)
    return GenerationRequest(number, prompt, params, sequences, transcripts, id=str(number))


def _ends(params: SamplingParams, eos: frozenset[int]) -> frozenset[int]:
    return frozenset() if params.ignore_eos else eos


def _of_stream(sequence: SequenceParams, stream: int) -> SequenceParams:
    """Return the sequence of another stream, without a second check of everything else."""
    other = copy.copy(sequence)
    object.__setattr__(other, "stream", stream)
    return other


@functools.lru_cache(maxsize=4)  # the prompts of a request share their settings
def _spellings(words: tuple[str, ...], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Return the token ids of words, at the beginning of a text and after a space."""
    texts = [text for word in words for text in (word.lstrip(), f" {word.lstrip()}")]
    phrases = [tuple(tokenizer.encode(text, add_special_tokens=False)) for text in texts]
    limits.BAD_WORD_TOKENS.check(max(map(len, phrases), default=0))
    return tuple(dict.fromkeys(phrase for phrase in phrases if phrase))


def _derived_seed(seed: int, number: int) -> int:
    """Return a seed of 64 bits for a request without one."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest())


def check_logprobs(params: SamplingParams, mode: Mode, most: int, vocab_size: int) -> None:
    """Raise ValueError if a request asks for more logprobs than ``most``."""
    if params.num_texts > params.n and mode.endswith("logits"):
        raise ValueError(
            f"best_of={params.best_of} compares log-probabilities, but logprobs_mode={mode!r} has "
            "none; leave one of the two out."
        )
    counts = {"logprobs": params.logprobs, "prompt_logprobs": params.prompt_logprobs}
    for name, count in counts.items():
        if count is not None and (vocab_size if count == -1 else count) > most:
            whole = f", the whole vocabulary of {vocab_size}" if count == -1 else ""
            raise ValueError(
                f"Requested {name} of {count}{whole}, which is greater than max allowed: {most}; "
                "ask for fewer, or raise LLM(max_logprobs=...)."
            )


def scoring_of(
    requests: Sequence[GenerationRequest], vocab_size: int, most: int, mode: Mode
) -> Scoring | None:
    """Return the scores that any of the requests needs; None for none.

    Each count is a program, so it is 8, 32, 128, ... or ``most``. Transcripts list only as many
    tokens as the request asked for.
    """
    settings = [request.params for request in requests]
    prompts = [params.prompt_logprobs for params in settings]
    counts = [0 for params in settings if params.num_texts > params.n]
    counts += [*prompts, *(params.logprobs for params in settings)]
    counts = [vocab_size if count == -1 else count for count in counts if count is not None]
    if not counts:
        return None
    count = bucket(max(counts), smallest=8, factor=4)
    has_prompt = any(count is not None for count in prompts)
    return Scoring(min(count, most, vocab_size), has_prompt, mode)


def params_per_prompt(params: Any, count: int) -> list[SamplingParams]:
    """Return the settings of each of ``count`` prompts, given one for all or a list."""
    params = SamplingParams() if params is None else params
    if isinstance(params, SamplingParams):
        return [params] * count
    if not isinstance(params, Sequence) or not all(isinstance(p, SamplingParams) for p in params):
        raise ValueError("sampling_params must be a SamplingParams, or a list of one a prompt.")
    if len(params) != count:
        raise ValueError(
            f"The lengths of prompts and params must be the same: {count} prompts and "
            f"{len(params)} sampling_params."
        )
    return list(params)
