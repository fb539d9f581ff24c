"""Tied weights: parameters that several stages use, and which ranks sum their gradients at the end of a step.

    stage     0      1      2      3          a tie of the stages 0 and 3
    rank      0      1      2      3          ranks 0 and 3 hold a copy each
                                              REDUCE 0 tied to 3 with 3  |  REDUCE 3 tied to 0 with 0

A rank has one copy for all of its stages of the tie. Every two copies exchange their gradients once, and every rank
adds them in the order of the copies. All copies then have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import combinations
from typing import NamedTuple

from schedc.ir.placement import Placement


@dataclass(frozen=True)
class Tie:
    """Stages that use the same parameters. stages: two or more, ascending. bytes: of the gradients in one copy."""

    stages: tuple[int, ...]
    bytes: int = 0


class TiedCopy(NamedTuple):
    """The copy of a rank. stages: those of the tie that the rank holds, ascending."""

    rank: int
    stages: tuple[int, ...]

    @property
    def stage(self) -> int:
        """The stage that names the copy: its first."""
        return self.stages[0]


class TiedExchange(NamedTuple):
    """One end of an exchange between two copies. stage, peer_stage: the stages that name both copies."""

    rank: int
    stage: int
    peer: int
    peer_stage: int


def lies_apart(tie: Tie, placement: Placement) -> bool:
    """Whether a tie has stages on different ranks. Stages that share all of their ranks share the parameters there."""
    return len({frozenset(placement.rank_of_stage[:, stage].tolist()) for stage in tie.stages}) > 1


def copies_of(tie: Tie, placement: Placement) -> tuple[TiedCopy, ...]:
    """The copies of a tie by their first stages; none where its stages share their ranks.

    The placement has one pipe, or the tie does not lie apart.
    """
    if not lies_apart(tie, placement):
        return ()
    held: dict[int, list[int]] = {}
    for stage in tie.stages:
        held.setdefault(int(placement.rank_of_stage[0, stage]), []).append(stage)
    return tuple(TiedCopy(rank, tuple(stages)) for rank, stages in held.items())


def exchanges_of(tie: Tie, placement: Placement) -> Iterator[TiedExchange]:
    """Both ends of each exchange between two copies, in the order in which the ranks exchange them."""
    for low, high in combinations(copies_of(tie, placement), 2):
        yield TiedExchange(low.rank, low.stage, high.rank, high.stage)
        yield TiedExchange(high.rank, high.stage, low.rank, low.stage)
