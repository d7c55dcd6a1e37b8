"""Records of training data, one a line: a text, a conversation, or tokens.

Every accepted spelling is listed here; a line that can be read in two ways is refused.
"""

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.util.messages import shown
from jspec.util.values import is_whole
from training.data.messages import Message, is_learned, read_message, read_tools

FORMATS = ("auto", "text", "chat", "tokens")

TURNS = ("messages", "conversations", "conversation")
# A question and its answer, by the names of public datasets.
PAIRS = (
    *(("prompt", "response"), ("prompt", "completion")),
    *(("question", "answer"), ("instruction", "output")),
)
ANSWER, PROMPT_IDS = "token_ids", "prompt_token_ids"  # vLLM's names, and generate_data's
# All keys of generate_data's lines; most of them only show how an answer was made.
_GENERATED = (
    *("key", "turn", "turns", PROMPT_IDS, ANSWER, "text", "messages", "tools"),
    *("temperature", "top_p", "seed", "finish_reason"),
)


@dataclasses.dataclass(frozen=True)
class Text:
    """Plain text; every token is a label."""

    where: str  # file and line, for messages
    text: str  # at least one character
    begins: bool = True  # whether the document begins here, with the beginning-of-text token
    ends: bool = True  # whether it ends here

    @property
    def group(self) -> int:
        """64 bits: records of one group stay on one side of the held-out split."""
        return hash_64(self.text)


@dataclasses.dataclass(frozen=True)
class Chat:
    """A conversation; the assistant's turns are labels."""

    where: str  # as in ``Text``
    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()  # descriptions of functions, for the template

    @property
    def group(self) -> int:
        """As ``Text.group``: a hash of the messages before the first learned answer."""
        answers = (i for i, m in enumerate(self.messages) if is_learned(m))
        opening = self.messages[: next(answers, None)]
        return hash_64(json.dumps([(message["role"], message["content"]) for message in opening]))


@dataclasses.dataclass(frozen=True)
class Tokens:
    """Token ids, as ``python -m training.generate_data`` writes them."""

    where: str  # as in ``Text``
    prompt: tuple[int, ...]  # ids that are no labels, may be none
    answer: tuple[int, ...]  # ids that are labels, at least one
    key: str = ""  # key of a conversation in a generated file; all its turns have it

    @property
    def group(self) -> int:
        """As ``Text.group``."""
        generated = _KEY.match(self.key)
        return hash_64(generated[1] if generated else repr((self.prompt, self.answer)))


# Keys of generate_data: a hash of the prompt, and a number if it was asked before.
_KEY = re.compile(r"([0-9a-f]{16})(-\d+)?$")

Record = Text | Chat | Tokens


def read_record(line: Any, where: str, data_format: str = "auto") -> Record:
    """Return the record of one JSON object; ``where`` is its file and line.

    ``data_format`` is one of FORMATS; "auto" goes by the keys.

    Raises:
      ValueError: it has no form, or more than one, or is damaged; the message names no place.
    """
    if not isinstance(line, Mapping):
        raise ValueError(f"{_short(line)} is no JSON object")
    forms = kinds(line)
    if data_format == "auto":
        if not forms:
            raise ValueError(f"no known keys among {_listed(line)}; {_KNOWN}")
        if len(forms) > 1 and "tokens" not in forms:  # text beside tokens only shows them
            raise ValueError(
                f"may be read as {' or '.join(forms)}, by the keys {_listed(line)}; "
                f"say which with --data-format"
            )
        data_format = "tokens" if "tokens" in forms else forms[0]
    elif data_format not in forms and not (data_format == "text" and _is_bare_prompt(line)):
        raise ValueError(
            f"has nothing of --data-format {data_format} among {_listed(line)}; {_KNOWN}"
        )
    return _READERS[data_format](line, where)


def unused_keys(line: Mapping, record: Record) -> list[str]:
    """Return the keys of a line that ``read_record`` did not read."""
    if isinstance(record, Tokens):
        used: set[str] = set(_GENERATED)
    elif isinstance(record, Text):
        used = {"text" if "text" in line else "prompt"}
    else:
        used = {"tools", *((*TURNS, "turns") if _has_turns(line) else _question(line))}
        if record.messages[0]["content"] == line.get("system"):
            used.add("system")
        if "instruction" in used and isinstance(line.get("input"), str):
            used.add("input")
    return [str(key) for key, value in line.items() if value is not None and key not in used]


