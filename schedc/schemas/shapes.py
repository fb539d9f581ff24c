"""Reads the table of outputs: files of lines ``output`` and ``shape``, each with its fields below it.

    output schedc.list 1    what `schedc list --json` prints
      schedules [object]
        name text           of the schedule, as commands take it
        sizes? {integer}    by name; a field with ? may be missing

A type is `text`, `integer`, `number`, `boolean`, `null`, `any`, a text in quotes, or the name of a shape. ``[T]`` is a
list, and ``{T}`` an object with data as names. Types with | between are alternatives. Below an `object` stand its
fields.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

from schedc.diagnostics import CompilerBug
from schedc.schemas.written_values import shapes_of_values

FILES = ("steps", "parts", "searches", "plans", "runs", "programs")

_LINE = re.compile(r"(?P<indent> *)(?P<name>[\w./-]+)(?P<optional>\??) (?P<type>\S+(?: \| \S+)*)(?: {2,}(?P<says>.+))?")


@dataclass(frozen=True)
class OutputField:
    """A field of an object. type: as it is written. fields: of the object in this type. says: meaning and unit."""

    name: str
    type: str
    optional: bool = False
    says: str = ""
    fields: tuple[OutputField, ...] = ()


@dataclass(frozen=True)
class OutputShape:
    """An object with named fields. version: of an output that has it in a field of its own, else 0.

    fails: whether a command may print diagnostics in place of these fields. like: an output with some of the fields.
    """

    name: str
    says: str
    fields: tuple[OutputField, ...]
    version: int = 0
    output: bool = False
    fails: bool = False
    like: str = ""


def table() -> tuple[str, ...]:
    """The texts of the table, in the order of the published page."""
    own = (files("schedc.schemas").joinpath(f"{name}.txt").read_text(encoding="utf-8") for name in FILES)
    return (*own, shapes_of_values())


@cache
def shapes() -> Mapping[str, OutputShape]:
    """All outputs and shapes by name."""
    by_name: dict[str, OutputShape] = {}
    for shape in (shape for text in table() for shape in read_shapes(text)):
        if shape.name in by_name:
            raise CompilerBug("schemas", f"two shapes have the name {shape.name}")
        like = by_name[shape.like].fields if shape.like else ()
        by_name[shape.name] = replace(shape, fields=(*like, *shape.fields))
    return by_name


@cache
def outputs() -> Mapping[str, OutputShape]:
    """What commands print, by the text in the field ``schema``."""
    return {name: shape for name, shape in shapes().items() if shape.output}


def read_shapes(text: str) -> Iterator[OutputShape]:
    """The outputs and shapes of a file of the table."""
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    starts = [number for number, line in enumerate(lines) if not line.startswith(" ")]
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        head, _, says = lines[start].partition("  ")
        word, name, *rest = head.split()
        if word not in ("output", "shape"):
            raise CompilerBug("schemas", f"not an output and no shape: {lines[start]}")
        version = next((int(each) for each in rest if each.isdecimal()), 0)
        fields = tuple(_fields(lines[start + 1 : end], 2))
        like = rest[rest.index("like") + 1] if "like" in rest else ""
        yield OutputShape(name, says.strip(), fields, version, word == "output", "fails" in rest, like)


def _fields(lines: list[str], indent: int) -> Iterator[OutputField]:
    """The fields at this indent, with all deeper fields inside."""
    matches = [_LINE.fullmatch(line) for line in lines]
    if None in matches:
        raise CompilerBug("schemas", f"not a field: {lines[matches.index(None)]}")
    own = [number for number, match in enumerate(matches) if match and len(match["indent"]) == indent]
    if not lines:
        return
    if own[:1] != [0]:
        raise CompilerBug("schemas", f"a field too far right: {lines[0]}")
    for start, end in zip(own, [*own[1:], len(lines)], strict=True):
        match = matches[start]
        assert match
        below = tuple(_fields(lines[start + 1 : end], indent + 2))
        if bool(below) != bool(re.search(r"\bobject\b", match["type"])):
            raise CompilerBug("schemas", f"an object has fields, and nothing else has: {lines[start]}")
        yield OutputField(match["name"], match["type"], bool(match["optional"]), match["says"] or "", below)
