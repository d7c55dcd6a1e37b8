"""The host side of a generation: check, group, pad, prefill, decode, unpad.

Rows are grouped, padded to shape buckets and sorted as the host likes: a row's text depends on its
own prompt, settings and seed alone.
"""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.core import logits_processors, validation
from jspec.core.kv_cache import KVCache
from jspec.core.logprobs import Logprobs, Scoring
from jspec.core.types import Array, Drafter, History, Memory, Params, Request, Shared, Target
from jspec.drafters import NoDrafter
from jspec.engine.loop import DecodeState, Trace, decode, init_shared, init_stats, prefill
from jspec.engine.plan import Plan
from jspec.engine.sequences import (
    SequenceParams,
    check_fit,
    check_sequences,
    filters_for,
    filters_of,
    request_of,
)
from jspec.util.buckets import bucket
from jspec.util.messages import did_you_mean, shown
from jspec.verify import Rule

PREFILL_CHUNK = 512  # tokens of a prompt taken in at once: bounds the memory of a prefill
MAX_NUM_SEQS = 32  # rows decoded together
_SCORED_CHUNK = 32
_TILE_SLOTS = 16  # a kernel copies a cache that ends inside a tile of the device's memory layout
_FOREVER = np.int32(2**31 - 1)


@dataclasses.dataclass(frozen=True)
class Answer:
    """What one row generated.

    Attributes:
      tokens: int32 [n], the generated ids, a stop token included.
      finish_reason: ``"stop"``, ``"length"``, None while the row runs, or ``"error"``: the target
        gave no token any weight (NaN, or all of them forbidden), and these came before.
      stop_token: the id that ended the row, or None.
      rounds: passes of the target.
      drafts: rounds that had at least one drafted token.
      drafted: drafted tokens.
      accepted: int [K+1], how many drafts had 0..K tokens accepted.
      trace: (accepted, tokens, parents) of each recorded round, or None.
      logprobs: of ``tokens``, or None.
      prompt_logprobs: of the prompt's tokens but the first, or None.
      steps: (accepted, drafted), how many of each recorded round, or None.
    """

    tokens: np.ndarray
    finish_reason: str | None
    stop_token: int | None
    rounds: int
    drafts: int
    drafted: int
    accepted: np.ndarray
    trace: tuple[np.ndarray, np.ndarray, np.ndarray] | None = None
    logprobs: Logprobs | None = None
    prompt_logprobs: Logprobs | None = None
    steps: tuple[np.ndarray, np.ndarray] | None = None

    @property
    def acceptance_length(self) -> float:
        """Mean tokens a pass of the target emitted, bonus included: 1.0 is no gain."""
        return len(self.tokens) / max(self.rounds, 1)


@struct.dataclass
class Batch:
    """Rows in flight: what a caller holds between slices of a generation."""

    request: Request
    state: DecodeState
    prompt_lengths: np.ndarray = struct.field(pytree_node=False)  # [rows], without padding rows
    shared: Shared = ()  # what the drafter keeps for all calls
    scoring: Scoring | None = struct.field(pytree_node=False, default=None)


def generate(
    target: Target,
    params: Any,
    prompts: Sequence[Sequence[int]],
    *,
    drafter: Drafter | None = None,
    drafter_params: Any = None,
    rule: str | Rule = "rejection",
    max_new_tokens: int = 128,
    seed: int = 0,
    record_rounds: int = 0,
    **settings: Any,
) -> list[Answer]:
    """Continues every prompt (token ids) with the target's own distribution.

    Row i draws with noise of ``(seed, i)``. For settings of each row's own build each a ``SequenceParams`` and
    call ``generate_sequences``.

    Args:
      target: the language model.
      params: its weights.
      prompts: token ids.
      drafter: None for plain decoding.
      drafter_params: its weights.
      rule: how drafts are accepted: a name in ``jspec.RULES``, or a ``jspec.verify.Rule``.
      max_new_tokens: most tokens of each.
      seed: of all noise.
      record_rounds: rounds to keep in ``Answer.trace``.
      **settings: of ``SequenceParams``, such as ``temperature`` and ``stop_token_ids``.

    Raises:
      ValueError: a setting is unknown or out of range, a prompt is no list of token ids or does
        not fit the model, or target, drafter and weights are not what they must be.
    """
    _check_settings(settings)
    drafter = NoDrafter() if drafter is None else drafter
    plan = Plan(target, drafter, rule, record_rounds=record_rounds)
    settings |= {"max_tokens": max_new_tokens, "seed": seed}
    rows = [
        SequenceParams(_token_ids(prompt), stream=index, **settings)
        for index, prompt in enumerate(prompts)
    ]
    return generate_sequences(plan, Params(params, drafter_params), rows)


