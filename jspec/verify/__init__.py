"""Acceptance rules: which drafted nodes survive, and the law of the token after them.

A rule is a pure function of (warped logits, draft, tree, coins), so that the shipped code itself
can be enumerated. Its coins are of one of two kinds:

* ``target``: the target's own draw after every node, int32 [B, N];
* ``round``: one uniform a node, float32 [B, N], fresh in every round.
"""

import dataclasses
from typing import Literal

import jax.numpy as jnp

from jspec import sampling
from jspec.types import Array, Draft, History, Proposal, Request, Tree, Verdict, Walk
from jspec.verify.rejection import block, rejection
from jspec.verify.target_only import match


@dataclasses.dataclass(frozen=True)
class Rule:
    """An acceptance rule and what is true of it."""

    name: str
    walk: Walk
    coins: Literal["target", "round"]
    exact_for: frozenset[Proposal]  # laws of drafts for which the output law is the target's
    shares_noise: bool = False  # the drafter draws with the target's noise
    lossless: bool = True
    summary: str = ""


_ANY = frozenset({"point", "chain", "iid", "without_replacement", "top_plus_one", "mixed"})

RULES = {
    rule.name: rule
    for rule in (
        Rule("rejection", rejection, "round", frozenset({"chain"}),
             summary="token rule with p/q: accept by ratio, else draw from the residual"),
        Rule("block", block, "round", frozenset({"chain"}),
             summary="block verification: judges the chain as a whole, accepts at least as much"),
        Rule("match", match, "target", _ANY,
             summary="accept while the target's own draw equals the draft"),
        Rule("coupled", match, "target", _ANY, shares_noise=True,
             summary="match, with draft and target sharing noise: the text of plain sampling"),
    )
}  # fmt: skip

# What rejection and block come to for point-mass drafts: the same law, and without a residual.
TARGET_ONLY = RULES["match"]


def verify(
    rule: Rule, request: Request, draft: Draft, tree: Tree, logits: Array, history: History
) -> Verdict:
    """Judges ``draft`` by the target's raw ``logits`` [B, N, V].

    The one place where keys become coins.
    """
    warped = sampling.warp(logits, request.sampling)
    if rule.coins == "target" or request.sampling.greedy:  # greedy is the limit of every rule
        positions = history.length[:, None] + tree.depth  # of the token drawn after each node
        draws = sampling.draw_target(warped, request.sampling, request.keys, positions)
        path, num_accepted, _ = match(warped, draft, tree, draws)
        end = jnp.take_along_axis(path, num_accepted[:, None], 1)
        next_token = jnp.take_along_axis(draws, end, 1)[:, 0]
    else:
        root = history.length - 1
        coins = sampling.round_noise(request.keys, root, sampling.ACCEPT, draft.tokens.shape[1])
        path, num_accepted, next_logits = rule.walk(warped, draft, tree, coins)
        coin = sampling.round_noise(request.keys, root, sampling.RESIDUAL, 1)
        next_token = sampling.draw(next_logits, coin[:, 0])
    return Verdict(path, num_accepted + 1, next_token)
