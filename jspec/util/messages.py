"""Text for error messages: how to print a value, and the closest valid name."""

import difflib
from collections.abc import Iterable
from typing import Any


def did_you_mean(name: object, valid: Iterable[str]) -> str:
    """Return a clause that suggests the closest of the ``valid`` names, "" if none is close.

    Case does not count.

    >>> did_you_mean("temprature", ["temperature", "top_k"])
    "; did you mean 'temperature'?"
    >>> did_you_mean("TOP_K", ["temperature", "top_k"])
    "; did you mean 'top_k'?"
    >>> did_you_mean("colour", ["temperature", "top_k"])
    ''
    """
    if not isinstance(name, str):
        return ""
    spelled = {each.lower(): each for each in valid}
    matches = difflib.get_close_matches(name.lower(), spelled, n=1)
    return f"; did you mean {spelled[matches[0]]!r}?" if matches else ""


def shown(value: Any, most: int = 200) -> str:
    """Return ``repr(value)`` on one line of at most ``most`` characters.

    >>> shown("x" * 100, 10)
    "'xxxxxx..."
    >>> shown(10**5000)
    'an int that cannot be shown'
    """
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:  # too many digits, too deeply nested, or a class with a broken repr
        text = f"{kind_of(value)} that cannot be shown"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def kind_of(value: Any) -> str:
    """Return the type name of a value with its article.

    >>> kind_of(3), kind_of({})
    ('an int', 'a dict')
    """
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIO' else 'a'} {kind}"


def printable(name: str, most: int = 200) -> str:
    """Return a name read from a file, with line breaks and terminal codes escaped.

    >>> printable("layers.0"), printable("a\\nb")
    ('layers.0', 'a\\\\nb')
    """
    name = name if name.isprintable() else repr(name)[1:-1]
    return name if len(name) <= most else f"{name[: most - 3]}..."


def first_line(error: Exception) -> str:
    """Return the type of an exception and the first line of its message."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0][:300]
