"""Laws of the compiled program, by counting many rows of one batch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core import logits_processors
from jspec.core.types import History, Params, Request, Sampling
from jspec.engine.loop import DecodeState, decode, init_stats
from jspec.tools.certify.statistics import excess as excess  # what the package measures with, too

# Many rows take longer to run than a program to compile, if LLVM leaves all as it is.
_OPTIONS = {"xla_backend_optimization_level": 1}
_decode = jax.jit(
    decode.__wrapped__,
    static_argnames="plan",
    donate_argnames=("shared", "state"),
    compiler_options=_OPTIONS,
)
_LONGEST = 8  # tokens of a text, the first one included


def fresh_decode(plan):
    """``decode`` traced anew, so that what a test has patched is what runs."""

    def run(params, request, shared, state, until):
        return decode.__wrapped__(plan, params, request, shared, state, until)

    return jax.jit(run, compiler_options=_OPTIONS)


def shipped_decode(plan):
    """``decode`` as users call it; equal plans share a program."""
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
    """Texts of ``num_tokens`` <= 7 after token 0, one a row of ``sampled``, ``chunks`` times over.

    Returns:
      int32 [rows, num_tokens] and how many of them each row has, [rows]: all, unless ``rounds``
      stops the program early.
    """
    program = program or shipped_decode(plan)
    batch = sampled.temperature.shape[0]
    found = []
    for chunk in range(chunks):
        keys = jax.random.split(jax.random.key(1000 * seed + chunk), batch)
        limit = jnp.full((batch,), num_tokens + 1, jnp.int32)
        request = Request(keys, sampled, jnp.full((batch, 1), -1, jnp.int32), limit)
        until = jnp.int32(num_tokens if rounds is None else rounds)
        _, state = program(params, request, (), _start(plan, params, request), until)
        found.append(jax.device_get((state.history.tokens, state.history.length)))
    tokens, length = (np.concatenate(parts) for parts in zip(*found, strict=True))
    return tokens[:, 1 : num_tokens + 1], length - 1


def _start(plan, params, request):
    batch = request.max_length.shape[0]
    states = logits_processors.first_state(request.sampling.processors)
    capacity = _LONGEST + plan.drafter.max_depth + 1  # the same for all: programs are shared
    return DecodeState(
        history=History(
            jnp.zeros((batch, capacity), jnp.int32), jnp.ones((batch,), jnp.int32), states
        ),
        cache=plan.target.init_cache(batch, capacity),
        memory=plan.drafter.init(params, request, capacity),
        done=jnp.zeros((batch,), bool),
        stats=init_stats(plan, batch),
        round=jnp.int32(0),
    )


def joint_distribution(transitions: np.ndarray, num_tokens: int) -> np.ndarray:
    """The law of the first ``num_tokens`` after token 0 of a Markov chain [V, V]: [V**n]."""
    vocab = len(transitions)
    distribution = transitions[0]
    for _ in range(num_tokens - 1):
        distribution = (distribution.reshape(-1, vocab)[:, :, None] * transitions).ravel()
    return distribution


def counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each text occurs, [V**n], in lexicographic order."""
    places = vocab_size ** np.arange(tokens.shape[1])[::-1]
    return np.bincount(tokens @ places, minlength=vocab_size ** tokens.shape[1])


def distance(observed: np.ndarray, distribution: np.ndarray) -> float:
    """Total variation between frequencies and a law."""
    return 0.5 * float(np.abs(observed / observed.sum() - distribution).sum())


def noise_floor(distribution: np.ndarray, count: int) -> float:
    """The total variation that ``count`` draws from ``law`` itself show on average."""
    return float(np.sqrt(distribution * (1 - distribution) / (2 * np.pi * count)).sum())
