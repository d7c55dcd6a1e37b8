"""Acceptance rules: which drafted nodes survive, and the law of the token after them.

A rule is a pure function of (warped logits, draft, tree, coins), so that the shipped code itself
can be enumerated. Its coins are of one of these kinds:

* ``target``: the target's own draw after every node, int32 [B, N];
* ``round``: one uniform a node, float32 [B, N], fresh in every round;
* ``none``: it has no use for those of ``round`` that it is given.

A rule of your own is a ``Rule``, which ``Plan`` takes in place of a name.
"""

import dataclasses
from collections.abc import Sequence
from typing import Literal, get_args

import jax.numpy as jnp

from jspec import ops
from jspec.core import logits_processors, sampling, shape_checks, trees
from jspec.core.types import Array, Draft, History, Proposal, Request, Tree, Verdict, Walk
from jspec.util.messages import shown
from jspec.util.values import is_whole
from jspec.verify import block, rejection
from jspec.verify.match import match
from jspec.verify.synthetic import Synthetic
from jspec.verify.typical import Typical

Uniforms = Literal["target", "round", "none"]
_HUGE = 1e25  # logits beyond it are counted from the largest before kernels see them


@dataclasses.dataclass(frozen=True)
class Rule:
    """An acceptance rule and what is true of it.

    Attributes:
      name: in tables and messages.
      walk: the rule itself. Part of a plan, so hashable: a function, or a frozen dataclass whose
        fields are the rule's settings.
      coins: what decides.
      exact_for: laws of drafts for which the output law is the target's; none for a lossy rule.
      walk_replaced: the walk where siblings were drawn with replacement; None for the same one.
      walk_points_last: the walk where point masses came after those drawn; None for the same one.
      point_rule: name of the rule that runs in its place, by the same law, on point masses.
      shares_noise: the drafter draws with the target's noise.
      lossless: False for rules that change the output's law. They judge drafts of any kind.
      greedy_is_match: at temperature 0 the rule comes to ``match``.
      depths: how deep the drafts are that its settings are for, at least and at most; None for any.
      implementation: has ``ops.rejection_sampling`` judge in place of the walk, by a kernel that
        stores no law of the target: the same verdict for the same coins, up to float32 rounding.
        None for the walk, which no kernel has been measured to beat yet.
      summary: one line.

    Raises:
      ValueError: a value is none that it can have, or there is no kernel for this rule.
    """

    name: str
    walk: Walk
    uniforms: Uniforms
    exact_for: frozenset[Proposal]
    walk_replaced: Walk | None = None
    walk_points_last: Walk | None = None
    point_rule: str | None = None
    shares_noise: bool = False
    lossless: bool = True
    greedy_is_match: bool = True
    depths: tuple[int, int | None] = (0, None)
    implementation: str | None = None
    summary: str = ""

    def __post_init__(self):
        uniforms, distributions, kernels = (
            get_args(Uniforms),
            get_args(Proposal),
            ops.IMPLEMENTATIONS,
        )
        exact_for = self.exact_for
        walk = "a function of (warped logits, draft, tree, coins)"
        for field, holds, wanted in (
            ("name", isinstance(self.name, str), "a string"),
            ("walk", callable(self.walk), walk),
            ("walk_replaced", _may_be_called(self.walk_replaced), f"{walk}, or None"),
            ("walk_points_last", _may_be_called(self.walk_points_last), f"{walk}, or None"),
            ("uniforms", self.uniforms in uniforms, f"one of {_quoted(uniforms)}"),
            (
                "exact_for",
                isinstance(exact_for, frozenset) and exact_for <= set(distributions),
                f"a frozenset of laws among {_quoted(distributions)}",
            ),
            ("depths", _is_span(self.depths), "a pair, at least and at most or None"),
            (
                "implementation",
                self.implementation in (None, *kernels),
                f"None or one of {_quoted(kernels)}",
            ),
        ):
            if not holds:
                value = shown(getattr(self, field), 60)
                raise ValueError(f"{field}={value} of a Rule must be {wanted}.")
        if self.implementation is not None and self.name not in ops.REJECTION_SAMPLING_RULES:
            known = " and ".join(map(repr, ops.REJECTION_SAMPLING_RULES))
            raise ValueError(
                f"implementation={self.implementation!r} is for the rules {known}, not for "
                f"{self.name!r}; leave it out."
            )

    def judging(self, proposal: Proposal) -> "Rule":
        """The rule as it runs on drafts of a law."""
        if proposal == "point" and self.point_rule is not None:
            return RULES[self.point_rule]
        others = {"iid": self.walk_replaced, "points_last": self.walk_points_last}
        return dataclasses.replace(self, walk=others.get(proposal) or self.walk)


