"""Checks of the values of ``speculative_config``."""

import itertools
from collections.abc import Mapping, Sequence
from numbers import Integral
from typing import Any

from jspec.core import trees
from jspec.drafters.trees import tree_settings
from jspec.util import cache_dtypes
from jspec.util.messages import did_you_mean, shown
from jspec.util.values import INT32, is_real, is_whole

_PROMPT_LOOKUP = 5  # vLLM's default n-gram length
# Nodes attend to their ancestors through an N x N mask.
_SIZES = ("num_speculative_tokens", "tree_size", "tree_depth", "tree_top_k")
_LARGEST = dict.fromkeys(_SIZES, trees.MOST_NODES)
# The program has one step for each token.
_LARGEST |= dict.fromkeys(("prompt_lookup_min", "prompt_lookup_max"), 256)


def tree(given: Any) -> tree_settings.Tree:
    """Return a tree as a name or a tuple of rank paths."""
    if isinstance(given, str):
        if given not in tree_settings.NAMES:
            raise ValueError(
                f"tree={shown(given)} is not known; use one of {', '.join(tree_settings.NAMES)}, "
                f"or a list of rank paths{did_you_mean(given, tree_settings.NAMES)}"
            )
        return given
    if not isinstance(given, Sequence) or not all(isinstance(path, Sequence) for path in given):
        example = "[[0], [1], [0, 0]]"
        raise ValueError(
            f"tree={shown(given)} must be a name or a list of rank paths, such as {example}."
        )
    return tuple(map(tuple, given))


def check_count(count: Any, has_model: bool) -> None:
    """Check ``num_speculative_tokens`` in vLLM's words; ``has_model``: the method has a network."""
    if count is None and has_model:
        raise ValueError(
            "A speculative model was provided, but `num_speculative_tokens` was not provided"
        )
    if count is None:
        raise ValueError(
            "num_speculative_tokens must be provided with speculative model unless the draft model "
            "config contains an n_predict parameter. Take 4, for example."
        )
    if is_whole(count, most=0):
        raise ValueError(
            f"Expected num_speculative_tokens to be greater than zero ({shown(count)})."
        )
    at_least_one("num_speculative_tokens", count)


def lengths(values: Mapping[str, Any]) -> dict[str, tuple]:
    """Return the K's to choose from, and the batch sizes that choose; {} for one K.

    One K to choose from is that of a verification budget without a choice of K.
    """
    ranges, choices = values["num_speculative_tokens_per_batch_size"], values["adaptive_length"]
    budgeted = values["enable_adaptive_verification"]
    if not isinstance(budgeted, bool | None):
        raise ValueError(f"enable_adaptive_verification={shown(budgeted)} must be true or false.")
    if ranges is None and choices in (None, False) and not budgeted:
        return {}
    if ranges is not None and choices not in (None, False):
        raise ValueError(
            "num_speculative_tokens_per_batch_size and adaptive_length both choose K; give one."
        )
    if ranges is not None and budgeted:
        raise ValueError(
            "num_speculative_tokens_per_batch_size and enable_adaptive_verification both choose "
            "how much is verified; give one, or adaptive_length."
        )
    most = at_least_one("num_speculative_tokens", values["num_speculative_tokens"])
    if most is None:
        raise ValueError("num_speculative_tokens must be given: it is the longest K to choose.")
    if ranges is not None:
        sizes = _ranges(ranges)
        return {"lengths": _ascending({most, *(k for *_, k in sizes)}, most), "batch_sizes": sizes}
    if choices in (None, False):
        return {"lengths": (most,)}
    if choices is True:
        return {"lengths": _ascending({0, -(-most // 2), most}, most)}
    if not _whole_numbers(choices):
        kinds = "true or a list of whole numbers"
        raise ValueError(f"adaptive_length={shown(choices)} must be {kinds}.")
    return {"lengths": _ascending({*choices, most}, most)}


def _ranges(given: Any) -> tuple[tuple[int, int, int], ...]:
    name = "num_speculative_tokens_per_batch_size"
    if not is_list(given) or not given or not all(_whole_numbers(x) and len(x) == 3 for x in given):
        raise ValueError(
            f"{name}={shown(given)} must be a list of (least, most, K), such as "
            "[(1, 4, 5), (5, 64, 2)]."
        )
    ordered = sorted(tuple(map(int, entry)) for entry in given)
    for before, after in itertools.pairwise(ordered):
        if after[0] <= before[1]:
            raise ValueError(f"{name}={shown(given)}: {shown(before)} and {shown(after)} overlap.")
    return tuple(ordered)


def is_list(given: Any) -> bool:
    """Return whether a value is a sequence other than a text."""
    return isinstance(given, Sequence) and not isinstance(given, str)


def _whole_numbers(given: Any) -> bool:
    return is_list(given) and all(map(is_whole, given))


def _ascending(lengths: set[int], most: int) -> tuple[int, ...]:
    wrong = next((length for length in lengths if not 0 <= length <= most), None)
    if wrong is not None:
        raise ValueError(
            f"K={shown(wrong)} is not among 0 to num_speculative_tokens={most}, the longest draft."
        )
    return tuple(sorted(int(length) for length in lengths))


def prompt_lookup(shortest: Any, longest: Any) -> dict[str, int]:
    """Return both bounds of the n-gram's length; a missing bound is a copy of the other."""
    shortest = at_least_one("prompt_lookup_min", shortest)
    longest = at_least_one("prompt_lookup_max", longest)
    shortest = shortest or longest or _PROMPT_LOOKUP
    longest = longest or shortest
    if shortest > longest:
        raise ValueError(f"prompt_lookup_min={shortest} must be <= prompt_lookup_max={longest}")
    return {"prompt_lookup_min": shortest, "prompt_lookup_max": longest}


def flag(values: Mapping[str, Any], name: str) -> bool:
    """Return whether a key is set to true."""
    if not isinstance(values[name], bool | None):
        raise ValueError(f"{name}={shown(values[name])} must be true or false.")
    return bool(values[name])


def at_least_one(name: str, value: Any) -> int | None:
    """Return a count, or None if it is left out."""
    if value is None:
        return None
    if not isinstance(value, Integral) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={shown(value)} must be a whole number of at least 1.")
    most = _LARGEST.get(name, INT32 - 1)
    if value > most:
        raise ValueError(f"{name}={shown(value)} must be at most {most}.")
    return int(value)


def check_real(name: str, value: Any, *, listed: bool) -> None:
    """Check a finite number, or a list of them; None is left out."""
    if value is None:
        return
    if not (is_list(value) and all(map(is_real, value)) if listed else is_real(value)):
        kind = "a list of numbers" if listed else "a number"
        raise ValueError(f"{name}={shown(value)} must be {kind}.")


def kv_cache_dtype(given: Any) -> str | None:
    """Return a dtype of a KV cache by one of vLLM's names, or None."""
    if given is not None and not cache_dtypes.is_known(given):
        raise ValueError(f"kv_cache_dtype={shown(given)} must be {cache_dtypes.KNOWN}.")
    return given
