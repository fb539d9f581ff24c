"""`parse` makes the tree of a file from its text, or reports all of its syntax errors at once."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from typing import cast

from lark import Lark, Token
from lark.exceptions import UnexpectedToken
from lark.parsers.lalr_interactive_parser import InteractiveParser

from schedc.diagnostics import Diagnostic, DiagnosticError, Label
from schedc.source import Source, Span
from schedc.syntax.build import TreeBuilder
from schedc.syntax.messages import unexpected
from schedc.syntax.plan_words import PLAN_LINES
from schedc.syntax.tokens import Tokens, scan, span_of
from schedc.syntax.tree import FileTree

EDITION = 1
"""The only edition of the language so far."""

_MAX_ERRORS = 10
"""Most syntax errors of a file that are reported."""
_MAX_RECOVERIES = 50
"""Most errors after which parsing goes on."""

_RESUME = frozenset(
    {"PHASE", "REPEAT", "FOR", "IF_BLOCK", "LET", "TIMED", "POLICY", "FN", "RANK", "EXPECT", "REQUIRE", "PLACE",
     "SCHEDULE", "PLAN", *PLAN_LINES.values(), "RBRACE", "OP", "OP_DIGIT"}
)  # fmt: skip
"""Tokens that begin a construct. Parsing goes on at one of them after an error."""

_STATEMENTS = frozenset({"PHASE", "REPEAT", "FOR", "IF_BLOCK", "LET", "TIMED", "POLICY", "OP", "OP_DIGIT"})
"""Tokens that begin a statement."""


@cache
def grammar() -> tuple[Lark, TreeBuilder]:
    """The LALR tables (0.05 to 0.1 s to build, once per process) and the builder that they call.

    A file ``grammar.tables`` has them ready where the playground keeps one.
    """
    folder, build = files("schedc.syntax"), TreeBuilder()
    if (kept := folder.joinpath("grammar.tables")).is_file():
        with kept.open("rb") as file:
            lark = Lark.load(file)
        return lark, cast(TreeBuilder, lark.options.transformer)
    text = folder.joinpath("grammar.lark").read_text(encoding="utf-8")
    text += f"\n%declare {' '.join(dict.fromkeys(PLAN_LINES.values()))}\n"
    return Lark(text, parser="lalr", lexer="basic", transformer=build, postlex=_Refused()), build


class _Refused:
    """Keeps the tokens that no rule uses, so that they are refused with a message of the language, not of lark."""

    always_accept = ("UNKNOWN",)

    def process(self, stream: Iterator[Token]) -> Iterator[Token]:
        return stream


def parse(source: Source) -> FileTree:
    """The tree of ``source``. Raises `DiagnosticError` with all syntax errors (codes S0)."""
    lark, build = grammar()
    tokens = scan(source, lark.parser.lexer.lexer)
    if tokens.fatal:
        raise DiagnosticError(tokens.findings)
    build.source = source
    tree, errors = _run(lark.parse_interactive(), tokens, source)
    findings = _in_order(tokens, errors) or _about_file(tree, tokens, source)
    if findings or tree is None:
        raise DiagnosticError(findings)
    return tree


def legal_next(source: Source) -> tuple[list[Token], set[str]]:
    """The tokens of a text that ends anywhere, and the types of tokens that may come next; none beyond a limit."""
    lark, build = grammar()
    tokens = scan(source, lark.parser.lexer.lexer)
    if tokens.fatal:
        return [], set()
    build.source = source
    parser = lark.parse_interactive()
    _feed(parser, tokens, source)
    return tokens.items, _accepted(parser)


def _run(parser: InteractiveParser, tokens: Tokens, source: Source) -> tuple[FileTree | None, list[Diagnostic]]:
    """Feed all tokens and the end of the text to the parser."""
    errors, recovered = _feed(parser, tokens, source)
    if recovered:
        return None, errors
    items, last = tokens.items, Token("$END", "", 0, 1, 1, 1, 1, 0)
    end = Token.new_borrow_pos("$END", "", items[-1] if items else last)
    try:
        return parser.feed_token(end), errors
    except UnexpectedToken:
        return None, [unexpected([*items, end], len(items), _accepted(parser), source)]


def _feed(parser: InteractiveParser, tokens: Tokens, source: Source) -> tuple[list[Diagnostic], bool]:
    """Feed all tokens to the parser, and go on after every error. Returns errors, and whether there were any.

    A token in the place of a name, or a superfluous one, is skipped. After another error, parsing goes on at the next
    token that begins a construct; constructs that were open before it are dropped.
    """
    errors: list[Diagnostic] = []
    entered: set[int] = set()
    i, recoveries, items = 0, 0, tokens.items
    while i < len(items) and len(errors) < _MAX_ERRORS and recoveries < _MAX_RECOVERIES:
        if i in entered:  # the end of a block whose beginning was skipped
            i += 1
            continue
        try:
            parser.feed_token(items[i])
            i += 1
        except UnexpectedToken:
            accepted = _accepted(parser)
            repeated = items[i].type == "ELSE" and errors  # its `if` was refused
            if items[i].start_pos not in tokens.after_stray and not repeated:
                errors.append(unexpected(items, i, accepted, source))
            recoveries += 1
            if _skipped(parser, items, i, accepted):
                i += 1
            else:
                i = _resume(parser, tokens, i + (items[i].type in ("OP", "OP_DIGIT")), entered)
    return errors, recoveries > 0


def _skipped(parser: InteractiveParser, items: list[Token], i: int, accepted: set[str]) -> bool:
    """Whether parsing can go on after token ``i``: it is a colon before a block, or stands in the place of a name."""
    token, after = items[i], items[i + 1].type if i + 1 < len(items) else "$END"
    if token.type == "COLON":
        return after in accepted
    if accepted != {"NAME"} or not token[0].isalnum() or after == "NAME":
        return False
    parser.feed_token(Token.new_borrow_pos("NAME", str(token), token))
    return after in _accepted(parser)


def _resume(parser: InteractiveParser, tokens: Tokens, start: int, entered: set[int]) -> int:
    """Find the next token with which parsing can go on, and cut the parser's stack back until it is legal.

    A block of statements is entered, and its closing brace added to ``entered``. Other brackets are skipped.
    """
    i = start
    while i < len(tokens.items):
        kind = tokens.items[i].type
        if i in tokens.partner:
            inside = i + 1
            if kind == "LBRACE" and tokens.items[inside].type in _STATEMENTS and _cut_back(parser, "PHASE"):
                entered.add(tokens.partner[i])
                return inside
            i = tokens.partner[i] + 1
        elif kind in _RESUME and _cut_back(parser, kind):
            return i
        else:
            i += 1
    return i


def _accepted(parser: InteractiveParser) -> set[str]:
    """The token types that are legal next."""
    return set(parser.accepts())  # type: ignore[no-untyped-call]


def _cut_back(parser: InteractiveParser, kind: str) -> bool:
    """Drop open constructs until ``kind`` is legal. Return False, with nothing dropped, if it never is."""
    wanted = "PHASE" if kind in ("OP", "OP_DIGIT") else kind  # an op as a statement, not its letter as a value
    state = parser.parser_state
    states, values = list(state.state_stack), list(state.value_stack)
    while wanted not in _accepted(parser):
        if len(state.state_stack) == 1:
            state.state_stack[:], state.value_stack[:] = states, values
            return False
        state.state_stack.pop()
        state.value_stack.pop()
    return True


def _in_order(tokens: Tokens, errors: list[Diagnostic]) -> list[Diagnostic]:
    """All findings by place, without errors that only follow from a bracket without partner or from a bad word."""
    broken = min((d.primary.span for d in tokens.findings if d.code == "S003"), default=None)
    reported = {d.primary.span for d in tokens.findings}
    fresh = [d for d in errors if d.primary.span not in reported and (broken is None or d.primary.span < broken)]
    return sorted([*tokens.findings, *fresh], key=lambda d: d.primary.span)


def _about_file(tree: FileTree | None, tokens: Tokens, source: Source) -> list[Diagnostic]:
    """The finding for a file that parses, but has an unknown edition (S007) or holds nothing (S009)."""
    if tree is None:
        return []
    if tree.edition != EDITION:
        label = Label(span_of(tokens.items[1]), "an edition this compiler does not know")
        message = f"language edition {tree.edition} is not known"
        return [Diagnostic("S007", message, label, help=f"write `sched {EDITION}`", source=source)]
    if not tree.schedules and not tree.plans:
        help = "begin one with `schedule name(P: ranks = 4, M: microbatches = 8) {`"
        return [Diagnostic("S009", "the file holds no schedule", Label(Span(1, 1, 1, 1)), help=help, source=source)]
    return []
