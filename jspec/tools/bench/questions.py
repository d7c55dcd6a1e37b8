"""Readers of public question files.

The keys of an object show its format: Spec-Bench (``turns``, ``category``), HumanEval (``prompt``),
GSM8K (``question``), ShareGPT (``conversations``), OpenAI's ``messages``, or ``text``. Files hold
JSON lines or one JSON list, ``.gz`` or not. Any other file is one text.
"""

import dataclasses
import gzip
import zlib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jspec.api.llm import LLM
from jspec.api.prompts import rendered
from jspec.api.sampling_params import SamplingParams
from jspec.util.messages import shown
from jspec.util.values import encodes, json_of

_JSON = (".json", ".jsonl")
_SYSTEM, _USER = ("system", "developer"), ("user", "human")  # roles in public files
_OTHERS = ("assistant", "gpt", "chatgpt", "bing", "bard", "model", "bot", "tool", "function")
_KINDS = "turns, messages, conversations, question, prompt or text"


@dataclasses.dataclass(frozen=True)
class Question:
    """A question or a text to continue."""

    category: str  # groups questions in the tables
    turns: tuple[str, ...]  # the user's messages; most questions have one
    is_chat: bool = True  # whether the turns are messages, rather than a text to continue
    system: str = ""  # the system message of a chat; "" for none


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt in token ids, with the category of its question."""

    category: str
    token_ids: tuple[int, ...]


def read(paths: Sequence[str | Path], per_category: int = 0) -> list[Question]:
    """Return the questions of all files in order, the first ``per_category`` of each (0: all).

    Raises:
      ValueError: a file cannot be read or holds no question; the message names file and line.
    """
    questions = [question for path in paths for question in _read_file(Path(path))]
    if not questions:
        raise ValueError("there is no question in the files given; name one with --questions.")
    counts, first = Counter(), []
    for question in questions:
        counts[question.category] += 1
        if not per_category or counts[question.category] <= per_category:
            first.append(question)
    return first


def requests(
    questions: Sequence[Question],
    tokenizer: Any,
    answer: Callable[[list[list[int]]], list[str]],
    *,
    prompt_tokens: int = 0,
    longest: int,
) -> tuple[list[Request], int]:
    """Return every turn of every question as a prompt, and the number of turns left out.

    Later turns follow the texts of ``answer``, so that all contenders get equal prompts. Only first
    turns are cut. If later turns were cut to their common prefix, all turns of a question would be
    one prompt, and methods that learn from answers would recite the first answer. The turns after
    one that is cut or too long are left out. Prompts of up to ``longest`` tokens fit.
    """
    prompts_made: list[Request] = []
    answers: list[list[str]] = [[] for _ in questions]
    running = list(range(len(questions)))
    for turn in range(max(len(question.turns) for question in questions)):
        prompts = {index: _encode(questions[index], answers[index], tokenizer) for index in running}
        cut = {i for i, ids in prompts.items() if 0 < prompt_tokens < len(ids)}
        if turn:  # only first ones are cut
            prompts = {i: ids for i, ids in prompts.items() if i not in cut}
        prompts = {i: ids[: prompt_tokens or None] for i, ids in prompts.items()}
        fitting = {i: ids for i, ids in prompts.items() if 0 < len(ids) <= longest}
        prompts_made += [Request(questions[i].category, tuple(ids)) for i, ids in fitting.items()]
        running = [i for i in fitting if i not in cut and len(questions[i].turns) > turn + 1]
        texts = answer([fitting[index] for index in running]) if running else []
        for index, text in zip(running, texts, strict=True):
            answers[index].append(text)
    num_turns = sum(len(question.turns) for question in questions)
    return prompts_made, num_turns - len(prompts_made)


def answered_by(
    plain: LLM, questions: Sequence[Question], *, max_tokens: int, prompt_tokens: int = 0
) -> tuple[list[Request], int]:
    """Return ``requests`` whose later turns follow the greedy answers of ``plain``.

    Raises:
      ValueError: ``max_tokens`` leaves no room for a prompt, or no question fits.
    """
    longest = plain.max_model_len - max_tokens
    if longest < 1:
        raise ValueError(
            f"max_tokens={max_tokens} leaves no room for a prompt in the {plain.max_model_len} "
            "tokens of the model; lower it."
        )

    def answer(prompts: list[list[int]]) -> list[str]:
        greedy = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        wrapped = [{"prompt_token_ids": prompt} for prompt in prompts]
        return [output.outputs[0].text for output in plain.generate(wrapped, greedy)]

    prompts, left_out = requests(
        questions, plain.get_tokenizer(), answer, prompt_tokens=prompt_tokens, longest=longest
    )
    if not prompts:
        raise ValueError(
            f"no question fits: with max_tokens={max_tokens} prompts may have {longest} tokens; "
            "lower max_tokens, or cut prompts with prompt_tokens."
        )
    return prompts, left_out


def _encode(question: Question, answers: Sequence[str], tokenizer: Any) -> list[int]:
    turns = question.turns[: len(answers) + 1]
    if question.is_chat and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "system", "content": question.system}] if question.system else []
        for asked, answered in zip(turns, [*answers, None], strict=True):
            messages.append({"role": "user", "content": asked})
            if answered is not None:
                messages.append({"role": "assistant", "content": answered})
        text = rendered(tokenizer, messages, add_generation_prompt=True)
        return list(tokenizer.encode(text, add_special_tokens=False))
    parts = [question.system] if question.system else []
    for asked, answered in zip(turns, [*answers, ""], strict=True):
        parts += [asked, answered]
    return list(tokenizer.encode("\n\n".join(part for part in parts if part)))


def _read_file(path: Path) -> Iterator[Question]:
    suffixes = [suffix.lower() for suffix in path.suffixes]
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if suffixes[-1:] == [".gz"] else raw).decode("utf-8-sig")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise ValueError(f"{path} cannot be read: {error}") from None
    if not set(suffixes) & set(_JSON):
        if not text.strip():
            raise ValueError(f"{path} is empty.")
        yield Question(path.stem, (text,), is_chat=False)
        return
    items = list(_items(path, text))
    stem = path.name.split(".")[0]
    asked = [_question(item, stem, f"{path}, {where}") for where, item in items]
    if items and not any(asked):
        raise ValueError(f"{path} holds no conversation in which a human speaks; name another.")
    yield from (question for question in asked if question is not None)


def _items(path: Path, text: str) -> Iterator[tuple[str, Any]]:
    """Yield the position and value of each object in a JSON list or in JSON lines."""
    if text.lstrip().startswith("["):
        items = _parsed(text, str(path))
        yield from ((f"item {number}", item) for number, item in enumerate(items, 1))
        return
    # Not splitlines, which also splits at U+2028, U+2029 and U+0085: JSON strings may hold them.
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            yield f"line {number}", _parsed(line, f"{path}, line {number}")


def _parsed(text: str, where: str) -> Any:
    try:
        return json_of(text)
    except ValueError as error:
        raise ValueError(f"{where}: not JSON ({error}).") from None


def _question(item: Any, stem: str, where: str) -> Question | None:
    """Return the question in an object; None for a conversation without a human message."""
    if not isinstance(item, dict):
        raise ValueError(f"{where}: {shown(item)} must be an object with {_KINDS}.")
    category = item.get("category", stem)
    turns, system, is_chat = (), "", True
    if "turns" in item:  # Spec-Bench, MT-bench
        turns = item["turns"]
    elif "messages" in item or "conversations" in item:
        system, turns = _asked_in(item, where)
        silent = not turns or (isinstance(turns[0], str) and not turns[0].strip())
        if silent and "messages" not in item:
            return None
    elif "question" in item:  # GSM8K
        turns = (item["question"],)
    elif "prompt" in item or "text" in item:  # HumanEval, and texts to go on with
        turns, is_chat = (item.get("prompt", item.get("text")),), False
    if isinstance(turns, str) or not isinstance(turns, Sequence) or not turns:
        raise ValueError(f"{where}: there is no question; give {_KINDS}.")
    for text in (category, *turns):
        if not isinstance(text, str) or not text.strip():
            raise ValueError(f"{where}: {shown(text)} must be a text that is not empty.")
    for text in (category, system, *turns):
        if not encodes(text):
            raise ValueError(
                f"{where}: {shown(text)} holds half of a surrogate pair; it must be valid Unicode."
            )
    return Question(category, tuple(turns), is_chat, system)


def _asked_in(item: dict, where: str) -> tuple[str, tuple[Any, ...]]:
    """Return the system message and the user's first message, if any.

    Later messages respond to the answers of another model.
    """
    system: list[str] = []
    for role, text in _messages(item, where):
        if role in _USER:
            return "\n\n".join(system), (text,)
        if role in _SYSTEM and isinstance(text, str):
            system += [text] if text.strip() else []
        elif role in _SYSTEM:
            raise ValueError(f"{where}: the {role} message {shown(text)} must be a text.")
        elif role not in _OTHERS:
            known = ", ".join((*_SYSTEM, *_USER, *_OTHERS))
            raise ValueError(f"{where}: role {shown(role)} is unknown; known are {known}.")
    return "\n\n".join(system), ()


def _messages(item: dict, where: str) -> list[tuple[Any, Any]]:
    """Return role and text of each message, by OpenAI's or ShareGPT's names."""
    name = "messages" if "messages" in item else "conversations"
    messages = item[name]
    if not isinstance(messages, list) or not all(isinstance(each, dict) for each in messages):
        raise ValueError(f"{where}: {name} must be a list of objects.")
    names = [("role", "content") if "role" in each else ("from", "value") for each in messages]
    return [
        (each.get(role), each.get(text)) for each, (role, text) in zip(messages, names, strict=True)
    ]
