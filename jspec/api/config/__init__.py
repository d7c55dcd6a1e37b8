"""``speculative_config``: vLLM's keys, meanings and errors, read into a method and a rule."""

import dataclasses
import os
from collections.abc import Mapping
from typing import Any

from jspec import verify
from jspec.api.config import checking, custom_class, methods, rules
from jspec.api.config.keys import (
    CUSTOM_CLASS,
    DRAFT_SAMPLE_METHODS,
    ELSEWHERE,
    HYBRID,
    KEYS,
    METHOD_ALIASES,
    METHODS_IN_TARGETS,
    RULE_KEYS,
)
from jspec.checkpoints.heads.head_files import HeadConfig, LoadedHead
from jspec.checkpoints.loading import LoadedModel
from jspec.core.types import Drafter
from jspec.drafters.hybrid import Hybrid
from jspec.drafters.methods import ALWAYS_PARALLEL, METHODS, PARALLEL
from jspec.drafters.trees import tree_settings
from jspec.models.decoder import Decoder, DecoderConfig
from jspec.util.messages import did_you_mean, shown
from jspec.util.values import is_whole, json_of

_PARTS = "[{'method': 'suffix'}, {'method': 'eagle3', 'model': ...}]"
_ANY_SIZE = 1 << 30  # vocabulary size for checks before the target is loaded
_RULE_KEYS = ("rejection_sample_method", *RULE_KEYS)


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """A checked ``speculative_config``, from ``read``.

    Attributes:
      method: a name in ``jspec.drafters.methods.METHODS``, or "custom_class".
      rule: a name in ``jspec.verify.RULES``, or the rule itself if it has settings or is the
        user's own.
      model: model of the drafter: a path, a hub id or a loaded model. None for methods without one,
        and for heads in the target's files.
      max_model_len: longest sequence to draft for; None for the draft model's own limit.
      attention_backend: of the drafter's network; None for the device's default.
      quantization: of the draft model; None for weights as its files have them.
      kv_cache_dtype: of the drafter's KV cache; None for that of its activations.
      settings: fields of the method's drafter.
      drafter_class: class of "custom_class"; None for the named methods.
      parallel: whether one pass drafts all tokens of a round; None for the head's own mode.
      parts: the two configs of "hybrid".
      lengths: the K's to choose from, ascending; () for one K in all rounds.
      batch_sizes: (least, most, K); () to choose by expected goodput.
      draft_tensor_parallel_size: devices that share the drafter's weights; 1 to have them on each.
    """

    method: str = methods.NONE
    rule: str | verify.Rule = "rejection"
    model: Any = None
    max_model_len: int | None = None
    attention_backend: str | None = None
    quantization: str | None = None
    kv_cache_dtype: str | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drafter_class: type | None = None
    parallel: bool | None = False
    parts: tuple["SpeculativeConfig", ...] = ()
    lengths: tuple[int, ...] = ()
    batch_sizes: tuple[tuple[int, int, int], ...] = ()
    draft_tensor_parallel_size: int = 1

    def check_tensor_parallel(self, size: int) -> None:
        """Raise ValueError if the target has another ``tensor_parallel_size`` than the drafter.

        A drafter may also be whole on every device.
        """
        if self.draft_tensor_parallel_size not in (1, size):
            raise ValueError(
                f"draft_tensor_parallel_size={self.draft_tensor_parallel_size} cannot be other "
                f"value than 1 or the target's tensor_parallel_size={size}; change one of them."
            )

    @property
    def needs_model(self) -> bool:
        """Return whether the method, or one of its parts, drafts with a language model."""
        if self.parts:
            return any(part.needs_model for part in self.parts)
        return not self.drafter_class and "config" in _fields(self.method) and not self.needs_head

    @property
    def translates(self) -> bool:
        """Return whether the draft model may have a vocabulary of its own."""
        return bool(self.settings.get("use_heterogeneous_vocab")) and not self.drafter_class

    @property
    def needs_head(self) -> bool:
        """Return whether the method drafts with a head on the target's hidden states."""
        return not self.drafter_class and "target" in _fields(self.method)

    def drafter(self, draft: DecoderConfig | HeadConfig | tuple | None, target: Decoder) -> Drafter:
        """Return the drafter for ``target``; ``draft`` is its network or those of its parts.

        Raises:
          ValueError: a setting is out of range.
        """
        if self.parts:
            pairs = zip(self.parts, draft, strict=True)
            return Hybrid(tuple(part.drafter(x, target) for part, x in pairs), **self.settings)
        if self.drafter_class:
            return custom_class.build(self.drafter_class, self.settings, target, self.rule)
        return self._built_in(draft, target)

    def _built_in(self, draft: DecoderConfig | HeadConfig | None, target: Decoder) -> Drafter:
        parallel = self.parallel
        if parallel is None:  # "eagle3"
            parallel = draft.mask_token_id is not None
        values = {"config": draft, "target": target, "max_length": self.max_model_len}
        values["vocab_size"] = target.vocab_size
        fields = _fields(self.method, parallel) & values.keys()
        settings = self.settings | {name: values[name] for name in fields}
        return _class_of(self.method, parallel)(**settings)


