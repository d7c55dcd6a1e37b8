"""``speculative_config``: vLLM's keys, meanings and errors, read into a method and a rule."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from typing import Any

from jspec import verify
from jspec.api.config import checking, custom_class, methods, rules
from jspec.api.config.keys import (
    CUSTOM_CLASS,
    DRAFT_SAMPLE_METHODS,
    HYBRID,
    KEYS,
    METHOD_ALIASES,
    METHODS_IN_TARGETS,
    RULE_KEYS,
)
from jspec.checkpoints.heads.head_files import HeadConfig, LoadedHead
from jspec.core.types import Drafter
from jspec.drafters import ALWAYS_PARALLEL, METHODS, PARALLEL
from jspec.drafters.adaptive.drafter import Adaptive
from jspec.drafters.hybrid import Hybrid
from jspec.drafters.trees import tree_settings
from jspec.engine.loading import LoadedModel
from jspec.models.decoder import Decoder, DecoderConfig
from jspec.util.messages import did_you_mean, shown
from jspec.util.values import is_whole

_PARTS = "[{'method': 'suffix'}, {'method': 'eagle3', 'model': ...}]"
_ANY_SIZE = 1 << 30  # a vocabulary that settings are checked for before the target's is known


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """What a ``speculative_config`` asks for. Made by ``read``.

    Attributes:
      method: a name in ``jspec.drafters.METHODS``, or "custom_class".
      rule: a name in ``jspec.verify.RULES``, or the rule itself where keys have set it.
      model: of the drafter: a path, a hub id or what was loaded; None for methods without one, and
        where it lies in the target's files.
      max_model_len: longest sequence to draft for; None for all that the draft model can take.
      settings: fields of the method's drafter.
      drafter_class: of "custom_class"; None for the other methods, which are known by name.
      parallel: whether all tokens of a round are drafted in one pass; None: as the head can.
      parts: of "hybrid": what each of the two asks for.
      lengths: K's to choose from, ascending; () for one K in all rounds.
      batch_sizes: (least, most, K); () to choose by expected goodput.
    """

    method: str = methods.NONE
    rule: str | verify.Rule = "rejection"
    model: Any = None
    max_model_len: int | None = None
    settings: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    drafter_class: type | None = None
    parallel: bool | None = False
    parts: tuple["SpeculativeConfig", ...] = ()
    lengths: tuple[int, ...] = ()
    batch_sizes: tuple[tuple[int, int, int], ...] = ()

    @property
    def needs_model(self) -> bool:
        """Whether the method, or one of its parts, drafts with a language model of its own."""
        if self.parts:
            return any(part.needs_model for part in self.parts)
        return not self.drafter_class and "config" in _fields(self.method) and not self.needs_head

    @property
    def translates(self) -> bool:
        """Whether the draft model may have a vocabulary of its own."""
        return bool(self.settings.get("use_heterogeneous_vocab")) and not self.drafter_class

    @property
    def needs_head(self) -> bool:
        """Whether the method drafts with a head, which reads the target's hidden states."""
        return not self.drafter_class and "target" in _fields(self.method)

    def drafter(self, draft: DecoderConfig | HeadConfig | tuple | None, target: Decoder) -> Drafter:
        """The drafter for ``target``; ``draft`` is its network, if any, or those of its parts.

        Raises:
          ValueError: a setting is out of range.
        """
        if self.drafter_class:
            drafter = custom_class.build(self.drafter_class, self.settings, target, self.rule)
            return Adaptive(drafter, self.lengths, self.batch_sizes) if self.lengths else drafter
        if self.parts:
            pairs = zip(self.parts, draft, strict=True)
            parts = tuple(part.drafter(network, target) for part, network in pairs)
            return Hybrid(parts, **self.settings)
        fitted = {
            "config": draft,
            "target": target,
            "vocab_size": target.vocab_size,
            "max_length": self.max_model_len,
        }
        parallel = self.parallel
        if parallel is None:
            parallel = getattr(draft, "mask_token_id", None) is not None
        fields = _fields(self.method, parallel)
        wanted = {name: fitted[name] for name in fields & fitted.keys()}
        drafter = _class_of(self.method, parallel)(**self.settings, **wanted)
        return Adaptive(drafter, self.lengths, self.batch_sizes) if self.lengths else drafter


