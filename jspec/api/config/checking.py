"""Values of ``speculative_config``'s keys: each is what it must be, or a ValueError says so."""

import itertools
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from jspec.core import trees
from jspec.drafters.trees import tree_settings
from jspec.util.messages import did_you_mean, shown
from jspec.util.values import INT32, is_real, is_whole

_PROMPT_LOOKUP = 5  # vLLM's n-gram length where neither end is given
# Every node of a draft sees its ancestors through a mask of N times N.
_OF_DRAFTS = ("num_speculative_tokens", "tree_size", "tree_depth", "tree_top_k")
_OF_LOOKUPS = ("prompt_lookup_min", "prompt_lookup_max")  # a step of the program for each token
_LONGEST_LOOKUP = 256


def tree(given: Any) -> tree_settings.Tree:
    """A tree by its name or its rank paths."""
    if isinstance(given, str):
        if given not in tree_settings.NAMES:
            raise ValueError(
                f"tree={shown(given)} is not known; use one of {', '.join(tree_settings.NAMES)}, or a "
                f"list of rank paths{did_you_mean(given, tree_settings.NAMES)}"
            )
        return given
    if not isinstance(given, Sequence) or not all(isinstance(path, Sequence) for path in given):
        raise ValueError(
            f"tree={shown(given)} must be a name or a list of rank paths, such as [[0], [1], "
            "[0, 0]]."
        )
    return tuple(tuple(path) for path in given)


def check_count(count: Any, has_model: bool) -> None:
    """``num_speculative_tokens``, in vLLM's words; ``has_model``: of a method with a network."""
    if count is None and has_model:
        raise ValueError(
            "A speculative model was provided, but `num_speculative_tokens` was not provided"
        )
    if count is None:
        raise ValueError(
            "num_speculative_tokens must be provided with speculative model unless the draft model "
            "config contains an n_predict parameter. Take 4, for example."
        )
    if not isinstance(count, Integral) or isinstance(count, bool):
        raise ValueError(f"num_speculative_tokens={shown(count)} must be a whole number.")
    if count < 1:
        raise ValueError(
            f"Expected num_speculative_tokens to be greater than zero ({shown(count)})."
        )
    at_least_one("num_speculative_tokens", count)


def lengths(values: Mapping[str, Any]) -> dict[str, tuple]:
    """The K's to choose from, and the numbers of rows that choose; empty where one is for all."""
    ranges, choices = values["num_speculative_tokens_per_batch_size"], values["adaptive_length"]
    if ranges is None and choices in (None, False):
        return {}
    if ranges is not None and choices not in (None, False):
        raise ValueError(
            "num_speculative_tokens_per_batch_size and adaptive_length both choose K; give one."
        )
    most = at_least_one("num_speculative_tokens", values["num_speculative_tokens"])
    if most is None:
        raise ValueError("num_speculative_tokens must be given: it is the longest K to choose.")
    if ranges is not None:
        found = _ranges(ranges)
        return {
            "lengths": _ascending({most, *(k for _, _, k in found)}, most),
            "batch_sizes": found,
        }
    if choices is True:
        doubled = {0, *(2**power for power in range(most.bit_length())), most}
        return {"lengths": _ascending(doubled, most)}
    if not _whole_numbers(choices):
        raise ValueError(
            f"adaptive_length={shown(choices)} must be true or a list of whole numbers."
        )
    return {"lengths": _ascending({*choices, most}, most)}


def _ranges(given: Any) -> tuple[tuple[int, int, int], ...]:
    name = "num_speculative_tokens_per_batch_size"
    listed = isinstance(given, Sequence) and not isinstance(given, str)
    if not listed or not given or not all(_whole_numbers(x) and len(x) == 3 for x in given):
        raise ValueError(
            f"{name}={shown(given)} must be a list of (least, most, K) of rows, such as "
            "[(1, 4, 5), (5, 64, 2)]."
        )
    ordered = sorted(tuple(int(x) for x in each) for each in given)
    for before, after in itertools.pairwise(ordered):
        if after[0] <= before[1]:
            raise ValueError(f"{name}={shown(given)}: {shown(before)} and {shown(after)} overlap.")
    return tuple(ordered)


def _whole_numbers(given: Any) -> bool:
    return (
        isinstance(given, Sequence)
        and not isinstance(given, str)
        and all(is_whole(x) for x in given)
    )


def _ascending(lengths: set[int], most: int) -> tuple[int, ...]:
    wrong = next((length for length in lengths if not 0 <= length <= most), None)
    if wrong is not None:
        raise ValueError(
            f"K={shown(wrong)} is not among 0 to num_speculative_tokens={most}, the longest draft."
        )
    return tuple(sorted(int(length) for length in lengths))


def prompt_lookup(shortest: Any, longest: Any) -> dict[str, int]:
    """Both ends of the n-gram's length, where one or none is given."""
    shortest = at_least_one("prompt_lookup_min", shortest)
    longest = at_least_one("prompt_lookup_max", longest)
    shortest = shortest or longest or _PROMPT_LOOKUP
    longest = longest or shortest
    if shortest > longest:
        raise ValueError(f"prompt_lookup_min={shortest} must be <= prompt_lookup_max={longest}")
    return {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}


def flag(values: Mapping[str, Any], name: str) -> bool:
    """Whether a key is set to true."""
    if not isinstance(values[name], bool | None):
        raise ValueError(f"{name}={shown(values[name])} must be true or false.")
    return bool(values[name])


def at_least_one(name: str, value: Any) -> int | None:
    """A count; None where it is left out."""
    if value is None:
        return None
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={shown(value)} must be a whole number of at least 1.")
    most = trees.MOST_NODES if name in _OF_DRAFTS else INT32 - 1
    most = _LONGEST_LOOKUP if name in _OF_LOOKUPS else most
    if value > most:
        raise ValueError(f"{name}={shown(value)} must be at most {most}.")
    return int(value)


def check_real(name: str, value: Any, *, listed: bool) -> None:
    """A number of finite size, or a list of such; None where it is left out."""
    if listed and value is not None:
        if (
            isinstance(value, str)
            or not isinstance(value, Sequence)
            or not all(map(is_real, value))
        ):
            raise ValueError(f"{name}={shown(value)} must be a list of numbers.")
    elif value is not None and not is_real(value):
        raise ValueError(f"{name}={shown(value)} must be a number.")
