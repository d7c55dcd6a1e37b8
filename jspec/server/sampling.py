"""The settings of a request, from its fields and the defaults of the model."""

from collections.abc import Mapping
from typing import Any

from jspec.api.sampling_params import SamplingParams
from jspec.engine.sequences import PARAMETERS
from jspec.server.errors import RequestError, refusals
from jspec.server.fields import SAMPLING, GenerationFields
from jspec.util.messages import shown

DEFAULTS = tuple(PARAMETERS)  # settings of generation_config.json that are defaults of requests


def params_of(
    fields: GenerationFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int,
    logprobs: int | None,
    structured_outputs: Mapping[str, Any] | None = None,
    **options: Any,
) -> SamplingParams:
    """Return the settings of a request.

    Args:
      fields: of the request. A field that is None has its default.
      defaults: of the model, by the names of ``DEFAULTS``.
      max_tokens: most tokens of a text.
      logprobs: as of ``SamplingParams``.
      structured_outputs: a grammar that ``fields`` do not have, of a call of a tool; it goes
        before ``response_format``.
      options: of ``SamplingParams``, instead of those of ``fields``.

    Raises:
      RequestError: a value is out of range, or there are two grammars.
    """
    given = {name: getattr(fields, name) for name in SAMPLING}
    given = {name: value for name, value in given.items() if value is not None}
    form = _of_format(fields.response_format)
    if structured_outputs:
        form = None  # a call is no answer yet, and has its own form
    grammars = [form, fields.structured_outputs, structured_outputs]
    grammars = [each for each in grammars if each]
    if len(grammars) > 1:
        raise RequestError(
            "structured_outputs, and response_format or tool_choice, set the form of the text; "
            "send one of them.",
            param="response_format",
        )
    with refusals():
        return SamplingParams(
            **(dict(defaults) | given | options),
            max_tokens=max_tokens,
            logprobs=logprobs,
            structured_outputs=grammars[0] if grammars else None,
        )


def _of_format(response_format: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the grammar of ``response_format``."""
    if response_format is None:
        return None
    match response_format:
        case {"type": "text"}:
            return None
        case {"type": "json_object"}:
            return {"json_object": True}
        case {"type": "json_schema", "json_schema": {"schema": dict(schema)}}:
            return {"json": schema}
        case {"type": "json_schema", "schema": dict(schema)}:  # the form of /v1/responses
            return {"json": schema}
        case {"type": "structural_tag"}:
            return {"structural_tag": dict(response_format)}
    raise RequestError(
        f"response_format={shown(response_format)} must have the type text, json_object, "
        "json_schema (with json_schema.schema, an object) or structural_tag.",
        param="response_format",
    )