def _json_of(given: str) -> Any:
    try:
        return json_of(given, unique=True)
    except ValueError as error:
        raise ValueError(
            f"speculative_config={shown(given)} is text, but not JSON ({error}); give a dict, or "
            """JSON such as '{"method": "ngram", "num_speculative_tokens": 4}'."""
        ) from None


def read(given: Mapping[str, Any] | str | None) -> SpeculativeConfig:
    """Check a ``speculative_config``, a dict or JSON; None means plain decoding.

    Raises:
      ValueError: a key is unknown, or a value is out of range or not supported.
    """
    if given is None:
        return SpeculativeConfig()
    if isinstance(given, str):
        given = _json_of(given)
    if not isinstance(given, Mapping):
        raise ValueError(
            f"speculative_config={shown(given)} must be a dict, such as "
            "{'method': 'ngram', 'num_speculative_tokens': 4}."
        )
    values = {name: given.get(name) for name in KEYS}
    if custom_class.is_custom(given):
        drafter = custom_class.find(given.get("model"))
        settings = custom_class.settings(drafter, given)
        if _tensor_parallel(values) > 1:
            raise ValueError(
                f"draft_tensor_parallel_size={values['draft_tensor_parallel_size']} is for "
                "networks of jspec; leave it out, and every device has the weights of your class."
            )
        return SpeculativeConfig(
            method=CUSTOM_CLASS,
            rule=rules.asked_for(values),
            settings=settings,
            drafter_class=drafter,
            **checking.lengths(values),
        )
    for name, value in given.items():
        _check_standing(name, value)
    method = methods.method_of(values)
    parallel: bool | None = checking.flag(values, "parallel_drafting") and method in PARALLEL
    if values["parallel_drafting"] is None and method == "eagle3":
        parallel = None
    fields = _fields(method, parallel)
    _check_used(method, fields, values)
    if method == HYBRID:
        return _read_hybrid(values)
    settings = _settings(method, parallel, values)
    if "config" in fields:
        _check_model(method, values["model"])
    return SpeculativeConfig(
        method=method,
        rule=rules.asked_for(values),
        model=values["model"] if "config" in fields else None,
        max_model_len=checking.at_least_one("max_model_len", values["max_model_len"]),
        attention_backend=values["attention_backend"],
        quantization=values["quantization"],
        kv_cache_dtype=checking.kv_cache_dtype(values["kv_cache_dtype"]),
        settings=settings,
        parallel=parallel,
        draft_tensor_parallel_size=_tensor_parallel(values),
        **checking.lengths(values),
    )


def _read_hybrid(values: Mapping[str, Any]) -> SpeculativeConfig:
    parts, sampled = values["parts"], values["draft_sample_method"]
    if not checking.is_list(parts) or len(parts) != 2:
        raise ValueError(
            f"parts={shown(parts)} must be a list of two configs, a lookup method and one with a "
            f"network, such as {_PARTS}."
        )
    if sampled is not None:
        raise ValueError(
            f"draft_sample_method={shown(sampled)} applies to neither part; give it in the part "
            "that samples, not beside 'parts'."
        )
    return SpeculativeConfig(
        method=HYBRID,
        rule=rules.asked_for(values),
        settings={} if values["combine"] is None else {"combine": values["combine"]},
        parts=tuple(_read_part(index, part) for index, part in enumerate(parts)),
        draft_tensor_parallel_size=_tensor_parallel(values),
    )


