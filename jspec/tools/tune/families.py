"""What is searched: families of configs that differ in K or in the tree, and their members."""

import dataclasses
import functools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jspec.api import config
from jspec.api.build import Build, build_plan
from jspec.core import trees
from jspec.core.trees import StaticTree
from jspec.drafters.adaptive.drafter import Adaptive
from jspec.drafters.trees import tree_settings
from jspec.engine import loading
from jspec.engine.loading import LoadedModel
from jspec.tools.bench.names import name_of, names_of
from jspec.tools.tune.settings import TREE_STEP, Settings

PLAIN = {"method": "none"}
_DEPTHS = ("num_speculative_tokens", "tree", "tree_size", "tree_depth", "tree_top_k")
# Keys that say what a round drafts, or from which the depth must follow.
_SAYS_ALL = (
    *_DEPTHS,
    "parts",
    "adaptive_length",
    "num_speculative_tokens_per_batch_size",
    "synthetic_acceptance_rates",
)
_TOP_K = 4  # most children of a node
_PROBE_NODES = 40  # of the tree by which acceptance is measured


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A config that may be the best.

    Attributes:
      family: its place in the list of families.
      name: for people.
      config: as a user would write it.
      tree: the static tree of its drafts; None if it has none.
    """

    family: int
    name: str
    config: Mapping[str, Any] = dataclasses.field(hash=False)
    tree: StaticTree | None


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """Configs of one method.

    Attributes:
      number: its place in the list of families.
      name: for people.
      given: the config, as it was given.
      loaded: the same with its networks opened.
      depth: the largest K; None for a config that is a candidate as it is.
      takes_trees: whether static trees are searched, too.
      target: whom it drafts for.
      dtype: of weights.
    """

    number: int
    name: str
    given: Mapping[str, Any]
    loaded: Mapping[str, Any]
    depth: int | None
    takes_trees: bool
    target: LoadedModel
    dtype: str | None

    def made(self, config_: Mapping[str, Any]) -> Build:
        """The plan and the weights of one of the family's configs."""
        return build_plan(self.target, config.read(self.runnable(config_)), dtype=self.dtype)

    def runnable(self, config_: Mapping[str, Any]) -> dict[str, Any]:
        """One of the family's configs, with its networks opened."""
        return {
            **config_,
            **{key: self.loaded[key] for key in ("method", "model") if key in self.loaded},
        }

    def chain(self, depth: int) -> Candidate:
        """The chain of K = ``depth``."""
        given = {**self.given, "num_speculative_tokens": depth}
        if self.given.get("method") == "token_recycling":  # whose default is a tree
            given["tree"] = "chain"
        return Candidate(self.number, f"{self.name}, K={depth}", given, chain(depth))

    def tree(self, tree: StaticTree) -> Candidate:
        """A static tree."""
        if max(tree.widths) == 1:
            return self.chain(tree.max_depth)
        given = {**self.given, "tree": [list(path) for path in tree.paths]}
        name = f"{self.name}, tree of {shape.size} nodes, K={shape.max_depth}"
        return Candidate(self.number, name, given, tree)

    @functools.cached_property
    def probe(self) -> Candidate:
        """By which acceptance is measured."""
        if self.depth is None:
            drafter = self.made(self.given).plan.drafter
            return Candidate(self.number, self.name, self.given, _static_tree(drafter))
        if not self.takes_trees:
            return self.chain(self.depth)
        full = tree_settings.full(self.depth, _TOP_K)
        paths = tree_settings.best(min(_PROBE_NODES, full), self.depth, _TOP_K).paths
        spine = [(0,) * above + (rank,) for above in range(self.depth) for rank in range(_TOP_K)]
        return self.tree(trees.from_choices({*paths, *spine}))


def chain(depth: int) -> StaticTree:
    """The shape of a chain."""
    return trees.from_choices([(0,) * length for length in range(1, depth + 1)])


