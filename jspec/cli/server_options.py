"""The model and the settings of the API, for the commands that serve."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def loaded(model: str | None, config: Any, **given: Any) -> tuple[Any, str]:
    """Return the ``LLM`` that the flags describe, and the model's name for clients."""
    from jspec.api.llm import LLM
    from jspec.engine import installed

    if model is None:
        model, default = installed.served_model()
        config = default if config is None else config
    llm = LLM(model, config, **given)
    is_local = Path(model).exists()  # its path is nobody's business
    return llm, Path(model).resolve().name.removesuffix(".gguf") if is_local else str(model)


def settings_of(llm: Any, *, defaults: str, **given: Any) -> Any:
    """Return the settings of the API; ``defaults`` is the value of --generation-config."""
    from jspec.server import defaults as of_model
    from jspec.server import readers
    from jspec.server.serving import Settings

    template = given["chat_template"] or getattr(llm.get_tokenizer(), "chat_template", None)
    given["tool_parser"] = given["tool_parser"] or readers.of_template(template)
    return Settings(defaults=of_model.of(llm, defaults), **given)


@contextlib.contextmanager
def named_extra(extra: str = "serve") -> Iterator[None]:
    """Name the extra if one of its packages is missing."""
    try:
        yield
    except ModuleNotFoundError as error:
        raise ValueError(
            f"the server needs the package {error.name}; run pip install 'jspec-decoding[{extra}]'."
        ) from None
