"""One sequence to generate, and what it may ask for."""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jspec.core.filters import FILTERS
from jspec.core.logits_processors import PROCESSORS, LogitsProcessor
from jspec.core.parameters import Parameter
from jspec.core.types import Target
from jspec.grammar.automata import Grammar
from jspec.grammar.followed import FollowedGrammar
from jspec.util.messages import shown
from jspec.util.values import are_whole, is_function, is_real, is_whole, listed

# Every numeric parameter of sampling. The registries in core are their only list.
PARAMETERS: dict[str, Parameter] = FILTERS | {
    parameter.name: parameter
    for processor in PROCESSORS.values()
    for parameter in processor.parameters
}
_LISTS = ("prompt", "stop_token_ids", "late_token_ids", "logit_bias", "allowed_token_ids")
_LISTS += ("bad_words", "logits_processors")

_Parameters = dataclasses.make_dataclass(
    "_Parameters",
    [(name, type(entry.neutral), entry.neutral) for name, entry in PARAMETERS.items()],
    frozen=True,
    kw_only=True,
)


@dataclasses.dataclass(frozen=True)
class SequenceParams(_Parameters):
    """Everything that one sequence asks for; a value out of range raises ValueError.

    Every name in ``PARAMETERS`` is an attribute too, with the meaning that it has in
    ``jspec.SamplingParams``. Its default changes nothing: temperature 0, which is greedy.
    ``logits_processors`` apply in order. One that leaves no token where a ``grammar`` applies
    overrides the grammar there. All limits on tokens hold together; where they leave no token, the
    text ends with the finish reason "error".
    """

    prompt: tuple[int, ...]  # token ids, at least one
    max_tokens: int = 128
    stop_token_ids: tuple[int, ...] = ()  # the last token of an answer may be one
    seed: int = 0  # seed and ``stream`` are the address of the sequence's noise
    stream: int = 0  # distinguishes sequences of one seed
    min_tokens: int = 0  # to generate before stop and late tokens are allowed
    late_token_ids: tuple[int, ...] = ()  # do not end the text, but ``min_tokens`` forbids them too
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, bias)
    allowed_token_ids: tuple[int, ...] = ()  # () for all
    bad_words: tuple[tuple[int, ...], ...] = ()  # phrases of token ids
    logits_processors: tuple[LogitsProcessor, ...] = ()
    grammar: Grammar | None = None  # from ``automata.compiled``; None for any text
    # From ``followed.followed``: a grammar without an automaton, for an engine alone.
    followed_grammar: FollowedGrammar | None = None

    def __post_init__(self):
        for name in _LISTS:
            object.__setattr__(self, name, listed(name, getattr(self, name)))
        for name, parameter in PARAMETERS.items():
            object.__setattr__(self, name, parameter.resolve(parameter.value(self)))
        if not self.prompt:
            raise ValueError("prompt is empty; give at least one token (such as the BOS token).")
        ids = "token ids"
        up_to_all = is_whole(self.max_tokens) and is_whole(self.min_tokens, 0, self.max_tokens)
        are_functions = all(map(is_function, self.logits_processors))
        is_grammar = isinstance(self.grammar, Grammar | None)
        is_followed = isinstance(self.followed_grammar, FollowedGrammar | None)
        for name, holds, words in (
            ("prompt", are_whole(self.prompt), ids),
            ("max_tokens", is_whole(self.max_tokens, 1), "at least 1"),
            ("stop_token_ids", are_whole(self.stop_token_ids, 0), ids),
            ("seed", is_whole(self.seed, -(2**63), 2**64 - 1), "a whole number of at most 64 bits"),
            ("stream", is_whole(self.stream, 0, 2**32 - 1), "a whole number of at least 0"),
            ("min_tokens", up_to_all, "0 to max_tokens"),
            ("late_token_ids", are_whole(self.late_token_ids, 0), ids),
            ("logit_bias", all(map(_is_bias, self.logit_bias)), "(token id, number) pairs"),
            ("allowed_token_ids", are_whole(self.allowed_token_ids), ids),
            ("bad_words", all(map(_is_phrase, self.bad_words)), "runs of at least one token"),
            ("logits_processors", are_functions, "functions that can be hashed"),
            ("grammar", is_grammar, "what jspec.grammar.automata.compiled(...) returns, or None"),
            ("followed_grammar", is_followed, "a FollowedGrammar, or None"),
        ):
            if not holds:
                raise ValueError(f"{name}={shown(getattr(self, name))} must be {words}.")
        self._check_some_token_allowed()

    def _check_some_token_allowed(self) -> None:
        if self.allowed_token_ids and set(self.allowed_token_ids) <= set(self.too_soon):
            raise ValueError(
                f"allowed_token_ids={shown(self.allowed_token_ids)} all end a text, which "
                f"min_tokens={self.min_tokens} forbids at first; allow another token, or set "
                "min_tokens=0."
            )

    @property
    def too_soon(self) -> tuple[int, ...]:
        """The ids that are forbidden until ``min_tokens`` tokens are generated."""
        return (*self.stop_token_ids, *self.late_token_ids) if self.min_tokens else ()

    @property
    def token_ids(self) -> Iterator[tuple[str, int]]:
        """The (parameter, token id) pairs of ids whose logits it changes."""
        yield from (("logit_bias", token) for token, _ in self.logit_bias)
        yield from (("allowed_token_ids", token) for token in self.allowed_token_ids)
        yield from (("bad_words", token) for word in self.bad_words for token in word)


