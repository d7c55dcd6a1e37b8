"""Gemma 3, the text part: Gemma 2 with norms of query and key heads, and ropes by kind of layer."""

import dataclasses

from jspec.checkpoints.families import common, gemma2, scaling
from jspec.checkpoints.families.common import FULL, whole
from jspec.models.decoder import Layer

_LOCAL_THETA = "rope_local_base_freq"


def _layers(raw: dict) -> tuple[Layer, ...]:
    norm = gemma2.norm(raw)
    mixer = gemma2.attention(scaling.of_kind(raw, FULL), qk_norm=norm)
    windows = common.every(raw, whole(raw, "sliding_window_pattern"))
    ropes = common.ropes(raw, windows, mixer.head_dim, _LOCAL_THETA)
    return common.alike(
        raw,
        mixer,
        gemma2.mlp(raw),
        windows,
        ropes,
        norm=norm,
        output_norm=norm,
    )


FAMILY = dataclasses.replace(
    gemma2.FAMILY,
    model_type="gemma3_text",
    architecture="Gemma3ForCausalLM",
    defaults=gemma2.FAMILY.defaults
    | {"vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216}
    | {"num_hidden_layers": 26, "num_attention_heads": 8, "max_position_embeddings": 131072}
    | dict.fromkeys(("attn_logit_softcapping", "final_logit_softcapping"))
    | {"default_theta": 1e6, _LOCAL_THETA: 1e4, "sliding_window_pattern": 6},
    # transformers reads the cap of scores and does not apply it.
    neutral=gemma2.FAMILY.neutral | {"attn_logit_softcapping": (None,)},
    layers=_layers,
    ropes_by_kind=True,
)