def families_of(target: LoadedModel, settings: Settings) -> list[Family]:
    """Plain decoding, and every config's.

    Raises:
      ValueError: a config does not go with the target.
    """
    found = [Family(0, "plain decoding", PLAIN, PLAIN, None, False, target, settings.dtype)]
    for given in settings.configs:
        for place, one in enumerate(_spread_out(given, settings)):
            try:
                found.append(_family(len(found), one, target, settings))
            except ValueError:
                if not place:
                    raise
                break  # the head drafts no deeper
    # K and the tree are searched: those of one network may come to be another's.
    names = names_of([family.given for family in found[1:]], unsaid=_DEPTHS)
    named = zip(found[1:], names, strict=True)
    return [found[0], *(dataclasses.replace(family, name=name) for family, name in named)]


def check(given: Mapping[str, Any], settings: Settings) -> None:
    """Raises ValueError where a config is wrong, whatever the target."""
    one = next(_spread_out(given, settings))
    config.read(one if says_all(one) else _with_depth(one, 1))


def says_all(given: Mapping[str, Any]) -> bool:
    """Whether a config leaves nothing to be searched."""
    return given.get("method") == "none" or any(given.get(key) is not None for key in _SAYS_ALL)


def tree_sizes(most: int) -> Sequence[int]:
    """Sizes of the trees that are looked at."""
    return [*range(TREE_STEP, most, TREE_STEP), most] if most >= TREE_STEP else []


def _spread_out(given: Mapping[str, Any], settings: Settings) -> Iterator[Mapping[str, Any]]:
    """The config; or one for each K, where what is accepted of a draft depends on how it ends."""
    whole = given.get("rejection_sample_method") == "block" and settings.temperature > 0
    if says_all(given) or not whole:
        yield given
        return
    for depth in range(1, settings.max_speculative_tokens + 1):
        yield _with_depth(given, depth)


def _with_depth(given: Mapping[str, Any], depth: int) -> dict[str, Any]:
    return {**given, "num_speculative_tokens": depth}


def _family(
    number: int, given: Mapping[str, Any], target: LoadedModel, settings: Settings
) -> Family:
    fixed = says_all(given)
    known = config.read(given if fixed else _with_depth(given, 1))
    loaded: dict[str, Any] = {"method": known.method} if not known.drafter_class else {}
    if known.needs_model and not known.parts:
        loaded["model"] = loading.load(known.model, settings.dtype)
    elif known.needs_head and known.model is not None:
        loaded["model"] = loading.load_head(
            known.model, target.config, kind=known.method, dtype=settings.dtype
        )
    family = Family(number, name_of(given), given, loaded, None, False, target, settings.dtype)
    if fixed:
        family.made(given)  # raises what is wrong before anything is measured
        return family
    depth, made = _deepest(family, settings.max_speculative_tokens)
    drafter = made.plan.drafter
    # Lookups of continuations have trees, too, but none of a static shape.
    takes_trees = bool(settings.max_tree_size) and isinstance(_draft_tree(drafter), StaticTree)
    return dataclasses.replace(family, depth=depth, takes_trees=takes_trees)


def _deepest(family: Family, most: int) -> tuple[int, Build]:
    """The largest K that the method can take, and what is made of it.

    Raises:
      ValueError: not even 1 will do.
    """
    for depth in range(most, 0, -1):
        try:
            return depth, family.made(family.chain(depth).config)
        except ValueError:
            if depth == 1:
                raise
    raise AssertionError(most)


def _static_tree(drafter: Any) -> StaticTree | None:
    """The static shape of a drafter's drafts, if they have one."""
    if isinstance(_draft_tree(drafter), StaticTree):
        return drafter.draft_tree
    is_chain = drafter.tree_size == drafter.max_depth + 1 and drafter.max_depth
    return chain(drafter.max_depth) if is_chain and not isinstance(drafter, Adaptive) else None


def _draft_tree(drafter: Any) -> Any:
    return getattr(drafter, "draft_tree", None)
