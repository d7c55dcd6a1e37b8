"""Arguments of vLLM, and of other engines, that jspec has no use for, with values to accept.

A value without an effect is accepted, so that programs written for vLLM run. All others raise.
"""

from collections.abc import Iterable, Mapping
from typing import Any

from jspec.util.messages import did_you_mean, shown

# By name: the values without an effect, and why others are refused.
Table = Mapping[str, tuple[Iterable, str]]


class _Any(tuple):
    """All values, of an argument that has nothing to set here."""


_ANY = _Any()
_NONE = (None,)
_OFF = (None, False)
_EMPTY = (None, False, [], {}, (), "")
# Arguments of ``LLM``.
ENGINE: Table = {
    "trust_remote_code": ((None, True, False), "it is True or False; no code of files runs"),
    "enforce_eager": ((None, True, False), "it is True or False, without an effect"),
    "load_format": ((None, "auto", "safetensors", "gguf"), "the files decide how they are read"),
    "tokenizer_mode": ((None, "auto", "hf"), "tokenizers are those of transformers"),
    "skip_tokenizer_init": (_OFF, "pass token ids and SamplingParams(detokenize=False)"),
    "pipeline_parallel_size": ((None, 1), "set tensor_parallel_size"),
    "distributed_executor_backend": (
        (None, "mp", "ray", "uni"),
        "one process runs all devices, whatever is named",
    ),
    "enable_chunked_prefill": ((None, True, False), "it is True or False, without an effect"),
    "max_num_batched_tokens": (_ANY, ""),  # chunks of prompts have sizes of their own
    "swap_space": ((None, 0, 4), "nothing is swapped"),
    "cpu_offload_gb": ((None, 0), "nothing is offloaded"),
    "revision": (_NONE, "fetch that revision and give its directory"),
    "tokenizer_revision": (_NONE, "fetch that revision and give its directory"),
    "code_revision": (_NONE, "jspec never runs the code of a checkpoint"),
    "hf_token": (_NONE, "log in with `hf auth login`"),
    "hf_overrides": (_OFF, "edit config.json"),
    "compilation_config": (_ANY, ""),  # everything is compiled, with the sizes of jspec
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
# Arguments of ``generate`` and ``chat``.
CALLS: Table = {
    "lora_request": (_NONE, "merge the adapter into the model"),
    "priority": ((None, 0), "the prompts of a call run in their order; AsyncLLM has priorities"),
    "tokenization_kwargs": ((None, {}), "give prompt_token_ids"),
    "mm_processor_kwargs": ((None, {}), "prompts are text"),
}

# Parameters of ``SamplingParams``, and fields of requests.
SAMPLING: Table = {
    "early_stopping": (_EMPTY, "it belongs to beam search"),
    "extra_args": (_EMPTY, "it has no meaning here"),
    "flat_logprobs": (_EMPTY, "log-probabilities are dicts by token"),
    "guided_decoding": (_EMPTY, "give structured_outputs"),
    "guided_json": (_EMPTY, "give structured_outputs"),
    "guided_regex": (_EMPTY, "give structured_outputs"),
    "guided_choice": (_EMPTY, "give structured_outputs"),
    "guided_grammar": (_EMPTY, "give structured_outputs"),
    "length_penalty": ((None, 1), "it belongs to beam search"),
    "logprob_token_ids": (_EMPTY, "ask for more logprobs"),
    "output_kind": (_NONE, "generate returns whole texts, and stream growing ones"),
    "prompt_logprob_start": (_NONE, "all tokens of a prompt have scores, or none"),
    "prompt_logprob_token_ids": (_EMPTY, "ask for more prompt_logprobs"),
    "repetition_detection": (_EMPTY, "set max_tokens"),
    "routed_experts_prompt_start": ((None, 0), "the choice of experts is not returned"),
    "skip_clone": (_EMPTY, "nothing is cloned"),
    "skip_reading_prefix_cache": (_EMPTY, "give prompts another cache_salt"),
    "spaces_between_special_tokens": ((None, True), "texts have the tokenizer's own spaces"),
    "stream_interval": (_NONE, "a stream grows with each launch"),
    "thinking_token_budget": (_EMPTY, "set max_tokens"),
    "trace_decode_token_ids": (_EMPTY, "jspec.trace shows a whole generation"),
    "truncate_prompt_tokens": (_NONE, "shorten the prompt"),
    "use_beam_search": (_EMPTY, "draw with best_of instead"),
}
# Fields of requests. A field of one endpoint may be without a meaning for another.
REQUESTS: Table = {
    **SAMPLING,
    "suffix": (_EMPTY, "jspec completes texts at their end"),
    "prompt_embeds": (_EMPTY, "send text or token ids"),
    "functions": (_EMPTY, "send tools"),
    "function_call": ((None, "none"), "send tool_choice"),
    "audio": (_EMPTY, "answers are text"),
    "modalities": ((None, [], ["text"]), "answers are text"),
    "prediction": (_EMPTY, "the server chooses the drafter"),
    "web_search_options": (_EMPTY, "the model searches nothing"),
    "logits_processors": (_EMPTY, "give them to jspec.LLM"),
    "detokenize": ((None, True), "answers are text; return_token_ids adds the ids"),
    "vllm_xargs": (_EMPTY, "it has no meaning here"),
    "kv_transfer_params": (_EMPTY, "there is one engine"),
    "mm_processor_kwargs": (_EMPTY, "prompts are text"),
    "include_reasoning": ((None, True), "the text holds what the model writes"),
    "previous_response_id": (_EMPTY, "send the conversation in input"),
    "conversation": (_EMPTY, "send the conversation in input"),
    "background": (_EMPTY, "wait for the answer"),
    "include": (_EMPTY, "there is nothing to include"),
    "truncation": ((None, "disabled"), "shorten the input"),
    "prompt": (_EMPTY, "send input"),
    "reasoning": (_EMPTY, "the chat template decides how a model reasons"),
    "echo": (_EMPTY, "it belongs to /v1/completions"),
    "add_special_tokens": (_EMPTY, "the chat template writes them"),
}

# More of them, of requests that generate: parameters of other engines, and of other endpoints.
_ZERO, _ONE = (None, 0, False), (None, 1)
_NO_FILTER = "the filters are top_k, top_p and min_p"
GENERATION: Table = {
    **dict.fromkeys(("top_a", "epsilon_cutoff", "eta_cutoff"), (_ZERO, _NO_FILTER)),
    **dict.fromkeys(("typical", "typical_p", "tfs", "tfs_z"), (_ONE, _NO_FILTER)),
    **dict.fromkeys(("nsigma", "top_n_sigma"), ((None, 0, -1), _NO_FILTER)),
    **dict.fromkeys(("mirostat", "mirostat_mode"), (_ZERO, _NO_FILTER)),
    "xtc_probability": (_ZERO, _NO_FILTER),
    "dynatemp_range": (_ZERO, "set temperature"),
    "smoothing_factor": (_ZERO, "set temperature"),
    "dry_multiplier": (_ZERO, "set repetition_penalty"),
    "no_repeat_ngram_size": (_ZERO, "set repetition_penalty"),
    "penalty_alpha": (_ZERO, "set presence_penalty"),
    "repeat_penalty": (_ONE, "set repetition_penalty"),
    "num_beams": (_ONE, "draw with best_of instead"),
    "max_new_tokens": (_NONE, "set max_tokens"),
    "min_new_tokens": (_ZERO, "set min_tokens"),
    "n_predict": ((None, -1), "set max_tokens"),
    "stop_sequences": ((None, []), "set stop"),
    "random_seed": (_NONE, "set seed"),
    "sampling_seed": (_NONE, "set seed"),
    "max_output_tokens": (_NONE, "set max_tokens"),
    "max_tokens": (_NONE, "set max_output_tokens"),
    **dict.fromkeys(("n", "best_of"), (_ONE, "a response has one text")),
    **dict.fromkeys(("logprobs", "prompt_logprobs"), ((None, False), "a response has no scores")),
}


def is_neutral(value: Any, values: Iterable[Any]) -> bool:
    """Return whether a value is one of those without an effect; a bool is no number.

    >>> is_neutral(1.0, (None, 1)), is_neutral(True, (None, 1)), is_neutral([], (None, []))
    (True, False, True)
    """
    return isinstance(values, _Any) or any(
        value == each and isinstance(value, bool) == isinstance(each, bool) for each in values
    )


def refusal(name: str, value: Any, table: Table) -> str | None:
    """Return why the value of an argument in a table is refused; None if it has no effect."""
    values, reason = table[name]
    if is_neutral(value, values):
        return None
    return f"{name}={shown(value)} is not supported: {reason}."


def check(owner: str, given: Mapping[str, Any], table: Table, known: Iterable[str]) -> None:
    """Check the arguments of ``owner`` that are none of the ``known`` ones.

    Raises:
      ValueError: an argument is not in the table, or has an effect.
    """
    for name, value in given.items():
        if name not in table:
            guess = did_you_mean(name, [*known, *table]) or "; leave it out."
            raise ValueError(f"{owner} has no {shown(name)}{guess}")
        if words := refusal(name, value, table):
            raise ValueError(f"{owner}: {words}")
