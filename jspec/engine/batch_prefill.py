"""The prompts of a batch by hand: all of them are prefilled side by side, padded to the longest."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import token_fsm
from jspec.core.logprobs import Logprobs, Scoring
from jspec.core.types import Params, Request
from jspec.engine import answers, chunks, slots
from jspec.engine.loop import DecodeState, prefill
from jspec.engine.plan import Plan
from jspec.engine.sequences import SequenceParams


def prefilled(
    plan: Plan,
    params: Params,
    request: Request,
    sequences: Sequence[SequenceParams],
    scoring: Scoring | None,
) -> tuple[DecodeState, list[Logprobs | None]]:
    """Return the state of a batch behind its prompts, and the scores of each prompt, if any.

    Rows of ``request`` without a sequence are done.
    """
    batch, prompts = len(request.max_length), [sequence.prompt for sequence in sequences]
    longest = max(len(sequence.prompt) + sequence.max_tokens for sequence in sequences)
    scoring = scoring if scoring and scoring.prompt else None
    size = slots.buffer_size(plan, longest)
    state = slots.allocate(plan, params, batch, size, has_pages=False)
    history, tokens, done = state.history, np.zeros((batch, size), np.int32), np.ones(batch, bool)
    for row, prompt in enumerate(prompts):
        tokens[row, : len(prompt)], done[row] = prompt, len(prompt) > 1
    history = history.replace(tokens=jnp.asarray(tokens))
    state = state.replace(history=history, done=jnp.asarray(done))
    sizes, starts, parts = chunks.sizes_of_all(batch, scoring), np.zeros(len(prompts), int), []
    while (left := np.array([len(prompt) - 1 for prompt in prompts]) - starts).any():
        chunk = chunks.choose(left.tolist(), sizes, (size - starts).tolist())
        arrays = chunks.assemble(prompts, starts.tolist(), chunk)
        state, part = prefill(plan, params, state, *arrays, scoring=scoring)
        parts.append(jax.device_get(part))
        starts += arrays.valid[: len(prompts)]
    states = token_fsm.first_state(request.sampling.automaton)
    state = state.replace(history=state.history.replace(state=states))
    if scoring is None:
        return state, [None] * len(prompts)
    scores = [answers.prompt_scores(scoring, parts, row) for row in range(len(prompts))]
    return state, [each[: len(prompt) - 1] for each, prompt in zip(scores, prompts, strict=True)]
