"""Tiny MTP modules for the tiny target: random and trained, and plain torch's view of the same.

The reference is written from the formulas of arXiv 2412.19437, section 2.2, and what servers do; it
takes the tensors of a file under their published names, keeps no cache and shares no code with
jspec.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np

from jspec.checkpoints.heads import mtp as mtp_format
from jspec.drafters import Mtp
from jspec.models.heads import mtp
from jspec.models.moe import MoeConfig
from tests import tiny
from tests.drafters import heads

_SIZES = tiny.TARGET.config
# Blocks of Qwen3-Next's that attend; and without experts, whose choice has no gradient.
GATED_SIZES = dataclasses.replace(
    _SIZES,
    rotary_dim=4,
    qk_norm=True,
    attention_gate=True,
    zero_centred_norms=True,
    moe=MoeConfig(8, 3, 12, _SIZES.intermediate_size, scoring="softmax", shared_gate=True),
)
_DENSE_SIZES = dataclasses.replace(GATED_SIZES, moe=None)
CONFIGS = {
    "one": mtp_format.config_for(_SIZES, "mimo"),
    "raw": mtp_format.config_for(_SIZES, "deepseek"),
    "two": dataclasses.replace(
        mtp_format.config_for(_SIZES, "deepseek", modules=2), feeds_normed=True
    ),
    "two raw": mtp_format.config_for(_SIZES, "deepseek", modules=2),
    "gated": mtp_format.config_for(GATED_SIZES, "qwen3_next"),
    "two gated": mtp_format.config_for(GATED_SIZES, "qwen3_next", modules=2),
    "dense": mtp_format.config_for(_DENSE_SIZES, "qwen3_next"),
}


def drafter(name: str, num_speculative_tokens: int | None = None, **settings) -> Mtp:
    """The drafter of tiny modules for the tiny target."""
    return Mtp(CONFIGS[name], tiny.TARGET, num_speculative_tokens, **settings)


@functools.cache
def random_params(name: str):
    """Weights large enough for varied drafts, no two of them equal."""
    shapes = jax.eval_shape(lambda: mtp.init_params(jax.random.key(0), CONFIGS[name]))
    rng = np.random.default_rng(len(name))
    draw = lambda x: rng.normal(0, 0.2, x.shape) if x.ndim > 1 else rng.normal(0.8, 0.3, x.shape)
    return jax.tree.map(lambda x: jnp.asarray(draw(x), jnp.float32), shapes)


@functools.partial(jax.jit, static_argnames="config")
def rows_of_text(params, config, texts, features):
    """What each module gives out over whole texts [B, T]: a list of [B, T - 1 - m, D]."""
    target = tiny.params().target
    embedded, found = mtp.embed(config, texts[:, 1:], tiny.TARGET, target), []
    hidden = features[:, :-1]
    for module in range(config.n_predict):
        empty = mtp.init_cache(config, len(texts), 0)
        out, _ = mtp.take_in(params, config, module, embedded, hidden, empty)
        found.append(out)
        hidden, embedded = out[:, :-1], embedded[:, 1:]
    return found


@functools.cache
def trained_params(name: str):
    """Weights after a few hundred steps toward the target's law: right often, but not always."""
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


@functools.cache
def trained_gated_params():
    """Of "gated": trained as "dense", then given small experts, and a gate near one half."""
    [trained], moe = trained_params("dense").layers, random_params("gated").layers[0].moe
    moe = moe.replace(down=0.1 * moe.down, shared_gate=0.1 * moe.shared_gate)
    return trained_params("dense").replace(
        layers=(trained.replace(moe=moe, down=2 * trained.down),)
    )


