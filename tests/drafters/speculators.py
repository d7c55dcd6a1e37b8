"""Tiny speculators for the tiny target with random weights, and their torch references.

The references are written from the formulas of arXiv 2404.19124 and of Arctic Inference, take the
tensors of a file under their published names, and share no code with jspec.
"""

import functools
import math

import jax
import numpy as np

from jspec.drafters import MlpSpeculator
from jspec.models.heads import arctic, mlp_speculator
from jspec.models.heads.arctic import LstmSpeculatorConfig
from jspec.models.heads.mlp_speculator import MlpSpeculatorConfig
from tests import tiny
from tests.drafters import heads

WIDTH = tiny.TARGET.config.hidden_size
LAST = tiny.TARGET.config.num_layers
INNER = 24
CONFIGS = {
    "untied": MlpSpeculatorConfig(4, WIDTH, INNER, tiny.VOCAB, (LAST,)),
    "untied scaled": MlpSpeculatorConfig(3, WIDTH, WIDTH, tiny.VOCAB, (LAST,), scale_input=True),
    "tied": MlpSpeculatorConfig(2, WIDTH, INNER, tiny.VOCAB, (LAST,), tie_weights=True),
    "tied scaled": MlpSpeculatorConfig(
        4, WIDTH, INNER, tiny.VOCAB, (LAST,), tie_weights=True, scale_input=True
    ),
    "lstm": LstmSpeculatorConfig(3, WIDTH, INNER, tiny.VOCAB, (LAST,), scale_input=True),
    "lstm untied": LstmSpeculatorConfig(3, WIDTH, INNER, tiny.VOCAB, (LAST,), tie_embeddings=False),
}


def drafter(name: str, num_speculative_tokens: int | None = None, **settings) -> MlpSpeculator:
    """Return the drafter of a tiny speculator for the tiny target."""
    return MlpSpeculator(CONFIGS[name], tiny.TARGET, num_speculative_tokens, **settings)


@functools.cache
def random_params(name: str):
    """Return distinct weights, large enough for peaked and varied drafts."""
    rng = np.random.default_rng(len(name))
    return heads.drawn(module_of(name), CONFIGS[name], rng, 0.5, (1, 0.3))


@functools.cache
def trained_params(name: str):
    """Return weights trained for a few hundred steps toward the target: often right, not always."""
    config, module = CONFIGS[name], module_of(name)
    windows, features, logits = heads.lessons(config.capture_layers)
    length = windows.shape[1] - config.n_predict - 1

    def loss(params, batch):
        state, total = module.start(config, features[0][batch, :length]), 0.0
        for stage in range(config.n_predict):
            fed = windows[batch, 1 + stage : 1 + stage + length]
            state, x = module.step(params, config, state, fed, stage)
            rows = module.unembed(params, x, stage)
            wanted = jax.nn.softmax(logits[batch, 1 + stage : 1 + stage + length], -1)
            total -= (wanted * jax.nn.log_softmax(rows, -1)).sum(-1).mean()
        return total

    return heads.fit(random_params(name), loss, 1e-2, len(windows), 300)


def module_of(name: str):
    """Return the network."""
    return arctic if isinstance(CONFIGS[name], LstmSpeculatorConfig) else mlp_speculator


def torch_reference(name: str, params):
    """Return the speculator in torch, from the file that jspec writes of it."""
    kind = references()["arctic-lstm" if "lstm" in name else "mlp_speculator"]
    return kind(*heads.saved(CONFIGS[name], params, target_name="someone/model"))


def in_torch(drafter, name: str, params):
    """Return a function of a text: log-probabilities [V] after (root, path)."""
    head = torch_reference(name, params)

    def of(text):
        features = heads.torch_states(text, drafter.capture_layers)[:, 0]
        draft = lambda root, path: head.draft_logits(features[root - 1], [text[root], *path])[-1]
        return lambda root, path: heads.over_all_tokens(draft(root, path), params)

    return of


def references():
    """Return the classes; importing them needs torch."""
    import torch
    import torch.nn.functional as F

    def rms(x, weight=1.0, bias=0.0):
        return x / (x.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt() * weight + bias

    class Speculator:
        """A network from the ``tensors`` and config.json of a file."""

        def __init__(self, tensors, config):
            self.tensors = {name.removeprefix("speculator."): x for name, x in tensors.items()}
            self.config = config
            width = int(config["inner_dim"]) or config["emb_dim"]
            self.state_weight = 0.5 ** (0.5 / config["n_predict"])
            self.emb_weight = math.sqrt((1 - self.state_weight**2) * width / 2)

        def draft_logits(self, hidden, tokens):
            """Return logits [T, V] after each of ``tokens``, root first, given ``hidden`` [D]."""
            state = rms(hidden) / 2**0.5 if self.config["scale_input"] else hidden
            self.cell, outputs = 0.0, []
            for stage, token in enumerate(tokens):
                state, logits = self.stage(stage, state, token)
                outputs.append(logits)
            return torch.stack(outputs)

    class Mlp(Speculator):
        def take(self, part, stage, kind="weight"):
            shared = {"proj": 1}.get(part, 0)
            index = min(stage, shared) if self.config["tie_weights"] else stage
            between = ".0" if f"{part}.0.0.weight" in self.tensors else ""
            return self.tensors[f"{part}.{index}{between}.{kind}"]

        def stage(self, stage, state, token):
            state = F.linear(state, self.take("proj", stage)) * self.state_weight
            state = state + self.emb_weight * self.take("emb", stage)[token]
            state = F.gelu(rms(state, self.take("ln", stage), self.take("ln", stage, "bias")))
            return state, F.linear(state, self.take("head", stage))

    class Lstm(Speculator):
        def stage(self, stage, state, token):
            summed = {}
            for gate in ("forget", "input", "cell", "output"):
                tied = self.config["tie_lstm_embs"]
                embedding = self.tensors[f"{'forget' if tied else gate}_emb.0.weight"]
                weight = self.tensors[f"{gate}_proj.{min(stage, 1)}.weight"]
                scale = self.emb_weight / self.state_weight
                summed[gate] = F.linear(state, weight) + scale * embedding[token]
            norm = lambda x, name: rms(
                x, self.tensors[f"{name}.0.weight"], self.tensors[f"{name}.0.bias"]
            )
            candidate = F.gelu(norm(summed["cell"], "cell_ln"))
            carried = self.cell * torch.sigmoid(summed["forget"])
            self.cell = carried + candidate * torch.sigmoid(summed["input"])
            state = F.gelu(norm(self.cell, "state_ln")) * torch.sigmoid(summed["output"])
            return state, F.linear(state, self.tensors["head.0.weight"])

    return {"mlp_speculator": Mlp, "arctic-rnn": Mlp, "arctic-lstm": Lstm}
