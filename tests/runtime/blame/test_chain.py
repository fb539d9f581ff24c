"""The waits of ranks lead to the one that stopped, at whatever instruction, and what is then said."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import numpy as np
import pytest

import schedc
from schedc.compiler import legal_schedule
from schedc.inputs import open_input
from schedc.ir.program import InstructionKind, Program
from schedc.ir.works import WorkGroup, WorkKind
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.placed_works import PlacedWorks
from schedc.step.program.insert_communication import insert_communication
from schedc.step.program.insert_works import insert_works
from schedc_runtime.blame.chain import Root, chain_from
from schedc_runtime.blame.waits import Ranks
from schedc_runtime.blame.words import explain
from schedc_runtime.ranks.processes import Condition
from schedc_runtime.ranks.progress import BEGUN, ENDED, OUTSIDE, Position
from schedc_runtime.ranks.standing import Standing

PROGRAMS = {
    name: schedc.compile(name, **sizes)
    for name, sizes in (
        ("1f1b", {"P": 4, "M": 6}), ("zbv", {"P": 3, "M": 6}), ("dualpipe", {"P": 4, "M": 8}),
    )
}  # fmt: skip
NO_TORCH = "import sys, schedc_runtime.blame.words; assert 'torch' not in sys.modules"
FINE, DEAD = Condition(False, False, ""), Condition(True, False, "killed by SIGKILL")


def standing(rank: int, row: int, call: int = 2, round: int = 8, why: Condition = FINE) -> Standing:
    position = Position("in step 2", 0, row, "", call, round)
    return Standing(f"rank {rank}", f"rank {rank} is there", "there", why, position, None)


def stopped_at(program: Program, culprit: int, row: int) -> list[int]:
    """[ranks] where the streams come to if the culprit never ends ``row``: played message by message.

    A SEND or RECV is posted at once. A WAIT needs both ends to be posted. Other instructions run.
    """
    at = [int(start) for start in program.rank_start[:-1]]
    ends = [int(end) for end in program.rank_start[1:]]
    posted: dict[int, set[int]] = {}
    moved = True
    while moved:
        moved = False
        for rank in range(program.ranks):
            while at[rank] < ends[rank] and not (rank == culprit and at[rank] == row):
                x = program.instruction(at[rank])
                if x.kind in (InstructionKind.SEND, InstructionKind.RECV):
                    posted.setdefault(x.message, set()).add(rank)
                if x.kind is InstructionKind.WAIT and len(posted.get(x.message, ())) < 2:
                    break
                at[rank], moved = at[rank] + 1, True
    return [ENDED if at[rank] == ends[rank] else at[rank] for rank in range(program.ranks)]


def places(program: Program) -> Iterator[tuple[int, int]]:
    """Each rank, and the computations and posts at which it may stop."""
    for row in range(len(program.kind)):
        kind = InstructionKind(program.kind[row])
        if kind not in (InstructionKind.WAIT, InstructionKind.REDUCE):
            yield int(program.rank[row]), row


@pytest.mark.slow
@pytest.mark.parametrize("name", PROGRAMS)
def test_whoever_waits_leads_to_the_rank_that_stopped(name: str) -> None:
    """Wherever one rank stops, from every rank whose stream is kept waiting."""
    program, cases = PROGRAMS[name], 0
    for culprit, row in places(program):
        rows = stopped_at(program, culprit, row)
        ranks = Ranks({0: program}, [standing(rank, at) for rank, at in enumerate(rows)])
        for start, at in enumerate(rows):
            if start != culprit and at >= 0:
                chain = chain_from(ranks, start)
                assert (chain.root, chain.processes[-1]) == (Root.RANK, culprit), (culprit, row, rows)
                cases += 1
    assert cases > 100


@pytest.mark.parametrize("row", [OUTSIDE, BEGUN])
def test_a_rank_that_has_not_begun_the_step_is_the_root(row: int) -> None:
    """Outside of any stream it is one call behind."""
    program = PROGRAMS["1f1b"]
    first = int(program.rank_start[2])
    rows = stopped_at(program, 2, first)
    standings = [standing(rank, at) for rank, at in enumerate(rows)]
    standings[2] = standing(2, row, call=2 - (row == OUTSIDE))
    for start in (0, 1, 3):
        assert chain_from(Ranks({0: program}, standings), start).processes[-1] == 2


def test_a_message_that_both_ends_have_posted_is_the_links() -> None:
    program = PROGRAMS["1f1b"]
    waits = np.flatnonzero((program.kind == InstructionKind.WAIT) & (program.rank == 1))
    for row in map(int, waits):
        message = int(program.message[row])
        posts = np.flatnonzero((program.message == message) & (program.kind != InstructionKind.WAIT))
        (sender,) = (int(program.rank[x]) for x in posts if program.kind[x] == InstructionKind.SEND)
        (receiver,) = (int(program.rank[x]) for x in posts if program.kind[x] == InstructionKind.RECV)
        standings = [standing(rank, ENDED) for rank in range(4)]
        standings[1] = standing(1, row)
        assert chain_from(Ranks({0: program}, standings), 1).root is Root.LINK
        first, *_ = explain({0: program}, standings, 1, 1, 1.0)
        assert first.startswith(f"the link from rank {sender} to rank {receiver} is silent")


def test_ranks_that_wait_for_each_other_are_a_circle() -> None:
    """Rank 0 waits for rank 1 in a round before the step in which rank 1 waits for it."""
    program = PROGRAMS["1f1b"]
    row = stopped_at(program, 0, int(program.rank_start[0]))[1]
    standings = [standing(0, OUTSIDE, call=1, round=11), standing(1, row)]
    standings += [standing(rank, OUTSIDE, round=10) for rank in (2, 3)]
    for start in (0, 1):
        chain = chain_from(Ranks({0: program}, standings), start)
        assert (chain.root, sorted(chain.processes)) == (Root.CIRCLE, [0, 1])
    first, *_ = explain({0: program}, standings, 0, 1, 1.0)
    assert first.startswith("rank 0, rank 1 wait for each other in a circle")


def test_a_round_waits_for_those_that_did_not_come() -> None:
    """Rank 0 waits in round 5 for rank 3, which waits in a step for rank 2, which waits for nobody."""
    program = PROGRAMS["1f1b"]
    rows = stopped_at(program, 2, int(program.rank_start[2]))
    standings = [standing(rank, OUTSIDE, round=11) for rank in range(2)]
    standings += [standing(2, int(program.rank_start[2])), standing(3, rows[3])]
    assert chain_from(Ranks({0: program}, standings), 0).processes[-1] == 2
    standings = [standing(rank, OUTSIDE, round=11) for rank in range(4)]
    assert chain_from(Ranks({0: program}, standings), 0).root is Root.STORE


def test_a_dead_rank_is_preferred_and_not_said_twice() -> None:
    program = PROGRAMS["1f1b"]
    standings = [standing(0, OUTSIDE, round=11), standing(1, BEGUN), standing(2, BEGUN, why=DEAD), standing(3, BEGUN)]
    ranks = Ranks({0: program}, standings)
    assert chain_from(ranks, 0).processes == [0, 2]
    assert explain({0: program}, standings, 0, 1, 1.0)[0] == standings[2].line


def test_a_stopped_rank_is_the_root_whatever_it_waits_for() -> None:
    program = PROGRAMS["1f1b"]
    rows = stopped_at(program, 3, int(program.rank_start[3]))
    standings = [standing(rank, row) for rank, row in enumerate(rows)]
    assert chain_from(Ranks({0: program}, standings), 0).processes == [0, 1, 2, 3]
    standings[1] = standing(1, rows[1], why=Condition(False, True, "stopped by a signal"))
    assert chain_from(Ranks({0: program}, standings), 0).processes == [0, 1]


def test_replicas_wait_behind_their_last_instruction_for_those_that_have_not_come_there() -> None:
    program = schedc.compile("1f1b", P=2, M=2)
    middle = int(program.rank_start[0]) + 1
    standings = [standing(0, ENDED), standing(1, middle), standing(2, ENDED), standing(3, ENDED)]
    ranks = Ranks({0: program}, standings)  # processes 0 and 1 are replicas of rank 0
    assert chain_from(ranks, 0).processes == [0, 1]


def with_sums() -> Program:
    """1F1B on two ranks, whose gradients are summed over all replicas, and over those with the same experts."""
    schedule = legal_schedule(open_input("1f1b"), {"P": 2, "M": 2})
    dependencies = Dependencies.of(schedule)
    rows = [
        (kind, stage, 4 + 5 * stage, 4 + 5 * stage, group, 1.0)
        for stage in (0, 1) for group in (0, 1) for kind in (WorkKind.SCATTER, WorkKind.SPREAD)
    ]  # fmt: skip
    kind, stage, start, join, group, size = (np.array(column) for column in zip(*rows, strict=True))
    nothing = np.full(kind.size, -1)
    placed = PlacedWorks.of(kind.astype(np.int8), stage, nothing, size, start, join, group.astype(np.int8))
    return insert_works(insert_communication(schedule, Costs(), dependencies), dependencies, placed)


@pytest.mark.parametrize(("group", "members"), [(WorkGroup.REPLICAS, {1, 2, 3}), (WorkGroup.SAME_EXPERTS, {2})])
def test_a_collective_waits_for_members_that_have_not_started_it(group: WorkGroup, members: set[int]) -> None:
    """Four replicas in expert groups of two: processes 0 .. 3 are those of rank 0."""
    program = with_sums()
    joins = np.flatnonzero((program.kind == InstructionKind.JOIN) & (program.rank == 0))
    (join, *_) = (int(row) for row in joins if program.works.work(int(program.work[row])).group is group)
    same = (program.kind == InstructionKind.START) & (program.work == program.work[join])
    (start,) = map(int, np.flatnonzero(same))
    for late in range(1, 4):
        standings = [standing(process, join if process < 4 else ENDED) for process in range(8)]
        standings[late] = standing(late, start)
        chain = chain_from(Ranks({0: program}, standings, experts=2), 0)
        expected = (Root.RANK, [0, late]) if late in members else (Root.LINK, [0])
        assert (chain.root, chain.processes) == expected


def test_ranks_that_share_experts_wait_inside_an_instruction() -> None:
    """One at an earlier instruction, or at the same one and not in a wait, is the root."""
    program = schedc.compile("1f1b", P=2, M=2)
    first = int(program.rank_start[0])
    waiting = Position("in step 2", 0, first, "wait forward of 0.experts", 2, 8)
    working = waiting._replace(part="run forward of 0.routing")
    for other, root in ((working, [0, 1]), (waiting._replace(row=BEGUN, part=""), [0, 1]), (waiting, [0])):
        standings = [standing(rank, ENDED) for rank in range(4)]
        standings[0] = standings[0]._replace(position=waiting)
        standings[1] = standings[1]._replace(position=other)
        chain = chain_from(Ranks({0: program}, standings, experts=2), 0)
        assert chain.processes == root
        assert chain.root is (Root.LINK if other == waiting else Root.RANK)


def test_it_runs_without_torch() -> None:
    """A process beside the ranks explains what they did."""
    subprocess.run([sys.executable, "-c", NO_TORCH], check=True)
