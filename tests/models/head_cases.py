"""Tiny random EAGLE and Medusa heads in every published layout, as torch tensors and configs."""

import functools
import json

import jax
import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import save_file  # noqa: E402

from jspec.models import decoder  # noqa: E402
from tests import networks  # noqa: E402

VOCAB, REDUCED, WIDTH, LAYERS = 64, 24, 32, 8
TARGET = networks.small(vocab_size=VOCAB, hidden_size=WIDTH, num_layers=LAYERS, max_positions=512)


@functools.cache
def target_params():
    """Return weights of the target, with varied embeddings and outputs."""
    return decoder.init_params(jax.random.key(3), TARGET).replace(
        head=jax.random.normal(jax.random.key(4), (WIDTH, VOCAB)) / 6,
        embedding=jax.random.normal(jax.random.key(5), (VOCAB, WIDTH)),
    )


_SIZES = {
    "model_type": "llama",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 1,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
}
# Keys that speculators adds to the sizes; the flags are those of its class.
_SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "target_hidden_size": None,
    "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
}

# Each: layout, changes of config.json, and optional tensors.
EAGLE_CASES = {
    "eagle": ("eagle", {}, ()),
    "eagle-biases-norms-two-layers": (
        "eagle",
        {
            "bias": True,
            "qkv_bias": True,
            "add_para_norm": True,
            "num_hidden_layers": 2,
            "num_key_value_heads": None,
        },
        ("fc.bias", "qkv_bias", "embed"),
    ),
    "eagle3": ("eagle3", {"draft_vocab_size": REDUCED}, ()),
    "eagle3-whole-vocabulary-head-dim": (
        "eagle3",
        {"head_dim": 16, "rope_theta": 5e5, "draft_vocab_size": VOCAB},
        ("embed",),
    ),
    "eagle3-narrow-biased": (
        "eagle3",
        {
            "hidden_size": 16,
            "target_hidden_size": WIDTH,
            "attention_bias": True,
            "draft_vocab_size": REDUCED,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 6]},
        },
        ("qkv_bias", "o_bias", "embed"),
    ),
    "eagle3-1": (
        "eagle3",
        {"fc_norm": True, "norm_output": True, "draft_vocab_size": REDUCED},
        (),
    ),
    "speculators": ("speculators", {"draft_vocab_size": REDUCED}, ("embed",)),
    "speculators-norms-two-layers": (
        "speculators",
        {
            "draft_vocab_size": REDUCED,
            "norm_before_residual": True,
            "norm_before_fc": True,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 5, 7],
            "transformer_layer_config": {"num_hidden_layers": 2, "attention_bias": True},
        },
        ("embed", "qkv_bias", "o_bias"),
    ),
    "speculators-qwen3-windows": (
        "speculators",
        {
            "draft_vocab_size": VOCAB,
            "norm_output": True,
            "fc_norm": True,
            "transformer_layer_config": {
                "model_type": "qwen3",
                "head_dim": 8,
                "num_hidden_layers": 2,
                "sliding_window": 3,
                "use_sliding_window": True,
                "layer_types": ["sliding_attention", "full_attention"],
            },
        },
        ("embed", "qk_norm"),
    ),
}


def random(*shape):
    return torch.randn(shape) * (shape[-1] ** -0.5 if len(shape) > 1 else 0.1)


def gain(size):
    return 1 + 0.3 * torch.randn(size)


def draft_vocabulary():
    """Return (d2t, t2d) of REDUCED tokens."""
    ids = torch.randperm(VOCAB)[:REDUCED].sort().values
    mask = torch.zeros(VOCAB, dtype=torch.bool)
    mask[ids] = True
    return ids - torch.arange(REDUCED), mask


