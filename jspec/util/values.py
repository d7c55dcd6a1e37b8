"""What the values that users give may be: JSON and NumPy have several kinds of number."""

import json
import os
from collections.abc import Hashable, Sequence
from numbers import Integral, Real
from pathlib import Path
from typing import Any

import numpy as np

from jspec.util import atomic_files
from jspec.util.messages import shown

INT32 = 2**31
_HUGE = 1e300  # a float that is close to infinity is no number anybody means


def plain(value: Any) -> Any:
    """A number of NumPy as Python's own, which its bounds are compared with; all else as it is.

    >>> plain(np.float32(0.5)), plain("0.5")
    (0.5, '0.5')
    """
    return value.item() if isinstance(value, np.generic) else value


def is_whole(value: Any, least: int = -INT32, most: int = INT32 - 1) -> bool:
    """Whether a value is a whole number from ``least`` to ``most``, and no bool.

    >>> is_whole(3), is_whole(3.0), is_whole(True), is_whole(-1, least=0)
    (True, False, False, False)
    """
    whole = isinstance(value, Integral) and not isinstance(value, bool)
    return whole and least <= value <= most


def is_real(value: Any) -> bool:
    """Whether a value is a finite number, and no bool.

    >>> is_real(3), is_real(float("nan")), is_real("3")
    (True, False, False)
    """
    number = isinstance(value, Real) and not isinstance(value, bool)
    return number and -_HUGE < plain(value) < _HUGE


def are_whole(values: Sequence[Any], least: int = -INT32) -> bool:
    """Whether all of them are whole numbers of at least ``least``."""
    if values and all(type(value) is int for value in values):  # prompts are long
        return least <= min(values) and max(values) < INT32
    return all(is_whole(value, least) for value in values)


def is_function(value: Any) -> bool:
    """Whether a value can be called, and be a part of what tells programs apart."""
    return callable(value) and isinstance(value, Hashable)


def listed(name: str, value: Any) -> tuple:
    """The values of a list; none where it is None.

    Raises:
      ValueError: it is no list.
    """
    if value is None:
        return ()
    try:
        return tuple(value)
    except TypeError:
        raise ValueError(f"{name}={shown(value)} must be a list.") from None


def json_of(text: str | bytes, *, unique: bool = False) -> Any:
    """What a JSON text says.

    Args:
      text: as UTF-8, if bytes.
      unique: whether an object that has a key twice is refused; else its last value counts.

    Raises:
      ValueError: it is not JSON, or nested beyond what Python follows.
    """
    try:
        text = text if isinstance(text, str) else text.decode()
        return json.loads(text, object_pairs_hook=_once if unique else None)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {shown(key)} stands twice")
        found[key] = value
    return found


def check_output(option: str, path: Path | None, *, folder: bool = False) -> None:
    """Whether what a command finds can be written, before it begins.

    Args:
      option: its name.
      path: the file to write, or None; a ``folder`` is made, with those above it.

    Raises:
      ValueError: a file is to lie in no folder, a folder under a file, or neither may be written.
    """
    if path is None or (not folder and atomic_files.is_stream(path) and os.access(path, os.W_OK)):
        return
    written = atomic_files.followed(path)
    place = written if folder else written.parent
    while folder and not place.exists():
        place = place.parent
    if place.exists() and not place.is_dir():
        raise ValueError(f"{option} {path}: {place} is a file, not a folder; name another place.")
    if not place.is_dir():
        raise ValueError(f"{option} {path}: there is no folder {place}; make it first.")
    if not folder and path.is_dir():
        raise ValueError(f"{option} {path} is a folder; name a file in it.")
    # The folder, too: a file is written beside its place and then moved there.
    for each in (place, written):
        if each.exists() and not os.access(each, os.W_OK):
            raise ValueError(f"{option} {path}: {each} may not be written; name another place.")


def check_apart(*outputs: tuple[str, Path | None]) -> None:
    """Whether results that are written beside each other have files of their own.

    Args:
      *outputs: an option's name and its path, or None. Streams take anything.

    Raises:
      ValueError: two are one place, in which the second would take the place of the first.
    """
    taken: dict[str, str] = {}
    for option, path in outputs:
        if path is None or atomic_files.is_stream(path):
            continue
        place = os.path.realpath(path)
        if place in taken:
            raise ValueError(
                f"{option} {path} is the place of {taken[place]}, too, and would be written over "
                "it; name another."
            )
        taken[place] = option
