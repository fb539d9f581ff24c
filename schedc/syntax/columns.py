"""Aligns formatted lines in columns: the parts of neighbouring phases, and the comments behind neighbouring lines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby

INDENT = 2
"""Spaces per level of indentation."""
_NAME = 8
"""Least width of the names of neighbouring phases, in characters."""
_WIDEST = 28
"""Most characters of a `repeat` in a column. After a wider one, new columns begin."""
_UNEVEN = 16
"""Most characters by which the first column may differ between aligned lines. Beyond it, alignment does not help."""
_COMMENT_GAP = 3
"""Least number of spaces before a comment behind code."""
_PAGE = 120
"""Most characters of a line with an aligned comment."""


@dataclass(frozen=True)
class TextLine:
    """A line before alignment.

    parts: one text, or the columns. A one-line phase has three: ``phase name``, the `repeat` and the block.
    comment: the comment behind the code. kind: type of the first token if the line has columns, else "".
    """

    indent: int
    blank_before: bool
    parts: tuple[str, ...]
    comment: str
    kind: str


def align(lines: Sequence[TextLine]) -> list[str]:
    """The text of each line, blank lines included."""
    codes = [" " * (INDENT * line.indent) + code for line, code in zip(lines, _codes(lines), strict=True)]
    texts: list[str] = []
    for run in _runs(lines, [bool(line.comment) for line in lines]):
        column = _comment_column([codes[i] for i in run], [lines[i].comment for i in run])
        for i in run:
            if lines[i].blank_before:
                texts.append("")
            pad = max(column - len(codes[i]), _COMMENT_GAP)
            texts.append(codes[i] + " " * pad + lines[i].comment if lines[i].comment else codes[i])
    return texts


def _runs(lines: Sequence[TextLine], keys: Sequence[object]) -> list[list[int]]:
    """Indexes of the lines in runs: neighbours with equal indentation and key. A line without a key is a run alone."""
    runs: list[list[int]] = []
    for i, (line, key) in enumerate(zip(lines, keys, strict=True)):
        if i and key and key == keys[i - 1] and not line.blank_before and line.indent == lines[i - 1].indent:
            runs[-1].append(i)
        else:
            runs.append([i])
    return runs


def _codes(lines: Sequence[TextLine]) -> list[str]:
    """The code of each line, aligned, without indentation and comment."""
    codes: list[str] = []
    for run in _runs(lines, [line.kind for line in lines]):
        put = _COLUMNS.get(lines[run[0]].kind)
        codes += put([lines[i].parts for i in run]) if put else [lines[run[0]].parts[0]]
    return codes


def _two(gap: int) -> Callable[[list[tuple[str, ...]]], list[str]]:
    """A function that aligns lines of two columns. gap: least number of spaces between the columns."""

    def put(run: list[tuple[str, ...]]) -> list[str]:
        widths = [len(first) for first, _ in run]
        width = max(widths) if max(widths) - min(widths) <= _UNEVEN else 0
        return [f"{first:<{width}}{' ' * gap}{second}" for first, second in run]

    return put


def _phases(run: list[tuple[str, ...]]) -> list[str]:
    """Neighbouring phases in columns; a single phase needs no columns."""
    alone = len(run) == 1
    names = 0 if alone else max(len("phase ") + _NAME, *(len(parts[0]) for parts in run))
    texts: list[str] = []
    for wide, group in groupby(run, lambda parts: len(parts) == 3 and len(parts[1]) > _WIDEST):
        members = list(group)
        width = 0 if wide else max((len(parts[1]) for parts in members if len(parts) == 3), default=0)
        for parts in members:
            middle = f" {parts[1]:<{width}} " if len(parts) == 3 else ""
            texts.append(f"{parts[0]:<{names}}{middle} {parts[-1]}")
    return texts


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
"""By type of the first token of a run of lines: the function that aligns the lines."""


def _comment_column(codes: list[str], comments: list[str]) -> int:
    """The column of the comments of a run; 0 if they would not fit on the page."""
    column = max(map(len, codes)) + _COMMENT_GAP
    fits = all(column + len(comment) <= _PAGE for comment in comments)
    return column if fits and len(codes) > 1 else 0
