"""Words syntax errors: expected tokens, the token in the text, and what to write instead."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from lark import Token

from schedc.diagnostics import Diagnostic, Label, did_you_mean
from schedc.ir.ops import LETTERS
from schedc.source import Source
from schedc.syntax.plan_words import FORMS, PLAN_LINES
from schedc.syntax.tokens import span_of
from schedc.units import UNITS

_KEYWORDS = ("sched", "schedule", "plan", "require", "place", "let", "fn", "order", "rank", "stage", "on", "expect",
             "when", "phase", "repeat", "for", "in", "if", "else", "timed", "at", "fill", "within", "policy", "prefer",
             "cap", "and", "or", "not")  # fmt: skip

_OP_LETTERS = f"{', '.join(LETTERS[:-1])} or {LETTERS[-1]}"

_GROUPS: tuple[tuple[frozenset[str], str], ...] = (
    (
        frozenset({"REQUIRE", "PLACE", "ORDER", "RANK", "EXPECT", "FN", "LET"}),
        "another part of the schedule",
    ),
    (
        frozenset({"PHASE", "REPEAT", "FOR", "IF_BLOCK", "LET", "TIMED", "POLICY", "OP", "OP_DIGIT"}),
        "an op or another statement",
    ),
    (frozenset(PLAN_LINES.values()), "a line of the plan"),
    (frozenset({"INT", "DECIMAL", "NAME", "OP", "OP_DIGIT", "LPAR", "MINUS", "NOT"}), "a value"),
    (frozenset({"INT", "DECIMAL", "NAME", "OP", "OP_DIGIT", "LPAR", "MINUS"}), "a value"),
    (frozenset({"PLUS", "MINUS", "TIMES", "COMPARISON", "AND", "OR", "IF"}), "an operator"),
    (frozenset({"PLUS", "MINUS", "TIMES", "AND", "OR", "IF"}), "an operator"),
    (frozenset({"INT", "DECIMAL"}), "a number"),
    (frozenset({"OP", "OP_DIGIT"}), "an op"),
    (frozenset({"SCHEDULE", "DOC"}), "`schedule`"),
    (frozenset({"NAME", "NUMBERED_WORD"}), "a name"),
)
"""Sets of token types, and the words that name the whole set in a message. The first set that fits is taken."""

_SINGLE = {
    "INT": "a number", "DECIMAL": "a number", "NAME": "a name", "NUMBERED_WORD": "a name", "OP": "an op",
    "OP_DIGIT": "an op", "LPAR": "`(`", "RPAR": "`)`", "LBRACE": "`{`", "RBRACE": "`}`", "LSQB": "`[`", "RSQB": "`]`",
    "COMMA": "`,`", "COLON": "`:`", "EQUAL": "`=`", "PLUS": "`+`", "MINUS": "`-`", "TIMES": "`*`",
    "COMPARISON": "a comparison", "RANGE": "`..<`", "AMPERSAND": "`&`", "AT": "`@`", "SLOT": "`at`", "IF_BLOCK": "`if`",
    "STRING": "a layout in quotes", "UNIT": "a unit", "STEP": "a step as F.dispatch or B.experts.I",
    "$END": "the end of the file",
}  # fmt: skip


def unexpected(items: Sequence[Token], i: int, accepted: set[str], source: Source) -> Diagnostic:
    """The finding for token ``i`` of ``items``. accepted: the token types that are legal in its place."""
    token, line = items[i], _line_of_plan(items, i, accepted)
    message = f"expected {in_messages(accepted)}, found {_in_words(token)}"
    code, help = ("S006" if _is_op(token) and _wants_name(accepted) else "S001"), _help(items, i, accepted)
    if line is None:
        return Diagnostic(code, message, Label(span_of(token), "here"), help=help, source=source)
    place, more = Label(span_of(token), "here"), [Label(span_of(line), "in this line")] * (line.line != token.line)
    if token.line != items[i - 1].line:  # something is missing at the end of the line
        place, more = Label(span_of(items[i - 1]), "expected behind this"), [Label(span_of(token), "found here")]
    help = _near_unit(items, i) or f"write it as `{FORMS[line]}`"
    return Diagnostic(code, message, place, tuple(more), help=help, source=source)


_LINES = frozenset(PLAN_LINES.values())


def _line_of_plan(items: Sequence[Token], i: int, accepted: set[str]) -> Token | None:
    """The first word of the plan line that holds token ``i`` or ends before it; None outside of a plan."""
    if "$END" in accepted:
        return None
    begins = (token for token in reversed(items[:i]) if token.type in _LINES or token.type in ("PLAN", "SCHEDULE"))
    word = next(begins, None)
    return word if word is not None and word.type in _LINES else None


def _near_unit(items: Sequence[Token], i: int) -> str:
    """A hint for a misspelt unit: a name behind a number, at token ``i`` or the one before it."""
    for position in (i, i - 1):
        if items[position].type == "NAME" and items[position - 1].type in ("INT", "DECIMAL"):
            word = str(items[position])
            same = next((unit for unit in UNITS if unit.lower() == word.lower()), "")
            near = f"did you mean `{same}`?" if same else did_you_mean(word, UNITS)
            return near if near.startswith("did you mean") else ""
    return ""


def in_messages(accepted: set[str]) -> str:
    """The accepted token types in words."""
    left, words = set(accepted), []
    for group, word in _GROUPS:
        if group <= left:
            words.append(word)
            left -= group
    if "an operator" in words:
        left -= {"LPAR", "LSQB", "COMMA"}  # a call, an index, another argument: possible, but naming them is no help
    words += sorted({_SINGLE.get(kind, f"`{kind.lower()}`") for kind in left if kind != "DOC"})
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


def _in_words(token: Token) -> str:
    """A token as a message names it."""
    if token.type == "$END":
        return "the end of the file"
    text = str(token) if len(token) <= 40 else f"{token[:40]}…"
    kind = {"OP": "the op ", "OP_DIGIT": "the op ", "NAME": "the name ", "INT": "the number "}.get(token.type, "")
    return f"{kind}`{text}`"


def _is_op(token: Token) -> bool:
    return token.type in ("OP", "OP_DIGIT")


def _is_small_op(token: Token) -> bool:
    """Whether a token would be an op with a capital letter."""
    return token.type == "NAME" and token[0] in "fiwbr" and (len(token) == 1 or token[1:].isdecimal())


def _wants_name(accepted: set[str]) -> bool:
    return "NAME" in accepted and "INT" not in accepted


@dataclass(frozen=True)
class _Slip:
    """An unexpected token and its neighbours, which are empty at the ends of the file. accepted: legal token types."""

    token: Token
    before: str
    before_type: str
    after: str
    accepted: set[str]


_HELPS: tuple[tuple[Callable[[_Slip], bool], Callable[[_Slip], str]], ...] = (
    (
        lambda s: _is_op(s.token) and _wants_name(s.accepted),
        lambda s: f"`{s.token}` is an op ({_OP_LETTERS} and a chunk number); choose another name",
    ),
    (
        lambda s: s.token == "while" and "REPEAT" in s.accepted,
        lambda _: "there is no `while`: write `repeat N { ... }` or `for k in a ..< b { ... }`",
    ),
    (lambda s: s.token in ("elif", "elseif", "elsif"), lambda _: "write `else if`"),
    (
        lambda s: s.token == ":" and "LBRACE" in s.accepted,
        lambda _: "a block stands in braces, without a colon: `{ ... }`",
    ),
    (
        lambda s: s.before_type == "RANK" and s.token.type == "INT",
        lambda s: f"one block is for all ranks: write `rank r {{ ... }}`, and in it `if r == {s.token} {{ ... }}`",
    ),
    (
        lambda s: s.token == "[" and "INT" in s.accepted,
        lambda _: "there are no lists: a function gives a value per rank, as `fn n(k) = 4 if k == 0 else 2`",
    ),
    (
        lambda s: s.token == "{" and s.accepted == {"EQUAL"},
        lambda _: "a function is one expression: `fn f(k) = k + 1`",
    ),
    (
        lambda s: s.token.type in ("IF", "IF_BLOCK") and "INT" in s.accepted,
        lambda _: "a conditional value is written `a if condition else b`",
    ),
    (lambda s: s.before == "for" and s.token == "(", lambda _: "write `for k in 0 ..< n { ... }`"),
    (
        lambda s: s.token.type == "NAME" and s.after == "=" and "LET" in s.accepted,
        lambda s: f"write `let {s.token} = ...`",
    ),
    (
        lambda s: _is_small_op(s.token) and "PHASE" in s.accepted,
        lambda s: f"ops are written in capitals: `{s.token.upper()}`",
    ),
    (
        lambda s: not s.before and "SCHEDULE" in s.accepted and not _near_word(s),
        lambda _: "a file begins with `schedule name(P: ranks = 4, M: microbatches = 8) {`",
    ),
    (lambda s: s.token == s.before == "*", lambda _: "there is no power operator; multiply"),
    (lambda s: s.token == "=" and s.after in (">", "<"), lambda s: f"write {s.after}="),
    (lambda s: s.token == "=" and "COMPARISON" in s.accepted, lambda _: "compare with =="),
    (lambda s: s.token == ":" and s.after == "=", lambda _: "write = alone"),
    (lambda s: "RANGE" in s.accepted, lambda _: "a range is written a ..< b, without its end"),
    (
        lambda s: s.token.type == "COMPARISON" and "PLUS" in s.accepted,
        lambda _: "comparisons cannot be chained; write a < b and b < c",
    ),
    (lambda s: s.token == "," and "PHASE" in s.accepted, lambda _: "statements need no separator"),
    (
        lambda s: s.token == "&" and s.before_type in ("OP", "OP_DIGIT", "RSQB"),
        lambda _: "a pair has two ops",
    ),
    (
        lambda s: s.token.type == "INT" and s.before_type == "OP",
        lambda s: f"a chunk stands at its op: {s.before}{s.token}",
    ),
    (lambda s: s.token.type == "DECIMAL", lambda _: "sizes are integers"),
    (lambda s: bool(_near_word(s)), lambda s: _near_word(s)),
    (
        lambda s: {"REPEAT", "LBRACE"} <= s.accepted and s.token.type in ("NAME", "INT", "LPAR"),
        lambda _: "a count follows the word `repeat`",
    ),
    (
        lambda s: s.token in _KEYWORDS and _wants_name(s.accepted),
        lambda s: f"`{s.token}` is a word of the language; choose another name",
    ),
    (
        lambda s: s.token.type in ("INT", "LPAR", "NAME") and "TIMES" in s.accepted,
        lambda _: "a product is written with *",
    ),
)
"""Common slips, and what to write instead. The first slip that fits gives the help."""


def _help(items: Sequence[Token], i: int, accepted: set[str]) -> str:
    before, after = items[i - 1] if i else None, items[i + 1] if i + 1 < len(items) else None
    slip = _Slip(items[i], str(before or ""), before.type if before else "", str(after or ""), accepted)
    return next((help(slip) for fits, help in _HELPS if fits(slip)), "")


def _near_word(slip: _Slip) -> str:
    """A hint for a misspelt keyword: a similar keyword, if legal in this place."""
    if slip.token.type != "NAME":
        return ""
    legal = [word for word in _KEYWORDS if {word.upper(), f"{word.upper()}_BLOCK"} & slip.accepted]
    near = did_you_mean(slip.token, legal)
    return near if near.startswith("did you mean") else ""
