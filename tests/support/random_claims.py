"""Random claims about the times of a schedule: true linear pieces of them, some with one coefficient changed."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from itertools import count as count_from

import numpy as np

from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.ir.ops import OpKind
from schedc.ir.recomputed import has_recomputation
from schedc.ir.schedule import Schedule
from schedc.load.library import names, open_schedule
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.timeline import Timeline, simulate
from schedc.syntax import tree
from schedc.syntax.parser import parse
from support.claim_oracle import Grid, grid, symbols_of
from support.random_schedules import random_schedule, with_recomputation

Form = dict[str, Fraction]
"""A sum of costs: how often each of them, and under ``1`` a constant."""

_FILE = (
    "sched 1\nschedule random(P: ranks = 1, M: microbatches = 1) {\n  place linear\n  rank r { F B }\n  expect %s\n}\n"
)


def parsed(text: str) -> tree.Claim:
    """``claim [when condition]`` as `schedc` reads it."""
    (schedule,) = parse(Source("random.sched", _FILE % text)).schedules
    (claim,) = schedule.claims
    return claim


def programs(seed: int) -> Iterator[Schedule]:
    """Endless random programs: library schedules at small sizes and any legal orders, some with Rs."""
    draw = random.Random(seed)
    while True:
        number, kind = draw.randrange(1 << 30), draw.random()
        if kind < 0.35:
            yield _of_library(draw)
        elif kind < 0.5:
            wanted = draw.choice(("F & I", "two chains to a start"))
            yield next(s for s in map(random_schedule, count_from(number)) if wanted in features(s))
        elif kind < 0.8:
            yield random_schedule(number)
        else:
            yield with_recomputation(random_schedule(number), number)


def features(schedule: Schedule) -> Iterator[str]:
    """What of a schedule makes claims about it harder to decide."""
    dependencies = Dependencies.of(schedule)
    if (dependencies.pairs & (schedule.kind[dependencies.second] == OpKind.I)).any():
        yield "F & I"
    if has_recomputation(schedule):
        yield "R"
    if (np.diff(schedule.rank_start) == 0).any():
        yield "a rank without ops"
    before = [
        {int(p) for p in (dependencies.previous[c], *dependencies.producers[:, c]) if p >= 0}
        for c in range(len(dependencies))
    ]
    if any(_branches(int(cell), before) for cell in dependencies.rank_start[:-1] if cell < len(dependencies)):
        yield "two chains to a start"


def _branches(cell: int, before: list[set[int]]) -> bool:
    """Whether several chains lead to a cell."""
    while before[cell]:
        if len(before[cell]) > 1:
            return True
        (cell,) = before[cell]
    return False


def _of_library(draw: random.Random) -> Schedule:
    while True:
        sizes = {"P": draw.randint(1, 4), "M": draw.randint(1, 8)}
        try:
            return elaborate(_tree(draw.choice(names())), sizes)
        except DiagnosticError:  # no legal sizes
            continue


@cache
def _tree(name: str) -> tree.ScheduleTree:
    return open_schedule(name)


# Linear pieces, from the critical path of a simulation.


@dataclass(eq=False)
class Pieces:
    """A schedule under one vector of costs, and the linear pieces that its times have there."""

    timeline: Timeline
    costs: dict[str, int]

    @classmethod
    def at(cls, dependencies: Dependencies, costs: dict[str, int]) -> Pieces:
        whole = {"I": 1, "W": 1} | costs
        whole.setdefault("B", whole["I"] + whole["W"])
        as_floats = {s: float(c) for s, c in whole.items()}
        return cls(simulate(dependencies.schedule, Costs(**as_floats), dependencies), whole)  # type: ignore[arg-type]

    @property
    def dependencies(self) -> Dependencies:
        return self.timeline.dependencies

    def of(self, metric: str, rank: int | None) -> Form:
        """The piece of a time, of all ranks or of one."""
        if metric == "makespan":
            return self._path(int(np.argmax(self.timeline.end)))
        values = getattr(self.timeline, metric)
        rank = int(np.argmax(values)) if rank is None else rank
        cells = range(*self.dependencies.rank_start[rank : rank + 2].tolist())
        work = total(self._duration(cell) for cell in cells)
        if metric == "bubble":
            return less(self.of("makespan", None), work)
        if not cells:
            return {}
        return less(less(self._path(cells[-1]), self._path(cells[0], own=False)), work)

    def _path(self, cell: int, *, own: bool = True) -> Form:
        """The longest chain that ends with a cell, or just before it."""
        parts = []
        while cell >= 0:
            if own:
                parts.append(self._duration(cell))
            own = True
            before = int(self.timeline.bound_by[cell])
            if "p2p" in self.costs and before >= 0 and self.dependencies.rank[before] != self.dependencies.rank[cell]:
                parts.append({"p2p": Fraction(1)})
            cell = before
        return total(parts)

    def _duration(self, cell: int) -> Form:
        kind, second = self.dependencies.schedule.kind, int(self.dependencies.second[cell])
        if second < 0:
            return {OpKind(kind[self.dependencies.first[cell]]).name: Fraction(1)}
        if kind[second] == OpKind.B:
            return {"FB": Fraction(1)}
        if kind[second] == OpKind.W:
            return {OpKind(kind[self.dependencies.first[cell]]).name: Fraction(1), "W": Fraction(1)}
        terms: list[Form] = [{"FB": Fraction(1), "W": Fraction(-1)}, {"F": Fraction(1)}, {"I": Fraction(1)}]
        return max(terms, key=lambda form: sum(c * self.costs[s] for s, c in form.items()))


def total(forms: Iterator[Form] | list[Form]) -> Form:
    result: Form = {}
    for form in forms:
        for symbol, count in form.items():
            result[symbol] = result.get(symbol, Fraction(0)) + count
    return {s: c for s, c in result.items() if c}


def less(first: Form, second: Form, factor: Fraction | int = 1) -> Form:
    return total([first, {s: -factor * c for s, c in second.items()}])


def written(form: Form) -> str:
    """The form as text: ``3*F - 0.5*W``."""
    text = ""
    for symbol, count in form.items():
        factor = _number(abs(count))
        term = factor if symbol == "1" else symbol if factor == "1" else f"{factor}*{symbol}"
        text += (f" {'-' if count < 0 else '+'} " if text else "-" if count < 0 else "") + term
    return text or "0"


def _number(value: Fraction) -> str:
    """As a decimal where it is one, else as a fraction in parentheses."""
    if value.denominator == 1:
        return str(value.numerator)
    decimal = f"{float(value):.4f}".rstrip("0")
    return decimal if Fraction(decimal) == value else f"({value.numerator}/{value.denominator})"


# Claims.


@dataclass(eq=False)
class Maker:
    """Makes claims about one schedule.

    symbols: costs for the claims to name. pieces: its times at some vectors.
    """

    draw: random.Random
    dependencies: Dependencies
    symbols: tuple[str, ...]
    pieces: list[Pieces]

    @classmethod
    def of(cls, schedule: Schedule, draw: random.Random) -> Maker:
        dependencies = Dependencies.of(schedule)
        extra = set(draw.sample(("p2p", "B", "W", "FB"), draw.choice((0, 0, 1, 1, 2))))
        symbols = symbols_of(dependencies, extra)
        some = draw.sample(vectors := grid(symbols), min(10, len(vectors)))
        return cls(draw, dependencies, symbols, [Pieces.at(dependencies, vector) for vector in some])

    def claim(self) -> str:
        text = self._statement(self.draw.choice((1, 1, 1, 2)))
        if self.draw.random() < 0.6:
            text += f" when {self._condition()}"
        return text

    def _statement(self, depth: int) -> str:
        if depth <= 1:
            return self._atom()
        first, second = self._statement(depth - 1), self._statement(depth - 1)
        return self.draw.choice((
            f"({first}) and ({second})",
            f"({first}) or ({second})",
            f"not ({first})",
            f"({first}) or not ({second})",
            f"(({first}) if {self._cost_comparison()} else ({second}))",
            f"({first}) == ({second})",
        ))  # fmt: skip

    def _atom(self) -> str:
        shapes: Sequence[tuple[Callable[[], str], int]] = (
            (self._against_piece, 6),
            (self._against_several, 3),
            (self._difference, 3),
            (self._per_rank, 3),
            (self._ratio, 2),
            (self._constant, 2),
            (self._cases, 2),
            (self._cost_comparison, 1),
        )
        return self.draw.choices([shape for shape, _ in shapes], [weight for _, weight in shapes])[0]()

    def _op(self) -> str:
        return self.draw.choice(("==", "==", "<=", ">=", "<=", ">=", "<", ">", "!="))

    def _time(self) -> tuple[str, int | None]:
        """A metric, and the rank if it is of one."""
        metric = self.draw.choice(("makespan", "bubble", "bubble", "span_bubble", "span_bubble"))
        of_rank = metric != "makespan" and self.draw.random() < 0.4
        return metric, self.draw.randrange(self.dependencies.schedule.ranks) if of_rank else None

    def _piece(self, metric: str, rank: int | None) -> Form:
        return self.draw.choice(self.pieces).of(metric, rank)

    def _changed(self, form: Form) -> Form:
        """The form, with one coefficient changed in half of the cases."""
        if self.draw.random() < 0.5:
            return form
        by = self.draw.choice(("1", "-1", "1", "-1", "0.5", "-0.5", "0.001", "-0.25", "2"))
        return total([form, {self.draw.choice((*self.symbols, "1")): Fraction(by)}])

    def _against_piece(self) -> str:
        time = self._time()
        return f"{named(*time)} {self._op()} {written(self._changed(self._piece(*time)))}"

    def _against_several(self) -> str:
        """A time and the largest (or the least) of some of its pieces."""
        time = self._time()
        every = list(dict.fromkeys(written(pieces.of(*time)) for pieces in self.pieces))[:8]
        chosen = self.draw.sample(every, self.draw.choice((min(2, len(every)), len(every))))
        changed = [written(self._changed(self._piece(*time)))] * (self.draw.random() < 0.4)
        parts = [*chosen, *changed][:8]
        function = self.draw.choice(("max", "max", "max", "min"))
        right = f"{function}({', '.join(parts)})" if len(parts) > 1 else parts[0]
        return f"{named(*time)} {self._op()} {right}"

    def _difference(self) -> str:
        """Two times, one of them subtracted, against the same of their pieces, or against nothing."""
        first, second = self._time(), self._time()
        factor = self.draw.choice((Fraction(1), Fraction(1), Fraction(1, 2), Fraction(3)))
        times = "" if factor == 1 else f"{_number(factor)}*"
        if self.draw.random() < 0.3:
            return f"{named(*first)} {self._op()} {times}{named(*second)}"
        pieces = self.draw.choice(self.pieces)
        right = written(self._changed(less(pieces.of(*first), pieces.of(*second), factor)))
        return f"{named(*first)} - {times}{named(*second)} {self._op()} {right}"

    def _per_rank(self) -> str:
        metric = self.draw.choice(("bubble", "span_bubble"))
        if self.draw.random() < 0.3:
            return f"span_bubble[r] {self.draw.choice(('<=', '<', '<=', '=='))} {self.draw.choice(('', '2*'))}bubble[r]"
        if self.draw.random() < 0.2:
            return (
                f"{metric}[r] {self._op()} {metric}[{self.draw.choice(('min(r+1, P-1)', 'P-1-r', 'r-1 if r else 0'))}]"
            )
        if self.draw.random() < 0.2:
            return f"{metric}[r] <= ops[r]*{self.draw.choice(self.symbols)} + peak_activations*F"
        pieces, ranks = self.draw.choice(self.pieces), self.dependencies.schedule.ranks
        forms = [written(pieces.of(metric, rank)) for rank in range(ranks)]
        changed = self.draw.randrange(ranks)
        forms[changed] = written(self._changed(pieces.of(metric, changed)))
        right = "".join(f"({form}) if r == {rank} else " for rank, form in enumerate(forms[:-1])) + f"({forms[-1]})"
        return f"{metric}[r] {self._op()} ({right})"

    def _ratio(self) -> str:
        pieces = self.draw.choice(self.pieces)
        name = self.draw.choice(("bubble_ratio", "bubble_ratio", "span_bubble_ratio"))
        exact = Grid(self.dependencies, [{s: pieces.costs[s] for s in self.symbols}]).metric(name, None)[0]
        number = exact + self.draw.choice((0, 0, Fraction(1, 10), Fraction(-1, 100)))
        value = f"({number.numerator}/{number.denominator})"
        symbol, op = self.draw.choice(self.symbols), self._op()
        return self.draw.choice((
            f"{name} {op} {value}",
            f"{name} {op} {float(number):.3f}",
            f"1 - {name} {op} 1 - {value}",
            f"bubble / makespan {op} {value}",
            f"{symbol} / makespan {op} {value}",
            f"bubble_ratio * makespan {op} {written(self._piece('makespan', None))}",
            f"abs({name} - {value}) {op} 0.1",
            f"max({name}, 0.2) {op} {value}",
        ))  # fmt: skip

    def _constant(self) -> str:
        """A time and a number, alone or beside costs."""
        time = self._time()
        pieces = self.draw.choice(self.pieces)
        number = sum(count * pieces.costs[s] for s, count in pieces.of(*time).items())
        if self.draw.random() < 0.5:
            return f"{named(*time)} {self._op()} {written({'1': Fraction(number)})}"
        symbol = self.draw.choice(self.symbols)
        beside = {"1": number - pieces.costs[symbol] + Fraction(self.draw.choice((0, 0, 1))), symbol: Fraction(1)}
        return f"{named(*time)} {self._op()} {written(beside)}"

    def _cases(self) -> str:
        """Values under conditions: `if`, `abs` and truths as numbers."""
        time = self._time()
        first, second = (written(self._changed(self._piece(*time))) for _ in range(2))
        cost, name = self._cost_comparison(), named(*time)
        return self.draw.choice((
            f"{name} {self._op()} (({first}) if {cost} else ({second}))",
            f"abs({name} - ({first})) {self._op()} {self.draw.choice(self.symbols)}",
            f"abs({name} - ({first})) {self._op()} abs({name} - ({second}))",
            f"{name} {self._op()} ({first}) + ({cost})*({self.draw.choice(('1', '2', '-1'))})",
            f"min({name}, {first}) {self._op()} {second}",
            f"({name} + ({first})) / 2 {self._op()} {second}",
        ))  # fmt: skip

    # Conditions.

    def _condition(self) -> str:
        parts = [self._condition_part() for _ in range(self.draw.choice((1, 1, 2, 2, 3)))]
        if len(parts) > 1 and self.draw.random() < 0.25:
            return f"{parts[0]} or {' and '.join(parts[1:])}"
        return " and ".join(parts)

    def _condition_part(self) -> str:
        kind = self.draw.random()
        if kind < 0.55:
            return self._cost_comparison()
        if kind < 0.8:  # one piece of a time is at least another
            time = self._time()
            larger = less(self._piece(*time), self._piece(*time))
            return f"{written(larger)} {self.draw.choice(('>=', '>', '>=', '=='))} 0"
        if kind < 0.9:
            return f"not ({self._cost_comparison()} and {self._cost_comparison()})"
        return f"({self._against_piece()})"

    def _cost_comparison(self) -> str:
        a, b, c = (self.draw.choice(self.symbols) for _ in range(3))
        small, op = self.draw.randint(1, 3), self.draw.choice(("<=", ">=", "==", "<", ">", "<=", "==", "!="))
        return self.draw.choice((
            f"{a} {op} {b}",
            f"{a} {op} {b}",
            f"{a} {op} {small}*{b}",
            f"{a} + {b} {op} {small}*{c}",
            f"{a} - {b} {op} {c} + {b}",
            f"{a} {op} {small}",
            f"0.5*{a} {op} {b}",
            f"max({a}, {b}) {op} {small}*{c}",
        ))  # fmt: skip


def named(metric: str, rank: int | None) -> str:
    return metric if rank is None else f"{metric}[{rank}]"
