"""Completes the word at a place of a `.sched` file: what the grammar takes there, and the names in scope."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from typing import NamedTuple

from lark import Token

from schedc.editor.hover import WORDS
from schedc.ir.ops import LETTERS
from schedc.load.library import names as library_names
from schedc.source import Source
from schedc.step.costs.keys import COST_SYMBOLS
from schedc.syntax.parser import grammar, legal_next
from schedc.syntax.plan_words import FORMS, NAMES, PLAN_LINES
from schedc.syntax.words import BUILTINS, METRICS, PLACEMENTS, ROLES
from schedc.units import UNITS

_WORD_BEFORE = re.compile(r"[A-Za-z0-9_.]*$", re.ASCII)
_DEFINES = ("SCHEDULE", "LET", "FN", "PHASE", "FOR", "STAGE")
"""Tokens behind which a new name stands."""


class Completion(NamedTuple):
    """A word that may stand at a place. kind: keyword, name, op, line or schedule. detail: what the word means."""

    word: str
    kind: str
    detail: str = ""


def completions(source: Source, line: int, column: int) -> list[Completion]:
    """The words that may stand at a place, which begin as the text there does. line, column: from 1."""
    before = source.line(line)[: column - 1]
    if "#" in before:
        return []
    started = _WORD_BEFORE.search(before)
    begun = started[0] if started else ""
    head = [*source.lines[: line - 1], before[: len(before) - len(begun)]]
    tokens, legal = legal_next(Source(source.name, "\n".join(head)))
    found = {each.word: each for each in _all(tokens, legal, source)}
    return [each for each in found.values() if each.word.startswith(begun)]


def _all(tokens: list[Token], legal: set[str], source: Source) -> Iterator[Completion]:
    keywords = _keywords()
    in_plan = _plan_line(tokens)
    for kind in sorted(legal):
        if kind in keywords and kind not in PLAN_LINES.values():
            yield Completion(keywords[kind], "keyword", WORDS.get(keywords[kind], ""))
    for word, kind in PLAN_LINES.items():
        if kind in legal:
            yield Completion(word, "line", FORMS[word])
    if in_plan:
        yield from (Completion(word, "keyword") for word in NAMES[in_plan])
    if "UNIT" in legal:
        yield from _of(UNITS)
    if legal & {"OP", "OP_DIGIT"}:
        yield from (Completion(letter, "op", WORDS.get(letter, "")) for letter in LETTERS)
        yield from (Completion(op, "op") for op in _ops_of(source))
    if legal & {"NAME", "NUMBERED_WORD"} and not in_plan:
        yield from _names(tokens, source)


@cache
def _keywords() -> dict[str, str]:
    """The words of the grammar by their tokens. Some words are several tokens, which follow from their places."""
    patterns = {each.name: each.pattern.value for each in grammar()[0].terminals}
    words = {name: text for name, text in patterns.items() if re.fullmatch("[a-z]+", text)}
    return words | {"IF_BLOCK": "if", "PAIR": "pair", "FILL": "fill", "BY": "by", "SEARCH": "search", "KEEP": "keep",
                    "OF": "of"}  # fmt: skip


def _plan_line(tokens: list[Token]) -> str:
    """The word of the plan's line that the last token belongs to; empty outside a plan's lines."""
    depth = 0
    for token in reversed(tokens):
        depth += (token.type == "RBRACE") - (token.type == "LBRACE")
        if depth < 0 or token.type in ("PLAN", "SCHEDULE"):
            return ""
        if depth == 0 and token.type in PLAN_LINES.values():
            word = str(token)
            return word if word in NAMES else ""
    return ""


def _ops_of(source: Source) -> list[str]:
    """The ops with chunks that the text has."""
    return sorted(set(re.findall(rf"\b[{LETTERS}]\d+\b", source.text)))


def _names(tokens: list[Token], source: Source) -> Iterator[Completion]:
    last = tokens[-1].type if tokens else ""
    if last in _DEFINES:
        return
    if last == "PLACE":
        yield from _of(PLACEMENTS)
    elif last == "COLON":
        yield from _of(ROLES)
    elif last == "BY":
        yield from _of(("makespan", "span"))
    elif _applies(tokens):
        own = re.findall(r"\bschedule\s+(\w+)", source.text)
        yield from (Completion(name, "schedule") for name in (*own, *library_names()))
    else:
        yield from (Completion(name, "name") for name in _in_scope(tokens))
        yield from _of(BUILTINS)
        if _in_claim(tokens):
            yield from _of((*METRICS, *COST_SYMBOLS))
            yield from (Completion(name, "name", "any rank") for name in re.findall(r"\brank\s+(\w+)\s*{", source.text))


def _of(words: Iterable[str]) -> Iterator[Completion]:
    return (Completion(word, "keyword", WORDS.get(word, "")) for word in words)


def _applies(tokens: list[Token]) -> bool:
    """Whether ``plan name =`` stands before."""
    return len(tokens) > 2 and tokens[-3].type == "PLAN"


def _in_claim(tokens: list[Token]) -> bool:
    begins = {"EXPECT", "REQUIRE", "LET", "FN", "PLACE", "ORDER", "RANK", "SCHEDULE"}
    return next((token.type for token in reversed(tokens) if token.type in begins), "") == "EXPECT"


def _in_scope(tokens: list[Token]) -> list[str]:
    """The names that are known behind the tokens: of sizes, definitions, and variables of open blocks."""
    scopes: list[list[str]] = [[]]
    pending: list[str] = []
    for before, token in zip([None, *tokens], tokens, strict=False):
        kind, last = token.type, before.type if before is not None else ""
        if kind == "SCHEDULE":
            scopes, pending = [[]], []
        elif kind == "LBRACE":
            scopes.append(pending)
            pending = []
        elif kind == "RBRACE" and len(scopes) > 1:
            scopes.pop()
        elif kind == "COLON" and before is not None and last == "NAME":
            scopes[0].append(str(before))
        elif kind == "NAME" and last in ("LET", "FN"):
            scopes[-1].append(str(token))
        elif kind == "NAME" and last in ("FOR", "RANK"):
            pending.append(str(token))
        elif kind == "NAME" and last == "STAGE":
            scopes[-1].append(str(token))
    signature = _signature(tokens)
    return [name for scope in scopes for name in scope if name not in signature[:1]] + signature[1:]


def _signature(tokens: list[Token]) -> list[str]:
    """The name and the parameters of a function whose body the tokens end in, which cannot call itself."""
    begins = {"FN", "LET", "REQUIRE", "LBRACE", "PLACE", "RANK", "EXPECT"}
    begin = next((at for at in range(len(tokens) - 1, -1, -1) if tokens[at].type in begins), None)
    if begin is None or tokens[begin].type != "FN":
        return []
    signature = tokens[begin + 1 :]
    end = next((at for at, token in enumerate(signature) if token.type == "RPAR"), len(signature))
    return [str(token) for token in signature[:end] if token.type == "NAME"]
