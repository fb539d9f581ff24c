"""Follows the waits of ranks to their root: from each rank to a rank that it needs, until a rank waits for nobody."""

from __future__ import annotations

from enum import StrEnum
from typing import NamedTuple

from schedc_runtime.blame.waits import Need, Ranks


class Root(StrEnum):
    """What is at the end of a chain of waits."""

    RANK = "rank"
    """A rank that waits for nobody."""
    LINK = "link"
    """Both ends of a message, or all members of a collective, have posted it, and it does not arrive."""
    CIRCLE = "circle"
    """Ranks that wait for each other."""
    STORE = "store"
    """All ranks came to a round, and its answer does not come."""


class WaitChain(NamedTuple):
    """From a rank that waits to the root. processes: in order of the waits; of a circle only its members.

    need: of a LINK what the last process waits for; else None.
    """

    root: Root
    processes: list[int]
    need: Need | None = None


def next_of(ranks: Ranks, process: int) -> int | None:
    """The rank that ``process`` waits for and that has not done its part; None if there is none.

    A rank that cannot go on by itself comes first, then one that waits for nobody.
    """
    late = [need.process for need in ranks.needs(process) if not ranks.is_met(process, need)]
    if not late:
        return None
    stuck = (each for each in late if ranks.standings[each].is_stuck)
    idle = (each for each in late if not ranks.needs(each))
    return next(stuck, next(idle, late[0]))


def chain_from(ranks: Ranks, process: int) -> WaitChain:
    """The chain of waits that begins at ``process``."""
    processes = [process]
    while True:
        here = processes[-1]
        if ranks.standings[here].is_stuck:
            return WaitChain(Root.RANK, processes)
        following = next_of(ranks, here)
        if following in processes:
            return WaitChain(Root.CIRCLE, processes[processes.index(following) :])
        if following is not None:
            processes.append(following)
            continue
        needs = ranks.needs(here)
        if not needs:
            return WaitChain(Root.RANK, processes)
        return WaitChain(Root.STORE if needs[0].row < 0 else Root.LINK, processes, needs[0])
