"""Infers phases: bodies that ranks repeat, and a formula for each count, from orders at several sizes.

Every order of a rank is cut into runs of a repeated body (`skeletons`). The bodies of the largest size make a skeleton,
by which all orders are parsed. Counts that one parse alone allows are fitted by sums; fits decide between the parses
that are left. Ranks are split into cases where one skeleton does not do, and these again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction

import numpy as np

from schedc.inference.families import PlacementForm, Term, sum_text
from schedc.inference.numbers import fit_numbers
from schedc.inference.skeletons import MOST_PARSES, RankOrder, Skeleton, Word, body_runs, parses_of, skeletons
from schedc.ir.arrays import Int64
from schedc.ir.op_tables import TURN
from schedc.ir.ops import LETTERS, OpKind
from schedc.ir.schedule import Schedule

_DEPTH = 3
"""Most conditions that a case has."""
_CHOICES = 3
"""Most conditions that are tried for a split. """
_GROUPS = 60
"""Most groups of ranks for which phases are tried."""


@dataclass(frozen=True)
class RankCase:
    """Some ranks: a condition of the language, and the same for a rank order."""

    condition: str
    holds: Callable[[RankOrder], bool]


_CASES = (
    RankCase("r == P-1", lambda order: order.rank == order.ranks - 1),
    RankCase("r == 0", lambda order: order.rank == 0),
    RankCase("r % 2 == 1", lambda order: order.rank % 2 == 1),
    RankCase("P % 2 == 1", lambda order: order.ranks % 2 == 1),
    RankCase("2*r >= P", lambda order: 2 * order.rank >= order.ranks),
    RankCase("r == P//2 - 1", lambda order: order.rank == order.ranks // 2 - 1),
    RankCase("r == P//2", lambda order: order.rank == order.ranks // 2),
)
"""Ways to tell ranks apart, the first preferred."""

_TERMS: dict[str, Callable[[RankOrder], int]] = {
    "": lambda order: 1,
    "P": lambda order: order.ranks,
    "r": lambda order: order.rank,
    "M": lambda order: order.microbatches,
    "(r == P-1)": lambda order: order.rank == order.ranks - 1,
    "(r == 0)": lambda order: order.rank == 0,
    "(r % 2)": lambda order: order.rank % 2,
    "(r // 2)": lambda order: order.rank // 2,
    "(P // 2)": lambda order: order.ranks // 2,
    "(P % 2)": lambda order: order.ranks % 2,
    "max(0, P-2-r)": lambda order: max(0, order.ranks - 2 - order.rank),
    "max(0, r-1)": lambda order: max(0, order.rank - 1),
}
"""By text: what counts are sums of."""
_PLAIN = ("", "P", "r", "M")
"""Sums of these alone come first."""

Block = str
"""Statements of the language."""


def phases_text(
    orders: Sequence[Schedule],
    family: PlacementForm,
    in_time: Callable[[], None] = lambda: None,
    held: Sequence[Schedule] = (),
) -> str | None:
    """The rank block that gives every order of a rank; None if none is found. Chunks are named by their numbers.

    held: orders that no formula is fitted to. They decide whether phases are kept.
    in_time: called before each skeleton and each fit of a count; it raises when there is no time left.
    """
    named = _named_weights([*orders, *held])
    if named is None or not all(_ascending(order) for order in (*orders, *held)):
        return None
    samples = [sample for order in orders for sample in _samples(order, family, named)]
    samples += [replace(sample, held=True) for order in held for sample in _samples(order, family, named)]
    block = _Cases(in_time).block(samples, _DEPTH)
    return None if block is None else f"rank r {{\n{block}\n}}"


# Orders as words.


def _named_weights(orders: Sequence[Schedule]) -> bool | None:
    """Whether a W is to name its chunk, as the oldest pending one of the rank is another. None: no chunk is enough."""
    by_rank = all(_weights_follow(order, order.rank.astype(np.int64)) for order in orders)
    return False if by_rank else True if all(_weights_follow(order, _chunk_key(order)) for order in orders) else None


def _weights_follow(order: Schedule, queue: Int64) -> bool:
    """Whether the W of each queue come in the sequence of its I. queue: [ops]."""
    rows = [np.flatnonzero(order.kind == kind) for kind in (OpKind.I, OpKind.W)]
    inputs, weights = (each[np.argsort(queue[each], kind="stable")] for each in rows)
    return all(
        np.array_equal(getattr(order, name)[inputs], getattr(order, name)[weights]) for name in ("stage", "microbatch")
    )


def _ascending(order: Schedule) -> bool:
    """Whether forwards and backwards of each chunk take its microbatches from the first to the last."""
    key = _chunk_key(order) * 4 + TURN[order.kind]
    rows = np.flatnonzero(order.kind != OpKind.W)
    rows = rows[np.argsort(key[rows], kind="stable")]
    same = key[rows[1:]] == key[rows[:-1]]
    return bool((order.microbatch[rows[1:]] > order.microbatch[rows[:-1]])[same].all())


def _chunk(order: Schedule) -> Int64:
    """[ops] the chunk of each op on its rank."""
    return order.placement.chunk_of[order.placement.pipe_of_microbatch(order.microbatch), order.stage].astype(np.int64)


def _chunk_key(order: Schedule) -> Int64:
    """[ops] a number of each chunk of each rank."""
    return order.rank * np.int64(order.placement.chunks) + _chunk(order)


def _samples(order: Schedule, family: PlacementForm, named: bool) -> Iterator[RankOrder]:
    """The orders of the ranks. named: whether a W names its chunk."""
    alone = {OpKind.W} - ({OpKind.W} if named else set())
    chunk, kinds, pairs = _chunk(order).tolist(), order.kind.tolist(), order.pair.tolist()
    for rank in range(order.ranks):
        cells: list[str] = []
        pair = -1
        for row in range(int(order.rank_start[rank]), int(order.rank_start[rank + 1])):
            kind = OpKind(kinds[row])
            text = LETTERS[kind] + (str(chunk[row]) if family.place != "linear" and kind not in alone else "")
            if pairs[row] >= 0 and pairs[row] == pair:
                cells[-1] += f" & {text}"
            else:
                cells.append(text)
            pair = pairs[row]
        yield RankOrder(order.ranks, order.placement.microbatches, rank, tuple(cells))


# Cases.


@dataclass
class _Cases:
    """Tells ranks apart until each group of them has phases. groups: those that were tried."""

    in_time: Callable[[], None]
    groups: dict[tuple[int, ...], Block | None] = field(default_factory=dict)

    def block(self, samples: Sequence[RankOrder], depth: int) -> Block | None:
        """The phases of some ranks, in as few cases as are enough."""
        for conditions in range(depth + 1):
            if (block := self._split(samples, conditions)) is not None:
                return block
        return None

    def _split(self, samples: Sequence[RankOrder], conditions: int) -> Block | None:
        if (block := self._alone(samples)) is not None or not conditions:
            return block
        for case in _telling(samples):
            own = self._split([sample for sample in samples if case.holds(sample)], conditions - 1)
            if own is None:
                continue
            rest = self._split([sample for sample in samples if not case.holds(sample)], conditions - 1)
            if rest is not None:
                return f"if {case.condition} {{\n{own}\n}} else {{\n{rest}\n}}"
        return None

    def _alone(self, samples: Sequence[RankOrder]) -> Block | None:
        """The phases of one group of ranks, without further cases."""
        group = tuple(map(id, samples))
        enough = any(not sample.held for sample in samples)
        if enough and group not in self.groups and len(self.groups) < _GROUPS:
            self.groups[group] = _phases(samples, self.in_time)
        return self.groups.get(group)


def _telling(samples: Sequence[RankOrder]) -> list[RankCase]:
    """The conditions that some of the ranks meet; first those that part the sequences of bodies best in two."""
    most: dict[tuple[int, int], RankOrder] = {}
    known = [sample for sample in samples if not sample.held]
    for sample in known:
        place = sample.ranks, sample.rank
        if place not in most or most[place].microbatches < sample.microbatches:
            most[place] = sample
    shapes = [(sample, body_runs(sample.cells)) for sample in most.values()]

    def left(case: RankCase) -> int:
        """The squares of the numbers of sequences on both sides."""
        sides = [{shape for sample, shape in shapes if case.holds(sample) is side} for side in (False, True)]
        return sum(len(side) ** 2 for side in sides)

    telling = [case for case in _CASES if len({case.holds(sample) for sample in known}) == 2]
    return sorted(sorted(telling, key=left)[:_CHOICES], key=_CASES.index)


# Counts.


def _phases(samples: Sequence[RankOrder], in_time: Callable[[], None]) -> Block | None:
    """The phases of some ranks, as text. They are fitted to the orders that are not held out, and give all."""
    known = [sample for sample in samples if not sample.held]
    for skeleton in skeletons(known):
        in_time()
        parsed = _parsed(known, skeleton)
        fits = None if parsed is None else _fits(known, parsed, len(skeleton), in_time)
        if fits is not None and all(_gives(skeleton, fits, sample) for sample in samples):
            lines = [_phase(body, fit) for body, fit in zip(skeleton, fits, strict=True) if fit]
            return "\n".join(lines)
    return None


def _parsed(samples: Sequence[RankOrder], skeleton: Skeleton) -> list[list[tuple[int, ...]]] | None:
    """The parses of each order; None if one has none."""
    parsed = []
    for sample in samples:
        parsed.append(parses_of(sample.cells, skeleton))
        if not parsed[-1]:
            return None
    return parsed


def _gives(skeleton: Skeleton, fits: Sequence[Sequence[Term]], sample: RankOrder) -> bool:
    """Whether the phases are the order of a rank."""
    at = 0
    for body, fit in zip(skeleton, fits, strict=True):
        count = _value(fit, sample)
        if count != round(count) or count < 0:
            return False
        for _ in range(round(count)):
            if sample.cells[at : at + len(body)] != body:
                return False
            at += len(body)
    return at == len(sample.cells)


def _phase(body: Word, count: Sequence[Term]) -> str:
    kinds = set("".join(body)) & set(LETTERS)
    name = "warmup" if kinds == {"F"} else "steady" if "F" in kinds else "cooldown"
    text = sum_text(sorted(count, key=lambda term: term[0] < 0))
    return f"phase {name} {'' if text == '1' else f'repeat {text} '}{{ {'  '.join(body)} }}"


def _fits(
    samples: Sequence[RankOrder],
    parsed: Sequence[Sequence[tuple[int, ...]]],
    phases: int,
    in_time: Callable[[], None],
) -> list[list[Term]] | None:
    """[phases] the count of each phase, which some parse of every order has. None if a count has no formula."""
    left, fits = [list(each) for each in parsed], dict[int, list[Term]]()
    while len(fits) < phases:
        known = [i for i, each in enumerate(left) if len(each) == 1]
        news = 0
        for phase in (phase for phase in range(phases) if phase not in fits):
            in_time()
            sure = [i for i, each in enumerate(left) if len(each) <= MOST_PARSES and len({p[phase] for p in each}) == 1]
            fit = _fit([samples[i] for i in sure], [left[i][0][phase] for i in sure])
            if fit is None:
                continue
            narrowed = [
                [p for p in each if p[phase] == _value(fit, sample)] if len(each) <= MOST_PARSES else each
                for sample, each in zip(samples, left, strict=True)
            ]
            if not all(narrowed):
                continue
            left, fits[phase], news = narrowed, fit, news + 1
        if not news or (not known and not fits):
            return None
    return [fits[phase] for phase in range(phases)]


def _fit(samples: Sequence[RankOrder], counts: Sequence[int]) -> list[Term] | None:
    if not samples:
        return None
    columns = {name: [term(sample) for sample in samples] for name, term in _TERMS.items()}
    plain = fit_numbers(counts, {name: columns[name] for name in _PLAIN}, len(_PLAIN))
    return fit_numbers(counts, columns, 4) if plain is None else plain


def _value(fit: Sequence[Term], sample: RankOrder) -> Fraction:
    return sum((Fraction(factor) * _TERMS[name](sample) for factor, name in fit), Fraction(0))
