"""A trace as a plain value: its rounds, their nodes with probabilities, and sources of tokens.

``terminal`` and ``page`` render it.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import numpy as np

from jspec.api.detokenizer import Detokenizer
from jspec.api.metrics import Counts
from jspec.api.outputs import Transcript
from jspec.tools.trace import names
from jspec.tools.trace.recording import Record

# The target's own token is a bonus after a path that was accepted to its leaf, corrected after
# children were refused, and plain if nothing was drafted.
Source = Literal["drafted", "bonus", "corrected", "plain"]
# "not taken": off the path that a rule chose among whole paths. "not emitted": accepted, but the
# text had ended.
Fate = Literal["accepted", "refused", "not reached", "not taken", "not emitted"]
# "ended": the text ended within the draft. "no token": every token has probability 0.
Why = Literal["refused", "leaf", "no draft", "ended", "no token"]


@dataclasses.dataclass(frozen=True)
class Node:
    """A drafted token; or the root of a round, the last token of the text before it.

    Attributes:
      index: of the node in its round.
      parent: index; -1 at the root.
      depth: edges to the root.
      token: id.
      label: its text on one line, as ``names.label``.
      fate: the outcome.
      p: probability by the target's processed distribution after the parent; at temperature 0 by
        the distribution of temperature 1. None at the root, and if every token has probability 0.
      q: probability that it was drawn with, given the siblings drawn before it. None at the root
        and in a deterministic draft.
      chance: min(1, p / q) at the time when rejection sampling judged it, where p is the residual
        after its refused siblings. None under other rules, and if it was not judged.
      uniform: the node's uniform; ``chance`` accepts it if the uniform is smaller. None under rules
        without uniforms.
      draw: the target's own draw after this node, under rules that compare drafts with it, and at
        temperature 0. None under other rules.
      likeliest: (token, label, p) of the target's three likeliest tokens after this node.
    """

    index: int
    parent: int
    depth: int
    token: int
    label: str
    fate: Fate
    p: float | None
    q: float | None
    chance: float | None
    uniform: float | None
    draw: int | None
    likeliest: tuple[tuple[int, str, float], ...]


@dataclasses.dataclass(frozen=True)
class Piece:
    """A token of the answer."""

    token: int  # id
    label: str  # as ``Node.label``
    text: str  # its addition to the text: "" for a part of a character, and for a stop token
    source: Source  # drafted, or the kind of the target's own token
    p: float  # probability by the target's distribution, as ``Node.p``
    node: int | None  # index of the drafted node in its round; None for the target's own token


@dataclasses.dataclass(frozen=True)
class Round:
    """One pass of the target."""

    index: int  # from 0
    position: int  # position of the root in the prompt and answer together
    nodes: tuple[Node, ...]  # the root and every valid node of the draft, parents before children
    pieces: tuple[Piece, ...]  # the tokens that the round added to the text
    why: Why  # the reason for its end
    words: str  # the reason as a sentence

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that the round added."""
        return sum(piece.source == "drafted" for piece in self.pieces)

    @property
    def end(self) -> int:
        """Index of the last node whose token was emitted."""
        return max((piece.node for piece in self.pieces if piece.node is not None), default=0)

    @property
    def target_piece(self) -> Piece | None:
        """The target's own token at the end of the round; None if the text ended before it."""
        return self.pieces[-1] if self.pieces and self.pieces[-1].node is None else None


@dataclasses.dataclass(frozen=True)
class Trace:
    """The rounds of one generation, from ``jspec.trace``."""

    prompt: str | None  # text; None for a prompt of token ids
    prompt_token_ids: tuple[int, ...]  # tokens of the prompt
    rounds: tuple[Round, ...]  # passes of the target, in order
    finish_reason: str  # as in ``CompletionOutput``
    stop_reason: int | str | None  # as in ``CompletionOutput``
    counts: Counts  # drafted and accepted tokens
    setting: dict[str, str]  # model, drafter, rule and temperature as words

    @property
    def pieces(self) -> Iterator[Piece]:
        """The answer's tokens, in order."""
        return (piece for round_ in self.rounds for piece in round_.pieces)

    @property
    def token_ids(self) -> list[int]:
        """The answer's ids, as ``CompletionOutput.token_ids``."""
        return [piece.token for piece in self.pieces]

    @property
    def text(self) -> str:
        """The answer, as ``CompletionOutput.text``; token ids without a tokenizer."""
        return "".join(piece.text for piece in self.pieces)


