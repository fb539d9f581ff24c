"""Says which rank of a machine has died and where, from what dead processes leave in /proc and in their pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from schedc.ir.npz import program_from_npz
from schedc.ir.program import Program
from schedc_runtime.execute.instruction_names import place_in_words
from schedc_runtime.keeper.places import Places, RankHere
from schedc_runtime.ranks.processes import Condition
from schedc_runtime.ranks.progress import PeerProgress


def told_deaths(
    trainers: Sequence[RankHere], lost: Mapping[int, Condition], pages: Mapping[int, PeerProgress], places: Places
) -> str:
    """A line for each lost rank, then one for each other rank of this machine.

    lost: how the processes of ranks have ended, in the order of their deaths. pages: of ranks, where they could be
    mapped. places: where the programs are that ranks run.
    """

    def place(rank: int) -> str:
        position = pages[rank].read()
        return place_in_words(position, _program(places.program_path(position.program)))

    by_rank = {trainer.rank: trainer for trainer in trainers}
    lines = []
    for rank, condition in lost.items():
        where = f"; it was {place(rank)}" if rank in pages else ""
        who = by_rank[rank]
        lines.append(f"{who.name} (pid {who.process.pid}) is dead: {condition.why}{where}")
    for rank, who in by_rank.items():
        if rank not in lost and rank in pages:
            lines.append(f"  {who.name} is {place(rank)}")
    return "\n".join(lines)


def _program(path: Path) -> Program | None:
    try:
        return program_from_npz(path.read_bytes())
    except (OSError, ValueError):
        return None
