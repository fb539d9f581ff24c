"""Syntax errors in the words of the language: what was expected, what was found, what to write instead."""

from __future__ import annotations

from collections.abc import Sequence

from lark import Token

from schedc.diagnostics import Diagnostic, Label, did_you_mean
from schedc.source import Source
from schedc.syntax.tokens import span_of

_KEYWORDS = ("sched", "schedule", "plan", "require", "place", "let", "fn", "rank", "stage", "on", "expect", "when",
             "phase", "repeat", "for", "in", "if", "else", "and", "or", "not")  # fmt: skip

_GROUPS: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"REQUIRE", "PLACE", "RANK", "EXPECT", "FN", "LET"}),
        "`require`, `place`, `let`, `fn`, `rank`, `expect`",
    ),
    (frozenset({"PHASE", "REPEAT", "FOR", "IF_BLOCK", "LET", "OP", "OP_DIGIT"}), "an op or another statement"),
    (frozenset({"INT", "DECIMAL", "NAME", "OP", "OP_DIGIT", "LPAR", "MINUS", "NOT"}), "a value"),
    (frozenset({"INT", "DECIMAL", "NAME", "OP", "OP_DIGIT", "LPAR", "MINUS"}), "a value"),
    (frozenset({"PLUS", "MINUS", "TIMES", "COMPARISON", "AND", "OR", "IF"}), "an operator"),
    (frozenset({"PLUS", "MINUS", "TIMES", "AND", "OR", "IF"}), "an operator"),
    (frozenset({"OP", "OP_DIGIT"}), "an op"),
    (frozenset({"SCHEDULE", "DOC"}), "`schedule`"),
    (frozenset({"NAME", "NUMBERED_WORD"}), "a name"),
)
"""Sets of tokens with one word for all of them; the first that fits is taken."""

_SINGLE = {
    "INT": "a number", "NAME": "a name", "LPAR": "`(`", "RPAR": "`)`", "LBRACE": "`{`", "RBRACE": "`}`",
    "LSQB": "`[`", "RSQB": "`]`", "COMMA": "`,`", "COLON": "`:`", "EQUAL": "`=`", "IF_BLOCK": "`if`",
    "__ANON_0": "`..<`", "AMPERSAND": "`&`", "AT": "`@`", "$END": "the end of the file",
}  # fmt: skip


def unexpected(items: Sequence[Token], i: int, accepted: set[str], source: Source) -> Diagnostic:
    """The error of token ``i`` of ``items`` where only ``accepted`` could stand."""
    token = items[i]
    found = _found(token)
    message = f"expected {_expected(accepted)}, found {found}"
    code, help = ("S006" if _is_op(token) and _wants_name(accepted) else "S001"), _help(items, i, accepted)
    return Diagnostic(code, message, Label(span_of(token), "here"), help=help, source=source)


def _expected(accepted: set[str]) -> str:
    left, words = set(accepted), []
    for group, word in _GROUPS:
        if group <= left:
            words.append(word)
            left -= group
    words += sorted(_SINGLE.get(kind, f"`{kind.lower()}`") for kind in left if kind != "DOC")
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _found(token: Token) -> str:
    if token.type == "$END":
        return "the end of the file"
    text = str(token) if len(token) <= 40 else f"{token[:40]}…"
    kind = {"OP": "the op ", "OP_DIGIT": "the op ", "NAME": "the name ", "INT": "the number "}.get(token.type, "")
    return f"{kind}`{text}`"


def _is_op(token: Token) -> bool:
    return token.type in ("OP", "OP_DIGIT")


def _wants_name(accepted: set[str]) -> bool:
    return "NAME" in accepted and "INT" not in accepted


def _help(items: Sequence[Token], i: int, accepted: set[str]) -> str:
    """What to write instead, for the slips that are common."""
    token, before = items[i], items[i - 1] if i else None
    if _is_op(token) and _wants_name(accepted):
        return f"`{token}` is an op (F, I, W or B and a chunk number); choose another name"
    if before is not None and token == before == "*":
        return "there is no power operator; multiply"
    if token == "=" and "COMPARISON" in accepted:
        return "compare with =="
    if token.type == "COMPARISON":
        return "comparisons cannot be chained; write a < b and b < c"
    if token == "," and accepted & {"OP"}:
        return "statements need no separator"
    if token.type == "DECIMAL":
        return "sizes are integers"
    if token.type == "NAME":
        return _help_of_word(token, accepted)
    if token in _KEYWORDS and _wants_name(accepted):
        return f"`{token}` is a word of the language; choose another name"
    if token.type in ("INT", "LPAR") and before is not None and before.type in ("INT", "RPAR", "NAME"):
        return "a product is written with *"
    return ""


def _help_of_word(token: Token, accepted: set[str]) -> str:
    """A keyword that ``token`` is nearly, if it could stand there."""
    legal = [word for word in _KEYWORDS if word.upper() in accepted or (word == "if" and "IF_BLOCK" in accepted)]
    near = did_you_mean(token, legal)
    return near if near.startswith("did you mean") else ""
