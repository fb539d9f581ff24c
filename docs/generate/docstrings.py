"""Turns docstrings into reStructuredText: `name: meaning` becomes a field, indented text becomes code."""

from __future__ import annotations

import re
from collections.abc import Iterator

_NAMES = r"((?:[a-z_]\w*(?:\([\w, ]*\))?(?:, )?)+): (?=\S)"
_FIELD = re.compile(rf"(?:^|(?<=[.;:] )){_NAMES}")
"""A name before a colon, at the begin of a paragraph or behind a sentence."""


def as_rest(lines: list[str]) -> list[str]:
    """The docstring's lines for docutils: paragraphs, fields and blocks of code, each behind a blank line."""
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
    text = _sentences(paragraph)
    if paragraph[0].startswith(("* ", "- ")) or not _FIELD.search(text):
        return paragraph
    prose, *fields = _FIELD.split(text)
    result = [prose.strip(), ""] if prose.strip() else []
    for names, meaning in zip(fields[::2], fields[1::2], strict=True):
        result.append(f":{names}: {meaning.strip()}")
    return result


def _sentences(paragraph: list[str]) -> str:
    """The paragraph as one line; a line that begins with a field ends the sentence before it."""
    parts = [line.strip() for line in paragraph]
    for row, line in enumerate(paragraph[1:], 1):
        in_fields = re.match(_NAMES, paragraph[0])
        if in_fields and re.match(_NAMES, line) and not parts[row - 1].endswith((".", ";", ":")):
            parts[row - 1] += ";"
    return " ".join(parts)
