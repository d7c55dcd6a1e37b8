"""MTP modules of DeepSeek-V3, GLM-4.5 and Qwen3-Next against ``transformers``, from a target's own
files."""

import copy
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec import adapters
from jspec.checkpoints import checkpoint
from jspec.checkpoints.heads import head_files
from jspec.core.types import Params
from jspec.drafters import Mtp
from jspec.engine.plan import Plan
from jspec.models import decoder
from jspec.models.heads import mtp
from tests.models import test_experts as targets

torch = pytest.importorskip("torch")
modeling_layers = pytest.importorskip("transformers.modeling_layers")
if not hasattr(modeling_layers, "MtpModel"):
    pytest.skip("this transformers has no MTP", allow_module_level=True)
from safetensors.torch import load_file, save_file  # noqa: E402

from jspec.engine import batch as host  # noqa: E402

LENGTH = 21


def by_expert(name, tensor):
    """Tensors of experts one by one, as published files have them; others as they are."""
    prefix, found, rest = name.partition("mlp.experts.")
    if not found:
        return {name: tensor.clone()}
    names = ("gate", "up") if "gate_up" in rest else ("down",)
    return {
        f"{prefix}mlp.experts.{expert}.{part}_proj.weight": matrix.clone()
        for expert, each in enumerate(tensor)
        for part, matrix in zip(names, each.chunk(len(names)), strict=True)
    }


def tensors_of(model, count, first):
    """The modules' tensors under the names of published files."""
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
    """Logits of every row of every module, over true tokens."""
    found, hidden = [], features
    for module in range(config.n_predict):
        empty = mtp.init_cache(config, len(embedded), 0)
        hidden, _ = mtp.take_in(params, config, module, embedded, hidden, empty)
        found.append(mtp.unembed(params, config, module, hidden, decoder.Decoder(SIZES), target))
        hidden, embedded = hidden[:, :-1], embedded[:, 1:]
    return found


SIZES = decoder.DecoderConfig(96, 32, 48, 3, 4, 4, 8, 256)  # for the output matrix alone


@pytest.mark.parametrize(
    ("name", "modules"), [("glm", 2), pytest.param("deepseek", 1, marks=pytest.mark.slow)]
)
def test_modules_guess_as_in_transformers(name, modules, tmp_path):
    torch.set_num_threads(1)
    model = targets.tiny_model(name)
    model.config.num_mtp_layers = modules
    with torch.no_grad():
        theirs = modeling_layers.MtpModel(model, modules).eval()
        for parameter in theirs.parameters():
            if not any(parameter is other for other in model.parameters()):
                parameter.normal_(0, 0.2).add_(float(parameter.ndim == 1))
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = tensors_of(theirs, modules, targets.LAYERS)
    save_file(tensors | extra, tmp_path / "model.safetensors", {"format": "pt"})

    sizes, target, raw = checkpoint.load_pretrained(tmp_path)
    assert raw["num_nextn_predict_layers"] == modules
    head = head_files.load_head(tmp_path, sizes, kind="mtp")
    assert head.config.n_predict == modules and not head.config.feeds_normed
    # transformers hands on what the norm gives out, and has no zero at position 0.
    config = dataclasses.replace(head.config, feeds_normed=True, zero_first=False)
    text = np.random.default_rng(1).integers(0, 96, (2, LENGTH))
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
    found = drafted(head.params, config, target, embedded, jnp.asarray(features)[:, :-1])
    for ours, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-4, rtol=0)


def qwen_modules(config, count):
    """Modules of Qwen3-Next in torch, which transformers leaves out, as vLLM puts them together."""
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    attending = copy.deepcopy(config)
    attending.layer_types = ["full_attention"] * count
    norm = lambda: qwen.Qwen3NextRMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    parts = torch.nn.ModuleDict(
        {
            "pre_fc_norm_embedding": norm(),
            "pre_fc_norm_hidden": norm(),
            "norm": norm(),
            "fc": torch.nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False),
            "layers": torch.nn.ModuleList(
                qwen.Qwen3NextDecoderLayer(attending, layer) for layer in range(count)
            ),
        }
    )
    with torch.no_grad():
        for parameter in parts.parameters():
            parameter.normal_(0, 0.2)
    return parts.eval()


def qwen_checkpoint(directory, modules):
    """A Qwen3-Next, some of whose blocks are recurrent, and its modules, written and in torch."""
    torch.set_num_threads(1)
    kinds = ["linear_attention", "linear_attention", "full_attention"]
    target = targets.tiny_model("qwen3-next", layer_types=kinds)
    theirs = qwen_modules(target.config, modules)
    target.save_pretrained(directory)
    tensors = load_file(directory / "model.safetensors")
    for name, tensor in theirs.state_dict().items():
        tensors |= by_expert(f"mtp.{name}", tensor)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    return target, theirs


