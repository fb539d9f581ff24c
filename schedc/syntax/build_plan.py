"""Builds the lines of plans from grammar rules: one method per rule of the section on plans of grammar.lark."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lark import Token, Transformer, v_args

from schedc.source import Span
from schedc.syntax import plan as p
from schedc.syntax import tree as t
from schedc.syntax.tokens import span_of


@v_args(inline=True)
class PlanBuilder(Transformer[Token, t.FileTree]):
    """Builds the lines of plans while the parser reduces."""

    def sizes(self, *sizes: p.GivenValue | None) -> tuple[p.GivenValue, ...]:
        return tuple(size for size in sizes if size is not None)

    def size(self, name: Token, value: Token) -> p.GivenValue:
        return p.GivenValue(str(name), _number(value), span_of(name).to(span_of(value)))

    amount = size

    def unit(self, unit: Token, *over: Token | None) -> tuple[str, Span]:
        sign, per = over or (None, None)
        return (str(unit), span_of(unit)) if per is None else (f"{unit}{sign}{per}", span_of(unit).to(span_of(per)))

    def entry(self, name: Token, value: Token, unit: tuple[str, Span] | None) -> p.GivenValue:
        text, end = unit or ("", span_of(value))
        return p.GivenValue(str(name), _number(value), span_of(name).to(end), text)

    speed = entry

    def layers(self, word: Token, count: Token, *rest: Any) -> p.LayersLine:
        *options, _, spot = rest
        at, at_span = spot or (None, span_of(count))
        end = at_span if spot else (options[-1].span if options else span_of(count))
        return p.LayersLine(int(count[-20:]), tuple(options), at, at_span, span_of(word).to(end))

    def spot(self, *tokens: Token) -> tuple[str | tuple[int, ...], Span]:
        span = span_of(tokens[0]).to(span_of(tokens[-1]))
        return (str(tokens[0]) if tokens[0].type == "NAME" else tuple(int(n[-20:]) for n in tokens[:-1])), span

    def layout(self, word: Token, text: Token, *options: p.GivenValue) -> p.LayoutLine:
        end = options[-1].span if options else span_of(text)
        return p.LayoutLine(text[1:-1], options, span_of(text), span_of(word).to(end))

    def table(self, word: Token, *entries: p.GivenValue) -> p.TableLine:
        return p.TableLine(str(word), entries, span_of(word).to(entries[-1].span))

    def memory(self, word: Token, limit: Token, unit: tuple[str, Span] | None) -> p.MemoryLine:
        text, end = unit or ("", span_of(limit))
        return p.MemoryLine(float(_number(limit)), span_of(word).to(end), text)

    def experts(self, word: Token, count: Token, *rest: Any) -> p.ExpertsLine:
        *options, name, value, _, way_out = rest
        said = _words((name, value, way_out))
        end = said[-1].span if said else options[-1].span if options else span_of(count)
        return p.ExpertsLine(int(_number(count)), tuple(options), said, span_of(word).to(end))

    def topology(
        self, word: Token, nodes: Token, n: Token, by: Token, per: Token, *links: p.GivenValue
    ) -> p.TopologyLine:
        end = links[-1].span if links else span_of(per)
        words = _word(nodes), _word(by)
        return p.TopologyLine(int(_number(n)), int(_number(per)), words, links, span_of(word).to(end))

    def tokens(self, word: Token, count: Token, *words: Token | None) -> p.TokensLine:
        said = _words(words)
        return p.TokensLine(int(_number(count)), said, span_of(word).to(said[-1].span if said else span_of(count)))

    def setting(self, word: Token, value: Token) -> p.SettingLine:
        return p.SettingLine(str(word), _word(value), span_of(word).to(span_of(value)))

    def factor(self, word: Token, factor: Token, *words: Token | None) -> p.FactorLine:
        said = _words(words)
        end = said[-1].span if said else span_of(factor)
        return p.FactorLine(str(word), float(_number(factor)), said, span_of(word).to(end))

    def products(self, word: Token, value: Token, *otherwise: Token | None) -> p.ProductsLine:
        last = otherwise[-1]
        end = span_of(value if last is None else last)
        return p.ProductsLine(_word(value), None if last is None else _word(last), span_of(word).to(end))

    def buffers(self, word: Token, way: Token, factor: Token | None = None) -> p.SizesLine:
        value = None if factor is None else float(_number(factor))
        return p.SizesLine(_word(way), value, span_of(word).to(span_of(factor or way)))

    def hot(self, word: Token, count: Token, *conditions: Token | None) -> p.HotLine:
        by, (*words, below) = _words(conditions[:2]), conditions[2:]
        value = _word(count) if count.type == "NAME" else int(_number(count))
        limit = None if below is None else float(_number(below))
        end = span_of(below) if below is not None else by[-1].span if by else span_of(count)
        return p.HotLine(value, by, _words(words), limit, span_of(word).to(end))

    def recompute(self, word: Token, *parts: p.RulePart | Token) -> p.RecomputeLine:
        read = [p.RulePart("word", str(q), (), span_of(q)) if isinstance(q, Token) else q for q in parts]
        return p.RecomputeLine(tuple(read), span_of(word).to(read[-1].span))

    def host(self, word: Token, size: Token, unit: tuple[str, Span] | None, *speeds: p.GivenValue) -> p.HostLine:
        value = self.entry(word, size, unit)
        return p.HostLine(value, speeds, value.span.to(speeds[-1].span) if speeds else value.span)

    def sharing(self, word: Token, by: Token, ranks: Token) -> p.GivenValue:
        return p.GivenValue(str(word), _number(ranks), span_of(word).to(span_of(ranks)), str(by))

    def offload(self, word: Token, *parts: p.RulePart | Token) -> p.OffloadLine:
        read = [p.RulePart("word", str(q), (), span_of(q)) if isinstance(q, Token) else q for q in parts]
        return p.OffloadLine(tuple(read), span_of(word).to(read[-1].span))

    def counted(self, name: Token, number: Token) -> p.RulePart:
        return p.RulePart("counted", str(name), (_number(number),), span_of(name).to(span_of(number)))

    def stages(self, word: Token, *numbers: Token) -> p.RulePart:
        values = tuple(_number(number) for number in numbers if number.type == "INT")
        return p.RulePart("stages", str(word), values, span_of(word).to(span_of(numbers[-1])))

    def adaptive(self, name: Token, factor: Token, close: Token) -> p.RulePart:
        return p.RulePart("adaptive", str(name), (float(_number(factor)),), span_of(name).to(span_of(close)))

    def further(self, name: Token) -> p.RulePart:
        return p.RulePart("further", str(name), (), span_of(name))

    def placed(self, name: Token) -> p.RulePart:
        return p.RulePart("placed", str(name), (), span_of(name))

    def slices(self, word: Token, where: p.RulePart | None, count: Token) -> p.SlicesLine:
        return p.SlicesLine(where, int(_number(count)), span_of(word).to(span_of(count)))

    def loss(self, word: Token, form: Token, *sizes: p.GivenValue) -> p.LossLine:
        return p.LossLine(_word(form), sizes, span_of(word).to(sizes[-1].span if sizes else span_of(form)))

    def fuse(self, word: Token, *names: Token) -> p.FuseLine:
        return p.FuseLine(_words(names), span_of(word).to(span_of(names[-1])))

    def parallel(self, word: Token, *parts: p.GivenValue | p.WordPair) -> p.ParallelLine:
        return p.ParallelLine(parts, span_of(word).to(parts[-1].span))

    def pair_of_words(self, first: Token, second: Token) -> p.WordPair:
        return p.WordPair(_word(first), _word(second), span_of(first).to(span_of(second)))

    def batch(self, word: Token, count: Token, by: Token, length: Token, *rest: p.GivenValue | None) -> p.BatchLine:
        microbatch = rest[-1] if rest else None
        end = microbatch.span if microbatch else span_of(length)
        numbers = int(_number(count)), int(_number(length))
        return p.BatchLine(*numbers, _word(by), microbatch, span_of(word).to(end))

    def attention(self, word: Token, size: Token, unit: tuple[str, Span] | None) -> p.AttentionLine:
        value = self.entry(word, size, unit)
        return p.AttentionLine(value, value.span)

    def cell(self, word: Token, first: Token, second: Token, *parts: p.CellLane | Token) -> p.CellLine:
        lanes = tuple(part for part in parts if isinstance(part, p.CellLane))
        value = next((_word(part) for part in parts if isinstance(part, Token) and part.type == "NAME"), None)
        end = value.span if value else span_of(second)
        return p.CellLine(_word(first), _word(second), value, lanes, span_of(word).to(end))

    def lane(self, name: Token, *steps: Token) -> p.CellLane:
        return p.CellLane(_word(name), _words(steps))


def _number(token: Token) -> int | float:
    """The number of a token. The token checks have reported longer numbers."""
    return float(token[-32:]) if token.type == "DECIMAL" else int(token[-20:])


def _word(token: Token) -> p.Word:
    return p.Word(str(token), span_of(token))


def _words(tokens: Sequence[Token | None]) -> tuple[p.Word, ...]:
    return tuple(_word(token) for token in tokens if token is not None)