def _read_part(index: int, given: Any) -> SpeculativeConfig:
    no_part = "parts[{}] has the method {!r}, which is no part.".format
    if isinstance(given, Mapping) and given.get("method") == HYBRID:
        raise ValueError(no_part(index, HYBRID))  # first, because ``read`` would recurse
    try:
        part = read(given)
    except ValueError as error:
        raise ValueError(f"parts[{index}]: {error}") from None
    if part.method == methods.NONE:
        raise ValueError(no_part(index, methods.NONE))
    if part.draft_tensor_parallel_size > 1:
        raise ValueError(
            f"parts[{index}] has draft_tensor_parallel_size={part.draft_tensor_parallel_size}; "
            "give it beside 'parts'."
        )
    misplaced = next((name for name in _RULE_KEYS if given.get(name) is not None), None)
    if misplaced is not None:
        raise ValueError(
            f"parts[{index}] has {misplaced!r}, but one rule judges both; give it beside 'parts'."
        )
    if part.lengths:
        raise ValueError(
            f"parts[{index}] must have one K for all rounds; leave adaptive_length, "
            "enable_adaptive_verification and num_speculative_tokens_per_batch_size out."
        )
    return part


def check_lengths(config: SpeculativeConfig, draft_positions: int, max_model_len: int) -> None:
    """Raise ValueError if ``max_model_len`` of the config exceeds the limit of one of the models.

    A draft model with a lower limit than the target skips the rounds beyond it.
    """
    length = config.max_model_len
    for name, limit in (("draft", draft_positions), ("target", max_model_len)):
        if length is not None and length > limit:
            raise ValueError(
                f"speculative_max_model_len={length} cannot be larger than "
                f"{name}_max_model_len={limit}"
            )


def _check_standing(name: str, value: Any) -> None:
    if name not in KEYS:
        hint = ELSEWHERE.get(name) or did_you_mean(name, KEYS)
        raise ValueError(f"speculative_config has no key {shown(name)}{hint}")
    key = KEYS[name]
    if key.standing == "works" or key.is_default(value):
        return
    if name == "tensor_parallel_size":
        raise ValueError(key.note)  # in vLLM's words
    standing = "not supported yet" if key.standing == "not built" else "refused"
    raise ValueError(
        f"speculative_config: {name}={shown(value)} is {standing}: {key.note.rstrip('.')}; "
        "leave it out."
    )


def _check_used(method: str, fields: set[str], values: Mapping[str, Any]) -> None:
    """Check that every key that the method ignores has its default."""
    used = fields | {"method", "draft_tensor_parallel_size", "draft_sample_method", *_RULE_KEYS}
    if "config" in used:
        used |= {"model", "max_model_len", "attention_backend", "kv_cache_dtype"}
    if "config" in used and "target" not in used:
        used |= {"quantization"}
    if method in (*PARALLEL, *ALWAYS_PARALLEL):
        used |= {"parallel_drafting"}
    if "num_speculative_tokens" in used:
        used |= {"adaptive_length", "num_speculative_tokens_per_batch_size"}
        used |= {"enable_adaptive_verification"}
    model = values["model"]
    if isinstance(model, str | os.PathLike) and METHOD_ALIASES.get(str(model), model) == method:
        used |= {"model"}  # vLLM's "ngram" as the model's name
    for name, value in values.items():
        if name not in used and not KEYS[name].is_default(value):
            raise ValueError(
                f"speculative_config: {name}={shown(value)} is not used by method={method!r}; "
                "leave it out."
            )


def _tensor_parallel(values: Mapping[str, Any]) -> int:
    name = "draft_tensor_parallel_size"
    return checking.at_least_one(name, values[name]) or 1


