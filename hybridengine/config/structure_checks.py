"""Rules of the forms of responses: what the engine's grammar reads of a JSON schema and of a regular expression.

xgrammar ignores the rest without a word, so that responses could leave the form. The tables below list what its grammars
were found to keep (tests/full/engines/test_structures.py draws from them); anything else is refused.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from hybridengine.config.algorithm import Conflict
from hybridengine.config.sections import StructureSection

NOTES = {"title", "description", "default", "examples", "deprecated", "readOnly", "writeOnly"}
NOTES |= {"$comment", "$schema", "$defs", "definitions"}
"""Keywords that restrict nothing."""
ALONE = ("$ref", "const", "enum", "anyOf", "allOf")
"""Keywords beside which the grammar reads no other; a `type` beside `const` and `enum` may be that of their values."""
NAMED = ("properties", "required", "minProperties")
"""Keywords that fail beside names that `additionalProperties` leaves free: "\\u0061" is such a name, and is "a"."""
OF_TYPE: dict[str, tuple[str, ...]] = {
    "object": (*NAMED, "maxProperties", "additionalProperties"),
    "array": ("items", "prefixItems", "minItems", "maxItems"),
    "string": ("minLength", "maxLength", "pattern", "format"),
    "number": (bounds := ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum")),
    "integer": bounds,
    "boolean": (),
    "null": (),
}
"""Type -> the keywords that the grammar reads beside it. Without a type it reads none."""
FORMATS = {"email", "date", "time", "date-time", "duration", "ipv4", "ipv6", "hostname", "uuid"}
FORMATS |= {"uri", "uri-reference", "uri-template"}
"""Formats that the grammar reads, and of which it draws no quote inside a string."""
NAMED_SCHEMAS = ("properties", "$defs", "definitions")
"""Keywords whose values have schemas under names of their own."""
IGNORED = "which the engine's grammar ignores, so that responses could violate the schema"

REGEX_TOKEN = re.compile(r"\\.|\[(?:\\.|[^\]\\])*\]|\(\?(?::|<?[=!])?|.", re.DOTALL)
REGEX_ESCAPES = "dDwWsSnrtfvxu"
"""Letters after a backslash that the grammar reads as regular expressions do; `\\Z` is a Z to it."""


def structure_conflicts(key: str, structure: StructureSection) -> Iterator[Conflict]:
    """Yield the violated rules of a structure, the value of `key`."""
    given = [name for name in StructureSection.model_fields if getattr(structure, name)]
    if len(given) != 1:
        names = ", ".join(StructureSection.model_fields)
        remedy = "leave out all but one" if given else f"add one, or leave {key} out"
        yield Conflict(
            f"{key} must be given by exactly one of {names}, found {' and '.join(given) or 'none'}; {remedy}",
            tuple(f"{key}.{name}" for name in StructureSection.model_fields),
        )
    for problem in regex_problems(structure.regex):
        yield Conflict(f"{key}.regex={structure.regex!r} {problem}", (f"{key}.regex",))
    if structure.json_schema:
        for problem in schema_problems(structure.json_schema):
            yield Conflict(f"{key}.json_schema: {problem}", (f"{key}.json_schema",))


def schema_problems(schema: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the grammar does not keep of a JSON schema, each with its place: "#/properties/a has ..."."""
    parts = dict(_parts("#", schema))
    for path, part in parts.items():
        if isinstance(part, dict):
            yield from (f"{path} {problem}" for problem in _problems(part, parts))
    if not _ends(schema, parts, frozenset()):
        yield "# cannot be met: each of its texts would contain another one; make a property that leads back optional"


def _parts(path: str, schema: Any) -> Iterator[tuple[str, Any]]:
    """Yield a schema and all schemas in it by their places, as `$ref` names them."""
    yield path, schema
    for keyword, value in _dict(schema).items():
        if keyword in NAMED_SCHEMAS:
            inner = {f"/{name}": one for name, one in _dict(value).items()}
        elif keyword in ("anyOf", "allOf", "prefixItems"):
            inner = {f"/{number}": one for number, one in enumerate(_list(value))}
        else:
            inner = {"": value} if keyword in ("items", "additionalProperties") else {}
        for name, one in inner.items():
            yield from _parts(f"{path}/{keyword}{name}", one)