def trace_of(
    records: Sequence[Record],
    transcript: Transcript,
    tokenizer: Any,
    prompt: str | None,
    prompt_token_ids: Sequence[int],
    setting: dict[str, str],
    *,
    rule: str,
    skip_special_tokens: bool = True,
) -> Trace:
    """Return the trace of a generation that ``recording.record`` has run under ``rule``.

    Without a tokenizer, token ids stand for the text.
    """
    tokens = transcript.answer.tokens.tolist()
    texts = _texts(tokens, transcript.text, tokenizer, prompt_token_ids, skip_special_tokens)
    rounds, begin = [], 0
    for index, record in enumerate(records):
        is_last = index == len(records) - 1
        end = len(tokens) if is_last else begin + int(record.num_emitted)
        added = list(zip(tokens[begin:end], texts[begin:end], strict=True))
        position = len(prompt_token_ids) + begin - 1
        ending = transcript if is_last else None
        rounds.append(_round(index, position, record, rule, added, tokenizer, ending))
        begin = end
    return Trace(
        prompt,
        tuple(map(int, prompt_token_ids)),
        tuple(rounds),
        transcript.finish_reason,
        transcript.stop_reason,
        Counts.of(transcript.answer),
        setting,
    )


def _texts(
    tokens: Sequence[int], text: str, tokenizer: Any, prompt: Sequence[int], skip: bool
) -> list[str]:
    """Return the addition of each token to ``text``, whose end may have been cut."""
    if tokenizer is None:
        return [f"{token} " for token in tokens]
    detokenizer = Detokenizer(tokenizer, prompt, skip)
    texts = [detokenizer.feed(token) for token in tokens]
    if texts:
        texts[-1] += detokenizer.flush()
    left = len(text)
    for index, piece in enumerate(texts):
        texts[index] = piece[:left]
        left -= len(texts[index])
    return texts


def _round(
    index: int,
    position: int,
    record: Record,
    rule: str,
    added: Sequence[tuple[int, str]],
    tokenizer: Any,
    ending: Transcript | None,
) -> Round:
    """Return one round; ``ending`` is the transcript for the last one."""
    slots = np.flatnonzero(record.valid)  # array indices of the valid nodes
    numbers = {int(slot): number for number, slot in enumerate(slots)}
    path = [numbers[int(slot)] for slot in record.path[: record.num_emitted]]
    parents = [-1] + [numbers[int(parent)] for parent in record.parents[slots][1:]]
    fates = _fates(record, rule, slots, parents, path, len(added))
    nodes: list[Node] = []
    for slot, parent, fate in zip(slots, parents, fates, strict=True):
        depth = nodes[parent].depth + 1 if nodes else 0
        nodes.append(_node(record, int(slot), len(nodes), parent, depth, fate, tokenizer))
    has_children = path[-1] in parents
    why: Why = "refused" if has_children else "leaf" if len(nodes) > 1 else "no draft"
    if len(added) < len(path):
        why = "no token" if ending and ending.finish_reason == "error" else "ended"
    source: Source = {"refused": "corrected", "leaf": "bonus"}.get(why, "plain")
    pieces = []
    for number, (token, text) in zip([*path[1:], None], added, strict=False):
        label = names.label(tokenizer, token)
        if number is None:
            pieces.append(Piece(token, label, text, source, float(record.next_p), None))
        else:
            pieces.append(Piece(token, label, text, "drafted", nodes[number].p, number))
    words = _words(why, nodes, path[-1], pieces) + (_ending(ending) if ending else "")
    return Round(index, position, tuple(nodes), tuple(pieces), why, words)


