"""OLMo 3: OLMo 2 with a window in three of four layers, which no rotary scaling stretches."""

import dataclasses

from jspec.checkpoints.families import common, olmo2, scaling
from jspec.checkpoints.families.common import FULL
from jspec.models.decoder import DecoderConfig, Layer


def _layers(raw: dict) -> tuple[Layer, ...]:
    attention, layer = olmo2.parts(raw)
    mixer = common.attention(scaling.of_kind(raw, FULL), **attention)
    windows = common.every(raw, 4)
    ropes = common.ropes(raw, windows, mixer.head_dim)
    return common.alike(raw, mixer, common.mlp(raw), windows, ropes, **layer)


def _describe(config: DecoderConfig) -> dict:
    return olmo2.describe(config) | common.describe_kinds(config)


FAMILY = dataclasses.replace(
    olmo2.FAMILY,
    model_type="olmo3",
    architecture="Olmo3ForCausalLM",
    defaults=olmo2.FAMILY.defaults
    | {"sliding_window": 4096, "layer_types": None, "default_theta": 5e5},
    neutral={"mlp_bias": (None, False)},
    layers=_layers,
    describe=_describe,
    ropes_by_kind=True,
)
