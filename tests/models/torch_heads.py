"""Reference EAGLE and Medusa heads in plain torch, without a cache.

They share no code with jspec. They take the tensors of a checkpoint under their published names,
and its config.json. They compute logits along one path: row i pairs the target's hidden states of
position i with ``tokens[i]``, the token of position i + 1. Rows beyond the hidden states read the
output of the row before.
"""

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

torch.set_num_threads(1)  # more threads are 40 times slower for small tensors


def rms_norm(x, weight, eps):
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)).to(x.dtype)


def rotate(x, theta):
    """Return the rotary embedding of x [T, H, D], with row t at position t."""
    length, _, dim = x.shape
    frequency = theta ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angle = torch.arange(length, dtype=torch.float64)[:, None] * frequency
    cos, sin = (torch.cat([f(angle)] * 2, -1)[:, None].to(x.dtype) for f in (torch.cos, torch.sin))
    rotated = torch.cat([-x[..., dim // 2 :], x[..., : dim // 2]], -1)
    return x * cos + rotated * sin


class Blocks:
    """Attention and MLP of Llama-like blocks, with the tensor names of checkpoints."""

    def __init__(self, tensors, config):
        self.tensors, self.config = tensors, config
        self.heads = config["num_attention_heads"]
        self.kv_heads = config.get("num_key_value_heads") or self.heads
        self.dim = config.get("head_dim") or config["hidden_size"] // self.heads
        self.eps = config.get("rms_norm_eps", 1e-6)
        self.theta = config.get("rope_theta", 10000.0)

    def norm(self, x, name):
        return rms_norm(x, self.tensors[f"{name}.weight"], self.eps)

    def linear(self, x, name):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias"))

    def attention(self, x, block, window=None):
        length, name = x.shape[0], f"{block}.self_attn"
        q, k, v = (
            self.linear(x, f"{name}.{part}_proj").reshape(length, -1, self.dim) for part in "qkv"
        )
        if f"{name}.q_norm.weight" in self.tensors:
            q, k = self.norm(q, f"{name}.q_norm"), self.norm(k, f"{name}.k_norm")
        q, k = rotate(q, self.theta), rotate(k, self.theta)
        k, v = (part.repeat_interleave(self.heads // self.kv_heads, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * self.dim**-0.5
        age = torch.arange(length)[:, None] - torch.arange(length)
        mask = (age >= 0) if window is None else (age >= 0) & (age < window)
        weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
        mixed = torch.einsum("hqk,khd->qhd", weights, v).reshape(length, -1)
        return self.linear(mixed, f"{name}.o_proj")

    def mlp(self, x, block):
        x = self.norm(x, f"{block}.post_attention_layernorm")
        gate, up = self.linear(x, f"{block}.mlp.gate_proj"), self.linear(x, f"{block}.mlp.up_proj")
        return self.linear(F.silu(gate) * up, f"{block}.mlp.down_proj")

    def window(self, layer):
        kinds = self.config.get("layer_types") or ["full_attention"] * (layer + 1)
        return self.config["sliding_window"] if kinds[layer] == "sliding_attention" else None

    def later_blocks(self, x):
        for layer in range(1, self.config["num_hidden_layers"]):
            block = f"layers.{layer}"
            normed = self.norm(x, f"{block}.input_layernorm")
            x = x + self.attention(normed, block, self.window(layer))
            x = x + self.mlp(x, block)
        return x


class _Eagle:
    """The base of the generations: rows of true features, then self-fed rows."""

    def draft_logits(self, features, tokens):
        """Return logits [R, Vd] of every row.

        Args:
          features: [n, C, D_target], hidden states of the target at positions 0..n-1.
          tokens: ids of the R >= n tokens at positions 1..R.
        """
        rows = list(self.fuse(features))
        while True:
            out = self.forward(torch.stack(rows), torch.as_tensor(tokens)[: len(rows)])
            if len(rows) == len(tokens):
                return self.logits(out)
            rows.append(self.fed_back(out[-1]))

    def embed(self, tokens):
        return self.embedding[tokens]


class Eagle1Ref(_Eagle):
    """EAGLE-1 and -2; the feature is the target's last hidden state after its final norm."""

    def __init__(self, tensors, config, target_embedding, target_head):
        self.blocks, self.tensors, self.config = Blocks(tensors, config), tensors, config
        self.embedding = tensors.get("embed_tokens.weight", target_embedding)
        self.head = tensors.get("lm_head.weight", target_head)

    def fuse(self, features):
        return features[:, 0]

    def forward(self, f, tokens):
        e = self.embed(tokens)
        if self.config.get("add_para_norm"):
            e = self.blocks.norm(e, "embedding_layernorm")
            f = self.blocks.norm(f, "hidden_states_layernorm")
        x = self.blocks.linear(torch.cat([e, f], -1), "fc")
        x = x + self.blocks.attention(x, "layers.0")
        x = x + self.blocks.mlp(x, "layers.0")
        return self.blocks.later_blocks(x)

    def fed_back(self, out):
        return out

    def logits(self, out):
        return out @ self.head.T


class Eagle3Ref(_Eagle):
    """EAGLE-3 in the published layout or that of speculators."""

    def __init__(self, tensors, config, target_embedding=None, target_head=None):
        config = config | config.get("transformer_layer_config", {})
        self.first = "midlayer" if "midlayer.hidden_norm.weight" in tensors else "layers.0"
        self.blocks, self.tensors, self.config = Blocks(tensors, config), tensors, config
        self.embedding = tensors.get("embed_tokens.weight", target_embedding)
        self.head = tensors.get("lm_head.weight", target_head)

    def fuse(self, features):
        if self.config.get("fc_norm"):
            parts = [
                self.blocks.norm(features[:, i], f"fc_norm.{i}") for i in range(features.shape[1])
            ]
            features = torch.stack(parts, 1)
        flat = features.flatten(1)
        if self.config.get("norm_before_fc"):
            flat = self.blocks.norm(flat, "input_norm")
        return self.blocks.linear(flat, "fc")

    def forward(self, g, tokens):
        e = self.blocks.norm(self.embed(tokens), f"{self.first}.input_layernorm")
        normed = self.blocks.norm(g, f"{self.first}.hidden_norm")
        residual = normed if self.config.get("norm_before_residual") else g
        joined = torch.cat([e, normed], -1)
        x = residual + self.blocks.attention(joined, self.first, self.blocks.window(0))
        x = x + self.blocks.mlp(x, self.first)
        return self.blocks.later_blocks(x)

    def fed_back(self, out):
        return self.blocks.norm(out, "norm") if self.config.get("norm_output") else out

    def logits(self, out):
        return self.blocks.norm(out, "norm") @ self.head.T

    def target_ids(self):
        """Return the target's id of every draft id."""
        offsets = self.tensors.get("d2t")
        ids = torch.arange(self.head.shape[0])
        return ids if offsets is None else ids + offsets


class MedusaRef:
    """Medusa heads with published names or vLLM's; a missing output is the target's."""

    def __init__(self, tensors, num_heads, num_layers, target_head=None):
        self.tensors, self.num_heads, self.num_layers = tensors, num_heads, num_layers
        self.target_head = target_head

    def draft_logits(self, hidden):
        """Return logits [n, num_heads, Vd] of normed hidden states [n, D] of the target."""
        return torch.stack([self._head(hidden, i) for i in range(self.num_heads)], 1)

    def _head(self, x, i):
        for layer in range(self.num_layers):
            name = f"{i}.{layer}.linear"
            if f"{name}.weight" not in self.tensors:
                name = f"blocks.{i}.layers.{layer}"
            weight, bias = self.tensors[f"{name}.weight"], self.tensors.get(f"{name}.bias")
            x = x + F.silu(F.linear(x, weight, bias))
        names = (f"{i}.{self.num_layers}.weight", f"lm_heads.{i}.weight", "lm_head.weight")
        outputs = [self.tensors[name] for name in names if name in self.tensors]
        return x @ (outputs[0] if outputs else self.target_head).T
