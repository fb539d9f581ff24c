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
    if not _FIELD.match(paragraph[0]):
        return paragraph
    result: list[str] = []
    for line in paragraph:
        if match := _FIELD.match(line):
            result.append(f":{match[1]}: {line[match.end() :].strip()}")
        else:
            result.append("    " + line.strip())
    return result
