"""MiMo-7B: Qwen2, trained with MTP modules."""

import dataclasses

from jspec.checkpoints.families import qwen2

# transformers has no such class; the blocks are those of Qwen2.
FAMILY = dataclasses.replace(
    qwen2.FAMILY,
    model_type="mimo",
    architecture="MiMoForCausalLM",
    neutral=qwen2.FAMILY.neutral | {"attention_bias": (None, True)},
)