def _problems(schema: Mapping[str, Any], parts: Mapping[str, Any]) -> Iterator[str]:
    types = _list(schema.get("type"))
    alone = next((name for name in ALONE if name in schema), None)
    if alone is not None:
        values = _list(schema["enum"]) if alone == "enum" else [schema["const"]] if alone == "const" else []
        read = {alone, "type"} if values else {alone}
        place, remedy = f" beside {alone}", f"write the restriction inside of {alone}, or leave it out"
        if values and types and not all(any(_has_type(one, kind) for kind in types) for one in values):
            yield f"has {alone} with values that are not of its type, which the grammar ignores; correct one of them"
    elif schema.get("additionalProperties", False) is False:
        read = {"type", *(name for kind in types for name in OF_TYPE.get(str(kind), ()))} if types else set()
        place, remedy = "" if types else " without a type", "leave it out" if types else "add the type"
    else:
        read = {"type", "additionalProperties", "maxProperties"}
        place = " beside additionalProperties that are not false"
        remedy = "set additionalProperties: false, or give free names a property of their own"
    if unread := sorted({*schema} - NOTES - read):
        remedy = "write anyOf in place of oneOf" if "oneOf" in unread else remedy
        yield f"has {', '.join(unread)}{place}, {IGNORED}; {remedy}"
    properties = _dict(schema.get("properties"))
    lacking = [one for one in _list(schema.get("required")) if str(one) not in properties]
    if lacking and "required" not in unread:
        yield f"has required={lacking}, which its properties lack and the grammar never draws; add them to properties"
    if (reference := schema.get("$ref")) is not None and str(reference) not in parts:
        yield f"has $ref={reference!r}, which names no schema in it; write # or a place such as #/$defs/NAME"
    if schema.get("anyOf") == [] or len(_list(schema.get("allOf", [{}]))) != 1:
        yield "has anyOf without a schema, or allOf without exactly one; write one schema that says all"
    if "format" in schema and str(schema["format"]) not in FORMATS:
        yield f"has format={schema['format']!r}, {IGNORED}; choose one of {', '.join(sorted(FORMATS))}"
    if isinstance(pattern := schema.get("pattern"), str):
        yield from (f"has pattern={pattern!r}, which {problem}" for problem in regex_problems(pattern, True))


def _ends(schema: Any, parts: Mapping[str, Any], followed: frozenset[str]) -> bool:
    """Return True if some finite text meets a schema; `followed` are the references that led to it."""
    schema = _dict(schema)
    if isinstance(reference := schema.get("$ref"), str):
        return reference not in followed and _ends(parts.get(reference), parts, followed | {reference})
    if options := _list(schema.get("anyOf", [])):
        return any(_ends(one, parts, followed) for one in options)
    properties, lowest = _dict(schema.get("properties")), schema.get("minItems", 0)
    needed = [properties.get(str(name)) for name in _list(schema.get("required", []))]
    if isinstance(lowest, int) and lowest > 0:
        prefix = _list(schema.get("prefixItems", []))
        needed += prefix[:lowest] + [schema.get("items")] * (lowest > len(prefix))
    return all(_ends(one, parts, followed) for one in needed + _list(schema.get("allOf", [])))


def regex_problems(regex: str, in_json: bool = False) -> Iterator[str]:
    """Yield what the grammar reads otherwise than regular expressions do; `in_json` for a JSON schema's pattern."""
    tokens = REGEX_TOKEN.findall(regex)
    for number, token in enumerate(tokens):
        is_class = token.startswith("[") and len(token) > 1
        letters = {one[1] for one in re.findall(r"\\.", token, re.DOTALL) if one[1].isalnum()}
        known = {*REGEX_ESCAPES} - {*("xu" if is_class else "xunrtfv")} if in_json else {*REGEX_ESCAPES}
        if in_json and (token in ('"', r"\"", r"\\") or token < " " or letters & {*REGEX_ESCAPES} - known):
            yield f"has {token!r}, and the grammar cannot write a character that JSON escapes; leave it out"
        elif (
            (token == "^" and number)
            or (token == "$" and number < len(tokens) - 1)
            or (token.startswith("(?") and token != "(?:")
            or token.startswith(r"[\^")
            or letters - known
        ):
            yield (
                f"has {token!r} as part {number + 1}, which the engine's grammar reads otherwise; write ^ and $ at the"
                r" ends alone, groups as (...) or (?:...), no class that begins [\^, and neither lookaround nor \Z, \b"
            )


def _has_type(value: Any, kind: Any) -> bool:
    if isinstance(value, bool) or value is None:
        return kind == ("null" if value is None else "boolean")
    if isinstance(value, int | float):
        return kind == "number" or (kind == "integer" and (isinstance(value, int) or value.is_integer()))
    return kind == {str: "string", list: "array", dict: "object"}.get(type(value))


def _list(value: Any) -> list[Any]:
    """Return a list, or one of a single value; the engine refuses values of another type."""
    return value if isinstance(value, list) else [] if value is None else [value]


def _dict(value: Any) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}
