"""Telling a user whose name was not understood which known one is nearest."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """A clause for an error message, empty where nothing known is near.

    >>> did_you_mean("temprature", ["temperature", "top_k"])
    "; did you mean 'temperature'?"
    >>> did_you_mean("colour", ["temperature", "top_k"])
    ''
    """
    near = difflib.get_close_matches(str(name), list(known), n=1)
    return f"; did you mean {near[0]!r}?" if near else ""
