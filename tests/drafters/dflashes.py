"""Tiny random DFlash and DSpark heads for the tiny target, and their torch references."""

import functools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.heads import head_files
from jspec.drafters.dflash import DFlash, DSpark
from jspec.models.heads import dflash
from jspec.models.heads.dflash import DFlashConfig
from jspec.models.heads.dspark import SparkConfig
from tests import networks, tiny
from tests.drafters import heads

WIDTH, REDUCED_SIZE, MASK = tiny.TARGET.config.hidden_size, 40, 63
_NETWORK = networks.changed(tiny.TARGET.config, num_layers=2, intermediate_size=48, qk_norm=True)
_SLIDING = networks.changed(_NETWORK, windows=(7, None))
_REDUCED = networks.changed(_NETWORK, vocab_size=REDUCED_SIZE, num_layers=1)
CONFIGS = {
    "dflash": DFlashConfig(_NETWORK, (0, 1), WIDTH, tiny.VOCAB, 5, MASK),
    "sliding": DFlashConfig(_SLIDING, (1,), WIDTH, tiny.VOCAB, 4, MASK, causal=(True, False)),
    "reduced": DFlashConfig(
        _REDUCED,
        (0, 1),
        WIDTH,
        tiny.VOCAB,
        4,
        MASK,
        from_anchor=True,
        separate_embedding=True,
        separate_head=True,
    ),
}
_SMALL = networks.changed(_NETWORK, num_layers=1)
SPARKS = {
    "vanilla": DFlashConfig(
        _SMALL,
        (1,),
        WIDTH,
        tiny.VOCAB,
        4,
        MASK,
        from_anchor=True,
        spark=SparkConfig(6, "vanilla", True, True),
    ),
    "gated": DFlashConfig(
        _SMALL, (0, 1), WIDTH, tiny.VOCAB, 5, MASK, spark=SparkConfig(5, "gated", True)
    ),
    "rnn": DFlashConfig(
        _REDUCED,
        (1,),
        WIDTH,
        tiny.VOCAB,
        4,
        MASK,
        from_anchor=True,
        separate_embedding=True,
        separate_head=True,
        spark=SparkConfig(4, "rnn"),
    ),
}
CONFIGS |= SPARKS
LAYOUTS = {
    name: "dflash-speculators" if config.separate_head else "dflash"
    for name, config in CONFIGS.items()
}


def drafter(name: str, num_speculative_tokens: int | None = None, **settings) -> DFlash:
    """Return the drafter of tiny heads for the tiny target."""
    kind = DSpark if name in SPARKS else DFlash
    return kind(CONFIGS[name], tiny.TARGET, num_speculative_tokens, **settings)


@functools.cache
def random_params(name: str):
    """Return distinct weights, large enough for varied drafts, and a scattered vocabulary."""
    config = CONFIGS[name]
    shapes = jax.eval_shape(lambda: dflash.init_params(jax.random.key(0), config))
    rng = np.random.default_rng(len(name) + 10)
    draw = lambda x: rng.normal(0, 0.2, x.shape) if x.ndim > 1 else rng.normal(1, 0.2, x.shape)
    params = jax.tree.map(lambda x: jnp.asarray(draw(x), jnp.float32), shapes)
    if not config.reduced:
        return params
    ids = np.sort(rng.permutation(tiny.VOCAB)[:REDUCED_SIZE]).astype(np.int32)
    return params.replace(draft_to_target=jnp.asarray(ids))


def torch_reference(name: str, params):
    """Return the head in plain torch, from the file that jspec writes of it."""
    # Imported here, so that the rest of this file works without torch.
    import torch
    from safetensors.torch import load_file

    from tests.models.torch_dflash import DFlashRef, DSparkRef

    target = tiny.params().target
    lent = (torch.tensor(np.asarray(x)) for x in (target.embedding, target.head.T))
    with tempfile.TemporaryDirectory() as directory:
        head_files.save_head(
            directory,
            CONFIGS[name],
            params,
            tiny.TARGET.config,
            layout=LAYOUTS[name],
            target_name="someone/model",
        )
        tensors = load_file(Path(directory) / "model.safetensors")
        raw = json.loads((Path(directory) / "config.json").read_text())
    return (DSparkRef if name in SPARKS else DFlashRef)(tensors, raw, *lent)


def states_of(text, layers):
    """Return the target's hidden states [T, C, D] of a text, in torch."""
    import torch

    features, _ = heads.hidden_states(np.array([text]), layers)
    return torch.stack([torch.tensor(np.asarray(feature[0])) for feature in features], 1)
