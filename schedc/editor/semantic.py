"""What each word of a `.sched` file is, for editors that colour by meaning: ops, chunks, sizes, names and lines."""

from __future__ import annotations

import re
from typing import NamedTuple

from schedc.editor.names import PHASE, occurrences
from schedc.ir.ops import LETTERS
from schedc.source import Source, Span
from schedc.syntax.parser import legal_next
from schedc.syntax.plan_words import PLAN_LINES
from schedc.syntax.tokens import span_of
from schedc.syntax.words import METRICS

TOKEN_TYPES = ("enumMember", "number", "parameter", "variable", "function", "class", "namespace", "property", "keyword")
"""Types of the protocol, in the order of their numbers."""
_OF_KIND = {"size": "parameter", "function": "function", "schedule": "class", "plan": "class"}
"""By the kind of a name its type; all others are variables."""
_OP = re.compile(rf"([{LETTERS}])(\d*)")


class SemanticToken(NamedTuple):
    """A word with its type."""

    span: Span
    type: str


def semantic_tokens(source: Source) -> list[SemanticToken]:
    """The words that have a meaning, by place. In a text that does not parse only ops and lines have one."""
    known = {each.span: _OF_KIND.get(each.kind, "variable") for each in occurrences(source)}
    tokens, _ = legal_next(source)
    found: dict[Span, str] = {}
    for before, token in zip([None, *tokens], tokens, strict=False):
        span = span_of(token)
        if token.type in ("OP", "OP_DIGIT"):
            found |= _op(str(token), span)
        elif token.type in PLAN_LINES.values():
            found[span] = "keyword"
        elif token.type == "NAME" and before is not None and before.type == PHASE.upper():
            found[span] = "namespace"
        elif span in known:
            found[span] = known[span]
        elif token.type == "NAME" and str(token) in METRICS:
            found[span] = "property"
    return [SemanticToken(span, kind) for span, kind in sorted(found.items())]


def _op(text: str, span: Span) -> dict[Span, str]:
    """The letter of an op, and its chunk."""
    match = _OP.fullmatch(text)
    letters = Span(span.line, span.column, span.line, span.column + 1)
    if match is None or not match[2]:
        return {letters: "enumMember"}
    return {letters: "enumMember", Span(span.line, span.column + 1, span.line, span.end_column): "number"}
