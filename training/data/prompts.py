"""Prompts for the target: texts to continue, conversations to answer."""

import dataclasses
import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from training.data.chat import Messages, Tools
from training.data.encode import Encoder
from training.data.files import Source
from training.data.ledger import Ledger
from training.data.records import Chat, Record, Text, Tokens, hash_64


@dataclasses.dataclass(frozen=True)
class Prompt:
    """One conversation or text."""

    where: str  # file and line
    key: str  # a hash of the prompt, with a hyphen and a number if it was asked before
    token_ids: tuple[int, ...] = ()  # tokens of a text; () for a conversation
    # Messages of a conversation before each answer of the target, without the answers; one empty
    # turn for a text.
    turns: tuple[Messages, ...] = ((),)
    tools: Tools = ()  # tools of a conversation
    length: int = 0  # tokens before the first answer

    def messages(self, answers: Sequence[str]) -> list[dict]:
        """Return the conversation up to the user's newest message, given the answers before it."""
        messages = list(self.turns[0])
        for answer, turn in zip(answers, self.turns[1:], strict=False):
            messages += [{"role": "assistant", "content": answer}, *turn]
        return messages

    def encoded(self, answers: Sequence[str], encoder: Encoder) -> tuple[int, ...]:
        """Return the token ids before the next answer; ValueError if the template refuses."""
        return self.token_ids or tuple(encoder.template.prompt(self.messages(answers), self.tools))


def read_prompts(
    sources: Sequence[Source],
    encoder: Encoder,
    ledger: Ledger,
    *,
    max_positions: int,
    every_turn: bool = False,
    prompt_tokens: int = 0,
    stride: int = 0,
) -> list[Prompt]:
    """Return the prompts of all sources, in their order; ``ledger`` counts unusable ones.

    A prompt must leave room for one token in the target's ``max_positions``. ``every_turn`` answers
    every message of the user and replaces the assistant's; else they stay, except the last answer.
    Prompts of ``prompt_tokens`` are cut from a text every ``stride`` tokens; 0 takes a text whole.

    Raises:
      ValueError: there are too many bad lines, no prompts, or conversations and no chat template.
    """
    seen: Counter[str] = Counter()
    prompts = []
    for source in sources:
        ledger.open(source.name)
        for _, record in source.read(ledger):
            if isinstance(record, Chat):
                encoder.template  # noqa: B018  a missing template is no fault of a line
            try:
                of_record = list(_of_record(record, encoder, every_turn, prompt_tokens, stride))
                lengths = [_length(prompt, encoder, max_positions) for prompt in of_record]
            except ValueError as error:
                ledger.refuse(record.where, error)
                continue
            for prompt, length in zip(of_record, lengths, strict=True):
                key = f"{prompt.key}-{seen[prompt.key]}" if seen[prompt.key] else prompt.key
                seen[prompt.key] += 1
                prompts.append(dataclasses.replace(prompt, key=key, length=length))
    if not prompts:
        raise ValueError("the prompts hold nothing to ask; give other files")
    ledger.print_unused()
    return prompts


def _of_record(
    record: Record, encoder: Encoder, every_turn: bool, prompt_tokens: int, stride: int
) -> Iterator[Prompt]:
    if isinstance(record, Chat):
        turns = _every_turn(record.messages) if every_turn else [_last_turn(record.messages)]
        asked = [turns, record.tools] if record.tools else turns
        key = f"{hash_64(json.dumps(asked)):016x}"
        yield Prompt(record.where, key, turns=tuple(turns), tools=record.tools)
        return
    if isinstance(record, Tokens):
        parts: Iterable[Sequence[int]] = [record.prompt]
        if not record.prompt:
            raise ValueError("has no prompt_token_ids")
    else:
        parts = _parts(record, encoder, prompt_tokens, stride)
    for ids in parts:
        yield Prompt(record.where, f"{hash_64(json.dumps(list(ids))):016x}", tuple(ids))


def _parts(
    record: Text, encoder: Encoder, prompt_tokens: int, stride: int
) -> Iterable[Sequence[int]]:
    ids = encoder.tokenizer(record.text, add_special_tokens=record.begins, verbose=False).input_ids
    if not prompt_tokens:
        return [ids]
    # A text shorter than a prompt is a prompt; the rest of a longer text is dropped.
    starts = range(0, max(len(ids) - prompt_tokens, 0) + 1, stride)
    return [ids[start : start + prompt_tokens] for start in starts]


def _last_turn(messages: Messages) -> Messages:
    """Return the messages before the assistant's last, or missing, answer."""
    if messages[-1]["role"] == "assistant":
        messages = messages[:-1]
    for before, after in itertools.pairwise(messages):
        if before["role"] == after["role"] == "user":
            raise ValueError(
                "the user speaks twice in a row: an answer is missing between; give --every-turn"
            )
    if not messages or messages[-1]["role"] not in ("user", "tool"):
        raise ValueError("no message of the user leads to an answer")
    return messages


def _every_turn(messages: Messages) -> list[Messages]:
    """Return the messages before each answer, without the assistant's."""
    if any(message["role"] == "tool" for message in messages):
        raise ValueError(
            "holds results of tools, which new answers may not call for; leave --every-turn out"
        )
    turns: list[Messages] = []
    waiting: list = []
    for message in messages:
        if message["role"] != "assistant":
            waiting.append(message)
        if message["role"] == "user":
            turns.append(tuple(waiting))
            waiting = []
    if not turns:
        raise ValueError("the user says nothing in it")
    return turns


def _length(prompt: Prompt, encoder: Encoder, max_positions: int) -> int:
    length = len(prompt.encoded((), encoder))
    if length >= max_positions:
        raise ValueError(
            f"the prompt has {length} tokens, but the target has {max_positions} positions; "
            "shorten it (texts: with --prompt-tokens)"
        )
    return length
