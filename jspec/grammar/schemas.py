"""Which JSON schemas can be followed to the letter.

The library that turns schemas into patterns reads one form of each (sub)schema and passes over what
stands beside it: bounds of numbers, a pattern beside a length, all that ``allOf`` adds. A text may
then break the schema that it was made for. So whatever would be passed over is refused by name.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

_NOTES = frozenset(
    {
        "$anchor",
        "$comment",
        "$defs",
        "$id",
        "$schema",
        "default",
        "definitions",
        "deprecated",
        "description",
        "discriminator",
        "examples",
        "readOnly",
        "title",
        "writeOnly",
    }
)
# The form of a schema is the first of these that it has; with it go the keywords named.
_FORMS = {
    "properties": {"type", "required", "additionalProperties"},
    "allOf": set(),
    "anyOf": set(),
    "oneOf": set(),
    "prefixItems": {"type", "items", "minItems", "maxItems"},
    "enum": {"type"},
    "const": {"type"},
    "$ref": set(),
}
_OF_TYPE = {
    "string": {"minLength", "maxLength", "pattern", "format"},
    "array": {"items", "minItems", "maxItems"},
    "object": {"additionalProperties", "minProperties", "maxProperties"},
    "integer": set(),
    "number": set(),
    "boolean": set(),
    "null": set(),
}
_KINDS = {
    "string": str,
    "array": list,
    "object": dict,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
    "null": type(None),
}
_MOST_LEVELS = 200


def check(schema: str | Mapping) -> None:
    """Refuses a schema that cannot be followed to the letter.

    ``oneOf`` counts as ``anyOf``: that a text fits no second branch is not seen to.

    Raises:
      ValueError: it is no schema, or a keyword would be passed over; names it and where.
    """
    _check(json.loads(schema) if isinstance(schema, str) else schema, "the schema", 0)


def _check(schema: Any, where: str, level: int) -> None:
    if level > _MOST_LEVELS:
        raise ValueError(f"it is more than {_MOST_LEVELS} levels deep")
    if not isinstance(schema, Mapping):
        return  # true, false, or nonsense, which the library knows
    form = next((name for name in _FORMS if name in schema), None)
    known = _FORMS[form] if form else {"type"}.union(*map(_keywords, _types(schema)))
    for name in schema:
        if name not in known and name != form and name not in _NOTES:
            beside = f" beside {form!r}" if form else ""
            raise ValueError(f"{where} has {name!r}{beside}, which is not followed; leave it out")
    _check_values(schema, form, where)
    for place, part in _parts(schema):
        _check(part, f"{place} of {where}", level + 1)


def _check_values(schema: Mapping, form: str | None, where: str) -> None:
    """What keywords of one form ask of each other."""
    lengths = {"minLength", "maxLength"} & schema.keys()
    alone = [name for name in ("pattern", "format") if name in schema]
    if form is None and len(alone) + bool(lengths) > 1:
        both = " and ".join(map(repr, [*alone, *sorted(lengths)]))
        raise ValueError(f"{where} has {both}, of which one alone is followed; leave one out")
    if form == "properties":
        _check_type(where, schema, "object")
        missing = set(schema.get("required", ())) - set(schema["properties"])
        if missing:
            raise ValueError(f"{where} requires {sorted(missing)}, which are no 'properties' of it")
    if form == "allOf" and len(schema["allOf"]) > 1:
        raise ValueError(f"{where} has 'allOf' of several; write them as one schema")
    if form == "prefixItems":
        _check_type(where, schema, "array")
        count = len(schema["prefixItems"])
        if not schema.get("minItems", 0) <= count <= schema.get("maxItems", count):
            raise ValueError(f"{where} has {count} 'prefixItems', outside minItems and maxItems")
    if form in ("enum", "const"):
        for value in schema["enum"] if form == "enum" else [schema["const"]]:
            if schema.get("type") and not any(_is(value, kind) for kind in _types(schema)):
                raise ValueError(f"{where} allows {value!r}, which is no {schema['type']}")


def _check_type(where: str, schema: Mapping, kind: str) -> None:
    if schema.get("type", kind) != kind:
        raise ValueError(f"{where} has type {schema['type']!r}, but keywords of an {kind}")


def _types(schema: Mapping) -> list[str]:
    given = schema.get("type", ())
    return [given] if isinstance(given, str) else list(given)


def _keywords(kind: Any) -> set[str]:
    return _OF_TYPE.get(kind, set()) if isinstance(kind, str) else set()


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS.get(kind, object))


def _parts(schema: Mapping) -> list[tuple[str, Any]]:
    """The schemas inside of one, and their names."""
    found: list[tuple[str, Any]] = []
    for name in ("properties", "$defs", "definitions"):
        inner = schema.get(name)
        found += [(repr(key), part) for key, part in inner.items()] if _is_map(inner) else []
    for name in ("allOf", "anyOf", "oneOf", "prefixItems"):
        inner = schema.get(name)
        listed = isinstance(inner, Sequence) and not isinstance(inner, str)
        found += [(f"{name}[{n}]", part) for n, part in enumerate(inner)] if listed else []
    found += [
        (repr(name), schema[name])
        for name in ("items", "additionalProperties")
        if _is_map(schema.get(name))
    ]
    return found


def _is_map(value: Any) -> bool:
    return isinstance(value, Mapping)
