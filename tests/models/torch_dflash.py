"""DFlash and DSpark heads in plain torch, from the formulas of arXiv 2602.06036 and 2607.05147.

The references that jspec's heads, and the drafters on top of them, are compared with: no cache, no
batch. They take the tensors of a file under their published names and its config.json; they share
no code with jspec.
"""

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

from tests.models.torch_heads import Blocks, rotate  # noqa: E402


class DFlashRef:
    """A head of either layout; the target's matrices serve where the file has none."""

    anchored = False  # unless config.json says so

    def __init__(self, tensors, raw, target_embedding=None, target_head=None):
        self.raw = raw | (raw.get("dflash_config") or {}) | raw.get("transformer_layer_config", {})
        self.speculators = "speculators_model_type" in raw
        self.blocks, self.tensors = Blocks(tensors, self.raw), tensors
        self.embedding = tensors.get("embed_tokens.weight", target_embedding)
        self.head = tensors.get("lm_head.weight", target_head)

    def hidden(self, features, root, depth):
        """Rows [depth, D] that draft, before the output matrix.

        Args:
          features: [n, C, D_target], the target's hidden states at positions 0 .. n - 1.
          root: id of the token at position n.
          depth: tokens to draft.
        """
        anchored = bool(self.raw.get("sample_from_anchor", self.anchored))
        slots = depth if anchored else depth + 1
        ids = torch.full((slots,), self.raw["mask_token_id"])
        ids[0] = int(root)
        x = self.embedding[ids]
        context = self.blocks.linear(features.flatten(1), "fc")
        context = self.blocks.norm(context, "hidden_norm")
        for layer in range(self.raw["num_hidden_layers"]):
            name = f"layers.{layer}"
            normed = self.blocks.norm(x, f"{name}.input_layernorm")
            x = x + self.attention(normed, context, layer)
            x = x + self.blocks.mlp(x, name)
        return self.blocks.norm(x, "norm")[slots - depth :]

    def draft_logits(self, features, root, depth):
        """Logits [depth, Vd] of a block."""
        return self.hidden(features, root, depth) @ self.head.T

    def attention(self, x, context, layer):
        b, name = self.blocks, f"layers.{layer}.self_attn"
        split = lambda rows, part: b.linear(rows, f"{name}.{part}_proj").reshape(
            len(rows), -1, b.dim
        )
        both = torch.cat([context, x])
        q, k, v = split(x, "q"), split(both, "k"), split(both, "v")
        q, k = b.norm(q, f"{name}.q_norm"), b.norm(k, f"{name}.k_norm")
        start = len(context)
        q = rotate(torch.cat([q.new_zeros(start, *q.shape[1:]), q]), b.theta)[start:]
        k = rotate(k, b.theta)
        k, v = (part.repeat_interleave(b.heads // b.kv_heads, 1) for part in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) * b.dim**-0.5
        scores = scores.masked_fill(~self.seen(start, len(x), layer), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        return b.linear(mixed, f"{name}.o_proj")

    def seen(self, start, slots, layer):
        """Which positions of context and block each slot sees, [slots, start + slots]."""
        mine, theirs = start + torch.arange(slots)[:, None], torch.arange(start + slots)
        kinds = self.raw.get("layer_types") or []
        slides = bool(kinds) and kinds[layer] == "sliding_attention"
        if self.raw.get("use_swa"):
            slides = True
        if self.speculators:
            causal = slides and not self.raw.get("sliding_window_non_causal")
        else:
            causal = self.raw.get("causal", slides)
        seen = theirs <= mine if causal else torch.ones(slots, start + slots, dtype=torch.bool)
        window = self.raw.get("swa_window_size") or self.raw.get("sliding_window")
        return seen & (theirs > mine - window) if slides else seen


class DSparkRef(DFlashRef):
    """A head whose slots also see the token before them."""

    anchored = True

    def path_logits(self, features, path, depth):
        """Logits [len(path), Vd] after each token of ``path``, root first, in a block of depth."""
        hidden = self.hidden(features, path[0], depth)
        state = torch.zeros(self.tensors["markov_head.markov_w1.weight"].shape[1])
        found = []
        for h, token in zip(hidden, path, strict=False):
            state, bias = self.bias(state, h, int(token))
            found.append(h @ self.head.T + bias)
        return torch.stack(found)

    def bias(self, state, h, token):
        w, out = (self.tensors[f"markov_head.markov_w{i}.weight"] for i in (1, 2))
        w = w[token]
        if "markov_head.gate_proj.weight" in self.tensors:
            w = self.affine(torch.cat([h, w]), "markov_head.gate_proj").sigmoid() * w
        if "markov_head.joint_proj.weight" in self.tensors:
            mixed = self.affine(torch.cat([state, w, h]), "markov_head.joint_proj")
            gate, candidate, w = mixed.chunk(3)
            gate, w = gate.sigmoid(), w.tanh()
            state = gate * state + (1 - gate) * candidate.tanh()
        return state, out @ w

    def chances(self, features, path, depth):
        """Guessed chances [len(path)] that what is drafted after each token is accepted."""
        hidden = self.hidden(features, path[0], depth)
        found = []
        for h, token in zip(hidden, path, strict=False):
            if self.tensors["confidence_head.proj.weight"].shape[1] > len(h):
                h = torch.cat([h, self.tensors["markov_head.markov_w1.weight"][int(token)]])
            found.append(self.affine(h, "confidence_head.proj")[0].sigmoid())
        return torch.stack(found)

    def affine(self, x, name):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])
