"""The models of the roofline table, by the sizes of their layers."""

import dataclasses
from typing import Any, NamedTuple

from jspec.models import decoder
from jspec.models.blocks.delta_rule import DeltaRule
from jspec.models.blocks.experts import ClampedSwiglu, Experts
from jspec.models.blocks.rope import RopeConfig
from tests import networks
from tests.aot.programs import ACCELERATOR


class Model(NamedTuple):
    """A model by the sizes of its layers, which are of one kind or two."""

    num_layers: int
    sizes: dict[str, Any]
    num_others: int = 0  # layers of the second kind, which have a window or states
    window: int | None = None
    states: DeltaRule | None = None

    def network(self, num_layers: int, *, others: bool = False) -> decoder.DecoderConfig:
        """Return the config of fewer layers of one kind.

        Behind layers with states comes one with keys and values, whose pages a round needs.
        """
        states = self.states if others else None
        windows = (self.window if others else None,) * (num_layers + (states is not None))
        config = networks.build(max_positions=131072, windows=windows, **self.sizes, **ACCELERATOR)
        if states is None:
            return config
        *first, last = config.layers
        recurrent = (dataclasses.replace(layer, mixer=states) for layer in first)
        return dataclasses.replace(config, layers=(*recurrent, last))


_LLAMA = dict(
    vocab_size=128256,
    num_kv_heads=8,
    head_dim=128,
    norm_eps=1e-5,
    rope=RopeConfig(500000.0, "llama3", 8.0, 8192),
)
_A3B = Experts(128, 8, 768, scoring="softmax", selection_bias=False)
_GPT_OSS = Experts(
    32,
    4,
    2880,
    scoring="softmax",
    selection_bias=False,
    router_bias=True,
    expert_bias=True,
    swiglu=ClampedSwiglu(1.702, 7.0),
)
MODELS = {
    "llama-8b": Model(32, _LLAMA | dict(hidden_size=4096, intermediate_size=14336, num_heads=32)),
    "llama-70b": Model(80, _LLAMA | dict(hidden_size=8192, intermediate_size=28672, num_heads=64)),
    # Gemma 3's norms after attention and MLP read no more memory, and the decoder lacks them.
    "gemma-27b": Model(
        62,
        dict(
            vocab_size=262208,
            hidden_size=5376,
            intermediate_size=21504,
            num_heads=32,
            num_kv_heads=16,
            head_dim=128,
            qk_norm=True,
            tie_embeddings=True,
            norm_eps=1e-6,
            rope=RopeConfig(1e6, "linear", 8.0),
        ),
        num_others=52,
        window=1024,
    ),
    "qwen3-30b-a3b": Model(
        48,
        dict(
            vocab_size=151936,
            hidden_size=2048,
            feed_forward=_A3B,
            num_heads=32,
            num_kv_heads=4,
            head_dim=128,
            qk_norm=True,
            norm_eps=1e-6,
            rope=RopeConfig(1e6),
        ),
    ),
    "qwen3.5-35b-a3b": Model(
        40,
        dict(
            vocab_size=248320,
            hidden_size=2048,
            feed_forward=dataclasses.replace(
                _A3B,
                num_experts=256,
                intermediate_size=512,
                shared_size=512,
                shared_gate=True,
            ),
            num_heads=16,
            num_kv_heads=2,
            head_dim=256,
            rotary_dim=64,
            gated=True,
            qk_norm=True,
            norm_eps=1e-6,
            rope=RopeConfig(1e7),
        ),
        num_others=30,
        states=DeltaRule(32, 16, key_dim=128, head_dim=128),
    ),
    "gpt-oss-20b": Model(
        24,
        dict(
            vocab_size=201088,
            hidden_size=2880,
            feed_forward=_GPT_OSS,
            num_heads=64,
            num_kv_heads=8,
            head_dim=64,
            qkv_bias=True,
            output_bias=True,
            has_sinks=True,
            norm_eps=1e-5,
            rope=RopeConfig(150000.0),
        ),
        num_others=12,
        window=128,
    ),
}
