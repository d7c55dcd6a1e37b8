"""Prompts as users give them: text, token ids, or lists of either."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from typing import Any

import numpy as np

from jspec.util.messages import did_you_mean, shown

_KEYS = ("prompt", "prompt_token_ids")
_FORMS = "text, {'prompt': text}, {'prompt_token_ids': [...]}, or a list of these"
# Parameters of apply_chat_template that are no variables of a template: those that ``LLM.chat`` has
# as its own, under the name that it gives them, and those of making token ids of the text.
_OF_CHAT = {
    "conversation": "messages",
    "messages": "messages",
    "chat_template": "chat_template",
    "add_generation_prompt": "add_generation_prompt",
}
_OF_IDS = (
    "tokenize",
    "padding",
    "truncation",
    "max_length",
    "return_tensors",
    "return_dict",
    "return_assistant_tokens_mask",
    "sanitize_control_tokens",
    "tokenizer_kwargs",
)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A prompt as the model sees it, and its text where it was given as text."""

    token_ids: tuple[int, ...]
    text: str | None = None


def read(given: Any, encode: Callable[[str], Sequence[int]]) -> list[Prompt]:
    """Reads one prompt or a list of them.

    Raises:
      ValueError: one is empty or of no known form.
    """
    items = [given] if isinstance(given, str | Mapping) else given
    if not isinstance(items, Sequence) or isinstance(items, bytes):
        raise ValueError(f"prompts={_short(given)} must be {_FORMS}.")
    if items and all(isinstance(item, Integral) for item in items):
        raise ValueError(
            f"prompts={_short(given)} is a list of numbers; give token ids as "
            "{'prompt_token_ids': [...]}."
        )
    return [_read_one(index, item, encode) for index, item in enumerate(items)]


def of_chat(
    messages: Any, tokenizer: Any, chat_template: str | None, variables: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """One conversation or a list of them, each as a prompt that ``read`` reads.

    Raises:
      ValueError: it is neither, there is no chat template, or it refuses the messages.
    """
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise ValueError(
            "messages must be a list of {'role': ..., 'content': ...}, or a list of such lists."
        )
    if chat_template is None and not tokenizer.chat_template:
        raise ValueError(
            f"the tokenizer of {tokenizer.name_or_path} has no chat template; pass chat_template=, "
            "or write the prompt yourself and call generate."
        )
    conversations = [messages] if isinstance(messages[0], Mapping) else messages
    texts = [
        rendered(tokenizer, each, chat_template=chat_template, **variables)
        for each in conversations
    ]
    # The template has written the special tokens already.
    encode = lambda text: list(tokenizer.encode(text, add_special_tokens=False))
    return [{"prompt": text, "prompt_token_ids": encode(text)} for text in texts]


def variables_of(given: Any) -> dict[str, Any]:
    """The variables that ``chat_template_kwargs`` gives to a template; none where it is None.

    Raises:
      ValueError: it is no dict by names, or has what is no template's.
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError(
            f"chat_template_kwargs={_short(given)} must be a dict of the template's variables by "
            "name, such as {'enable_thinking': False}."
        )
    for name in given:
        if name in _OF_CHAT:
            raise ValueError(
                f"chat_template_kwargs has {name!r}, which is an argument of chat and "
                f"chat_prompts; give it there, as {_OF_CHAT[name]}=..."
            )
        if name in _OF_IDS:
            raise ValueError(
                f"chat_template_kwargs has {name!r}, which is of making token ids and no variable "
                "of a template; leave it out, or give ids of your own to generate as "
                "{'prompt_token_ids': [...]}."
            )
    return dict(given)


def rendered(tokenizer: Any, messages: Sequence[Mapping], /, **variables: Any) -> str:
    """A conversation as the text that the chat template makes of it.

    Raises:
      ValueError: the template refuses the messages.
    """
    try:
        return tokenizer.apply_chat_template(messages, tokenize=False, **variables)
    except Exception as error:  # of Jinja, or the template's own complaint
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the chat template refuses the messages: {reason}") from None


def encodes(text: str) -> bool:
    """Whether UTF-8 can say a text: it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _read_one(index: int, item: Any, encode: Callable[[str], Sequence[int]]) -> Prompt:
    if isinstance(item, str):
        item = {"prompt": item}
    if not isinstance(item, Mapping) or not item:
        raise ValueError(f"prompt {index} is {_short(item)}; it must be {_FORMS}.")
    for key in item:
        if key not in _KEYS:
            raise ValueError(
                f"prompt {index} has the key {_short(key)}; known are {', '.join(_KEYS)}"
                f"{did_you_mean(key, _KEYS)}"
            )
    text, ids = item.get("prompt"), item.get("prompt_token_ids")
    if text is not None and not isinstance(text, str):
        raise ValueError(f"prompt {index} is {_short(text)}; its 'prompt' must be text.")
    if text is not None and not encodes(text):
        raise ValueError(
            f"prompt {index} is {_short(text)}, with half of a surrogate pair; it must be text "
            "that UTF-8 can say."
        )
    ids = _token_ids(index, ids) if ids is not None else encode(text) if text else ()
    if not len(ids):
        raise ValueError(
            f"prompt {index} is empty; give at least one token (such as the BOS token)."
        )
    return Prompt(tuple(int(token) for token in ids), text)


def _token_ids(index: int, ids: Any) -> list[int]:
    if hasattr(ids, "__array__"):  # of NumPy, JAX or torch: brought to the host at once
        ids = np.atleast_1d(ids).tolist()
    ids = list(ids) if isinstance(ids, Sequence) else [ids]
    for token in ids:
        if not isinstance(token, Integral) or isinstance(token, bool):
            raise ValueError(
                f"prompt {index} holds {_short(token)} among its prompt_token_ids, which must be "
                "whole numbers."
            )
    return ids


def _short(value: Any) -> str:
    return shown(value, 60)
