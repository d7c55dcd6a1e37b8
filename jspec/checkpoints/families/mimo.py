"""MiMo-7B: Qwen2, trained with modules that predict the tokens after the next."""

import dataclasses

from jspec.checkpoints.families import qwen2

# A class of its own, which transformers lacks, but with the blocks of Qwen2.
FAMILY = dataclasses.replace(
    qwen2.FAMILY,
    model_type="mimo",
    architecture="MiMoForCausalLM",
    neutral=qwen2.FAMILY.neutral | {"attention_bias": (None, True)},
)
