"""Processed logits, noise and its addresses, and drawing.

Noise depends on its address alone:

* noise of the *target* belongs to (sequence key, absolute position of the token it draws). Plain
  sampling, ``match`` and ``coupled`` draw with it, so a text does not depend on the drafter;
* noise of a *round* (drawing drafts, accepting, residuals) belongs to (sequence key, position of
  the round's root, purpose, rank), and that of a draw to a token id too. It is fresh in every
  round: with absolute positions, the round after a rejection would reuse it, which biases block
  verification over two rounds.
"""

import jax
import jax.numpy as jnp
from jax import lax

from jspec.core.filters import FILTERS
from jspec.core.types import Array, Sampling

# Purposes of a round's noise, part of its addresses. The ranks of the target's own noise are token
# ids, below 2**24: purposes start at 1, above them.
DRAFT, ACCEPT, RESIDUAL, BRANCH = 1, 2, 3, 4
_RANK_BITS = 24

DRAW_BLOCK = 2048  # tokens of a block of ``draw``
_BLOCK = 64  # tokens looked at together by ``top_k``
_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


def process_logits(logits: Array, sampling: Sampling) -> Array:
    """Map logits [B, ..., V] to unnormalised log-probabilities of the same shape.

    A greedy sequence gets 0 at its first maximum and -inf elsewhere, or -inf everywhere if all its
    logits are -inf; so every rule has its greedy limit without a branch. In an all-greedy batch
    logits pass unchanged, since only their maximum is read. NaN counts as -inf. Infinite logits
    share the whole probability. The dtype is at least float32.

    Tokens that tie with the last one that top-k or top-p keeps are kept too.
    """
    logits = _without_nan(logits)
    if sampling.greedy:
        return logits
    temperature = _column(sampling.temperature, logits)
    divisor = jnp.where(temperature > 0, temperature, 1)
    certain = jnp.isposinf(logits.max(-1, keepdims=True) / divisor)
    processed = logits / divisor
    processed = jnp.where(certain, jnp.where(jnp.isposinf(processed), 0.0, -jnp.inf), processed)
    for name, entry in FILTERS.items():
        if name in sampling.names and entry.keep is not None:
            keep = entry.keep(processed, _column(sampling.values[name], processed))
            processed = jnp.where(keep, processed, -jnp.inf)
    first = jnp.arange(logits.shape[-1]) == argmax(logits)[..., None]
    greedy = jnp.where(first & (logits > -jnp.inf), 0.0, -jnp.inf)
    return jnp.where(temperature > 0, processed, greedy)


def _column(values: Array, logits: Array) -> Array:
    """Reshape [B] to [B, ..., 1], and floats to the dtype of the logits [B, ..., V]."""
    values = values.reshape(-1, *[1] * (logits.ndim - 1))
    return values.astype(logits.dtype) if jnp.issubdtype(values.dtype, jnp.floating) else values


def greedy_at_one(sampling: Sampling) -> Sampling:
    """Return the settings with temperature 1 for greedy sequences."""
    temperature = jnp.where(sampling.temperature > 0, sampling.temperature, 1)
    names = tuple(dict.fromkeys(("temperature", *sampling.names)))
    return sampling.replace(values=sampling.values | {"temperature": temperature}, names=names)


def no_token(logits: Array, sampling: Sampling) -> Array:
    """Return where ``process_logits`` gives no token any probability: bool [B, ...].

    Reads the maximum of the raw logits [B, ..., V], which every filter keeps. Reading the processed
    logits would make XLA write them to memory.
    """
    peak = _without_nan(logits).max(-1, keepdims=True)
    if not sampling.greedy:
        temperature = _column(sampling.temperature, peak)
        peak = peak / jnp.where(temperature > 0, temperature, 1)
    return jnp.isneginf(peak[..., 0])


def _without_nan(logits: Array) -> Array:
    """Cast to float32 or wider, with -inf for NaN."""
    logits = logits.astype(jnp.promote_types(logits.dtype, jnp.float32))
    return jnp.where(jnp.isnan(logits), -jnp.inf, logits)


