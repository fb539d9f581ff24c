"""`format_source` lays out a `.sched` text, and keeps every token and comment.

The layout follows the tokens, not the grammar, so a new construct of the language needs no change here. The author
decides where lines break. The formatter decides

* indentation: two spaces per block that spans lines, and for a line that continues the one before it;
* braces: a block that spans lines opens at the end of a line and closes on a line of its own;
* spaces: one around most operators, none around ``+ - * / // %`` where the author wrote none on either side, two
  between ops on a line, three between larger statements;
* columns: names, repeats and blocks of neighbouring one-line phases; blocks of loops; the `when` of claims; the `=` of
  functions; comments of neighbouring lines;
* blank lines: at most one, none at the ends of a block.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from schedc.diagnostics import CompilerBug
from schedc.source import Source
from schedc.syntax.columns import TextLine, align
from schedc.syntax.parser import grammar, parse
from schedc.syntax.plan_words import PLAN_LINES
from schedc.syntax.tokens import scan

_COMMENT = re.compile(r"#[^\n]*")
_COMMENT_KIND = "COMMENT"

_STARTS = frozenset(
    {"LET", "REQUIRE", "PLACE", "FN", "ORDER", "RANK", "EXPECT", "SCHEDULE", "PHASE", "REPEAT", "FOR", "IF_BLOCK",
     "TIMED", "POLICY"}
)  # fmt: skip
"""Words that begin a statement."""
_PLAN_STARTS = frozenset(PLAN_LINES.values())
"""Words that begin a line of a plan. In a plan, only they do."""
_OPERANDS = frozenset({"NAME", "NUMBERED_WORD", "INT", "DECIMAL", "OP", "OP_DIGIT", "UNIT", "STEP"})
_ENDS = _OPERANDS | {"RPAR", "RSQB", "RBRACE", "STRING"}
"""Tokens that end a value, an op or a block. An operand after one of them belongs to the next statement."""
_TIGHT = frozenset({"PLUS", "MINUS", "TIMES"})
"""Operators that stay without spaces where the author wrote none."""
_GOES_ON = _TIGHT | {"COMPARISON", "AND", "OR", "IF", "ELSE", "WHEN", "COMMA", "RPAR", "RSQB", "RANGE", "LPAR", "LSQB"}
"""Tokens that cannot begin a statement. A line that starts with such a token continues the line before."""
_COLUMN_AT = {"EXPECT": "WHEN", "FN": "EQUAL"}
"""By first token of a statement with a second column: the first token of the column."""
_WITH_BLOCK = ("PHASE", "FOR", "REPEAT")
"""Statements whose block on the same line is a column."""


@dataclass(frozen=True)
class TokenPiece:
    """A token or comment.

    line, end_line: first and last line in the author's text. spaced: whether white space was before it.
    partner: for a brace, the index of its partner; else -1. block: whether it is a brace of a block that spans lines.
    in_plan: whether it is part of a plan.
    """

    kind: str
    text: str
    line: int
    end_line: int
    spaced: bool
    partner: int = -1
    block: bool = False
    in_plan: bool = False


def format_source(source: Source) -> str:
    """The formatted text, which ends with a newline. Raises `DiagnosticError` (codes S0) if it does not parse.

    The tokens and comments stay the same. Formatting a formatted text changes nothing.
    """
    parse(source)
    pieces = _pieces(source)
    text = "\n".join(align(list(_lines(pieces)))) + "\n"
    after = _pieces(Source(source.name, text))
    if [(p.kind, p.text) for p in after] != [(p.kind, p.text) for p in pieces]:
        raise CompilerBug("formatter", "the formatted text has other tokens", dump=text)
    return text


def _pieces(source: Source) -> list[TokenPiece]:
    """Tokens and comments in order. Between tokens, everything but white space is comments."""
    items = scan(source, grammar()[0].parser.lexer.lexer).items
    pieces: list[TokenPiece] = []
    last_end = 0
    in_plan, depth = False, 0
    for token in items:
        start = token.start_pos or 0
        pieces += _comments(source, last_end, start)
        spaced = start == 0 or source.text[start - 1] in " \t\r\n\f\ufeff"
        text = str(token).rstrip()
        depth += (token.type == "LBRACE") - (token.type == "RBRACE")
        in_plan = token.type == "PLAN" or (in_plan and (depth > 0 or token.type not in ("RBRACE", "SCHEDULE")))
        pieces.append(TokenPiece(token.type, text, token.line or 0, token.end_line or 0, spaced, in_plan=in_plan))
        last_end = token.end_pos or 0
    pieces += _comments(source, last_end, len(source.text))
    return _with_braces(pieces)


def _comments(source: Source, start: int, end: int) -> Iterator[TokenPiece]:
    """The comments in a part of the text."""
    for match in _COMMENT.finditer(source.text, start, end):
        line = source.span_at(match.start(), match.end()).line
        yield TokenPiece(_COMMENT_KIND, match[0].rstrip(), line, line, True)


def _with_braces(pieces: list[TokenPiece]) -> list[TokenPiece]:
    """The pieces with the partners of braces, which are set in place."""
    opened: list[int] = []
    for i, piece in enumerate(pieces):
        if piece.kind == "LBRACE":
            opened.append(i)
        elif piece.kind == "RBRACE":
            start = opened.pop()
            block = piece.line > pieces[start].line
            pieces[start] = replace(pieces[start], partner=i, block=block)
            pieces[i] = replace(piece, partner=start, block=block)
    return pieces


# Lines.


def _lines(pieces: Sequence[TokenPiece]) -> Iterator[TextLine]:
    """The lines of the result with their indentation and columns, before alignment."""
    depth, brackets, statement = 0, 0, 0
    previous: TokenPiece | None = None
    for start, end in _ranges(pieces):
        line = pieces[start:end]
        first = line[0]
        depth -= first.kind == "RBRACE"
        goes_on = first.kind != _COMMENT_KIND and (brackets > 0 or _goes_on(previous, first))
        indent = statement + 1 if goes_on else depth
        statement = statement if goes_on or first.kind == _COMMENT_KIND else depth
        blank = previous is not None and previous.kind != "LBRACE" and first.kind != "RBRACE"
        blank = blank and start > 0 and first.line > pieces[start - 1].end_line + 1
        yield _line(line, pieces, start, indent, blank)
        depth += sum(p.block * ((p.kind == "LBRACE") - (p.kind == "RBRACE")) for p in line[first.kind == "RBRACE" :])
        brackets += sum((p.kind in ("LPAR", "LSQB")) - (p.kind in ("RPAR", "RSQB")) for p in line)
        previous = next((p for p in reversed(line) if p.kind != _COMMENT_KIND), previous)


def _ranges(pieces: Sequence[TokenPiece]) -> Iterator[tuple[int, int]]:
    """Start and end of the pieces of each line."""
    start = 0
    for i in range(1, len(pieces)):
        if _breaks(pieces, i):
            yield start, i
            start = i
    if pieces:
        yield start, len(pieces)


def _breaks(pieces: Sequence[TokenPiece], i: int) -> bool:
    """Whether a line begins at piece ``i``: where the author began one, and around blocks that span lines."""
    before, piece = pieces[i - 1], pieces[i]
    apart = piece.line > before.end_line
    if before.kind in (_COMMENT_KIND, "DOC"):
        return True
    if piece.kind in (_COMMENT_KIND, "DOC"):
        return apart or piece.kind == "DOC"
    if piece.kind == "LBRACE":
        return False
    if before.kind == "RBRACE" and piece.kind in ("ELSE", "OR"):
        return False
    return apart or (before.block and before.kind in ("LBRACE", "RBRACE")) or (piece.block and piece.kind == "RBRACE")


def _goes_on(previous: TokenPiece | None, first: TokenPiece) -> bool:
    """Whether a line that begins with ``first`` continues the line before it, which ends with ``previous``."""
    if previous is None or previous.kind in ("LBRACE", "RBRACE", "DOC") or first.kind in ("RBRACE", "DOC"):
        return False
    return previous.kind not in _ENDS or first.kind in _GOES_ON


def _line(line: Sequence[TokenPiece], pieces: Sequence[TokenPiece], start: int, indent: int, blank: bool) -> TextLine:
    """A line as text, cut into its columns."""
    comment = line[-1].text if line[-1].kind == _COMMENT_KIND else ""
    code = line[:-1] if comment else line
    if not code:
        return TextLine(indent, blank, (comment,), "", "")
    inner = _columns(code, start)
    bounds = [0, *inner, len(code)]
    parts = tuple(_join(pieces, start + low, start + high) for low, high in pairwise(bounds))
    return TextLine(indent, blank, parts, comment, code[0].kind if inner else "")


def _columns(code: Sequence[TokenPiece], start: int) -> list[int]:
    """Where the columns after the first begin. Those of a one-line phase are its `repeat`, if any, and its block."""
    if code[0].kind in _COLUMN_AT:
        return [i for i, piece in enumerate(code) if piece.kind == _COLUMN_AT[code[0].kind]][:1]
    if code[0].kind not in _WITH_BLOCK or code[-1].kind != "RBRACE" or code[-1].block:
        return []
    block = code[-1].partner - start
    return [2, block] if code[0].kind == "PHASE" and block > 2 else [block]


def _join(pieces: Sequence[TokenPiece], start: int, end: int) -> str:
    parts = [pieces[start].text]
    for i in range(start + 1, end):
        parts += [" " * _gap(pieces, i), pieces[i].text]
    return "".join(parts)


def _gap(pieces: Sequence[TokenPiece], i: int) -> int:
    """Number of spaces between piece ``i`` and the one before it on its line."""
    before, piece = pieces[i - 1], pieces[i]
    if piece.kind in ("COMMA", "COLON", "RPAR", "RSQB") or before.kind in ("LPAR", "LSQB"):
        return 0
    if piece.kind in ("LPAR", "LSQB") and before.kind in (*_OPERANDS, "RPAR", "RSQB"):
        return 0
    if before.kind in ("MINUS", "PLUS") and not _binary(pieces, i - 1):
        return 0
    for operator in (i, i - 1):
        if pieces[operator].kind in _TIGHT and _binary(pieces, operator):
            return int(pieces[operator].spaced or (operator + 1 < len(pieces) and pieces[operator + 1].spaced))
    if before.kind in _ENDS and _begins(pieces, i):
        return 2 if piece.kind in ("OP", "OP_DIGIT", "CAP") or before.kind == "RBRACE" else 3
    return 1


def _binary(pieces: Sequence[TokenPiece], i: int) -> bool:
    """Whether the operator at piece ``i`` has a left operand."""
    return i > 0 and pieces[i - 1].kind in _ENDS - {"RBRACE"}


def _begins(pieces: Sequence[TokenPiece], i: int) -> bool:
    """Whether piece ``i``, after the end of a value, op or block, begins a new statement or line."""
    kind = pieces[i].kind
    if pieces[i].in_plan:
        return kind in _PLAN_STARTS
    if kind in _STARTS:
        return i < 2 or pieces[i - 2].kind != "PHASE"
    return kind in _OPERANDS or kind == "CAP"
