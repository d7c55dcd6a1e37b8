"""Tiny heads for the tiny target, random and trained in seconds, and their torch references."""

import dataclasses
import functools
import json
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jspec.checkpoints.heads import head_files
from jspec.core import trees
from jspec.core.types import Array
from jspec.drafters import Eagle, Medusa
from jspec.models import decoder
from jspec.models.blocks.attend import attention_beside
from jspec.models.heads import eagle, medusa
from jspec.models.heads.network import embed
from tests import networks, tiny

METHODS = ("eagle", "eagle3", "medusa")
LAST = tiny.TARGET.config.num_layers
REDUCED_SIZE = 40  # tokens of the reduced vocabulary
_NETWORK = networks.changed(tiny.TARGET.config, num_layers=1, intermediate_size=48)
CONFIGS = {
    "eagle": eagle.EagleConfig(
        _NETWORK, 1, (LAST,), _NETWORK.hidden_size, tiny.VOCAB, fc_bias=True
    ),
    "eagle3": eagle.EagleConfig(
        dataclasses.replace(_NETWORK, vocab_size=REDUCED_SIZE),
        3,
        (0, 1),
        _NETWORK.hidden_size,
        tiny.VOCAB,
        separate_head=True,
    ),
    "medusa": medusa.MedusaConfig(
        4, 1, _NETWORK.hidden_size, tiny.VOCAB, tiny.VOCAB, (LAST,), num_outputs=4
    ),
}


def drafter(method: str, num_speculative_tokens: int | None = None, **settings):
    """Return the drafter of a method for the tiny target."""
    kind = Medusa if method == "medusa" else Eagle
    return kind(CONFIGS[method], tiny.TARGET, num_speculative_tokens, **settings)


@functools.cache
def random_params(method: str):
    """Return weights large enough for varied drafts, and a scattered reduced vocabulary."""
    config = CONFIGS[method]
    module = medusa if method == "medusa" else eagle
    rng = np.random.default_rng(METHODS.index(method))
    params = drawn(module, config, rng)
    return scattered(params, rng) if config.reduced else params


def drawn(module, config, rng, matrices=0.2, vectors=(1, 0.2)):
    """Return distinct weights of a network, with a spread of matrices, and (mean, spread)."""
    shapes = jax.eval_shape(lambda: module.init_params(jax.random.key(0), config))
    draw = lambda x: rng.normal(*((0, matrices) if x.ndim > 1 else vectors), x.shape)
    return jax.tree.map(lambda x: jnp.asarray(draw(x), jnp.float32), shapes)


def scattered(params, rng):
    """Return ``params`` with a reduced vocabulary."""
    ids = np.sort(rng.permutation(tiny.VOCAB)[:REDUCED_SIZE]).astype(np.int32)
    return params.replace(draft_to_target=jnp.asarray(ids))


@functools.cache
def trained_params(method: str):
    """Return weights trained for a few hundred steps toward the target: often right, not always."""
    config = CONFIGS[method]
    frozen = lambda params: getattr(params, "draft_to_target", None)
    start = random_params(method)
    weights, ids = start.replace(draft_to_target=None), frozen(start)
    windows, features, logits = lessons(config.capture_layers)

    def loss(weights, batch):
        shown = tuple(feature[batch] for feature in features)
        rows, wanted = logits_of(method, weights, windows[batch], shown)
        wanted = wanted(logits[batch])
        if ids is not None:
            wanted = wanted[..., ids]
        return -(jax.nn.softmax(wanted, -1) * jax.nn.log_softmax(rows, -1)).sum(-1).mean()

    return fit(weights, loss, 5e-3, len(windows), 300).replace(draft_to_target=ids)


def fit(params, loss, rate: float, windows: int, steps: int):
    """Return ``params`` after steps of Adam on ``loss(params, windows)``, windows int32 [16]."""
    optimizer = optax.adam(optax.cosine_decay_schedule(rate, steps))

    def step(carry, batch):
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state, params)
        return (optax.apply_updates(params, updates), state), None

    order = np.random.default_rng(0).integers(0, windows, (steps, 16))
    run = jax.jit(lambda carry: jax.lax.scan(step, carry, order)[0][0])
    return run((params, optimizer.init(params)))


