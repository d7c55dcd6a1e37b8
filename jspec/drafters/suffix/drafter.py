"""Suffix decoding: propose what followed the last tokens most often, in this and earlier texts.

The rule is that of arXiv 2411.04975 as vLLM runs it (ArcticInference). For every match length, the
continuations of all occurrences are counted. A draft follows the likeliest continuation while the
product of its count ratios is at least ``suffix_decoding_min_token_prob``; a longer match allows a
longer draft. The draft with the highest sum of probabilities is proposed. A row's own text, prompt
included, wins ties against past responses. If there are more than
``suffix_decoding_max_occurrences`` occurrences, the latest count. All of it runs on the device.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from jspec.core import trees
from jspec.core.history import is_ended, root_alone, root_token
from jspec.core.types import Array, Draft, Drafter, History
from jspec.drafters.suffix import corpus, growth
from jspec.drafters.suffix.corpus import Corpus, OwnText
from jspec.drafters.suffix.growth import Occurrences
from jspec.util.messages import shown
from jspec.util.values import INT32, is_real, is_whole

TREES = ("chain", "best_first")
_TREE_SIZE = 16  # default nodes of a tree, root included


@struct.dataclass
class SuffixMemory:
    """The index of the rows' own texts, and the responses that are not stored yet."""

    own_text: OwnText
    start: Array  # [B] int32, first position of the response: the prompt's length
    stored: Array  # [B] bool, whether the response is in the corpus