def _node(
    record: Record, slot: int, index: int, parent: int, depth: int, fate: Fate, tokenizer: Any
) -> Node:
    token = int(record.tokens[slot])
    number = lambda value: None if index == 0 or np.isnan(value) else float(value)
    likeliest = zip(record.likeliest[slot].tolist(), record.likeliest_p[slot].tolist(), strict=True)
    return Node(
        index=index,
        parent=parent,
        depth=depth,
        token=token,
        label=names.label(tokenizer, token),
        fate=fate,
        p=number(record.p[slot]),
        q=number(record.q[slot]),
        chance=number(record.chance[slot]),
        uniform=number(record.uniforms[slot]),
        draw=int(record.draws[slot]) if record.draws[slot] >= 0 else None,
        likeliest=tuple(
            (other, names.label(tokenizer, other), p) for other, p in likeliest if not np.isnan(p)
        ),
    )


def _fates(
    record: Record,
    rule: str,
    slots: np.ndarray,
    parents: list[int],
    path: list[int],
    num_added: int,
) -> list[Fate]:
    """Return the fate of every node, by the order in which the rule judges nodes."""
    nodes, others = range(1, len(slots)), "not reached"
    if record.draws[slots[0]] >= 0:  # the draw is compared with every child of the path
        refused = [node for node in nodes if parents[node] in path]
    elif not np.isnan(record.chance[slots]).all():
        refused = np.flatnonzero(~np.isnan(record.chance[slots])).tolist()
    elif rule == "block":
        order = _post_order(parents, np.isnan(record.q[slots]))
        refused = order[: order.index(path[-1])]
    else:  # the rule chose among whole paths, and none leads further down
        refused, others = [node for node in nodes if parents[node] == path[-1]], "not taken"
    fates: list[Fate] = [others] * len(slots)
    for node in refused:
        fates[node] = "refused"
    for depth, node in enumerate(path):
        fates[node] = "accepted" if depth <= num_added else "not emitted"
    return fates


def _post_order(parents: list[int], is_deterministic: np.ndarray) -> list[int]:
    """Return the nodes in the order of ``jspec.verify.block``: drawn siblings come first."""
    children: list[list[int]] = [[] for _ in parents]
    for node in sorted(range(1, len(parents)), key=lambda node: (is_deterministic[node], node)):
        children[parents[node]].append(node)

    def walk(node: int) -> list[int]:
        return [*itertools.chain(*map(walk, children[node])), node]

    return walk(0)


def _words(why: Why, nodes: Sequence[Node], end: int, pieces: Sequence[Piece]) -> str:
    if why == "no token":
        return "every token has probability 0 here"
    last = pieces[-1]
    if why == "ended":
        return f"the text ends with the drafted “{last.label}”"
    token = f"“{last.label}” (p {last.p:.2g})"
    if why == "no draft":
        return f"nothing was drafted; the target's own token is {token}"
    if why == "leaf":
        return f"the path was accepted to its leaf; the bonus is {token}"
    refused = [node for node in nodes if node.parent == end and node.index]
    which = ", ".join(f"“{node.label}”{_odds(node)}" for node in refused[:3])
    which += f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    drawn = "the target's choice is" if nodes[end].draw is not None else "drawn instead:"
    return f"refused {which}; {drawn} {token}"


def _odds(node: Node) -> str:
    if node.chance is None:
        return f" (p {node.p:.2g})"
    return f" (uniform {node.uniform:.2g}, accepted below {node.chance:.2g})"


def _ending(transcript: Transcript) -> str:
    if transcript.finish_reason == "length":
        return "; the limit of tokens is reached"
    if transcript.finish_reason == "error":
        return "; the text ends here, as no token may follow"
    if isinstance(transcript.stop_reason, str):
        return f"; the text ends before “{names.spaced(transcript.stop_reason)}”"
    return "; the text ends with a stop token"
