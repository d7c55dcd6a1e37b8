"""The search space: families of configs that differ in K or in the tree, and their candidates."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from typing import Any

from jspec.api import config
from jspec.api.build import Build, build_plan
from jspec.checkpoints import loading
from jspec.checkpoints.loading import LoadedModel
from jspec.core import static_trees
from jspec.core.static_trees import StaticTree
from jspec.core.types import Drafter
from jspec.drafters.trees import tree_settings
from jspec.tools.bench.names import name_of, names_of
from jspec.tools.tune.settings import Settings

PLAIN = {"method": "none"}
_DEPTH_KEYS = ("num_speculative_tokens", "tree", "tree_size", "tree_depth", "tree_top_k")
# Keys that fix the draft of a round, or from which its depth follows.
_FIXING_KEYS = (
    *_DEPTH_KEYS,
    "parts",
    "adaptive_length",
    "enable_adaptive_verification",
    "num_speculative_tokens_per_batch_size",
    "synthetic_acceptance_rates",
)
_TOP_K = 4  # most children of a node
_PROBE_NODES = 40  # of the tree that records acceptance


@dataclasses.dataclass(frozen=True, eq=False)
class Candidate:
    """A config that may be the fastest."""

    family: "Family"
    name: str  # for tables
    config: Mapping[str, Any]  # as a user would write it
    tree: StaticTree | None  # of its drafts; None if they have no static tree
    depth: int  # edges from the root to the deepest leaf
    size: int  # nodes with the root


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """The configs of one method."""

    name: str  # for tables
    config: Mapping[str, Any]  # as the user gave it
    opened: Mapping[str, Any]  # the ``method`` and ``model`` of the config as loaded networks
    max_k: int | None  # the largest K; None if the config is a candidate as it is
    takes_trees: bool  # whether static trees are searched
    target: LoadedModel  # the target model
    dtype: str | None  # of weights

    def build(self, config_: Mapping[str, Any]) -> Build:
        """Return the plan and the weights of one of the family's configs."""
        return build_plan(self.target, config.read({**config_, **self.opened}), dtype=self.dtype)

    def chain(self, depth: int) -> Candidate:
        """Return the chain of K = ``depth``."""
        return self.tree(chain(depth))

    def tree(self, tree: StaticTree) -> Candidate:
        """Return the candidate of a static tree, or of a chain."""
        name = f"{self.name}, K={tree.max_depth}"
        if max(tree.widths) > 1:
            name = f"{self.name}, tree of {tree.size} nodes, K={tree.max_depth}"
            changes = {"tree": [list(path) for path in tree.paths]}
        else:
            changes = {"num_speculative_tokens": tree.max_depth}
            if self.config.get("method") == "token_recycling":  # its default is a tree
                changes["tree"] = "chain"
        chosen = {**self.config, **changes}
        return Candidate(self, name, chosen, tree, tree.max_depth, tree.size)

    @functools.cached_property
    def probe(self) -> Candidate:
        """The candidate that records acceptance: the config itself, or the widest draft."""
        if self.max_k is None:
            plan = self.build(self.config).plan
            tree = None if plan.lengths else _tree_of(plan.drafter)
            return Candidate(self, self.name, self.config, tree, plan.max_depth, plan.tree_size)
        if not self.takes_trees:
            return self.chain(self.max_k)
        full = tree_settings.full(self.max_k, _TOP_K)
        paths = tree_settings.best(min(_PROBE_NODES, full), self.max_k, _TOP_K).paths
        spine = [(0,) * depth + (rank,) for depth in range(self.max_k) for rank in range(_TOP_K)]
        return self.tree(static_trees.from_choices({*paths, *spine}))


def chain(depth: int) -> StaticTree:
    """Return the static tree of a chain."""
    return static_trees.from_choices([(0,) * length for length in range(1, depth + 1)])


def families_of(target: LoadedModel, settings: Settings) -> list[Family]:
    """Return plain decoding, and the family of every config.

    Raises:
      ValueError: a config does not fit the target.
    """
    families = [Family("plain decoding", PLAIN, PLAIN, None, False, target, settings.dtype)]
    for given in settings.configs:
        for index, variant in enumerate(_variants(given, settings)):
            try:
                families.append(_family(variant, target, settings))
            except ValueError:
                if index == 0:
                    raise
                break  # the head drafts no deeper
    # The search may give one model's config the K of another's: K alone must not name them.
    names = names_of([family.config for family in families[1:]], unsaid=_DEPTH_KEYS)
    named = zip(families[1:], names, strict=True)
    return [families[0], *(dataclasses.replace(family, name=name) for family, name in named)]


def check(given: Mapping[str, Any], settings: Settings) -> None:
    """Raise ValueError if a config is wrong for every target."""
    _read(next(_variants(given, settings)))


def _is_fixed(given: Mapping[str, Any]) -> bool:
    return given.get("method") == "none" or any(given.get(key) is not None for key in _FIXING_KEYS)


def _read(given: Mapping[str, Any]) -> config.SpeculativeConfig:
    return config.read(given if _is_fixed(given) else {**given, "num_speculative_tokens": 1})


def _variants(given: Mapping[str, Any], settings: Settings) -> Iterator[Mapping[str, Any]]:
    """Yield the config, or one for each K under ``block``, which judges a draft as a whole."""
    by_draft = given.get("rejection_sample_method") == "block" and settings.temperature > 0
    if _is_fixed(given) or not by_draft:
        yield given
        return
    for depth in range(1, settings.max_speculative_tokens + 1):
        yield {**given, "num_speculative_tokens": depth}


def _family(given: Mapping[str, Any], target: LoadedModel, settings: Settings) -> Family:
    """Open the networks of a config, and find the largest K that its drafter takes."""
    read = _read(given)
    opened: dict[str, Any] = {} if read.drafter_class else {"method": read.method}
    if read.needs_model and not read.parts:
        opened["model"] = loading.load(read.model, settings.dtype)
    elif read.needs_head and read.model is not None:
        opened["model"] = loading.load_head(
            read.model, target.config, kind=read.method, dtype=settings.dtype
        )
    family = Family(name_of(given), given, opened, None, False, target, settings.dtype)
    if _is_fixed(given):
        family.build(given)  # raises before anything is measured
        return family
    depth, drafter = _deepest(family, settings.max_speculative_tokens)
    # Drafters with trees of their own, such as suffix, have no static tree.
    takes_trees = bool(settings.max_tree_size) and _static_tree(drafter) is not None
    return dataclasses.replace(family, max_k=depth, takes_trees=takes_trees)


def _deepest(family: Family, largest: int) -> tuple[int, Drafter]:
    """Return the largest K that a method takes, and its drafter; raise if not even K=1 works."""
    for depth in range(largest, 1, -1):
        try:
            return depth, family.build(family.chain(depth).config).plan.drafter
        except ValueError:
            continue
    return 1, family.build(family.chain(1).config).plan.drafter


def _tree_of(drafter: Drafter) -> StaticTree | None:
    """Return the static tree or the chain that a drafter drafts, if it has a fixed one."""
    tree = _static_tree(drafter)
    if tree is not None:
        return tree
    is_chain = drafter.tree_size == drafter.max_depth + 1 and drafter.max_depth > 0
    return chain(drafter.max_depth) if is_chain else None


def _static_tree(drafter: Any) -> StaticTree | None:
    tree = getattr(drafter, "draft_tree", None)  # drafters of users' own need not have it
    return tree if isinstance(tree, StaticTree) else None
