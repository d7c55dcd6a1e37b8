"""Prompts of users: text, token ids, or lists of either."""

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral
from pathlib import Path
from typing import Any

import numpy as np

from jspec.api import content
from jspec.util import limits
from jspec.util.messages import did_you_mean, shown
from jspec.util.values import encodes

_KEYS = ("prompt", "prompt_token_ids", "cache_salt")
_FORMS = "text, {'prompt': text}, {'prompt_token_ids': [...]}, [ids], or a list of these"
_LONGEST_PATH = 1000  # characters; a longer chat_template is Jinja
# Parameters of apply_chat_template that are not variables of a template: those that ``LLM.chat``
# takes itself, with its own name for them, and those of tokenization.
_CHAT_ARGUMENTS = {"conversation": "messages"} | {
    name: name for name in ("messages", "chat_template", "add_generation_prompt")
}
_TOKENIZATION = ("tokenize", "padding", "truncation", "max_length", "tokenizer_kwargs")
_TOKENIZATION += ("return_tensors", "return_dict", "return_assistant_tokens_mask")
_TOKENIZATION += ("sanitize_control_tokens",)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """Token ids of a prompt, and its text if it was given as text."""

    token_ids: tuple[int, ...]
    text: str | None = None
    cache_salt: str = ""  # requests share cached prefixes only with those of the same salt


class Encoder:
    """Encodes texts for a model, and refuses one that cannot fit before any work.

    A text of more characters than ``max_model_len`` of the longest tokens has too many tokens. Its
    characters are counted after the tokenizer's normalizer, which may merge or drop some.

    Args:
      get_tokenizer: returns the tokenizer, or raises ValueError without one.
      max_model_len: longest sequence.
    """

    def __init__(self, get_tokenizer: Callable[[], Any], max_model_len: int):
        self._get_tokenizer, self._max_model_len = get_tokenizer, max_model_len

    def __call__(
        self, text: str, *, add_special_tokens: bool = True, must_fit: bool = True
    ) -> list[int]:
        """Return the token ids of a text; without ``must_fit`` it may have any length."""
        tokenizer = self._get_tokenizer()
        if must_fit:
            self._check(text, tokenizer)
        return list(tokenizer.encode(text, add_special_tokens=add_special_tokens))

    def _check(self, text: str, tokenizer: Any) -> None:
        most = self._max_model_len * self._longest_token
        if len(text) <= most:
            return
        normalizer = None
        if hasattr(tokenizer, "backend_tokenizer"):
            normalizer = tokenizer.backend_tokenizer.normalizer
        size = len(text) if normalizer is None else len(normalizer.normalize_str(text))
        limits.PROMPT_CHARACTERS.check(size, most)

    @functools.cached_property
    def _longest_token(self) -> float:
        """Most characters of a token; infinite if the tokenizer does not list them."""
        tokenizer = self._get_tokenizer()
        if not hasattr(tokenizer, "get_vocab"):
            return math.inf
        return max(map(len, tokenizer.get_vocab()), default=math.inf)


def read(prompts: Any, encode: Callable[[str], Sequence[int]]) -> list[Prompt]:
    """Read one prompt or a list of them; raise ValueError for an empty or unknown one."""
    items = [prompts] if isinstance(prompts, str | Mapping) else prompts
    if not isinstance(items, Sequence) or isinstance(items, bytes):
        raise ValueError(f"prompts={_short(prompts)} must be {_FORMS}.")
    if items and all(isinstance(item, Integral) for item in items):
        raise ValueError(
            f"prompts={_short(prompts)} is a list of numbers; give token ids as "
            "{'prompt_token_ids': [...]}."
        )
    return [_read_one(index, item, encode) for index, item in enumerate(items)]


def of_chat(
    messages: Any,
    tokenizer: Any,
    chat_template: str | None,
    variables: Mapping[str, Any],
    encode: Encoder,
    content_format: str = "auto",
) -> list[dict[str, Any]]:
    """Render one conversation or a list of them, each to a prompt for ``read``."""
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
    chat_template = template_of(chat_template)
    read = tokenizer.get_chat_template(chat_template, variables.get("tools"))
    content.check_format(content_format)
    render = functools.partial(rendered, tokenizer, chat_template=chat_template, **variables)
    texts = [render(content.formatted(each, read, content_format)) for each in conversations]
    # The template has already written the special tokens.
    ids = [encode(text, add_special_tokens=False) for text in texts]
    pairs = zip(texts, ids, strict=True)
    return [{"prompt": text, "prompt_token_ids": each} for text, each in pairs]


