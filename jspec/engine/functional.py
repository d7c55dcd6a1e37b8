"""Generation over the engine, and one batch by hand: start it, advance it, cancel rows.

Grouping, padding and order do not change a text: it depends on the sequence's own prompt, settings
and seed alone.
"""

import collections
import dataclasses
import functools
import inspect
import operator
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from jspec.core import validation
from jspec.core.types import Array, Drafter, Params, Request, Shared, Target
from jspec.drafters.none import NoDrafter
from jspec.engine import answers as results
from jspec.engine import loop, slots
from jspec.engine.answers import Answer
from jspec.engine.batch_prefill import prefilled
from jspec.engine.engine import Engine
from jspec.engine.launches import Launch
from jspec.engine.loop import DecodeState, init_shared, launch
from jspec.engine.plan import Plan
from jspec.engine.profile import Profile, request_of
from jspec.engine.sequences import SequenceParams, check_fit, check_sequences
from jspec.util.messages import did_you_mean, shown
from jspec.util.values import bucket
from jspec.verify import Rule

MAX_NUM_SEQS = 32  # sequences decoded together
_PLAIN = Profile()


@struct.dataclass
class Batch:
    """Sequences that run together, between two launches."""

    request: Request
    state: DecodeState
    sequences: tuple[SequenceParams, ...] = struct.field(pytree_node=False)  # without padding
    answers: tuple[Answer, ...] = struct.field(pytree_node=False)  # so far
    shared: Shared = ()  # the drafter's state that outlives the batch
    profile: Profile = struct.field(pytree_node=False, default=_PLAIN)


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
    record_nodes: bool = False,
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
      record_nodes: whether to keep the drafted trees, for ``Answer.trace``.
      **settings: of ``SequenceParams``, such as ``temperature`` and ``stop_token_ids``.

    Raises:
      ValueError: a setting is unknown or out of range; a prompt is no list of token ids or does
        not fit the model; target, drafter, rule and weights do not fit each other.
    """
    _check_names(settings)
    drafter = NoDrafter() if drafter is None else drafter
    plan, profile = Plan(target, drafter, rule), Profile(nodes=record_nodes)
    settings |= {"max_tokens": max_new_tokens, "seed": seed}
    sequences = [
        SequenceParams(_token_ids(prompt), stream=index, **settings)
        for index, prompt in enumerate(prompts)
    ]
    return generate_sequences(plan, Params(params, drafter_params), sequences, profile=profile)


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
    validation.check_on_host("prompts", prompt)
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
    profile: Profile = _PLAIN,
) -> list[Answer]:
    """Generate all sequences, ``max_num_seqs`` at a time; answers are in their order."""
    options = dict(max_num_seqs=max_num_seqs, profile=profile)
    return generate_sharing(plan, params, sequences, init_shared(plan), **options)[0]


def generate_sharing(
    plan: Plan,
    params: Params,
    sequences: Sequence[SequenceParams],
    shared: Shared,
    *,
    max_num_seqs: int = MAX_NUM_SEQS,
    profile: Profile = _PLAIN,
) -> tuple[list[Answer], Shared]:
    """Generate sequences with a drafter's state that outlives calls, such as past responses.

    ``shared`` comes from ``jspec.engine.loop.init_shared`` or an earlier call, and is consumed:
    pass the returned one to the next call.
    """
    check_sequences(sequences)
    if not sequences:
        return [], shared
    engine = engine_of(plan, params, sequences, max_num_seqs, profile, shared)
    answers = engine.run(sequences, scoring=profile.scoring)
    return answers, engine.shared


def engine_of(
    plan: Plan,
    params: Params,
    sequences: Sequence[SequenceParams],
    max_num_seqs: int,
    profile: Profile = _PLAIN,
    shared: Shared | None = None,
) -> Engine:
    """Return an engine with as many and as long slots as the sequences need."""
    if max_num_seqs < 1:
        raise ValueError(f"max_num_seqs={max_num_seqs} must be at least 1.")
    check_fit(sequences, plan.target)
    longest = max(len(sequence.prompt) + sequence.max_tokens for sequence in sequences)
    num_slots = min(bucket(len(sequences), smallest=1), max_num_seqs)
    options = dict(num_slots=num_slots, capacity=bucket(longest), profile=profile, shared=shared)
    return Engine(plan, params, **options)


def start(
    plan: Plan,
    params: Params,
    sequences: Sequence[SequenceParams],
    *,
    profile: Profile = _PLAIN,
) -> Batch:
    """Check and pad the sequences, allocate their state and prefill their prompts.

    ``Batch.shared`` is empty. To use a drafter's shared state, replace it:
    ``batch.replace(shared=shared)``. ``profile`` grows by what the sequences ask for.

    Raises:
      ValueError: there is no sequence, one does not fit the model, ``profile`` scores more tokens
        than the vocabulary has, or the weights belong to another model.
    """
    validation.check_params(plan.target, plan.drafter, params)
    check_sequences(sequences)
    if not sequences:
        raise ValueError("sequences=[] is empty; give at least one SequenceParams.")
    check_fit(sequences, plan.target)
    for index, sequence in enumerate(sequences):
        if sequence.followed_grammar is not None:
            raise ValueError(
                f"the grammar of prompt {index} (structured_outputs) has no automaton, so an "
                "Engine must follow it; use LLM.generate or generate_sequences."
            )
    profile, scoring = profile.grown(sequences), profile.scoring
    if scoring is not None:
        scoring.check_fit(plan.target.vocab_size)
    rows = [*sequences, *[None] * (bucket(len(sequences), smallest=1) - len(sequences))]
    request, streams = request_of(rows, profile, plan.target.vocab_size)
    state, scores = prefilled(plan, params, request, sequences, scoring)
    begun = results.empty(plan.drafter.max_depth)
    answers = tuple(dataclasses.replace(begun, prompt_logprobs=each) for each in scores)
    request = slots.with_keys(request, streams)
    return Batch(request, state, tuple(sequences), answers, profile=profile)


def advance(plan: Plan, params: Params, batch: Batch, rounds: int | None = None) -> Batch:
    """Decode up to ``rounds`` more rounds (None: to the end). Consumes ``batch``.

    A plan with a choice of K drafts the longest; ``plan.at_length`` gives another one.
    Each launch is dispatched before the one before it is read.
    """
    left, unread = rounds, collections.deque()
    unwatched = np.zeros(batch.state.done.shape, bool)
    while left != 0 and not all(answer.finish_reason for answer in batch.answers):
        count = batch.profile.rounds if left is None else min(left, batch.profile.rounds)
        left = left and left - count
        shared, state, ran = launch(
            plan,
            batch.profile,
            params,
            batch.request,
            batch.shared,
            batch.state,
            np.int32(count),
            unwatched,
        )
        batch = batch.replace(shared=shared, state=state)
        unread.append(ran)
        if len(unread) > 1:
            batch = _read(batch, unread.popleft())
    return functools.reduce(_read, unread, batch)


def _read(batch: Batch, ran: Launch) -> Batch:
    """Add the results of a launch to the answers."""
    ran = jax.device_get(ran)
    answers = tuple(
        answer
        if answer.finish_reason
        else results.extended(answer, ran, row, sequence.stop_token_ids, sequence.max_tokens)
        for row, (answer, sequence) in enumerate(zip(batch.answers, batch.sequences, strict=True))
    )
    return batch.replace(answers=answers)


def decode(
    plan: Plan,
    params: Params,
    request: Request,
    shared: Shared,
    state: DecodeState,
    until: Array | int,
) -> tuple[Shared, DecodeState]:
    """Run rounds until every sequence is done or ``state.round`` reaches ``until`` (int32 []).

    One ``lax.while_loop`` on the device. ``plan`` is static; ``shared`` and ``state`` are consumed.
    A second call with a larger ``until``, a number or an array, continues in the same program. It
    may be called inside ``jax.jit``.

    Raises:
      ValueError: ``until`` is no whole number.
    """
    if not jnp.issubdtype(jnp.result_type(until), jnp.integer):
        raise ValueError(f"until={shown(until)} must be a whole number; count rounds in an int.")
    # A Python int has another type than an array, so it would compile another program.
    return loop.decode(plan, params, request, shared, state, jnp.asarray(until, jnp.int32))


def cancel(plan: Plan, batch: Batch, indices: Sequence[int]) -> Batch:
    """End sequences early, as at a stop string. Consumes ``batch``."""
    rows = np.isin(np.arange(len(batch.state.done)), indices)  # [B]: one shape for any number
    request, shared, state = loop.cancel(plan, batch.request, batch.shared, batch.state, rows)
    answers = tuple(
        dataclasses.replace(answer, finish_reason="length")
        if index in indices and not answer.finish_reason
        else answer
        for index, answer in enumerate(batch.answers)
    )
    return batch.replace(request=request, shared=shared, state=state, answers=answers)


def copied(batch: Batch) -> Batch:
    """Return a copy that may be consumed."""
    state, shared = jax.tree.map(jnp.copy, (batch.state, batch.shared))
    return jax.block_until_ready(batch.replace(state=state, shared=shared))
