"""Tiny MTP modules for the tiny target, random and trained, and their torch reference.

The reference is written from the formulas of arXiv 2412.19437, section 2.2, and what servers do; it
takes the tensors of a file under their published names, keeps no cache and shares no code with
jspec.
"""

import dataclasses
import functools

import jax
import numpy as np

from jspec.checkpoints.heads import mtp as mtp_format
from jspec.drafters import Mtp
from jspec.models.heads import mtp
from tests import tiny
from tests.drafters import heads

_SIZES = tiny.TARGET.config
CONFIGS = {
    "one": mtp_format.config_for(_SIZES, "mimo"),
    "raw": mtp_format.config_for(_SIZES, "deepseek"),
    "two": dataclasses.replace(
        mtp_format.config_for(_SIZES, "deepseek", modules=2), feeds_normed=True
    ),
    "two raw": mtp_format.config_for(_SIZES, "deepseek", modules=2),
}


def drafter(name: str, num_speculative_tokens: int | None = None, **settings) -> Mtp:
    """Return the drafter of tiny modules for the tiny target."""
    return Mtp(CONFIGS[name], tiny.TARGET, num_speculative_tokens, **settings)


@functools.cache
def random_params(name: str):
    """Return distinct weights, large enough for varied drafts."""
    return heads.drawn(mtp, CONFIGS[name], np.random.default_rng(len(name)), 0.2, (0.8, 0.3))


@functools.partial(jax.jit, static_argnames="config")
def rows_of_text(params, config, texts, features):
    """Return the outputs of each module over texts [B, T]: a list of [B, T - 1 - m, D]."""
    target = tiny.params().target
    embedded, outputs = tiny.TARGET.embed(target, texts[:, 1:]), []
    hidden = features[:, :-1]
    for module in range(config.n_predict):
        empty = mtp.init_cache(config, len(texts), 0)
        out, _ = mtp.prefill(params, config, module, embedded, hidden, empty)
        outputs.append(out)
        hidden, embedded = out[:, :-1], embedded[:, 1:]
    return outputs


@functools.cache
def trained_params(name: str):
    """Return weights trained for a few hundred steps toward the target: often right, not always."""
    config, target = CONFIGS[name], tiny.params().target
    windows, features, logits = heads.lessons(config.capture_layers)

    def loss(params, batch):
        total = 0.0
        outs = rows_of_text(params, config, windows[batch], features[0][batch])
        for module, out in enumerate(outs):
            rows = mtp.unembed(params, config, module, out, tiny.TARGET, target)
            wanted = jax.nn.softmax(logits[batch, 1 + module :], -1)
            total -= (wanted * jax.nn.log_softmax(rows, -1)).sum(-1).mean()
        return total

    return heads.fit(random_params(name), loss, 5e-3, len(windows), 150)


def torch_reference(name: str, params):
    """Return the modules in plain torch, from the file that jspec writes of them."""
    # A layout names the stream that it hands on; the reference is given it separately.
    config, written = CONFIGS[name], CONFIGS["two raw" if name == "two" else name]
    tensors, _ = heads.saved(written, params)
    sizes = {
        "num_hidden_layers": _SIZES.num_layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "hidden_size": 32,
        "rms_norm_eps": 1e-6,
    }
    return reference()(
        tensors, sizes, *heads.lent(), mimo=config.hidden_first, normed=config.feeds_normed
    )


def in_torch(drafter, name: str, params):
    """Return a function of a text: log-probabilities [V] after (root, path)."""
    head = torch_reference(name, params)

    def of(text):
        features = heads.torch_states(text, drafter.capture_layers)[:, 0]
        draft = lambda root, path: head.draft_logits(features[:root], [*text[1 : root + 1], *path])
        return lambda root, path: heads.over_all_tokens(draft(root, path), params)

    return of


