"""Formatted lines put into columns: the parts of neighbouring phases, and the comments behind neighbouring lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

INDENT = 2
_NAME = 8
"""Least width of the names of neighbouring phases."""
_WIDEST = 28
"""A repeat wider than this keeps out of the columns, and what comes behind it has columns of its own."""
_UNEVEN = 16
"""Two columns are not aligned where the first differs by more than this: what is far apart is not read together."""
_COMMENT_GAP = 3
_PAGE = 120


@dataclass(frozen=True)
class TextLine:
    """A line before alignment.

    parts: one text, or columns, such as ``phase name``, what it repeats, and the block of a one-line phase.
    comment: what stands behind it. kind: the first token of a line with columns, else "".
    """

    indent: int
    blank_before: bool
    parts: tuple[str, ...]
    comment: str
    kind: str


def align(lines: Sequence[TextLine]) -> list[str]:
    """The text of each line, blank lines included."""
    codes = [" " * (INDENT * line.indent) + code for line, code in zip(lines, _codes(lines), strict=True)]
    found: list[str] = []
    for run in _runs(lines, [bool(line.comment) for line in lines]):
        column = _comment_column([codes[at] for at in run], [lines[at].comment for at in run])
        for at in run:
            if lines[at].blank_before:
                found.append("")
            pad = max(column - len(codes[at]), _COMMENT_GAP)
            found.append(codes[at] + " " * pad + lines[at].comment if lines[at].comment else codes[at])
    return found


def _runs(lines: Sequence[TextLine], keys: Sequence[object]) -> list[list[int]]:
    """Indexes of the lines, in runs: neighbours at one depth with one key stand together; without a key, alone."""
    runs: list[list[int]] = []
    for at, (line, key) in enumerate(zip(lines, keys, strict=True)):
        if at and key and key == keys[at - 1] and not line.blank_before and line.indent == lines[at - 1].indent:
            runs[-1].append(at)
        else:
            runs.append([at])
    return runs


def _codes(lines: Sequence[TextLine]) -> list[str]:
    found: list[str] = []
    for run in _runs(lines, [line.kind for line in lines]):
        put = _COLUMNS.get(lines[run[0]].kind)
        found += put([lines[at].parts for at in run]) if put else [lines[run[0]].parts[0]]
    return found


def _two(gap: int) -> Callable[[list[tuple[str, ...]]], list[str]]:
    """Two columns, with at least so many spaces between them."""

    def put(run: list[tuple[str, ...]]) -> list[str]:
        widths = [len(first) for first, _ in run]
        width = max(widths) if max(widths) - min(widths) <= _UNEVEN else 0
        return [f"{first:<{width}}{' ' * gap}{second}" for first, second in run]

    return put


def _phases(run: list[tuple[str, ...]]) -> list[str]:
    """Neighbouring phases in columns; a single one needs none."""
    alone = len(run) == 1
    names = 0 if alone else max(len("phase ") + _NAME, *(len(parts[0]) for parts in run))
    found: list[str] = []
    for wide, group in groupby(run, lambda parts: len(parts) == 3 and len(parts[1]) > _WIDEST):
        members = list(group)
        width = 0 if wide else max((len(parts[1]) for parts in members if len(parts) == 3), default=0)
        for parts in members:
            middle = f" {parts[1]:<{width}} " if len(parts) == 3 else ""
            found.append(f"{parts[0]:<{names}}{middle} {parts[-1]}")
    return found


def _loops(run: list[tuple[str, ...]]) -> list[str]:
    """Neighbouring one-line loops with their blocks in one column."""
    return [f"{head} {block}" for head, block in run] if len(run) == 1 else _two(2)(run)


_COLUMNS: dict[str, Callable[[list[tuple[str, ...]]], list[str]]] = {
    "PHASE": _phases,
    "EXPECT": _two(2),
    "FN": _two(1),
    "FOR": _loops,
    "REPEAT": _loops,
}
"""How a run of lines with columns is put together, by their first token."""


def _comment_column(codes: list[str], comments: list[str]) -> int:
    """The column of the comments of a run; 0 where they would leave the page."""
    column = max(map(len, codes)) + _COMMENT_GAP
    fits = all(column + len(comment) <= _PAGE for comment in comments)
    return column if fits and len(codes) > 1 else 0
