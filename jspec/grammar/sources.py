"""Settings as patterns and as sources of ``llguidance``, for a child process: no JAX."""

import json
from collections.abc import Callable, Mapping
from typing import Any

import llguidance
from outlines_core import json_schema

from jspec.grammar import limits, schemas
from jspec.util.messages import shown

_MALFORMED = ValueError, TypeError, KeyError, AttributeError, AssertionError, RecursionError
_MALFORMED += (OverflowError,)
# JSON as the automata have it: a space at most between its symbols, and oneOf as anyOf.
_AS_OURS = {"whitespace_pattern": "[ ]?", "coerce_one_of": True}


def pattern_of_schema(text: str) -> str:
    """Return the regular expression of the texts that follow a JSON schema.

    Raises:
      ValueError: none describes them.
    """
    try:
        schema = json.loads(text)
        schemas.check(schema)
        pattern = json_schema.build_regex_from_schema(json.dumps(schemas.spelled(schema)))
        if pattern in ("", "()"):
            raise ValueError("it allows nothing")
        if len(pattern) > limits.MOST_EXPANDED:
            raise ValueError("it needs more than memory or time allow; nest it less")
        pattern.encode()
        return pattern
    except _MALFORMED as error:
        reason = " ".join(str(error).split())[:300]
        raise ValueError(f"the JSON schema cannot be followed: {reason}") from None


def source_of(kind: str, value: Any) -> str:
    """Return the grammar of a ``structured_outputs`` setting in llguidance's form.

    Raises:
      ValueError: llguidance does not take it.
    """
    try:
        source = _SOURCES[kind](value)
    except _MALFORMED as error:
        raise ValueError(refused(kind, value, error)) from None
    error = llguidance.LLMatcher.validate_grammar(source, None)
    if error and kind == "json":
        error = _located(json.loads(text_of(value)), error)
    if error:
        raise ValueError(refused(kind, value, error))
    return source


def text_of(value: Any) -> str:
    """Return JSON as text."""
    return value if isinstance(value, str) else json.dumps(value)


def _of_schema(value: Any) -> str:
    text = text_of(value)
    schema = json.loads(text)
    if isinstance(schema, dict):
        text = json.dumps(schemas.with_format_patterns(schema))
    return llguidance.LLMatcher.grammar_from_json_schema(text, overrides=_AS_OURS)


def _of_tags(value: Any) -> str:
    """Return the grammar of a ``structural_tag`` as vLLM has it: texts with marked structures."""
    given, tags = json.loads(text_of(value)), []
    for structure in given["structures"]:
        begin = structure["begin"]
        trigger = next(filter(begin.startswith, given["triggers"]), None)
        if trigger is None:
            raise ValueError(f"begin={shown(begin)} starts with none of the triggers")
        schema = structure["schema"]
        if isinstance(schema, dict):
            schema = schemas.with_format_patterns(schema)
        tags.append(
            llguidance.StructTag(trigger=trigger, begin=begin, end=structure["end"], grammar=schema)
        )
    if not tags:
        raise ValueError("it holds no structure")
    return llguidance.StructTag.to_grammar(tags, assume_special=False)


_SOURCES: dict[str, Callable[[Any], str]] = {
    "json": _of_schema,
    "json_object": lambda _: _of_schema({"type": "object"}),
    "regex": llguidance.LLMatcher.grammar_from_regex,
    "choice": lambda texts: llguidance.LLMatcher.grammar_from_lark(
        "start: " + " | ".join(map(json.dumps, texts))
    ),
    "grammar": lambda text: llguidance.grammar_from("grammar", text),
    "structural_tag": _of_tags,
}


def refused(kind: str, value: Any, error: Any) -> str:
    """Return the words of an error of llguidance."""
    reason = " ".join(str(error).split())[:300]
    if kind == "json":
        return f"the JSON schema cannot be followed: {reason}"
    return f"structured_outputs={shown({kind: value})} cannot be followed: {reason}"


def _located(schema: Mapping, error: str) -> str:
    """Return the error of a schema with the innermost part that has the same error alone."""
    where, node = "the schema", schema
    shared = {name: schema[name] for name in ("$defs", "definitions") if name in schema}
    while True:
        for name, part in schemas.parts(node):
            if isinstance(part, Mapping) and _error_of({**shared, **part}) == error:
                where, node = f"{name} of {where}", part
                break
        else:
            return error if node is schema else f"{where}: {error}"


def _error_of(schema: Mapping) -> str:
    try:
        return llguidance.LLMatcher.validate_grammar(_of_schema(dict(schema)), None)
    except _MALFORMED as error:
        return str(error)


def parser_limits() -> llguidance.LLParserLimits:
    """Return the limits of a grammar that the host follows, in memory and in time of one mask."""
    return llguidance.LLParserLimits(
        step_lexer_fuel=limits.MASK_FUEL,
        step_max_items=limits.MASK_ITEMS,
        max_lexer_states=limits.MOST_STATES,
    )
