"""Reference DFlash and DSpark heads in plain torch (arXiv 2602.06036 and 2607.05147).

They have no cache and no batch, and share no code with jspec. They take the tensors of a checkpoint
under their published names, and its config.json.
"""

import pytest

torch = pytest.importorskip("torch")
import torch.nn.functional as F  # noqa: E402

from tests.models.torch_heads import Blocks, rotate  # noqa: E402


class DFlashRef:
    """A head of either layout; missing matrices are those of the target."""

    anchored = False  # default of config.json's sample_from_anchor

    def __init__(self, tensors, raw, target_embedding=None, target_head=None):
        self.raw = raw | (raw.get("dflash_config") or {}) | raw.get("transformer_layer_config", {})
        self.speculators = "speculators_model_type" in raw
        self.blocks, self.tensors = Blocks(tensors, self.raw), tensors
        self.embedding = tensors.get("embed_tokens.weight", target_embedding)
        self.head = tensors.get("lm_head.weight", target_head)

    def hidden(self, features, root, depth):
        """Return the inputs [depth, D] of the output matrix.

        Args:
          features: [n, C, D_target], the target's hidden states at positions 0 .. n - 1.
          root: id of the token at position n.
          depth: number of tokens to draft.
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
        """Return logits [depth, Vd] of a block."""
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
        scores = scores.masked_fill(~self.mask(start, len(x), layer), float("-inf"))
        mixed = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        return b.linear(mixed, f"{name}.o_proj")

    def mask(self, start, slots, layer):
        """Return the positions that each slot sees, bool [slots, start + slots]."""
        mine, theirs = start + torch.arange(slots)[:, None], torch.arange(start + slots)
        kinds = self.raw.get("layer_types") or []
        slides = bool(kinds) and kinds[layer] == "sliding_attention"
        if self.raw.get("use_swa"):
            slides = True
        if self.speculators:
            causal = slides and not self.raw.get("sliding_window_non_causal")
        else:
            causal = self.raw.get("causal", slides)
        mask = theirs <= mine if causal else torch.ones(slots, start + slots, dtype=torch.bool)
        window = self.raw.get("swa_window_size") or self.raw.get("sliding_window")
        return mask & (theirs > mine - window) if slides else mask


class DSparkRef(DFlashRef):
    """A head with a bias by the previous token."""

    anchored = True

    def path_logits(self, features, path, depth):
        """Return logits [len(path), Vd] after each token of ``path`` (root first) in a block."""
        hidden = self.hidden(features, path[0], depth)
        state = torch.zeros(self.tensors["markov_head.markov_w1.weight"].shape[1])
        logits = []
        for h, token in zip(hidden, path, strict=False):
            state, bias = self.bias(state, h, int(token))
            logits.append(h @ self.head.T + bias)
        return torch.stack(logits)

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

    def confidences(self, features, path, depth):
        """Return confidences [len(path)] of the tokens drafted after each token of ``path``."""
        hidden = self.hidden(features, path[0], depth)
        confidences = []
        for h, token in zip(hidden, path, strict=False):
            if self.tensors["confidence_head.proj.weight"].shape[1] > len(h):
                h = torch.cat([h, self.tensors["markov_head.markov_w1.weight"][int(token)]])
            confidences.append(self.affine(h, "confidence_head.proj")[0].sigmoid())
        return torch.stack(confidences)

    def affine(self, x, name):
        return F.linear(x, self.tensors[f"{name}.weight"], self.tensors[f"{name}.bias"])