def read(given: Mapping[str, Any] | None) -> SpeculativeConfig:
    """Checks a ``speculative_config``; None asks for plain decoding.

    Raises:
      ValueError: a key is unknown, or a value is out of range or not supported.
    """
    if given is None:
        return SpeculativeConfig()
    if not isinstance(given, Mapping):
        raise ValueError(
            f"speculative_config={shown(given)} must be a dict, such as "
            "{'method': 'ngram', 'num_speculative_tokens': 4}."
        )
    if custom_class.is_asked_for(given):
        return _read_custom_class(given)
    for name, value in given.items():
        _check_standing(name, value)
    values = {name: given.get(name) for name, key in KEYS.items() if key.standing == "works"}
    method = methods.asked_for(values)
    parallel = checking.flag(values, "parallel_drafting") and method in PARALLEL
    if values["parallel_drafting"] is None and method == "eagle3":
        parallel = None
    _check_used(method, values, parallel)
    _check_parallel(values["draft_tensor_parallel_size"])
    if method == HYBRID:
        return _read_hybrid(values)
    settings = _settings(method, values, parallel)
    if "config" in _fields(method):
        _check_path(method, values["model"])
    return SpeculativeConfig(
        method=method,
        rule=rules.asked_for(values),
        model=values["model"] if "config" in _fields(method) else None,
        max_model_len=checking.at_least_one("max_model_len", values["max_model_len"]),
        settings=settings,
        parallel=parallel,
        **checking.lengths(values),
    )


def _read_custom_class(given: Mapping[str, Any]) -> SpeculativeConfig:
    drafter = custom_class.find(given.get("model"))
    settings = custom_class.settings(drafter, given)
    values = {name: given.get(name) for name in KEYS}
    _check_parallel(values["draft_tensor_parallel_size"])
    return SpeculativeConfig(
        method=CUSTOM_CLASS,
        rule=rules.asked_for(values),
        settings=settings,
        drafter_class=drafter,
        **checking.lengths(values),
    )


def _read_hybrid(values: Mapping[str, Any]) -> SpeculativeConfig:
    given = values["parts"]
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != 2:
        raise ValueError(
            f"parts={shown(given)} must be a list of two configs, one that looks up and one with a "
            f"network, such as {_PARTS}."
        )
    if values["draft_sample_method"] is not None:
        raise ValueError(
            f"draft_sample_method={shown(values['draft_sample_method'])} says of neither part how "
            "it drafts; give it in the part that draws, not beside 'parts'."
        )
    combine = {} if values["combine"] is None else {"combine": values["combine"]}
    return SpeculativeConfig(
        method=HYBRID,
        rule=rules.asked_for(values),
        settings=combine,
        parts=tuple(_read_part(place, part) for place, part in enumerate(given)),
    )


def _read_part(place: int, given: Any) -> SpeculativeConfig:
    nested = given.get("method") if isinstance(given, Mapping) else None
    if nested == HYBRID:
        raise ValueError(f"parts[{place}] has the method {nested!r}, which is no part.")
    try:
        part = read(given)
    except ValueError as error:
        raise ValueError(f"parts[{place}]: {error}") from None
    rule_keys = ("rejection_sample_method", *sum(RULE_KEYS.values(), ()))
    misplaced = next((name for name in rule_keys if (given or {}).get(name) is not None), None)
    if misplaced is not None:
        raise ValueError(
            f"parts[{place}] has {misplaced!r}, but one rule judges both; give it beside 'parts'."
        )
    if part.lengths:
        raise ValueError(
            f"parts[{place}] chooses its K by the round, which no combination passes on; leave "
            "adaptive_length and num_speculative_tokens_per_batch_size out."
        )
    if part.method == methods.NONE:
        raise ValueError(f"parts[{place}] has the method {part.method!r}, which is no part.")
    return part


def check_lengths(config: SpeculativeConfig, draft_positions: int, max_model_len: int) -> None:
    """Checks that the config's ``max_model_len`` is within the reach of both models.

    A draft model that reaches less far than the target sits out the rounds beyond.

    Raises:
      ValueError: ``max_model_len`` exceeds what one of the two can take.
    """
    speculative_max_model_len = config.max_model_len
    if speculative_max_model_len is not None:
        for name, limit in (("draft", draft_positions), ("target", max_model_len)):
            if speculative_max_model_len > limit:
                raise ValueError(
                    f"{speculative_max_model_len=} cannot be larger than "
                    f"{name}_max_model_len={limit}"
                )


def _check_standing(name: str, value: Any) -> None:
    if name not in KEYS:
        raise ValueError(f"speculative_config has no key {shown(name)}{did_you_mean(name, KEYS)}")
    key = KEYS[name]
    if key.standing == "works" or key.asks_nothing(value):
        return
    if name == "tensor_parallel_size":
        raise ValueError(key.note)
    standing = "not supported yet" if key.standing == "not built" else "refused"
    raise ValueError(
        f"speculative_config: {name}={shown(value)} is {standing}: {key.note.rstrip('.')}; "
        "leave it out."
    )


