"""Makes JSON Schemas (draft 2020-12) from the table of outputs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from schedc.diagnostics import CompilerBug
from schedc.schemas.shapes import OutputField, OutputShape, outputs, shapes

DIALECT = "https://json-schema.org/draft/2020-12/schema"
FAILED = "failed"
"""The shape of what a command prints in place of an output that cannot be made."""

_ATOMS: dict[str, dict[str, Any]] = {
    "text": {"type": "string"},
    "integer": {"type": "integer"},
    "number": {"type": "number"},
    "boolean": {"type": "boolean"},
    "null": {"type": "null"},
    "any": {},
}


def file_name(name: str) -> str:
    """Where the site has the JSON Schema of an output: its name and version."""
    shape = outputs()[name]
    return f"{name.replace('/', '-')}{f'-{shape.version}' if shape.version else ''}.json"


def json_schema(name: str, closed: bool = False) -> dict[str, Any]:
    """The JSON Schema of an output. closed: refuses fields without a name in the table. Later versions may add some."""
    shape = outputs()[name]
    whole = _object(_with_head(shape), closed)
    if shape.fails:
        whole = {"anyOf": [whole, _failed(shape, closed)]}
    used = sorted(_used(shape))
    definitions = {each: _object(shapes()[each].fields, closed, shapes()[each].says) for each in used}
    head = {"$schema": DIALECT, "$id": file_name(name), "title": name, "description": shape.says}
    return head | whole | ({"$defs": definitions} if definitions else {})


def _with_head(shape: OutputShape) -> tuple[OutputField, ...]:
    """The fields of an output, with name and version of its schema in front."""
    version = (OutputField("version", str(shape.version)),) if shape.version else ()
    return (OutputField("schema", f'"{shape.name}"'), *version, *shape.fields)


def _failed(shape: OutputShape, closed: bool) -> dict[str, Any]:
    """What is printed in place of the output: it has no field of the output."""
    failed = shapes()[FAILED].fields
    own = {field.name for field in failed}
    document = _object(_with_head(OutputShape(shape.name, "", failed, shape.version)), closed)
    document["properties"] |= {field.name: False for field in shape.fields if field.name not in own}
    return document


def _object(fields: tuple[OutputField, ...], closed: bool, says: str = "") -> dict[str, Any]:
    """An object with these fields."""
    properties = {field.name: _field(field, closed) for field in fields}
    required = [field.name for field in fields if not field.optional]
    described = {"description": says} if says else {}
    limits = {"additionalProperties": False} if closed else {}
    return {**described, "type": "object", "properties": properties, "required": required, **limits}


def _field(field: OutputField, closed: bool) -> dict[str, Any]:
    return _typed(field.type, field.fields, closed) | ({"description": field.says} if field.says else {})


def _typed(text: str, fields: tuple[OutputField, ...], closed: bool) -> dict[str, Any]:
    """The JSON Schema of a type as it is written."""
    if len(parts := _alternatives(text)) > 1:
        return {"anyOf": [_typed(each, fields, closed) for each in parts]}
    if text[0] == "[":
        return {"type": "array", "items": _typed(text[1:-1], fields, closed)}
    if text[0] == "{":
        return {"type": "object", "additionalProperties": _typed(text[1:-1], fields, closed)}
    if text[0] == '"':
        return {"const": text[1:-1]}
    if text.isdecimal():
        return {"const": int(text)}
    if text == "object":
        return _object(fields, closed)
    if text in _ATOMS:
        return dict(_ATOMS[text])
    if text in shapes():
        return {"$ref": f"#/$defs/{text}"}
    raise CompilerBug("schemas", f"no type {text!r} in the table of outputs")


def _alternatives(text: str) -> list[str]:
    """The types between which a type leaves the choice, outside of brackets: ``{a | b} | null`` are two."""
    parts = [""]
    for part in text.split(" | "):
        open_brackets = sum(parts[-1].count(sign) for sign in "[{") - sum(parts[-1].count(sign) for sign in "]}")
        parts = [*parts[:-1], f"{parts[-1]} | {part}"] if open_brackets else [*parts, part]
    return parts[1:]


def _used(shape: OutputShape) -> set[str]:
    """The shapes that an output refers to, through others too."""
    waiting, used = [shape, *([shapes()[FAILED]] if shape.fails else [])], set[str]()
    while waiting:
        named = set(_named(waiting.pop().fields)) - used
        used |= named
        waiting += [shapes()[name] for name in sorted(named)]
    return used


def _named(fields: tuple[OutputField, ...]) -> Iterator[str]:
    for field in fields:
        yield from (word for word in re.findall(r"[\w.-]+", re.sub('"[^"]*"', "", field.type)) if word in shapes())
        yield from _named(field.fields)
