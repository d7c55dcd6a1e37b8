"""A generation as a value: its rounds, their nodes with probabilities, and where tokens came from.

Plain Python on the host, for notebooks and tests; shown by ``terminal`` and ``page``.
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
from jspec.tools.trace.recording import Seen

# Where a token came from. The target's own is a bonus where all of a path was accepted, corrected
# where children were refused, plain where nothing was drafted.
Source = Literal["drafted", "bonus", "corrected", "plain"]
# What became of a node. "unsaid": accepted, but the text had ended before. "not taken": off the
# path that a rule chose among whole paths, whether it would have passed or not.
Fate = Literal["accepted", "refused", "not reached", "not taken", "unsaid"]
# Why a round stopped: "ended" where the text did so within the draft, "lost" where the target gave
# no token any weight.
Why = Literal["refused", "leaf", "no draft", "ended", "lost"]


@dataclasses.dataclass(frozen=True)
class Node:
    """A drafted token; or the root of a round, the last token of the text before it.

    Attributes:
      index: of the node among its round's.
      parent: index; -1 of the root.
      depth: edges below the root.
      token: id.
      label: its text on one line, as ``names.label``.
      fate: what became of it.
      p: its probability by the target's warped law behind the parent; at temperature 0 by that of
        temperature 1. None of the root, and where the target gives no token any weight.
      q: the probability that it was drawn with, given the siblings drawn before it; None of the
        root and of a point mass, which was chosen without chance.
      chance: min(1, p / q) when rejection sampling judged it, p being what the refusal of siblings
        had left of the target's law. None where no such coin decided.
      coin: the uniform that it was judged by: accepted where it is below ``chance``. None under
        rules that toss no coins.
      draw: what the target itself draws behind this node, under rules that compare with that, and
        at temperature 0. None under others.
      likeliest: (token, label, p) of the target's three likeliest tokens behind this node.
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
    """A token of the answer.

    Attributes:
      token: id.
      label: as ``Node.label``.
      text: what it added to the text: "" for a part of a character, and for what ended the text.
      source: where it came from.
      p: its probability by the target's law, as ``Node.p``.
      node: index of the drafted node in its round; None of the target's own.
    """

    token: int
    label: str
    text: str
    source: Source
    p: float
    node: int | None


@dataclasses.dataclass(frozen=True)
class Round:
    """One pass of the target.

    Attributes:
      index: from 0.
      position: of the root, in prompt and answer together.
      nodes: the root and every valid node of the draft, parents before children.
      pieces: the tokens that it added to the text.
      why: it stopped.
      words: why, in a sentence.
    """

    index: int
    position: int
    nodes: tuple[Node, ...]
    pieces: tuple[Piece, ...]
    why: Why
    words: str

    @property
    def num_accepted(self) -> int:
        """Drafted tokens that it added."""
        return sum(piece.source == "drafted" for piece in self.pieces)

    @property
    def end(self) -> int:
        """Index of the last node whose token was said."""
        return max((piece.node for piece in self.pieces if piece.node is not None), default=0)


@dataclasses.dataclass(frozen=True)
class Trace:
    """What happened in a generation. Made by ``jspec.trace``.

    Attributes:
      prompt: text; None where token ids were given.
      prompt_token_ids: of the prompt.
      rounds: passes of the target, in order.
      finish_reason: as in ``CompletionOutput``.
      stop_reason: as in ``CompletionOutput``.
      counts: what was drafted and accepted.
      setting: model, drafter, rule and temperature, as they are shown.
    """

    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    rounds: tuple[Round, ...]
    finish_reason: str
    stop_reason: int | str | None
    counts: Counts
    setting: dict[str, str]

    @property
    def pieces(self) -> Iterator[Piece]:
        """The answer's tokens, in order."""
        return (piece for round_ in self.rounds for piece in round_.pieces)

    @property
    def token_ids(self) -> list[int]:
        """The answer's, as ``CompletionOutput.token_ids``."""
        return [piece.token for piece in self.pieces]

    @property
    def text(self) -> str:
        """The answer's, as ``CompletionOutput.text``; token ids where no text is made."""
        return "".join(piece.text for piece in self.pieces)


def trace_of(
    seen: Sequence[Seen],
    transcript: Transcript,
    tokenizer: Any,
    prompt: str | None,
    prompt_token_ids: Sequence[int],
    setting: dict[str, str],
    *,
    rule: str,
    skip_special_tokens: bool = True,
) -> Trace:
    """The value of a generation that ``recording.record`` has run.

    ``rule`` is the name of the one that was asked for; ``tokenizer`` None: no text.
    """
    tokens = transcript.answer.tokens.tolist()
    texts = _texts(tokens, transcript.text, tokenizer, prompt_token_ids, skip_special_tokens)
    rounds, done = [], 0
    for index, one in enumerate(seen):
        last = index == len(seen) - 1
        count = len(tokens) - done if last else int(one.num_emitted)
        rounds.append(
            _round(
                index,
                len(prompt_token_ids) + done - 1,
                one,
                rule,
                tokens[done : done + count],
                texts[done : done + count],
                tokenizer,
                transcript if last else None,
            )
        )
        done += count
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
    """What each token added to the text, which may have been cut where it ended."""
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
    seen: Seen,
    rule: str,
    said: Sequence[int],
    texts: Sequence[str],
    tokenizer: Any,
    transcript: Transcript | None,
) -> Round:
    """One round; ``transcript`` is given with the last."""
    places = np.flatnonzero(seen.valid)
    number = {int(place): index for index, place in enumerate(places)}
    path = [number[int(place)] for place in seen.path[: seen.num_emitted]]
    nodes = _nodes(seen, rule, places, number, path, len(said), tokenizer)
    has_children = any(node.parent == path[-1] for node in nodes[1:])
    why: Why = "refused" if has_children else "leaf" if len(nodes) > 1 else "no draft"
    if len(said) < len(path):
        lost = transcript is not None and transcript.finish_reason == "error"
        why = "lost" if lost else "ended"
    own: Source = {"refused": "corrected", "leaf": "bonus"}.get(why, "plain")
    pieces = []
    for place, (token, text) in enumerate(zip(said, texts, strict=True)):
        name = names.label(tokenizer, token)
        if place + 1 < len(path):
            node = path[place + 1]
            pieces.append(Piece(token, name, text, "drafted", nodes[node].p, node))
        else:
            pieces.append(Piece(token, name, text, own, float(seen.next_p), None))
    words = _words(why, nodes, path[-1], pieces)
    if transcript is not None:
        words += _ending(transcript)
    return Round(index, position, nodes, tuple(pieces), why, words)


