"""Prompts of requests: text, token ids, and conversations."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from jspec.api import content as contents
from jspec.server import templates
from jspec.server.errors import RequestError, refusals
from jspec.server.fields import ChatFields, CompletionFields, TokenizeFields
from jspec.server.serving import Server
from jspec.util import limits
from jspec.util.messages import shown
from jspec.util.values import encodes

Prompt = dict[str, Any]  # as ``LLM.generate`` takes it, with ``prompt_token_ids``


def of_completion(server: Server, fields: CompletionFields) -> list[Prompt]:
    """Return the prompts of /v1/completions.

    Raises:
      RequestError: there is none, or one is empty or too long.
    """
    given = fields.prompt
    is_one = isinstance(given, str) or (given and isinstance(given[0], int))
    items = [given] if is_one else given
    if not items:
        most = server.settings.max_texts
        raise RequestError(f"prompt must hold 1 to {most} prompts, got 0.", param="prompt")
    prompts = [_encoded(server, item, fields) for item in items]
    return [_truncated(server, prompt, fields.truncate_prompt_tokens) for prompt in prompts]


def of_chat(server: Server, fields: ChatFields | TokenizeFields) -> Prompt:
    """Return the prompt of a conversation.

    Raises:
      RequestError: a message is malformed, there is no chat template, or it refuses the messages.
    """
    messages = [_message(index, each) for index, each in enumerate(fields.messages)]
    get = lambda name, default=None: getattr(fields, name, default)
    variables = {**server.settings.template_variables, **(get("chat_template_kwargs") or {})}
    for name in ("documents", "reasoning_effort"):
        if get(name) is not None:
            variables[name] = get(name)
    is_continued = bool(get("continue_final_message"))
    if is_continued:
        variables["continue_final_message"] = True
    is_opened = fields.add_generation_prompt is not False and not is_continued
    options = dict(add_generation_prompt=is_opened, tools=fields.tools or None)
    try:
        if get("chat_template") is None:
            _check_template(server)
            (prompt,) = server.llm.chat_prompts(
                messages,
                chat_template=server.settings.chat_template,
                chat_template_content_format=server.settings.chat_template_content_format,
                chat_template_kwargs=variables,
                **options,
            )
        else:
            prompt = _of_template(server, fields.chat_template, messages, variables | options)
    except limits.TooLarge as error:
        raise RequestError(str(error), param="messages") from None
    except ValueError as error:
        raise RequestError(str(error), status=422, param="messages") from None
    return _truncated(server, prompt, get("truncate_prompt_tokens"))


def _check_template(server: Server) -> None:
    if not server.settings.chat_template and not server.llm.get_tokenizer().chat_template:
        raise RequestError(
            "the model has no chat template; send a prompt to /v1/completions, or start the "
            "server with --chat-template.",
            param="messages",
        )


def _of_template(
    server: Server, template: str, messages: list[dict[str, Any]], variables: dict[str, Any]
) -> Prompt:
    """Return the prompt that a template of the request makes."""
    if not server.settings.trusts_chat_templates:
        raise RequestError(
            "chat_template is not taken from requests; start the server with "
            "--trust-request-chat-template, or with --chat-template.",
            param="chat_template",
        )
    tokenizer = server.llm.get_tokenizer()
    special = {name: str(text) for name, text in tokenizer.special_tokens_map.items()}
    form = server.settings.chat_template_content_format
    messages = contents.formatted(messages, template, form)
    text = templates.render(template, messages, variables, special)
    return {"prompt": text, "prompt_token_ids": encode(server, text, False)}


def encode(
    server: Server, text: str, add_special_tokens: bool, *, must_fit: bool = True
) -> list[int]:
    """Return the token ids of a text; one that ``must_fit`` the model is refused otherwise."""
    if not encodes(text):
        raise RequestError("the prompt has half of a surrogate pair; send text.", param="prompt")
    with refusals():
        return server.llm.encode_text(
            text, add_special_tokens=add_special_tokens, must_fit=must_fit
        )


def _encoded(server: Server, item: str | list[int], fields: CompletionFields) -> Prompt:
    if not isinstance(item, str):
        return {"prompt_token_ids": item}
    special, is_whole = (
        fields.add_special_tokens is not False,
        fields.truncate_prompt_tokens is None,
    )
    return {"prompt": item, "prompt_token_ids": encode(server, item, special, must_fit=is_whole)}


def _truncated(server: Server, prompt: Prompt, count: int | None) -> Prompt:
    """Cut a prompt to its last ``count`` tokens; -1 for those that fit, None for all."""
    if count is None:
        return prompt
    most = server.llm.max_model_len - 1
    if count == -1:
        count = most
    if not 1 <= count <= most:
        raise RequestError(
            f"truncate_prompt_tokens={count} must be -1 or from 1 to {most}.",
            param="truncate_prompt_tokens",
        )
    return {**prompt, "prompt_token_ids": prompt["prompt_token_ids"][-count:]}


def _message(index: int, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a message as chat templates read it.

    The arguments of tool calls are parsed.
    """
    where = f"messages[{index}]"
    role, content = given.get("role"), given.get("content")
    if not isinstance(role, str):
        raise RequestError(f"{where}.role={shown(role)} must be text.", param="messages")
    message = dict(given, role="system" if role == "developer" else role)
    if isinstance(content, Sequence) and not isinstance(content, str):
        try:
            message["content"] = contents.texts_of(where, content)
        except ValueError as error:
            raise RequestError(str(error), param="messages") from None
    elif content is None and given.get("tool_calls"):
        message["content"] = ""
    elif not isinstance(content, str):
        raise RequestError(
            f"{where}.content={shown(content)} must be text, or a list of parts of text.",
            param="messages",
        )
    if given.get("tool_calls"):
        message["tool_calls"] = [_call(where, call) for call in given["tool_calls"]]
    return message


def _call(where: str, call: Any) -> dict[str, Any]:
    """Return a tool call with its arguments as an object, as templates of models expect."""
    try:
        function = dict(call["function"])
        arguments = function.get("arguments") or "{}"
        parsed = json.loads(arguments) if isinstance(arguments, str) else arguments
        return {**call, "function": {**function, "arguments": parsed}}
    except (KeyError, TypeError, ValueError, RecursionError):
        raise RequestError(
            f"{where}.tool_calls must hold functions whose arguments are JSON.", param="messages"
        ) from None