def logits_of(method, params, windows, features):
    """Return the logits of every row of a window, and a map to the target's for them."""
    target, config = tiny.params().target, CONFIGS[method]
    if method == "medusa":
        rows = medusa.heads(params, config, features[0], tiny.TARGET, target)
        length = rows.shape[1] - config.num_heads - 1
        ahead = lambda wanted: jnp.stack(
            [wanted[:, 1 + i : 1 + i + length] for i in range(config.num_heads)], 2
        )
        return rows[:, :length], ahead
    batch, size = windows.shape
    positions = jnp.broadcast_to(jnp.arange(size - 1), (batch, size - 1))
    mask = jnp.broadcast_to(np.tri(size - 1, dtype=bool), (batch, size - 1, size - 1))
    side = decoder.init_cache(config.network, batch, size - 1).layers
    empty = decoder.init_cache(config.network, batch, 0)
    attend, _ = attention_beside(empty, side, jnp.int32(0), mask, positions)
    embedded = embed(params, config, windows[:, 1:], tiny.TARGET, target)
    fused = eagle.fuse(params, config, tuple(x[:, :-1] for x in features))
    hidden = eagle.blocks(params, config, embedded, fused, positions, attend)
    return eagle.unembed(params, config, hidden, tiny.TARGET, target), lambda wanted: wanted[:, 1:]


@functools.cache
def lessons(capture_layers):
    """Return texts drawn by the target, with its hidden states and logits."""
    count, length = 256, 24
    tiny.params()  # so that weights are not made inside of a trace
    texts = jax.random.randint(jax.random.key(1), (count, length), 0, tiny.VOCAB)

    def grow(texts, position):  # greedy text after a random start, as of a greedy row
        logits = hidden_states(texts, ())[1]
        drawn = jnp.argmax(logits[:, position - 1], -1)
        return texts.at[:, position].set(drawn), None

    texts, _ = jax.jit(lambda texts: jax.lax.scan(grow, texts, jnp.arange(3, length)))(texts)
    features, logits = hidden_states(texts, capture_layers)
    return texts, features, logits


@functools.partial(jax.jit, static_argnames="capture_layers")
def hidden_states(texts: Array, capture_layers: tuple[int, ...]):
    """Return the target's hidden states (one [B, T, D] a layer) and logits, from one full pass."""
    size = texts.shape[1]
    tree = trees.from_parents(trees.chain(size - 1), size - 1)
    cache = tiny.TARGET.init_cache(texts.shape[0], 0)
    out = tiny.TARGET.forward(tiny.params().target, texts, tree, cache, capture_layers)
    return out.features, out.logits


def torch_reference(method: str, params):
    """Return the head in plain torch, from the file that jspec writes of it."""
    # Imported here, so that the rest of this file works without torch.
    from tests.models.torch_heads import Eagle1Ref, Eagle3Ref, MedusaRef

    embedding, output = lent()
    layout = {"eagle": "eagle", "eagle3": "eagle3", "medusa": "medusa-vllm"}[method]
    tensors, config = saved(CONFIGS[method], params, layout=layout)
    if method == "medusa":
        return MedusaRef(tensors, 4, 1, output)
    kind = Eagle1Ref if method == "eagle" else Eagle3Ref
    return kind(tensors, config, embedding, output)


def in_torch(drafter, method: str, params):
    """Return a function of a text: the head's log-probabilities [V] after (root, path)."""
    head = torch_reference(method, params)

    def of(text):
        states = torch_states(text, drafter.capture_layers)

        def log_probs(root, path):
            if method == "medusa":
                logits = head.draft_logits(states[root - 1 : root, 0])[0, len(path)]
            else:
                logits = head.draft_logits(states[:root], [*text[1 : root + 1], *path])[-1]
            return over_all_tokens(logits, params)

        return log_probs

    return of


def saved(config, params, **options):
    """Return the tensors, in torch, and the config.json that jspec writes of a head."""
    import torch
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as directory:
        head_files.save_head(directory, config, params, tiny.TARGET.config, **options)
        raw = json.loads((Path(directory) / "config.json").read_text())
        [path] = (path for path in Path(directory).iterdir() if path.name != "config.json")
        if path.suffix == ".pt":
            return torch.load(path, weights_only=True), raw
        return load_file(path), raw


def lent():
    """Return the target's embedding and output matrix [V, D], in torch."""
    import torch

    target = tiny.params().target
    return [torch.tensor(np.asarray(x)) for x in (target.embedding, target.head.T)]


def torch_states(text, layers):
    """Return the target's hidden states [T, C, D] of a text, in torch."""
    import torch

    features, _ = hidden_states(np.array([text]), layers)
    return torch.stack([torch.tensor(np.asarray(feature[0])) for feature in features], 1)


def over_all_tokens(logits, params):
    """Return log-probabilities over the target's tokens, -inf for those that the head lacks."""
    ids = getattr(params, "draft_to_target", None)
    scores = np.full(tiny.VOCAB, -np.inf)
    scores[slice(None) if ids is None else np.asarray(ids)] = logits.detach().log_softmax(-1)
    return scores
