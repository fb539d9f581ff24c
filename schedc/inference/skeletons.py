"""Cuts rank orders into runs of repeated bodies, and parses orders by the sequence of bodies of others."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

Word = tuple[str, ...]
"""Cells as the language writes them."""
Skeleton = tuple[Word, ...]
"""The bodies of the phases of an order, without their counts."""

_LONGEST = 8
"""Most cells of a body."""
MOST_PARSES = 48
"""Most parses of an order that are compared. An order with more says nothing."""
_OWN = 6
"""Most ranks whose own bodies are taken as a skeleton."""
_MOST_BODIES = 20
"""Most bodies of a skeleton. Cases split ranks that need more."""


@dataclass(frozen=True)
class RankOrder:
    """What one rank runs at one size: its cells in order. held: whether no formula is fitted to it."""

    ranks: int
    microbatches: int
    rank: int
    cells: Word
    held: bool = False


def body_runs(cells: Word, known: AbstractSet[Word] = frozenset()) -> Skeleton:
    """The bodies of the runs of an order: at each place the body whose repeats cover most, the shortest of these.

    known: bodies that count as a run of their own even without a repeat.
    """
    bodies: list[Word] = []
    at = 0
    while at < len(cells):
        covered = {length: length * _repeats(cells, at, cells[at : at + length]) for length in range(1, _LONGEST + 1)}
        taken = [each for each in covered if covered[each] > each or cells[at : at + each] in known]
        best = max(taken, key=lambda length: (covered[length], -length), default=1)
        bodies.append(cells[at : at + best])
        at += max(covered[best], 1)
    return tuple(bodies)


def _cut(samples: Sequence[RankOrder], *, from_end: bool) -> Iterator[list[Skeleton]]:
    """The bodies of orders, each run as long as can be from its start or its end.

    In the first of two cuts, a body of several cells repeats. In the second, a body of the first may stand once.
    """
    step = -1 if from_end else 1
    orders = [sample.cells[::step] for sample in samples]
    first = [body_runs(cells) for cells in orders]
    known = frozenset(body for skeleton in first for body in skeleton if len(body) > 1)
    for cut in (first, [body_runs(cells, known) for cells in orders]):
        yield [tuple(body[::step] for body in skeleton[::step]) for skeleton in cut]


def _repeats(cells: Word, at: int, body: Word) -> int:
    """How often a body stands in an order from a place on."""
    count = 0
    while body and cells[at : at + len(body)] == body:
        count, at = count + 1, at + len(body)
    return count


def skeletons(samples: Sequence[RankOrder]) -> list[Skeleton]:
    """What the orders are parsed by, each once."""
    return [each for each in dict.fromkeys(_skeletons(samples)) if len(each) <= _MOST_BODIES]


def _skeletons(samples: Sequence[RankOrder]) -> Iterator[Skeleton]:
    """Bodies of the ranks of the largest sizes, one rank after the other, and then of several ranks together."""
    largest = sorted(samples, key=lambda sample: (sample.ranks, sample.microbatches))[-max(4, samples[-1].ranks) :]
    for cut in (each for from_end in (False, True) for each in _cut(largest, from_end=from_end)):
        own = list(dict.fromkeys(cut))
        middle = sorted(own, key=lambda skeleton: (len(skeleton), own.index(skeleton)))
        yield from middle[:_OWN]
        merged = middle[0]
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


def parses_of(cells: Word, skeleton: Skeleton) -> list[tuple[int, ...]]:
    """The counts of the bodies under which an order is their sequence; at most `MOST_PARSES` + 1 of them."""
    dead: set[tuple[int, int]] = set()
    found: list[tuple[int, ...]] = []

    def parse(phase: int, at: int, counts: tuple[int, ...]) -> bool:
        if phase == len(skeleton):
            if at == len(cells):
                found.append(counts)
            return at == len(cells)
        if (phase, at) in dead or len(found) > MOST_PARSES:
            return False
        body, any_found = skeleton[phase], False
        for count in range(_repeats(cells, at, body), -1, -1):
            any_found |= parse(phase + 1, at + count * len(body), (*counts, count))
        if not any_found and len(found) <= MOST_PARSES:
            dead.add((phase, at))
        return any_found

    parse(0, 0, ())
    return found
