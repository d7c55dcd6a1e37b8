"""Tiny random DFlash and DSpark heads in both layouts, as torch tensors and configs."""

import pytest

torch = pytest.importorskip("torch")
from tests.models.head_cases import (  # noqa: E402
    LAYERS,
    REDUCED,
    VOCAB,
    WIDTH,
    draft_vocabulary,
    gain,
    random,
)

BLOCK, MASK = 5, 60
_SIZES = {
    "model_type": "qwen3",
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "num_hidden_layers": 2,
    "head_dim": 8,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rope_theta": 1e4,
}
_AUTHORS = _SIZES | {
    "architectures": ["DFlashDraftModel"],
    "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
    "num_target_layers": LAYERS,
}
_SLIDING = {
    "layer_types": ["sliding_attention", "full_attention"],
    "sliding_window": 6,
    "use_sliding_window": True,
}


def _inside(**more):
    return {"dflash_config": {"mask_token_id": MASK, "target_layer_ids": [1, 4], **more}}


def _speculators(inner=None, **more):
    return {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "block_size": BLOCK,
        "mask_token_id": MASK,
        "draft_vocab_size": VOCAB,
        "aux_hidden_state_layer_ids": [0, 2, 5],
        "target_hidden_size": None,
        "sample_from_anchor": False,
        "transformer_layer_config": _SIZES | (inner or {}),
        **more,
    }


# Each: config.json, and optional tensors.
CASES = {
    "dflash": (_AUTHORS | {"block_size": BLOCK} | _inside(), ()),
    "dflash-inside": (_AUTHORS | _inside(block_size=BLOCK, target_layer_ids=[0, 3, 5]), ()),
    "dflash-biased-three-layers-default-ids": (
        _AUTHORS
        | {
            "block_size": BLOCK,
            "num_hidden_layers": 3,
            "attention_bias": True,
            "dflash_config": {"mask_token_id": MASK},
        },
        ("bias",),
    ),
    "dflash-one-layer-default-ids": (
        _AUTHORS
        | {"block_size": BLOCK, "num_hidden_layers": 1, "dflash_config": {"mask_token_id": MASK}},
        (),
    ),
    "dflash-sliding": (_AUTHORS | {"block_size": BLOCK} | _SLIDING | _inside(), ()),
    "dflash-sliding-unmasked": (
        _AUTHORS | {"block_size": BLOCK} | _SLIDING | _inside(causal=False),
        (),
    ),
    "dflash-causal": (_AUTHORS | {"block_size": BLOCK} | _inside(causal=True), ()),
    "dflash-use-swa": (
        _AUTHORS | {"block_size": BLOCK} | _inside(use_swa=True, swa_window_size=6, causal=False),
        (),
    ),
    "speculators": (_speculators(draft_vocab_size=REDUCED), ("embed", "head")),
    "speculators-sliding": (_speculators(_SLIDING), ("embed", "head")),
    "speculators-sliding-unmasked-from-anchor": (
        _speculators(_SLIDING, sliding_window_non_causal=True, sample_from_anchor=True),
        ("embed", "head"),
    ),
    "speculators-narrow": (
        _speculators({"hidden_size": 16}, target_hidden_size=WIDTH),
        ("embed", "head"),
    ),
}
RANK = 6
_SPARKS = {"projector_type": "dspark", "markov_rank": RANK, "attention_mode": "gqa"}
_DSPARK = {"architectures": ["DSparkDraftModel"], "block_size": BLOCK}
DSPARK_CASES = {
    "dspark": (
        _AUTHORS
        | _DSPARK
        | _inside(**_SPARKS, markov_head_type="vanilla", confidence_head_with_markov=True),
        ("markov", "confidence", "sees token"),
    ),
    "dspark-gated": (
        _AUTHORS | _DSPARK | _SLIDING | _inside(**_SPARKS, markov_head_type="gated"),
        ("markov", "gate_proj", "confidence"),
    ),
    "dspark-speculators-rnn": (
        _speculators(
            speculators_model_type="dspark",
            draft_vocab_size=REDUCED,
            markov_rank=RANK,
            markov_head_type="rnn",
            sample_from_anchor=False,
        ),
        ("embed", "head", "markov", "joint_proj"),
    ),
}


def case(name):
    """Return (tensors, config.json) of one of CASES or DSPARK_CASES, seeded by its name."""
    raw, extras = (CASES | DSPARK_CASES)[name]
    torch.manual_seed(len(name))
    inner = raw.get("transformer_layer_config", raw)
    width, dim, layers = inner["hidden_size"], inner["head_dim"], inner["num_hidden_layers"]
    ids = raw.get("aux_hidden_state_layer_ids") or raw["dflash_config"].get("target_layer_ids")
    inputs = len(ids or range(layers)) * WIDTH
    tensors = {
        "fc.weight": random(width, inputs),
        "hidden_norm.weight": gain(width),
        "norm.weight": gain(width),
    }
    for layer in range(layers):
        tensors |= _block(inner, f"layers.{layer}", width, dim, extras)
    vocab = raw.get("draft_vocab_size", VOCAB)
    if "embed" in extras:
        tensors["embed_tokens.weight"] = torch.randn(VOCAB, width)
    if "head" in extras:
        tensors["lm_head.weight"] = random(vocab, width)
    if vocab < VOCAB:
        tensors["d2t"], tensors["t2d"] = draft_vocabulary()
    return tensors | _sparks(extras, width, vocab), raw


def _sparks(extras, width, vocab):
    """Return the tensors that DSpark adds."""
    tensors = {}
    if "markov" in extras:
        tensors["markov_head.markov_w1.weight"] = torch.randn(VOCAB, RANK)
        tensors["markov_head.markov_w2.weight"] = random(vocab, RANK)
    sizes = {"gate_proj": (RANK, width + RANK), "joint_proj": (3 * RANK, 2 * RANK + width)}
    affine = {f"markov_head.{part}": size for part, size in sizes.items() if part in extras}
    if "confidence" in extras:
        affine["confidence_head.proj"] = (1, width + RANK * ("sees token" in extras))
    for name, size in affine.items():
        tensors[f"{name}.weight"], tensors[f"{name}.bias"] = random(*size), random(size[0])
    return tensors


def _block(inner, name, width, dim, extras):
    heads, kv_heads = inner["num_attention_heads"], inner["num_key_value_heads"]
    shapes = {
        "self_attn.q_proj": (heads * dim, width),
        "self_attn.k_proj": (kv_heads * dim, width),
        "self_attn.v_proj": (kv_heads * dim, width),
        "self_attn.o_proj": (width, heads * dim),
        "mlp.gate_proj": (inner["intermediate_size"], width),
        "mlp.up_proj": (inner["intermediate_size"], width),
        "mlp.down_proj": (width, inner["intermediate_size"]),
    }
    tensors = {f"{name}.{part}.weight": random(*shape) for part, shape in shapes.items()}
    tensors |= {
        f"{name}.{part}_layernorm.weight": gain(width) for part in ("input", "post_attention")
    }
    tensors |= {f"{name}.self_attn.{part}_norm.weight": gain(dim) for part in "qk"}
    if "bias" in extras:
        attention = [part for part in shapes if part.startswith("self_attn")]
        tensors |= {f"{name}.{part}.bias": random(shapes[part][0]) for part in attention}
    return tensors