def kinds(line: Mapping) -> list[str]:
    """Return the FORMATS that the keys of a line allow."""
    forms = {
        "text": "text" in line,
        "chat": _has_turns(line) or any(question in line for question, _ in PAIRS),
        "tokens": ANSWER in line,
    }
    return [form for form, fits in forms.items() if fits]


def hash_64(text: str) -> int:
    """Return 64 bits of a text, the same in every run."""
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest())


def _is_bare_prompt(line: Mapping) -> bool:
    """Return whether a line is a prompt without an answer, which ``text`` can continue."""
    return isinstance(line.get("prompt"), str) and kinds(line) == ["chat"] and len(_pair(line)) == 1


def _has_turns(line: Mapping) -> bool:
    return "turns" in line or any(name in line for name in TURNS)


def _text(line: Mapping, where: str) -> Text:
    text = line["text"] if "text" in line else line["prompt"]
    if not isinstance(text, str) or not text:
        raise ValueError(f"'text' is {_short(text)}; it must be a text that is not empty")
    return Text(where, text)


def _chat(line: Mapping, where: str) -> Chat:
    messages = _turns(line) if _has_turns(line) else _pair(line)
    system = line.get("system")
    if isinstance(system, str) and system and messages[0]["role"] != "system":
        messages = [{"role": "system", "content": system}, *messages]
    return Chat(where, tuple(messages), read_tools(line.get("tools")))


def _turns(line: Mapping) -> list[Message]:
    """Return the messages of a conversation, or the user's alone (``turns``, as in MT-Bench)."""
    names = [name for name in (*TURNS, "turns") if name in line]
    if len(names) > 1:
        raise ValueError(f"holds two conversations, {' and '.join(map(repr, names))}; leave one")
    if any(line.get(q) is not None and line.get(a) is not None for q, a in PAIRS):
        raise ValueError(f"holds {names[0]!r}, and a question with its answer besides; leave one")
    turns = line[names[0]]
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not len(turns):
        raise ValueError(f"{names[0]!r} is {_short(turns)}; it must be a list of turns")
    if names[0] == "turns":
        turns = [{"role": "user", "content": turn} for turn in turns]
    return [read_message(turn) for turn in turns]


def _question(line: Mapping) -> tuple[str, str]:
    """Return the keys of a question and its answer."""
    matches = [pair for pair in PAIRS if pair[0] in line]
    complete = [pair for pair in matches if line.get(pair[1]) is not None]
    if len(complete) > 1 or len({question for question, _ in matches}) > 1:
        raise ValueError(f"holds more than one question or answer among {_listed(line)}; leave one")
    return (complete or matches)[0]


def _pair(line: Mapping) -> list[Message]:
    """Return a question and, if there is one, its answer."""
    question, answer = _question(line)
    asked = line[question]
    more = line.get("input")
    if question == "instruction" and isinstance(asked, str) and isinstance(more, str) and more:
        asked = f"{asked}\n\n{more}"
    messages = _messages("user", asked)
    answered = line.get(answer) is not None
    return messages + _messages("assistant", line[answer]) if answered else messages


def _messages(role: str, content: Any) -> list[Message]:
    """Return a text as one message; TRL's data hold lists of messages instead."""
    if isinstance(content, Sequence) and not isinstance(content, str) and len(content):
        return [read_message(turn) for turn in content]
    return [read_message({"role": role, "content": content})]


def _tokens(line: Mapping, where: str) -> Tokens:
    prompt, answer = _ids(line, PROMPT_IDS) if PROMPT_IDS in line else (), _ids(line, ANSWER)
    if not answer:
        raise ValueError(f"{ANSWER!r} is empty; give at least one token")
    key = line.get("key", "")
    return Tokens(where, prompt, answer, key if isinstance(key, str) else shown(key))


def _ids(line: Mapping, name: str) -> tuple[int, ...]:
    ids = line[name]
    if not isinstance(ids, Sequence) or isinstance(ids, str):
        raise ValueError(f"{name!r} is {_short(ids)}; it must be a list of token ids")
    for token in ids:
        if not is_whole(token, 0):
            raise ValueError(f"{name!r} holds {_short(token)}; token ids are whole numbers from 0")
    return tuple(ids)


def _short(value: Any) -> str:
    return shown(value, 60)


def _listed(line: Mapping) -> str:
    return _short(list(line))


_READERS = {"text": _text, "chat": _chat, "tokens": _tokens}
_KNOWN = (
    f"known are text; {', '.join(TURNS)}; {', '.join(map(' with '.join, PAIRS))}; "
    f"{ANSWER} with {PROMPT_IDS}"
)
