"""The host side of generation: check, group and pad sequences, prefill, decode, read answers.

Grouping, padding and order do not change a text: it depends on the sequence's own prompt, settings
and seed alone.
"""

import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.core import token_fsm, validation
from jspec.core.logprobs import Logprobs, Scoring
from jspec.core.types import Array, Drafter, History, Params, Request, Shared, Target
from jspec.drafters import NoDrafter
from jspec.engine.answers import Answer, answer_of
from jspec.engine.loop import DecodeState, Trace, decode, init_shared, init_stats, prefill
from jspec.engine.plan import Plan
from jspec.engine.sequences import (
    SequenceParams,
    check_fit,
    check_sequences,
    filters_of,
    request_of,
)
from jspec.util.buckets import bucket
from jspec.util.messages import did_you_mean, shown
from jspec.verify import Rule

PREFILL_CHUNK = 512  # tokens of a prompt per launch: bounds the memory of a prefill
MAX_NUM_SEQS = 32  # sequences decoded together
_SCORED_CHUNK = 32  # the same where prompts are scored, which needs logits [B, C, V]
_TILE_SLOTS = 16  # a kernel copies a cache that ends inside a tile of the device's memory layout
_NO_LIMIT = np.int32(2**31 - 1)  # rounds


@struct.dataclass
class Batch:
    """Sequences that run together, between two launches."""

    request: Request
    state: DecodeState
    prompt_lengths: np.ndarray = struct.field(pytree_node=False)  # [sequences], without padding
    shared: Shared = ()  # the drafter's state that outlives the batch
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
    """Continue every prompt with the target's own distribution.

    Prompt i draws with the noise of ``(seed, i)``. For different settings per prompt, pass
    ``SequenceParams`` to ``generate_sequences``.

    Args:
      target: the language model.
      params: its weights.
      prompts: lists of token ids.
      drafter: None for plain decoding.
      drafter_params: its weights.
      rule: a name in ``jspec.RULES``, or a ``jspec.verify.Rule``.
      max_new_tokens: most tokens of each answer.
      seed: of all noise.
      record_rounds: rounds to keep in ``Answer.trace``.
      **settings: of ``SequenceParams``, such as ``temperature`` and ``stop_token_ids``.

    Raises:
      ValueError: a setting is unknown or out of range; a prompt is no list of token ids or does
        not fit the model; target, drafter, rule and weights do not fit each other.
    """
    _check_names(settings)
    drafter = NoDrafter() if drafter is None else drafter
    plan = Plan(target, drafter, rule, record_rounds=record_rounds)
    settings |= {"max_tokens": max_new_tokens, "seed": seed}
    sequence = lambda index, prompt: SequenceParams(_token_ids(prompt), stream=index, **settings)
    sequences = [sequence(*numbered) for numbered in enumerate(prompts)]
    return generate_sequences(plan, Params(params, drafter_params), sequences)


def _check_names(settings: dict[str, Any]) -> None:
    fields = {field.name for field in dataclasses.fields(SequenceParams)}
    known = fields - {"prompt", "stream", "max_tokens"}
    for name in sorted(settings.keys() - known):
        guess = did_you_mean(name, [*known, *inspect.signature(generate).parameters])
        if name == "max_tokens":
            guess = "; give max_new_tokens"
        remedy = guess or "; see jspec.engine.sequences.SequenceParams."
        raise ValueError(f"generate has no setting {name!r}{remedy}")


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
    sequences: Sequence[SequenceParams],
    *,
    max_num_seqs: int = MAX_NUM_SEQS,
    scoring: Scoring | None = None,
) -> list[Answer]:
    """Generate all sequences, ``max_num_seqs`` at a time; answers are in their order."""
    options = dict(max_num_seqs=max_num_seqs, scoring=scoring)
    return generate_sharing(plan, params, sequences, init_shared(plan), **options)[0]


