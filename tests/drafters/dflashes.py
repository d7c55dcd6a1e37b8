"""Tiny random DFlash and DSpark heads for the tiny target, and their torch references."""

import functools

import numpy as np

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
    rng = np.random.default_rng(len(name) + 10)
    params = heads.drawn(dflash, config, rng)
    return heads.scattered(params, rng) if config.reduced else params


def torch_reference(name: str, params):
    """Return the head in plain torch, from the file that jspec writes of it."""
    # Imported here, so that the rest of this file works without torch.
    from tests.models.torch_dflash import DFlashRef, DSparkRef

    files = heads.saved(CONFIGS[name], params, layout=LAYOUTS[name], target_name="someone/model")
    return (DSparkRef if name in SPARKS else DFlashRef)(*files, *heads.lent())


def in_torch(drafter, name: str, params):
    """Return a function of a text: log-probabilities [V] after (root, path)."""
    head, depth = torch_reference(name, params), drafter.max_depth

    def of(text):
        states = heads.torch_states(text, drafter.capture_layers)
        block = functools.cache(lambda root: head.draft_logits(states[:root], text[root], depth))

        def log_probs(root, path):
            if name in SPARKS:
                logits = head.path_logits(states[:root], [text[root], *path], depth)[-1]
            else:
                logits = block(root)[len(path)]
            return heads.over_all_tokens(logits, params)

        return log_probs

    return of
