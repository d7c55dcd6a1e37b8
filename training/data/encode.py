"""Records to token ids and labels."""

import dataclasses
import functools
import hashlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from training.data import chat
from training.data.ledger import Ledger
from training.data.records import Chat, Record, Text, Tokens, hash_64

_VERSION = 2  # raise it with every change of the tokens of a record


@dataclasses.dataclass(frozen=True)
class Encoded:
    """One document."""

    ids: np.ndarray  # int64 [n], at least two
    learned: np.ndarray  # bool [n], whether a token is a label; at least one is
    group: int  # see ``records.Text.group``.

    @property
    def prompt(self) -> int:
        """64 bits of the tokens before the first label, on which acceptance is measured.

        A document with fewer than two of them has no prompt; then it is ``group``.
        """
        first = int(self.learned.argmax())
        return hash_64(repr(self.ids[:first].tolist())) if first > 1 else self.group


@dataclasses.dataclass(frozen=True, eq=False)
class Encoder:
    """A tokenizer, and all that decides the tokens of a record."""

    tokenizer: Any  # tokenizer of ``transformers``
    vocab_size: int  # size of the embedding of the model that reads the tokens
    chat_template: str = ""  # file of a template; "" for the tokenizer's own

    @functools.cached_property
    def template(self) -> chat.ChatTemplate:
        """The chat template, opened at the first conversation; ValueError if there is none."""
        return chat.open_template(self.tokenizer, self.chat_template)

    @functools.cached_property
    def digest(self) -> str:
        """A hash of everything that decides the tokens of a record."""
        has_template = self.chat_template or self.tokenizer.chat_template
        facts = (
            _VERSION,
            vocabulary_digest(self.tokenizer),
            self.vocab_size,
            self.tokenizer.backend_tokenizer.to_str() if self.tokenizer.is_fast else "",
            self.tokenizer.special_tokens_map,
            self.template.source if has_template else "",
        )
        return hashlib.sha256(json.dumps(facts, default=str).encode()).hexdigest()

    def encode(self, records: Sequence[Record], ledger: Ledger) -> Iterator[Encoded]:
        """Yield the documents of the records, in order; a record may have none or several.

        Raises:
          ValueError: there are too many bad lines, or conversations and no chat template.
        """
        made: dict[int, list[chat.Example]] = {}
        for kind, examples in ((Text, self._texts), (Chat, self._chats), (Tokens, self._tokens)):
            numbers = [i for i, record in enumerate(records) if isinstance(record, kind)]
            chosen = [records[i] for i in numbers]
            made |= zip(numbers, examples(chosen, ledger) if chosen else (), strict=True)
        for number, record in enumerate(records):
            try:
                documents = [self._checked(*example, record.group) for example in made[number]]
            except ValueError as error:
                ledger.refuse(record.where, error)
                continue
            ledger.source.records += bool(documents)
            yield from documents

    def _checked(self, ids: Sequence[int], learned: Sequence[bool], group: int) -> Encoded:
        ids, learned = np.array(ids), np.array(learned, bool)
        if len(ids) < 2:
            raise ValueError("is a single token: nothing predicts it, and it predicts nothing")
        if not learned[1:].any():
            raise ValueError("holds nothing to learn")
        if ids.max() >= self.vocab_size:
            raise ValueError(
                f"holds token id {ids.max()}, outside the model's vocabulary of "
                f"{self.vocab_size}; was it made by another tokenizer?"
            )
        return Encoded(ids, learned, group)

    def _tokens(self, records: list[Tokens], _: Ledger) -> list[list[chat.Example]]:
        return [
            [((*r.prompt, *r.answer), [False] * len(r.prompt) + [True] * len(r.answer))]
            for r in records
        ]

    def _chats(self, records: list[Chat], ledger: Ledger) -> list[list[chat.Example]]:
        return self.template.examples(
            records,
            refuse=lambda number, reason: ledger.refuse(records[number].where, reason),
            ignore=lambda part: ledger.source.unused.update([part]),
        )

    def _texts(self, records: list[Text], _: Ledger) -> list[list[chat.Example]]:
        ids: list[list[int]] = [[]] * len(records)
        for begins in (True, False):
            chosen = [i for i, record in enumerate(records) if record.begins == begins]
            if chosen:
                texts = [records[i].text for i in chosen]
                made = self.tokenizer(texts, add_special_tokens=begins, verbose=False).input_ids
                for i, tokens in zip(chosen, made, strict=True):
                    ids[i] = tokens
        end = self.tokenizer.eos_token_id
        for record, tokens in zip(records, ids, strict=True):
            if record.ends and end is not None and tokens[-1:] != [end]:
                tokens.append(end)
        return [[(tokens, [True] * len(tokens))] for tokens in ids]


def vocabulary_digest(tokenizer: Any) -> str:
    """Return a hash of the tokens and their ids; equal hashes mean equal ids."""
    vocabulary = sorted(tokenizer.get_vocab().items(), key=lambda item: (item[1], item[0]))
    return hashlib.sha256(json.dumps(vocabulary).encode()).hexdigest()
