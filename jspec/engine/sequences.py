"""What the caller asks of each row, and the arrays that a batch of rows makes of it."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np

from jspec.core import logits_processors as processors
from jspec.core.logits_processors import LogitsProcessor, LogitsProcessors, Penalties
from jspec.core.sampling import FILTERS
from jspec.core.types import Request, Sampling, Target
from jspec.grammar import automata
from jspec.grammar.automata import Grammar
from jspec.util.buckets import bucket
from jspec.util.messages import shown
from jspec.util.values import are_whole, is_function, is_real, is_whole, listed

# Past these, float32 logits overflow: the law would be lost.
COLDEST, HOTTEST = 1e-5, 1e30
LEAST_REPETITION = 1e-6
_LEAST_TOP_P = float(np.finfo(np.float32).tiny)  # less is 0 on a device, and keeps no token
_EVERY_FILTER = (*processors.KINDS, *FILTERS)
_LISTS = (
    "prompt",
    "stop_token_ids",
    "late_token_ids",
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "logits_processors",
)


@dataclasses.dataclass(frozen=True)
class SequenceParams:
    """One sequence to generate. Checked when made.

    Attributes:
      prompt: token ids, at least one.
      max_tokens: most tokens to generate.
      temperature: 0 is greedy.
      top_k: 0 keeps every token.
      top_p: 1 keeps every token.
      min_p: 0 keeps every token.
      stop_token_ids: ids that end the row; the one that did is kept in its tokens.
      seed: with ``stream``, the address of the row's noise.
      stream: tells rows of one seed apart.
      min_tokens: tokens to generate before ``stop_token_ids`` and ``late_token_ids`` may be.
      late_token_ids: ids that do not end the row, but that ``min_tokens`` holds back all the same.
      presence_penalty: taken off the logits of tokens that were generated.
      frequency_penalty: taken off for each time that they were.
      repetition_penalty: divides the logits of tokens that are in the prompt or were generated;
        where they are negative, multiplies them. 1 changes nothing.
      logit_bias: (token id, what is added to its logit) pairs.
      allowed_token_ids: the only ones that may be generated; () for all.
      bad_words: runs of token ids that may not be generated whole; what a prompt begins may end.
      logits_processors: see ``jspec.core.logits_processors.LogitsProcessor``; applied in this order. One that
        leaves no token with any weight where a ``grammar`` rules ends that rule.
      grammar: which all of the text keeps to, from ``jspec.grammar.automata.compiled``; None for any text.

    Raises:
      ValueError: a value is out of range.
    """

    prompt: tuple[int, ...]
    max_tokens: int = 128
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    stop_token_ids: tuple[int, ...] = ()
    seed: int = 0
    stream: int = 0
    min_tokens: int = 0
    late_token_ids: tuple[int, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    logits_processors: tuple[LogitsProcessor, ...] = ()
    grammar: Grammar | None = None

    def __post_init__(self):
        for name in _LISTS:
            object.__setattr__(self, name, listed(name, getattr(self, name)))
        if not self.prompt:
            raise ValueError("prompt is empty; give at least one token (such as the BOS token).")
        whole, real = is_whole, is_real
        checks = (
            ("prompt", are_whole(self.prompt), "token ids"),
            ("max_tokens", whole(self.max_tokens, 1), "at least 1"),
            (
                "temperature",
                real(self.temperature)
                and (self.temperature == 0 or COLDEST <= self.temperature <= HOTTEST),
                f"0 (greedy), or {COLDEST} to {HOTTEST}",
            ),
            ("top_k", whole(self.top_k, 0), "0 (off) or more"),
            ("top_p", real(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]"),
            ("min_p", real(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]"),
            ("stop_token_ids", are_whole(self.stop_token_ids, 0), "token ids"),
            ("seed", whole(self.seed, -(2**63), 2**64 - 1), "a whole number of at most 64 bits"),
            ("stream", whole(self.stream, 0, 2**32 - 1), "a whole number of at least 0"),
            (
                "min_tokens",
                whole(self.min_tokens, 0)
                and whole(self.max_tokens)
                and self.min_tokens <= self.max_tokens,
                "0 to max_tokens",
            ),
            ("late_token_ids", are_whole(self.late_token_ids, 0), "token ids"),
            ("presence_penalty", real(self.presence_penalty), "a finite number"),
            ("frequency_penalty", real(self.frequency_penalty), "a finite number"),
            (
                "repetition_penalty",
                real(self.repetition_penalty)
                and LEAST_REPETITION <= self.repetition_penalty <= 1 / LEAST_REPETITION,
                f"{LEAST_REPETITION} to {1 / LEAST_REPETITION:.0e}; 1 is off",
            ),
            ("logit_bias", all(map(_is_bias, self.logit_bias)), "(token id, number) pairs"),
            ("allowed_token_ids", are_whole(self.allowed_token_ids), "token ids"),
            ("bad_words", all(map(_is_run, self.bad_words)), "runs of at least one token"),
            (
                "logits_processors",
                all(map(is_function, self.logits_processors)),
                "functions that can be hashed",
            ),
            (
                "grammar",
                self.grammar is None or isinstance(self.grammar, Grammar),
                "what jspec.grammar.compiled(...) makes of a pattern, or None",
            ),
        )
        for name, holds, wanted in checks:
            if not holds:
                raise ValueError(f"{name}={shown(getattr(self, name))} must be {wanted}.")
        left = set(self.allowed_token_ids) - set(self.too_soon)
        if self.allowed_token_ids and self.min_tokens and not left:
            raise ValueError(
                f"allowed_token_ids={shown(self.allowed_token_ids)} all end a text, which "
                f"min_tokens={self.min_tokens} forbids at first; allow another token, or "
                "set min_tokens=0."
            )

        others = ("min_tokens", "allowed_token_ids", "bad_words")
        clash = next((name for name in others if getattr(self, name)), None)
        if self.grammar is not None and clash:
            raise ValueError(
                f"{clash}={shown(getattr(self, clash))} and a grammar (structured_outputs) may "
                "leave no token at all; leave one of the two out."
            )

    @property
    def too_soon(self) -> tuple[int, ...]:
        """The ids that may not be generated before ``min_tokens`` were."""
        return (*self.stop_token_ids, *self.late_token_ids) if self.min_tokens else ()

    @property
    def filters(self) -> tuple[str, ...]:
        """The warps this row needs, in order; those of ``jspec.core.logits_processors`` come first."""
        penalties = (self.presence_penalty, self.frequency_penalty, self.repetition_penalty)
        shapes = (
            self.grammar is not None,
            self.allowed_token_ids,
            self.bad_words,
            self.too_soon,
            self.logit_bias,
            penalties != (0, 0, 1),
            self.logits_processors,
        )
        drawn = self.temperature > 0
        filters = (drawn, self.min_p > 0, self.top_k > 0, self.top_p < 1)
        pairs = [*zip(processors.KINDS, shapes, strict=True)]
        pairs += [(name, drawn and used) for name, used in zip(FILTERS, filters, strict=True)]
        return tuple(name for name, used in pairs if used)

    @property
    def token_ids(self) -> Iterator[tuple[str, int]]:
        """The token ids whose logits it changes, and where it names them."""
        yield from (("logit_bias", token) for token, _ in self.logit_bias)
        yield from (("allowed_token_ids", token) for token in self.allowed_token_ids)
        yield from (("bad_words", token) for word in self.bad_words for token in word)


def _is_bias(pair: Any) -> bool:
    return (
        isinstance(pair, tuple | list) and len(pair) == 2 and is_whole(pair[0]) and is_real(pair[1])
    )


def _is_run(word: Any) -> bool:
    return isinstance(word, tuple | list) and len(word) > 0 and are_whole(word)


def check_prompt(index: int, prompt: Sequence[int], vocab_size: int) -> None:
    """Raises ValueError if a prompt, which holds at least one token, has one that there is not."""
    if min(prompt) >= 0 and max(prompt) < vocab_size:  # prompts are long
        return
    wrong = next(token for token in prompt if not 0 <= token < vocab_size)
    raise ValueError(
        f"prompt {index} holds token id {wrong}, outside the vocabulary of {vocab_size} tokens; "
        "was it made by another tokenizer?"
    )


def check_sequences(rows: Sequence[SequenceParams], least: int = 0) -> None:
    """Raises ValueError if it is not a list of at least ``least`` rows."""
    if not isinstance(rows, Sequence) or not all(isinstance(row, SequenceParams) for row in rows):
        raise ValueError(f"rows={shown(rows, 60)} must be a list of jspec.generate.Row.")
    if len(rows) < least:
        raise ValueError("rows=[] are none; give at least one jspec.generate.Row.")


def check_fit(rows: Sequence[SequenceParams], target: Target) -> None:
    """Raises ValueError if a row is too long for the target, or names a token that it has not."""
    for index, row in enumerate(rows):
        total = len(row.prompt) + row.max_tokens
        if total > target.max_positions:
            raise ValueError(
                f"prompt {index} has {len(row.prompt)} tokens and max_tokens={row.max_tokens}, "
                f"together {total}, but the model has {target.max_positions} positions; "
                "shorten one of them."
            )
        check_prompt(index, row.prompt, target.vocab_size)
    check_token_ids(rows, target.vocab_size)


def check_token_ids(rows: Sequence[SequenceParams], vocab_size: int) -> None:
    """Raises ValueError if a row changes the logits of a token that there is not."""
    for index, row in enumerate(rows):
        for name, token in row.token_ids:
            if not 0 <= token < vocab_size:
                raise ValueError(
                    f"{name} of prompt {index} holds token id {token}, outside the vocabulary of "
                    f"{vocab_size} tokens; leave it out."
                )


def filters_of(rows: Sequence[SequenceParams]) -> tuple[str, ...]:
    """The warps that any of the rows needs, in order."""
    used = {name for row in rows for name in row.filters}
    return tuple(name for name in _EVERY_FILTER if name in used)


def filters_for(rows: Sequence[SequenceParams], filters: tuple[str, ...] | None) -> tuple[str, ...]:
    """Those that a program for the rows is to have: all of ``filters``, in order.

    Raises:
      ValueError: one is unknown, or one that a row needs is missing.
    """
    needed = filters_of(rows)
    if filters is None:
        return needed
    if not isinstance(filters, tuple | list) or not all(name in _EVERY_FILTER for name in filters):
        known = ", ".join(map(repr, _EVERY_FILTER))
        raise ValueError(f"filters={shown(filters)} must be a tuple of names among {known}.")
    missing = [name for name in needed if name not in filters]
    if missing:
        raise ValueError(
            f"filters={shown(filters)} lack {', '.join(map(repr, missing))}, which the rows ask for; "
            "add what is missing, or leave filters out."
        )
    return tuple(name for name in _EVERY_FILTER if name in filters)


def request_of(
    rows: Sequence[SequenceParams], size: int, filters: tuple[str, ...], vocab_size: int
) -> tuple[Request, np.ndarray]:
    """Arrays of ``size`` rows; padding rows are greedy and done from the start.

    The keys are the bare words of the seeds still, to be folded with the streams [B] beside them.
    """
    column = functools.partial(_column, rows, size)
    seeds = np.zeros((size, 2), np.uint32)
    for index, row in enumerate(rows):
        seeds[index] = (row.seed >> 32) & 0xFFFFFFFF, row.seed & 0xFFFFFFFF
    sampling = Sampling(
        temperature=column(lambda row: row.temperature, 0.0, np.float32),
        min_p=column(lambda row: row.min_p, 0.0, np.float32),
        top_k=column(lambda row: row.top_k, 0, np.int32),
        top_p=column(lambda row: max(row.top_p, _LEAST_TOP_P), 1.0, np.float32),
        processors=_processors_of(rows, size, set(filters) & set(processors.KINDS), vocab_size),
        names=tuple(name for name in filters if name in FILTERS),
    )
    limits = column(lambda row: len(row.prompt) + row.max_tokens, 1, np.int32)
    streams = column(lambda row: row.stream, 0, np.uint32)
    stops = _lists(rows, size, lambda row: row.stop_token_ids)
    return Request(seeds, sampling, stops, limits), streams


def _processors_of(
    rows: Sequence[SequenceParams], size: int, kinds: set[str], vocab_size: int
) -> LogitsProcessors | None:
    """The arrays of ``kinds``; None where there are none."""
    if not kinds:
        return None
    column = functools.partial(_column, rows, size)
    lists = functools.partial(_lists, rows, size)
    parts: dict[str, Any] = {}
    if "structured_outputs" in kinds:
        parts["automaton"] = automata.joined([row.grammar for row in rows], size)
    if "allowed_token_ids" in kinds:
        parts["allowed"] = _allowed(rows, size, vocab_size)
    if "bad_words" in kinds:
        parts["bad_words"] = _bad_words(rows, size)
    if "min_tokens" in kinds:
        parts["too_soon"] = lists(lambda row: row.too_soon)
        parts["least"] = column(lambda row: len(row.prompt) + row.min_tokens, 0, np.int32)
    if "logit_bias" in kinds:
        parts["biased"] = lists(lambda row: [token for token, _ in row.logit_bias])
        parts["bias"] = lists(lambda row: [bias for _, bias in row.logit_bias], np.float32)
    if "penalties" in kinds:
        parts["penalties"] = Penalties(
            presence=column(lambda row: row.presence_penalty, 0.0, np.float32),
            frequency=column(lambda row: row.frequency_penalty, 0.0, np.float32),
            repetition=column(lambda row: row.repetition_penalty, 1.0, np.float32),
        )
    if "logits_processors" in kinds:
        parts |= _processors(rows, size)
    return LogitsProcessors(prompt_length=column(lambda row: len(row.prompt), 1, np.int32), **parts)


def _processors(rows: Sequence[SequenceParams], size: int) -> dict[str, Any]:
    """Every (place in a row's order, function) once, and which rows want it."""
    wanted = [list(enumerate(row.logits_processors)) for row in rows]
    pairs = sorted(dict.fromkeys(pair for row in wanted for pair in row), key=lambda pair: pair[0])
    processes = np.zeros((size, len(pairs)), bool)
    for index, row in enumerate(wanted):
        processes[index] = [pair in row for pair in pairs]
    return {"processes": processes, "processors": tuple(function for _, function in pairs)}


def _allowed(rows: Sequence[SequenceParams], size: int, vocab_size: int) -> np.ndarray:
    allowed = np.ones((size, vocab_size), bool)
    for index, row in enumerate(rows):
        if row.allowed_token_ids:
            allowed[index] = False
            allowed[index, list(row.allowed_token_ids)] = True
    return allowed


def _bad_words(rows: Sequence[SequenceParams], size: int) -> np.ndarray:
    """int32 [B, W, L], right-aligned."""
    count = bucket(max(len(row.bad_words) for row in rows), smallest=1)
    length = bucket(max((len(word) for row in rows for word in row.bad_words), default=1), 1)
    words = np.full((size, count, length), -1, np.int32)
    for index, row in enumerate(rows):
        for place, word in enumerate(row.bad_words):
            words[index, place, length - len(word) :] = word
    return words


def _column(
    rows: Sequence[SequenceParams],
    size: int,
    value: Callable[[SequenceParams], Any],
    fill: float,
    dtype: type,
) -> np.ndarray:
    return np.array([value(row) for row in rows] + [fill] * (size - len(rows)), dtype)


def _lists(
    rows: Sequence[SequenceParams],
    size: int,
    values: Callable[[SequenceParams], Sequence],
    dtype: type = np.int32,
) -> np.ndarray:
    """[B, E], filled up with -1."""
    found = [list(values(row)) for row in rows]
    width = bucket(max(map(len, found), default=0), smallest=1)
    lists = np.full((size, width), -1, dtype)
    for index, row in enumerate(found):
        lists[index, : len(row)] = row
    return lists
