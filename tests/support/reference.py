"""The reference: when the cells of one step run under costs, in fractions, one after the other; nothing of `schedc`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction

Op = tuple[str, int, int]  # letter, stage, microbatch.
Cell = tuple[Op, ...]  # one op, or the two ops of an overlapped pair, the forward first.
Given = Mapping[str, Fraction | Sequence[Fraction]]  # costs by key, one or one per stage; a default where none.
Times = list[list[tuple[Fraction, Fraction]]]  # [ranks][cells] start and end


def cost(given: Given, key: str, stage: int = 0) -> Fraction:
    """The value of a key on a stage. ``launch`` is a key that tests plant: every op takes so much more."""
    if key not in given:
        sums = {"B": "IW", "R": "F"}.get(key, "")
        return sum((cost(given, part, stage) for part in sums), Fraction(key in ("F", "I", "W")))
    value = given[key]
    return value if isinstance(value, Fraction) else value[stage]


def duration(cell: Cell, given: Given) -> Fraction:
    """The time of a cell."""
    times = [cost(given, kind, stage) for kind, stage, _ in cell]
    launches = sum((cost(given, "launch", stage) for _, stage, _ in cell), Fraction(0))
    if len(cell) == 1 or cell[1][0] == "W" or "FB" not in given:
        return sum(times, launches)
    whole, weight = cost(given, "FB", cell[0][1]), cost(given, "W", cell[1][1])
    return launches + (whole if cell[1][0] == "B" else max(whole - weight, *times))


def step(orders: Sequence[Sequence[Cell]], given: Given) -> Times:
    """When the cells of every rank run. Raises `ValueError` where ranks wait for each other for ever."""
    last = max(stage for cells in orders for cell in cells for _, stage, _ in cell)
    done: dict[Op, tuple[Fraction, int]] = {}
    times: Times = [[] for _ in orders]
    while any(len(own) < len(cells) for own, cells in zip(times, orders, strict=True)):
        before = len(done)
        for rank, (own, cells) in enumerate(zip(times, orders, strict=True)):
            for cell in cells[len(own) :]:
                if not all(need in done for op in cell for need in _needs(op, last)):
                    break
                there = [done[need] for op in cell for need in _needs(op, last)]
                arrivals = [end + (cost(given, "p2p") if home != rank else 0) for end, home in there]
                start = max([own[-1][1] if own else Fraction(0), *arrivals])
                own.append((start, start + duration(cell, given)))
                done |= {("G" if kind in "BI" else kind, *where): (own[-1][1], rank) for kind, *where in cell}
        if len(done) == before:
            raise ValueError("a deadlock")
    return times


def _needs(op: Op, last: int) -> Iterator[Op]:
    """The outputs that an op needs: F of a forward, G of a backward of any form."""
    kind, stage, microbatch = op
    if kind == "F" and stage > 0:
        yield "F", stage - 1, microbatch
    if kind in "BI":
        yield ("G", stage + 1, microbatch) if stage < last else ("F", stage, microbatch)
