"""Tiny Hydra heads for the tiny target, random and trained, and their torch reference.

The reference is written from the formulas of arXiv 2402.05109 and takes the tensors of a file under
their published names; it shares no code with jspec.
"""

import functools

import jax
import numpy as np

from jspec.drafters import Hydra
from jspec.models import decoder
from jspec.models.heads import hydra
from jspec.models.heads.hydra import HydraConfig
from tests import networks, tiny
from tests.drafters import heads

WIDTH, LAST = tiny.TARGET.config.hidden_size, tiny.TARGET.config.num_layers
RAW_TARGET = {
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "hidden_size": WIDTH,
    "rms_norm_eps": tiny.TARGET.config.norm.eps,
    "rope_theta": 10000.0,
}
_PREFIX = networks.changed(tiny.TARGET.config, num_layers=1)
CONFIGS = {
    "mlp": HydraConfig(4, 1, WIDTH, tiny.VOCAB, (LAST,)),
    "mlp deep": HydraConfig(2, 4, WIDTH, tiny.VOCAB, (LAST - 1,), tie_blocks=True),
    "prefix": HydraConfig(6, 2, WIDTH, tiny.VOCAB, (LAST,), network=_PREFIX),
    "prefix deep": HydraConfig(
        2, 3, WIDTH, tiny.VOCAB, (LAST,), tie_blocks=True, output_bias=False, network=_PREFIX
    ),
    "untied blocks": HydraConfig(2, 3, WIDTH, tiny.VOCAB, (LAST,)),
}


def drafter(name: str, num_speculative_tokens: int | None = None, **settings) -> Hydra:
    """Return the drafter of tiny heads for the tiny target."""
    return Hydra(CONFIGS[name], tiny.TARGET, num_speculative_tokens, **settings)


@functools.cache
def random_params(name: str):
    """Return distinct weights, large enough for varied drafts."""
    return heads.drawn(hydra, CONFIGS[name], np.random.default_rng(len(name)), 0.15, (0.5, 0.3))


@functools.cache
def trained_params(name: str):
    """Return weights trained for a few hundred steps toward the target: often right, not always."""
    config, target = CONFIGS[name], tiny.params().target
    windows, features, logits = heads.lessons(config.capture_layers)
    length = windows.shape[1] - config.num_heads - 1

    def loss(params, batch):
        state, total = features[0][batch], 0.0
        if config.network is not None:
            empty = decoder.init_cache(config.network, len(batch), 0)
            state, _ = hydra.prefill(params, config, state, empty)
        state = state[:, :length]
        for head in range(config.num_heads):
            fed = windows[batch, 1 + head : 1 + head + length]
            state, x = hydra.step(params, config, state, tiny.TARGET.embed(target, fed), head)
            wanted = jax.nn.softmax(logits[batch, 1 + head : 1 + head + length], -1)
            rows = hydra.unembed(params, x, head)
            total -= (wanted * jax.nn.log_softmax(rows, -1)).sum(-1).mean()
        return total

    return heads.fit(random_params(name), loss, 1e-2, len(windows), 200)


def torch_reference(name: str, params):
    """Return the heads in torch, from the file that jspec writes of them."""
    tensors, _ = heads.saved(CONFIGS[name], params, target_name="someone/model")
    raw = RAW_TARGET if CONFIGS[name].network is not None else None
    return reference()(tensors, heads.lent()[0], raw)


def in_torch(drafter, name: str, params):
    """Return a function of a text: log-probabilities [V] after (root, path)."""
    head = torch_reference(name, params)

    def of(text):
        features = heads.torch_states(text, drafter.capture_layers)[:, 0]
        draft = lambda root, path: head.draft_logits(features[:root], [text[root], *path])[-1]
        return lambda root, path: heads.over_all_tokens(draft(root, path), params)

    return of


def reference():
    """Return the class; importing it needs torch."""
    import torch
    import torch.nn.functional as F

    from tests.models import torch_heads

    class HydraRef:
        """Heads of the ``tensors`` of a file; a prefix layer has the target's config.json."""

        def __init__(self, tensors, embedding, target_config=None):
            self.tensors, self.embedding = tensors, embedding
            self.target_config = target_config

        def draft_logits(self, features, tokens):
            """Return logits [T, V] after each of ``tokens``, root first, from features [n, D]."""
            read = [self.prefix(features)[-1] if self.target_config else features[-1]]
            logits = []
            for head, token in enumerate(tokens):
                read.append(self.embedding[token])
                logits.append(self.head(head, torch.cat(read)))
            return torch.stack(logits)

        def affine(self, x, name):
            return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

        def head(self, head, x):
            first, step = (1, 2) if self.target_config else (0, 1)
            block = f"hydra_mlp.{head}.{first}"
            x = self.affine(x, f"{block}.res_connection") + F.silu(
                self.affine(x, f"{block}.linear")
            )
            while f"hydra_mlp.{head}.{first + step}.linear.weight" in self.tensors:
                first += step
                x = x + F.silu(self.affine(x, f"hydra_mlp.{head}.{first}.linear"))
            return self.affine(x, f"hydra_lm_head.{head}" + ".1" * bool(self.target_config))

        def prefix(self, x):
            start = "prefix_embeding_layer."
            tensors = {name.removeprefix(start): tensor for name, tensor in self.tensors.items()}
            blocks = torch_heads.Blocks(tensors, self.target_config)
            x = x + blocks.attention(blocks.norm(x, "layers.0.input_layernorm"), "layers.0")
            x = x + blocks.mlp(x, "layers.0")
            return blocks.norm(x, "norm")

    return HydraRef
