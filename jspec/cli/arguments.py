"""Parsers of command-line strings."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jspec.util import values
from jspec.util.messages import shown

if TYPE_CHECKING:  # see ``jspec.cli.generate``
    from jspec.api.llm import LLM


def templated(llm: "LLM", message: str) -> dict[str, Any]:
    """Return the prompt of a conversation with one message.

    Raises:
      ValueError: the tokenizer has no chat template.
    """
    tokenizer = llm.get_tokenizer()
    if not tokenizer.chat_template:
        name = tokenizer.name_or_path
        raise ValueError(f"--chat: the tokenizer of {name} has no chat template; leave --chat out.")
    return llm.chat_prompts([{"role": "user", "content": message}])[0]


def prompt(text: str | None, file: str | None, token_ids: str | None, chat: bool = False) -> Any:
    """Return the one prompt that was given, in a form for ``LLM.generate``."""
    if sum(given is not None for given in (text, file, token_ids)) != 1:
        raise ValueError("give one prompt: as an argument, with --prompt-file or with --token-ids.")
    if token_ids is not None:
        if chat:
            raise ValueError("--chat takes a message in words; leave it or --token-ids out.")
        return {"prompt_token_ids": numbers("--token-ids", token_ids, "1,2,3")}
    if file is None:
        return text
    if file == "-" and sys.stdin is None:  # the caller closed it
        raise ValueError("--prompt-file -: standard input is closed; name a file.")
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        return text.removeprefix("\ufeff")  # the byte order mark of editors on Windows
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {file} is not UTF-8: {error}.") from None
    except OSError as error:
        raise ValueError(f"--prompt-file {file} cannot be read: {error.strerror}.") from None


def numbers(option: str, given: str, example: str) -> list[int]:
    """Parse whole numbers with commas."""
    try:
        return [int(token) for token in given.split(",")]
    except ValueError:
        raise ValueError(
            f'{option} {shown(given)} must be whole numbers with commas, such as "{example}".'
        ) from None


def json(option: str, given: str | None, example: str) -> Any:
    """Parse JSON; None stays None.

    Raises:
      ValueError: ``given`` is not JSON, or an object repeats a key.
    """
    try:
        return None if given is None else values.json_of(given, unique=True)
    except ValueError as error:
        raise ValueError(
            f"{option} is not JSON ({error}); quote it whole, each key once, such as '{example}'."
        ) from None


def mapping(option: str, given: str | None, example: str) -> dict[str, Any]:
    """Parse a JSON object; None is an empty one.

    Raises:
      ValueError: ``given`` is none.
    """
    parsed = json(option, given, example)
    if not isinstance(parsed, dict | None):
        raise ValueError(f"{option} {shown(given)} must be a JSON object, such as '{example}'.")
    return parsed or {}


def texts(option: str, given: str | None, example: str) -> tuple[str, ...] | None:
    """Parse a JSON list of texts; None stays None.

    Raises:
      ValueError: ``given`` is none.
    """
    parsed = json(option, given, example)
    if parsed is None:
        return None
    if not isinstance(parsed, list) or not all(isinstance(each, str) for each in parsed):
        raise ValueError(f"{option} {shown(given)} must be a JSON list of texts, as '{example}'.")
    return tuple(parsed)
