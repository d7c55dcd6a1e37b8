"""A tiny P-EAGLE head for the tiny target."""

import functools

import jax.numpy as jnp
import numpy as np

from jspec.models.heads import eagle
from tests import networks, tiny
from tests.drafters import heads

MASK = 63
NETWORK = networks.changed(tiny.TARGET.config, intermediate_size=48, vocab_size=heads.REDUCED_SIZE)
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
    rng = np.random.default_rng(3)
    params = heads.scattered(heads.drawn(eagle, CONFIG, rng), rng)
    target, size = tiny.params().target, NETWORK.hidden_size
    return params.replace(
        head=target.head[:, params.draft_to_target],
        fc=params.fc.at[-size:].add(jnp.eye(size)),
    )