def _check_model(method: str, model: Any) -> None:
    if model is None:
        if method in METHODS_IN_TARGETS:
            return
        raise ValueError(f"method={method!r} needs a 'model': a local directory or a hub id.")
    loaded = LoadedHead if "target" in _fields(method) else LoadedModel
    if not isinstance(model, str | os.PathLike | loaded):
        raise ValueError(f"model={shown(model)} must be a local directory or a hub id.")


def _settings(method: str, parallel: bool | None, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the drafter's fields, with vLLM's defaults for keys that are left out."""
    fields = _fields(method, parallel)
    if {"tree", "config"} <= fields:
        settings = _tree_settings(values, _class_of(method, parallel).knows_depth)
        if "use_heterogeneous_vocab" in fields:
            settings["use_heterogeneous_vocab"] = checking.flag(values, "use_heterogeneous_vocab")
        return settings
    values = dict(values)
    sampled = values["draft_sample_method"] = values["draft_sample_method"] or "probabilistic"
    if sampled not in DRAFT_SAMPLE_METHODS:
        known = " or ".join(map(repr, DRAFT_SAMPLE_METHODS))
        raise ValueError(
            f"draft_sample_method={shown(sampled)} must be {known}"
            f"{did_you_mean(sampled, DRAFT_SAMPLE_METHODS) or '.'}"
        )
    if "tree" in fields:
        return _checked_by_drafter(method, values)
    if "num_speculative_tokens" in fields:
        checking.check_count(values["num_speculative_tokens"], "config" in fields)
    values["use_heterogeneous_vocab"] = checking.flag(values, "use_heterogeneous_vocab")
    if "prompt_lookup_max" in fields:
        values |= checking.prompt_lookup(values["prompt_lookup_min"], values["prompt_lookup_max"])
    return {name: values[name] for name in fields & values.keys() if values[name] is not None}


def _checked_by_drafter(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Check the types here and the ranges in the drafter, which has a default for every key."""
    fields = _fields(method)
    given = {name: values[name] for name in fields & values.keys() if values[name] is not None}
    for name, value in given.items():
        default = KEYS[name].default
        if name == "num_speculative_tokens":
            checking.check_count(value, has_model=False)
        elif name == "tree" and not isinstance(value, str):
            given[name] = checking.tree(value)
        elif isinstance(default, float):
            checking.check_real(name, value, listed=False)
        elif name == "tree_size":
            checking.at_least_one(name, value)
        elif isinstance(default, str) and not isinstance(value, str):
            raise ValueError(f"{name}={shown(value)} must be a name.")
        elif not isinstance(default, str) and not is_whole(value):
            raise ValueError(f"{name}={shown(value)} must be a whole number.")
    METHODS[method](**given, **({"vocab_size": _ANY_SIZE} if "vocab_size" in fields else {}))
    return given


def _tree_settings(values: Mapping[str, Any], knows_depth: bool) -> dict[str, Any]:
    """Return the tree settings of a head, checked against each other.

    If the head ``knows_depth`` and the config names none, its drafter checks them.
    """
    tree = checking.tree("chain" if values["tree"] is None else values["tree"])
    count, depth = values["num_speculative_tokens"], values["tree_depth"]
    unknown = count is None and depth is None
    left_to_head = knows_depth and unknown and tree in tree_settings.OF_ANY_DEPTH
    if count is not None or (tree == "chain" and not depth and not left_to_head):
        checking.check_count(count, has_model=True)
    names = ("num_speculative_tokens", "tree_size", "tree_depth", "tree_top_k")
    settings = {name: checking.at_least_one(name, values[name]) for name in names}
    sampled = values["draft_sample_method"]
    if not left_to_head:
        tree_settings.drawn_by(tree, tree_settings.requested(tree, **settings), sampled)
    top_k = checking.at_least_one("dspark_draft_topk", values["dspark_draft_topk"])
    if top_k is not None:
        settings["dspark_draft_topk"] = top_k
    return settings | {"tree": tree, "draft_sample_method": sampled}


def _class_of(method: str, parallel: bool | None = False) -> type[Drafter]:
    return PARALLEL[method] if parallel else METHODS[method]


def _fields(method: str, parallel: bool | None = False) -> set[str]:
    """Return the settings of a method: the fields of its drafter are its config keys."""
    return {field.name for field in dataclasses.fields(_class_of(method, parallel))}
