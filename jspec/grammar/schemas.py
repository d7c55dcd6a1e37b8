"""The check that a JSON schema can be followed exactly.

``outlines-core`` reads one form of each (sub)schema and ignores other keywords: bounds of numbers,
a pattern beside a length, everything that ``allOf`` adds. A text could then violate its schema. So
a keyword that would be ignored is refused by name.
"""

import json
from collections import Counter
from collections.abc import Mapping
from typing import Any

from jspec.grammar import limits, patterns
from jspec.grammar.formats import FORMATS
from jspec.util.messages import shown

_ANNOTATIONS = {"$anchor", "$comment", "$defs", "$id", "$schema", "default", "definitions"}
_ANNOTATIONS |= {"deprecated", "description", "discriminator", "examples", "readOnly", "title"}
_ANNOTATIONS |= {"writeOnly"}
# The form of a schema is the first of these keys that it has, and the keywords that go with it.
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
}
_KINDS = {"string": str, "array": list, "object": dict, "integer": int, "number": int | float}
_KINDS |= {"boolean": bool, "null": type(None)}
_DEFINITIONS = ("$defs", "definitions")  # keys of schemas that only references reach
# The keywords whose values are maps of schemas, lists of schemas, and schemas.
_MAPS = ("properties", "patternProperties", *_DEFINITIONS)
_LISTS = ("allOf", "anyOf", "oneOf", "prefixItems")
_SCHEMAS = ("items", "additionalProperties", "additionalItems")
_MOST_LEVELS = 200


def check(schema: str | Mapping) -> None:
    """Raise ValueError, naming the keyword, if a schema cannot be followed exactly.

    ``oneOf`` is treated as ``anyOf``: a text may match a second branch.
    """
    schema = json.loads(schema) if isinstance(schema, str) else schema
    _check(schema, "the schema", 0)
    if isinstance(schema, Mapping):
        _check_references(schema)


def spelled(schema: Any) -> Any:
    """Return a checked schema whose patterns and names of properties are those of JSON texts.

    ``outlines-core`` writes names as they are, and takes patterns for those of the spelling.
    """
    if not isinstance(schema, Mapping):
        return schema
    spell = lambda name: json.dumps(name, ensure_ascii=False)[1:-1]
    result = dict(schema)
    for name, value in schema.items():
        if name == "pattern":
            result[name] = f"^(?:{patterns.spelled(value)})$"
        elif name == "format":
            del result[name]
            result["pattern"] = f"^(?:{patterns.spelled(f'^(?:{FORMATS[value]})$')})$"
        elif name == "properties":
            result[name] = {spell(key): spelled(part) for key, part in value.items()}
        elif name == "required":
            result[name] = [spell(key) for key in value]
        elif name in ("$defs", "definitions") and isinstance(value, Mapping):
            result[name] = {key: spelled(part) for key, part in value.items()}
        elif name in ("items", "additionalProperties"):
            result[name] = spelled(value)
        elif name in ("allOf", "anyOf", "oneOf", "prefixItems"):
            result[name] = [spelled(part) for part in value]
    return result


def _check_references(schema: Mapping) -> None:
    """Raise ValueError if a schema contains itself, or expands to very many subschemas.

    Each target of a reference is visited once.
    """
    counts = {"": _counted(schema)}
    path = [("", iter(counts[""][1]))]
    sizes: dict[str, int] = {}
    while path:
        name, left = path[-1]
        reference = next(left, None)
        if reference is None:
            count, references = counts[name]
            sizes[name] = count + sum(times * sizes[each] for each, times in references.items())
            path.pop()
        elif reference in counts and reference not in sizes:
            raise ValueError(
                f"it contains itself by $ref {reference!r}, so its texts have no greatest depth; "
                "write out as many levels as they may have"
            )
        elif reference not in sizes:
            inner = _at(schema, reference)
            counts[reference] = _counted(inner) if isinstance(inner, Mapping) else (1, Counter())
            path.append((reference, iter(counts[reference][1])))
    if sizes[""] > limits.MOST_PARTS:
        raise ValueError(
            f"it has {shown(sizes[''])} subschemas when references are written out, and may have "
            f"at most {limits.MOST_PARTS}; nest it less"
        )


