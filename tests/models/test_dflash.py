"""Tests of DFlash and DSpark heads, loaded from torch's files, against plain torch."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints.heads import head_files
from jspec.core import kv_cache
from jspec.models import decoder
from jspec.models.heads import dflash, dspark, network

torch = pytest.importorskip("torch")
from tests.models import dflash_cases, head_cases, torch_dflash  # noqa: E402
from tests.models.head_cases import TARGET, WIDTH, target_params  # noqa: E402

TOLERANCE = 1e-4
CONTEXT, CHUNK = 9, 5  # positions that the target has computed, the first 5 in one chunk
MODEL = decoder.Decoder(TARGET)


def draft_hidden(params, config, states, root, depth):
    """Return our output [1, depth, D]; the context [CONTEXT, C, D] is injected in two chunks."""
    cache = decoder.init_cache(config.network, 1, 16)
    for rows in (slice(0, CHUNK), slice(CHUNK, CONTEXT)):
        chunk = tuple(states[None, rows, i] for i in range(states.shape[1]))
        size = chunk[0].shape[1]
        positions = cache.length[:, None] + jnp.arange(size)
        entries = dflash.inject(params, config, dflash.fuse(params, config, chunk), positions)
        cache = kv_cache.append(cache, entries, jnp.arange(size)[None], jnp.full((1,), size))
    return dflash.fill_in(params, config, root, depth, cache, MODEL, target_params())


def draft_logits(params, config, states, root, depth):
    """Return our logits [depth, Vd]."""
    hidden = draft_hidden(params, config, states, root, depth)
    return network.unembed(params, hidden, MODEL, target_params())[0]


def loaded(tmp_path, name):
    tensors, raw = dflash_cases.case(name)
    return tensors, raw, head_files.load_head(head_cases.write(tmp_path, tensors, raw), TARGET)


def reference(tensors, raw, kind=torch_dflash.DFlashRef):
    shared = target_params().embedding, target_params().head.T
    return kind(tensors, raw, *(torch.from_numpy(np.array(x)) for x in shared))


def states_for(head):
    return torch.randn(CONTEXT, len(head.config.capture_layers), WIDTH) * 2


@pytest.mark.parametrize("name", dflash_cases.CASES)
def test_draft_logits_equal_those_of_torch(tmp_path, name):
    tensors, raw, head = loaded(tmp_path, name)
    assert (head.kind, head.layout[:6]) == ("dflash", "dflash")
    states, root, depth = states_for(head), torch.tensor([7]), head.config.max_depth
    expected = reference(tensors, raw).draft_logits(states, root, depth).numpy()
    assert np.ptp(expected, -1).min() > 0.5  # the logits are not flat
    inputs = jnp.asarray(states.numpy()), jnp.asarray([7]), depth
    actual = draft_logits(head.params, head.config, *inputs)
    np.testing.assert_allclose(actual, expected, atol=TOLERANCE, rtol=0)


@pytest.mark.slow
def test_a_smaller_block_has_fewer_masks(tmp_path):
    tensors, raw, head = loaded(tmp_path, "dflash-sliding")
    states, root = states_for(head), torch.tensor([7])
    small, full = (reference(tensors, raw).draft_logits(states, root, d).numpy() for d in (2, 4))
    assert np.abs(small - full[:2]).max() > 100 * TOLERANCE
    inputs = jnp.asarray(states.numpy()), jnp.asarray([7]), 2
    actual = draft_logits(head.params, head.config, *inputs)
    np.testing.assert_allclose(actual, small, atol=TOLERANCE, rtol=0)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("dflash-sliding", {"causal": False}),
        ("dflash-sliding-unmasked", {"causal": True}),
        ("dflash", {"causal": True}),
        ("dflash-sliding", {"sliding_window": 7}),
        ("speculators-sliding", {"sliding_window_non_causal": True}),
        ("speculators", {"sample_from_anchor": True}),
    ],
)
def test_every_switch_changes_the_logits(name, change):
    tensors, raw = dflash_cases.case(name)
    refs = [reference(tensors, raw), reference(tensors, raw)]
    refs[1].raw = refs[1].raw | change
    states = torch.randn(CONTEXT, tensors["fc.weight"].shape[1] // WIDTH, WIDTH)
    one, other = (ref.draft_logits(states, torch.tensor([7]), 3) for ref in refs)
    assert (one - other).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("dflash", (2, 5)),
        ("dflash-biased-three-layers-default-ids", (2, 4, 6)),
        ("dflash-one-layer-default-ids", (5,)),
        ("speculators", (0, 2, 5)),
    ],
)
def test_layer_ids_become_indices_of_hidden_states(tmp_path, name, layers):
    assert loaded(tmp_path, name)[2].config.capture_layers == layers


def test_a_reduced_vocabulary_is_read_as_offsets(tmp_path):
    tensors, _, head = loaded(tmp_path, "speculators")
    ids = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    np.testing.assert_array_equal(head.params.draft_to_target, ids.numpy())


@pytest.mark.parametrize("name", dflash_cases.DSPARK_CASES)
def test_dspark_logits_and_confidences_equal_those_of_torch(tmp_path, name):
    tensors, raw, head = loaded(tmp_path, name)
    assert (head.kind, head.layout[:6]) == ("dspark", "dflash")
    params, config, path = head.params, head.config, [7, 30, 30, 2]
    assert config.from_anchor == ("speculators" not in name)
    states, depth = states_for(head), len(path)
    ref = reference(tensors, raw, torch_dflash.DSparkRef)
    expected = ref.path_logits(states, path, depth).numpy()
    assert np.ptp(expected, -1).min() > 0.5
    inputs = jnp.asarray(states.numpy()), jnp.asarray(path[:1]), depth
    hidden = draft_hidden(params, config, *inputs)
    logits = draft_logits(params, config, *inputs)
    state = dspark.start(config.spark, 1, jnp.float32)
    for slot, token in enumerate(path):
        before = jnp.full((1, 1), token)
        h = hidden[:, slot : slot + 1]
        state, bias = dspark.advance(params.spark, config.spark, state, h, before)
        actual = logits[slot] + bias[0, 0]
        np.testing.assert_allclose(actual, expected[slot], atol=TOLERANCE, rtol=0)
    if config.spark.confidence:
        logits = dspark.confidence(params.spark, config.spark, hidden, jnp.asarray([path]))
        expected = ref.confidences(states, path, depth).numpy()
        assert np.ptp(expected) > 0.05
        np.testing.assert_allclose(jax.nn.sigmoid(logits[0]), expected, atol=TOLERANCE, rtol=0)


def test_old_tensor_names_of_dspark_are_read(tmp_path):
    tensors, raw = dflash_cases.case("dspark")
    inside = lambda name: name.startswith(("markov_head", "confidence_head"))
    old = {f"logit_head.{name}" if inside(name) else name: x for name, x in tensors.items()}
    alone = head_files.load_head(head_cases.write(tmp_path / "a", tensors, raw), TARGET)
    again = head_files.load_head(head_cases.write(tmp_path / "b", old, raw), TARGET)
    assert again.config == alone.config
    jax.tree.map(np.testing.assert_array_equal, again.params, alone.params)
