"""Tests of EAGLE and Medusa heads, loaded from torch's files, against plain torch."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints.heads import head_files
from jspec.core import kv_cache
from jspec.models import decoder
from jspec.models.blocks.attend import attention_beside
from jspec.models.heads import eagle, medusa
from jspec.models.heads.network import embed

torch = pytest.importorskip("torch")
from tests.models import head_cases, torch_heads  # noqa: E402
from tests.models.head_cases import REDUCED, TARGET, VOCAB, WIDTH, target_params  # noqa: E402

TOLERANCE = 1e-4
ROWS, CHUNK, STEPS = 8, 5, 3  # rows of true features, the first 5 in one chunk; self-fed rows
MODEL = decoder.Decoder(TARGET)


def to_torch(array):
    return torch.from_numpy(np.array(array))


@functools.partial(jax.jit, static_argnames="config")
def prefill(params, config, states, tokens, cache):
    """Return logits, outputs and the extended cache for rows of true features [1, n, ...]."""
    embedded = embed(params, config, tokens, MODEL, target_params())
    features = eagle.fuse(params, config, states)
    hidden, entries = eagle.prefill(params, config, embedded, features, cache)
    size = tokens.shape[1]
    cache = kv_cache.append(cache, entries, jnp.arange(size)[None], jnp.full((1,), size))
    return eagle.unembed(params, config, hidden, MODEL, target_params())[0], hidden, cache


@functools.partial(jax.jit, static_argnames="config")
def feed(params, config, hidden, token, position, cache, side, slot, mask):
    """Return logits, output and side buffers of a row that reads ``hidden`` [1, 1, D]."""
    embedded = embed(params, config, token, MODEL, target_params())
    position = jnp.full((1, 1), position)
    attend, side = attention_beside(cache, side, slot, mask, position)
    hidden = eagle.blocks(params, config, embedded, hidden, position, attend)
    return eagle.unembed(params, config, hidden, MODEL, target_params())[0], hidden, tuple(side)


def draft_logits(head, states, tokens):
    """Return our logits of all rows: true ones through the cache in two chunks, then self-fed."""
    params, config = head.params, head.config
    states = tuple(jnp.asarray(states[None, :, i]) for i in range(states.shape[1]))
    tokens = jnp.asarray(tokens, jnp.int32)[None]
    cache, parts = decoder.init_cache(config.network, 1, 16), []
    for rows in (slice(0, CHUNK), slice(CHUNK, ROWS)):
        chunk = tuple(x[:, rows] for x in states)
        logits, hidden, cache = prefill(params, config, chunk, tokens[:, rows], cache)
        parts.append(logits)
    side = decoder.init_cache(config.network, 1, STEPS).layers
    hidden = hidden[:, -1:]
    for slot in range(STEPS):
        row = ROWS + slot
        mask = (jnp.arange(STEPS) <= slot)[None, None]
        logits, hidden, side = feed(
            params, config, hidden, tokens[:, row : row + 1], row, cache, side, slot, mask
        )
        parts.append(logits)
    return np.concatenate(parts)


@pytest.mark.parametrize("name", head_cases.EAGLE_CASES)
def test_eagle_logits_equal_those_of_torch(tmp_path, name):
    tensors, raw = head_cases.eagle_case(name)
    file = "pytorch_model.bin" if name in ("eagle", "eagle3") else "model.safetensors"
    head = head_files.load_head(head_cases.write(tmp_path / "head", tensors, raw, file), TARGET)
    embedding, output = (to_torch(x) for x in (target_params().embedding, target_params().head.T))
    reference = torch_heads.Eagle1Ref if head.kind == "eagle" else torch_heads.Eagle3Ref
    reference = reference(tensors, raw, embedding, output)

    states = torch.randn(ROWS, len(head.config.capture_layers), WIDTH) * 2
    tokens = torch.randint(0, VOCAB, (ROWS + STEPS,))
    expected = reference.draft_logits(states, tokens).numpy()
    assert np.ptp(expected, -1).min() > 0.5  # the logits are not flat
    actual = draft_logits(head, states.numpy(), tokens.numpy())
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)
    if head.config.reduced:
        ids = reference.target_ids().numpy()
        np.testing.assert_array_equal(head.params.draft_to_target, ids)


@pytest.mark.parametrize("switch", ["norm_before_residual", "norm_output"])
@pytest.mark.parametrize("name", ["speculators", "speculators-norms-two-layers", "eagle3-1"])
def test_switches_without_tensors_change_the_logits(name, switch):
    tensors, raw = head_cases.eagle_case(name)
    flipped = raw | {switch: not raw.get(switch)}
    references = [
        torch_heads.Eagle3Ref(tensors, config, torch.randn(VOCAB, WIDTH))
        for config in (raw, flipped)
    ]
    references[1].embedding = references[0].embedding
    states = torch.randn(ROWS, tensors["fc.weight"].shape[1] // WIDTH, WIDTH)
    tokens = torch.randint(0, VOCAB, (ROWS + STEPS,))
    one, other = (reference.draft_logits(states, tokens) for reference in references)
    assert (one - other).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("name", head_cases.MEDUSA_CASES)
def test_medusa_logits_equal_those_of_torch(tmp_path, name):
    tensors, raw, num_heads, num_layers = head_cases.medusa_case(name)
    file = "medusa_lm_head.pt" if name == "medusa" else "model.safetensors"
    head = head_files.load_head(head_cases.write(tmp_path / "head", tensors, raw, file), TARGET)
    assert (head.config.num_heads, head.config.num_layers) == (num_heads, num_layers)
    output = to_torch(target_params().head.T)
    reference = torch_heads.MedusaRef(tensors, num_heads, num_layers, output)
    hidden = torch.randn(5, WIDTH) * 2
    expected = reference.draft_logits(hidden).numpy()
    actual = medusa.heads(
        head.params, head.config, jnp.asarray(hidden.numpy()), MODEL, target_params()
    )
    ids = np.arange(VOCAB)
    if "token_map" in tensors:
        # vLLM: column j of the logits is token_map[j]; ours are sorted by target id.
        token_map = tensors["token_map"].numpy()
        order = np.argsort(token_map)
        wide = expected.shape[-1] == VOCAB
        expected = expected[..., token_map[order] if wide else order]
        ids = token_map[order]
        assert actual.shape[-1] == REDUCED
        np.testing.assert_array_equal(head.params.draft_to_target, ids)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)


def test_medusa_2_heads_are_read_from_a_language_model(tmp_path):
    tensors, raw, *_ = head_cases.medusa_case("medusa")
    wrapped = {f"medusa_head.{name}": tensor for name, tensor in tensors.items()}
    wrapped |= {"model.layers.0.input_layernorm.weight": torch.ones(WIDTH)}
    alone = head_files.load_head(head_cases.write(tmp_path / "a", tensors, raw), TARGET)
    inside = head_files.load_head(head_cases.write(tmp_path / "b", wrapped, raw), TARGET)
    assert inside.config == alone.config
    jax.tree.map(np.testing.assert_array_equal, inside.params, alone.params)


@pytest.mark.parametrize("wrapper", ["model.", "module.", "draft_model.", "module.draft_model."])
def test_name_prefixes_of_trainers_are_stripped(tmp_path, wrapper):
    tensors, raw = head_cases.eagle_case("eagle3")
    wrapped = {f"{wrapper}{name}": tensor for name, tensor in tensors.items()}
    alone = head_files.load_head(head_cases.write(tmp_path / "a", tensors, raw), TARGET)
    again = head_files.load_head(head_cases.write(tmp_path / "b", wrapped, raw), TARGET)
    assert again.kind == "eagle3" and again.config == alone.config
    jax.tree.map(np.testing.assert_array_equal, again.params, alone.params)
