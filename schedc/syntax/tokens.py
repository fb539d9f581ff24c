"""Makes tokens from a text, and checks every limit on hostile input before anything is parsed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from lark import Token
from lark.lexer import LexerThread

from schedc.diagnostics import Diagnostic, Label, did_you_mean
from schedc.source import Source, Span
from schedc.syntax.plan_words import PLAN_LINES, begins_nothing
from schedc.units import MAX_INT, UNITS

MAX_FILE = 1 << 20
MAX_TOKENS = 200_000
MAX_NESTING = 64
MAX_OPERATORS = 200
MAX_NAME = 64
MAX_FINDINGS = 20
"""Most reported findings of a check."""

_SURELY_TOKENS = re.compile(r"(?:#[^\n]*\n|[^\w(){}\[\]])*(?P<token>[A-Za-z0-9_.]+|[(){}\[\]])", re.ASCII)
"""A word or bracket with the text before it. Counting such matches is much faster than making tokens."""

_BY = re.compile(r"x[0-9]*", re.ASCII)
"""The rest of ``4x8``, which a topology writes ``4 x 8``."""

_CLOSES = {"RPAR": "LPAR", "RBRACE": "LBRACE", "RSQB": "LSQB"}
_OPENS = frozenset(_CLOSES.values())
_OPERATORS = frozenset({"PLUS", "MINUS", "TIMES", "COMPARISON", "AND", "OR", "NOT", "IF", "COMMA"})
_IN_EXPRESSIONS = _OPERATORS | {"INT", "DECIMAL", "NAME", "LPAR", "RPAR", "LSQB", "RSQB", "ELSE", "OP", "OP_DIGIT"}
_VALUE_ENDS = frozenset({"INT", "NAME", "OP", "OP_DIGIT", "RPAR", "RSQB"})
_STRAY_HELP = {
    ";": "statements need no separator",
    "..": "a range is written a ..< b, without its end",
    "!": "write not",
    "^": "there is no power operator",
    "|": "write or",
    '"': "the only string is that of a `layout`, on one line",
    "×": "write *, or x between the numbers of a `topology`",
    ".": "a point stands between digits, or in a step of a cell as F.dispatch",
}

_STRAY = "leave it out; names and numbers are letters and digits of ASCII"


@dataclass
class Tokens:
    """The tokens of a file, and the findings so far.

    partner: by index of an opening bracket, the index of its partner.
    indent: by index of an opening bracket, the column where its line begins.
    after_stray: offsets in the text of the tokens that follow a dropped token. Errors there only follow from it.
    fatal: whether a limit was exceeded, so that the tokens must not be parsed.
    """

    items: list[Token]
    findings: list[Diagnostic] = field(default_factory=list)
    partner: dict[int, int] = field(default_factory=dict)
    indent: dict[int, int] = field(default_factory=dict)
    after_stray: set[int] = field(default_factory=set)
    fatal: bool = False


def span_of(token: Token) -> Span:
    """The place of a token in its file."""
    return Span(token.line or 0, token.column or 0, token.end_line or 0, token.end_column or 0)


def scan(source: Source, lexer: Any) -> Tokens:
    """The tokens of ``source`` without comments, adapted as the comment at the top of grammar.lark says."""
    if len(source.text) > MAX_FILE or len(source.text.encode(errors="replace")) > MAX_FILE:
        return _too_large("the file is larger than 1 MiB", Span(1, 1, 1, 1), source)
    if (over := next(islice(_SURELY_TOKENS.finditer(source.text), MAX_TOKENS, None), None)) is not None:
        return _too_many(source.span_at(*over.span("token")), source)
    raw = list(islice(LexerThread.from_text(lexer, source.text).lex(None), MAX_TOKENS + 1))  # type: ignore[no-untyped-call]
    if len(raw) > MAX_TOKENS:
        return _too_many(span_of(raw[-1]), source)
    tokens = Tokens([])
    tokens.items = _without_loose_docs(list(_legal(_adapted_plans(raw, tokens, source), tokens, source)))
    _tell_ifs_apart(tokens.items)
    _tell_roles_apart(tokens.items)
    _tell_timed_words_apart(tokens.items)
    _tell_searches_apart(tokens.items)
    _match_brackets(tokens, source)
    if deep := _too_deep(tokens, source):
        tokens.findings, tokens.fatal = [deep], True
    tokens.findings += islice(_bad_words(tokens.items, source), MAX_FINDINGS)
    return tokens


def _too_many(span: Span, source: Source) -> Tokens:
    return _too_large(f"the file has more than {MAX_TOKENS:,} tokens", span, source)


def _too_large(message: str, span: Span, source: Source) -> Tokens:
    finding = Diagnostic("S004", message, Label(span, "the limit is here"), source=source)
    return Tokens([], [finding], fatal=True)


def _legal(stream: Iterable[Token], tokens: Tokens, source: Source) -> Iterator[Token]:
    """The tokens that the language has. Others are reported (S002) and dropped."""
    strays = 0
    after_stray = False
    before = ""
    for token in stream:
        legal = token.type != "UNKNOWN" and (token.type != "STRING" or before == "LAYOUT")
        before = token.type
        if legal:
            if after_stray:
                tokens.after_stray.add(token.start_pos or 0)
            after_stray = False
            yield token
            continue
        after_stray = True
        strays += 1
        if strays <= MAX_FINDINGS:
            text = str(token) if len(token) <= 20 else f"{token[:20]}…"
            help = next((help for mark, help in _STRAY_HELP.items() if token.startswith(mark)), _STRAY)
            label = Label(span_of(token), "not a character of the language")
            tokens.findings.append(Diagnostic("S002", f"unexpected `{text}`", label, help=help, source=source))


def _adapted_plans(stream: Iterable[Token], tokens: Tokens, source: Source) -> Iterator[Token]:
    """Turn the words that begin a line of a plan into tokens of their own; refuse the lines that there are not.

    A refused line goes to the next word that begins one.
    """
    depth, inside, refused, line = 0, False, False, 0
    numbered = False  # the token before is a number
    named = listed = False  # a name of a part of the model follows, as after `of`; such names have begun
    for token in stream:
        depth = max(0, depth - (token.type == "RBRACE"))
        inside = (inside or token.type == "PLAN") if depth == 0 else inside
        inside = inside and not (depth == 0 and token.type in ("RBRACE", "SCHEDULE"))
        begins = inside and depth == 1 and token.type == "NAME" and str(token) in PLAN_LINES
        begins = begins and not named
        strange = inside and depth == 1 and not begins and token.type == "NAME" and not refused
        strange = strange and token.line != line and not (numbered and token in UNITS) and begins_nothing(token)
        refused = inside and depth > 0 and not begins and (refused or strange)
        depth += token.type == "LBRACE"
        if strange:
            near = did_you_mean(token, PLAN_LINES)
            help = near or f"a plan says {', '.join(PLAN_LINES)}"
            message = f"no line of a plan begins with `{token[:MAX_NAME]}`"
            tokens.findings.append(Diagnostic("S144", message, Label(span_of(token)), help=help, source=source))
        elif begins:
            yield Token.new_borrow_pos(PLAN_LINES[token], str(token), token)
        elif inside and numbered and token.type == "NAME" and str(token) in UNITS:
            yield Token.new_borrow_pos("UNIT", str(token), token)
        elif not refused:
            yield token
        listed = named or (listed and token.type == "COMMA")
        named = token == "of" or (listed and token.type == "COMMA")
        numbered, line = token.type in ("INT", "DECIMAL"), token.line or 0


def _without_loose_docs(items: list[Token]) -> list[Token]:
    """Drop doc comments that no schedule or plan follows: they are ordinary comments."""
    kept: list[Token] = []
    follows_doc = False
    for token in reversed(items):
        follows_doc = token.type in ("SCHEDULE", "PLAN") or (token.type == "DOC" and follows_doc)
        if token.type != "DOC" or follows_doc:
            kept.append(token)
    return kept[::-1]


def _tell_ifs_apart(items: list[Token]) -> None:
    """Turn each `if` of a statement into IF_BLOCK: a block follows it. `else` follows the `if` of a value."""
    open_ifs: list[int] = []
    for i, token in enumerate(items):
        if token.type == "IF":
            open_ifs.append(i)
        elif token.type == "ELSE" and open_ifs and items[i - 1].type != "RBRACE":
            open_ifs.pop()
        elif token.type in ("LBRACE", "COLON"):  # no value has a colon: it stands in place of the brace
            for opened in open_ifs:
                items[opened] = Token.new_borrow_pos("IF_BLOCK", "if", items[opened])
            open_ifs.clear()


def _tell_roles_apart(items: list[Token]) -> None:
    """Turn each `rank` after a colon into a name: it is the misspelt role `ranks`, which `check` reports."""
    for i, token in enumerate(items[1:], 1):
        if token.type == "RANK" and items[i - 1].type == "COLON":
            items[i] = Token.new_borrow_pos("NAME", str(token), token)


_TIMED_WORDS = {"pair": ("TIMED",), "fill": ("TIMED", "PAIR", "OP", "OP_DIGIT", "RSQB")}
"""By word of a computed order that may be a name elsewhere: the tokens behind which the word is a token of its own."""


def _tell_timed_words_apart(items: list[Token]) -> None:
    """Turn each `pair` and `fill` of a computed order into a token of its own. Phases are often called `fill`."""
    for i, token in enumerate(items[1:], 1):
        if items[i - 1].type in _TIMED_WORDS.get(token, ()):
            items[i] = Token.new_borrow_pos(token.upper(), str(token), token)


def _tell_searches_apart(items: list[Token]) -> None:
    """Turn `by` and `search` into tokens where a policy or a choice of it begins, and `keep` and `of` in a search.

    No name is legal there. An `or` after a brace joins choices, not values, and no name follows a value.
    """
    before, searching = ["", ""], False  # types of the two tokens before
    for i, token in enumerate(items):
        kind = token.type
        begins = before[1] == "POLICY" or before[0] == "BY" or before == ["RBRACE", "OR"]
        if token == "by" and before[1] == "POLICY":
            kind = "BY"
        elif token == "search" and begins:
            kind, searching = "SEARCH", True
        elif token in ("keep", "of") and searching and before[1] in _VALUE_ENDS:
            kind = token.upper()
        if kind != token.type:
            items[i] = Token.new_borrow_pos(kind, str(token), token)
        searching = searching and kind != "LBRACE"
        before = [before[1], kind]


def _match_brackets(tokens: Tokens, source: Source) -> None:
    """Pair the brackets; report (S003) the first that has no partner."""
    opened: list[int] = []
    suspect: int | None = None
    indent = 0
    for i, token in enumerate(tokens.items):
        first_on_line = i == 0 or tokens.items[i - 1].line != token.line
        indent = (token.column or 0) if first_on_line else indent
        if token.type in _OPENS:
            tokens.indent[i] = indent
            opened.append(i)
        elif token.type in _CLOSES:
            if not opened or tokens.items[opened[-1]].type != _CLOSES[token.type]:
                tokens.findings.append(_unmatched(tokens.items, i, opened, source))
                return
            start = opened.pop()
            tokens.partner[start] = i
            if suspect is None and first_on_line and indent < tokens.indent[start]:
                suspect = start  # a brace to the left of its opener's line probably closes an outer block
    if opened:
        token = tokens.items[opened[-1] if suspect is None else suspect]
        label = Label(span_of(token), "opened here")
        message = f"this `{token}` is never closed"
        tokens.findings.append(Diagnostic("S003", message, label, help=_close(token), source=source))


def _close(token: Token) -> str:
    return f"add the closing `{ {'LPAR': ')', 'LBRACE': '}', 'LSQB': ']'}[token.type] }`"


def _unmatched(items: Sequence[Token], i: int, opened: Sequence[int], source: Source) -> Diagnostic:
    token = items[i]
    if not opened:
        label = Label(span_of(token), "closes nothing")
        return Diagnostic("S003", f"this `{token}` closes nothing", label, help="remove it", source=source)
    opener = items[opened[-1]]
    return Diagnostic(
        "S003",
        f"this `{token}` does not close `{opener}`",
        Label(span_of(token), "found here"),
        (Label(span_of(opener), "opened here"),),
        help=_close(opener),
        source=source,
    )


def _too_deep(tokens: Tokens, source: Source) -> Diagnostic | None:
    """A finding (S004) for the first place with too deeply nested brackets or blocks, or too long an expression."""
    depth, carried, operators = 0, 0, 0
    weights: list[int] = []
    items = tokens.items
    for i, token in enumerate(items):
        kind = token.type
        if kind in _OPENS:
            weights.append(1 + (carried if kind == "LBRACE" else 0))
            depth += weights[-1]
            carried = carried if kind != "LBRACE" else 0
        elif kind in _CLOSES and weights:
            weight = weights.pop()
            depth -= weight
            if kind == "RBRACE":  # an `else if` is a block inside the `else` of the block before
                chain = [t.type for t in items[i + 1 : i + 3]] == ["ELSE", "IF_BLOCK"]
                carried = weight if chain else 0
        operators = 0 if kind not in _IN_EXPRESSIONS else operators + (kind in _OPERATORS)
        if depth > MAX_NESTING:
            message = f"more than {MAX_NESTING} levels of nesting"
            return Diagnostic("S004", message, Label(span_of(token), "one level too deep"), source=source)
        if operators > MAX_OPERATORS:
            message = f"an expression of more than {MAX_OPERATORS} operators"
            help = "name parts of it with let"
            return Diagnostic("S004", message, Label(span_of(token), "too long"), help=help, source=source)
    return None


def _bad_words(items: Sequence[Token], source: Source) -> Iterator[Diagnostic]:
    """Findings for numbers and names that are too long, and names that begin with a digit."""
    for i, token in enumerate(items):
        fault = _fault_of_word(token, [other.type for other in items[max(0, i - 3) : i]])
        if fault:
            code, message, help = fault
            yield Diagnostic(code, message, Label(span_of(token)), help=help, source=source)


def _fault_of_word(token: Token, before: list[str]) -> tuple[str, str, str] | None:
    """Code, message and help; None for a legal word. before: types of the three tokens before it."""
    if token.type in ("INT", "DECIMAL"):
        whole = token.split(".")[0].lstrip("0")
        if len(whole) > 10 or int(whole or "0") > MAX_INT or len(token) > 32:
            return "S005", "this number is too large", f"numbers go up to {MAX_INT}"
    elif token.type == "OP_DIGIT" and len(token) > 6:
        return "S005", "this chunk number is too large", ""
    elif len(token) > MAX_NAME and token.type in ("NAME", "NUMBERED_WORD"):
        return "S006", f"this name is longer than {MAX_NAME} characters", ""
    elif token.type == "NUMBERED_WORD" and before[-1:] != ["SCHEDULE"] and before[::2] != ["PLAN", "EQUAL"]:
        digits = token[: len(token) - len(token.lstrip("0123456789"))]
        rest = token[len(digits) :]
        help = f"a name begins with a letter; a product is written {digits}*{rest}"
        if rest in UNITS or _BY.fullmatch(rest):
            help = f"write `{digits} {rest.replace('x', 'x ')}`"
        return "S006", f"`{token}` is neither a number nor a name", help
    return None
