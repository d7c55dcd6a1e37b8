"""A tiny target and draft model, shared by all tests so that programs compile once."""

import functools

import jax
import numpy as np

from jspec.core.types import Params
from jspec.drafters import DraftModel, NGram, NoDrafter
from jspec.engine.profile import Profile
from jspec.models import decoder
from tests import networks

VOCAB = 64
TARGET = decoder.Decoder(networks.small(vocab_size=VOCAB, intermediate_size=64, max_positions=512))
DRAFT_CONFIG = networks.build(
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=32,
    num_layers=1,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    max_positions=512,
    tie_embeddings=True,
)
NONE = NoDrafter()
NODES = Profile(nodes=True)  # answers with a trace
NGRAM = NGram(4, prompt_lookup_min=1, prompt_lookup_max=3)
DRAFT = DraftModel(DRAFT_CONFIG, 4)
GREEDY_DRAFT = DraftModel(DRAFT_CONFIG, 4, draft_sample_method="greedy")


@functools.cache
def params() -> Params:
    """Return the weights of the target and of the draft model."""
    return Params(
        networks.loud(decoder.init_params(jax.random.key(0), TARGET.config)),
        networks.loud(decoder.init_params(jax.random.key(1), DRAFT_CONFIG)),
    )


def prompts(lengths=(1, 9, 23)) -> list[tuple[int, ...]]:
    """Return random prompts, one of each length."""
    rng = np.random.default_rng(5)
    return [tuple(rng.integers(0, VOCAB, size=length).tolist()) for length in lengths]
