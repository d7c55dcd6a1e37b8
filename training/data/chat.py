"""Conversations as text by a chat template, and the labels in it.

The labels are the assistant's turns, with the token that ends each turn. Marks in a template
(``{% generation %}``) decide. Other templates render each turn twice: the text up to the opening of
the turn, and the text with the turn; the difference is the turn.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = Sequence[Mapping[str, str]]
Example = tuple[Sequence[int], np.ndarray]  # ids [n]; bool [n], whether each is a label


@dataclasses.dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template and the tokenizer that reads its texts."""

    tokenizer: Any  # of ``transformers``, a fast one
    source: str  # Jinja

    @functools.cached_property
    def is_marked(self) -> bool:
        """True if the template marks the assistant's turns itself."""
        return _MARKS.search(self.source) is not None

    def prompt(self, messages: Messages) -> list[int]:
        """Return the token ids up to and including the opening of the assistant's next turn."""
        return self._encode(self._render(messages, add_generation_prompt=True)).input_ids

    def examples(
        self, conversations: Sequence[Messages], refuse: Callable[[int, ValueError], None]
    ) -> list[list[Example]]:
        """Return (token ids, labels) of each conversation.

        A conversation has one example, or one a turn of the assistant if later turns change the
        text of earlier ones (as in templates that drop earlier thoughts): then each turn follows
        the text that precedes it when it is served. ``refuse`` is called with the number of an
        unusable conversation, and the reason.
        """
        examples: list[list[Example]] = [[] for _ in conversations]
        rendered = []
        for number, messages in enumerate(conversations):
            try:
                messages, turns = _up_to_last_answer(messages)
                if self.is_marked:
                    examples[number] = [self._by_marks(messages)]
                else:
                    rendered += [(number, *part) for part in self._spans(messages, turns)]
            except ValueError as error:
                refuse(number, error)
        if rendered:
            encoded = self._encode([text for _, text, _ in rendered], return_offsets_mapping=True)
            pairs = zip(encoded.input_ids, encoded.offset_mapping, strict=True)
            for (number, text, spans), (ids, offsets) in zip(rendered, pairs, strict=True):
                examples[number].append((ids, self._labels(text, spans, ids, offsets)))
        return examples

    def _spans(
        self, messages: Messages, turns: Sequence[int]
    ) -> list[tuple[str, list[tuple[int, int]]]]:
        """Return (text, spans of the assistant's turns) of each example."""
        spans = [self._span(messages, turn) for turn in turns]
        text = spans[-1][0]
        if all(text.startswith(closed) for closed, _ in spans):
            return [(text, [(start, len(closed)) for closed, start in spans])]
        return [(closed, [(start, len(closed))]) for closed, start in spans]

    def _span(self, messages: Messages, turn: int) -> tuple[str, int]:
        """Return the text up to the end of a turn, and the turn's start in it."""
        opened = self._render(messages[:turn], add_generation_prompt=True)
        closed = self._render(messages[: turn + 1])
        if not closed.startswith(opened):
            raise ValueError(
                "the chat template does not continue its own generation prompt, so the assistant's "
                "turns cannot be found; give --chat-template a template with {% generation %} marks"
            )
        return closed, len(opened)

    def _by_marks(self, messages: Messages) -> Example:
        encoded = self._render(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        learned = np.array(encoded["assistant_masks"], bool)
        if not learned.any():
            raise ValueError("the chat template's {% generation %} marks hold nothing of it")
        return encoded["input_ids"], learned

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

    def _render(self, messages: Messages, tokenize: bool = False, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.source, tokenize=tokenize, **options
            )
        except Exception as error:  # of Jinja, or raised by the template
            reason = " ".join(str(error).split())[:300]
            raise ValueError(f"the chat template refuses it: {reason}") from None

    def _encode(self, text: str | list[str], **options: Any) -> Any:
        # The template has written the special tokens.
        return self.tokenizer(text, add_special_tokens=False, verbose=False, **options)


def _up_to_last_answer(messages: Messages) -> tuple[Messages, list[int]]:
    """Return the messages up to the last answer, and the indices of the assistant's."""
    turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not turns:
        raise ValueError("the assistant says nothing in it: there is nothing to learn")
    if turns[0] == 0:
        raise ValueError("the assistant speaks first, where no template can prompt it")
    return messages[: turns[-1] + 1], turns


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
        return Path(path).read_text(encoding="utf-8")
    return tokenizer.get_chat_template() if tokenizer.chat_template else ""
