"""The search space: families of configs that differ in K or in the tree, and their candidates."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping
from typing import Any

from jax.sharding import Mesh

from jspec.api import config
from jspec.api.build import Build, build_plan
from jspec.checkpoints import loading
from jspec.checkpoints.loading import LoadedModel
from jspec.core import static_trees
from jspec.core.static_trees import StaticTree
from jspec.core.types import Drafter
from jspec.drafters.trees import tree_settings
from jspec.sharding import mesh as mesh_lib
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
_PROBE_NODES = 40  # nodes of the tree that records acceptance


@dataclasses.dataclass(frozen=True)
class Candidate:
    """A config that may be the fastest."""

    family: "Family"
    tree: StaticTree | None = None  # tree of its drafts, or a chain; None for the config as it is

    @property
    def name(self) -> str:
        """The name in tables."""
        if self.tree is None:
            return self.family.name
        is_chain = max(self.tree.widths) == 1
        size = "" if is_chain else f", tree of {self.tree.size} nodes"
        return f"{self.family.name}{size}, K={self.tree.max_depth}"

    @property
    def config(self) -> dict[str, Any]:
        """The ``speculative_config``, as a user would write it."""
        given = self.family.config
        if self.tree is None:
            return dict(given)
        if max(self.tree.widths) > 1:
            return {**given, "tree": [list(path) for path in self.tree.paths]}
        # The default of token_recycling is a tree.
        shape = {"tree": "chain"} if given.get("method") == "token_recycling" else {}
        return {**given, "num_speculative_tokens": self.tree.max_depth, **shape}


@dataclasses.dataclass(frozen=True, eq=False)
class Family:
    """The configs of one method."""

    name: str  # for tables
    config: Mapping[str, Any]  # as the user gave it
    opened: Mapping[str, Any]  # the ``method`` and ``model`` of the config as loaded networks
    max_k: int | None  # the largest K; None if the config is a candidate as it is
    takes_trees: bool  # whether static trees are searched
    target: LoadedModel  # the target model
    dtype: str | None  # dtype of weights
    mesh: Mesh | None = None  # devices that the target is split among
    by_experts: bool = False  # whether they have some experts each

    def build(self, config_: Mapping[str, Any]) -> Build:
        """Return the plan and the weights of one of the family's configs."""
        given = config.read({**config_, **self.opened})
        return build_plan(
            self.target,
            given,
            dtype=self.dtype,
            mesh=self.mesh,
            expert_parallel=self.by_experts,
        )

    def chain(self, depth: int) -> Candidate:
        """Return the chain of K = ``depth``."""
        return self.tree((0,) * length for length in range(1, depth + 1))

    def tree(self, paths: Iterable[tuple[int, ...]]) -> Candidate:
        """Return the candidate of the static tree of these rank paths."""
        return Candidate(self, static_trees.from_choices(paths))

    @functools.cached_property
    def probe(self) -> Candidate:
        """The widest tree, which records acceptance; only if the family takes trees."""
        full = tree_settings.full(self.max_k, _TOP_K)
        paths = tree_settings.best(min(_PROBE_NODES, full), self.max_k, _TOP_K).paths
        spine = [(0,) * depth + (rank,) for depth in range(self.max_k) for rank in range(_TOP_K)]
        return self.tree({*paths, *spine})


def families_of(target: LoadedModel, settings: Settings) -> list[Family]:
    """Return plain decoding, and the family of every config.

    Raises:
      ValueError: a config does not fit the target.
    """
    plain = Family("plain decoding", PLAIN, PLAIN, None, False, target, settings.dtype)
    families = [_family(given, target, settings) for given in settings.configs]
    # The search may give one model's config the K of another's: K alone must not name them.
    names = names_of([family.config for family in families], unsaid=_DEPTH_KEYS)
    named = zip(families, names, strict=True)
    return [plain, *(dataclasses.replace(family, name=name) for family, name in named)]


def check(given: Mapping[str, Any]) -> None:
    """Raise ValueError if a config is wrong for every target."""
    _read(given)


def _is_fixed(given: Mapping[str, Any]) -> bool:
    return given.get("method") == "none" or any(given.get(key) is not None for key in _FIXING_KEYS)


def _read(given: Mapping[str, Any]) -> config.SpeculativeConfig:
    return config.read(given if _is_fixed(given) else {**given, "num_speculative_tokens": 1})


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
    mesh = mesh_lib.make(settings.tensor_parallel_size)
    family = Family(
        name_of(given),
        given,
        opened,
        None,
        False,
        target,
        settings.dtype,
        mesh,
        settings.enable_expert_parallel,
    )
    if _is_fixed(given):
        family.build(given)  # raises before anything is measured
        return family
    depth, drafter = _deepest(family, settings.max_speculative_tokens)
    # Drafters with trees of their own, such as suffix, have no static tree. Acceptance by node is
    # not defined for ``block``, which judges a draft as a whole.
    by_node = given.get("rejection_sample_method") != "block" or settings.temperature == 0
    static = isinstance(getattr(drafter, "draft_tree", None), StaticTree)
    takes_trees = settings.max_tree_size > 0 and depth > 1 and static and by_node
    return dataclasses.replace(family, max_k=depth, takes_trees=takes_trees)


def _deepest(family: Family, largest: int) -> tuple[int, Drafter]:
    """Return the largest K that a method takes, and its drafter; raise if not even K=1 works."""
    for depth in range(largest, 1, -1):
        try:
            return depth, family.build(family.chain(depth).config).plan.drafter
        except ValueError:
            continue
    return 1, family.build(family.chain(1).config).plan.drafter
