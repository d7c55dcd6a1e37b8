"""The plan: all static settings of a generation, in one hashable value."""

import dataclasses
import functools
from typing import Literal, NamedTuple

import jax

from jspec import verify
from jspec.core import packing, validation
from jspec.core.types import (
    Array,
    Draft,
    Drafter,
    History,
    Proposal,
    Request,
    Target,
    Tree,
    Verdict,
)
from jspec.util.messages import shown
from jspec.util.values import are_whole, listed


class Pass(NamedTuple):
    """A size of the target's pass over B rows."""

    nodes: int  # most nodes of a row
    total: int  # nodes that the matmuls run over
    packed: bool  # whether these are a list of the valid nodes


@dataclasses.dataclass(frozen=True)
class Plan:
    """A target, a drafter and an acceptance rule that fit each other.

    Equal plans share their compiled programs. Nothing falls back on a lossy rule.

    Attributes:
      target: the model whose distribution the output has.
      drafter: the drafting method, at its largest K.
      rule: a name in ``jspec.verify.RULES``, or a ``Rule``.
      node_buckets: node counts that the target's pass is compiled for, ascending up to the
        drafter's ``tree_size``. A round runs in the smallest that holds its valid nodes. () for the
        drafter's own ``node_buckets``.
      packed: whether passes run over lists of the valid nodes of all rows, in sizes of their own.
      platform: that passes are for; None for JAX's default.
      lengths: the K's that the engine chooses from before each launch, ascending to the drafter's
        own; () for that one alone. With 0 among them, the target may decode alone.
      batch_sizes: (least, most, K) of running rows, for the engine's choice; other numbers of rows
        use the longest. () to choose by expected tokens a second.
      length: K of this plan's launches, set by ``at_length``; None for the drafter's own.
      sampling_backend: runs the rules "rejection" and "block" on drawn drafts: "pallas_tpu" or
        "pallas_gpu"; None and "xla" for the walk of the rule, which every rule has.

    Raises:
      ValueError: target or drafter lack a member; the rule is unknown, not exact for the drafter's
        proposals, or set for other depths; it needs noise that the drafter cannot share; it has no
        such ``sampling_backend``, or these proposals never reach it; ``node_buckets`` is out of
        range; the target cannot be ``packed``; the drafter's K cannot be chosen.
    """

    target: Target
    drafter: Drafter
    rule: str | verify.Rule = "rejection"
    node_buckets: tuple[int, ...] = ()
    packed: bool = False
    platform: Literal["cpu", "gpu", "tpu"] | None = None
    lengths: tuple[int, ...] = ()
    batch_sizes: tuple[tuple[int, int, int], ...] = ()
    length: int | None = None
    sampling_backend: str | None = None

    def __post_init__(self):
        validation.check_target(self.target)
        validation.check_drafter(self.drafter)
        if self.packed and not self.target.packs_nodes:
            raise ValueError(
                f"packed=True needs a target whose forward takes a packing, and "
                f"{type(self.target).__name__} has no packs_nodes=True; leave packed out."
            )
        if self.platform not in (None, *packing.MATMULS):
            known = ", ".join(packing.MATMULS)
            raise ValueError(f"platform={shown(self.platform)} must be one of {known}, or None.")
        if isinstance(self.rule, str) and self.rule not in verify.RULES:
            known = ", ".join(verify.RULES)
            raise ValueError(f"rule={self.rule!r} is not known; use one of {known}.")
        if not isinstance(self.rule, str | verify.Rule):
            raise ValueError(
                f"rule={shown(self.rule, 60)} must be a name in jspec.RULES, or a "
                "jspec.verify.Rule: a walk of your own with what it is exact for."
            )
        validation.check_hashable("rule", self._rule)
        verify.check_fit(self._rule, self.drafter, self.sampling_backend)
        if self._rule.shares_noise:
            object.__setattr__(self, "drafter", validation.sharing_noise(self.drafter))
        object.__setattr__(self, "lengths", tuple(self.lengths))
        object.__setattr__(self, "batch_sizes", tuple(map(tuple, self.batch_sizes)))
        validation.check_lengths(self.drafter, self.lengths, self.batch_sizes)
        if self.length is not None:
            choice = tuple(sorted({self.length, self.drafter.max_depth}))
            validation.check_lengths(self.drafter, choice, ())
        buckets = listed("node_buckets", self.node_buckets) or self.drafter.node_buckets
        size = self.drafter.tree_size
        ascending = are_whole(buckets, 1) and list(buckets) == sorted(set(buckets))
        if not ascending or buckets[-1] != size:
            raise ValueError(
                f"node_buckets={shown(buckets)} must ascend from 1 or more to tree_size={size}, "
                "in whole numbers."
            )
        object.__setattr__(self, "node_buckets", buckets)

    def at_length(self, length: int) -> "Plan":
        """Return the plan of launches with K = ``length``, one of ``lengths``."""
        if length not in self.lengths:
            raise ValueError(f"length={shown(length)} must be one of lengths={self.lengths}.")
        return dataclasses.replace(self, lengths=(), batch_sizes=(), length=length)

    def for_rows(self, count: int) -> int:
        """Return the K of ``count`` unfinished rows, by ``batch_sizes``."""
        lengths = (k for least, most, k in self.batch_sizes if least <= count <= most)
        return next(lengths, self.max_depth)

    @property
    def may_pause(self) -> bool:
        """True if the drafter may miss rounds, which it must make up for."""
        return self.lengths[:1] == (0,) and self.drafter.catches_up

    @functools.cached_property
    def drafting(self) -> Drafter | None:
        """The drafter of a launch; None for K = 0."""
        if self.length in (None, self.drafter.max_depth):
            return self.drafter
        return self.drafter.at_length(self.length) if self.length else None

    @property
    def max_depth(self) -> int:
        """K."""
        return self.drafting.max_depth if self.drafting else 0

    @property
    def tree_size(self) -> int:
        """N, root included."""
        return self.drafting.tree_size if self.drafting else 1

    @property
    def proposal(self) -> Proposal:
        """The way in which the children of a node are chosen."""
        return self.drafting.proposal if self.drafting else "deterministic"

    @functools.cached_property
    def effective_rule(self) -> verify.Rule:
        """The rule as it runs on this launch's proposals.

        Where nothing is drafted, a lossless rule for drawn nodes alone has nothing to judge: the
        target draws. A rule's settings are for the longest K; drafts may end before.
        """
        rule = self._rule
        if rule.lossless and self.proposal not in rule.exact_for:
            rule = verify.RULES["match"]
        return rule.for_proposal(self.proposal)

    @property
    def drafts_always(self) -> bool:
        """True if all rows have drafts in all rounds: of a network, which no budget takes back."""
        return self._has_network and self.length is None

    @property
    def _has_network(self) -> bool:
        return bool(self.drafter.capture_layers) or self.drafter.catches_up

    @property
    def _rule(self) -> verify.Rule:
        return verify.RULES[self.rule] if isinstance(self.rule, str) else self.rule

    def passes(self, batch: int) -> tuple[Pass, ...]:
        """Return the sizes that the target's pass is compiled for, ascending.

        A round runs in the first that holds its valid nodes.
        """
        backend, most = jax.default_backend(), self._buckets[-1]
        # Other accelerators have the passes of a GPU.
        platform = self.platform or (backend if backend in packing.MATMULS else "gpu")
        passes = [Pass(nodes, batch * nodes, False) for nodes in self._buckets]
        sizes = packing.sizes(batch, batch * most, platform) if self.packed else ()
        if platform == "cpu":
            return tuple(Pass(most, size, True) for size in sizes) or tuple(passes)
        # No row has more nodes than the list, so attention needs no more of each row.
        passes += [Pass(min(most, size), size, True) for size in sizes[:-1]]
        passes.sort(key=lambda each: each.total)
        # Passes of few rows take the same time: the largest of them serves for all.
        few = [each for each in passes if each.total <= packing.MATMULS[platform].free_rows]
        return (*few[-1:], *passes[len(few) :])

    def programs(self, batch: int) -> tuple[tuple[Pass, ...], ...]:
        """Return the passes, grouped by the program that runs them.

        On a CPU the matmuls of one program choose among lists of all sizes. On an accelerator each
        pass is a program, as a choice costs more there.
        """
        passes = self.passes(batch)
        is_one = all(each.packed for each in passes)
        return (passes,) if is_one else tuple((each,) for each in passes)

    @property
    def _buckets(self) -> tuple[int, ...]:
        """Node counts of a launch's passes; a network with a choice of K drafts in all rounds."""
        if self.length is None:
            return self.node_buckets
        if self.drafting is None:
            return (1,)
        least, sizes = 2 if self._has_network else 1, {self.tree_size, *self.node_buckets}
        return tuple(size for size in self.drafting.node_buckets if size in sizes and size >= least)

    def verify(
        self, request: Request, draft: Draft, tree: Tree, logits: Array, history: History
    ) -> Verdict:
        """Judge a draft by the target's raw logits; see ``jspec.verify``."""
        return verify.verify(
            self.effective_rule,
            self.proposal,
            request,
            draft,
            tree,
            logits,
            history,
            self.sampling_backend,
        )