def _check_used(method: str, values: Mapping[str, Any], parallel: bool | None) -> None:
    """Keys that the method would ignore must not ask for anything."""
    used = _fields(method, parallel) | {
        "method",
        "rejection_sample_method",
        "draft_tensor_parallel_size",
        "draft_sample_method",
        *sum(RULE_KEYS.values(), ()),
    }
    if "config" in used:
        used |= {"model", "max_model_len"}
    if method in (*PARALLEL, *ALWAYS_PARALLEL):
        used |= {"parallel_drafting"}
    if "num_speculative_tokens" in used:
        used |= {"adaptive_length", "num_speculative_tokens_per_batch_size"}
    for name, value in values.items():
        names_method = (
            name == "model"
            and isinstance(value, str | os.PathLike)
            and METHOD_ALIASES.get(str(value), value) == method
        )
        if name not in used and not names_method and not KEYS[name].asks_nothing(value):
            raise ValueError(
                f"speculative_config: {name}={shown(value)} is not used by method={method!r}; "
                "leave it out."
            )


def _check_parallel(size: Any) -> None:
    if size not in (None, 1) or isinstance(size, bool):
        raise ValueError(
            f"speculative_draft_tensor_parallel_size={shown(size)} cannot be other value than 1 or "
            "target model tensor_parallel_size, which is 1."
        )


def _check_path(method: str, model: Any) -> None:
    if model is None and method in METHODS_IN_TARGETS:
        return
    if model is None:
        raise ValueError(f"method={method!r} needs a 'model': a local directory or a hub id.")
    loaded = LoadedHead if "target" in _fields(method) else LoadedModel
    if not isinstance(model, str | os.PathLike | loaded):
        raise ValueError(f"model={shown(model)} must be a local directory or a hub id.")


def _settings(method: str, values: Mapping[str, Any], parallel: bool | None) -> dict[str, Any]:
    """The drafter's fields, with vLLM's defaults where they are not given."""
    fields = _fields(method, parallel)
    if {"tree", "config"} <= fields:
        flags = {"use_heterogeneous_vocab"} & fields
        return _tree_settings(values, _class_of(method, parallel).knows_depth) | {
            name: checking.flag(values, name) for name in flags
        }
    values = dict(values)
    sampled = values["draft_sample_method"] = values["draft_sample_method"] or "probabilistic"
    if sampled not in DRAFT_SAMPLE_METHODS:
        known = " or ".join(map(repr, DRAFT_SAMPLE_METHODS))
        raise ValueError(
            f"draft_sample_method={shown(sampled)} must be {known}"
            f"{did_you_mean(sampled, DRAFT_SAMPLE_METHODS) or '.'}"
        )
    if "tree" in fields:
        return _given_settings(method, values)
    if "num_speculative_tokens" in fields:
        checking.check_count(values["num_speculative_tokens"], "config" in fields)
    values["use_heterogeneous_vocab"] = checking.flag(values, "use_heterogeneous_vocab")
    if "prompt_lookup_max" in fields:
        values |= checking.prompt_lookup(values["prompt_lookup_min"], values["prompt_lookup_max"])
    return {name: values[name] for name in fields & values.keys() if values[name] is not None}


def _given_settings(method: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """What is given of settings that all have defaults, which the drafter knows and checks."""
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
    """The settings of a tree, which are the same for all heads, once they fit each other.

    Where the head ``knows_depth`` and none is given, its drafter checks them.
    """
    tree = checking.tree("chain" if values["tree"] is None else values["tree"])
    names = ("num_speculative_tokens", "tree_size", "tree_depth", "tree_top_k")
    deep = values["num_speculative_tokens"] is not None or values["tree_depth"] is not None
    left_to_head = knows_depth and not deep and tree in tree_settings.OF_ANY_DEPTH
    if values["num_speculative_tokens"] is not None or (
        tree == "chain" and not values["tree_depth"] and not left_to_head
    ):
        checking.check_count(values["num_speculative_tokens"], has_model=True)
    numbers = {name: checking.at_least_one(name, values[name]) for name in names}
    if not left_to_head:
        tree_settings.drawn_by(
            tree, tree_settings.requested(tree, **numbers), values["draft_sample_method"]
        )
    top_k = checking.at_least_one("dspark_draft_topk", values["dspark_draft_topk"])
    more = {} if top_k is None else {"dspark_draft_topk": top_k}
    return numbers | more | {"tree": tree, "draft_sample_method": values["draft_sample_method"]}


def _class_of(method: str, parallel: bool | None = False) -> type[Drafter]:
    return PARALLEL[method] if parallel else METHODS[method]


def _fields(method: str, parallel: bool | None = False) -> set[str]:
    """The settings of a method: its drafter's fields are its config keys."""
    return {field.name for field in dataclasses.fields(_class_of(method, parallel))}
