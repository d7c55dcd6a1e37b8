"""The model and the settings of the API, for the commands that serve."""

import contextlib
import dataclasses
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jspec.api.engine_args import EngineArgs
from jspec.cli import arguments
from jspec.util import limits
from jspec.util.arguments import argument
from jspec.util.messages import shown

_STATS = ("none", "summary")


@dataclasses.dataclass(frozen=True)
class Address:
    """The address of a server, its names, and the keys of its clients."""

    host: str = argument("127.0.0.1", "Address to listen at; 0.0.0.0 for all.")
    port: int = argument(8000, "0 for any free one.", min=0, max=65535)
    uds: str | None = argument(None, "Path of a Unix socket, instead of --host and --port.")
    served_model_name: list[str] | None = argument(
        None, "The model's name for clients; several may be given."
    )
    api_key: list[str] | None = argument(
        None,
        "Key that clients must send; several may be given.",
        envvar="JSPEC_API_KEY",  # other users of the machine see flags
    )


@dataclasses.dataclass(frozen=True)
class Answers:
    """The forms of prompts and answers, and the limits of requests."""

    max_num_queued_reqs: int | None = argument(
        None, "Most sequences that wait; more get status 429. Default: no limit.", min=1
    )
    chat_template: str | None = argument(None, "Jinja, or a file with it. Default: the model's.")
    default_chat_template_kwargs: str | None = argument(
        None, "JSON object: variables of the chat template that requests do not set."
    )
    trust_request_chat_template: bool = argument(False, "Take chat templates from requests.")
    generation_config: str = argument(
        "auto",
        "auto: defaults of requests are the model's; vllm: those of the API; or a directory.",
    )
    chat_template_content_format: str = argument(
        "auto", "string, openai (parts) or auto: the one that the chat template reads."
    )
    override_generation_config: str | None = argument(
        None,
        "JSON object: defaults of requests before those of --generation-config, and "
        "max_new_tokens, which cuts all texts.",
    )
    enable_force_include_usage: bool = argument(False, "Send the usage in every event of a stream.")
    tool_call_parser: str | None = argument(
        None,
        "deepseek_v3, hermes, llama3_json, mistral, pythonic or qwen3_coder. Default: the one "
        "that the chat template shows.",
    )
    reasoning_parser: str | None = argument(
        None, "deepseek_r1 or qwen3: answers have their reasoning apart."
    )
    per_request_spec_decode_stats: str = argument(
        "none", "none or summary: counts of drafts in every choice."
    )
    request_timeout: float | None = argument(None, "Longest seconds of a request; more get 504.")
    max_body_bytes: int = argument(
        limits.BODY_BYTES.most, "Largest body; a larger one gets 413.", min=1
    )
    max_texts_per_request: int = argument(
        limits.TEXTS_OF_BODY.most, "Most texts of a request: its prompts times n.", min=1
    )

    def settings(self) -> dict[str, Any]:
        """Return arguments of ``settings_of``, before the model is loaded.

        Raises:
          ValueError: a value is out of range.
        """
        from jspec.api.content import FORMATS
        from jspec.server import readers

        with named_extra():
            from jspec.server import defaults
        stats, content = self.per_request_spec_decode_stats, self.chat_template_content_format
        check_choice("--per-request-spec-decode-stats", stats, _STATS)
        check_choice("--tool-call-parser", self.tool_call_parser, readers.CALLS)
        check_choice("--reasoning-parser", self.reasoning_parser, readers.REASONING)
        check_choice("--chat-template-content-format", content, FORMATS)
        flag, text = "--override-generation-config", self.override_generation_config
        override = defaults.overriding(arguments.mapping(flag, text, '{"temperature": 0.5}'))
        return dict(
            chat_template=template_of(self.chat_template),
            defaults=self.generation_config,
            override=override,
            template_variables=_template_variables(self.default_chat_template_kwargs),
            trusts_chat_templates=self.trust_request_chat_template,
            chat_template_content_format=content,
            tool_parser=self.tool_call_parser,
            reasoning_parser=self.reasoning_parser,
            max_texts=self.max_texts_per_request,
            request_seconds=self.request_timeout,
            shows_stats=stats == "summary",
            forces_usage=self.enable_force_include_usage,
        )


def loaded(model: str | None, args: EngineArgs) -> tuple[Any, str]:
    """Return the ``LLM`` that the flags describe, and the model's name for clients."""
    from jspec.api.llm import LLM
    from jspec.checkpoints import installed

    if model is None:
        model, default = installed.served_model()
        if args.speculative_config is None:
            args = dataclasses.replace(args, speculative_config=default)
    llm = LLM(model, **vars(args))
    is_local = Path(model).exists()  # clients need not see its path
    return llm, Path(model).resolve().name.removesuffix(".gguf") if is_local else str(model)


def _template_variables(text: str | None) -> dict[str, Any]:
    """Return the value of --default-chat-template-kwargs."""
    from jspec.api import prompts

    flag = "--default-chat-template-kwargs"
    given = arguments.mapping(flag, text, '{"enable_thinking": false}')
    try:
        return prompts.variables_of(given)
    except ValueError as error:
        raise ValueError(f"{flag}: {error}") from None


def settings_of(
    llm: Any, *, defaults: str, override: dict[str, Any] | None = None, **given: Any
) -> Any:
    """Return the settings of the API; ``given`` are fields of ``Settings``.

    ``defaults`` is the value of --generation-config, and ``override`` that of its override.
    """
    from jspec.server import defaults as of_model
    from jspec.server import readers
    from jspec.server.serving import Settings

    template = given["chat_template"] or getattr(llm.get_tokenizer(), "chat_template", None)
    if isinstance(template, dict):  # several by name
        template = template.get("tool_use", template.get("default"))
    given["tool_parser"] = given["tool_parser"] or readers.of_template(template)
    defaults_of_model = of_model.of(llm, defaults, override)
    limit = defaults_of_model.pop(of_model.MAX_NEW_TOKENS, None)
    return Settings(defaults=defaults_of_model, max_new_tokens=limit, **given)


def template_of(flag: str | None) -> str | None:
    """Return the chat template of --chat-template, before the model is loaded.

    Raises:
      ValueError: there is no such file, or it holds no Jinja.
    """
    from jspec.api import prompts

    if flag is None:
        return None
    try:
        template = prompts.template_of(flag)
        prompts.check_template(template)
    except ValueError as error:
        raise ValueError(f"--chat-template: {error}") from None
    return template


def check_choice(flag: str, value: Any, allowed: Iterable[str]) -> None:
    """Raise ValueError if the value of a flag is none of those allowed; None is its default."""
    allowed = sorted(allowed)
    if value is not None and value not in allowed:
        raise ValueError(f"{flag} {shown(value)} must be one of {', '.join(allowed)}.")


@contextlib.contextmanager
def named_extra(extra: str = "serve") -> Iterator[None]:
    """Name the extra if one of its packages is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the server needs the package {error.name}; run pip install 'jspec-decoding[{extra}]'."
        ) from None