def generate_sharing(
    plan: Plan,
    params: Params,
    sequences: Sequence[SequenceParams],
    shared: Shared,
    *,
    max_num_seqs: int = MAX_NUM_SEQS,
    scoring: Scoring | None = None,
    price: Callable[[Plan, Params, Batch], Shared] = lambda _, __, batch: batch.shared,
) -> tuple[list[Answer], Shared]:
    """Generate sequences with a drafter's state that outlives calls, such as past responses.

    ``shared`` comes from ``jspec.engine.loop.init_shared`` or an earlier call, and is consumed:
    pass the returned one to the next call. ``price`` adds the costs of rounds to it, for plans that
    choose by costs: ``jspec.engine.costs.CostTable.price``.
    """
    check_sequences(sequences)
    answers: list[Answer | None] = [None] * len(sequences)
    filters = filters_of(sequences)  # one program for all groups
    for group in groups(sequences, max_num_seqs):
        members = [sequences[index] for index in group]
        batch = start(plan, params, members, filters=filters, scoring=scoring)
        batch = batch.replace(shared=shared)
        batch = advance(plan, params, batch.replace(shared=price(plan, params, batch)))
        shared = batch.shared
        for index, answer in zip(group, read(batch), strict=True):
            answers[index] = answer
    return answers, shared


def stream_sequences(
    plan: Plan, params: Params, sequences: Sequence[SequenceParams], *, rounds: int = 4
) -> Iterator[list[Answer]]:
    """Generate the sequences as one batch; yield their answers so far every ``rounds`` rounds."""
    batch = start(plan, params, sequences).replace(shared=init_shared(plan))
    answers: list[Answer] = []
    while not answers or not all(answer.finish_reason for answer in answers):
        batch = advance(plan, params, batch, rounds)
        answers = read(batch)
        yield answers


def groups(sequences: Sequence[SequenceParams], size: int) -> Iterator[list[int]]:
    """Yield groups of indices of sequences with similar lengths."""
    if size < 1:
        raise ValueError(f"max_num_seqs={size} must be at least 1.")
    length = lambda index: len(sequences[index].prompt) + sequences[index].max_tokens
    ordered = sorted(range(len(sequences)), key=length)
    for first in range(0, len(ordered), size):
        yield ordered[first : first + size]


