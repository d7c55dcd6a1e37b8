"""Distributions of the compiled program, by counting many rows of one batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import token_fsm
from jspec.core.types import History, Params, Request, Sampling
from jspec.engine.loop import DecodeState, decode
from jspec.tools.certify.statistics import excess as excess  # the package's own measure

# Many rows take longer to run than the program takes to compile with few optimisations.
_OPTIONS = {"xla_backend_optimization_level": 1}
_decode = jax.jit(
    decode.__wrapped__,
    static_argnames="plan",
    donate_argnames=("shared", "state"),
    compiler_options=_OPTIONS,
)
_LONGEST = 8  # tokens of a text, the first one included


def fresh_decode(plan):
    """Return ``decode`` traced anew, so that a test's patches take effect."""

    def run(params, request, shared, state, until):
        return decode.__wrapped__(plan, params, request, shared, state, until)

    return jax.jit(run, compiler_options=_OPTIONS)


def shipped_decode(plan):
    """Return ``decode`` as users call it; equal plans share a program."""
    return functools.partial(_decode, plan)


def texts(
    plan,
    params: Params,
    sampled: Sampling,
    num_tokens: int,
    *,
    seed=0,
    chunks=1,
    rounds=None,
    program=None,
):
    """Return texts of ``num_tokens`` <= 7 after token 0, one per row of ``sampled`` and chunk.

    Returns:
      int32 [rows, num_tokens] and how many of them each row has, [rows]: all, unless ``rounds``
      stops the program early.
    """
    program = program or shipped_decode(plan)
    batch = sampled.temperature.shape[0]
    parts = []
    for chunk in range(chunks):
        keys = jax.random.split(jax.random.key(1000 * seed + chunk), batch)
        limit = jnp.full((batch,), num_tokens + 1, jnp.int32)
        request = Request(keys, sampled, jnp.full((batch, 1), -1, jnp.int32), limit)
        until = jnp.int32(num_tokens if rounds is None else rounds)
        _, state = program(params, request, (), _start(plan, params, request), until)
        parts.append(jax.device_get((state.history.tokens, state.history.length)))
    tokens, length = (np.concatenate(part) for part in zip(*parts, strict=True))
    return tokens[:, 1 : num_tokens + 1], length - 1


def _start(plan, params, request):
    batch = request.max_length.shape[0]
    states = token_fsm.first_state(request.sampling.automaton)
    capacity = _LONGEST + plan.drafter.max_depth + 1  # the same for all: programs are shared
    return DecodeState(
        history=History(
            jnp.zeros((batch, capacity), jnp.int32), jnp.ones((batch,), jnp.int32), states
        ),
        cache=plan.target.init_cache(batch, capacity),
        memory=plan.drafter.init(params, request, capacity),
        done=jnp.zeros((batch,), bool),
        round=jnp.int32(0),
    )


def joint_distribution(transitions: np.ndarray, num_tokens: int) -> np.ndarray:
    """Return the distribution of ``num_tokens`` after token 0 of a Markov chain [V, V]: [V**n]."""
    vocab = len(transitions)
    probs = transitions[0]
    for _ in range(num_tokens - 1):
        probs = (probs.reshape(-1, vocab)[:, :, None] * transitions).ravel()
    return probs


def counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """Return how often each text occurs, [V**n], in lexicographic order."""
    powers = vocab_size ** np.arange(tokens.shape[1])[::-1]
    return np.bincount(tokens @ powers, minlength=vocab_size ** tokens.shape[1])


def distance(observed: np.ndarray, distribution: np.ndarray) -> float:
    """Return the total variation between frequencies and a distribution."""
    return 0.5 * float(np.abs(observed / observed.sum() - distribution).sum())


def noise_floor(distribution: np.ndarray, count: int) -> float:
    """Return the mean total variation of ``count`` draws from ``distribution`` itself."""
    return float(np.sqrt(distribution * (1 - distribution) / (2 * np.pi * count)).sum())