@torch.no_grad()
def qwen_guesses(target, theirs, text):
    """Features of a text [B, T] and the logits of every row of every module, over true tokens."""
    features = target(torch.tensor(text), output_hidden_states=True).hidden_states[-1]
    following = target.model.embed_tokens(torch.tensor(text[:, 1:]))
    hidden, found = features[:, :-1], []
    for module in theirs["layers"]:
        e, f = theirs["pre_fc_norm_embedding"](following), theirs["pre_fc_norm_hidden"](hidden)
        x = theirs["fc"](torch.cat([e, f], -1))
        places = torch.arange(x.shape[1])[None]
        x = theirs["norm"](module(x, target.model.rotary_emb(x, places), position_ids=places))
        found.append(target.lm_head(x).numpy())
        hidden, following = x[:, :-1], following[:, 1:]
    return features.numpy(), found


def test_modules_of_a_qwen3_next_guess_as_its_blocks_do_where_it_is_not_supported_itself(tmp_path):
    target, theirs = qwen_checkpoint(tmp_path, modules=2)
    with pytest.raises(ValueError, match="layer_types: 2 of 3 layers are linear_attention"):
        checkpoint.load_pretrained(tmp_path)
    head = head_files.load_head(tmp_path, None, kind="mtp")
    assert (head.layout, head.config.n_predict) == ("qwen3_next", 2)
    text = np.random.default_rng(1).integers(0, 96, (2, LENGTH))
    features, expected = qwen_guesses(target, theirs, text)
    table, output = (
        layer.weight.detach().numpy() for layer in (target.model.embed_tokens, target.lm_head)
    )
    weights = decoder.DecoderParams(embedding=None, layers=(), norm=None, head=output.T)
    found = drafted(head.params, head.config, weights, table[text[:, 1:]], features[:, :-1])
    for ours, wanted in zip(found, expected, strict=True):
        np.testing.assert_allclose(ours, wanted, atol=1e-4, rtol=0)


@pytest.mark.slow
def test_a_recurrent_target_of_ones_own_drafts_with_the_modules_of_its_files(tmp_path):
    model, theirs = qwen_checkpoint(tmp_path, modules=1)
    with torch.no_grad():  # modules that repeat the last token, about: right now and then
        theirs["fc"].weight.copy_(torch.cat([torch.zeros(32, 32), torch.eye(32)], 1))
    tensors = load_file(tmp_path / "model.safetensors") | {"mtp.fc.weight": theirs["fc"].weight}
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    head = head_files.load_head(tmp_path, None, kind="mtp")

    @torch.no_grad()
    def score(tokens):
        out = model(torch.tensor(np.asarray(tokens, np.int64)), output_hidden_states=True)
        return out.logits.numpy(), out.hidden_states[-1].numpy()

    def apply(params, tokens):
        sized = lambda width: jax.ShapeDtypeStruct((*tokens.shape, width), jnp.float32)
        logits, last = jax.pure_callback(score, (sized(96), sized(32)), tokens)
        return logits, (last,) * (head.config.capture_layers[0] + 1)

    def unembed(params, hidden, *, norm=True):
        assert not norm  # which the modules have done
        return hidden @ params["output"]

    target, params = adapters.from_function(
        apply,
        {
            "table": jnp.asarray(model.model.embed_tokens.weight.detach().numpy()),
            "output": jnp.asarray(model.lm_head.weight.detach().numpy().T),
        },
        vocab_size=96,
        max_positions=256,
        use_cache=False,
        embed=lambda params, tokens: params["table"][tokens],
        unembed=unembed,
    )
    drafter = Mtp(head.config, target, 1, draft_sample_method="greedy")
    plan = Plan(target, drafter, "coupled", node_buckets=(2,), record_rounds=32)
    prompt = (5, 9, 3, 17)
    [answer] = host.generate_sequences(
        plan, Params(params, head.params), [host.SequenceParams(prompt, 24)]
    )
    wanted = model.generate(torch.tensor([prompt]), max_new_tokens=24, do_sample=False)[0].tolist()
    assert answer.tokens.tolist() == wanted[len(prompt) :]
    _, [guesses] = qwen_guesses(model, theirs, np.array([wanted]))
    root = len(prompt) - 1
    for accepted, nodes, _ in zip(*answer.trace, strict=True):
        if root + 2 < len(wanted):
            guess = guesses[0, root - 1].argmax()
            assert nodes[1] == guess and accepted == (guess == wanted[root + 1])
        root += accepted + 1
    assert answer.accepted[1] > 0
