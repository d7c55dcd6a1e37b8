"""Checks of the values and paths that users pass; JSON and NumPy have several number types."""

import json
import pkgutil
from collections.abc import Hashable, Sequence
from numbers import Integral, Real
from typing import Any

import numpy as np

from jspec.util.messages import shown

INT32 = 2**31
_SMALLEST = 64  # sizes of arrays below it are rounded up to it
_HUGE = 1e300  # larger floats are taken for infinity


def plain(value: Any) -> Any:
    """Return a NumPy scalar as a Python number, and any other value unchanged.

    >>> plain(np.float32(0.5)), plain("0.5")
    (0.5, '0.5')
    """
    return value.item() if isinstance(value, np.generic) else value


def is_whole(value: Any, least: int = -INT32, most: int = INT32 - 1) -> bool:
    """Return whether a value is an integer from ``least`` to ``most``; bools are not.

    >>> is_whole(3), is_whole(3.0), is_whole(True), is_whole(-1, least=0)
    (True, False, False, False)
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and least <= value <= most


def is_real(value: Any) -> bool:
    """Return whether a value is a finite number; bools are not.

    >>> is_real(3), is_real(float("nan")), is_real("3")
    (True, False, False)
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and -_HUGE < plain(value) < _HUGE


def are_whole(values: Sequence[Any], least: int = -INT32) -> bool:
    """Return whether all values are integers of at least ``least``."""
    if values and all(type(value) is int for value in values):  # fast path for long prompts
        return least <= min(values) and max(values) < INT32
    return all(is_whole(value, least) for value in values)


def is_function(value: Any) -> bool:
    """Return whether a value is callable and hashable, so that it can key a compiled program."""
    return callable(value) and isinstance(value, Hashable)


def listed(name: str, value: Any) -> tuple:
    """Return the values of a list as a tuple; () for None.

    Raises:
      ValueError: ``value`` is not iterable.
    """
    if value is None:
        return ()
    try:
        return tuple(value)
    except TypeError:
        raise ValueError(f"{name}={shown(value)} must be a list.") from None


def imported(key: str, path: str) -> Any:
    """Return the object at a dotted path of the user's code; ``key`` names the setting.

    Raises:
      ValueError: it cannot be imported.
    """
    try:
        return pkgutil.resolve_name(path)
    except (ImportError, AttributeError, ValueError) as error:
        raise ValueError(
            f"{key}={shown(path)} cannot be imported: {str(error)[:200]}. Check the name; install "
            "the package, or put its folder on PYTHONPATH."
        ) from error


def json_of(text: str | bytes, *, unique: bool = False) -> Any:
    """Parse a JSON text (bytes are UTF-8). With ``unique``, a repeated key of an object raises.

    Raises:
      ValueError: the text is not JSON, or nested too deeply.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        return json.loads(text, object_pairs_hook=_once if unique else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keyed: dict[str, Any] = {}
    for key, value in pairs:
        if key in keyed:
            raise ValueError(f"the key {shown(key)} stands twice")
        keyed[key] = value
    return keyed


def encodes(text: str) -> bool:
    """Return whether UTF-8 can encode a text: it holds no half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def bucket(size: int, smallest: int = _SMALLEST, factor: int = 2) -> int:
    """Return the smallest ``smallest * factor ** i`` that is at least ``size``.

    Sizes of arrays are rounded up so, that similar calls share a compiled program.

    >>> bucket(70), bucket(3), bucket(3, 1), bucket(70, factor=4)
    (128, 64, 4, 256)
    """
    rounded = smallest
    while rounded < size:
        rounded *= factor
    return rounded