def _may_be_called(walk: Walk | None) -> bool:
    return walk is None or callable(walk)


def _is_span(depths: tuple[int, int | None]) -> bool:
    if not isinstance(depths, tuple) or len(depths) != 2 or not is_whole(depths[0], 0):
        return False
    return depths[1] is None or is_whole(depths[1], depths[0])


def _quoted(names: Sequence[str]) -> str:
    return ", ".join(map(repr, names))


def typical(threshold: float = 0.09, alpha: float = 0.3) -> Rule:
    """Medusa's typical acceptance; see ``jspec.verify.typical.Typical``. Lossy."""
    return Rule(
        "typical",
        Typical(threshold, alpha),
        "none",
        frozenset(),
        lossless=False,
        summary="Medusa's: accept what the target finds likely enough, by its entropy; greedy "
        "stays exact",
    )


def synthetic(rates: Sequence[float] | None = None, length: float | None = None) -> Rule:
    """Acceptance by rates, for benchmarks; see ``jspec.verify.synthetic.Synthetic``. Lossy."""
    walk = Synthetic(rates if rates is None else tuple(rates), length)
    return Rule(
        "synthetic",
        walk,
        "round",
        frozenset(),
        lossless=False,
        greedy_is_match=False,
        depths=walk.depths,
        summary="for benchmarks: accept whatever is drafted, at given rates",
    )


_DRAWN = frozenset({"chain", "iid", "without_replacement", "top_plus_one", "mixed", "points_last"})
_WITH_POINTS = _DRAWN | {"point"}

RULES = {
    rule.name: rule
    for rule in (
        # On point masses both come to the target-only walk: the same law, and without a residual.
        Rule(
            "rejection",
            rejection.rejection,
            "round",
            _WITH_POINTS,
            rejection.with_replacement,
            rejection.points_last,
            point_rule="match",
            summary="token rule with p/q: accept by ratio, else draw from the residual",
        ),
        Rule(
            "block",
            block.block,
            "round",
            _WITH_POINTS,
            block.with_replacement,
            block.points_last,
            point_rule="match",
            summary="judges the draft as a whole, accepts at least as much: block verification "
            "of chains, traversal verification of trees",
        ),
        Rule(
            "match",
            match,
            "target",
            _WITH_POINTS | {"pruned"},
            summary="accept while the target's own draw equals the draft",
        ),
        Rule(
            "coupled",
            match,
            "target",
            _WITH_POINTS | {"pruned"},
            shares_noise=True,
            summary="match, with draft and target sharing noise: the text of plain sampling",
        ),
        typical(),
        synthetic(rates=()),  # for drafts of depth 0: rates have no default
    )
}


