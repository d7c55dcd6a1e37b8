"""A tiny P-EAGLE head for the tiny target."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.models.heads import eagle
from tests import networks, tiny

MASK, REDUCED_SIZE = 63, 40
NETWORK = networks.changed(tiny.TARGET.config, intermediate_size=48, vocab_size=REDUCED_SIZE)
CONFIG = eagle.EagleConfig(
    NETWORK,
    3,
    (0, 1),
    NETWORK.hidden_size,
    tiny.VOCAB,
    separate_embedding=True,
    separate_head=True,
    norm_before_residual=True,
    mask_token_id=MASK,
)


@functools.cache
def weights():
    """Return blocks that draft well, as they get the target's features and output matrix."""
    shapes = jax.eval_shape(lambda: eagle.init_params(jax.random.key(0), CONFIG))
    rng = np.random.default_rng(3)
    draw = lambda x: rng.normal(0, 0.2, x.shape) if x.ndim > 1 else rng.normal(1, 0.2, x.shape)
    params = jax.tree.map(lambda x: jnp.asarray(draw(x), jnp.float32), shapes)
    ids = np.sort(rng.permutation(tiny.VOCAB)[:REDUCED_SIZE]).astype(np.int32)
    target = tiny.params().target
    size = NETWORK.hidden_size
    return params.replace(
        draft_to_target=jnp.asarray(ids),
        head=target.head[:, ids],
        fc=params.fc.at[-size:].add(jnp.eye(size)),
    )