def _check_settings(settings: dict[str, Any]) -> None:
    known = {field.name for field in dataclasses.fields(SequenceParams)} - {
        "prompt",
        "stream",
        "max_tokens",
    }
    for name in sorted(settings.keys() - known):
        guess = (
            "; give max_new_tokens"
            if name == "max_tokens"
            else did_you_mean(name, [*known, *inspect.signature(generate).parameters])
        )
        raise ValueError(f"generate has no setting {name!r}{guess or '; see jspec.engine.sequences.SequenceParams.'}")


def _token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    try:
        return tuple(map(operator.index, prompt))
    except TypeError:
        raise ValueError(
            f"prompts hold {shown(prompt, 60)}, but each must be a list of token ids, as in "
            "[[1, 2, 3]]; jspec.LLM takes text."
        ) from None


def generate_sequences(
    plan: Plan,
    params: Params,
    rows: Sequence[SequenceParams],
    *,
    max_num_seqs: int = MAX_NUM_SEQS,
    scoring: Scoring | None = None,
) -> list[Answer]:
    """Generates all rows, ``max_num_seqs`` at a time; answers come in the order of ``rows``."""
    return generate_sharing(
        plan, params, rows, init_shared(plan), max_num_seqs=max_num_seqs, scoring=scoring
    )[0]


def generate_sharing(
    plan: Plan,
    params: Params,
    rows: Sequence[SequenceParams],
    shared: Shared,
    *,
    max_num_seqs: int = MAX_NUM_SEQS,
    scoring: Scoring | None = None,
) -> tuple[list[Answer], Shared]:
    """``generate_sequences`` with what the drafter keeps for all calls, such as past responses.

    ``shared`` comes from ``jspec.decode.init_shared`` or an earlier call, and is consumed: pass
    what is returned to the next call.
    """
    check_sequences(rows)
    answers: list[Answer | None] = [None] * len(rows)
    for group in groups(rows, max_num_seqs):
        batch = start(
            plan,
            params,
            [rows[index] for index in group],
            filters=filters_of(rows),
            scoring=scoring,
        )
        batch = advance(plan, params, batch.replace(shared=shared))
        shared = batch.shared
        for index, answer in zip(group, read(batch), strict=True):
            answers[index] = answer
    return answers, shared


def stream_rows(
    plan: Plan, params: Params, rows: Sequence[SequenceParams], *, rounds: int = 4
) -> Iterator[list[Answer]]:
    """Generates the rows as one batch and yields their answers so far every ``rounds`` rounds."""
    batch = start(plan, params, rows).replace(shared=init_shared(plan))
    while True:
        batch = advance(plan, params, batch, rounds)
        answers = read(batch)
        yield answers
        if all(answer.finish_reason for answer in answers):
            return


def groups(rows: Sequence[SequenceParams], size: int) -> Iterator[list[int]]:
    """Indices of rows to run together, rows of like length in one group."""
    if size < 1:
        raise ValueError(f"max_num_seqs={size} must be at least 1.")
    ordered = sorted(range(len(rows)), key=lambda i: len(rows[i].prompt) + rows[i].max_tokens)
    for first in range(0, len(ordered), size):
        yield ordered[first : first + size]


