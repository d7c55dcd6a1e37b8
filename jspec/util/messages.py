"""What error messages say of what a user gave: how it reads, and which known name is nearest."""

import difflib
from collections.abc import Iterable
from typing import Any


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A clause for an error message, empty where nothing known is near.

    >>> did_you_mean("temprature", ["temperature", "top_k"])
    "; did you mean 'temperature'?"
    >>> did_you_mean("colour", ["temperature", "top_k"])
    ''
    """
    near = difflib.get_close_matches(name, list(known), n=1) if isinstance(name, str) else ()
    return f"; did you mean {near[0]!r}?" if near else ""


def shown(value: Any, most: int = 200) -> str:
    """A value as error messages show it: one line, of ``most`` characters at most.

    >>> shown("x" * 100, 10)
    "'xxxxxx..."
    >>> shown(10**5000)
    'an int that cannot be shown'
    """
    try:
        text = " ".join(repr(value).splitlines())
    except Exception:  # too many digits, too deeply nested, or a class that has no way to say it
        text = f"{kind_of(value)} that cannot be shown"
    return text if len(text) <= most else f"{text[: most - 3]}..."


def kind_of(value: Any) -> str:
    """The type of a value with its article.

    >>> kind_of(3), kind_of({})
    ('an int', 'a dict')
    """
    kind = type(value).__name__
    return f"{'an' if kind[0] in 'aeiouAEIO' else 'a'} {kind}"


def printable(name: str, most: int = 200) -> str:
    """A name that a file gave, without quotation marks: no line breaks, no codes of terminals.

    >>> printable("layers.0"), printable("a\\nb")
    ('layers.0', 'a\\\\nb')
    """
    name = name if name.isprintable() else repr(name)[1:-1]
    return name if len(name) <= most else f"{name[: most - 3]}..."
