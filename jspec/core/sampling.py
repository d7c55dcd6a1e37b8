"""The one warp of logits, noise and its addresses, and drawing.

Noise has an address, and the address is all that it depends on:

* noise of the *target* belongs to (row key, absolute position of the token it draws). Plain
  sampling, ``match`` and ``coupled`` draw with it, so a text does not depend on the drafter;
* noise of a *round* (drawing drafts, accepting, residuals) belongs to (row key, position of the
  round's root, purpose, rank): fresh in every round. Keyed by absolute position it would be met
  again by the next round after a rejection, which biases block verification over two rounds.
"""

import jax
import jax.numpy as jnp

from jspec.core.threefry import threefry
from jspec.core.types import Array, Sampling

FILTERS = ("temperature", "min_p", "top_k", "top_p")  # in the order they apply, as vLLM's do

# Purposes of a round's noise, part of its addresses. The ranks of the target's own noise are token
# ids, below 2**24: purposes start at 1, above them.
DRAFT, ACCEPT, RESIDUAL, BRANCH = 1, 2, 3, 4
_RANK_BITS = 24

_BLOCK = 64  # weights summed at a time when drawing by inverse CDF


def process_logits(logits: Array, sampling: Sampling) -> Array:
    """Warps logits [B, ..., V] to unnormalised log-probabilities of the same shape.

    A greedy row becomes a point mass: 0 at its first maximum, -inf elsewhere, and everywhere where
    all is -inf; so every rule has its greedy limit without a branch. In an all-greedy batch logits
    pass through unchanged, since only their maximum is read. NaN counts as -inf, and inf as
    certain: what has it shares the law. The dtype is at least float32.

    Tokens that tie with the last one kept by top-k or top-p are kept too.
    """
    logits = _numbers(logits)
    if sampling.greedy:
        return logits
    column = lambda x: x.reshape(-1, *[1] * (logits.ndim - 1)).astype(logits.dtype)
    temperature = column(sampling.temperature)
    hot = jnp.where(temperature > 0, temperature, 1)
    certain = jnp.isposinf(logits.max(-1, keepdims=True) / hot)
    processed = logits / hot
    processed = jnp.where(certain, jnp.where(jnp.isposinf(processed), 0.0, -jnp.inf), processed)
    if "min_p" in sampling.names:
        floor = processed.max(-1, keepdims=True) + jnp.log(column(sampling.min_p))
        processed = jnp.where(processed >= floor, processed, -jnp.inf)
    if "top_k" in sampling.names or "top_p" in sampling.names:
        processed = jnp.where(
            processed >= _threshold(processed, sampling, column), processed, -jnp.inf
        )
    first = jnp.arange(logits.shape[-1]) == argmax(logits)[..., None]
    point = first & (logits > -jnp.inf)  # no token at all, where none is allowed
    return jnp.where(temperature > 0, processed, jnp.where(point, 0.0, -jnp.inf))


def no_token(logits: Array, sampling: Sampling) -> Array:
    """Where ``process_logits`` leaves no token any weight: bool [B, ...].

    Told by the greatest raw logits [B, ..., V], which no warp takes away: were the warped ones read
    for it, XLA would write them all, where it need not otherwise.
    """
    most = _numbers(logits).max(-1)
    if sampling.greedy:
        return jnp.isneginf(most)
    temperature = sampling.temperature.reshape(-1, *[1] * (most.ndim - 1)).astype(most.dtype)
    return jnp.isneginf(most / jnp.where(temperature > 0, temperature, 1))