def _nodes(
    seen: Seen,
    rule: str,
    places: np.ndarray,
    number: dict[int, int],
    path: list[int],
    num_said: int,
    tokenizer: Any,
) -> tuple[Node, ...]:
    nodes: list[Node] = []
    number_or_none = lambda x: None if np.isnan(x) else float(x)
    parents = [-1] + [number[int(parent)] for parent in seen.parents[places][1:]]
    fates = _fates(seen, rule, places, parents, path, num_said)
    for index, place in enumerate(places):
        parent = parents[index]
        nodes.append(
            Node(
                index=index,
                parent=parent,
                depth=nodes[parent].depth + 1 if index else 0,
                token=int(seen.tokens[place]),
                label=names.label(tokenizer, int(seen.tokens[place])),
                fate=fates[index],
                p=number_or_none(seen.p[place]) if index else None,
                q=number_or_none(seen.q[place]) if index else None,
                chance=number_or_none(seen.chance[place]) if index else None,
                uniform=number_or_none(seen.uniforms[place]) if index else None,
                draw=int(seen.draws[place]) if seen.draws[place] >= 0 else None,
                likeliest=tuple(
                    (int(token), names.label(tokenizer, int(token)), float(p))
                    for token, p in zip(seen.likeliest[place], seen.likeliest_p[place], strict=True)
                    if not np.isnan(p)
                ),
            )
        )
    return tuple(nodes)


def _fates(
    seen: Seen, rule: str, places: np.ndarray, parents: list[int], path: list[int], num_said: int
) -> list[Fate]:
    """What became of every node, by how the rule goes about it."""
    nodes, others = range(1, len(places)), "not reached"
    if seen.draws[places[0]] >= 0:  # every child of the path is compared with what is drawn there
        refused = [node for node in nodes if parents[node] in path]
    elif not np.isnan(seen.chance[places]).all():
        refused = np.flatnonzero(~np.isnan(seen.chance[places])).tolist()
    elif rule == "block":
        order = _post_order(parents, np.isnan(seen.q[places]))
        refused = order[: order.index(path[-1])]
    else:  # a path was chosen among all, and none leads further down
        refused, others = [node for node in nodes if parents[node] == path[-1]], "not taken"
    fates: list[Fate] = [others] * len(places)
    for node in refused:
        fates[node] = "refused"
    for depth, node in enumerate(path):
        fates[node] = "accepted" if depth <= num_said else "unsaid"
    return fates


def _post_order(parents: list[int], is_point: np.ndarray) -> list[int]:
    """The nodes as ``jspec.verify.block`` judges them: siblings that were drawn before others."""
    children: list[list[int]] = [[] for _ in parents]
    for node in sorted(range(1, len(parents)), key=lambda node: (is_point[node], node)):
        children[parents[node]].append(node)
    walk = lambda node: [*itertools.chain(*map(walk, children[node])), node]
    return walk(0)


def _words(why: Why, nodes: Sequence[Node], end: int, pieces: Sequence[Piece]) -> str:
    """Why a round stopped, in a sentence."""
    if why == "lost":
        return "the target gives no token any weight here"
    last = pieces[-1]
    if why == "ended":
        return f"the text ends with the drafted “{last.label}”"
    own = f"“{last.label}” (p {last.p:.2g})"
    if why == "no draft":
        return f"nothing was drafted; the target's own is {own}"
    if why == "leaf":
        return f"all was accepted down to a leaf; the bonus is {own}"
    refused = [node for node in nodes if node.parent == end and node.index]
    which = ", ".join(f"“{node.label}”{_odds(node)}" for node in refused[:3])
    which += f" and {len(refused) - 3} more" if len(refused) > 3 else ""
    drawn = "the target's choice is" if nodes[end].draw is not None else "drawn instead:"
    return f"refused {which}; {drawn} {own}"


def _odds(node: Node) -> str:
    """The coin and the chance that it had to stay below."""
    if node.chance is None:
        return f" (p {node.p:.2g})"
    return f" (coin {node.uniform:.2g}, accepted below {node.chance:.2g})"


def _ending(transcript: Transcript) -> str:
    """Why the text ended in its last round."""
    if transcript.finish_reason == "length":
        return "; the limit of tokens is reached"
    if transcript.finish_reason == "error":
        return "; the text ends here, as no token may follow"
    if isinstance(transcript.stop_reason, str):
        return f"; the text ends before “{names.spaced(transcript.stop_reason)}”"
    return "; the text ends with a stop token"
