"""Losses of drafters that guess one token after another.

Guess k (from 0) made at row i predicts the token after t_{i+1+k}. It is aligned with the target's
row j = i + 1 + k, which computed the distribution of that token. So all guesses about one token lie
side by side, and the target's distribution is computed once for them.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jspec.core.types import Array
from training.data.batch import Batch
from training.losses.guesses import Rows
from training.networks.attention import causal


def align(outputs: Sequence[Array]) -> Array:
    """Align guesses [B, T, D] of each k, by row i, to [B, T, S, D], by j - 1; pad with zeros."""
    length = outputs[0].shape[1]
    shifted = [jnp.pad(x[:, : length - k], ((0, 0), (k, 0), (0, 0))) for k, x in enumerate(outputs)]
    return jnp.stack(shifted, 2)


def rows_of(normed: Array, batch: Batch, steps: int, decay: float) -> Rows:
    """Return the target's rows j = 1 to T beside aligned guesses, given its states [B, T + 1, D].

    A guess has the weight of t_{j+1}, the token that it predicts, times ``decay`` for each guess
    before it. So the guesses count that drafting needs: from the first token of an answer, guessed
    behind the prompt, to its last. (The programs of EAGLE's authors take the weight of t_{j-1}.)
    Guesses behind the last token of a window or document have no label and do not count.
    """
    length = batch.tokens.shape[1] - 1
    here, learned, weights = batch.segments[:, 1:], guessed_weights(batch)[:, 1:], []
    for step in range(steps):
        start = jnp.pad(batch.segments[:, : length - step], ((0, 0), (step, 0)))
        weights.append(jnp.where(start == here, learned * decay**step, 0.0))
    labels = jnp.pad(batch.tokens[:, 2:], ((0, 0), (0, 1)))  # 0 behind the last
    return Rows(normed[:, 1:], labels, jnp.stack(weights, -1), np.arange(steps))


def guessed_weights(batch: Batch) -> Array:
    """Return float32 [B, T + 1]: weight of t_{j+1}, whose distribution the target's row j has."""
    return jnp.pad(batch.label_weights, ((0, 0), (0, 1)))


def unroll(
    run: Callable[..., Array],
    params: Any,
    embedded: Array,
    features: Array,
    batch: Batch,
    *,
    steps: int,
    layers: int,
    through_steps: bool,
    remat: bool,
    alike: bool = False,
) -> list[Array]:
    """Return the outputs [B, T, D] of a network at each step on its own outputs.

    At step k, row i reads the output of step k - 1 (at step 0 its feature) and the true token
    t_{i+1+k}. It stands at position i + k and attends to the step-0 rows up to i and to its own
    later rows. Rows are in the order of step 0.

    ``run`` maps (step, params, tokens [B, T, D], features, positions, attend) to outputs.
    ``embedded`` [B, T + 1, D] are the tokens of the window, ``features`` are [B, T, D]. ``layers``
    counts those with keys of their own. Without ``through_steps`` no gradient flows from a step
    into the one before. ``remat`` computes a step again in the backward pass. If all steps are
    ``alike``, ``run`` does not depend on their number. Accelerators then have a loop over those
    behind the first, because their compilers take long for each step in a row.
    """
    length = features.shape[1]
    segments, positions = batch.segments[:, :length], batch.positions[:, :length]

    def step_of(step: int, params, tokens: Array, features: Array, entries):
        entries = [list(layer) for layer in entries]  # keys and values of all steps

        def attend(layer: int, q: Array, k: Array, v: Array, window: int | None = None) -> Array:
            entries[layer].append((k, v))
            (keys, values), *later = entries[layer]
            return causal(q, keys, values, segments=segments, window=window, later=later)

        return run(step, params, tokens, features, positions + step, attend), entries

    step_of = jax.checkpoint(step_of, static_argnums=0) if remat else step_of
    cut = (lambda x: x) if through_steps else jax.lax.stop_gradient
    outputs, entries = [], [[] for _ in range(layers)]
    rows = jnp.pad(embedded, ((0, 0), (0, steps), (0, 0)))
    in_loop = alike and steps > 2 and jax.default_backend() != "cpu"
    for step in range(1 if in_loop else steps):
        features, entries = step_of(
            step, params, rows[:, step + 1 :][:, :length], features, entries
        )
        outputs.append(features)
        features = cut(features)
    if not in_loop:
        return outputs

    def later_step(carry, step: Array):
        features, later = carry
        later = [list(layer) for layer in later]  # keys and values of all steps behind the first

        def attend(layer: int, q: Array, k: Array, v: Array, window: int | None = None) -> Array:
            later[layer] = jax.tree.map(
                lambda x, new: x.at[step - 1].set(new), later[layer], [k, v]
            )
            return causal(
                q,
                *entries[layer][0],
                segments=segments,
                window=window,
                later=list(zip(*later[layer], strict=True)),
                num_later=step,
            )

        tokens = jax.lax.dynamic_slice_in_dim(rows, step + 1, length, 1)
        features = run(step, params, tokens, features, positions + step, attend)
        return (cut(features), later), features

    later_step = jax.checkpoint(later_step) if remat else later_step
    empty = [[jnp.zeros((steps - 1, *x.shape), x.dtype) for x in layer[0]] for layer in entries]
    _, others = jax.lax.scan(later_step, (features, empty), jnp.arange(1, steps))
    return [*outputs, *others]