def _numbers(logits: Array) -> Array:
    """Logits in float32 at least, with -inf for NaN."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def _threshold(processed: Array, sampling: Sampling, column) -> Array:
    """The smallest logit that survives top-k, then top-p: [B, ..., 1]."""
    ordered = jnp.flip(jnp.sort(processed, -1), -1)
    if "top_k" in sampling.names:
        wanted = jnp.where(sampling.top_k > 0, sampling.top_k, processed.shape[-1])
        last = jnp.clip(wanted, 1, processed.shape[-1]).astype(jnp.int32) - 1
        last = last.reshape(-1, *[1] * (processed.ndim - 1))
        last = jnp.broadcast_to(last, (*processed.shape[:-1], 1))
        floor = jnp.take_along_axis(ordered, last, -1)
        ordered = jnp.where(ordered >= floor, ordered, -jnp.inf)
    if "top_p" in sampling.names:
        probs = jax.nn.softmax(ordered, -1)
        before = jnp.cumsum(probs, -1) - probs  # mass above each token; 0 for the first
        top_p = column(sampling.top_p)
        ordered = jnp.where((before < top_p) | (top_p >= 1), ordered, -jnp.inf)
    return jnp.where(jnp.isneginf(ordered), jnp.inf, ordered).min(-1, keepdims=True)


def argmax(logits: Array) -> Array:
    """The lowest index of the maximum over the last axis [..., V]: int32 [...].

    Two plain reductions: what feeds them is vectorised on CPU, where XLA's own reduction to a
    (value, index) pair makes it scalar, noise and all (four times slower at V = 4096).

    >>> int(argmax(jnp.array([1.0, 3.0, 3.0])))
    1
    """
    size = logits.shape[-1]
    index = jnp.arange(size, dtype=jnp.int32)
    return jnp.where(logits == logits.max(-1, keepdims=True), index, size - 1).min(-1)


def log_probs(logits: Array) -> Array:
    """Log-softmax over the last axis; an infinite logit is certain, and several share the law."""
    certain = jnp.isposinf(logits)
    point = jnp.where(certain, 0.0, -jnp.inf)
    return jax.nn.log_softmax(jnp.where(certain.any(-1, keepdims=True), point, logits), -1)


def chance(logits: Array, distribution: Array | None, ids: Array, sampling: Sampling) -> Array:
    """Probability of ``ids`` [B, ...] by the law that drew them, log-weights [B, ..., V].

    Of rows at temperature 0, and where ``law`` is None as none was drawn: by the softmax of logits.
    """

    def of(log_weights: Array) -> Array:
        chosen = jnp.take_along_axis(log_weights, ids[..., None], -1)[..., 0]
        return jnp.exp(chosen - jax.nn.logsumexp(log_weights, -1))

    if distribution is None:
        return of(logits)
    drawn = (sampling.temperature > 0).reshape(-1, *[1] * (ids.ndim - 1))
    return jnp.where(drawn, of(distribution), of(logits))


def target_noise(keys: Array, positions: Array, vocab_size: int) -> Array:
    """Gumbel noise of the tokens at int32 ``positions`` [B, ...]: float32 [B, ..., V]."""
    return _gumbel(*_words(keys, positions[..., None], jnp.arange(vocab_size)))


def node_noise(keys: Array, root: Array, nodes: Array, vocab_size: int) -> Array:
    """Gumbel noise of one round for drawing the children of ``nodes``: float32 [B, F, V].

    Every node has a key of its own, made of the address (row key, root, purpose, node).

    Args:
      keys: one a row, [B].
      root: position of the round's root, int32 [B].
      nodes: int32 [F].
      vocab_size: V.
    """
    place = root[:, None] + jnp.zeros_like(nodes)
    key = _words(keys, place, (BRANCH << _RANK_BITS) + nodes)
    high, low = (word[..., None] for word in key)
    tokens = jnp.arange(vocab_size, dtype=jnp.uint32)
    return _gumbel(*threefry((high, low), (jnp.uint32(0), tokens)))


def _gumbel(high: Array, low: Array) -> Array:
    """Standard Gumbel noise of two random words each."""
    # All 64 bits go into the uniform near 0, so that the largest Gumbels, which decide for tokens
    # of small probability, are as finely spaced as float32 allows.
    scale = jnp.float32(2**-32)
    uniform = (high.astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * scale) * scale
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2**-24)))


def draw_target(processed: Array, sampling: Sampling, keys: Array, positions: Array) -> Array:
    """The target's own draw of the tokens at ``positions`` [B, ...] from [B, ..., V]: int32.

    Gumbel-max, so that whoever holds the same noise and nearly the same law draws the same token.
    """
    if not sampling.greedy:
        processed = processed + target_noise(keys, positions, processed.shape[-1]).astype(
            processed.dtype
        )
    return argmax(processed)


def round_noise(keys: Array, root: Array, purpose: int, count: int) -> Array:
    """``count`` uniforms of one round for one purpose: float32 [B, count, 2].

    A uniform lies in [0, 1) in steps of 2**-48, as the sum of a coarse part, a multiple of 2**-24,
    and a fine one below 2**-24: float32 has room for one of them. The coarse part will do for a
    coin; ``draw`` takes both. ``root`` [B] is the position of the round's root.
    """
    return round_noise_at(keys, root, purpose, jnp.arange(count))


def round_noise_at(keys: Array, root: Array, purpose: int, ranks: Array) -> Array:
    """The uniforms of ``ranks``, int32 [R], among those of one round: float32 [B, R, 2]."""
    high, low = _words(keys, root[:, None], (purpose << _RANK_BITS) + ranks)
    words = jnp.stack([high, low], -1) >> 8
    return words.astype(jnp.float32) * jnp.array([2**-24, 2**-48], jnp.float32)


def _words(keys: Array, place: Array, rank: Array) -> tuple[Array, Array]:
    """Two random words of each address (row key, place, rank): uint32, place and rank broadcast.

    The address is the counter of one threefry block, so no key is ever split or folded.
    """
    data = jax.random.key_data(keys)
    word = lambda index: data[:, index].reshape(-1, *[1] * (place.ndim - 1))
    return threefry((word(0), word(1)), (place.astype(jnp.uint32), rank.astype(jnp.uint32)))


def draw(log_weights: Array, uniform: Array) -> Array:
    """Draws from unnormalised log-weights [B, V] with a uniform of ``round_noise`` a row, [B, 2].

    Inverse CDF in two levels (blocks, then tokens of one block): sums stay short, so float32
    rounding stays near 1e-6 even at V = 150k, and one uniform replaces V Gumbels. Its coarse part
    chooses the block; the fine part comes in once that is subtracted, for tokens that lie between
    two steps of 2**-24 would be drawn always or never: of 150k tokens most.

    Returns:
      Ids, int32 [B].

    Raises:
      ValueError: ``uniform`` has another shape.
    """
    vocab = log_weights.shape[-1]
    if uniform.shape != (len(log_weights), 2):
        raise ValueError(
            f"uniform of shape {uniform.shape} must be [B, 2] = {(len(log_weights), 2)}: for each "
            "row both parts of a uniform, such as round_noise(...)[:, i]."
        )
    peak = log_weights.max(-1, keepdims=True)
    weights = jnp.exp(log_weights - jnp.where(jnp.isneginf(peak), 0, peak))
    weights = jnp.pad(weights, ((0, 0), (0, -vocab % _BLOCK))).reshape(
        -1, -(-vocab // _BLOCK), _BLOCK
    )
    sums = weights.sum(-1)
    total = sums.sum(-1, keepdims=True)
    total = jnp.where(total > 0, total, 1)
    coarse, fine = uniform.astype(weights.dtype).T
    block, before = _first_above(sums / total, coarse)
    inside = jnp.take_along_axis(weights, block[:, None, None], 1)[:, 0] / total
    token, _ = _first_above(inside, coarse - before + fine)
    return jnp.minimum(block * _BLOCK + token, vocab - 1)  # in range even where all weights are 0


def _first_above(weights: Array, point: Array) -> tuple[Array, Array]:
    """First index of positive weight whose running sum exceeds ``point`` [B], and the sum before.

    Where rounding leaves none, the last index of positive weight. Running sums are parallel and
    rounded, so they can rise at a weight of 0: it must be refused by name.
    """
    running = jnp.cumsum(weights, -1)
    above = (running > point[:, None]) & (weights > 0)
    last = weights.shape[-1] - 1 - jnp.argmax(jnp.flip(weights > 0, -1), -1)
    index = jnp.where(above.any(-1), jnp.argmax(above, -1), last).astype(jnp.int32)
    taken = lambda x: jnp.take_along_axis(x, index[:, None], -1)[:, 0]
    return index, taken(running) - taken(weights)


def log_residual(log_p: Array, log_q: Array) -> Array:
    """log of max(p - q, 0), unnormalised, [..., V]; where nothing is left, log p.

    Both are log-probabilities. Nothing is left only where p = q up to rounding, and then a
    rejection has probability zero up to rounding.
    """
    above = log_p > log_q
    gap = jnp.where(above, log_q - log_p, -1.0)
    log_rest = jnp.where(above, log_p + jnp.log1p(-jnp.exp(gap)), -jnp.inf)
    return jnp.where(above.any(-1, keepdims=True), log_rest, log_p)