def eagle_case(name):
    """Return (tensors, config.json) of one of EAGLE_CASES, seeded by its name."""
    layout, changes, extras = EAGLE_CASES[name]
    torch.manual_seed(len(name))
    if layout == "speculators":
        inner = _SIZES | changes.get("transformer_layer_config", {})
        raw = _SPECULATORS | changes | {"transformer_layer_config": inner}
    else:
        inner = raw = _SIZES | changes
    first = "midlayer" if layout == "eagle3" else "layers.0"
    width = inner["hidden_size"]
    tensors = {}
    for layer in range(inner["num_hidden_layers"]):
        block = first if layer == 0 else f"layers.{layer}"
        inputs = 2 * width if layer == 0 and layout != "eagle" else width
        tensors |= _block(inner, block, inputs, extras)
        if layer > 0 or layout != "eagle":
            tensors[f"{block}.input_layernorm.weight"] = gain(width)
    if "embed" in extras:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, width)
    if layout == "eagle":
        tensors["fc.weight"] = random(width, 2 * width)
        if "fc.bias" in extras:
            tensors["fc.bias"] = random(width)
        if raw.get("add_para_norm"):
            tensors["embedding_layernorm.weight"] = gain(width)
            tensors["hidden_states_layernorm.weight"] = gain(width)
        return tensors, raw
    count = len(raw.get("eagle_aux_hidden_state_layer_ids") or (2, 4, 5))
    tensors |= {
        f"{first}.hidden_norm.weight": gain(width),
        "norm.weight": gain(width),
        "fc.weight": random(width, count * WIDTH),
        "lm_head.weight": random(raw["draft_vocab_size"], width),
    }
    if raw.get("fc_norm"):
        tensors |= {f"fc_norm.{index}.weight": gain(WIDTH) for index in range(count)}
    if raw.get("norm_before_fc"):
        tensors["input_norm.weight"] = gain(count * WIDTH)
    if raw["draft_vocab_size"] < VOCAB:
        tensors["d2t"], tensors["t2d"] = draft_vocabulary()
    return tensors, raw


def _block(inner, block, inputs, extras):
    width, wide = inner["hidden_size"], inner["intermediate_size"]
    heads = inner["num_attention_heads"]
    kv_heads = inner["num_key_value_heads"] or heads
    dim = inner.get("head_dim") or width // heads
    shapes = {
        "self_attn.q_proj": (heads * dim, inputs),
        "self_attn.k_proj": (kv_heads * dim, inputs),
        "self_attn.v_proj": (kv_heads * dim, inputs),
        "self_attn.o_proj": (width, heads * dim),
        "mlp.gate_proj": (wide, width),
        "mlp.up_proj": (wide, width),
        "mlp.down_proj": (width, wide),
    }
    tensors = {f"{block}.{name}.weight": random(*shape) for name, shape in shapes.items()}
    tensors[f"{block}.post_attention_layernorm.weight"] = gain(width)
    biased = [f"self_attn.{part}_proj" for part in "qkv"] * ("qkv_bias" in extras)
    biased += ["self_attn.o_proj"] * ("o_bias" in extras)
    tensors |= {f"{block}.{name}.bias": random(shapes[name][0]) for name in biased}
    if "qk_norm" in extras:
        tensors |= {f"{block}.self_attn.{part}_norm.weight": gain(dim) for part in "qk"}
    return tensors


MEDUSA_CASES = {
    "medusa": ({"medusa_num_heads": 2, "medusa_num_layers": 1}, 3, 2),
    "medusa-without-outputs": ({"medusa_num_heads": 2}, 2, 1),
    "vllm": ({"medusa_fc_bias": True, "num_heads": 2, "num_hidden_layers": 2}, 2, 2),
    "vllm-shared-reduced": (
        {"original_lm_head": True, "vocab_size": VOCAB, "truncated_vocab_size": REDUCED},
        2,
        1,
    ),
    "vllm-whole-outputs-reduced": (
        {"vocab_size": VOCAB, "truncated_vocab_size": REDUCED},
        2,
        1,
    ),
}


def medusa_case(name):
    """Return (tensors, config.json, number of heads, number of layers) of a case."""
    raw, heads, layers = MEDUSA_CASES[name]
    torch.manual_seed(len(name))
    tensors = {}
    for i in range(heads):
        for layer in range(layers):
            vllm = name.startswith("vllm")
            block = f"blocks.{i}.layers.{layer}" if vllm else f"{i}.{layer}.linear"
            tensors[f"{block}.weight"] = random(WIDTH, WIDTH)
            if not vllm or raw.get("medusa_fc_bias"):
                tensors[f"{block}.bias"] = random(WIDTH)
        if name == "medusa":
            tensors[f"{i}.{layers}.weight"] = random(VOCAB, WIDTH)
        elif name.startswith("vllm") and not raw.get("original_lm_head"):
            tensors[f"lm_heads.{i}.weight"] = random(VOCAB, WIDTH)
    if raw.get("original_lm_head"):
        tensors["lm_head.weight"] = random(REDUCED, WIDTH)
    if raw.get("truncated_vocab_size"):
        tensors["token_map"] = torch.randperm(VOCAB)[:REDUCED]
    return tensors, raw, heads, layers


def write(directory, tensors, raw, file="model.safetensors"):
    """Write a head's directory in the published form."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps(raw))
    if file.endswith(".safetensors"):
        save_file(tensors, directory / file)
    else:
        torch.save(tensors, directory / file)
    return directory
