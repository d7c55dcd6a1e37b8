"""Defaults of requests: those that the authors of a model recommend."""

from collections.abc import Mapping
from typing import Any

from jspec.api.llm import LLM
from jspec.api.sampling_params import SamplingParams
from jspec.checkpoints import checkpoint
from jspec.server.sampling import DEFAULTS
from jspec.util import values
from jspec.util.messages import did_you_mean, shown

MAX_NEW_TOKENS = "max_new_tokens"
_NAMES = (*DEFAULTS, MAX_NEW_TOKENS)


def of(llm: LLM, source: str, override: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return the defaults of requests, as vLLM reads them.

    Args:
      llm: the loaded models.
      source: "auto" for the generation_config.json of the model, "vllm" for none, or a directory.
      override: settings of ``overriding``, instead of those of the file.

    Raises:
      ValueError: the file is missing from a directory, or a value is out of range.
    """
    return _of_file(llm, source) | dict(override or {})


def overriding(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of --override-generation-config, with ``max_new_tokens``.

    Raises:
      ValueError: a name is unknown, or a value is out of range.
    """
    flag = "--override-generation-config"
    for name in given:
        if name not in _NAMES:
            guess = did_you_mean(name, _NAMES) or f"; it takes {', '.join(_NAMES)}."
            raise ValueError(f"{flag} has no {shown(name)}{guess}")
    limit = given.get(MAX_NEW_TOKENS)
    if limit is None:
        return _checked(flag, given)
    if not values.is_whole(limit, least=1):
        raise ValueError(f"{flag}: max_new_tokens={shown(limit)} must be an integer of at least 1.")
    return _checked(flag, given) | {MAX_NEW_TOKENS: limit}


def _of_file(llm: LLM, source: str) -> dict[str, Any]:
    if source == "vllm":
        return {}
    given = checkpoint.generation_config(llm.build.model.path if source == "auto" else source)
    if given is None:
        if source == "auto":
            return {}
        raise ValueError(f"--generation-config {source}: there is no generation_config.json.")
    return _checked("generation_config.json", given)


def _checked(source: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the defaults in a configuration."""
    known = {name: given[name] for name in DEFAULTS if given.get(name) is not None}
    try:
        SamplingParams(**known)
    except ValueError as error:
        raise ValueError(f"{source}: {error}") from None
    return known