@dataclasses.dataclass(frozen=True)
class Suffix(Drafter):
    """Suffix decoding. ``shared`` is a ``Corpus`` of past responses, or () for none.

    A growing response counts as a past response for its own row, so it outweighs a prompt that it
    departs from. It enters the corpus in the round in which its row ends, and then serves all rows.

    Attributes:
      num_speculative_tokens: most drafted tokens, or edges below the root of a tree; None for
        ``suffix_decoding_max_tree_depth``, as in vLLM.
      tree: "chain", or "best_first": the most probable continuations up to ``tree_size`` nodes.
      tree_size: N, nodes of a tree, root included; None for 16, or for those of the chain.
      suffix_decoding_max_tree_depth: most tokens of a match and its continuation together.
      suffix_decoding_max_cached_requests: most responses in the corpus; 0 for no corpus.
      suffix_decoding_max_spec_factor: most drafted tokens for every token of the match.
      suffix_decoding_min_token_prob: least probability, by counts, of a drafted token.
      suffix_decoding_max_cached_tokens: most tokens in the corpus, with one more for each response;
        the oldest responses are evicted.
      suffix_decoding_max_occurrences: M, most occurrences of a match that count, the latest.

    Raises:
      ValueError: a setting is out of range.
    """

    num_speculative_tokens: int | None = None
    tree: str = "chain"
    tree_size: int | None = None
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_max_cached_tokens: int = 1 << 20
    suffix_decoding_max_occurrences: int = 32

    proposal = "deterministic"
    reads_pages = True
    lookahead = 0
    max_depth = property(lambda self: self.rule.depth)

    def __post_init__(self):
        self._check()
        if self.tree == "chain" and self.tree_size not in (None, self.rule.size + 1):
            raise ValueError(
                f"tree_size={self.tree_size}, but the longest chain of these settings has "
                f"{self.rule.size + 1} nodes; leave tree_size out, or use tree='best_first'."
            )
        object.__setattr__(self, "tree_size", self.rule.size + 1)

    def _check(self) -> None:
        prefix, most = "suffix_decoding_", trees.MOST_NODES
        counts = (
            ("num_speculative_tokens", 1, most, f"in [1, {most}]"),
            ("tree_size", 2, most, f"2 to {most}, root included"),
            (f"{prefix}max_tree_depth", 1, most, f"in [1, {most}]"),
            (f"{prefix}max_cached_requests", 0, INT32 - 1, ">= 0"),
            (f"{prefix}max_cached_tokens", 2, 1 << 30, "in [2, 2**30]"),
            (f"{prefix}max_occurrences", 1, 1024, "in [1, 1024]"),
        )
        for name, least, largest, bounds in counts:
            value, has_default = vars(self)[name], name in ("num_speculative_tokens", "tree_size")
            if not (value is None and has_default) and not is_whole(value, least, largest):
                raise ValueError(f"{name}={shown(value)} must be {bounds}")
        for name, largest, bounds in (
            (f"{prefix}max_spec_factor", float("inf"), ">= 0"),
            (f"{prefix}min_token_prob", 1, "in [0, 1]"),
        ):
            value = vars(self)[name]
            if not (is_real(value) and 0 <= value <= largest):
                raise ValueError(f"{name}={shown(value)} must be {bounds}")
        if self.tree not in TREES:
            raise ValueError(f"tree={shown(self.tree)} of suffix must be {' or '.join(TREES)}.")

    @functools.cached_property
    def rule(self) -> growth.Rule:
        """The limits of a draft."""
        most = self.suffix_decoding_max_tree_depth
        depth, branching = self.num_speculative_tokens or most, self.tree != "chain"
        nodes = (self.tree_size or _TREE_SIZE) - 1 if branching else depth
        limits = []
        for matched in range(1, most):
            size = min(nodes, int(matched * self.suffix_decoding_max_spec_factor + 1e-6))
            if deepest := min(depth, most - matched, size):
                limits.append((matched, size, deepest))
        return growth.Rule(tuple(limits), self.suffix_decoding_min_token_prob, branching)

    @property
    def node_buckets(self) -> tuple[int, ...]:
        """Node counts that get a program of their own: most matches, so most drafts, are short."""
        return tuple(sorted({1, -(-self.tree_size // 3), self.tree_size}))

    def init_shared(self) -> Corpus | tuple:
        """Return an empty corpus, or () for none."""
        if not (self.suffix_decoding_max_cached_requests and self.rule.depth):
            return ()
        # A request takes at least two slots, which bounds the number of requests.
        most = self.suffix_decoding_max_cached_tokens
        return corpus.no_responses(
            min(self.suffix_decoding_max_cached_requests, most // 2), most, self.rule.groups
        )

    def init(self, params, request, capacity):
        """Return empty indices; ``prefill`` reads all but the last token of a prompt."""
        batch = request.max_length.shape[0]
        own_text = corpus.no_texts(batch, capacity, self.rule.groups)
        return SuffixMemory(own_text, jnp.ones((batch,), jnp.int32), jnp.zeros((batch,), bool))

    def prefill(self, params, memory, tokens, features, start, valid):
        """Count the prompt's tokens; the first chunk may follow cached ones.

        Rounds of other rows between two chunks find no response to store yet.
        """
        return memory.replace(
            start=jnp.where(valid > 0, start + valid + 1, memory.start),
            stored=memory.stored & (valid == 0),
        )

    def propose(self, params, request, shared, memory, history):
        """Draft what followed most often."""
        rule, root = self.rule, root_token(history)[:, None]
        if not rule.depth:
            return root_alone(history), memory
        memory = memory.replace(own_text=corpus.index_history(memory.own_text, history))
        occurrences = self._occurrences(shared, memory, history)
        best = growth.best(growth.grow(rule, occurrences, history.length))
        valid = jnp.arange(rule.size) < best.size[:, None]
        lead = lambda x, fill: jnp.pad(x, ((0, 0), (1, 0)), constant_values=fill)
        parents = lead(jnp.where(valid, best.parents, 0), -1)
        return Draft(
            tokens=jnp.concatenate([root, jnp.where(valid, best.tokens, 0)], 1),
            parents=parents if rule.branching else trees.chain(rule.size),
            valid=lead(valid, True),
            score=best.score,
            max_depth=rule.depth,
        ), memory

    def update(self, round):
        """Store the responses of rows that have ended."""
        # A row without an emitted token had ended, or its target gave every token probability 0.
        done = is_ended(round.request, round.history) | (round.verdict.num_emitted == 0)
        return self._store(round.shared, round.memory, round.history, done)

    def on_finished(self, shared: Any, memory: SuffixMemory, history: History, rows: Array):
        """Store the responses of ``rows`` that were not stored yet."""
        return self._store(shared, memory, history, rows)

    def _store(self, shared, memory, history, rows):
        if shared == ():
            return memory, shared
        shared = corpus.store(shared, history, memory.start, rows & ~memory.stored)
        return memory.replace(stored=memory.stored | rows), shared

    def _occurrences(self, shared: Any, memory: SuffixMemory, history: History) -> Occurrences:
        """Find the rows' last tokens in their own texts and, if any, in past responses."""
        rule, count = self.rule, self.suffix_decoding_max_occurrences
        last = corpus.last_tokens(history, rule.longest_match)
        positions, own_text = corpus.in_history(memory.own_text, history, last, count, rule.depth)
        if shared == ():
            return own_text
        past = corpus.in_corpus(shared, last, count, rule.depth)
        past = corpus.with_response(past, own_text, positions, memory.start, rule.groups)
        return jax.tree.map(lambda a, b: jnp.concatenate([a, b], 1), own_text, past)
