"""Tests of the MTP modules of DeepSeek-V3 and GLM-4.5 against ``transformers``."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints import checkpoint
from jspec.checkpoints.heads import head_files
from jspec.models import decoder
from jspec.models.heads import mtp
from tests import networks
from tests.models import test_experts as targets

torch = pytest.importorskip("torch")
modeling_layers = pytest.importorskip("transformers.modeling_layers")
if not hasattr(modeling_layers, "MtpModel"):
    pytest.skip("this transformers has no MTP", allow_module_level=True)
from safetensors.torch import load_file, save_file  # noqa: E402

LENGTH = 21
ZERO = 0  # a token whose embedding is zero


def by_expert(name, tensor):
    """Split stacked experts into one tensor per expert, the form of published files."""
    prefix, separator, rest = name.partition("mlp.experts.")
    if not separator:
        return {name: tensor.clone()}
    names = ("gate", "up") if "gate_up" in rest else ("down",)
    return {
        f"{prefix}mlp.experts.{expert}.{part}_proj.weight": matrix.clone()
        for expert, each in enumerate(tensor)
        for part, matrix in zip(names, each.chunk(len(names)), strict=True)
    }


def tensors_of(model, count, first):
    """Return the modules' tensors under the names of published files."""
    tensors = {}
    for name, tensor in model.state_dict().items():
        if not name.startswith("layers."):
            continue
        _, module, rest = name.split(".", 2)
        rest = rest.removeprefix("mtp_block.").replace("post_norm", "shared_head.norm")
        tensors |= by_expert(f"model.layers.{first + int(module)}.{rest}", tensor)
    for module in range(count):
        tensors[f"model.layers.{first + module}.embed_tokens.weight"] = torch.zeros(96, 32)
    return tensors


@functools.partial(jax.jit, static_argnames="config")
def drafted(params, config, target, embedded, features):
    """Return the logits of every module for all rows, with true tokens."""
    logits, hidden = [], features
    for module in range(config.n_predict):
        empty = mtp.init_cache(config, len(embedded), 0)
        hidden, _ = mtp.prefill(params, config, module, embedded, hidden, empty)
        logits.append(mtp.unembed(params, config, module, hidden, decoder.Decoder(SIZES), target))
        hidden, embedded = hidden[:, :-1], embedded[:, 1:]
    return logits


SIZES = networks.small(
    vocab_size=96, num_layers=3, num_kv_heads=4, max_positions=256
)  # used for the output matrix only


@pytest.mark.parametrize(
    ("name", "modules"), [("glm", 2), pytest.param("deepseek", 1, marks=pytest.mark.slow)]
)
def test_logits_of_modules_equal_transformers(name, modules, tmp_path):
    torch.set_num_threads(1)
    model = targets.tiny_model(name)
    model.config.num_mtp_layers = modules
    with torch.no_grad():
        theirs = modeling_layers.MtpModel(model, modules).eval()
        for parameter in theirs.parameters():
            if not any(parameter is other for other in model.parameters()):
                parameter.normal_(0, 0.2).add_(float(parameter.ndim == 1))
        model.get_input_embeddings().weight[ZERO] = 0
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = tensors_of(theirs, modules, targets.LAYERS)
    save_file(tensors | extra, tmp_path / "model.safetensors", {"format": "pt"})

    sizes, target, raw = checkpoint.load_pretrained(tmp_path)
    assert raw["num_nextn_predict_layers"] == modules
    head = head_files.load_head(tmp_path, sizes, kind="mtp")
    assert head.config.n_predict == modules and not head.config.feeds_normed
    # transformers passes on the normed output.
    config = dataclasses.replace(head.config, feeds_normed=True)
    text = np.random.default_rng(1).integers(0, 96, (2, LENGTH))
    text[:, 1] = ZERO  # transformers does not zero the first embedding
    with torch.no_grad():
        features = model(torch.tensor(text), output_hidden_states=True).hidden_states[-1]
        hidden, positions = features[:, :-1], torch.arange(1, LENGTH)[None]
        expected = []
        for module in range(modules):
            hidden = theirs.forward_layer(
                module,
                hidden,
                positions[:, module:],
                None,
                input_ids=torch.tensor(text)[:, 1 + module :],
            )
            expected.append(model.lm_head(hidden).numpy())
            hidden = hidden[:, :-1]
    embedded = decoder.embed(target, sizes, jnp.asarray(text[:, 1:]))
    actual = drafted(head.params, config, target, embedded, jnp.asarray(features)[:, :-1])
    for ours, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-4, rtol=0)
