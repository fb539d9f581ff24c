"""Turns docstrings into reStructuredText: `name: meaning` lines become fields, indented text becomes code."""

from __future__ import annotations

import re
from collections.abc import Iterator

_FIELD = re.compile(r"^((?:[a-z_]\w*(?:\([\w, ]*\))?(?:, )?)+):(?= \S|$)")


def as_rest(lines: list[str]) -> list[str]:
    """The docstring's lines for docutils. A field begins where a paragraph or the field before it ends."""
    result: list[str] = []
    for paragraph in _paragraphs(lines):
        result += [*_converted(paragraph), ""]
    return result


def _paragraphs(lines: list[str]) -> Iterator[list[str]]:
    paragraph: list[str] = []
    for line in [*lines, ""]:
        if line.strip():
            paragraph.append(line)
        elif paragraph:
            yield paragraph
            paragraph = []


def _converted(paragraph: list[str]) -> list[str]:
    if all(line.startswith("  ") for line in paragraph):
        return ["::", "", *paragraph]
    fields = [row for row, line in enumerate(paragraph) if _FIELD.match(line) and _may_begin(paragraph[:row])]
    if not fields:
        return paragraph
    prose = paragraph[: fields[0]]
    result = [*prose, ""] if prose else []
    for row, line in enumerate(paragraph[fields[0] :], fields[0]):
        if row in fields and (match := _FIELD.match(line)):
            result.append(f":{match[1]}: {line[match.end() :].strip()}")
        else:
            result.append("    " + line.strip())
    return result


def _may_begin(before: list[str]) -> bool:
    """Whether a field may begin behind these lines of its paragraph: none, fields, or the end of a sentence."""
    return not before or bool(_FIELD.match(before[0])) or before[-1].rstrip().endswith((".", ";", ":"))