def reference():
    """The class in torch, which not every machine has."""
    import torch

    from tests.models.torch_heads import Blocks, rms_norm

    def turned(x, positions, theta=10000.0):
        half = x.shape[-1] // 2
        angle = positions[:, None].double() * theta ** (-torch.arange(half).double() / half)
        cos, sin = (f(angle)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
        first, second = x[..., :half], x[..., half:]
        return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)

    class MtpRef:
        """``tensors`` of a file; those of module m's block begin with ``prefixes[m]``."""

        first = 0.0  # what the embedding at position 0 is multiplied by

        def __init__(self, tensors, sizes, embedding, head, *, mimo, normed):
            count = sizes["num_hidden_layers"]
            names = ("token_layernorm", "hidden_layernorm", "input_proj", "final_layernorm")
            self.names = names if mimo else ("enorm", "hnorm", "eh_proj", "shared_head.norm")
            start = "model.mtp_layers.{}" if mimo else "model.layers.{}"
            first = 0 if mimo else count
            self.prefixes = [start.format(first + k) for k in range(8)]
            self.prefixes = [p for p in self.prefixes if f"{p}.{self.names[2]}.weight" in tensors]
            self.stems = self.prefixes
            self.blocks, self.tensors = Blocks(tensors, sizes), tensors
            self.embedding, self.head, self.mimo, self.normed = embedding, head, mimo, normed

        def draft_logits(self, features, tokens):
            """Logits [V] after the last of ``tokens``.

            Args:
              features: [n, D], of the target at positions 0..n-1, after its final norm.
              tokens: ids of positions 1..R, R >= n; those after n are drafted.
            """
            count, modules = len(features), len(self.prefixes)
            # Rows of each module as (position, feature, token), those of true features first.
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
                own = rows[step % modules]
                own.append((count - 1 + step, out, token))
                out = self.run(step % modules, own)[-1]
            name = self.stems[step % modules]
            normed = out if self.normed else self.norm(out, f"{name}.{self.names[3]}")
            return normed @ self.head.T

        def norm(self, x, name):
            return rms_norm(x, self.tensors[f"{name}.weight"], self.blocks.eps)

        def run(self, module, rows):
            """What a module gives out over rows, everything computed anew."""
            prefix, stem = self.prefixes[module], self.stems[module]
            positions = torch.tensor([position for position, _, _ in rows])
            f = torch.stack([feature for _, feature, _ in rows])
            e = self.embedding[torch.tensor([token for _, _, token in rows])]
            e = torch.where(positions[:, None] == 0, self.first * e, e)
            e = self.norm(e, f"{stem}.{self.names[0]}")
            f = self.norm(f, f"{stem}.{self.names[1]}")
            x = torch.cat([f, e] if self.mimo else [e, f], -1)
            x = self.blocks.linear(x, f"{stem}.{self.names[2]}")
            normed = self.norm(x, f"{prefix}.input_layernorm")
            x = x + self.attention(normed, f"{prefix}.self_attn", positions)
            x = x + self.mlp(x, prefix)
            return self.norm(x, f"{stem}.{self.names[3]}") if self.normed else x

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


def gated_reference():
    """The class in torch for Qwen3-Next's modules, by what vLLM and transformers do."""
    import torch
    import torch.nn.functional as F

    class GatedRef(reference()):
        """``sizes`` also say how many features are rotated, and how many experts a token meets."""

        first = 1.0

        def __init__(self, tensors, sizes, embedding, head):
            super().__init__(tensors, sizes, embedding, head, mimo=False, normed=True)
            self.names = ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc", "norm")
            blocks = {name.split(".")[2] for name in tensors if name.startswith("mtp.layers.")}
            self.prefixes = [f"mtp.layers.{block}" for block in sorted(blocks)]
            self.stems = ["mtp"] * len(blocks)
            self.rotated, self.chosen = sizes["rotated"], sizes["num_experts_per_tok"]

        def norm(self, x, name):
            weight = 1.0 + self.tensors[f"{name}.weight"]
            return x / (x.square().mean(-1, keepdim=True) + self.blocks.eps).sqrt() * weight

        def turned(self, x, positions):
            half = self.rotated // 2
            angle = positions[:, None] * 10000.0 ** (-torch.arange(half) / half)
            pair = torch.complex(x[..., :half], x[..., half : 2 * half])
            pair = pair * torch.polar(torch.ones_like(angle), angle)[:, None]
            return torch.cat([pair.real, pair.imag, x[..., 2 * half :]], -1)

        def attention(self, x, name, positions):
            count, heads, dim = len(x), self.blocks.heads, self.blocks.dim
            both = self.blocks.linear(x, f"{name}.q_proj").reshape(count, heads, 2 * dim)
            q, gate = both[..., :dim], both[..., dim:]
            k, v = (
                self.blocks.linear(x, f"{name}.{part}_proj").reshape(count, -1, dim)
                for part in "kv"
            )
            q = self.turned(self.norm(q, f"{name}.q_norm"), positions)
            k = self.turned(self.norm(k, f"{name}.k_norm"), positions)
            q = q.reshape(count, k.shape[1], -1, dim)  # queries of one key head beside each other
            scores = torch.einsum("qgnd,kgd->gnqk", q, k) / dim**0.5
            hidden = positions > positions[:, None]
            distributions = scores.masked_fill(hidden, float("-inf")).softmax(-1)
            mixed = torch.einsum("gnqk,kgd->qgnd", distributions, v).reshape(count, heads, dim)
            return self.blocks.linear((mixed * gate.sigmoid()).flatten(1), f"{name}.o_proj")

        def mlp(self, x, prefix):
            x = self.norm(x, f"{prefix}.post_attention_layernorm")
            distributions = self.blocks.linear(x, f"{prefix}.mlp.gate").softmax(-1)
            every = self.expert(x, f"{prefix}.mlp.shared_expert")
            out = self.blocks.linear(x, f"{prefix}.mlp.shared_expert_gate").sigmoid() * every
            least = distributions.topk(self.chosen).values[:, -1:]
            shares = torch.where(distributions >= least, distributions, 0.0)
            shares = shares / shares.sum(-1, keepdim=True)
            for expert, share in enumerate(shares.T):
                found = self.expert(x, f"{prefix}.mlp.experts.{expert}")
                out = out + share[:, None] * found
            return out

        def expert(self, x, name):
            gate, up = (self.blocks.linear(x, f"{name}.{part}_proj") for part in ("gate", "up"))
            return self.blocks.linear(F.silu(gate) * up, f"{name}.down_proj")

    return GatedRef
