"""Arguments that are written once: fields of a dataclass, with their checks and their flags."""

import dataclasses
from collections.abc import Callable
from typing import Any

from jspec.util.messages import shown


def argument(
    default: Any,
    help: str | None = None,
    /,
    *,
    about: str = "",
    check: tuple[Callable[[Any], bool], str] | None = None,
    **flag: Any,
) -> Any:
    """Return a field of a dataclass of arguments.

    Args:
      default: the value without the argument.
      help: of its flag on command lines; None for no flag.
      about: for the documentation.
      check: a test of values other than a default of None, and the words for those that pass it.
      flag: what the flag has of its own: ``kind`` (its type), ``names``, ``default``, and settings
        of typer. By default a bool that is False has no ``--no-`` form.
    """
    metadata = dict(about=about, check=check, help=help, flag=flag)
    return dataclasses.field(default=default, metadata=metadata)


def check(arguments: Any) -> None:
    """Raise ValueError for the first argument whose value is out of range."""
    for field in dataclasses.fields(arguments):
        value, rule = getattr(arguments, field.name), field.metadata["check"]
        is_default = value is field.default is None
        if rule is not None and not is_default and not rule[0](value):
            value = list(value) if isinstance(value, tuple) else value
            raise ValueError(f"{field.name}={shown(value)} must be {rule[1]}.")
