"""Infers phases: bodies that ranks repeat, and a formula for each count, from orders at several sizes.

Every order of a rank is cut into runs of a repeated body. The bodies of the largest size make a skeleton, by which all
orders are parsed. Counts that one parse alone allows are fitted by sums; fits decide between the parses that are left.
Ranks are split into cases where one skeleton does not do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice, pairwise

from schedc.inference.families import PlacementForm, Term, sum_text
from schedc.inference.numbers import fit_numbers
from schedc.ir.ops import LETTERS, OpKind
from schedc.ir.schedule import Schedule

Word = tuple[str, ...]
"""Cells as the language writes them."""
Skeleton = tuple[Word, ...]

_LONGEST = 8
"""Most cells of a body."""
_PARSES = 48
"""Most parses of an order that are compared. An order with more says nothing."""
_SKELETONS = 8
"""Most skeletons that are tried for the ranks of a case."""


@dataclass(frozen=True)
class RankOrder:
    """What one rank runs at one size: its cells in order."""

    ranks: int
    microbatches: int
    rank: int
    cells: Word


@dataclass(frozen=True)
class RankCase:
    """Some ranks: a condition of the language, empty for all that are left, and the same for a rank order."""

    condition: str
    holds: Callable[[RankOrder], bool]


_LAST = RankCase("r == P-1", lambda order: order.rank == order.ranks - 1)
_FIRST = RankCase("r == 0", lambda order: order.rank == 0)
_ODD = RankCase("r % 2 == 1", lambda order: order.rank % 2 == 1)
_REST = RankCase("", lambda order: True)
_SPLITS = (
    (_REST,), (_LAST, _REST), (_FIRST, _REST), (_FIRST, _LAST, _REST), (_ODD, _REST), (_LAST, _ODD, _REST),
    (_FIRST, _LAST, _ODD, _REST),
)  # fmt: skip
"""Ways to tell ranks apart, in the order in which they are tried."""

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


def phases_text(
    orders: Sequence[Schedule], family: PlacementForm, in_time: Callable[[], None] = lambda: None
) -> str | None:
    """The rank block that gives every order of a rank; None if none is found. Chunks are named by their numbers.

    in_time: called before each skeleton and each fit of a count; it raises when there is no time left.
    """
    samples = [sample for order in orders for sample in _samples(order, family)]
    for split in _SPLITS:
        blocks, left = [], samples
        for case in split:
            own = [sample for sample in left if case.holds(sample)]
            left = [sample for sample in left if not case.holds(sample)]
            if own:
                blocks.append((case.condition, _phases(own, in_time)))
        if all(block is not None for _, block in blocks):
            return _in_cases([(condition, block) for condition, block in blocks if block is not None])
    return None


def _in_cases(blocks: Sequence[tuple[str, str]]) -> str:
    if len(blocks) == 1:
        return f"rank r {{\n{blocks[0][1]}\n}}"
    parts = [f"if {condition} {{\n{block}\n}}" if condition else f"{{\n{block}\n}}" for condition, block in blocks]
    return "rank r {\n" + " else ".join(parts) + "\n}"


def _samples(order: Schedule, family: PlacementForm) -> Iterator[RankOrder]:
    chunk = order.placement.chunk_of[0]
    for rank in range(order.ranks):
        cells: list[str] = []
        pair = -1
        for row in range(int(order.rank_start[rank]), int(order.rank_start[rank + 1])):
            kind = OpKind(int(order.kind[row]))
            named = family.place != "linear" and kind is not OpKind.W
            text = LETTERS[kind] + (str(int(chunk[order.stage[row]])) if named else "")
            if order.pair[row] >= 0 and order.pair[row] == pair:
                cells[-1] += f" & {text}"
            else:
                cells.append(text)
            pair = int(order.pair[row])
        yield RankOrder(order.ranks, order.placement.microbatches, rank, tuple(cells))


# Skeletons.


def _runs(cells: Word) -> list[Word]:
    """The bodies of the runs of an order: at each place the body whose repeats cover most, the shortest of these."""
    bodies: list[Word] = []
    at = 0
    while at < len(cells):
        covered = {length: length * _repeats(cells, at, cells[at : at + length]) for length in range(1, _LONGEST + 1)}
        repeated = [length for length in covered if covered[length] > length]
        best = max(repeated, key=lambda length: (covered[length], -length), default=1)
        bodies.append(cells[at : at + best])
        at += max(covered[best], 1)
    return bodies


def _repeats(cells: Word, at: int, body: Word) -> int:
    count = 0
    while body and cells[at : at + len(body)] == body:
        count, at = count + 1, at + len(body)
    return count


def _skeletons(samples: Sequence[RankOrder]) -> Iterator[Skeleton]:
    """Bodies of the ranks of the largest sizes, one rank after the other, and then of several ranks together."""
    largest = sorted(samples, key=lambda sample: (sample.ranks, sample.microbatches))[-max(4, samples[-1].ranks) :]
    own = list(dict.fromkeys(tuple(_runs(sample.cells)) for sample in largest))
    middle = sorted(own, key=lambda skeleton: (len(skeleton), own.index(skeleton)))
    merged = middle[0]
    yield from middle[: _SKELETONS // 2]
    for other in middle[1:]:
        merged = _merged(merged, other)
    yield merged
    for one, other in pairwise(own):
        yield _merged(one, other)


def _merged(one: Skeleton, other: Skeleton) -> Skeleton:
    """The shortest skeleton that has the bodies of both in their order."""

    @cache
    def shortest(i: int, j: int) -> Skeleton:
        if i == len(one) or j == len(other):
            return one[i:] + other[j:]
        if one[i] == other[j]:
            return (one[i], *shortest(i + 1, j + 1))
        first, second = (one[i], *shortest(i + 1, j)), (other[j], *shortest(i, j + 1))
        return min(first, second, key=len)

    return shortest(0, 0)


# Counts.


def _phases(samples: Sequence[RankOrder], in_time: Callable[[], None]) -> str | None:
    """The phases of some ranks, as text."""
    for skeleton in islice(dict.fromkeys(_skeletons(samples)), _SKELETONS):
        in_time()
        parses = [_parses(sample.cells, skeleton) for sample in samples]
        if all(parses) and (fits := _fits(samples, parses, len(skeleton), in_time)) is not None:
            lines = [_phase(body, fit) for body, fit in zip(skeleton, fits, strict=True) if fit]
            return "\n".join(lines)
    return None


def _phase(body: Word, count: Sequence[Term]) -> str:
    kinds = set("".join(body)) & set(LETTERS)
    name = "warmup" if kinds == {"F"} else "steady" if "F" in kinds else "cooldown"
    text = sum_text(count)
    return f"phase {name} {'' if text == '1' else f'repeat {text} '}{{ {'  '.join(body)} }}"


def _parses(cells: Word, skeleton: Skeleton) -> list[tuple[int, ...]]:
    """The counts of the bodies under which an order is their sequence; at most `_PARSES` + 1 of them."""
    dead: set[tuple[int, int]] = set()
    found: list[tuple[int, ...]] = []

    def parse(phase: int, at: int, counts: tuple[int, ...]) -> bool:
        if phase == len(skeleton):
            if at == len(cells):
                found.append(counts)
            return at == len(cells)
        if (phase, at) in dead or len(found) > _PARSES:
            return False
        body, any_found = skeleton[phase], False
        for count in range(_repeats(cells, at, body), -1, -1):
            any_found |= parse(phase + 1, at + count * len(body), (*counts, count))
        if not any_found and len(found) <= _PARSES:
            dead.add((phase, at))
        return any_found

    parse(0, 0, ())
    return found


def _fits(
    samples: Sequence[RankOrder],
    parses: Sequence[Sequence[tuple[int, ...]]],
    phases: int,
    in_time: Callable[[], None],
) -> list[list[Term]] | None:
    """[phases] the count of each phase, which some parse of every order has. None if a count has no formula."""
    left, fits = [list(each) for each in parses], dict[int, list[Term]]()
    while len(fits) < phases:
        known = [i for i, each in enumerate(left) if len(each) == 1]
        news = 0
        for phase in (phase for phase in range(phases) if phase not in fits):
            in_time()
            sure = [i for i, each in enumerate(left) if len(each) <= _PARSES and len({p[phase] for p in each}) == 1]
            fit = _fit([samples[i] for i in sure], [left[i][0][phase] for i in sure])
            if fit is None:
                continue
            narrowed = [[p for p in each if p[phase] == round(_value(fit, sample))] if len(each) <= _PARSES else each
                        for sample, each in zip(samples, left, strict=True)]  # fmt: skip
            if not all(narrowed):
                continue
            left, fits[phase], news = narrowed, fit, news + 1
        if not news or (not known and not fits):
            return None
    return [fits[phase] for phase in range(phases)]


def _fit(samples: Sequence[RankOrder], counts: Sequence[int]) -> list[Term] | None:
    if not samples:
        return None
    return fit_numbers(counts, {name: [term(sample) for sample in samples] for name, term in _TERMS.items()}, 4)


def _value(fit: Sequence[Term], sample: RankOrder) -> float:
    return float(sum(factor * _TERMS[name](sample) for factor, name in fit))
