"""Conversations as the model sees them: the chat template's text, and what of it is learned.

What the assistant says is learned, to the token that ends its turn. Where a template marks it
(``{% generation %}``) the marks decide. Elsewhere the template is asked twice a turn, for the text
up to the opening of the turn and for the text with the turn: what the second adds is the turn.
"""

import dataclasses
import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")

Messages = Sequence[Mapping[str, str]]


@dataclasses.dataclass(frozen=True, eq=False)
class ChatTemplate:
    """A template and the tokenizer that reads its texts.

    Attributes:
      tokenizer: of ``transformers``, a fast one.
      source: Jinja.
    """

    tokenizer: Any
    source: str

    @functools.cached_property
    def is_marked(self) -> bool:
        """Whether the template itself says what the assistant generates."""
        return _MARKS.search(self.source) is not None

    def prompt(self, messages: Messages) -> list[int]:
        """Token ids up to and with the opening of the assistant's next turn."""
        return self._encode(self._render(messages, add_generation_prompt=True)).input_ids

    def examples(self, messages: Messages) -> list[tuple[list[int], list[bool]]]:
        """(token ids, whether each is learned) of a conversation.

        One example, or one a turn of the assistant where the template writes earlier turns
        otherwise once later ones follow (as those do that drop earlier thoughts): each turn is
        then learned behind the very text that will stand before it.

        Raises:
          ValueError: nothing is said by the assistant, or the template does not take the messages.
        """
        turns = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
        if not turns:
            raise ValueError("the assistant says nothing in it: there is nothing to learn")
        if turns[0] == 0:
            raise ValueError("the assistant speaks first, where no template can prompt it")
        messages = messages[: turns[-1] + 1]
        if self.is_marked:
            return [self._by_marks(messages)]
        spans = [self._span(messages, turn) for turn in turns]
        whole = spans[-1][0]
        if all(whole.startswith(closed) for closed, _ in spans):
            return [self._by_spans(whole, [(start, len(closed)) for closed, start in spans])]
        return [self._by_spans(closed, [(start, len(closed))]) for closed, start in spans]

    def _span(self, messages: Messages, turn: int) -> tuple[str, int]:
        """The text up to the end of a turn, and where in it the turn begins."""
        opened = self._render(messages[:turn], add_generation_prompt=True)
        closed = self._render(messages[: turn + 1])
        if not closed.startswith(opened):
            raise ValueError(
                "the chat template does not continue its own generation prompt, so what the "
                "assistant says cannot be told from the rest; give --chat-template a template "
                "with {% generation %} marks"
            )
        return closed, len(opened)

    def _by_marks(self, messages: Messages) -> tuple[list[int], list[bool]]:
        encoded = self._render(
            messages, tokenize=True, return_dict=True, return_assistant_tokens_mask=True
        )
        learned = [bool(mark) for mark in encoded["assistant_masks"]]
        if not any(learned):
            raise ValueError("the chat template's {% generation %} marks hold nothing of it")
        return encoded["input_ids"], learned

    def _by_spans(
        self, text: str, spans: Sequence[tuple[int, int]]
    ) -> tuple[list[int], list[bool]]:
        encoded = self._encode(text, return_offsets_mapping=True)
        ids, offsets = encoded.input_ids, encoded.offset_mapping
        learned = [False] * len(ids)
        for start, end in spans:
            inside = [i for i, (a, b) in enumerate(offsets) if start <= a and b <= end]
            for i in inside[: self._to_end_of_turn([(ids[i], text[slice(*offsets[i])])
                                                    for i in inside])]:  # fmt: skip
                learned[i] = True
        return ids, learned

    def _to_end_of_turn(self, tokens: list[tuple[int, str]]) -> int:
        """How many of a turn's tokens the model emits: not the template's space behind its end."""
        count = len(tokens)
        while count and tokens[count - 1][0] not in self._special:
            if tokens[count - 1][1].strip():
                return len(tokens)  # the turn ends in text of its own
            count -= 1
        return count or len(tokens)

    @functools.cached_property
    def _special(self) -> frozenset[int]:
        added = self.tokenizer.added_tokens_decoder.items()
        return frozenset(i for i, token in added if token.special)

    def _render(self, messages: Messages, tokenize: bool = False, **options: Any) -> Any:
        try:
            return self.tokenizer.apply_chat_template(
                list(messages), chat_template=self.source, tokenize=tokenize, **options
            )
        except Exception as error:  # of Jinja, or the template's own complaint
            reason = " ".join(str(error).split())
            raise ValueError(f"the chat template refuses it: {reason}") from None

    def _encode(self, text: str, **options: Any) -> Any:
        # The template has written the special tokens already.
        return self.tokenizer(text, add_special_tokens=False, verbose=False, **options)


def open_template(tokenizer: Any, path: str = "") -> ChatTemplate:
    """The template in file ``path``, or the tokenizer's own.

    Raises:
      ValueError: there is none, or the tokenizer cannot say where its tokens lie.
    """
    if not tokenizer.is_fast:
        raise ValueError(
            f"{type(tokenizer).__name__} is no fast tokenizer, and cannot say where in a text its "
            "tokens lie; save it with a tokenizer.json"
        )
    if path:
        if not Path(path).is_file():
            raise ValueError(f"--chat-template {path!r} is no file; give one that holds Jinja")
        return ChatTemplate(tokenizer, Path(path).read_text(encoding="utf-8"))
    if not tokenizer.chat_template:
        raise ValueError(
            "the data are conversations, but the tokenizer has no chat template; give one with "
            "--chat-template FILE (Jinja), or give plain text"
        )
    return ChatTemplate(tokenizer, tokenizer.get_chat_template())