def _counted(schema: Mapping) -> tuple[int, Counter[str]]:
    """Return the number of subschemas and the references, without those of definitions."""
    count, references, left = 0, Counter(), [schema]
    while left:
        node = left.pop()
        count += 1
        if isinstance(node.get("$ref"), str):
            references[node["$ref"]] += 1
        inner = {name: part for name, part in node.items() if name not in _DEFINITIONS}
        left += [part for _, part in parts(inner) if isinstance(part, Mapping)]
    return count, references


def _at(root: Mapping, reference: str) -> Any:
    """Return what a local reference such as ``#/$defs/name`` points to, or None."""
    node: Any = root
    for step in reference.removeprefix("#").split("/")[1:]:
        step = step.replace("~1", "/").replace("~0", "~")
        node = node.get(step) if isinstance(node, Mapping) else None
    return node if reference.startswith("#") else None


def _check(schema: Any, where: str, depth: int) -> None:
    if depth > _MOST_LEVELS:
        raise ValueError(f"it is more than {_MOST_LEVELS} levels deep")
    if not isinstance(schema, Mapping):
        return  # true, false, or an invalid value, which the library handles
    form = next((name for name in _FORMS if name in schema), None)
    types = [kind for kind in _types(schema) if isinstance(kind, str)]
    known = _FORMS[form] if form else {"type"}.union(*(_OF_TYPE.get(kind, ()) for kind in types))
    for name in schema:
        if name not in known and name != form and name not in _ANNOTATIONS:
            beside = f" beside {form!r}" if form else ""
            raise ValueError(f"{where} has {name!r}{beside}, which is not followed; leave it out")
    _check_values(schema, form, where)
    for name, part in parts(schema):
        _check(part, f"{name} of {where}", depth + 1)


def _check_values(schema: Mapping, form: str | None, where: str) -> None:
    """Check the keywords of one form against each other."""
    lengths = {"minLength", "maxLength"} & schema.keys()
    alone = [name for name in ("pattern", "format") if name in schema]
    if form is None and len(alone) + bool(lengths) > 1:
        both = " and ".join(map(repr, [*alone, *sorted(lengths)]))
        raise ValueError(f"{where} has {both}, of which only one is followed; leave one out")
    if form is None and "format" in schema and schema["format"] not in FORMATS:
        raise ValueError(
            f"{where} has 'format' {schema['format']!r}, which is not followed; leave it out"
        )
    for name in ("maxLength", "maxItems", "maxProperties"):
        if isinstance(schema.get(name), int | float) and schema[name] > limits.MOST_STATES:
            raise ValueError(
                f"{where} has {name!r} {schema[name]}, more than the {limits.MOST_STATES} states "
                "of an automaton; leave it out"
            )
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
    types = schema.get("type", ())
    return [types] if isinstance(types, str) else list(types)


def _is(value: Any, kind: Any) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, _KINDS.get(kind, object))


def parts(schema: Mapping) -> list[tuple[str, Any]]:
    """Return the subschemas of a schema with their names."""
    subschemas: list[tuple[str, Any]] = []
    for name, inner in schema.items():
        if name in _MAPS and isinstance(inner, Mapping):
            subschemas += [(repr(key), part) for key, part in inner.items()]
        elif name in _SCHEMAS and isinstance(inner, Mapping):
            subschemas.append((repr(name), inner))
        elif name in _LISTS and isinstance(inner, list | tuple):
            subschemas += [(f"{name}[{index}]", part) for index, part in enumerate(inner)]
    return subschemas


def with_format_patterns(schema: Any) -> Any:
    """Return a schema whose formats are patterns, for a library that has others of its own."""
    if not isinstance(schema, Mapping):
        return schema
    result = dict(schema)
    for name, inner in schema.items():
        if name in _MAPS and isinstance(inner, Mapping):
            result[name] = {key: with_format_patterns(part) for key, part in inner.items()}
        elif name in _SCHEMAS:
            result[name] = with_format_patterns(inner)
        elif name in _LISTS and isinstance(inner, list | tuple):
            result[name] = [with_format_patterns(part) for part in inner]
    if isinstance(schema.get("format"), str) and schema["format"] in FORMATS:
        form = {"pattern": f"^(?:{FORMATS[result.pop('format')]})$"}
        if "pattern" in result:
            result["allOf"] = [*result.get("allOf", ()), form]
        else:
            result |= form
    return result
