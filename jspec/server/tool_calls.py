"""Calls of tools: the grammar of a request that forces them, and the reader of its texts."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jspec.server.errors import RequestError
from jspec.server.readers import CALLS, CallReader
from jspec.server.readers.forced import Named, Required
from jspec.util.messages import shown

_ANY = {"type": "object"}
_VALUES = {"const", "default", "enum", "examples"}  # keywords whose values are no schemas
_NAMED = {"properties", "patternProperties", "dependentSchemas", "$defs", "definitions"}


@dataclasses.dataclass(frozen=True)
class Use:
    """The use of tools by a request.

    Attributes:
      structured_outputs: the grammar that makes the text a call; None for none.
      reader: makes a reader for each text; None where texts have no calls.
      finish_reason: of texts with calls.
    """

    structured_outputs: dict[str, Any] | None = None
    reader: Callable[[], CallReader] | None = None
    finish_reason: str = "tool_calls"


def use_of(
    tools: Sequence[Mapping[str, Any]] | None,
    choice: str | Mapping[str, Any] | None,
    *,
    parser: str | None,
    is_parallel: bool,
) -> Use:
    """Return how a request uses tools.

    Args:
      tools: of the request.
      choice: ``tool_choice``.
      parser: a name in ``CALLS``, for "auto"; None for none.
      is_parallel: whether a text may have several calls.

    Raises:
      RequestError: a tool is malformed, or the choice does not fit the tools.
    """
    schemas = dict(_schema(index, tool) for index, tool in enumerate(tools or ()))
    if choice is None:
        choice = "auto" if schemas else "none"
    if choice == "none":
        return Use()
    if not schemas:
        raise RequestError(f"tool_choice={shown(choice)} needs tools.", param="tool_choice")
    if choice == "auto":
        if parser is None:
            raise RequestError(
                'tool_choice="auto" needs a reader of calls, and the chat template of this model '
                "shows none; start the server with --tool-call-parser, or send tool_choice "
                '"none", "required" or a function.',
                param="tool_choice",
            )
        return Use(None, lambda: CALLS[parser](schemas))
    if choice == "required":
        return Use({"json": _list_schema(schemas, is_parallel)}, Required)
    match choice:
        case {"type": "function", "function": {"name": str(name)}} if name in schemas:
            return Use({"json": schemas[name]}, lambda: Named(name), "stop")
    raise RequestError(
        f'tool_choice={shown(choice)} must be "none", "auto", "required" or the function of a tool '
        f"({', '.join(schemas)}).",
        param="tool_choice",
    )


def _schema(index: int, tool: Mapping[str, Any]) -> tuple[str, dict[str, Any]]:
    match tool:
        case {"type": "function", "function": {"name": str(name), **rest}}:
            schema = rest.get("parameters") or _ANY
            if isinstance(schema, Mapping):
                return name, dict(schema)
    raise RequestError(
        f'tools[{index}]={shown(tool)} must be {{"type": "function", "function": {{"name": ..., '
        '"parameters": a JSON schema}}.',
        param="tools",
    )


def _list_schema(schemas: Mapping[str, Mapping[str, Any]], is_parallel: bool) -> dict[str, Any]:
    """Return the schema of a list of calls.

    The parameters of each tool become a definition of it, with the definitions that they bring
    inside. So tools may have definitions of the same name.

    Args:
      schemas: of the parameters, by the names of tools.
      is_parallel: whether there may be several calls.
    """
    roots = {name: f"tool_{index}" for index, name in enumerate(schemas)}
    each = [
        {
            "type": "object",
            "properties": {
                "name": {"enum": [name]},
                "parameters": {"$ref": f"#/$defs/{root}"},
            },
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for name, root in roots.items()
    ]
    most = {} if is_parallel else {"maxItems": 1}
    items = each[0] if len(each) == 1 else {"anyOf": each}
    lifted = {root: _moved(schemas[name], f"#/$defs/{root}") for name, root in roots.items()}
    return {"type": "array", "items": items, "minItems": 1, **most, "$defs": lifted}


def _moved(schema: Any, root: str) -> Any:
    """Return a schema whose references to itself are right where it stands under ``root``."""
    if isinstance(schema, list):
        return [_moved(part, root) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    moved = dict(schema)
    for name, value in schema.items():
        if name == "$ref" and isinstance(value, str):
            moved[name] = root + value[1:] if value.startswith("#") else value
        elif name in _NAMED and isinstance(value, Mapping):
            moved[name] = {key: _moved(part, root) for key, part in value.items()}
        elif name not in _VALUES:
            moved[name] = _moved(value, root)
    return moved