def template_of(chat_template: Any) -> str | None:
    """Return Jinja: that of a file if ``chat_template`` is the path of one."""
    if isinstance(chat_template, os.PathLike):
        chat_template = os.fspath(chat_template)
    if chat_template is None:
        return None
    if not isinstance(chat_template, str):
        raise ValueError(f"chat_template={_short(chat_template)} must be Jinja, or a path to it.")
    short = len(chat_template) < _LONGEST_PATH and chat_template.isprintable()
    if short and os.path.isfile(chat_template):
        try:
            return Path(chat_template).read_text(encoding="utf-8-sig")
        except (OSError, ValueError) as error:
            raise ValueError(f"chat_template={_short(chat_template)}: {error}") from None
    if "{" not in chat_template:
        raise ValueError(
            f"chat_template={_short(chat_template)} is neither a file nor Jinja with variables in "
            "braces; check the path."
        )
    return chat_template


def check_template(chat_template: str) -> None:
    """Raise ValueError if a chat template is no Jinja."""
    from transformers.utils.chat_template_utils import render_jinja_template

    if not chat_template.strip():
        raise ValueError("chat_template is empty; give Jinja, or leave it out for the model's own.")
    try:
        render_jinja_template(conversations=[], chat_template=chat_template)
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"chat_template is no Jinja: {reason}") from None


def tools_of(tools: Any, variables: Mapping[str, Any]) -> list[Mapping]:
    """Check the argument ``tools`` of a conversation."""
    if "tools" in variables:
        raise ValueError("tools and chat_template_kwargs['tools'] are both given; keep tools.")
    is_list = isinstance(tools, Sequence) and not isinstance(tools, str)
    if not is_list or not all(isinstance(tool, Mapping) for tool in tools):
        raise ValueError(
            f"tools={_short(tools)} must be a list of dicts, such as [{{'type': 'function', "
            "'function': {'name': ...}}]."
        )
    return list(tools)


def variables_of(given: Any) -> dict[str, Any]:
    """Return the template variables of ``chat_template_kwargs``, after checking their names."""
    given = {} if given is None else given
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError(
            f"chat_template_kwargs={_short(given)} must be a dict of the template's variables by "
            "name, such as {'enable_thinking': False}."
        )
    for name in given:
        if name in _CHAT_ARGUMENTS:
            raise ValueError(
                f"chat_template_kwargs has {name!r}, which is an argument of chat and "
                f"chat_prompts; give it there, as {_CHAT_ARGUMENTS[name]}=..."
            )
        if name in _TOKENIZATION:
            raise ValueError(
                f"chat_template_kwargs has {name!r}, which is of making token ids and no variable "
                "of a template; leave it out, or pass your own ids to generate as "
                "{'prompt_token_ids': [...]}."
            )
    return dict(given)


def rendered(tokenizer: Any, messages: Sequence[Mapping], /, **variables: Any) -> str:
    """Render a conversation; raise ValueError if the chat template refuses the messages."""
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, **variables)
    except Exception as error:  # Jinja's, or raised by the template
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the chat template refuses the messages: {reason}") from None
    if not encodes(text):
        raise ValueError(
            "the messages make a prompt with half of a surrogate pair; they must be text that "
            "UTF-8 can encode."
        )
    return text


def _read_one(index: int, item: Any, encode: Callable[[str], Sequence[int]]) -> Prompt:
    if isinstance(item, str):
        item = {"prompt": item}
    elif isinstance(item, Sequence | np.ndarray) and not isinstance(item, bytes):
        item = {"prompt_token_ids": item}
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
            "that UTF-8 can encode."
        )
    ids = _token_ids(index, ids) if ids is not None else encode(text) if text else ()
    if not len(ids):
        raise ValueError(
            f"prompt {index} is empty; give at least one token (such as the BOS token)."
        )
    salt = item.get("cache_salt")
    if salt is not None and (not isinstance(salt, str) or not salt or not encodes(salt)):
        raise ValueError(
            f"prompt {index} has cache_salt={_short(salt)}, which must be text; leave it out for "
            "none."
        )
    return Prompt(tuple(map(int, ids)), text, salt or "")


def _token_ids(index: int, ids: Any) -> list[int]:
    if hasattr(ids, "__array__"):  # NumPy, JAX or torch: one transfer to the host
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