def verify(
    rule: Rule, request: Request, draft: Draft, tree: Tree, logits: Array, history: History
) -> Verdict:
    """Judges ``draft`` by the target's raw ``logits`` [B, N, V].

    The one place where keys become coins.
    """
    if request.sampling.processors is not None:
        branches = logits_processors.of_draft(history, draft, tree)
        logits = logits_processors.shape(logits, request.sampling.processors, branches)
    processed = sampling.process_logits(logits, request.sampling)
    lost = sampling.no_token(logits, request.sampling)
    greedy = request.sampling.greedy
    if rule.uniforms == "target" or (greedy and rule.greedy_is_match):
        positions = history.length[:, None] + tree.depth  # of the token drawn after each node
        draws = sampling.draw_target(processed, request.sampling, request.keys, positions)
        walk = rule.walk if rule.uniforms == "target" else match
        judged = walk(processed, draft, tree, draws)
        path, num_accepted, _ = shape_checks.check_judged(rule.name, judged, draft, None)
        end = jnp.take_along_axis(path, num_accepted[:, None], 1)
        next_token = jnp.take_along_axis(draws, end, 1)[:, 0]
    else:
        root = history.length - 1
        count = draft.tokens.shape[1]
        uniforms = sampling.round_noise(request.keys, root, sampling.ACCEPT, count)[..., 0]
        uniform = sampling.round_noise(request.keys, root, sampling.RESIDUAL, 1)[:, 0]
        if rule.implementation is not None:  # what is warped above is not used, nor computed
            logits, lost = _numbers(logits)
            path, num_accepted, next_token = ops.rejection_sampling(
                logits,
                request.sampling,
                _drawn(draft, tree),
                tree,
                uniforms,
                uniform,
                rule=rule.name,
                replaced=rule.walk is rule.walk_replaced,
                implementation=rule.implementation,
            )
            num_valid = _num_valid(lost, path, num_accepted)
            return Verdict(path, num_accepted + 1, next_token, num_valid)
        distribution = jnp.where(
            lost[..., None], 0, processed
        )  # of what comes after, nothing is said
        judged = rule.walk(distribution, _drawn(draft, tree), tree, uniforms)
        wanted = len(distribution), distribution.shape[-1]
        path, num_accepted, next_logits = shape_checks.check_judged(
            rule.name, judged, draft, wanted
        )
        draw = (
            sampling.argmax if greedy else lambda distribution: sampling.draw(distribution, uniform)
        )
        next_token = draw(next_logits)
    return Verdict(path, num_accepted + 1, next_token, _num_valid(lost, path, num_accepted))


def _numbers(logits: Array) -> tuple[Array, Array]:
    """Raw logits that kernels can take, and where no token has any weight: bool [B, N].

    What ``sampling.process_logits`` makes of NaN and inf, and of more than kernels can divide.
    """
    finite = jnp.minimum(jnp.where(jnp.isnan(logits), -jnp.inf, logits), jnp.finfo(logits).max)
    most = finite.max(-1, keepdims=True)
    huge = most.astype(jnp.promote_types(most.dtype, jnp.float32)) > _HUGE
    usable = jnp.where(huge, finite - most, finite)
    lost = jnp.isneginf(most)
    return jnp.where(lost, 0, usable), lost[..., 0]


def _drawn(draft: Draft, tree: Tree) -> Draft:
    """A draft whose recorded laws are ones: what was drawn from no law, of a broken head, is out.

    A test of laws alone, blind to what was drawn of them: no rule loses its exactness by it.
    """
    if draft.logits is None:
        return draft
    broken = ~jnp.isfinite(draft.logits.max(-1))  # [B, N]
    above = jnp.take_along_axis(broken, tree.parents, 1).at[:, 0].set(False)
    if draft.sampled is not None:
        above &= draft.sampled
    every = trees.unpack_bits(tree.ancestors, above.shape[1])  # [B, N, N]
    return draft.replace(
        logits=jnp.where(broken[..., None], 0, draft.logits),
        valid=draft.valid & ~(every & above[:, None]).any(-1),
    )


def _num_valid(lost: Array, path: Array, num_accepted: Array) -> Array:
    """How many tokens of a verdict come before the first of a ``lost`` law [B, N]: int32 [B]."""
    on_path = jnp.arange(path.shape[1]) <= num_accepted[:, None]
    lost = jnp.take_along_axis(lost, path, 1, mode="clip") & on_path
    return jnp.where(lost.any(-1), jnp.argmax(lost, -1), num_accepted + 1).astype(jnp.int32)
