"""Conversations as text by a chat template, and the labels in it.

The labels are the assistant's turns, reasoning and tool calls included, with the token that ends
each turn. Marks in a template (``{% generation %}``) decide. Other templates render each turn
twice: the text up to the opening of the turn, and the text with the turn; the difference is the
turn.
"""

import dataclasses
import functools
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from training.data.messages import (
    REASONING,
    Message,
    is_learned,
    with_text_arguments,
    without_weights,
)
from training.data.records import Chat

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
_TRIED = 100  # records without effect, after which a key that the template does not name is unused

Messages = Sequence[Message]
Tools = Sequence[Mapping[str, Any]]
Example = tuple[Sequence[int], np.ndarray]  # ids [n]; bool [n], whether each is a label


@dataclasses.dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template and the tokenizer that reads its texts."""

    tokenizer: Any  # fast tokenizer of ``transformers``
    source: str  # Jinja

    @functools.cached_property
    def is_marked(self) -> bool:
        """True if the template marks the assistant's turns itself."""
        return _MARKS.search(self.source) is not None

    def prompt(self, messages: Messages, tools: Tools = ()) -> list[int]:
        """Return the token ids up to and including the opening of the assistant's next turn."""
        return self._encode(self._render(messages, tools, add_generation_prompt=True)).input_ids

    def examples(
        self,
        conversations: Sequence[Chat],
        refuse: Callable[[int, ValueError], None],
        ignore: Callable[[str], None] = lambda part: None,  # noqa: ARG005
    ) -> list[list[Example]]:
        """Return (token ids, labels) of each conversation.

        A conversation has one example, or one a turn of the assistant if later turns change the
        text of earlier ones (as in templates that drop earlier thoughts): then each turn follows
        the text that precedes it when it is served. ``refuse`` is called with the number of an
        unusable conversation, and the reason; ``ignore`` with each part of a conversation that
        changes no token.
        """
        examples: list[list[Example]] = [[] for _ in conversations]
        rendered = []
        for number, chat in enumerate(conversations):
            try:
                turns = _learned_turns(chat.messages)
                closed = [self._render(chat.messages[: turn + 1], chat.tools) for turn in turns]
                if self.is_marked:
                    examples[number] = self._by_marks(chat, turns, closed)
                else:
                    rendered += [(number, *part) for part in self._spans(chat, turns, closed)]
                for part in self._ignored(chat, turns, closed):
                    ignore(part)
            except ValueError as error:
                refuse(number, error)
        if rendered:
            encoded = self._encode([text for _, text, _ in rendered], return_offsets_mapping=True)
            pairs = zip(encoded.input_ids, encoded.offset_mapping, strict=True)
            for (number, text, spans), (ids, offsets) in zip(rendered, pairs, strict=True):
                examples[number].append((ids, self._labels(text, spans, ids, offsets)))
        return examples

    def _spans(
        self, chat: Chat, turns: Sequence[int], closed: Sequence[str]
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return (text, spans of the learned turns) of each example.

        ``closed`` are the texts up to the end of each turn.
        """
        spans = [
            (self._start(chat, turn, text), len(text))
            for turn, text in zip(turns, closed, strict=True)
        ]
        if _are_prefixes(closed):
            return [(closed[-1], spans)]
        return [(text, [span]) for text, span in zip(closed, spans, strict=True)]

    def _start(self, chat: Chat, turn: int, closed: str) -> int:
        """Return the start of a turn in the text up to its end."""
        opened = self._render(chat.messages[:turn], chat.tools, add_generation_prompt=True)
        if not closed.startswith(opened):
            raise ValueError(
                "the chat template does not continue its own generation prompt, so the assistant's "
                "turns cannot be found; give --chat-template a template with {% generation %} marks"
            )
        return len(opened)

    def _by_marks(self, chat: Chat, turns: Sequence[int], closed: Sequence[str]) -> list[Example]:
        """Return the examples of a template with marks; ``closed`` as in ``_spans``."""
        if _are_prefixes(closed):
            return [self._marked(chat, turns[-1], turns)]
        return [self._marked(chat, turn, [turn]) for turn in turns]

    def _marked(self, chat: Chat, last: int, turns: Sequence[int]) -> Example:
        """Return the text up to message ``last``; only marks inside ``turns`` are labels."""
        ids, learned = self._marks(chat, last + 1)
        every = [i for i in range(last + 1) if chat.messages[i]["role"] == "assistant"]
        if list(turns) != every:
            runs = _runs(learned)
            picked = np.zeros(len(learned), bool)
            for turn in turns:
                before = _runs(self._marks(chat, turn)[1]).max(initial=0)
                after = _runs(self._marks(chat, turn + 1)[1]).max(initial=0)
                picked |= (runs > before) & (runs <= after)
            learned &= picked
        if not learned.any():
            raise ValueError("the chat template's {% generation %} marks hold nothing of it")
        return ids, learned

    def _marks(self, chat: Chat, count: int) -> Example:
        """Return the ids of the first ``count`` messages, and which of them are marked."""
        if not count:
            return [], np.zeros(0, bool)
        encoded = self._render(
            chat.messages[:count],
            chat.tools,
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
        )
        return encoded["input_ids"], np.array(encoded["assistant_masks"], bool)

    def _labels(
        self, text: str, spans: Sequence[tuple[int, int]], ids: list[int], offsets: Sequence
    ) -> np.ndarray:
        """Return bool [n]: tokens inside a span, up to the token that ends the turn."""
        learned = np.zeros(len(ids), bool)
        begins, ends = np.array(offsets).reshape(-1, 2).T
        for start, end in spans:
            inside = np.flatnonzero((begins >= start) & (ends <= end))
            count = len(inside)
            # The template writes space behind the end of the turn, which no model emits.
            while count and ids[last := inside[count - 1]] not in self._special:
                if text[begins[last] : ends[last]].strip():
                    count = 0  # the turn ends in a text of its own
                    break
                count -= 1
            learned[inside[: count or len(inside)]] = True
        return learned

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(i for i, token in added if token.special)

    def _ignored(self, chat: Chat, turns: Sequence[int], closed: Sequence[str]) -> Iterator[str]:
        """Yield the parts of a conversation that change no token; ``closed`` as in ``_spans``."""
        messages = chat.messages[: turns[-1] + 1]
        if len(messages) < len(chat.messages):
            yield "messages behind the last learned answer"
        for name in ("content", *REASONING):
            pairs = zip(turns, closed, strict=True)
            if any(messages[turn].get(name, "").strip() not in text for turn, text in pairs):
                yield f"{name!r} of answers, which the chat template changes"
        names = {name for message in messages for name in message} - {"role", "content", "weight"}
        for name in sorted(names):
            same = REASONING if name in REASONING else (name,)
            fewer = [{k: v for k, v in each.items() if k not in same} for each in messages]
            if not self._has_effect(name, turns, closed, fewer, chat.tools):
                yield f"the key {name!r} of messages"
        if chat.tools and not self._has_effect("tools", turns, closed, messages, ()):
            yield "the key 'tools'"

    def _has_effect(
        self,
        name: str,
        turns: Sequence[int],
        closed: Sequence[str],
        messages: Messages,
        tools: Tools,
    ) -> bool:
        """Return whether a key changed the text of this record or one before.

        ``messages`` and ``tools`` are without the key, ``closed`` is as in ``_spans``, with it.
        """
        if name in self._effective:
            return True
        if self._tried[name] < _TRIED or name in self.source:
            self._tried[name] += 1
            try:
                texts = [self._render(messages[: turn + 1], tools) for turn in turns]
            except ValueError:
                texts = []
            if texts != closed:
                self._effective.add(name)
        return name in self._effective

    @functools.cached_property
    def _effective(self) -> set[str]:
        """Keys that changed the text of a record."""
        return set()

    @functools.cached_property
    def _tried(self) -> Counter[str]:
        """Records in which a key had no effect."""
        return Counter()

    def _render(
        self, messages: Messages, tools: Tools = (), tokenize: bool = False, **options: Any
    ) -> Any:
        messages = without_weights(messages)
        render = functools.partial(
            self.tokenizer.apply_chat_template,
            chat_template=self.source,
            tools=list(tools) or None,
            tokenize=tokenize,
            **options,
        )
        try:
            return render(messages)
        except Exception as error:  # an error of Jinja, or one that the template raises
            reason = " ".join(str(error).split())[:300]
        if any("tool_calls" in message for message in messages):
            try:
                return render(with_text_arguments(messages))
            except Exception:
                pass
        raise ValueError(f"the chat template refuses it: {reason}")

    def _encode(self, text: str | list[str], **options: Any) -> Any:
        # The template has written the special tokens.
        return self.tokenizer(text, add_special_tokens=False, verbose=False, **options)


def _learned_turns(messages: Messages) -> list[int]:
    """Return the indices of the answers that are learned."""
    answers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not answers:
        raise ValueError("the assistant says nothing in it: there is nothing to learn")
    turns = [i for i in answers if is_learned(messages[i])]
    if not turns:
        raise ValueError("all answers have 'weight' 0: there is nothing to learn")
    if turns[0] == 0:
        raise ValueError("the assistant speaks first, where no template can prompt it")
    return turns


def _are_prefixes(texts: Sequence[str]) -> bool:
    """Return whether the last text begins with each of the others."""
    return all(texts[-1].startswith(text) for text in texts)


def _runs(marks: np.ndarray) -> np.ndarray:
    """Return int [n]: the number of the run of marked tokens, from 1 on; 0 for other tokens."""
    return np.cumsum(np.diff(marks, prepend=False) & marks) * marks


def open_template(tokenizer: Any, path: str = "") -> ChatTemplate:
    """Return the template in file ``path``, or the tokenizer's own.

    Raises:
      ValueError: there is none, or the tokenizer gives no offsets of its tokens.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is no fast tokenizer and gives no offsets of its tokens; "
            "save it with a tokenizer.json"
        )
    source = template_source(tokenizer, path)
    if not source:
        raise ValueError(
            "the data are conversations, but the tokenizer has no chat template; give one with "
            "--chat-template FILE (Jinja), or give plain text"
        )
    return ChatTemplate(tokenizer, source)


def template_source(tokenizer: Any, path: str = "") -> str:
    """Return the Jinja of file ``path``, or the tokenizer's own; "" if it has none."""
    if path:
        if not Path(path).is_file():
            raise ValueError(f"--chat-template {path!r} is no file; give one that holds Jinja")
        try:
            return Path(path).read_text(encoding="utf-8-sig")
        except UnicodeDecodeError as error:
            reason = f"it is no UTF-8 ({error.reason}); save it as UTF-8"
            raise ValueError(f"--chat-template {path!r} cannot be read: {reason}") from None
    return tokenizer.get_chat_template() if tokenizer.chat_template else ""
