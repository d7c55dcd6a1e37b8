"""Forward passes of a decoder over packed windows."""

from typing import Any

import jax.numpy as jnp
from flax import struct

from jspec.core import trees
from jspec.core.types import Array
from jspec.models import decoder
from jspec.models.blocks.recur import Recur, Visit
from jspec.models.decoder import DecoderConfig, DecoderParams
from training.data.batch import Batch
from training.networks.attention import attend_within
from training.networks.linear import LINEARS


@struct.dataclass
class Frozen:
    """Weights that are not trained."""

    target: DecoderParams  # weights of the target
    start: Any = None  # initial weights of the drafter, or None for fresh ones
    # int32 [Vd], ascending, target ids of a reduced draft vocabulary; None for all tokens.
    draft_to_target: Array | None = None


def hidden_states(
    params: DecoderParams, config: DecoderConfig, tokens: Array, compute: str, remat: bool = False
) -> Array:
    """Return normed last hidden states [B, T, D] of tokens [B, T], each row one document."""
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    x = decoder.embed(params, config, tokens)
    x, _ = decoder.trunk(
        params,
        config,
        x,
        positions,
        attend_within(None),
        linear=LINEARS[compute],
        remat=remat,
        recur=recur_within(config, positions),
        tokens=tokens,
    )
    return config.norm(x, params.norm)


def packed_states(
    params: DecoderParams,
    config: DecoderConfig,
    batch: Batch,
    compute: str,
    *,
    capture_layers: tuple[int, ...] = (),
    remat: bool = False,
) -> tuple[tuple[Array, ...], Array]:
    """Return captured hidden states of packed windows, and the last ones after the norm.

    Each is [B, T + 1, D].
    """
    x, captured = decoder.trunk(
        params,
        config,
        decoder.embed(params, config, batch.tokens),
        batch.positions,
        attend_within(batch.segments),
        linear=LINEARS[compute],
        capture_layers=capture_layers,
        remat=remat,
        recur=recur_within(config, batch.positions),
        tokens=batch.tokens,
    )
    return captured, config.norm(x, params.norm)


def recur_within(config: DecoderConfig, positions: Array) -> Recur:
    """Return recurrences along windows of texts, for ``decoder.trunk``.

    A text begins at each position 0 of int32 ``positions`` [B, T], with an empty state.
    """
    batch, size = positions.shape
    tree, starts = trees.chain_tree(batch, size), positions == 0

    def recur(index: int, visit: Visit) -> Array:
        entry = config.layers[index].mixer.entry(batch, 0, jnp.float32)
        return visit(entry, tree, starts=starts)[0]

    return recur


def head_of(params: DecoderParams) -> Array:
    """Return the output matrix [D, V], tied or not."""
    return params.embedding.T if params.head is None else params.head


def draft_output(frozen: Frozen) -> Array:
    """Return a float32 copy of the target's output matrix [D, Vd], for the draft vocabulary."""
    output, vocabulary = head_of(frozen.target), frozen.draft_to_target
    return jnp.array(output if vocabulary is None else output[:, vocabulary], jnp.float32)


def feature_scale(params: DecoderParams) -> Array:
    """Return the root mean square of the last norm's weights, []: the scale of the features."""
    return jnp.sqrt(jnp.mean(params.norm.astype(jnp.float32) ** 2))