def start(
    plan: Plan,
    params: Params,
    sequences: Sequence[SequenceParams],
    *,
    filters: Sequence[str] | None = None,
    scoring: Scoring | None = None,
) -> Batch:
    """Check and pad the sequences, allocate their state and prefill their prompts.

    ``Batch.shared`` is empty. To use a drafter's shared state, replace it:
    ``batch.replace(shared=shared)``. ``filters`` are the logits processors and sampling filters to
    compile, which include all that the sequences use; None compiles those in use.

    Raises:
      ValueError: there is no sequence, one does not fit the model, a name in ``filters`` is
        unknown or missing, ``scoring`` exceeds the vocabulary, or the weights belong to another
        model.
    """
    validation.check_params(plan.target, plan.drafter, params)
    check_sequences(sequences)
    if not sequences:
        raise ValueError("sequences=[] is empty; give at least one SequenceParams.")
    check_fit(sequences, plan.target)
    filters = filters_of(sequences, filters)
    if scoring is not None:
        scoring.check_fit(plan.target.vocab_size)
    size = bucket(len(sequences), smallest=1)
    longest = max(len(sequence.prompt) + sequence.max_tokens for sequence in sequences)
    needed = bucket(longest) + plan.drafter.max_depth + 1
    capacity = -(-needed // _TILE_SLOTS) * _TILE_SLOTS
    request, streams = request_of(sequences, size, filters, plan.target.vocab_size)
    prompts, lengths = _pad_prompts(sequences, size, capacity)
    done = np.arange(size) >= len(sequences)
    history = History(prompts, lengths, token_fsm.first_state(request.sampling.automaton))
    request, state = _allocate(plan, scoring, params, request, streams, history, done)
    scores = state.logprobs if scoring is not None and scoring.prompt else None
    width = _chunk_width(lengths, PREFILL_CHUNK if scores is None else _SCORED_CHUNK)
    state = _prefill_prompts(plan, params, state, prompts, lengths, width, scores)
    return Batch(request, state, lengths[: len(sequences)], scoring=scoring)


@functools.partial(jax.jit, static_argnames=("plan", "scoring"))
def _allocate(
    plan: Plan,
    scoring: Scoring | None,
    params: Params,
    request: Request,
    streams: Array,
    history: History,
    done: Array,
) -> tuple[Request, DecodeState]:
    """Derive the keys and allocate the state, in one launch instead of one per buffer."""
    keys = jax.random.wrap_key_data(request.keys, impl="threefry2x32")
    request = request.replace(keys=jax.vmap(jax.random.fold_in)(keys, streams))
    scores = None if scoring is None else scoring.empty(*history.tokens.shape)
    return request, _empty(plan, params, request, history, done).replace(logprobs=scores)


@functools.partial(jax.jit, static_argnames="plan")
def _empty(
    plan: Plan, params: Params, request: Request, history: History, done: Array
) -> DecodeState:
    """Return the state of a batch before its prompts are prefilled."""
    size, capacity = history.tokens.shape
    return DecodeState(
        history=history,
        cache=plan.target.init_cache(size, capacity),
        memory=plan.drafter.init(params, request, capacity),
        done=done,
        stats=init_stats(plan, size),
        round=jnp.int32(0),
    )


def with_prompts(
    plan: Plan, params: Params, batch: Batch, prompts: np.ndarray, lengths: np.ndarray
) -> Batch:
    """Return a copy of ``batch`` prefilled with other prompts, in the program compiled for it.

    ``batch`` is before its first round; ``prompts`` [B, S] fill its buffers up to ``lengths`` [B].
    """
    old = batch.state
    history = History(prompts, lengths, old.history.state)
    state = _empty(plan, params, batch.request, history, old.done).replace(logprobs=old.logprobs)
    width = _chunk_width(batch.prompt_lengths, PREFILL_CHUNK)
    return batch.replace(state=_prefill_prompts(plan, params, state, prompts, lengths, width))


def advance(plan: Plan, params: Params, batch: Batch, rounds: int | None = None) -> Batch:
    """Decode up to ``rounds`` more rounds (None: to the end). Consumes ``batch``."""
    state = batch.state
    until = jax.device_put(_NO_LIMIT) if rounds is None else state.round + rounds
    shared, state = decode(plan, params, batch.request, batch.shared, state, until)
    return batch.replace(shared=shared, state=state)


def cancel(batch: Batch, indices: Sequence[int]) -> Batch:
    """End sequences early, as at a stop string. Their length becomes their limit."""
    request, state = batch.request, batch.state
    ended = np.isin(np.arange(len(state.done)), indices)  # [B]: one shape for any number
    limit = jnp.where(ended, state.history.length, request.max_length)
    return batch.replace(
        request=request.replace(max_length=limit), state=state.replace(done=state.done | ended)
    )


def read(batch: Batch) -> list[Answer]:
    """Bring the tokens and statistics of the sequences to the host."""
    request, state = batch.request, batch.state
    stats = state.stats.replace(trace=_recorded(state.stats.trace, state.round))
    limits = request.stop_tokens, request.max_length
    host = jax.device_get((state.history, state.done, stats, *limits, state.logprobs))
    has_prompt = batch.scoring is not None and batch.scoring.prompt
    lengths = enumerate(batch.prompt_lengths)
    return [answer_of(host, index, int(length), has_prompt) for index, length in lengths]


def _recorded(trace: Trace | None, num_rounds: Array) -> Trace | None:
    """Return the rounds recorded so far: the buffers may hold far more."""
    if trace is None:
        return None
    count = bucket(int(num_rounds))  # few sizes, since each is a program
    return trace if count >= len(trace.accepted) else jax.tree.map(lambda x: x[:count], trace)


def _pad_prompts(
    sequences: Sequence[SequenceParams], size: int, capacity: int
) -> tuple[np.ndarray, np.ndarray]:
    prompts = np.zeros((size, capacity), np.int32)
    lengths = np.ones((size,), np.int32)  # padding holds one token, its root
    for index, sequence in enumerate(sequences):
        lengths[index] = len(sequence.prompt)
        prompts[index, : lengths[index]] = sequence.prompt
    return prompts, lengths


def _chunk_width(lengths: np.ndarray, most: int) -> int:
    return min(bucket(int(lengths.max()) - 1, smallest=16), most)


def _prefill_prompts(
    plan: Plan,
    params: Params,
    state: DecodeState,
    prompts: np.ndarray,
    lengths: np.ndarray,
    width: int,
    scores: Logprobs | None = None,
) -> DecodeState:
    """Prefill each prompt except its last token, ``width`` tokens per launch."""
    cache, memory = state.cache, state.memory
    for begin in range(0, int(lengths.max()) - 1, width):
        chunk = prompts[:, begin : begin + width + 1]
        chunk = np.pad(chunk, ((0, 0), (0, width + 1 - chunk.shape[1])))
        valid = np.clip(lengths - 1 - begin, 0, width).astype(np.int32)
        cache, memory, scores = prefill(
            plan, params, cache, memory, chunk, np.int32(begin), valid, scores
        )
    state = state.replace(cache=cache, memory=memory)
    return state if scores is None else state.replace(logprobs=scores)
