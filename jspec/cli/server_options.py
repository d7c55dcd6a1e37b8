"""The model and the settings of the API, for the commands that serve."""

import contextlib
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from jspec.cli import arguments
from jspec.util.messages import shown


def loaded(model: str | None, config: Any, **given: Any) -> tuple[Any, str]:
    """Return the ``LLM`` that the flags describe, and the model's name for clients."""
    from jspec.api.llm import LLM
    from jspec.checkpoints import installed

    if model is None:
        model, default = installed.served_model()
        config = default if config is None else config
    llm = LLM(model, config, **given)
    is_local = Path(model).exists()  # its path is nobody's business
    return llm, Path(model).resolve().name.removesuffix(".gguf") if is_local else str(model)


OVERRIDE_HELP = (
    "JSON object: defaults of requests before those of --generation-config, and max_new_tokens, "
    "which cuts all texts."
)
VARIABLES_HELP = "JSON object: variables of the chat template that requests do not set."


def override(text: str | None) -> dict[str, Any]:
    """Return the value of --override-generation-config."""
    given = arguments.mapping("--override-generation-config", text, '{"temperature": 0.5}')
    with named_extra():
        from jspec.server import defaults as of_model
    return of_model.overriding(given)


def template_variables(text: str | None) -> dict[str, Any]:
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
    """Return the settings of the API.

    Args:
      llm: the loaded models.
      defaults: the value of --generation-config.
      override: that of --override-generation-config.
      given: fields of ``Settings``.
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


def check_forms(tool_call_parser: str | None, reasoning_parser: str | None, content: str) -> None:
    """Check the flags that name the forms of texts."""
    from jspec.api.content import FORMATS
    from jspec.server import readers

    check_choice("--tool-call-parser", tool_call_parser, readers.CALLS)
    check_choice("--reasoning-parser", reasoning_parser, readers.REASONING)
    check_choice("--chat-template-content-format", content, FORMATS)


@contextlib.contextmanager
def named_extra(extra: str = "serve") -> Iterator[None]:
    """Name the extra if one of its packages is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the server needs the package {error.name}; run pip install 'jspec-decoding[{extra}]'."
        ) from None
