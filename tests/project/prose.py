"""The lint of prose: sentences of docstrings, comments, messages and pages that are long, vague, or in listed words.

It catches what a program can: more than 25 words; a quarter of pronouns; a word of `LISTED`. It cannot see a sentence
that is false, or a docstring of another function. `house_shapes` has docstrings without shape or unit.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from support.paths import ROOT

LEFT = 157
"""Faults that are left in the whole project. A change may lower the number, never raise it."""

LONGEST, SHARE = 25, 0.25
PRONOUNS = frozenset({
    "what", "that", "those", "these", "this", "one", "ones", "which", "it", "its", "they", "them", "their", "such",
    "who", "whose", "others",
})  # fmt: skip
LISTED = re.compile(r"\b(?:once more|ever so|st(?:and|ands|anding|ood) for|there are none|told)\b", re.IGNORECASE)
FOLDERS = ("schedc", "runtime", "tests", "benchmarks", "examples", "docs", "schedules")
MADE = (
    ROOT / "docs" / "guide" / "notebooks",
    *(ROOT / "docs" / "reference" / name for name in ("codes", "commands", "frontier", "schedules", "schemas")),
)
"""Folders that `make docs` writes."""

_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)|!?\[([^\]]*)\]\([^)]*\)")
_DROPPED = re.compile(r"<!--.*?-->|^---\n.*?^---\n|^( *)(```+|~~~+|:::+).*?^\1\2`* *$", re.DOTALL | re.MULTILINE)
_DRAWN = re.compile(r"\S {3,}\S|[─│┌└├▕█]|--+>|<--+|^\s*[|+]|\|\s*$|={3,}|\.{4,}")
_BEGINS = re.compile(r"^\s*(?:(?:[-*+#>]+|\d+[.)])\s+|[*\w`, .\[\]]{1,50}: )")
_LITERALS = re.compile(
    r"""\"{3}(?:\\.|[^\\])*?\"{3}|'{3}(?:\\.|[^\\])*?'{3}|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'|#[^\n]*""", re.DOTALL
)
"""Strings and comments of Python. `tokenize` would take ten times as long."""
_LETTER, _MARKS = re.compile(r"[^\W\d]"), re.compile(r"\W")
_END = re.compile(r"(?<!e\.g\.)(?<!i\.e\.)(?<!cf\.)(?<!vs\.)(?<=[.!?:])[)\"'*]*\s+")


class Fault(NamedTuple):
    """A sentence that breaks a rule. line: from 1, where its paragraph begins."""

    line: int
    rule: str
    sentence: str


def files() -> list[Path]:
    """Every file with prose, without pages that are made."""
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in _READERS)
    return sorted([*(path for path in found if path.parent not in MADE), *ROOT.glob("*.md")])


@cache
def faults(path: Path) -> list[Fault]:
    """What is to be mended in a file, by line."""
    texts = _READERS[path.suffix](path.read_text(encoding="utf-8"))
    found = [fault for line, text in texts for fault in faults_of(text, line)]
    return sorted(found)


def faults_of(text: str, first: int = 1) -> Iterator[Fault]:
    """The faults of one text whose first line has the number ``first``."""
    for line, paragraph in _paragraphs(text, first):
        for sentence in _END.split(paragraph):
            plain = _CODE.sub("x", sentence)
            words = [word for word in plain.split() if _LETTER.search(word)]
            if len(words) > LONGEST:
                yield Fault(line, "long", sentence)
            if len(words) >= 6:
                vague = sum(_MARKS.sub("", word).lower() in PRONOUNS for word in words)
                if vague / len(words) >= SHARE:
                    yield Fault(line, "vague", sentence)
            if LISTED.search(plain):
                yield Fault(line, "listed", sentence)


def _paragraphs(text: str, first: int) -> Iterator[tuple[int, str]]:
    """Paragraphs, list items and fields, each in one line; no code, tables or pictures."""
    begun, held = first, ""
    for number, line in enumerate([*text.splitlines(), ""], first):
        deep = line.startswith("    ") and not held
        left_out = not line.strip() or deep or bool(_DRAWN.search(line))
        field = _BEGINS.match(line) and (not held or held[-1] in ".:;!?)")
        if held and (left_out or field):
            yield begun, held
            held = ""
        if not left_out:
            begun = begun if held else number
            held = f"{held} {line.strip()}" if held else _BEGINS.sub("", line, count=1).strip()


def _python(text: str) -> Iterator[tuple[int, str]]:
    """Strings that are statements, comments, and messages: strings of five words or more, without markup."""
    nodes = _nodes(ast.parse(text))
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    said = {id(node.value): True for node in nodes if isinstance(node, ast.Expr)}
    for node in nodes:
        if type(node) in (ast.JoinedStr, ast.Constant) and id(node) not in inside and (value := _value(node)):
            message = value.count(" ") >= 4 and "\n" not in value.strip() and not re.search(r"[<{};]|  ", value)
            if id(node) in said or message:
                yield node.lineno, inspect.cleandoc(value)
    comments = re.compile(r"#(?!!|\s*(?:fmt|type|noqa|pragma|mypy|ruff)\b) ?(.*)")
    at, held = 0, ""
    line, place = 1, 0
    for token in (each for each in _LITERALS.finditer(text) if each[0].startswith("#")):
        line, place = line + text.count("\n", place, token.start()), token.start()
        found = comments.match(token[0])
        if held and line != at + held.count("\n") + 1:
            yield at, held
            held = ""
        at = at if held else line
        held += ("\n" if held else "") + (found[1].split("  # ")[0] if found else "")
    yield at, held


_LEAVES = frozenset({str, int, type(None), ast.Name, ast.Load, ast.Store})
"""Types of values of a node that hold no strings of their own, as most of them do not."""


def _nodes(tree: ast.AST) -> list[ast.AST]:
    """All nodes but names, as `ast.walk` gives them in five times the time."""
    found = [tree]
    for node in found:  # which grows meanwhile
        for value in vars(node).values():
            if type(value) in _LEAVES:
                continue
            if isinstance(value, list):
                found += [each for each in value if isinstance(each, ast.AST)]
            elif isinstance(value, ast.AST):
                found.append(value)
    return found


def _value(node: ast.JoinedStr | ast.Constant) -> str:
    """The text of a string; a formatted value in it is a piece of code."""
    if isinstance(node, ast.JoinedStr):
        return "".join(str(part.value) if isinstance(part, ast.Constant) else "`x`" for part in node.values)
    return node.value if isinstance(node.value, str) else ""


def _page(text: str) -> Iterator[tuple[int, str]]:
    yield 1, _DROPPED.sub(lambda found: "\n" * found[0].count("\n"), text)


def _schedule(text: str) -> Iterator[tuple[int, str]]:
    lines = (re.match(r"\s*#+ ?(.*)", line) for line in text.splitlines())
    yield 1, "\n".join(found[1] if found else "" for found in lines)


_READERS = {".py": _python, ".md": _page, ".sched": _schedule}
