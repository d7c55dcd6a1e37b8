"""Tests of every family and rotary scaling against ``transformers`` in float32."""

import functools as ft

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jspec.checkpoints import checkpoint, families
from jspec.core import kv_cache, trees
from jspec.models import decoder
from jspec.models.blocks import rope as rope_lib

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TOLERANCE = 1e-4
VOCAB, LAYERS, NEW_TOKENS = 128, 2, 64
PROMPT_LENGTHS = (13, 3)
CHUNK = 8  # prompts run 8 tokens at once, then one at a time
TRAINED = 32  # longer than the prompts, shorter than the texts
LONGROPE = {
    "short_factor": [1.0 + 0.05 * j for j in range(8)],
    "long_factor": [2.0 + 0.3 * j for j in range(8)],
}

# Each case adds one scaling and the options of its family.
CASES = {
    "llama": ("Llama", {}),
    "llama-linear-biases-tied": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "linear", "factor": 3.0, "rope_theta": 5000.0},
            "attention_bias": True,
            "mlp_bias": True,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
        },
    ),
    "llama-dynamic": (
        "Llama",
        {
            "rope_parameters": {"rope_type": "dynamic", "factor": 2.5, "rope_theta": 10000.0},
            "max_position_embeddings": TRAINED,
        },
    ),
    "llama-llama3": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "factor": 8.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "rope_theta": 500000.0,
                "original_max_position_embeddings": TRAINED,
            },
            "num_key_value_heads": 1,
        },
    ),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10000.0,
                "original_max_position_embeddings": TRAINED,
                "beta_fast": 16.0,
                "beta_slow": 0.5,
                "truncate": False,
            },
        },
    ),
    "llama-longrope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                **LONGROPE,
                "original_max_position_embeddings": TRAINED,
            },
        },
    ),
    "mistral-window": (
        "Mistral",
        {
            "sliding_window": 6,
            "head_dim": 32,
            "num_key_value_heads": 2,
        },
    ),
    "qwen2-windows-yarn": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": 5,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "num_key_value_heads": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": TRAINED,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
            },
        },
    ),
    "qwen3-layer-types": (
        "Qwen3",
        {
            "head_dim": 32,
            "num_key_value_heads": 2,
            "tie_word_embeddings": True,
            "use_sliding_window": True,
            "sliding_window": 4,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
}


def tiny_model(family: str, settings: dict):
    """Return a random model with distinct logits and random norms and biases."""
    torch.set_num_threads(1)
    torch.manual_seed(len(repr(settings)))
    sizes = {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 256,
        "initializer_range": 0.2,
        "head_dim": 16,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    config = getattr(transformers, f"{family}Config")(**sizes | settings)
    model = getattr(transformers, f"{family}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """Return (torch model, config, params) with the same weights, through a checkpoint."""
    model = tiny_model(*CASES[request.param])
    directory = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(directory)
    config, params, _ = checkpoint.load_pretrained(directory)
    return model, config, params


@pytest.fixture(scope="module")
def prompts() -> list[np.ndarray]:
    rng = np.random.default_rng(0)
    return [rng.integers(0, VOCAB, length) for length in PROMPT_LENGTHS]


def padded(rows: list[np.ndarray], length: int) -> np.ndarray:
    return np.stack([np.pad(row, (0, length - len(row))) for row in rows]).astype(np.int32)


@ft.partial(jax.jit, static_argnames="config")
def whole_prompts(params, config, tokens):
    """Run one pass over right-padded prompts without a cache, capturing every hidden state."""
    tree = trees.chain_tree(*tokens.shape)
    cache = decoder.init_cache(config, len(tokens), 0)
    return decoder.forward(params, config, tokens, tree, cache, tuple(range(LAYERS + 1)))


@ft.partial(jax.jit, static_argnames="config")
def greedy(params, config, history, prompt_length):
    """Decode greedily through the cache: a ragged chunk first, then token by token.

    Returns:
      The history [B, T] and the logits [B, T, V] that predicted each token.
    """
    batch, total = history.shape
    rows = jnp.arange(batch)
    cache = decoder.init_cache(config, batch, total)
    chunk, single = trees.chain_tree(batch, CHUNK), trees.chain_tree(batch, 1)
    count = jnp.minimum(prompt_length - 1, CHUNK)
    out = decoder.forward(params, config, history[:, :CHUNK], chunk, cache)
    cache = kv_cache.append(cache, out.tree_kv, jnp.tile(jnp.arange(CHUNK), (batch, 1)), count)

    def step(_, carry):
        cache, history, logits = carry
        position = cache.length
        out = decoder.forward(params, config, history[rows, position][:, None], single, cache)
        predicted = out.logits[:, 0]
        known = history[rows, position + 1]
        token = jnp.where(position + 1 < prompt_length, known, predicted.argmax(-1))
        cache = kv_cache.append(cache, out.tree_kv, jnp.zeros((batch, 1), jnp.int32), jnp.int32(1))
        return (
            cache,
            history.at[rows, position + 1].set(token.astype(jnp.int32)),
            logits.at[rows, position + 1].set(predicted),
        )

    logits = jnp.zeros((batch, total, config.vocab_size))
    steps = max(PROMPT_LENGTHS) - 1 - CHUNK + NEW_TOKENS
    return lax.fori_loop(0, steps, step, (cache, history, logits))[1:]


def test_logits_of_ragged_prompts_equal_those_of_transformers(case, prompts):
    model, config, params = case
    out = whole_prompts(params, config, padded(prompts, max(PROMPT_LENGTHS)))
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            expected = model(torch.tensor(prompt)[None]).logits[0].numpy()
        actual = out.logits[row, : len(prompt)]
        np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)


def test_captured_states_equal_hidden_states_of_transformers(case, prompts):
    model, config, params = case
    out = whole_prompts(params, config, padded(prompts, max(PROMPT_LENGTHS)))
    for row, prompt in enumerate(prompts):
        with torch.no_grad():
            states = model(torch.tensor(prompt)[None], output_hidden_states=True).hidden_states
        assert len(states) == len(out.features)
        for ours, theirs in zip(out.features, states, strict=True):
            np.testing.assert_allclose(
                ours[row, : len(prompt)], theirs[0].numpy(), atol=TOLERANCE, rtol=0
            )


def test_greedy_tokens_and_their_logits_equal_generate_of_transformers(case, prompts):
    model, config, params = case
    total = max(PROMPT_LENGTHS) + NEW_TOKENS + CHUNK
    history, logits = greedy(
        params, config, padded(prompts, total), jnp.array(PROMPT_LENGTHS, jnp.int32)
    )
    for row, prompt in enumerate(prompts):
        expected = model.generate(
            torch.tensor(prompt)[None],
            max_new_tokens=NEW_TOKENS,
            do_sample=False,
            output_logits=True,
            return_dict_in_generate=True,
            use_cache=True,
        )
        answer = slice(len(prompt), len(prompt) + NEW_TOKENS)
        theirs = torch.cat(expected.logits).numpy()
        assert len(theirs) == NEW_TOKENS
        best = np.sort(theirs, -1)[:, -2:]
        np.testing.assert_array_equal(
            history[row, answer],
            expected.sequences[0, len(prompt) :].numpy(),
            err_msg=f"smallest gap between the two best logits: {np.diff(best).min()}",
        )
        np.testing.assert_allclose(logits[row, answer], theirs, atol=TOLERANCE, rtol=0)


PUBLISHED_ROPES = {
    "llama-2": {"rope_type": "default"},
    "llama-3.1": {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "rope_theta": 5e5,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "qwen-long": {
        "rope_type": "yarn",
        "factor": 4.0,
        "rope_theta": 1e6,
        "original_max_position_embeddings": 32768,
    },
    "yarn-without-truncation": {
        "rope_type": "yarn",
        "factor": 32.0,
        "rope_theta": 150000.0,
        "original_max_position_embeddings": 4096,
        "truncate": False,
    },
    "yarn-with-a-ramp-past-the-end": {
        "rope_type": "yarn",
        "factor": 2.0,
        "original_max_position_embeddings": 524288,
    },
    "linear": {"rope_type": "linear", "factor": 4.0},
    "longrope": {
        "rope_type": "longrope",
        "original_max_position_embeddings": 4096,
        "short_factor": [1.0 + j / 64 for j in range(64)],
        "long_factor": [1.0 + j for j in range(64)],
    },
}


@pytest.mark.parametrize("name", PUBLISHED_ROPES)
def test_rotations_at_published_sizes_equal_those_of_transformers(name):
    settings = {"head_dim": 128, "hidden_size": 4096, "max_position_embeddings": 131072}
    rope = {"rope_theta": 1e4, **PUBLISHED_ROPES[name]}
    theirs = transformers.LlamaConfig(**settings, rope_parameters=rope)
    rotary = transformers.models.llama.modeling_llama.LlamaRotaryEmbedding(theirs)
    ours = families.find({"model_type": "llama"}).read(theirs.to_dict())
    for positions in (np.arange(-3, 16), np.array([4095]), np.array([4096, 30000, 131071])):
        expected = rotary(torch.zeros(1), torch.tensor(positions)[None])
        actual = rope_lib.cos_sin(ours.layers[0].mixer.rope, 128, jnp.array(positions, jnp.int32))
        # A relative error of 1e-7 in a frequency rotates the last position by 1e-2.
        tolerance = 1e-6 + 2e-7 * positions.max()
        for half, both in zip(actual, expected, strict=True):
            np.testing.assert_allclose(half, both[0, :, :64].numpy(), atol=tolerance)
