"""Every key of vLLM's ``speculative_config`` and its standing in jspec: data for code and docs.

vLLM's keys are those of July 2026 (commit 002e77c), and older ones that users still have.
"""

import dataclasses
from typing import Any, Literal

from jspec.util import neutral
from jspec.verify import RULES

Standing = Literal["works", "not built", "refused"]


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of ``speculative_config``.

    Attributes:
      name: name of the key.
      default: vLLM's default, which every key accepts.
      standing: "works"; "not built": other values raise until the feature exists; "refused": other
        values raise for good.
      note: its effect, or why it is refused; for error messages and the docs.
      also: other values without an effect.
    """

    name: str
    default: Any
    standing: Standing
    note: str
    also: tuple = ()

    def is_default(self, value: Any) -> bool:
        """Return whether ``value`` has the same effect as leaving the key out."""
        return neutral.is_neutral(value, (None, self.default, *self.also))


_VLLM_ONLY = "an engine setting of vLLM; one XLA program has no such part"
_GONE = "removed from vLLM too"

_WORKS = {
    "method": "the drafting method; inferred from `model` if left out",
    "model": "the draft model: a local directory or a hub id; 'ngram' names the method; for "
    "'custom_class', the dotted path of a class; for 'mtp', the target if left out",
    "num_speculative_tokens": "K, drafted tokens a round; for trees, the depth. Required, except "
    "for trees with a depth of their own, for 'mlp_speculator' and 'mtp' (default `n_predict`), "
    "for 'suffix' and for 'token_recycling'",
    "num_speculative_tokens_per_batch_size": "for chains: K by the number of unfinished rows, as "
    "(least, most, K), ends included; other batch sizes use `num_speculative_tokens`. K may be 0",
    "adaptive_length": "not in vLLM; for chains: the K's to choose from by expected tokens a "
    "second, such as [0, 2, 4], or true for 0, half of `num_speculative_tokens`, and all; of what "
    "is drafted, the nodes are verified that pay",
    "enable_adaptive_verification": "for chains: of what is drafted, the nodes are verified that "
    "pay; `adaptive_length` includes it",
    "prompt_lookup_max": "longest n-gram to look up; a copy of `prompt_lookup_min` if left out, "
    "or 5",
    "prompt_lookup_min": "shortest n-gram to look up; a copy of `prompt_lookup_max` if left out, "
    "or 5",
    "suffix_decoding_max_tree_depth": "most tokens of a match and its continuation together; K if "
    "`num_speculative_tokens` is left out",
    "suffix_decoding_max_cached_requests": "latest responses to look up; 0 for none",
    "suffix_decoding_max_spec_factor": "most drafted tokens for each token of the match",
    "suffix_decoding_min_token_prob": "least probability of a drafted token, estimated from the "
    "counts of continuations",
    "suffix_decoding_max_cached_tokens": "not in vLLM; stored tokens of past responses, including "
    "one slot for each response",
    "suffix_decoding_max_occurrences": "not in vLLM; latest occurrences of a match to count",
    "rejection_sample_method": "'standard', 'block', 'coupled' (the text of plain sampling; not "
    "in vLLM), and the older 'probabilistic' (standard) and 'strict' (the target's sample must "
    "equal the draft); lossy are 'synthetic' (for benchmarks) and 'typical' (Medusa's; not in "
    "vLLM); or the dotted path of a jspec.verify.Rule",
    "draft_sample_method": "'probabilistic' (the default in jspec: drafts are sampled, with their "
    "distribution recorded) or 'greedy'; for trees also 'top_plus_one' (the likeliest children "
    "and one sample; not in vLLM)",
    "draft_tensor_parallel_size": "1: every device has the whole drafter; or the target's "
    "`tensor_parallel_size`: each has a part of its heads, widths and vocabulary",
    "attention_backend": "form of the drafter's attention: 'xla', 'pallas_gpu', 'pallas_tpu' or "
    "'reference'; the device's default if left out",
    "quantization": "'int8', 'fp8' or 'int4': matrices of the draft model are quantised; "
    "'gguf' or 'w8a8' as for the target",
    "kv_cache_dtype": "numbers of the drafter's KV cache, whatever the target's are: 'bfloat16', "
    "'float32', 'fp8' (or 'fp8_e4m3'), 'fp8_e5m2' or 'int8'; those of its activations if left out",
    "max_model_len": "longest sequence to draft for, within the limits of both models; later "
    "rounds are plain steps",
    "parallel_drafting": "draft all tokens of a round in one pass: for 'draft_model' (PARD; "
    "config.json must name a `pard_token`) and for 'eagle3' (P-EAGLE; by default if the head is "
    "one)",
    "use_heterogeneous_vocab": "allow a draft model with its own tokenizer; it drafts only the "
    "tokens that both have, greedily or, unlike vLLM, sampled",
    "tree": "not in vLLM; for heads: 'chain', 'eagle2' (follows the head's confidence) or, for "
    "heads that do not read drafted tokens, 'best_first' (the likeliest paths), 'sampled' (a "
    "static tree of samples), a published tree's name or a list of rank paths; for 'suffix': "
    "'chain' or 'best_first' (the likeliest continuations); for 'token_recycling': a published "
    "tree, rank paths or 'chain', by default the best of 81 nodes",
    "tree_size": "not in vLLM; nodes of a tree with the root; default 60 for 'eagle2', 16 for "
    "'sampled' and 'best_first'",
    "tree_depth": "not in vLLM; edges from the root to the deepest leaf; the same as "
    "`num_speculative_tokens`",
    "tree_top_k": "not in vLLM; most children of a node; default 10 for 'eagle2', 4 for 'sampled'",
    "parts": "not in vLLM; for 'hybrid': two configs, a lookup method and then one with a network",
    "combine": "not in vLLM; for 'hybrid': 'merge' (both drafts in one tree) or 'choose' (for "
    "each row and round, the more promising draft)",
    "dspark_draft_topk": "for 'dspark': candidates of a slot, the likeliest before the Markov bias",
} | {setting.key: setting.note for rule in RULES.values() for setting in rule.settings}

_NOT_BUILT = {
    "code_revision": "the hub's default revision is fetched",
    "draft_load_config": "safetensors are loaded unchanged",
    "index_share_for_mtp_iteration": "no target here has sparse attention",
    "revision": "the hub's default revision is fetched",
}

_REFUSED = {
    "tensor_parallel_size": "'tensor_parallel_size' is not a valid argument in the "
    "speculative_config. Please pass 'draft_tensor_parallel_size' instead.",
    "confidence_threshold": "removed, because it gained nothing; use a smaller "
    "num_speculative_tokens or adaptive_length",
    "disable_eagle_block_drop": _VLLM_ONLY,
    "disable_padded_drafter_batch": "True or False, without an effect: shapes are static",
    "enforce_eager": "True or False, without an effect: everything is compiled",
    "use_local_argmax_reduction": "True or False, without an effect: greedy drafts exchange no "
    "logits",
    "moe_backend": "jspec.ops chooses the kernel by device",
    "draft_model_config": _VLLM_ONLY,
    "draft_parallel_config": _VLLM_ONLY,
    "target_model_config": _VLLM_ONLY,
    "target_parallel_config": _VLLM_ONLY,
    "acceptance_method": f"{_GONE}; use rejection_sample_method",
    "disable_by_batch_size": _GONE,
    "disable_logprobs": _GONE,
    "disable_mqa_scorer": _GONE,
    "fly_entropy_threshold": "lossy: the output would not follow the target",
    "fly_window_size": "lossy: the output would not follow the target",
    "speculative_token_tree": f"{_GONE}; use tree",
}

# vLLM's defaults other than None.
_SWITCHES = ("parallel_drafting", "use_heterogeneous_vocab", "enable_adaptive_verification")
_SWITCHES += ("use_local_argmax_reduction", "disable_mqa_scorer")
_SWITCHES += ("disable_eagle_block_drop", "disable_padded_drafter_batch")
_DEFAULTS = {
    "suffix_decoding_max_tree_depth": 24,
    "suffix_decoding_max_cached_requests": 10000,
    "suffix_decoding_max_spec_factor": 1.0,
    "suffix_decoding_min_token_prob": 0.1,
    "suffix_decoding_max_cached_tokens": 1 << 20,
    "suffix_decoding_max_occurrences": 32,
    "rejection_sample_method": "standard",
    "draft_sample_method": "greedy",
    "tree": "chain",
    "combine": "merge",
    "acceptance_method": "rejection_sampler",
    **dict.fromkeys(_SWITCHES, False),
}
_ALSO = {
    "enforce_eager": (True, False),
    "use_local_argmax_reduction": (True,),
    "disable_padded_drafter_batch": (True, "True", "False"),
    "attention_backend": ("auto",),
    "kv_cache_dtype": ("auto",),
    "moe_backend": ("auto",),
    "index_share_for_mtp_iteration": (False,),
}

KEYS = {
    name: Key(name, _DEFAULTS.get(name), standing, note, _ALSO.get(name, ()))
    for standing, notes in (("works", _WORKS), ("not built", _NOT_BUILT), ("refused", _REFUSED))
    for name, note in notes.items()
}


def _elsewhere(system: str, names: dict[str, str]) -> dict[str, str]:
    return {old: f"; {system} called it so, here it is {new!r}" for old, new in names.items()}


# Keys of other engines and of older versions, and what they are here.
ELSEWHERE = {
    **_elsewhere(
        "vLLM before 0.10",
        {
            "speculative_model": "model",
            "speculative_max_model_len": "max_model_len",
            "speculative_model_quantization": "quantization",
            "speculative_draft_tensor_parallel_size": "draft_tensor_parallel_size",
            "speculative_disable_by_batch_size": "num_speculative_tokens_per_batch_size",
            "ngram_prompt_lookup_max": "prompt_lookup_max",
            "ngram_prompt_lookup_min": "prompt_lookup_min",
            "spec_decoding_acceptance_method": "rejection_sample_method",
        },
    ),
    **_elsewhere(
        "SGLang",
        {
            "speculative_algorithm": "method",
            "speculative_draft_model_path": "model",
            "speculative_num_steps": "num_speculative_tokens",
            "speculative_eagle_topk": "tree_top_k",
            "speculative_num_draft_tokens": "tree_size",
        },
    ),
    **_elsewhere(
        "TensorRT-LLM",
        {
            "decoding_type": "method",
            "max_draft_len": "num_speculative_tokens",
            "speculative_model_dir": "model",
        },
    ),
    **_elsewhere(
        "transformers",
        {
            "assistant_model": "model",
            "num_assistant_tokens": "num_speculative_tokens",
            "prompt_lookup_num_tokens": "num_speculative_tokens",
            "max_matching_ngram_size": "prompt_lookup_max",
        },
    ),
}

HYBRID = "hybrid"  # made of two other methods
CUSTOM_CLASS = "custom_class"  # no entry of ``jspec.drafters.methods.METHODS``
CUSTOM_CLASS_NOTE = "a drafter of your own: `model` is the dotted path of its class"
METHODS_REFUSED = {
    "cascade": "removed, because it gained nothing; use 'draft_model', or 'hybrid' with ngram",
    "extract_hidden_states": "it drafts nothing; use jspec.load(path).target",
}
# "ngram_gpu" is vLLM's lookup on the GPU, where jspec's always runs. "arctic" is a name of Arctic
# Inference, a plug-in of vLLM.
METHOD_ALIASES = {
    "[ngram]": "ngram",
    "ngram_gpu": "ngram",
    "arctic": "mlp_speculator",
    "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "mimo_mtp": "mtp",
}
METHODS_IN_TARGETS = ("mtp",)  # without a model, their weights are in the target's files
METHODS_AS_MODELS = ("ngram", "suffix", "[ngram]", "ngram_gpu")  # names that ``model`` may have
# The method by a part of the model's name, as in vLLM; else by the ``model_type`` or a key in the
# config.json of a directory.
METHOD_IN_NAME = {
    "peagle": "eagle3",
    "p-eagle": "eagle3",
    "eagle3": "eagle3",
    "eagle-": "eagle",
    "dflash": "dflash",
    "dspark": "dspark",
}
_WITH_MODULES = ("deepseek_v3", "deepseek_mtp", "glm4_moe", "glm4_moe_mtp", "mimo", "mimo_mtp")
METHOD_OF_MODEL_TYPE = {
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    **dict.fromkeys(_WITH_MODULES, "mtp"),
}
METHOD_OF_KEY = {
    "hydra_head_arch": "hydra",
    "medusa_num_heads": "medusa",
    "dflash_config": "dflash",
}

# rejection_sample_method to the name in ``jspec.verify.RULES``.
RULE_NAMES = {alias: rule.name for rule in RULES.values() for alias in rule.aliases or [rule.name]}
# The settings of all rules, by key; a rule refuses those of another one.
RULE_KEYS = {setting.key: rule.name for rule in RULES.values() for setting in rule.settings}
RULES_NOT_BUILT = ("fly", "lenient")
DRAFT_SAMPLE_METHODS = ("probabilistic", "greedy")  # methods of chains; trees have more
