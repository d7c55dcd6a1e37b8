"""Every key of vLLM's ``speculative_config`` and its standing here: data, for code and docs alike.

vLLM's keys are those of July 2026 (commit 002e77c) and the older ones that users still carry along.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

from jspec.drafters import METHODS
from jspec.drafters.trees import tree_settings
from jspec.verify import RULES

Standing = Literal["works", "not built", "refused"]


@dataclasses.dataclass(frozen=True)
class Key:
    """A key of ``speculative_config``.

    Attributes:
      name: its name.
      default: vLLM's default, at which every key is accepted.
      standing: "works"; "not built": other values raise until the feature exists; "refused": other
        values raise for good.
      note: what it does, or why it is refused; shown in error messages and in the docs.
      also: other values that ask for nothing.
    """

    name: str
    default: Any
    standing: Standing
    note: str
    also: tuple = ()

    def asks_nothing(self, value: Any) -> bool:
        """Whether ``value`` leaves everything as it is without the key."""
        idle = (None, self.default, *self.also)
        return any(
            value == one and isinstance(value, bool) == isinstance(one, bool) for one in idle
        )


_VLLM_ONLY = "an engine setting of vLLM's; one XLA program has no such part"
_GONE = "gone from vLLM too"

_WORKS = (
    ("method", None, "how tokens are drafted; inferred from `model` where it is left out"),
    (
        "model",
        None,
        "the draft model: a local directory or a hub id; 'ngram' names the method; of 'custom_class', "
        "the dotted path of a class; of 'mtp', the target if left out",
    ),
    (
        "num_speculative_tokens",
        None,
        "K, drafted tokens a round; of a tree, its depth. Required, but for trees that have one, "
        "for 'mlp_speculator' and 'mtp', whose `n_predict` it is if left out, for 'suffix' and for "
        "'token_recycling'",
    ),
    (
        "num_speculative_tokens_per_batch_size",
        None,
        "of chains: K for numbers of unfinished rows, as (least, most, K), ends included; elsewhere "
        "`num_speculative_tokens`. K may be 0",
    ),
    (
        "adaptive_length",
        None,
        "not in vLLM; of chains: K's to choose from in every round by expected tokens a second, such "
        "as [0, 2, 4], or true for 0, 1, 2, 4, ... up to `num_speculative_tokens`",
    ),
    (
        "prompt_lookup_max",
        None,
        "longest n-gram to look up; 5 if both are left out, else a copy of `prompt_lookup_min`",
    ),
    (
        "prompt_lookup_min",
        None,
        "shortest n-gram to look up; 5 if both are left out, else a copy of `prompt_lookup_max`",
    ),
    (
        "suffix_decoding_max_tree_depth",
        24,
        "tokens of a match and its continuation together, at most; K where "
        "`num_speculative_tokens` is left out",
    ),
    (
        "suffix_decoding_max_cached_requests",
        10000,
        "past responses that are looked up, the latest; 0 for none",
    ),
    (
        "suffix_decoding_max_spec_factor",
        1.0,
        "drafted tokens for every token of the match, at most",
    ),
    (
        "suffix_decoding_min_token_prob",
        0.1,
        "least probability of a drafted token, as estimated by counts of continuations",
    ),
    (
        "suffix_decoding_max_cached_tokens",
        1 << 20,
        "not in vLLM; tokens of past responses that are kept, a place for each response included",
    ),
    (
        "suffix_decoding_max_occurrences",
        32,
        "not in vLLM; occurrences of a match that are counted, the latest",
    ),
    (
        "rejection_sample_method",
        "standard",
        "'standard', 'block', 'coupled' (the text of plain sampling; not in vLLM), and the older "
        "'probabilistic' (standard) and 'strict' (the target's own draw must equal the draft); lossy "
        "are 'synthetic' (for benchmarks) and 'typical' (Medusa's; not in vLLM)",
    ),
    (
        "draft_sample_method",
        "greedy",
        "'probabilistic' (the default here: drafts are sampled, with their law recorded) or 'greedy'; "
        "for trees also 'top_plus_one' (the likeliest children and one draw; not in vLLM)",
    ),
    ("draft_tensor_parallel_size", None, "1; other values raise until tensor parallelism is built"),
    (
        "max_model_len",
        None,
        "longest text to draft for, at most that of either model; rounds past it are plain steps",
    ),
    (
        "parallel_drafting",
        False,
        "whether all tokens of a round are drafted in one pass, none seeing another: of 'draft_model' "
        "(PARD; config.json must name a `pard_token`) and of 'eagle3' (P-EAGLE; if left out, where "
        "the head was made for it)",
    ),
    (
        "use_heterogeneous_vocab",
        False,
        "whether the draft model may have a tokenizer of its own; it then drafts the tokens that both "
        "have, greedily or, unlike vLLM's, sampled",
    ),
    (
        "tree",
        "chain",
        "not in vLLM; of a head's drafts: 'chain', 'eagle2' (follows the head's confidence) or, of "
        "heads that do not see what they drafted, 'best_first' (the likeliest paths), "
        "'sampled' (a static tree of draws), a published tree's name or a list of rank paths; of "
        "'suffix': 'chain' or 'best_first' (the likeliest continuations); of 'token_recycling': a "
        "published tree, rank paths or 'chain', or the best of 81 nodes if left out",
    ),
    (
        "tree_size",
        None,
        "not in vLLM; nodes a row with the root, 60 for 'eagle2' and 16 for 'sampled' and "
        "'best_first' if left out",
    ),
    (
        "tree_depth",
        None,
        "not in vLLM; edges from the root to the deepest leaf, another name of "
        "`num_speculative_tokens`",
    ),
    (
        "tree_top_k",
        None,
        "not in vLLM; children of a node at most, 10 for 'eagle2' and 4 for 'sampled' if left out",
    ),
    (
        "parts",
        None,
        "not in vLLM; of 'hybrid': two configs, first that of a method that looks up what it drafts, "
        "then that of one with a network",
    ),
    (
        "combine",
        "merge",
        "not in vLLM; of 'hybrid': 'merge' (both drafts in one tree) or 'choose' (for each row and "
        "round the one that promises more)",
    ),
    (
        "dspark_draft_topk",
        None,
        "of 'dspark': tokens of a slot that are drafted from, the likeliest before the bias by the "
        "token before",
    ),
    (
        "synthetic_acceptance_rates",
        None,
        "of 'synthetic': how often the first i drafted tokens are accepted, for i = 1..K",
    ),
    (
        "synthetic_acceptance_length",
        None,
        "of 'synthetic', in place of rates: mean tokens a round, the one after the draft included",
    ),
    (
        "posterior_threshold",
        None,
        "of 'typical', 0.09 if left out: accepted is p > min(threshold, alpha * exp(-entropy))",
    ),
    ("posterior_alpha", None, "of 'typical', 0.3 if left out"),
)

_NOT_BUILT = (
    ("code_revision", None, "the hub's default revision is fetched"),
    ("draft_load_config", None, "safetensors are loaded as they lie"),
    ("enable_adaptive_verification", False, "every node of a draft is verified"),
    (
        "index_share_for_mtp_iteration",
        None,
        "for targets with sparse attention, of which there are none here",
    ),
    ("kv_cache_dtype", None, "the draft model's cache has the dtype it computes in"),
    ("quantization", None, "draft models load in float32, bfloat16 or float16"),
    ("revision", None, "the hub's default revision is fetched"),
    ("use_local_argmax_reduction", False, "comes with tensor parallelism"),
)

_REFUSED = (
    (
        "tensor_parallel_size",
        None,
        "'tensor_parallel_size' is not a valid argument in the speculative_config. Please pass "
        "'draft_tensor_parallel_size' instead.",
    ),
    (
        "confidence_threshold",
        None,
        "removed, as no measurement showed a gain; use a smaller num_speculative_tokens or "
        "adaptive_length",
    ),
    ("attention_backend", None, "jspec.ops chooses the kernel by device"),
    ("disable_eagle_block_drop", False, _VLLM_ONLY),
    ("disable_padded_drafter_batch", False, _VLLM_ONLY),
    ("enforce_eager", None, "the whole loop is one compiled program; there is no eager mode"),
    ("moe_backend", None, "jspec.ops chooses the kernel by device"),
    ("draft_model_config", None, _VLLM_ONLY),
    ("draft_parallel_config", None, _VLLM_ONLY),
    ("target_model_config", None, _VLLM_ONLY),
    ("target_parallel_config", None, _VLLM_ONLY),
    ("acceptance_method", "rejection_sampler", f"{_GONE}; use rejection_sample_method"),
    ("disable_by_batch_size", None, _GONE),
    ("disable_logprobs", None, _GONE),
    ("disable_mqa_scorer", False, _GONE),
    ("fly_entropy_threshold", None, "lossy: the output would not follow the target"),
    ("fly_window_size", None, "lossy: the output would not follow the target"),
    ("speculative_token_tree", None, f"{_GONE}; use tree"),
)

_ALSO = {
    "enforce_eager": (False,),
    "attention_backend": ("auto",),
    "kv_cache_dtype": ("auto",),
    "moe_backend": ("auto",),
    "index_share_for_mtp_iteration": (False,),
}

KEYS = {
    name: Key(name, default, standing, note, _ALSO.get(name, ()))
    for standing, rows in (("works", _WORKS), ("not built", _NOT_BUILT), ("refused", _REFUSED))
    for name, default, note in rows
}

# What vLLM's methods are here; those that work stand in ``jspec.drafters.METHODS``. MTP modules of
# other families (``*_mtp``) are not built.
HYBRID = "hybrid"  # made of two other methods
# A class of the user's own, which no table can hold.
CUSTOM_CLASS = "custom_class"
CUSTOM_CLASS_NOTE = "a drafter of your own: `model` is the dotted path of its class"
METHODS_REFUSED = {
    "cascade": "removed, as no measurement showed a gain; use 'draft_model', or 'hybrid' with ngram",
    "extract_hidden_states": "it drafts nothing; use jspec.load(path).target",
}
# Other names of methods. The n-gram lookup of vLLM's that runs on a GPU is the same rule; ours
# always runs on the device. "arctic" is what Arctic Inference, a plug-in of vLLM's, calls its own.
METHOD_ALIASES = {
    "[ngram]": "ngram",
    "ngram_gpu": "ngram",
    "arctic": "mlp_speculator",
    "deepseek_mtp": "mtp",
    "glm4_moe_mtp": "mtp",
    "mimo_mtp": "mtp",
}
# Their weights lie in the target's own files where no model is given.
METHODS_IN_TARGETS = ("mtp",)
MODELS_NAMING_METHODS = ("ngram", "suffix", "[ngram]", "ngram_gpu")
# A model's name that contains one of these says its method, as in vLLM.
METHOD_IN_NAME = {
    "peagle": "eagle3",
    "p-eagle": "eagle3",
    "eagle3": "eagle3",
    "eagle-": "eagle",
    "dflash": "dflash",
    "dspark": "dspark",
}
# So does the ``model_type`` in the config.json of a directory, or a key that only one method has.
METHOD_OF_MODEL_TYPE = {
    "medusa": "medusa",
    "mlp_speculator": "mlp_speculator",
    **dict.fromkeys(
        (
            "deepseek_v3",
            "deepseek_mtp",
            "glm4_moe",
            "glm4_moe_mtp",
            "mimo",
            "mimo_mtp",
        ),
        "mtp",
    ),
}
METHOD_OF_KEY = {
    "hydra_head_arch": "hydra",
    "medusa_num_heads": "medusa",
    "dflash_config": "dflash",
}
# So say the docs.
METHODS_OF_OURS = dict.fromkeys((HYBRID, "hydra", "token_recycling"), "not in vLLM")

# rejection_sample_method to the name in ``jspec.verify.RULES``.
RULE_NAMES = {
    "standard": "rejection",
    "block": "block",
    "coupled": "coupled",
    "probabilistic": "rejection",
    "strict": "match",
    "synthetic": "synthetic",
    "typical": "typical",
}
# Keys that only one rule reads.
RULE_KEYS = {
    "synthetic": ("synthetic_acceptance_rates", "synthetic_acceptance_length"),
    "typical": ("posterior_threshold", "posterior_alpha"),
}
RULES_NOT_BUILT = ("fly", "lenient")
DRAFT_SAMPLE_METHODS = ("probabilistic", "greedy")  # of chains; trees have more


def markdown() -> str:
    """The tables of docs/speculative_config.md, which a test holds equal to them."""
    words = {"works": "works", "not built": "raises until built", "refused": "refused"}
    keys = [
        (f"`{key.name}`", f"`{key.default}`", words[key.standing], key.note)
        for key in KEYS.values()
    ]
    trees = [(f"`{name}`", *_tree_sizes(name)) for name in tree_settings.NAMES]
    methods = [
        *((f"`{name}`", "works", METHODS_OF_OURS.get(name, "")) for name in METHODS),
        *((f"`{name}`", "works", f"the same as `{same}`") for name, same in METHOD_ALIASES.items()),
        (f"`{CUSTOM_CLASS}`", "works", CUSTOM_CLASS_NOTE),
        *((f"`{name}`", "refused", why) for name, why in METHODS_REFUSED.items()),
    ]
    rules = [
        *((f"`{name}`", "works", _described(rule)) for name, rule in RULE_NAMES.items()),
        *((f"`{name}`", "raises until built", "lossy") for name in RULES_NOT_BUILT),
    ]
    return "\n".join(
        (
            _table(("key", "vLLM's default", "standing", ""), keys),
            _table(("`method`", "standing", ""), methods),
            _table(("`rejection_sample_method`", "standing", ""), rules),
            _table(("`tree`", "nodes with the root", "depth"), trees),
        )
    )


def _described(rule: str) -> str:
    lossy = "" if RULES[rule].lossless else "; lossy: the output does not follow the target"
    return f"rule `{rule}`{lossy}"


def _tree_sizes(name: str) -> tuple[str, str]:
    if name in tree_settings.PUBLISHED:
        shape = tree_settings.published(name)
        return str(shape.size), str(shape.max_depth)
    size = "`num_speculative_tokens` + 1" if name == "chain" else "`tree_size`"
    return size, "`num_speculative_tokens`"


def _table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)
