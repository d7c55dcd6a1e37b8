"""Defaults of requests: those that the authors of a model recommend."""

from typing import Any

from jspec.api.llm import LLM
from jspec.api.sampling_params import SamplingParams
from jspec.checkpoints import checkpoint
from jspec.server.sampling import DEFAULTS


def of(llm: LLM, source: str) -> dict[str, Any]:
    """Return the defaults of requests, as vLLM reads them.

    Args:
      llm: the loaded models.
      source: "auto" for the generation_config.json of the model, "vllm" for none, or a directory.

    Raises:
      ValueError: the file is missing from a directory, or a value is out of range.
    """
    if source == "vllm":
        return {}
    given = checkpoint.generation_config(llm.build.model.path if source == "auto" else source)
    if given is None:
        if source == "auto":
            return {}
        raise ValueError(f"--generation-config {source}: there is no generation_config.json.")
    known = {name: given[name] for name in DEFAULTS if given.get(name) is not None}
    try:
        SamplingParams(**known)
    except ValueError as error:
        raise ValueError(f"generation_config.json: {error}") from None
    return known