def start(
    plan: Plan,
    params: Params,
    rows: Sequence[SequenceParams],
    *,
    filters: tuple[str, ...] | None = None,
    scoring: Scoring | None = None,
) -> Batch:
    """Checks and pads the rows, allocates their state and takes in their prompts.

    ``filters`` are those that the program is for, if more than the rows need; ``scoring`` is what is
    to be known of their tokens.

    What the drafter keeps for all calls is the caller's: ``batch.replace(shared=shared)``. Without
    it such a drafter does what it can for the rows by themselves.

    Raises:
      ValueError: there is no row, one does not fit the model or needs more ``filters``, more tokens
        are to be scored than there are, or the weights are of another model.
    """
    validation.check_params(plan.target, plan.drafter, params)
    check_sequences(rows, 1)
    check_fit(rows, plan.target)
    filters = filters_for(rows, filters)
    if scoring is not None:
        scoring.check_fit(plan.target.vocab_size)
    size = bucket(len(rows), smallest=1)
    longest = max(len(row.prompt) + row.max_tokens for row in rows)
    needed = bucket(longest) + plan.drafter.max_depth + 1
    capacity = -(-needed // _TILE_SLOTS) * _TILE_SLOTS
    asked = request_of(rows, size, filters, plan.target.vocab_size)
    prompts, lengths = _pad_prompts(rows, size, capacity)
    done = np.arange(size) >= len(rows)
    history = History(prompts, lengths, logits_processors.first_state(asked[0].sampling.processors))
    request, state = _allocate(plan, scoring, params, asked, history, done)
    wanted = state.logprobs if scoring is not None and scoring.prompt else None
    # Scores need logits of every position, as many numbers as there are tokens in the vocabulary.
    width = _chunk_width(int(lengths.max()) - 1, PREFILL_CHUNK if wanted is None else _SCORED_CHUNK)
    cache, memory, asked_for = _take_in(
        plan, params, state.cache, state.memory, prompts, lengths, width, wanted
    )
    scores = state.logprobs if asked_for is None else asked_for
    state = state.replace(cache=cache, memory=memory, logprobs=scores)
    return Batch(request, state, lengths[: len(rows)], scoring=scoring)


@functools.partial(jax.jit, static_argnames=("plan", "scoring"))
def _allocate(
    plan: Plan,
    scoring: Scoring | None,
    params: Params,
    asked: tuple[Request, Array],
    history: History,
    done: Array,
) -> tuple[Request, DecodeState]:
    """Everything that a batch starts with, in one launch instead of one a buffer."""
    request, streams = asked
    keys = jax.random.wrap_key_data(request.keys, impl="threefry2x32")
    request = request.replace(keys=jax.vmap(jax.random.fold_in)(keys, streams))
    scores = None if scoring is None else scoring.empty(*history.tokens.shape)
    return request, _empty(plan, params, request, history, done).replace(logprobs=scores)


@functools.partial(jax.jit, static_argnames="plan")
def _empty(
    plan: Plan, params: Params, request: Request, history: History, done: Array
) -> DecodeState:
    """The state of a batch whose prompts are not taken in yet."""
    size, capacity = history.tokens.shape
    return DecodeState(
        history=history,
        cache=plan.target.init_cache(size, capacity),
        memory=plan.drafter.init(params, request, capacity),
        done=done,
        stats=init_stats(plan, size),
        round=jnp.int32(0),
    )


def elsewhere(
    plan: Plan, params: Params, batch: Batch, prompts: np.ndarray, lengths: np.ndarray
) -> Batch:
    """What ``batch`` were, had its rows had other prompts; ``batch`` itself stays as it is.

    Args:
      plan: static.
      params: weights.
      batch: as it starts. The prompts are taken in as many tokens at a time as its own were, by
        the program that is compiled already unless prompts are scored: scores are not.
      prompts: token ids, int32 [B, S], as many as its buffers hold.
      lengths: of the prompts, int32 [B].
    """
    old = batch.state
    history = History(prompts, lengths, old.history.state)
    state = _empty(plan, params, batch.request, history, old.done)
    width = _chunk_width(int(batch.prompt_lengths.max()) - 1)
    cache, memory, _ = _take_in(plan, params, state.cache, state.memory, prompts, lengths, width)
    state = state.replace(cache=cache, memory=memory, logprobs=old.logprobs)
    return batch.replace(state=state)


def advance(plan: Plan, params: Params, batch: Batch, rounds: int | None = None) -> Batch:
    """Decodes up to ``rounds`` more rounds (None: to the end). Consumes ``batch``."""
    state = batch.state
    until = jax.device_put(_FOREVER) if rounds is None else state.round + rounds
    shared, state = decode(plan, params, batch.request, batch.shared, state, until)
    return batch.replace(shared=shared, state=state)


def cancel(batch: Batch, rows: Sequence[int]) -> Batch:
    """Ends rows early, as when the host finds a stop string; where they are is their limit then."""
    request, state = batch.request, batch.state
    ended = np.isin(np.arange(len(state.done)), rows)  # [B]: of one shape, however many they are
    limit = jnp.where(ended, state.history.length, request.max_length)
    return batch.replace(
        request=request.replace(max_length=limit), state=state.replace(done=state.done | ended)
    )


def read(batch: Batch) -> list[Answer]:
    """Brings the rows' tokens and counts to the host."""
    state = batch.state
    request = batch.request
    stats = state.stats.replace(trace=_until(state.round, state.stats.trace))
    host = jax.device_get(
        (state.history, state.done, stats, request.stop_tokens, request.max_length, state.logprobs)
    )
    has_prompt = batch.scoring is not None and batch.scoring.prompt
    return [
        _answer(host, row, int(start), has_prompt) for row, start in enumerate(batch.prompt_lengths)
    ]


def _until(round_index: Array, trace: Trace | None) -> Trace | None:
    """What was recorded so far: room for the longest of texts may be far more."""
    if trace is None:
        return None
    count = bucket(int(round_index))  # few sizes, as each is a program
    return trace if count >= len(trace.accepted) else jax.tree.map(lambda x: x[:count], trace)


def _answer(host, row: int, prompt_length: int, has_prompt: bool) -> Answer:
    history, done, stats, stop_tokens, max_length, scores = host
    part = lambda first, end: jax.tree.map(lambda x: x[row, first:end].copy(), scores)
    tokens = history.tokens[row, prompt_length : history.length[row]].copy()
    stops = set(stop_tokens[row].tolist()) - {-1}
    stop_token = int(tokens[-1]) if len(tokens) and int(tokens[-1]) in stops else None
    reason = None
    if done[row]:
        full = history.length[row] >= max_length[row]
        reason = "stop" if stop_token is not None else "length" if full else "error"
    steps = trace = None
    if stats.trace is not None:
        ran = stats.trace.accepted[:, row] >= 0
        kept = jax.tree.map(lambda part: part[ran, row], stats.trace)
        steps = kept.accepted, kept.drafted
        trace = None if kept.tokens is None else (kept.accepted, kept.tokens, kept.parents)
    return Answer(
        tokens=tokens,
        finish_reason=reason,
        stop_token=stop_token,
        rounds=int(stats.rounds[row]),
        drafts=int(stats.drafts[row]),
        drafted=int(stats.drafted[row]),
        accepted=stats.accepted[row].copy(),
        steps=steps,
        trace=trace,
        logprobs=None if scores is None else part(prompt_length, history.length[row]),
        prompt_logprobs=part(1, prompt_length) if has_prompt else None,
    )


def _pad_prompts(
    rows: Sequence[SequenceParams], size: int, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    prompts = np.zeros((size, capacity), np.int32)
    lengths = np.ones((size,), np.int32)  # a padding row holds one token: it has a root
    for index, row in enumerate(rows):
        prompts[index, : len(row.prompt)] = row.prompt
        lengths[index] = len(row.prompt)
    return prompts, lengths


def _chunk_width(longest: int, most: int = PREFILL_CHUNK) -> int:
    """Tokens taken in at once of prompts that have so many to take in."""
    return min(bucket(longest, smallest=16), most)


def _take_in(
    plan: Plan,
    params: Params,
    cache: KVCache,
    memory: Memory,
    prompts: np.ndarray,
    lengths: np.ndarray,
    width: int,
    scores: Logprobs | None = None,
) -> tuple[KVCache, Memory, Logprobs | None]:
    """Prefills all but each prompt's last token, ``width`` tokens at a time."""
    wanted = lengths - 1
    for begin in range(0, int(wanted.max()), width):
        chunk = prompts[:, begin : begin + width + 1]
        chunk = np.pad(chunk, ((0, 0), (0, width + 1 - chunk.shape[1])))
        valid = np.clip(wanted - begin, 0, width)
        cache, memory, scores = prefill(
            plan, params, cache, memory, chunk, np.int32(begin), valid.astype(np.int32), scores
        )
    return cache, memory, scores
