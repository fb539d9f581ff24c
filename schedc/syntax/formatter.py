"""`format_source`: a `.sched` text in the house's layout, with every token and comment kept.

The layout follows the tokens, not the grammar, so that a new construct needs nothing here. Where lines break is the
author's; what the formatter decides is

* indentation: two spaces per block that spans lines, and for a line that goes on with the one before it;
* braces: a block that spans lines opens at the end of a line and closes on a line of its own;
* spaces: one around most operators, none around ``+ - * / // %`` where the author wrote none on either side, two
  between ops on a line, three between larger statements;
* columns: in neighbouring one-line phases the names, the repeats and the blocks; the blocks of loops; what claims hold
  `when`; the `=` of functions; comments behind neighbouring lines;
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
from schedc.syntax.tokens import PLAN_LINES, scan

_COMMENT = re.compile(r"#[^\n]*")
_BROKEN = "COMMENT"

_STARTS = frozenset(
    {"LET", "REQUIRE", "PLACE", "FN", "ORDER", "RANK", "EXPECT", "SCHEDULE", "PHASE", "REPEAT", "FOR", "IF_BLOCK",
     "TIMED", "POLICY"}
)  # fmt: skip
"""Words that begin a statement."""
_PLAN_STARTS = frozenset(PLAN_LINES.values())
"""Words that begin a line of a plan, where nothing else does."""
_OPERANDS = frozenset({"NAME", "NUMBERED_WORD", "INT", "DECIMAL", "OP", "OP_DIGIT", "UNIT", "STEP"})
_ENDS = _OPERANDS | {"RPAR", "RSQB", "RBRACE", "STRING"}
"""What a value, an op or a block ends with: an operand behind it belongs to the next statement."""
_TIGHT = frozenset({"PLUS", "MINUS", "TIMES"})
"""Operators that stand close where the author wrote them so."""
_GOES_ON = _TIGHT | {"COMPARISON", "AND", "OR", "IF", "ELSE", "WHEN", "COMMA", "RPAR", "RSQB", "RANGE", "LPAR", "LSQB"}
"""Tokens that cannot begin a statement: a line that starts with one goes on with the line before."""
_COLUMN_AT = {"EXPECT": "WHEN", "FN": "EQUAL"}
"""Statements with a second column, by their first token, and the token that it begins with."""
_WITH_BLOCK = ("PHASE", "FOR", "REPEAT")
"""Statements whose block on the same line is a column."""


@dataclass(frozen=True)
class TokenPiece:
    """A token or comment. line, end_line: where it was; spaced: whether white space was before it.

    partner: of a brace, the index of the other one; block: it is a brace of a block that spans lines.
    planned: it stands in a plan.
    """

    kind: str
    text: str
    line: int
    end_line: int
    spaced: bool
    partner: int = -1
    block: bool = False
    planned: bool = False


def format_source(source: Source) -> str:
    """The formatted text; ends with a newline. Raises `DiagnosticError` (S0 codes) for what does not parse.

    Formatting twice changes nothing, and the tokens and comments stay what they are.
    """
    parse(source)
    pieces = _pieces(source)
    text = "\n".join(align(list(_lines(pieces)))) + "\n"
    after = _pieces(Source(source.name, text))
    if [(p.kind, p.text) for p in after] != [(p.kind, p.text) for p in pieces]:
        raise CompilerBug("formatter", "the formatted text has other tokens", dump=text)
    return text


def _pieces(source: Source) -> list[TokenPiece]:
    """Tokens and comments in order. Comments are what stands between tokens, besides white space."""
    items = scan(source, grammar()[0].parser.lexer.lexer).items
    found: list[TokenPiece] = []
    at = 0
    planned, depth = False, 0
    for token in items:
        start, end = token.start_pos or 0, token.end_pos or 0
        _comments(source, at, start, found)
        spaced = start == 0 or source.text[start - 1] in " \t\r\n\f\ufeff"
        text = str(token).rstrip()
        depth += (token.type == "LBRACE") - (token.type == "RBRACE")
        planned = token.type == "PLAN" or (planned and (depth > 0 or token.type not in ("RBRACE", "SCHEDULE")))
        found.append(TokenPiece(token.type, text, token.line or 0, token.end_line or 0, spaced, planned=planned))
        at = end
    _comments(source, at, len(source.text), found)
    return _with_braces(found)


def _comments(source: Source, start: int, end: int, found: list[TokenPiece]) -> None:
    for match in _COMMENT.finditer(source.text, start, end):
        line = source.span_at(match.start(), match.end()).line
        found.append(TokenPiece(_BROKEN, match[0].rstrip(), line, line, True))


def _with_braces(pieces: list[TokenPiece]) -> list[TokenPiece]:
    opened: list[int] = []
    for at, piece in enumerate(pieces):
        if piece.kind == "LBRACE":
            opened.append(at)
        elif piece.kind == "RBRACE":
            start = opened.pop()
            block = piece.line > pieces[start].line
            pieces[start] = replace(pieces[start], partner=at, block=block)
            pieces[at] = replace(piece, partner=start, block=block)
    return pieces


# Lines.


def _lines(pieces: Sequence[TokenPiece]) -> Iterator[TextLine]:
    """The lines of the result, with their indentation and columns, not yet aligned."""
    depth, brackets, statement = 0, 0, 0
    previous: TokenPiece | None = None
    for start, end in _ranges(pieces):
        line = pieces[start:end]
        first = line[0]
        depth -= first.kind == "RBRACE"
        goes_on = first.kind != _BROKEN and (brackets > 0 or _goes_on(previous, first))
        indent = statement + 1 if goes_on else depth
        statement = statement if goes_on or first.kind == _BROKEN else depth
        blank = previous is not None and previous.kind != "LBRACE" and first.kind != "RBRACE"
        blank = blank and start > 0 and first.line > pieces[start - 1].end_line + 1
        yield _line(line, pieces, start, indent, blank)
        depth += sum(p.block * ((p.kind == "LBRACE") - (p.kind == "RBRACE")) for p in line[first.kind == "RBRACE" :])
        brackets += sum((p.kind in ("LPAR", "LSQB")) - (p.kind in ("RPAR", "RSQB")) for p in line)
        previous = next((p for p in reversed(line) if p.kind != _BROKEN), previous)


def _ranges(pieces: Sequence[TokenPiece]) -> Iterator[tuple[int, int]]:
    start = 0
    for at in range(1, len(pieces)):
        if _breaks(pieces, at):
            yield start, at
            start = at
    if pieces:
        yield start, len(pieces)


def _breaks(pieces: Sequence[TokenPiece], at: int) -> bool:
    """Whether a line begins at a piece: where the author began one, and around blocks that span lines."""
    before, piece = pieces[at - 1], pieces[at]
    apart = piece.line > before.end_line
    if before.kind in (_BROKEN, "DOC"):
        return True
    if piece.kind in (_BROKEN, "DOC"):
        return apart or piece.kind == "DOC"
    if piece.kind == "LBRACE":
        return False
    if before.kind == "RBRACE" and piece.kind in ("ELSE", "OR"):
        return False
    return apart or (before.block and before.kind in ("LBRACE", "RBRACE")) or (piece.block and piece.kind == "RBRACE")


def _goes_on(previous: TokenPiece | None, first: TokenPiece) -> bool:
    if previous is None or previous.kind in ("LBRACE", "RBRACE", "DOC") or first.kind in ("RBRACE", "DOC"):
        return False
    return previous.kind not in _ENDS or first.kind in _GOES_ON


def _line(line: Sequence[TokenPiece], pieces: Sequence[TokenPiece], start: int, indent: int, blank: bool) -> TextLine:
    """A line as text, with the columns of a phase that stands on it whole."""
    comment = line[-1].text if line[-1].kind == _BROKEN else ""
    code = line[:-1] if comment else line
    if not code:
        return TextLine(indent, blank, (comment,), "", "")
    inner = _columns(code, start)
    bounds = [0, *inner, len(code)]
    parts = tuple(_join(pieces, start + low, start + high) for low, high in pairwise(bounds))
    return TextLine(indent, blank, parts, comment, code[0].kind if inner else "")


def _columns(code: Sequence[TokenPiece], start: int) -> list[int]:
    """Where the inner columns of a line begin: of a one-line phase what is repeated, if anything is, and the block."""
    if code[0].kind in _COLUMN_AT:
        return [at for at, piece in enumerate(code) if piece.kind == _COLUMN_AT[code[0].kind]][:1]
    if code[0].kind not in _WITH_BLOCK or code[-1].kind != "RBRACE" or code[-1].block:
        return []
    block = code[-1].partner - start
    return [2, block] if code[0].kind == "PHASE" and block > 2 else [block]


def _join(pieces: Sequence[TokenPiece], start: int, end: int) -> str:
    parts = [pieces[start].text]
    for at in range(start + 1, end):
        parts += [" " * _gap(pieces, at), pieces[at].text]
    return "".join(parts)


def _gap(pieces: Sequence[TokenPiece], at: int) -> int:
    """Spaces between a piece and the one before it on its line."""
    before, piece = pieces[at - 1], pieces[at]
    if piece.kind in ("COMMA", "COLON", "RPAR", "RSQB") or before.kind in ("LPAR", "LSQB"):
        return 0
    if piece.kind in ("LPAR", "LSQB") and before.kind in (*_OPERANDS, "RPAR", "RSQB"):
        return 0
    if before.kind in ("MINUS", "PLUS") and not _binary(pieces, at - 1):
        return 0
    for operator in (at, at - 1):
        if pieces[operator].kind in _TIGHT and _binary(pieces, operator):
            return int(pieces[operator].spaced or (operator + 1 < len(pieces) and pieces[operator + 1].spaced))
    if before.kind in _ENDS and _begins(pieces, at):
        return 2 if piece.kind in ("OP", "OP_DIGIT", "CAP") or before.kind == "RBRACE" else 3
    return 1


def _binary(pieces: Sequence[TokenPiece], at: int) -> bool:
    return at > 0 and pieces[at - 1].kind in _ENDS - {"RBRACE"}


def _begins(pieces: Sequence[TokenPiece], at: int) -> bool:
    """Whether a piece behind the end of a value, op or block begins something new."""
    kind = pieces[at].kind
    if pieces[at].planned:
        return kind in _PLAN_STARTS
    if kind in _STARTS:
        return at < 2 or pieces[at - 2].kind != "PHASE"
    return kind in _OPERANDS or kind == "CAP"
