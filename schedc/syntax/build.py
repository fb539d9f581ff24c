"""Builds tree nodes from grammar rules: one method per rule of grammar.lark."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lark import Token, v_args

from schedc.diagnostics import CompilerBug
from schedc.source import Source, Span
from schedc.syntax import plan as p
from schedc.syntax import tree as t
from schedc.syntax.build_plan import PlanBuilder
from schedc.syntax.tokens import span_of

Children = Sequence[Any]


@v_args(inline=True)
class TreeBuilder(PlanBuilder):
    """Builds the tree while the parser reduces. source: the file that is parsed."""

    def __init__(self) -> None:
        super().__init__()
        self.source = Source("", "")

    def __default__(self, data: Any, children: list[Any], meta: Any) -> Any:
        if data.startswith("_"):  # a repetition, whose children lark puts into the rule around it
            return super().__default__(data, children, meta)  # type: ignore[no-untyped-call]
        raise CompilerBug("TreeBuilder", f"there is no method for the rule `{data}` of grammar.lark")

    def text(self, span: Span) -> str:
        return self.source.text_at(span)

    # ---- files and schedules

    def start(self, *children: Any) -> t.FileTree:
        edition = children[0] if children and isinstance(children[0], int) else 1
        of = _by_type(children)
        return t.FileTree(edition, of(t.ScheduleTree), of(p.PlanTree))

    def edition(self, _: Token, number: Token) -> int:
        return int(number)

    def schedule(self, *children: Any) -> t.ScheduleTree:
        head = next(i for i, c in enumerate(children) if isinstance(c, Token) and c.type == "SCHEDULE")
        name, parameters, *items, _ = children[head + 1 :]
        doc = _documentation(children[:head])
        of = _by_type([part for item in items for part in (item if isinstance(item, tuple) else (item,))])
        return t.ScheduleTree(
            str(name),
            doc,
            parameters,
            of(t.Require),
            of(t.Let),
            of(t.Function),
            of(t.Place),
            of(t.OrderFor),
            of(t.RankBlock),
            of(t.Claim),
            span_of(name),
            self.source,
            any(block.policy is not None for block in of(t.RankBlock)),
        )

    def parameters(self, *parameters: t.SizeParameter | None) -> tuple[t.SizeParameter, ...]:
        return tuple(p for p in parameters if p is not None)

    def parameter(self, name: Token, role: Token, default: Token | None) -> t.SizeParameter:
        span = span_of(name).to(span_of(default or role))
        return t.SizeParameter(str(name), str(role), None if default is None else int(default), span)

    def require(self, _: Token, *conditions: t.Expr) -> tuple[t.Require, ...]:
        return tuple(t.Require(c, self.text(c.span), c.span) for c in conditions)

    def let(self, word: Token, name: Token, value: t.Expr) -> t.Let:
        return t.Let(str(name), value, span_of(word).to(value.span))

    def function(self, word: Token, name: Token, parameters: tuple[str, ...], body: t.Expr) -> t.Function:
        return t.Function(str(name), parameters, body, span_of(word).to(body.span))

    def names(self, *names: Token | None) -> tuple[str, ...]:
        return tuple(str(name) for name in names if name is not None)

    def order_for(self, word: Token, _: Token, microbatches: t.Expr) -> t.OrderFor:
        return t.OrderFor(microbatches, span_of(word).to(microbatches.span))

    def rank(self, word: Token, name: Token, block: tuple[Any, Span]) -> t.RankBlock:
        return t.RankBlock(str(name), block[0], span_of(word).to(span_of(name)))

    def claim(self, word: Token, claim: t.Expr, condition: t.Expr | None) -> t.Claim:
        span = span_of(word).to((condition or claim).span)
        return t.Claim(claim, condition, self.text(claim.span), self.text(condition.span) if condition else "", span)

    # ---- placement

    def place(self, word: Token, form: Token, *rest: Any) -> t.Place:
        arguments = next((r for r in rest if isinstance(r, _Arguments)), None)
        routes: tuple[t.PipePlace, ...] = next((r for r in rest if type(r) is tuple), ())
        end = arguments.span if arguments else span_of(form)
        return t.Place(str(form), tuple(arguments or ()), routes, span_of(word).to(end))

    def routes(self, *routes: Any) -> tuple[t.PipePlace, ...]:
        return tuple(routes[:-1])

    def pipe(self, name: Token, microbatches: t.Expr, variable: Token, _: Token, rank: t.Expr) -> t.PipePlace:
        return t.PipePlace(str(name), microbatches, str(variable), rank, span_of(name).to(rank.span))

    def map(self, word: Token, variable: Token, _: Token, rank: t.Expr) -> t.PipePlace:
        return t.PipePlace("", None, str(variable), rank, span_of(word).to(rank.span))

    # ---- statements

    def block(self, *children: Any) -> tuple[tuple[t.Statement, ...], Span]:
        return tuple(children[:-1]), span_of(children[-1])

    def op_whole(self, letter: Token, at: t.Expr | None) -> t.OpItem:
        return t.OpItem(str(letter), None, at, _to(letter, at))

    def op_digit(self, word: Token, at: t.Expr | None) -> t.OpItem:
        span = span_of(word)
        digits = Span(span.line, span.column + 1, span.end_line, span.end_column)
        chunk = t.Int(int(word[1:6]), digits)  # the token checks have reported longer numbers
        return t.OpItem(word[0], chunk, at, _to(word, at))

    def op_index(self, letter: Token, chunk: t.Expr, close: Token, at: t.Expr | None) -> t.OpItem:
        return t.OpItem(str(letter), chunk, at, span_of(letter).to(at.span if at else span_of(close)))

    def pair(self, first: t.OpItem, second: t.OpItem) -> t.PairItem:
        return t.PairItem(first, second, first.span.to(second.span))

    def phase(self, word: Token, name: Token, body: Any) -> t.Phase:
        statements = body[0] if isinstance(body, tuple) else (body,)
        return t.Phase(str(name), statements, span_of(word).to(span_of(name)))

    def repeat(self, word: Token, count: t.Expr, block: tuple[Any, Span]) -> t.Repeat:
        return t.Repeat(count, block[0], span_of(word).to(count.span))

    def for_(self, word: Token, name: Token, start: t.Expr, _: Token, stop: t.Expr, block: tuple[Any, Span]) -> t.For:
        return t.For(str(name), start, stop, block[0], span_of(word).to(stop.span))

    def if_(self, word: Token, condition: t.Expr, block: tuple[Any, Span], *other: Any) -> t.If:
        otherwise = () if other[-1] is None else other[-1][0] if isinstance(other[-1], tuple) else (other[-1],)
        return t.If(condition, block[0], otherwise, span_of(word).to(condition.span))

    # ---- orders that are computed

    def slot(self, op: t.OpItem, _: Token, slot: t.Expr) -> t.SlotItem:
        return t.SlotItem(op, slot, op.span.to(slot.span))

    def timed(self, word: Token, pair: Token | None, fill: t.Fill | None, block: tuple[Any, Span]) -> t.Timed:
        end = fill.span if fill else span_of(pair or word)
        return t.Timed(pair is not None, fill, block[0], span_of(word).to(end))

    def fill(self, word: Token, op: t.OpItem, within: t.Expr | None) -> t.Fill:
        return t.Fill(op, within, span_of(word).to((within or op).span))

    def policy(self, word: Token, aim: t.Name | None, *parts: t.Choice | Token) -> t.Policy:
        return t.Policy(aim, tuple(part for part in parts if isinstance(part, t.Choice)), span_of(word))

    def aim(self, _: Token, name: Token) -> t.Name:
        return self.name(name)

    def search(self, word: Token, within: t.Expr, *kept: t.Expr | Token | None) -> t.Search:
        share = [part for part in kept if part is not None and not isinstance(part, Token)]
        part, whole = share or (None, None)
        return t.Search(within, part, whole, span_of(word).to((whole or within).span))

    def filling(self, _: Token, op: t.OpItem) -> t.OpItem:
        return op

    def choice(
        self, search: t.Search | None, prefer: tuple[Any, ...] | None, fill: t.OpItem | None, *parts: Any
    ) -> t.Choice:
        items, caps, (body, end) = prefer or (), parts[:-1], parts[-1]
        heads = (*([search] if search else []), *items, *([fill] if fill else []), *caps)
        first = next((part.span for part in heads if not isinstance(part, Token)), end)
        signs = tuple(str(item) for item in items if isinstance(item, Token))
        preferred = tuple(item for item in items if not isinstance(item, Token))
        return t.Choice(search, preferred, signs, fill, caps, body, first)

    def prefer(self, _: Token, *items: Any) -> tuple[Any, ...]:
        return items

    def cap(self, word: Token, *parts: Any) -> t.Cap:
        sign, most = parts[-2:]
        freed = parts[2] if len(parts) > 3 else None
        return t.Cap(parts[0], freed, most, str(sign), span_of(word).to(most.span))

    def op_pattern(self, word: Token, *index: Any) -> t.OpItem:
        if index:
            chunk, close = index
            return self.op_index(word, chunk, close, None)
        return self.op_digit(word, None) if word.type == "OP_DIGIT" else self.op_whole(word, None)

    pair_pattern = pair

    # ---- plans

    def plan(self, *children: Any) -> p.PlanTree:
        head = next(i for i, c in enumerate(children) if isinstance(c, Token) and c.type == "PLAN")
        name, schedule, sizes, *lines, _ = children[head + 1 :]
        doc = _documentation(children[:head])
        memory = next((line for line in lines if isinstance(line, p.MemoryLine)), None)
        places = span_of(schedule), span_of(name)
        return p.PlanTree(str(name), doc, str(schedule), sizes or (), tuple(lines), memory, *places, self.source)

    # ---- values

    def integer(self, number: Token) -> t.Int:
        return t.Int(int(number[-20:]), span_of(number))  # the token checks have reported longer numbers

    def decimal(self, number: Token) -> t.Int:
        return t.Int(float(number), span_of(number))

    def name(self, name: Token) -> t.Name:
        return t.Name(str(name), span_of(name))

    def unary(self, operator: Token, operand: t.Expr) -> t.Unary:
        return t.Unary(str(operator), operand, span_of(operator).to(operand.span))

    def binary(self, left: t.Expr, operator: Token, right: t.Expr) -> t.Binary:
        return t.Binary(str(operator), left, right, left.span.to(right.span))

    def conditional(self, then: t.Expr, condition: t.Expr, _: Token, otherwise: t.Expr) -> t.Conditional:
        return t.Conditional(condition, then, otherwise, then.span.to(otherwise.span))

    def call(self, name: Token, arguments: _Arguments) -> t.Call:
        return t.Call(str(name), tuple(arguments), span_of(name).to(arguments.span))

    def index(self, name: Token, index: t.Expr, close: Token) -> t.Index:
        return t.Index(str(name), index, span_of(name).to(span_of(close)))

    def parenthesis(self, opening: Token, inner: t.Expr, closing: Token) -> t.Expr:
        return replace(inner, span=span_of(opening).to(span_of(closing)))

    def arguments(self, *children: Any) -> _Arguments:
        return _Arguments([c for c in children[:-1] if c is not None], span_of(children[-1]))


class _Arguments(tuple[t.Expr, ...]):
    """Arguments of a call. span: the place of the closing parenthesis."""

    span: Span

    def __new__(cls, values: Sequence[t.Expr], span: Span) -> _Arguments:
        arguments = super().__new__(cls, values)
        arguments.span = span
        return arguments


def _to(first: Token, last: t.Expr | None) -> Span:
    return span_of(first).to(last.span) if last else span_of(first)


def _documentation(lines: Sequence[Token]) -> str:
    """The text of doc comments."""
    return "\n".join(line[2:].removeprefix(" ").rstrip() for line in lines)


def _by_type(items: Sequence[Any]) -> Any:
    return lambda kind: tuple(item for item in items if isinstance(item, kind))