def _is_bias(pair: Any) -> bool:
    is_pair = isinstance(pair, tuple | list) and len(pair) == 2
    return is_pair and is_whole(pair[0]) and is_real(pair[1])


def _is_phrase(word: Any) -> bool:
    return isinstance(word, tuple | list) and len(word) > 0 and are_whole(word)


def check_priority(priority: Any) -> None:
    """Raise ValueError unless a priority can be compared with all others."""
    if not is_whole(priority, -(2**63), 2**63 - 1):
        raise ValueError(
            f"priority={shown(priority)} must be a whole number of at most 64 bits; leave it out "
            "for 0, and give a lower one to what runs first."
        )


def check_sizes(**sizes: int | None) -> None:
    """Refuse sizes of an engine that are out of range; ``max_num_queued`` may be None."""
    for name, value in sizes.items():
        is_default = value is None and name == "max_num_queued"
        if not is_default and not is_whole(value, 1):
            raise ValueError(f"{name}={shown(value)} must be whole and at least 1.")


def check_capacity(sequence: SequenceParams, capacity: int) -> None:
    """Raise ValueError if a sequence may become longer than an engine's capacity."""
    total = len(sequence.prompt) + sequence.max_tokens
    if total > capacity:
        raise ValueError(
            f"prompt and max_tokens={sequence.max_tokens} are {total} tokens together, more "
            f"than the engine's capacity={capacity}; shorten one of them."
        )


def check_prompt(index: int, prompt: Sequence[int], vocab_size: int) -> None:
    """Raise ValueError if a non-empty prompt holds an id outside the vocabulary."""
    if min(prompt) < 0 or max(prompt) >= vocab_size:
        wrong = next(token for token in prompt if not 0 <= token < vocab_size)
        raise ValueError(
            f"prompt {index} holds token id {wrong}, outside the vocabulary of {vocab_size} "
            "tokens; was it made by another tokenizer?"
        )


def check_sequences(sequences: Sequence[SequenceParams]) -> None:
    """Raise ValueError if it is not a list of ``SequenceParams``."""
    is_list = isinstance(sequences, Sequence)
    if not is_list or not all(isinstance(each, SequenceParams) for each in sequences):
        raise ValueError(f"sequences={shown(sequences, 60)} must be a list of SequenceParams.")


def check_fit(sequences: Sequence[SequenceParams], target: Target) -> None:
    """Raise ValueError if a sequence does not fit the target.

    It is too long, names an unknown token, or has a logits processor that cannot be traced.
    """
    for index, sequence in enumerate(sequences):
        total = len(sequence.prompt) + sequence.max_tokens
        if total > target.max_positions:
            raise ValueError(
                f"prompt {index} has {len(sequence.prompt)} tokens and "
                f"max_tokens={sequence.max_tokens}, together {total}, but the model has "
                f"{target.max_positions} positions; shorten one of them."
            )
        check_prompt(index, sequence.prompt, target.vocab_size)
        for name, token in sequence.token_ids:
            if not 0 <= token < target.vocab_size:
                raise ValueError(
                    f"{name} of prompt {index} holds token id {token}, outside the vocabulary of "
                    f"{target.vocab_size} tokens; leave it out."
                )
        for function in sequence.logits_processors:
            _check_processor(index, function, target.vocab_size, total)


def _check_processor(index: int, function: LogitsProcessor, vocab_size: int, total: int) -> None:
    """Trace a function of the user alone: an error inside a program would end all sequences."""
    logits = jax.ShapeDtypeStruct((vocab_size,), jnp.float32)
    tokens, length = (jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((total,), ()))
    try:
        out = jax.eval_shape(function, logits, tokens, length)
    except Exception as error:
        first = str(error).strip().partition("\n")[0]
        raise ValueError(
            f"logits_processors of prompt {index}: {shown(function, 60)} raised "
            f"{type(error).__name__}: {first}; it must be a pure function that JAX can trace."
        ) from error
    if getattr(out, "shape", None) != logits.shape or not jnp.issubdtype(out.dtype, jnp.floating):
        raise ValueError(
            f"logits_processors of prompt {index}: {shown(function, 60)} returned "
            f"{shown(out, 60)} for logits [{vocab_size}]; return logits of that shape."
        )
