"""Splits docstrings, comments and pages into sentences, and says which of them break the rules of prose."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

LONGEST = 30
"""Words of a sentence. A word has at least one letter; code between backticks is one word."""

BANNED = {
    "once more": r"\bonce more\b",
    "ever so": r"\bever so\b",
    "stand for": r"\bst(?:and|ands|anding|ood) for\b",
    "there are none": r"\bthere are none\b",
    "told": r"\btold\b",
}
"""Phrases of no page of this project: what they mean has a word of the field."""


@dataclass(frozen=True)
class Hit:
    """A sentence that breaks a rule. line: from 1, where its block begins; rule: ``long``, ``begins`` or a phrase."""

    line: int
    rule: str
    sentence: str


Block = tuple[int, str]
"""A line number and the text of a paragraph, list item or field, in one line; code between backticks stays."""

_LABEL = re.compile(r"(?:[*\w\0, .=-]|\[[^\]]*\]){1,60}?:\s+(?=\S)")
_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
_LINK = re.compile(r"!?\[([^\]]*)\]\([^)]*\)")
_ABBREVIATION = re.compile(r"\b(?:e\.g|i\.e|et al|cf|vs|resp|approx|Fig|Sec|Eq|No|etc|p|pp|ch)\.$")
_END = re.compile(r"[.!?]+[)\"'*”]*(?=\s)|[.!?:]+[)\"'*”]*$")
_DRAWN = re.compile(r"\S {3,}\S|[─│┌└├▕█]|--+>|<--+|^\s*[|+]|\|\s*$|={3,}|\.{4,}")


def hits(blocks: Sequence[Block]) -> list[Hit]:
    """What breaks a rule in these blocks, in their order."""
    return [hit for line, text in blocks for sentence in sentences(text) for hit in _hits(line, sentence)]


def _hits(line: int, sentence: str) -> Iterator[Hit]:
    plain = _CODE.sub("`x`", sentence)
    if words(plain) > LONGEST:
        yield Hit(line, "long", sentence)
    if re.match(r"\W*(?:of|told)\b", plain, re.IGNORECASE):
        yield Hit(line, "begins", sentence)
    for name, pattern in BANNED.items():
        if re.search(pattern, plain, re.IGNORECASE):
            yield Hit(line, name, sentence)


def words(sentence: str) -> int:
    """How many words a sentence has; numbers, operators and signs are none, a formula without spaces is one."""
    return sum(any(letter.isalpha() for letter in token) for token in sentence.split())


def sentences(text: str) -> list[str]:
    """The sentences of a block. A name and a colon at its beginning are a sentence of their own."""
    code: list[str] = []

    def hidden(found: re.Match[str]) -> str:
        code.append(found[0])
        return f"\0{len(code) - 1}\0"

    text = _LINK.sub(r"\1", _CODE.sub(hidden, text))
    label = _LABEL.match(text)
    if label and words(label[0]) <= 4:
        text = text[label.end() :]
    found, start = [], 0
    for end in _END.finditer(text):
        if _ABBREVIATION.search(text[: end.end()]):
            continue
        found.append(text[start : end.end()].strip())
        start = end.end()
    found.append(text[start:].strip())
    return [re.sub("\0(\\d+)\0", lambda at: code[int(at[1])], sentence) for sentence in found if sentence]


def docstring_blocks(text: str, first: int) -> list[Block]:
    """The paragraphs, list items and fields of a docstring or comment whose first line has the number ``first``.

    Lines that are indented deeper than the text around them, and pictures, are left out. A line that ends a sentence
    or a clause before a deeper line belongs to a field when the deeper line continues it without an empty line.
    """
    lines = text.splitlines()
    margin = min((len(line) - len(line.lstrip()) for line in lines[1:] if line.strip()), default=0)
    flat = [lines[0].strip() if lines else "", *(line[margin:] for line in lines[1:])]
    blocks: list[Block] = []
    current: list[str] = []
    begun = 0
    for number, line in enumerate([*flat, ""]):
        deep, left_out = line.startswith("  "), not line.strip() or bool(_DRAWN.search(line))
        field = not deep and _FIELD.match(line) and (not current or current[-1][-1] in ".:;!?)")
        if current and (left_out or field or _MARK.match(line)):
            blocks.append((first + begun, " ".join(current)))
            current = []
        if not left_out and (current or not deep):
            begun = begun if current else number
            current.append(line.strip() if current else _MARK.sub("", line.strip()))
    return blocks


_MARK = re.compile(r"^\s*(?:[-*+]|\d+[.)])\s+")
_FIELD = re.compile(r"[*\w`, .\[\]]{1,50}: ")


def markdown_blocks(text: str) -> list[Block]:
    """The headings, paragraphs and list items of a page; no code, tables, comments, pictures or directives."""
    text = re.sub(r"<!--.*?-->|^---\n.*?^---\n", _blank, text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"^( *)(```+|~~~+|:::+).*?^\1\2`*[ ]*$", _blank, text, flags=re.DOTALL | re.MULTILINE)
    blocks: list[Block] = []
    current: list[str] = []
    begun = 0
    indented_code = False
    for number, line in enumerate([*text.splitlines(), ""], 1):
        bare = re.sub(r"^\s*>\s?", "", line)
        mark = re.match(r"\s*(?:[-*+]|\d+[.)]) +", bare)
        left_out = bare.startswith("    ") and (indented_code or not current) and not mark
        indented_code = left_out or (indented_code and not bare.strip())
        skip = not bare.strip() or bare.lstrip().startswith("|") or left_out or re.match(r"\s*\[[^\]]+\]:", bare)
        if (skip or mark or bare.startswith("#")) and current:
            blocks.append((begun, " ".join(current)))
            current = []
        if not skip:
            begun = begun if current else number
            current.append(bare[mark.end() :].strip() if mark else bare.strip("# ").strip())
        if bare.startswith("#") and current:
            blocks.append((begun, " ".join(current)))
            current = []
    return [block for block in blocks if block[1]]


def _blank(found: re.Match[str]) -> str:
    return "\n" * found[0].count("\n")
