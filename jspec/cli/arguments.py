"""What the strings of a command line say."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jspec.util import values
from jspec.util.messages import shown

if TYPE_CHECKING:  # see ``jspec.cli.main``
    from jspec.api.llm import LLM


def templated(llm: "LLM", message: str) -> dict[str, Any]:
    """The prompt that a conversation of one message is.

    Raises:
      ValueError: the model was published without a chat template.
    """
    tokenizer = llm.get_tokenizer()
    if not tokenizer.chat_template:
        name = tokenizer.name_or_path
        raise ValueError(f"--chat: the tokenizer of {name} has no chat template; leave --chat out.")
    return llm.chat_prompts([{"role": "user", "content": message}])[0]


def prompt(text: str | None, file: str | None, token_ids: str | None, chat: bool = False) -> Any:
    """The one prompt that was given, as ``LLM.generate`` takes it."""
    if sum(given is not None for given in (text, file, token_ids)) != 1:
        raise ValueError("give one prompt: as an argument, with --prompt-file or with --token-ids.")
    if token_ids is not None:
        if chat:
            raise ValueError("--chat is for a message in words; leave it or --token-ids out.")
        try:
            return {"prompt_token_ids": [int(token) for token in token_ids.split(",")]}
        except ValueError:
            raise ValueError(
                f"--token-ids {shown(token_ids)} must be whole numbers with commas, such as "
                '"1,2,3".'
            ) from None
    if file is None:
        return text
    if file == "-" and sys.stdin is None:  # closed by who called
        raise ValueError("--prompt-file -: standard input is closed; name a file.")
    try:
        return sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"--prompt-file {file} is not UTF-8: {error}.") from None
    except OSError as error:
        raise ValueError(f"--prompt-file {file} cannot be read: {error.strerror}.") from None


def numbers(option: str, given: str, example: str) -> list[int]:
    """Whole numbers with commas."""
    try:
        return [int(token) for token in given.split(",")]
    except ValueError:
        raise ValueError(
            f'{option} {given!r} must be whole numbers with commas, such as "{example}".'
        ) from None


def json(option: str, given: str | None, example: str) -> Any:
    """What JSON says; None where nothing was given.

    Raises:
      ValueError: it is not JSON, or an object has a key twice, of which one would not count.
    """
    try:
        return None if given is None else values.json_of(given, unique=True)
    except ValueError as error:
        raise ValueError(
            f"{option} is not JSON ({error}); quote it whole, each key once, such as '{example}'."
        ) from None
