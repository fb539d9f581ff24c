"""The prose of the project: docstrings, comments, messages and pages, and where it breaks the rules."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from project.house_sentences import Block, Hit, docstring_blocks, hits, markdown_blocks
from support.paths import ROOT

FOLDERS = ("schedc", "runtime", "tests", "benchmarks", "examples", "docs", "schedules")
PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")


def files() -> list[Path]:
    """Every file with prose: Python, schedules, and pages that are no output of a build."""
    made = {ROOT / "docs" / "reference" / name for name in ("codes", "commands", "schedules")}  # by `make docs`
    found = (path for folder in FOLDERS for path in (ROOT / folder).rglob("*") if path.suffix in _READERS)
    paths = [path for path in found if path.parent not in made]
    return sorted({*paths, *(ROOT / name for name in PAGES if (ROOT / name).exists())})


@cache
def hits_of(path: Path) -> list[Hit]:
    """What breaks a rule in a file, by line."""
    return sorted(hits(_READERS[path.suffix](path)), key=lambda hit: hit.line)


def python_blocks(path: Path) -> list[Block]:
    """Docstrings, strings below fields, comments, and in the packages sentences in other strings."""
    text = path.read_text(encoding="utf-8")
    nodes = list(ast.walk(ast.parse(text)))
    said = {id(node): node for node in _documents(nodes)}
    if ROOT / "tests" not in path.parents:
        said = {id(node): node for node in _messages(nodes)} | said
    blocks = [block for node in said.values() for block in docstring_blocks(_value(node), node.lineno)]
    return blocks + comment_blocks(text)


def _documents(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Strings that are statements: docstrings, and what stands below a field or a constant."""
    return (node.value for node in nodes if isinstance(node, ast.Expr) and isinstance(_text_of(node.value), str))


def _messages(nodes: list[ast.AST]) -> Iterator[ast.expr]:
    """Strings of five words or more that are neither text with lines of its own nor markup."""
    inside = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr | ast.Constant) and id(node) not in inside:
            value = _value(node)
            if value.count(" ") >= 4 and "\n" not in value.strip() and not re.search(r"[<{};]|  ", value):
                yield node


def _text_of(node: ast.expr) -> object:
    return node.value if isinstance(node, ast.Constant) else None


def _value(node: ast.AST) -> str:
    """The text of a string; a formatted value in it becomes a piece of code."""
    if isinstance(node, ast.JoinedStr):
        return "".join(_value(part) if isinstance(part, ast.Constant) else "`x`" for part in node.values)
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""


def comment_blocks(text: str) -> list[Block]:
    """Comments of Python; lines of comments that follow each other are one paragraph."""
    groups: list[tuple[int, int, list[str]]] = []
    if "#" not in text:
        return []
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type != tokenize.COMMENT or re.match(r"#!|#\s*(fmt|type|noqa|pragma|mypy|ruff)\b", token.string):
            continue
        line, alone = token.start[0], not token.line[: token.start[1]].strip()
        said = token.string.lstrip("#").removeprefix(" ").split("  # ")[0]
        if groups and alone and groups[-1][1] == line - 1:
            first, _, lines = groups.pop()
            groups.append((first, line, [*lines, said]))
        else:
            groups.append((line, line if alone else -1, [said]))
    return [block for first, _, lines in groups for block in docstring_blocks("\n".join(lines), first)]


def page_blocks(path: Path) -> list[Block]:
    return markdown_blocks(path.read_text(encoding="utf-8"))


def schedule_blocks(path: Path) -> list[Block]:
    """Comments of a schedule that have a line of their own; `##` and `#` are read alike."""
    blocks: list[Block] = []
    lines = path.read_text(encoding="utf-8").splitlines()
    for number, line in enumerate(lines, 1):
        said = re.match(r"\s*#+ ?(.*)", line)
        before = number > 1 and re.match(r"\s*#", lines[number - 2])
        if said and before and blocks:
            first, text = blocks.pop()
            blocks.append((first, f"{text}\n{said[1]}"))
        elif said:
            blocks.append((number, said[1]))
    return [block for first, text in blocks for block in docstring_blocks(text, first)]


_READERS = {".py": python_blocks, ".md": page_blocks, ".sched": schedule_blocks}