def argmax(logits: Array) -> Array:
    """Return the lowest index of the maximum over the last axis [..., V]: int32 [...].

    Two plain reductions of floats let XLA vectorise their input on CPU. Its own reduction to
    (value, index) pairs makes the input scalar, noise included: five times slower at V = 49,152.

    >>> int(argmax(jnp.array([1.0, 3.0, 3.0])))
    1
    """
    last = logits.shape[-1] - 1
    from_end = jnp.float32(last) - jnp.arange(last + 1, dtype=jnp.float32)  # exact below 2**24
    best = jnp.where(logits == logits.max(-1, keepdims=True), from_end, 0).max(-1)
    return last - best.astype(jnp.int32)


def top_k(values: Array, count: int) -> tuple[Array, Array]:
    """Return the ``count`` largest of floats [..., V] and their int32 indices, as ``lax.top_k``.

    They lie in the ``count`` blocks with the largest maxima. So the selection, which XLA does not
    vectorise on CPU, reads little.

    >>> top_k(jnp.array([1.0, 3.0, 3.0]), 2)[1].tolist()
    [1, 2]
    """
    size, shape = values.shape[-1], values.shape[:-1]
    num_blocks = -(-size // _BLOCK)
    if num_blocks < 4 * count:  # most entries would be candidates
        return lax.top_k(values, count)
    padding = [(0, 0)] * len(shape) + [(0, -size % _BLOCK)]
    blocks = jnp.pad(values, padding, constant_values=-jnp.inf).reshape(*shape, num_blocks, _BLOCK)
    # In the order of their indices, so that the first of equal values comes first.
    chosen = jnp.sort(lax.top_k(blocks.max(-1), count)[1], -1)
    rows = chosen[..., None]
    inside = jnp.take_along_axis(blocks, rows, -2, mode="promise_in_bounds")  # [..., count, _BLOCK]
    best, index = lax.top_k(inside.reshape(*shape, count * _BLOCK), count)
    block = jnp.take_along_axis(chosen, index // _BLOCK, -1, mode="promise_in_bounds")
    return best, block * _BLOCK + index % _BLOCK


def log_probs(logits: Array) -> Array:
    """Return the log-softmax over the last axis; infinite logits share the whole probability."""
    certain = jnp.isposinf(logits)
    point = jnp.where(certain, 0.0, -jnp.inf)
    return jax.nn.log_softmax(jnp.where(certain.any(-1, keepdims=True), point, logits), -1)


def target_noise(keys: Array, positions: Array, vocab_size: int) -> Array:
    """Return Gumbel noise of the tokens at int32 ``positions`` [B, ...]: float32 [B, ..., V]."""
    return _gumbel(*_words(keys, positions[..., None], jnp.arange(vocab_size)))


def node_noise(keys: Array, root: Array, nodes: Array, vocab_size: int) -> Array:
    """Return one round's Gumbel noise for drawing the children of ``nodes``: float32 [B, F, V].

    Every node has its own key, made of the address (sequence key, root, purpose, node). ``root``
    [B] is the position of the round's root; ``nodes`` are int32 [F].
    """
    positions = root[:, None] + jnp.zeros_like(nodes)
    key = _words(keys, positions, (BRANCH << _RANK_BITS) + nodes)
    high, low = (word[..., None] for word in key)
    tokens = jnp.arange(vocab_size, dtype=jnp.uint32)
    return _gumbel(*threefry((high, low), (jnp.uint32(0), tokens)))


def _gumbel(high: Array, low: Array) -> Array:
    """Map pairs of random words to standard Gumbel noise."""
    # All 64 bits go into the uniform near 0. The largest Gumbels, which decide for unlikely tokens,
    # are then as finely spaced as float32 allows.
    scale = jnp.float32(2**-32)
    uniform = (high.astype(jnp.float32) + (low.astype(jnp.float32) + 0.5) * scale) * scale
    return -jnp.log(-jnp.log1p(-jnp.minimum(uniform, 1 - 2**-24)))


def draw_target(processed: Array, sampling: Sampling, keys: Array, positions: Array) -> Array:
    """Draw the target's tokens at ``positions`` [B, ...] from [B, ..., V]: int32 [B, ...].

    Gumbel-max: a drafter with the same noise and nearly the same distribution draws the same token.
    """
    if not sampling.greedy:
        noise = target_noise(keys, positions, processed.shape[-1])
        processed = processed + noise.astype(processed.dtype)
    return argmax(processed)


def round_noise(keys: Array, root: Array, purpose: int, count: int) -> Array:
    """Return ``count`` uniforms of one round for one purpose: float32 [B, count, 2].

    A uniform in [0, 1) has steps of 2**-48. It is the sum of a coarse part, a multiple of 2**-24,
    and a fine part below 2**-24; float32 holds one of them. Acceptance reads the coarse part. Both
    are the key of ``draw``. ``root`` [B] is the position of the round's root.
    """
    return round_noise_at(keys, root, purpose, jnp.arange(count))


def round_noise_at(keys: Array, root: Array, purpose: int, ranks: Array) -> Array:
    """Return the uniforms of one round with the given ``ranks``, int32 [R]: float32 [B, R, 2]."""
    high, low = _words(keys, root[:, None], (purpose << _RANK_BITS) + ranks)
    words = jnp.stack([high, low], -1) >> 8
    return words.astype(jnp.float32) * jnp.array([2**-24, 2**-48], jnp.float32)


def _words(keys: Array, position: Array, rank: Array) -> tuple[Array, Array]:
    """Return two random words, uint32, of each address (sequence key, position, rank).

    Position and rank broadcast. The address is the counter of one threefry block, so no key is
    split or folded.
    """
    data = jax.random.key_data(keys)
    word = lambda index: data[:, index].reshape(-1, *[1] * (position.ndim - 1))
    return threefry((word(0), word(1)), (position.astype(jnp.uint32), rank.astype(jnp.uint32)))


@jax.jit  # traced once for each shape, and inlined
def threefry(key: tuple[Array, Array], counter: tuple[Array, Array]) -> tuple[Array, Array]:
    """Encrypt a two-word counter with a two-word key; all words are uint32 and broadcast.

    Threefry-2x32 with 20 rounds (Salmon et al., SC'11) is the function of ``jax.random``'s
    generator, bit for bit. As plain arithmetic it fuses with the consumer of the bits, so noise
    [B, N, V] is never materialised on an accelerator. On a CPU, JAX's own primitive loops over
    arrays in memory: measured 5 to 13 times slower at V = 4096.
    """
    words = (*key, key[0] ^ key[1] ^ jnp.uint32(_PARITY))
    x, y = counter[0] + words[0], counter[1] + words[1]
    for group in range(1, 6):
        for distance in _ROTATIONS[(group - 1) % 2]:
            x = x + y
            y = ((y << distance) | (y >> (32 - distance))) ^ x
        x = x + words[group % 3]
        y = y + words[(group + 1) % 3] + jnp.uint32(group)
    return x, y


def draw(log_weights: Array, uniform: Array) -> Array:
    """Draw token ids, int32 [B], from unnormalised log-weights [B, V].

    Gumbel-max over blocks of tokens by their mass, then over the tokens of the block that won. The
    first race gives a block its probability, and the second a token its probability in the block.
    So V / DRAW_BLOCK + DRAW_BLOCK Gumbels replace V.

    Last bits of the weights change a token only where the two best of a race nearly tie. The
    inverse CDF has V boundaries, and the rounding of a sum over V tokens moves most of them.

    ``uniform`` [B, 2] comes from ``round_noise`` and is the key of the noise, which belongs to
    blocks and token ids; another shape raises ValueError.
    """
    blocks = _blocks(log_weights, uniform)
    block = argmax(_block_scores(blocks, uniform))
    token = argmax(_token_scores(blocks, uniform, block)) + block * blocks.shape[-1]
    return jnp.minimum(token, log_weights.shape[-1] - 1)  # in range even where all are NaN


def draw_gap(log_weights: Array, uniform: Array, token: Array) -> Array:
    """Return by how much log-weights must change for ``draw`` to give ``token`` int32 [B]: [B].

    It is 0 for the token that ``draw`` gives, and infinite for one without weight.
    """
    blocks = _blocks(log_weights, uniform)
    block, rank = token // blocks.shape[-1], token % blocks.shape[-1]

    def behind(scores: Array, index: Array) -> Array:
        return scores.max(-1) - jnp.take_along_axis(scores, index[:, None], -1)[:, 0]

    gap = behind(_block_scores(blocks, uniform), block)
    return gap + behind(_token_scores(blocks, uniform, block), rank)


def _blocks(log_weights: Array, uniform: Array) -> Array:
    """Split log-weights [B, V], relative to the largest, into blocks [B, V / size, size]."""
    batch, vocab = log_weights.shape
    if uniform.shape != (batch, 2):
        raise ValueError(
            f"uniform of shape {uniform.shape} must be [B, 2] = {(batch, 2)}; pass both parts, "
            "such as round_noise(...)[:, i]."
        )
    size = min(vocab, DRAW_BLOCK)
    peak = log_weights.max(-1, keepdims=True)
    # Small numbers keep more digits when noise is added, and their exponentials do not overflow.
    relative = log_weights - jnp.where(jnp.isneginf(peak), 0, peak)
    padding = ((0, 0), (0, -vocab % size))
    return jnp.pad(relative, padding, constant_values=-jnp.inf).reshape(batch, -1, size)


def _block_scores(blocks: Array, uniform: Array) -> Array:
    """Return the log-masses of ``blocks`` with their noise: [B, V / size]."""
    noise = block_noise(uniform, blocks.shape[1])
    return jnp.log(jnp.exp(blocks).sum(-1)) + noise.astype(blocks.dtype)


def _token_scores(blocks: Array, uniform: Array, block: Array) -> Array:
    """Return log-weights of the tokens of ``block`` [B] with their noise: [B, size]."""
    size = blocks.shape[-1]
    block_of_row = block[:, None, None]
    inside = jnp.take_along_axis(blocks, block_of_row, 1, mode="promise_in_bounds")[:, 0]
    tokens = block[:, None] * size + jnp.arange(size)
    return inside + token_noise(uniform, tokens).astype(blocks.dtype)


def token_noise(uniform: Array, tokens: Array) -> Array:
    """Return the Gumbel noise of a draw for ``tokens`` [B, n]: float32 [B, n]."""
    return _draw_noise(uniform, jnp.uint32(0), tokens)


def block_noise(uniform: Array, count: int) -> Array:
    """Return the Gumbel noise of a draw for its ``count`` blocks: float32 [B, count]."""
    return _draw_noise(uniform, jnp.uint32(1), jnp.arange(count)[None])


def _draw_noise(uniform: Array, kind: Array, index: Array) -> Array:
    """Return Gumbel noise whose address is the 48 random bits of ``uniform``, kind and index."""
    words = (uniform * jnp.array([2**24, 2**48], uniform.dtype)).astype(jnp.uint32)
    return _gumbel(*threefry((words[:, :1], words[:, 1:]), (kind, index.astype(jnp.uint32))))


def log_residual(log_p: Array, log_q: Array) -> Array:
    """Return the residual log max(p - q, 0), unnormalised, [..., V], of two log-probabilities.

    Where the residual is empty, return log p: then p = q up to rounding, and a rejection has
    probability 0 up to rounding.
    """
    above = log_p > log_q
    gap = jnp.where(above, log_q - log_p, -1.0)
    log_rest = jnp.where(above, log_p + jnp.log1p(-jnp.exp(gap)), -jnp.inf)
    return jnp.where(above.any(-1, keepdims=True), log_rest, log_p)
