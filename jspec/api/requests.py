"""A prompt and its settings, as the rows that run and the texts that come of them."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

from jspec.api.outputs import RequestOutput, Transcript
from jspec.api.prompts import Prompt
from jspec.api.sampling_params import SamplingParams
from jspec.core.logprobs import Mode, Scoring
from jspec.engine.batch import SequenceParams
from jspec.grammar import automata
from jspec.util.buckets import bucket


@dataclasses.dataclass(frozen=True, eq=False)
class Job:
    """One request of a caller: ``n`` rows and, for each, what it has become so far."""

    number: int
    prompt: Prompt
    params: SamplingParams
    rows: tuple[SequenceParams, ...]
    transcripts: tuple[Transcript, ...]

    def output(self, detailed: bool) -> RequestOutput:
        """The request as it stands: all its texts, or the best of those that were drawn."""
        drawn = list(self.transcripts)
        if len(drawn) > self.params.n:
            # What broke off is likelier for being shorter, but no whole text.
            value = lambda each: (each.finish_reason != "error", each.cumulative_logprob)
            drawn = sorted(drawn, key=value, reverse=True)[: self.params.n]
        outputs = [each.output(index, detailed) for index, each in enumerate(drawn)]
        return RequestOutput(
            request_id=str(self.number),
            prompt=self.prompt.text,
            prompt_token_ids=list(self.prompt.token_ids),
            outputs=outputs,
            finished=all(output.finished() for output in outputs),
            prompt_logprobs=drawn[0].prompt_logprobs(),
        )


def make(
    number: int,
    prompt: Prompt,
    params: SamplingParams,
    *,
    room: int,
    seed: int,
    eos: frozenset[int],
    tokenizer: Any,
    vocab_size: int,
) -> Job:
    """The job of one prompt.

    Args:
      number: of the request.
      prompt: what to continue.
      params: how.
      room: tokens that the model can still take.
      seed: of the noise, where ``params`` names none; with the number it makes the row's own.
      eos: the model's ends of text.
      tokenizer: makes the text; None where none is wanted.
      vocab_size: V.
    """
    ends = frozenset() if params.ignore_eos else eos
    rules = None
    if params.structured_outputs:
        pattern = automata.pattern_of(params.structured_outputs)
        rules = automata.compiled(
            pattern, tokenizer, frozenset({*eos, *params.stop_token_ids}), vocab_size
        )
    row = SequenceParams(
        prompt=prompt.token_ids,
        max_tokens=room if params.max_tokens is None else min(params.max_tokens, room),
        temperature=float(params.temperature),
        top_k=max(int(params.top_k), 0),
        top_p=float(params.top_p),
        min_p=float(params.min_p),
        stop_token_ids=tuple(sorted({*params.stop_token_ids, *ends})),
        seed=_derived(seed, number) if params.seed is None else int(params.seed),
        min_tokens=min(params.min_tokens, room),
        late_token_ids=tuple(sorted(eos - ends)) if params.min_tokens else (),
        presence_penalty=float(params.presence_penalty),
        frequency_penalty=float(params.frequency_penalty),
        repetition_penalty=float(params.repetition_penalty),
        logit_bias=params.logit_bias,
        allowed_token_ids=params.allowed_token_ids or (),
        bad_words=spellings(params.bad_words, tokenizer),
        logits_processors=params.logits_processors,
        grammar=rules,
    )
    rows = tuple(dataclasses.replace(row, stream=index) for index in range(params.num_texts))
    transcripts = tuple(Transcript(params, prompt.token_ids, tokenizer, ends) for _ in rows)
    return Job(number, prompt, params, rows, transcripts)


def spellings(words: Sequence[str], tokenizer: Any) -> tuple[tuple[int, ...], ...]:
    """Token ids of words as they stand at the beginning of a text, and behind a space."""
    found: dict[tuple[int, ...], None] = {}
    for word in words:
        bare = word.lstrip()
        for written in (bare, f" {bare}"):
            ids = tuple(tokenizer.encode(written, add_special_tokens=False))
            if ids:
                found[ids] = None
    return tuple(found)


def check_logprobs(params: SamplingParams, mode: Mode, most: int, vocab_size: int) -> None:
    """Raises ValueError if more ``logprobs`` are asked for than ``most`` allows."""
    if params.num_texts > params.n and mode.endswith("logits"):
        raise ValueError(
            f"best_of={params.best_of} compares log-probabilities, but logprobs_mode={mode!r} has "
            "none; leave one of the two out."
        )
    for name in ("logprobs", "prompt_logprobs"):
        given = getattr(params, name)
        if given is not None and (vocab_size if given == -1 else given) > most:
            whole = f", the whole vocabulary of {vocab_size}" if given == -1 else ""
            raise ValueError(
                f"Requested {name} of {given}{whole}, which is greater than max allowed: {most}; "
                "ask for fewer, or raise LLM(max_logprobs=...)."
            )


def scoring_of(todo: Sequence[Job], vocab_size: int, most: int, mode: Mode) -> Scoring | None:
    """What must be known of tokens for all of these requests; None for nothing.

    The count comes in few sizes, since each is a program: powers of two, and the ``most`` that any
    request may ask for. Transcripts list no more than was asked for.
    """
    counts, prompts = [], []
    for job in todo:
        counts += [job.params.logprobs] + [0] * (job.params.num_texts > job.params.n)
        prompts += [job.params.prompt_logprobs]
    known = lambda values: [vocab_size if k == -1 else k for k in values if k is not None]
    wanted = known([*counts, *prompts])
    if not wanted:
        return None
    count = bucket(max(wanted), smallest=1) if max(wanted) else 0
    return Scoring(min(count, most, vocab_size), bool(known(prompts)), mode)


def one_each(params: Any, count: int) -> list[SamplingParams]:
    """The settings of each of ``count`` prompts: one for all, or a list.

    Raises:
      ValueError: it is neither, or a list of another length.
    """
    given = SamplingParams() if params is None else params
    if isinstance(given, SamplingParams):
        return [given] * count
    if not isinstance(given, Sequence) or not all(isinstance(p, SamplingParams) for p in given):
        raise ValueError("sampling_params must be a SamplingParams, or a list of one a prompt.")
    if len(given) != count:
        raise ValueError(
            f"The lengths of prompts and params must be the same: {count} prompts and "
            f"{len(given)} sampling_params."
        )
    return list(given)


def _derived(seed: int, number: int) -> int:
    """A seed of 64 bits for a request that names none."""
    return int.from_bytes(hashlib.blake2b(f"{seed}/{number}".encode(), digest_size=8).digest())
