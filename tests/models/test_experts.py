"""Tests of mixtures of experts and latent attention against ``transformers`` in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jspec.checkpoints import checkpoint
from jspec.core import kv_cache, static_trees, trees
from jspec.models import decoder
from jspec.models.blocks import arithmetic
from jspec.models.blocks import experts as moe
from jspec.models.blocks.experts import Experts
from jspec.models.blocks.latent_attention import LatentAttention

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, LAYERS, PROMPT, TOLERANCE = 96, 3, 37, 1e-4
PATHS = ((0,), (1,), (0, 0), (0, 1), (1, 0), (0, 1, 0))
_SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
    "moe_intermediate_size": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.7,
}
_LATENT = {"kv_lora_rank": 24, "qk_rope_head_dim": 8, "qk_nope_head_dim": 12, "v_head_dim": 10}
CASES = {
    "deepseek": (
        "DeepseekV3",
        _LATENT
        | {
            "n_group": 4,
            "topk_group": 2,
            "q_lora_rank": 20,
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 8.0,
                "rope_theta": 1e4,
                "original_max_position_embeddings": 32,
                "mscale": 1.0,
                "mscale_all_dim": 0.7,
                "beta_fast": 16.0,
                "beta_slow": 1.0,
            },
        },
    ),
    "deepseek-plain": (
        "DeepseekV3",
        _LATENT
        | {
            "n_group": 2,
            "topk_group": 2,
            "q_lora_rank": None,
            "rope_interleave": False,
            "norm_topk_prob": False,
            "first_k_dense_replace": 2,
        },
    ),
    "glm": (
        "Glm4Moe",
        {
            "n_group": 1,
            "topk_group": 1,
            "head_dim": 16,
            "num_key_value_heads": 2,
            "attention_bias": True,
            "use_qk_norm": True,
            "first_k_dense_replace": 0,
        },
    ),
}


def tiny_model(name, **more):
    """Return a random model in torch, in which vectors (with router biases) are random too."""
    family, settings = CASES[name]
    torch.manual_seed(len(name))
    model = getattr(transformers, f"{family}ForCausalLM")(
        getattr(transformers, f"{family}Config")(**_SIZES | settings | more)
    ).eval()
    biases = [b for n, b in model.named_buffers() if n.endswith("e_score_correction_bias")]
    with torch.no_grad():
        for vector in [p for p in model.parameters() if p.ndim == 1] + biases:
            vector.add_(0.2 * torch.randn_like(vector))
    return model


@pytest.fixture(
    scope="module",
    params=[
        "deepseek",
        "glm",
        pytest.param("deepseek-plain", marks=pytest.mark.slow),
    ],
)
def case(request, tmp_path_factory):
    """Return (torch model, config, params, directory)."""
    torch.set_num_threads(1)
    model = tiny_model(request.param)
    directory = tmp_path_factory.mktemp("checkpoint")
    model.save_pretrained(directory)
    config, params, _ = checkpoint.load_pretrained(directory)
    return model, config, params, directory


@functools.partial(jax.jit, static_argnames="config")
def prefill_and_verify(params, config, prompt, nodes):
    """Return the output of a prompt in one pass, and the logits of a tree after it."""
    batch, size = prompt.shape
    cache = decoder.init_cache(config, batch, size + nodes.shape[1])
    chain = trees.chain_tree(batch, size)
    out = decoder.forward(params, config, prompt, chain, cache, tuple(range(LAYERS + 1)))
    rows = jnp.broadcast_to(jnp.arange(size), prompt.shape)
    cache = kv_cache.append(cache, out.tree_kv, rows, jnp.full((batch,), size))
    static = static_trees.from_choices(PATHS)
    tree = trees.from_parents(np.array(static.parents, np.int32), static.max_depth)
    return out, decoder.forward(params, config, nodes, tree, cache).logits


def test_logits_of_prompts_and_trees_equal_transformers(case):
    model, config, params, _ = case
    rng = np.random.default_rng(0)
    prompt = rng.integers(0, VOCAB, (2, PROMPT)).astype(np.int32)
    static = static_trees.from_choices(PATHS)
    nodes = rng.integers(0, VOCAB, (2, static.size)).astype(np.int32)
    out, tree_logits = prefill_and_verify(params, config, prompt, nodes)
    with torch.no_grad():
        expected = model(torch.tensor(prompt, dtype=torch.long), output_hidden_states=True)
    np.testing.assert_allclose(out.logits, expected.logits.numpy(), atol=TOLERANCE, rtol=0)
    for ours, theirs in zip(out.features, expected.hidden_states, strict=True):
        np.testing.assert_allclose(ours, theirs.numpy(), atol=TOLERANCE, rtol=0)
    paths = {0: [0]}
    for node, parent in enumerate(static.parents[1:], 1):
        paths[node] = [*paths[parent], node]
    for node, path in paths.items():
        text = np.concatenate([prompt, nodes[:, path]], 1)
        with torch.no_grad():
            expected = model(torch.tensor(text, dtype=torch.long)).logits[:, -1].numpy()
        np.testing.assert_allclose(tree_logits[:, node], expected, atol=TOLERANCE, rtol=0)


def test_the_cache_of_latent_attention_holds_one_latent_per_token(case):
    _, config, _, _ = case
    shapes = {leaf.shape for leaf in jax.tree.leaves(decoder.init_cache(config, 2, 64).layers)}
    is_latent = isinstance(config.layers[0].mixer, LatentAttention)
    assert shapes == ({(2, 1, 64, 24 + 8)} if is_latent else {(2, 2, 64, 16)})


def test_transformers_loads_a_saved_checkpoint(case, tmp_path):
    model, config, params, _ = case
    checkpoint.save_pretrained(tmp_path, config, params)
    theirs = type(model).from_pretrained(tmp_path).state_dict()
    assert theirs.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(theirs[name], tensor), name


@pytest.mark.parametrize("case", ["deepseek", "glm"], indirect=True)
def test_biases_of_routers_stay_exact_in_a_bfloat16_file(case, tmp_path):
    _, config, params, _ = case
    checkpoint.save_pretrained(tmp_path, config, params, dtype="bfloat16")
    _, narrow, _ = checkpoint.load_pretrained(tmp_path)
    before, after = params.layers[-1].feed_forward, narrow.layers[-1].feed_forward
    assert (after.bias.dtype, after.router.dtype) == (jnp.float32, jnp.bfloat16)
    np.testing.assert_array_equal(after.bias, before.bias)


def test_experts_of_a_layer_may_lie_in_one_tensor(tmp_path):
    from safetensors.torch import save_file

    model = tiny_model("glm")
    model.save_pretrained(tmp_path)
    expected = checkpoint.load_pretrained(tmp_path)[1]
    fused = {name: x.contiguous() for name, x in model.state_dict().items()}
    assert "model.layers.0.mlp.experts.gate_up_proj" in fused
    save_file(fused, tmp_path / "model.safetensors", {"format": "pt"})
    jax.tree.map(np.testing.assert_array_equal, checkpoint.load_pretrained(tmp_path)[1], expected)


def test_products_of_bfloat16_weights_accumulate_in_float32():
    """The CPU backend lacks such products with a batch axis, here the heads."""
    x = jax.random.normal(jax.random.key(0), (2, 3, 4, 8))
    weights = jax.random.normal(jax.random.key(1), (4, 8, 16)).astype(jnp.bfloat16)
    actual = jax.jit(lambda x, w: arithmetic.product("bthn,hnr->bthr", x, w))(x, weights)
    rounded = np.asarray(x.astype(jnp.bfloat16), np.float64)
    expected = np.einsum("bthn,hnr->bthr", rounded, np.asarray(weights, np.float64))
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)


def test_mtp_modules_are_left_out_of_the_target(tmp_path):
    from safetensors.torch import load_file, save_file

    model = tiny_model("glm")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {f"model.layers.{LAYERS}.eh_proj.weight": torch.zeros(32, 64)}
    save_file(tensors | extra, tmp_path / "model.safetensors", {"format": "pt"})
    assert checkpoint.load_pretrained(tmp_path)[0].num_layers == LAYERS
    beyond = {f"model.layers.{LAYERS + 1}.eh_proj.weight": torch.zeros(32, 64)}
    save_file(tensors | beyond, tmp_path / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=rf"unexpected: model.layers.{LAYERS + 1}.eh_proj"):
        checkpoint.load_pretrained(tmp_path)


@functools.partial(jax.jit, static_argnames="sizes")
def each_way(params, sizes, x):
    """Return mixtures by all experts on all tokens, by blocks, and by ragged products."""
    experts, weights = moe.route(params, sizes, x)
    shares = (jax.nn.one_hot(experts, sizes.num_experts) * weights[..., None]).sum(1)  # [T, E]
    before, after = (shares, shares > 0) if sizes.weighs_inputs else (shares > 0, shares)
    columns = jnp.einsum("td,te,edf->etf", x, before, params.gate_up)
    bias = lambda x: 0 if x is None else x[:, None]
    gate, up = jnp.split(columns + bias(params.gate_up_bias), 2, -1)
    every = jnp.einsum("etf,efd->etd", jax.nn.silu(gate) * up, params.down)
    every = every + bias(params.down_bias)
    mixtures = (moe.mixture(params, sizes, x, implementation=i) for i in ("blocks", "ragged"))
    return jnp.einsum("te,etd->td", after, every), *mixtures


@pytest.mark.parametrize("tokens", [1, 70])
@pytest.mark.parametrize(
    "options",
    [
        {"num_groups": 3, "groups_per_token": 2, "scale": 2.5},
        {"scoring": "softmax", "router_bias": True, "expert_bias": True, "normalise": False},
        {"selection_bias": False, "weighs_inputs": True},
    ],
)
def test_all_implementations_of_experts_agree(tokens, options):
    sizes = Experts(6, 2, 10, 10, **options)
    params = sizes.init(jax.random.split(jax.random.key(0)), 8, jnp.float32)
    params = jax.tree.map(lambda x: 40 * (x + 0.01 * jnp.cos(jnp.arange(x.shape[-1]))), params)
    x = jax.random.normal(jax.random.key(1), (tokens, 8)).at[: tokens // 2].set(1.0)  # equal tokens
    expected, *mixtures = each_way(params, sizes, x)
    for mixture in mixtures:
        np.testing.assert_allclose(mixture, expected, rtol=1e-4, atol=1e-3 * abs(expected).max())


def test_sparsemixer_routes_as_in_transformers():
    from transformers.models.phimoe.modeling_phimoe import sparsemixer

    sizes = Experts(16, 2, 4, 0, scoring="sparsemixer", tolerance=0.3, selection_bias=False)
    params = sizes.init(jax.random.split(jax.random.key(0)), 16, jnp.float32)
    params = params.replace(router=jnp.eye(16))
    logits = np.random.default_rng(0).normal(size=(200, 16)).astype(np.float32)
    experts, weights = moe.route(params, sizes, jnp.array(logits))
    theirs, chosen = sparsemixer(torch.tensor(logits), sizes.tolerance, training=False)
    np.testing.assert_array_equal(experts, chosen)
    np.testing.assert_allclose(weights, theirs, rtol=1e-5)
    assert (theirs.numpy() < 0.9).any() and (theirs.numpy() == 1).any()
