"""Suffix decoding by its definition: a suffix trie in plain Python, counts and their ratios.

Written from arXiv 2411.04975 and what ArcticInference is documented to do; single precision in the
order of the definition, so that ties are ties.
"""

import dataclasses
import heapq

import numpy as np

GROUPS = (1, 2, 4, 8)


@dataclasses.dataclass
class Node:
    """A string of the texts: its count, and the end of its latest occurrence."""

    count: int = 0
    last: int = 0
    children: dict = dataclasses.field(default_factory=dict)

    def walk(self, tokens):
        node = self
        for token in tokens:
            node = node.children.get(token)
            if node is None:
                return None
        return node


def trie(texts, depth):
    """Return the trie of all substrings of up to ``depth`` tokens."""
    root, before = Node(), 0
    for text in texts:
        for start in range(len(text)):
            node = root
            for end in range(start, min(start + depth, len(text))):
                node = node.children.setdefault(text[end], Node())
                node.count += 1
                node.last = before + end + 1
        before += len(text) + 1
    return root


def cached(responses, max_requests, max_tokens):
    """Return the latest responses that fit, each entire and with a separator."""
    stored = []
    for response in responses:
        if not response:
            continue
        stored.append(response[-(max_tokens - 1) :])
        while len(stored) > max_requests or sum(len(text) + 1 for text in stored) > max_tokens:
            stored.pop(0)
    return stored


def drafted(texts, row, drafter):
    """Return (score, match length, tokens, parents) of the best draft from ``texts``, or None."""
    depth = drafter.suffix_decoding_max_tree_depth
    root, best = trie(texts, depth), None
    for matched in range(1, min(depth, len(row))):
        node = root.walk(row[-matched:])
        if node is None:
            break
        draft = _grown(node, depth - matched, matched, drafter)
        if draft and (best is None or draft[0] >= best[0]):
            best = (draft[0], matched, *draft[1:])
    return best


def _grown(node, room, matched, drafter):
    budget = int(matched * drafter.suffix_decoding_max_spec_factor + 1e-6)
    depth = min(room, drafter.num_speculative_tokens or drafter.suffix_decoding_max_tree_depth)
    branching = drafter.tree == "best_first"
    budget = min(budget, drafter.tree_size - 1 if branching else depth)
    least = np.float32(drafter.suffix_decoding_min_token_prob)
    score, tokens, parents = np.float32(0), [], []
    heap = []

    def push(node, prob, index, below):
        if below == depth:
            return
        for token, child in node.children.items():
            chance = np.float32(prob * (np.float32(child.count) / np.float32(node.count)))
            if chance >= least:
                # The likeliest first, then the latest occurrence of the match.
                heapq.heappush(heap, (-chance, below - child.last, token, child, index, below + 1))

    push(node, np.float32(1), 0, 0)
    while heap and len(tokens) < budget:
        chance, _, token, child, index, below = heapq.heappop(heap)
        if not branching:
            heap.clear()
        tokens.append(token)
        parents.append(index)
        score += -chance
        push(child, -chance, len(tokens), below)
    return (score, tokens, parents) if tokens else None


def proposed(row, start, responses, drafter):
    """Return the (tokens, parents) that suffix decoding proposes.

    ``responses`` are those still cached (None: no cache), the row's own begins at ``start``.
    """
    best = drafted([row], row, drafter)
    past = None if responses is None else drafted([*responses, row[start:]], row, drafter)
    if best is None or (past is not None and past[0] > best[0]):
        best = past
    return ([], []) if best is None else best[2:]
