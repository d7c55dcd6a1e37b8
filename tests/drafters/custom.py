"""Drafters that a user would write, given to jspec by the dotted path of their class."""

import dataclasses
from typing import Literal

import jax.numpy as jnp
import numpy as np

import jspec
from jspec.core import sampling, trees
from jspec.core.history import root_token


@dataclasses.dataclass(frozen=True)
class Successor(jspec.NoDrafter):
    """A drafter with weights: it draws each token from a row of a table [V, V] in a file."""

    num_speculative_tokens: int
    table: str
    scale: float = 1.0
    noise: Literal["own", "target"] = "own"

    proposal = "chain"
    max_depth = property(lambda self: self.num_speculative_tokens)
    tree_size = property(lambda self: self.num_speculative_tokens + 1)

    def load_params(self, target_params):
        return jnp.asarray(np.load(self.table), target_params.embedding.dtype)

    def propose(self, params, request, shared, memory, history):
        depth, start = self.max_depth, history.length - 1
        uniforms = sampling.round_noise(request.keys, start, sampling.DRAFT, depth)
        drafted, distributions = [root_token(history)], []
        for i in range(depth):
            distributions.append(
                sampling.process_logits(params.drafter[drafted[-1]] * self.scale, request.sampling)
            )
            if request.sampling.greedy:
                drafted.append(sampling.argmax(distributions[-1]))
            elif self.noise == "target":
                position = history.length + i
                drafted.append(
                    sampling.draw_target(
                        distributions[-1], request.sampling, request.keys, position
                    )
                )
            else:
                drafted.append(sampling.draw(distributions[-1], uniforms[:, i]))
        recorded = self.noise == "own" and not request.sampling.greedy
        return jspec.Draft(
            jnp.stack(drafted, 1),
            trees.chain(depth),
            jnp.ones((len(start), depth + 1), bool),
            jnp.stack([*distributions, jnp.zeros_like(distributions[0])], 1) if recorded else None,
            max_depth=depth,
        ), memory


@dataclasses.dataclass(frozen=True)
class Repeat(jspec.Drafter):
    """A drafter without weights that repeats the last token, or ``phrase``."""

    vocab_size: int
    phrase: tuple[int, ...] = ()

    proposal = "deterministic"
    max_depth = property(lambda self: len(self.phrase) or 1)
    tree_size = property(lambda self: self.max_depth + 1)

    def propose(self, params, request, shared, memory, history):
        root = root_token(history)[:, None]
        row = jnp.asarray(self.phrase, jnp.int32) % self.vocab_size
        drafted = jnp.broadcast_to(row, (root.shape[0], row.size)) if self.phrase else root
        drafted = jnp.concatenate([root, drafted], 1)
        return jspec.Draft(
            drafted,
            trees.chain(self.max_depth),
            jnp.ones(drafted.shape, bool),
            max_depth=self.max_depth,
        ), memory


@dataclasses.dataclass(frozen=True)
class Drawn(Repeat):
    """A drafter that draws, but not with the target's noise."""

    proposal = "chain"


@dataclasses.dataclass(frozen=True)
class Echo(jspec.Drafter):
    """A drafter of the last token, K times."""

    num_speculative_tokens: int

    proposal = "deterministic"
    max_depth = property(lambda self: self.num_speculative_tokens)
    tree_size = property(lambda self: self.num_speculative_tokens + 1)

    def propose(self, params, request, shared, memory, history):
        drafted = jnp.repeat(root_token(history)[:, None], self.tree_size, 1)
        valid, chain = jnp.ones(drafted.shape, bool), trees.chain(self.max_depth)
        return jspec.Draft(drafted, chain, valid, max_depth=self.max_depth), memory


@dataclasses.dataclass(frozen=True)
class Half(jspec.Drafter):
    """A drafter that lacks members and arguments."""

    model: str = ""
    max_depth = 1

    def init(self, params, request, capacity):
        return ()

    def update(self, params, request, shared, memory, history, draft, verdict, out):
        return memory, shared

    load_params = 3


@dataclasses.dataclass(frozen=True)
class Duck:
    """A class that has a drafter's members, but is none."""

    max_depth = 0
    tree_size = 1
    proposal = "deterministic"

    def propose(self, params, request, shared, memory, history):
        return None


@dataclasses.dataclass
class Mutable(jspec.Drafter):
    """A dataclass that is not frozen."""


@dataclasses.dataclass(frozen=True)
class Odd(jspec.NoDrafter):
    """A drafter with the proposal and rows of the test."""

    max_depth: object = 0
    tree_size: object = 1
    capture_layers: object = ()
    proposal: object = "deterministic"
    anything: object = None