def reference():
    """Return the class; importing it needs torch."""
    import torch

    from tests.models.torch_heads import Blocks, rms_norm

    def turned(x, positions, theta=10000.0):
        half = x.shape[-1] // 2
        angle = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
        cos, sin = (f(angle)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    class MtpRef:
        """Hold ``tensors`` of a file; those of module m's block begin with ``prefixes[m]``."""

        def __init__(self, tensors, sizes, embedding, head, *, mimo, normed):
            count = sizes["num_hidden_layers"]
            names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
            self.names = names if mimo else ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            start = "model.mtp_layers.{}" if mimo else "model.layers.{}"
            first = 0 if mimo else count
            self.prefixes = [start.format(first + k) for k in range(8)]
            self.prefixes = [p for p in self.prefixes if f"{p}.{self.names[2]}.weight" in tensors]
            self.blocks, self.tensors = Blocks(tensors, sizes), tensors
            self.embedding, self.head, self.mimo, self.normed = embedding, head, mimo, normed

        def draft_logits(self, features, tokens):
            """Return logits [V] after the last of ``tokens``.

            Args:
              features: [n, D], of the target at positions 0..n-1, after its final norm.
              tokens: ids of positions 1..R, R >= n; those after n are drafted.
            """
            count, modules = len(features), len(self.prefixes)
            # Rows of each module as (position, feature, token), those of committed features first.
            rows, true = [[] for _ in range(modules)], list(features)
            for module in range(modules):
                slots = range(module, count)
                rows[module] = [(j, f, tokens[j]) for j, f in zip(slots, true, strict=True)]
                if rows[module]:
                    true = list(self.run(module, rows[module]))
                    if module == 0:
                        out = true[-1]
                    true = true[:-1]
            step = 0
            for step, token in enumerate(tokens[count:], 1):
                module_rows = rows[step % modules]
                module_rows.append((count - 1 + step, out, token))
                out = self.run(step % modules, module_rows)[-1]
            name = self.prefixes[step % modules]
            normed = out if self.normed else self.norm(out, f"{name}.{self.names[3]}")
            return normed @ self.head.T

        def norm(self, x, name):
            return rms_norm(x, self.tensors[f"{name}.weight"], self.blocks.eps)

        def run(self, module, rows):
            """Return the outputs of a module over rows, without a cache."""
            prefix = self.prefixes[module]
            positions = torch.tensor([position for position, _, _ in rows])
            f = torch.stack([feature for _, feature, _ in rows])
            e = self.embedding[torch.tensor([token for _, _, token in rows])]
            e = torch.where(positions[:, None] == 0, 0.0, e)
            e = self.norm(e, f"{prefix}.{self.names[0]}")
            f = self.norm(f, f"{prefix}.{self.names[1]}")
            x = torch.cat([f, e] if self.mimo else [e, f], -1)
            x = self.blocks.linear(x, f"{prefix}.{self.names[2]}")
            normed = self.norm(x, f"{prefix}.input_layernorm")
            x = x + self.attention(normed, f"{prefix}.self_attn", positions)
            x = x + self.mlp(x, prefix)
            return self.norm(x, f"{prefix}.{self.names[3]}") if self.normed else x

        def mlp(self, x, prefix):
            return self.blocks.mlp(x, prefix)

        def attention(self, x, name, positions):
            q, k, v = (
                self.blocks.linear(x, f"{name}.{part}_proj").reshape(len(x), -1, self.blocks.dim)
                for part in "qkv"
            )
            q, k = turned(q, positions), turned(k, positions)
            groups = self.blocks.heads // self.blocks.kv_heads
            k, v = (part.repeat_interleave(groups, 1) for part in (k, v))
            scores = torch.einsum("qhd,khd->hqk", q, k) * self.blocks.dim**-0.5
            seen = positions[:, None] >= positions
            weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
            mixed = torch.einsum("hqk,khd->qhd", weights, v).reshape(len(x), -1)
            return self.blocks.linear(mixed, f"{name}.o_proj")

    return MtpRef
