"""Every family equals ``transformers`` in float32: logits, states, greedy texts and files."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jspec.checkpoints import checkpoint, families
from jspec.core import kv_cache, trees
from jspec.models import decoder
from tests.families import models, table
from tests.families.prompts import PROMPTS

TOLERANCE = 2e-4
CHUNK = 8  # prompts run 8 tokens at once, then one at a time


@pytest.fixture(scope="module", params=table.CASES)
def case(request, tmp_path_factory):
    """Return a case with the config, weights, config.json and directory of its checkpoint."""
    directory = models.saved(request.param, tmp_path_factory.getbasetemp() / "families")
    return request.param, *checkpoint.load_pretrained(directory), directory


def padded(rows: list[list[int]], length: int) -> np.ndarray:
    return np.stack([np.pad(row, (0, length - len(row))) for row in rows]).astype(np.int32)


@functools.partial(jax.jit, static_argnames="config")
def whole_prompts(params, config, tokens):
    """Run one pass over right-padded prompts without a cache, capturing every hidden state."""
    tree = trees.chain_tree(*tokens.shape)
    cache = decoder.init_cache(config, len(tokens), 0)
    captured = tuple(range(config.num_layers + 1))
    return decoder.forward(params, config, tokens, tree, cache, captured)


@functools.partial(jax.jit, static_argnames="config")
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
    steps = max(models.PROMPT_LENGTHS) - 1 - CHUNK + models.NEW_TOKENS
    return lax.fori_loop(0, steps, step, (cache, history, logits))[1:]


def test_logits_and_captured_states_of_ragged_prompts_equal_those_of_transformers(case):
    name, config, params, *_ = case
    tokens = padded(PROMPTS, max(models.PROMPT_LENGTHS))
    out = whole_prompts(params, config, tokens)
    for row, (logits, states) in enumerate(models.states(name)):
        assert len(states) == len(out.features)
        pairs = zip((out.logits, *out.features), (logits, *states), strict=True)
        for ours, theirs in pairs:
            actual = ours[row, : len(theirs)]
            np.testing.assert_allclose(actual, theirs, atol=TOLERANCE, rtol=0)


def test_greedy_tokens_and_their_logits_equal_generate_of_transformers(case):
    name, config, params, *_ = case
    total = max(models.PROMPT_LENGTHS) + models.NEW_TOKENS + CHUNK
    lengths = jnp.array(models.PROMPT_LENGTHS, jnp.int32)
    history, logits = greedy(params, config, padded(PROMPTS, total), lengths)
    for row, (tokens, theirs) in enumerate(models.generated(name)):
        first = models.PROMPT_LENGTHS[row]
        answer = slice(first, first + models.NEW_TOKENS)
        best = np.sort(theirs, -1)[:, -2:]
        np.testing.assert_array_equal(
            history[row, answer],
            tokens,
            err_msg=f"smallest gap between the two best logits: {np.diff(best).min()}",
        )
        np.testing.assert_allclose(logits[row, answer], theirs, atol=TOLERANCE, rtol=0)


def test_a_saved_checkpoint_is_that_of_transformers(case, tmp_path):
    name, config, params, raw, _ = case
    assert families.find(families.describe(config)).read(families.describe(config)) == config
    checkpoint.save_pretrained(tmp_path, config, params, raw)
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load_pretrained(tmp_path)[1], params)
    if table.ROWS[raw["model_type"]].whole:  # transformers has no class for it
        return
    load = models.transformers.AutoModelForCausalLM.from_pretrained
    model, info = load(tmp_path, output_loading_info=True)
    assert not info["missing_keys"] and not info["unexpected_keys"]
    with models.torch.no_grad():
        logits = model(models.torch.tensor(PROMPTS[:1])).logits[0].numpy()
    np.testing.assert_allclose(logits, models.states(name)[0][0], atol=1e-6)
