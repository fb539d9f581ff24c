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
        return p.GivenValue(str(name), _number(value), _through(name, value))

    amount = size

    def unit(self, unit: Token, *over: Token | None) -> tuple[str, Span]:
        sign, per = over or (None, None)
        return f"{unit}{sign}{per}" if per else str(unit), _through(unit, per)

    def entry(self, name: Token, value: Token, unit: tuple[str, Span] | None) -> p.GivenValue:
        text, end = unit or ("", span_of(value))
        return p.GivenValue(str(name), _number(value), span_of(name).to(end), text)

    speed = entry

    def layers(self, word: Token, count: Token, *rest: Any) -> p.LayersLine:
        *options, _, spot = rest
        at, at_span = spot or (None, span_of(count))
        end = at_span if spot else _through(count, *options)
        return p.LayersLine(int(count[-20:]), tuple(options), at, at_span, span_of(word).to(end))

    def spot(self, *tokens: Token) -> tuple[str | tuple[int, ...], Span]:
        at = str(tokens[0]) if tokens[0].type == "NAME" else tuple(int(n[-20:]) for n in tokens[:-1])
        return at, _through(*tokens)

    def layout(self, word: Token, text: Token, *options: p.GivenValue) -> p.LayoutLine:
        return p.LayoutLine(text[1:-1], options, span_of(text), _through(word, text, *options))

    def table(self, word: Token, *entries: p.GivenValue) -> p.TableLine:
        return p.TableLine(str(word), entries, _through(word, *entries))

    def memory(self, word: Token, limit: Token, unit: tuple[str, Span] | None) -> p.MemoryLine:
        text, end = unit or ("", span_of(limit))
        return p.MemoryLine(float(_number(limit)), span_of(word).to(end), text)

    def experts(self, word: Token, count: Token, *rest: Any) -> p.ExpertsLine:
        *options, name, value, _, way_out = rest
        said = _words((name, value, way_out))
        return p.ExpertsLine(int(_number(count)), tuple(options), said, _through(word, count, *options, *said))

    def topology(
        self, word: Token, nodes: Token, n: Token, by: Token, per: Token, *links: p.GivenValue
    ) -> p.TopologyLine:
        words = _word(nodes), _word(by)
        return p.TopologyLine(int(_number(n)), int(_number(per)), words, links, _through(word, per, *links))

    def tokens(self, word: Token, count: Token, *words: Token | None) -> p.TokensLine:
        return p.TokensLine(int(_number(count)), _words(words), _through(word, count, *words))

    def setting(self, word: Token, value: Token) -> p.SettingLine:
        return p.SettingLine(str(word), _word(value), _through(word, value))

    def factor(self, word: Token, factor: Token, *words: Token | None) -> p.FactorLine:
        return p.FactorLine(str(word), float(_number(factor)), _words(words), _through(word, factor, *words))

    def products(self, word: Token, value: Token, *otherwise: Token | None) -> p.ProductsLine:
        last = otherwise[-1]
        return p.ProductsLine(_word(value), None if last is None else _word(last), _through(word, value, last))

    def buffers(self, word: Token, way: Token, factor: Token | None = None) -> p.SizesLine:
        value = None if factor is None else float(_number(factor))
        return p.SizesLine(_word(way), value, _through(word, way, factor))

    def hot(self, word: Token, count: Token, *conditions: Token | None) -> p.HotLine:
        by, (*words, below) = _words(conditions[:2]), conditions[2:]
        value = _word(count) if count.type == "NAME" else int(_number(count))
        limit = None if below is None else float(_number(below))
        return p.HotLine(value, by, _words(words), limit, _through(word, count, *conditions))

    def balance(self, word: Token, *parts: p.RulePart | Token) -> p.BalanceLine:
        return p.BalanceLine(_rule(parts), _through(word, *parts))

    def migrate(
        self, word: Token, every: Token, count: Token, steps: Token, gain: Token | None = None, *rest: Token | None
    ) -> p.MigrateLine:
        sign, number, unit = rest if gain is not None else (None, None, None)
        words = _words((every, steps, gain, sign, unit))
        least = 0.0 if number is None else float(_number(number))
        return p.MigrateLine(int(_number(count)), least, words, _through(word, every, count, steps, gain, *rest))

    def limited(self, number: Token) -> p.RulePart:
        return p.RulePart("limited", "within", (float(_number(number)),), span_of(number))

    def copies(self, name: Token, number: Token) -> p.RulePart:
        return p.RulePart("limited", str(name), (float(_number(number)),), _through(name, number))

    def in_place(self, place: Token) -> p.RulePart:
        return p.RulePart("placed", str(place), (), span_of(place))

    def recompute(self, word: Token, *parts: p.RulePart | Token) -> p.RecomputeLine:
        return p.RecomputeLine(_rule(parts), _through(word, *parts))

    def host(self, word: Token, size: Token, unit: tuple[str, Span] | None, *speeds: p.GivenValue) -> p.HostLine:
        value = self.entry(word, size, unit)
        return p.HostLine(value, speeds, _through(value, *speeds))

    def sharing(self, word: Token, by: Token, ranks: Token) -> p.GivenValue:
        return p.GivenValue(str(word), _number(ranks), _through(word, ranks), str(by))

    def offload(self, word: Token, *parts: p.RulePart | Token) -> p.OffloadLine:
        return p.OffloadLine(_rule(parts), _through(word, *parts))

    def counted(self, name: Token, number: Token) -> p.RulePart:
        return p.RulePart("counted", str(name), (_number(number),), _through(name, number))

    def stages(self, word: Token, *numbers: Token) -> p.RulePart:
        values = tuple(_number(number) for number in numbers if number.type == "INT")
        return p.RulePart("stages", str(word), values, _through(word, *numbers))

    def adaptive(self, name: Token, factor: Token, close: Token) -> p.RulePart:
        return p.RulePart("adaptive", str(name), (float(_number(factor)),), _through(name, close))

    def further(self, name: Token) -> p.RulePart:
        return p.RulePart("further", str(name), (), span_of(name))

    def placed(self, name: Token) -> p.RulePart:
        return p.RulePart("placed", str(name), (), span_of(name))

    def slices(self, word: Token, where: p.RulePart | None, count: Token, kind: p.WordPair | None) -> p.SlicesLine:
        value = int(_number(count)) if count.type == "INT" else _word(count)
        return p.SlicesLine(where, value, kind, _through(word, count, kind))

    def loss(self, word: Token, form: Token, *sizes: p.GivenValue) -> p.LossLine:
        return p.LossLine(_word(form), sizes, _through(word, form, *sizes))

    def fuse(self, word: Token, *names: Token) -> p.FuseLine:
        return p.FuseLine(_words(names), _through(word, *names))

    def parallel(self, word: Token, *parts: p.GivenValue | p.WordPair) -> p.ParallelLine:
        return p.ParallelLine(parts, _through(word, *parts))

    def pair_of_words(self, first: Token, second: Token) -> p.WordPair:
        return p.WordPair(_word(first), _word(second), _through(first, second))

    def batch(self, word: Token, count: Token, by: Token, length: Token, *rest: p.GivenValue | None) -> p.BatchLine:
        microbatch = rest[-1] if rest else None
        numbers = int(_number(count)), int(_number(length))
        return p.BatchLine(*numbers, _word(by), microbatch, _through(word, length, microbatch))

    def attention(self, word: Token, size: Token, unit: tuple[str, Span] | None) -> p.AttentionLine:
        value = self.entry(word, size, unit)
        return p.AttentionLine(value, value.span)

    def cell(self, word: Token, first: Token, second: Token, *parts: p.CellLane | Token) -> p.CellLine:
        lanes = tuple(part for part in parts if isinstance(part, p.CellLane))
        value = next((_word(part) for part in parts if isinstance(part, Token) and part.type == "NAME"), None)
        return p.CellLine(_word(first), _word(second), value, lanes, _through(word, second, value))

    def lane(self, name: Token, *steps: Token) -> p.CellLane:
        return p.CellLane(_word(name), _words(steps))


def _number(token: Token) -> int | float:
    """The number of a token. The token checks have reported longer numbers."""
    return float(token[-32:]) if token.type == "DECIMAL" else int(token[-20:])


def _rule(parts: Sequence[p.RulePart | Token]) -> tuple[p.RulePart, ...]:
    return tuple(p.RulePart("word", str(q), (), span_of(q)) if isinstance(q, Token) else q for q in parts)


def _through(*parts: Any) -> Span:
    """The place from the first part to the last one that is written. parts: tokens, nodes, and None."""
    spans = [span_of(part) if isinstance(part, Token) else part.span for part in parts if part is not None]
    return spans[0].to(spans[-1])


def _word(token: Token) -> p.Word:
    return p.Word(str(token), span_of(token))


def _words(tokens: Sequence[Token | None]) -> tuple[p.Word, ...]:
    return tuple(_word(token) for token in tokens if token is not None)
