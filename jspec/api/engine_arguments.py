"""Arguments of vLLM's ``LLM``, and of its calls, that jspec has no use for.

Values without an effect are accepted, so that programs written for vLLM run. All others raise.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jspec.util.messages import did_you_mean, shown

_OFF = (None, False)
_NONE = (None,)
# The values without an effect, and why others are refused.
_NEUTRAL: dict[str, tuple[tuple, str]] = {
    "trust_remote_code": (_OFF, "jspec never runs the code of a checkpoint"),
    "quantization": (_NONE, "weights are not quantised"),
    "enforce_eager": (_OFF, "everything is compiled"),
    "load_format": ((None, "auto", "safetensors", "gguf"), "the files decide how they are read"),
    "tokenizer_mode": ((None, "auto", "hf"), "tokenizers are those of transformers"),
    "skip_tokenizer_init": (_OFF, "pass token ids and SamplingParams(detokenize=False)"),
    "tensor_parallel_size": ((None, 1), "there is one device"),
    "pipeline_parallel_size": ((None, 1), "there is one device"),
    "data_parallel_size": ((None, 1), "there is one device"),
    "distributed_executor_backend": (_NONE, "there is one process"),
    "enable_chunked_prefill": ((None, True, False), "it is True or False, without an effect"),
    "max_num_batched_tokens": (_NONE, "max_num_seqs limits a batch"),
    "kv_cache_dtype": ((None, "auto"), "the cache has the dtype of the weights"),
    "swap_space": ((None, 0, 4), "nothing is swapped"),
    "cpu_offload_gb": ((None, 0), "nothing is offloaded"),
    "revision": (_NONE, "fetch that revision and give its directory"),
    "tokenizer_revision": (_NONE, "fetch that revision and give its directory"),
    "code_revision": (_NONE, "jspec never runs the code of a checkpoint"),
    "hf_token": (_NONE, "log in with `hf auth login`"),
    "hf_overrides": ((None, {}), "edit config.json"),
    "compilation_config": (_NONE, "set XLA_FLAGS"),
    "async_scheduling": (
        (None, True, False),
        "it is True or False, without an effect: the next launch never waits for the last one",
    ),
    "generation_config": (
        (None, "vllm"),
        "requests have the values of SamplingParams; the server reads generation_config.json",
    ),
    "override_generation_config": ((None, {}), "give SamplingParams"),
    "logits_processors": ((None, []), "give them to SamplingParams"),
    "structured_outputs_config": ((None, {}), "structured_outputs need no settings"),
    "scheduling_policy": ((None, "fcfs"), "requests of an LLM run in their order"),
    "model_impl": ((None, "auto"), "models are those of jspec"),
    "config_format": ((None, "auto", "hf"), "config.json and GGUF are read"),
    "download_dir": (_NONE, "set HF_HOME"),
    "served_model_name": (_NONE, "jspec serve has it"),
    "attention_backend": (_NONE, "the device decides"),
    "enable_expert_parallel": (_OFF, "there is one device"),
    "enable_sleep_mode": (_OFF, "delete the LLM to free its memory"),
    "enable_prompt_embeds": (_OFF, "prompts are text or token ids"),
    "allowed_local_media_path": ((None, ""), "prompts are text"),
    "use_tqdm_on_load": ((None, True, False), "it is True or False, without an effect"),
    "enable_lora": (_OFF, "merge the adapter into the model"),
    "disable_log_stats": ((None, True, False), "it is True or False, without an effect"),
    "disable_custom_all_reduce": ((None, True, False), "it is True or False, without an effect"),
    "task": ((None, "auto", "generate"), "jspec generates text"),
    "runner": ((None, "auto", "generate"), "jspec generates text"),
    "convert": ((None, "auto", "none"), "jspec generates text"),
    "mm_processor_kwargs": (_NONE, "prompts are text"),
    "limit_mm_per_prompt": ((None, {}), "prompts are text"),
    "pooler_config": (_NONE, "jspec generates text"),
}
# Those of ``generate`` and ``chat``.
_NEUTRAL_OF_CALLS: dict[str, tuple[tuple, str]] = {
    "lora_request": (_NONE, "merge the adapter into the model"),
    "priority": ((None, 0), "the prompts of a call run in their order; AsyncLLM has priorities"),
    "tokenization_kwargs": ((None, {}), "give prompt_token_ids"),
    "mm_processor_kwargs": ((None, {}), "prompts are text"),
}


def is_of_vllm(name: str) -> bool:
    """Return whether vLLM has an argument that jspec has no use for."""
    return name in _NEUTRAL


def is_switch(name: str) -> bool:
    """Return whether it is a flag of vLLM's command line that needs no value."""
    return any(isinstance(value, bool) for value in _NEUTRAL.get(name, ((),))[0])


def check(owner: str, given: Mapping[str, Any], known: Callable[..., Any]) -> None:
    """Check the arguments of an ``LLM`` that ``known`` does not have.

    Raises:
      ValueError: an argument is unknown, or is vLLM's and has an effect.
    """
    _check(owner, given, known, _NEUTRAL)


def check_call(owner: str, given: Mapping[str, Any], known: Callable[..., Any]) -> None:
    """Check the arguments of a call that ``known`` does not have; errors are those of ``check``."""
    _check(owner, given, known, _NEUTRAL_OF_CALLS)


def _check(
    owner: str,
    given: Mapping[str, Any],
    known: Callable[..., Any],
    neutral: Mapping[str, tuple[tuple, str]],
) -> None:
    names = inspect.signature(known).parameters
    for name, value in given.items():
        values, reason = neutral.get(name, ((), ""))
        if any(type(value) is type(each) and value == each for each in values):
            continue
        if name in neutral:
            raise ValueError(f"{owner}: {name}={shown(value)} is not supported: {reason}.")
        guess = did_you_mean(name, [*names, *neutral]) or "; leave it out."
        raise ValueError(f"{owner} has no {shown(name)}{guess}")
