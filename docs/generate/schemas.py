"""A page of the forms of all JSON that the command prints, and the JSON Schema of each."""

from __future__ import annotations

import json

from schedc.schemas.document import file_name, json_schema
from schedc.schemas.shapes import outputs, table

from .write import fence

_PAGE = """# JSON of the commands

Every `--json` prints one object. Its field `schema` names its form. `version` counts changes that break readers: a
field that goes, or has another type. Fields may be added within a version. A name such as `schedc.proof/1` has the
version in it.

`schedc schema NAME` prints a JSON Schema (draft 2020-12). The site has the same files."""


def pages() -> dict[str, str]:
    link = '<a href="../../schemas/{0}">{0}</a>'
    rows = [f"| `{each.name}` | {each.says} | {link.format(file_name(each.name))} |" for each in outputs().values()]
    parts = [_PAGE, "\n".join(["| `schema` | what it is | JSON Schema |", "|---|---|---|", *rows])]
    parts.append(
        "## Fields\n\nA field with `?` may be missing. `[T]` is a list, `{T}` an object whose names are data, and "
        "`T | null` may be null. Fields of an `object` stand below it. The JSON Schemas are made of this table."
    )
    parts += [fence(text, "text") for text in table()]
    return {"index.md": "\n\n".join([*parts, ""])}


def documents() -> dict[str, str]:
    """The JSON Schemas by the names of their files."""
    return {file_name(name): json.dumps(json_schema(name), indent=2) + "\n" for name in outputs()}
