"""Messages in and out of cells: sent when they are complete, waited for where they are needed, priced, proven."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.cell import Action, CellCosts, CellStep, Half, SegmentTimes, StageShape, stage_shape
from schedc.cell.collectives import verify_collectives
from schedc.cell.cost_batch import CellCostBatch
from schedc.cell.delays import lower_bound_delays, program_delays
from schedc.cell.issue_order import CellOnRank, ExpertRanks, Post, stream
from schedc.cell.program import MESSAGED, CellProgram, Edge
from schedc.cell.tasks import tasks_of
from schedc.cell.with_messages import POSTS
from schedc.compiler import analyse, compile
from schedc.ir.ops import LETTERS
from schedc.ir.program import COLUMNS, Channel, Instruction, InstructionKind, Program, computation
from schedc.ir.rendezvous import QueueAction, QueueStep, Streams, find_stuck
from schedc.step.cells.cell_pricing import price
from schedc.step.costs.costs import load_costs
from schedc.step.dependencies import Dependencies
from schedc.step.messages import simulate_messages
from support.paths import ROOT
from support.sweeps import swept

EXAMPLES, DOCS = ROOT / "examples" / "costs", ROOT / "docs" / "inside" / "cells.md"
RUN = CellStep(Action.RUN, Half.FORWARD, 0)
BACK = CellStep(Action.RUN, Half.BACKWARD, 0)
WEIGHT = CellStep(Action.RUN, Half.WEIGHT, 0)


def opens(half: Half) -> Edge:
    return Edge(half, opens=True)


def closes(half: Half) -> Edge:
    return Edge(half, opens=False)


@pytest.mark.parametrize(
    ("program", "parts"),
    [
        (
            CellProgram((RUN, BACK, WEIGHT), 1, 2, "FB"),
            [opens(Half.FORWARD), RUN, closes(Half.FORWARD), opens(Half.BACKWARD), BACK, closes(Half.BACKWARD), WEIGHT],
        ),
        (
            CellProgram((RUN, BACK, WEIGHT), 3, 3, "FB", opens_late=False),
            [*map(opens, MESSAGED), RUN, BACK, WEIGHT, *map(closes, MESSAGED)],
        ),
        # A stage without a node, as one of paddings, hands over what it gets.
        (
            CellProgram((BACK,), 0, 1, "FI"),
            [opens(Half.FORWARD), closes(Half.FORWARD), opens(Half.BACKWARD), BACK, closes(Half.BACKWARD)],
        ),
        (
            CellProgram((RUN,), 1, 1, "FI"),
            [opens(Half.FORWARD), RUN, closes(Half.FORWARD), opens(Half.BACKWARD), closes(Half.BACKWARD)],
        ),
        (CellProgram((WEIGHT,), -1, -1, "W", opens_late=False), [WEIGHT]),
    ],
)  # fmt: skip
def test_halves_open_before_their_first_step(program: CellProgram, parts: list[CellStep | Edge]) -> None:
    assert list(program.parts) == parts


def test_messages_halve_the_idle_time_of_dualpipev_where_nothing_is_exchanged() -> None:
    known = Dependencies.of(analyse("dualpipev", {"P": 8, "M": 16}).schedule)
    inside = price(known, [stage_shape(["dense"])] * 16, CellCosts.of({"dense": SegmentTimes(1, 1, 1)}))
    assert inside.idle == {"overlapped": 14.0, "early": 7.0, "inside": 7.0}
    assert inside.late_wait.makespan == inside.floor == 103


@pytest.mark.parametrize(
    ("file", "ranks", "microbatches", "latency"),
    [("cells", 4, 16, 0), ("cells", 8, 20, 0), ("cells", 4, 16, 20), ("hops", 4, 16, 0), ("hops", 4, 16, 20)],
)
def test_the_table_of_the_docs_is_what_is_priced(file: str, ranks: int, microbatches: int, latency: int) -> None:
    costs = replace(load_costs(EXAMPLES / f"{file}.toml"), p2p=latency)
    inside = analyse("dualpipev", {"P": ranks, "M": microbatches}, costs).inside
    assert inside is not None
    named = f"`{file}.toml`" + (f", p2p {latency}" if latency else "")
    figures = " | ".join(f"{inside.idle[name]:.10g}" for name in ("overlapped", "early", "inside"))
    gone = 100 * (1 - inside.idle["inside"] / inside.idle["overlapped"])
    assert f"| {named} | {ranks}, {microbatches} | {figures} | {gone:.1f} % |" in DOCS.read_text()


SMALL = st.integers(0, 6)


def random_program(kind: str, forward: StageShape | None, backward: StageShape | None, choose: Random) -> CellProgram:
    """Any order in which nothing comes before what it needs; exchanges are waited for right before their first use."""
    tasks = tasks_of(kind, forward, backward)
    steps: list[CellStep] = []
    left, waiting = list(range(len(tasks))), set()

    def settle(wanted: Iterable[int]) -> None:
        for at in sorted(waiting & set(wanted)):
            waiting.remove(at)
            steps.append(CellStep(Action.WAIT, tasks.all[at].half, tasks.all[at].node))

    while left:
        at = choose.choice([at for at in left if not set(tasks.all[at].after) & set(left)])
        task = tasks.all[at]
        left.remove(at)
        settle(task.after)
        steps.append(CellStep(Action.START if task.exchange else Action.RUN, task.half, task.node))
        if task.exchange:
            waiting.add(at)
    settle(range(len(tasks)))
    done = [
        steps.index(CellStep(Action.WAIT if task.exchange else Action.RUN, task.half, task.node)) for task in tasks.all
    ]
    ends = [-1 if wanted is None else max((done[at] + 1 for at in wanted), default=0) for wanted in tasks.leaving]
    return CellProgram(tuple(steps), *ends, kind, choose.random() < 0.8)


def random_cells(known: Dependencies, shapes: Sequence[StageShape], choose: Random) -> list[CellOnRank]:
    """[cells] a program for each kind of cell on each stage."""
    schedule = known.schedule
    made: dict[tuple[str, int, int], CellOnRank] = {}
    cells = []
    for first, second in zip(known.first.tolist(), known.second.tolist(), strict=True):
        last = second if second >= 0 else first
        kind = "".join(LETTERS[schedule.kind[op]] for op in dict.fromkeys((first, last)))
        key = kind, int(schedule.stage[first]), int(schedule.stage[last])
        if key not in made:
            forward = shapes[key[1]] if kind[0] == "F" else None
            backward = shapes[key[2]] if kind != "F" else None
            made[key] = CellOnRank(forward, backward, random_program(kind, forward, backward, choose))
        cells.append(made[key])
    return cells


@pytest.mark.slow
@pytest.mark.sweep
@settings(deadline=None, max_examples=swept(60, 25))
@given(
    name=st.sampled_from(["dualpipev", "1f1b_overlap", "zbv", "1f1b"]),
    blocks=st.lists(st.lists(st.sampled_from(["dense", "moe"]), max_size=2), min_size=4, max_size=4),
    method=st.sampled_from(["flat", "hierarchical"]),
    times=st.lists(SMALL, min_size=20, max_size=20),
    latency=SMALL,
    seed=st.integers(0, 1 << 20),
)
def test_a_priced_step_is_the_one_in_which_every_micro_step_is_run(
    name: str, blocks: list[list[str]], method: str, times: list[int], latency: int, seed: int
) -> None:
    known = Dependencies.of(analyse(name, {"P": 2, "M": 4}).schedule)
    stages = known.schedule.stages
    shapes = [stage_shape(row, method, shared=True) for row in (blocks * stages)[:stages]]
    cells, costs = random_cells(known, shapes, Random(seed)), random_costs(times)
    delay = np.array([program_delays(cell.program, cell.forward, cell.backward, costs) for cell in cells])
    each = np.arange(len(known))
    found = simulate_messages(known, each, delay[:, 0, 0], delay, latency).timeline
    assert found.end.tolist() == run_step_by_step(known, cells, costs, latency)
    assert (found.end - found.start == delay[:, 0, 0]).all()
    batch = CellCostBatch.of([costs])
    bounds = [lower_bound_delays(cell.program.kind, cell.forward, cell.backward, batch) for cell in cells]
    floor = np.array(bounds)[..., 0]
    assert (floor <= delay).all()
    assert simulate_messages(known, each, floor[:, 0, 0], floor, latency).timeline.makespan <= found.makespan


def random_costs(times: list[int]) -> CellCosts:
    roles = ("attention", "experts", "shared", "dense")
    rows = ("dispatch.rail", "dispatch.node", "combine.rail", "combine.node")
    segments = {role: SegmentTimes(*times[3 * at : 3 * at + 3]) for at, role in enumerate(roles)}
    return CellCosts.of(segments, {row: SegmentTimes(*times[12 + 2 * at :][:2]) for at, row in enumerate(rows)})


def run_step_by_step(known: Dependencies, cells: list[CellOnRank], costs: CellCosts, latency: float) -> list[float]:
    """[cells] the end of each: all ranks go on, micro-step by micro-step, as far as messages let them."""
    ranks = range(known.rank_start.size - 1)
    todo = {
        rank: [
            (cell, part)
            for cell in range(*known.rank_start[rank : rank + 2])
            for part in [*cells[cell].program.parts, None]
        ]
        for rank in ranks
    }
    clock, free, due = dict.fromkeys(ranks, 0.0), {}, {}
    complete, end = {}, [0.0] * len(cells)
    activations = set(known.producers[0][known.remote[0]].tolist())
    while any(todo.values()):
        before = sum(map(len, todo.values()))
        for rank in ranks:
            while todo[rank]:
                cell, part = todo[rank][0]
                if part is None:
                    end[cell] = clock[rank]
                elif isinstance(part, Edge) and part.opens:
                    row = MESSAGED.index(part.half)
                    producer = int(known.producers[row, cell])
                    needed = [(producer, part.half)] if producer >= 0 else []
                    if part.half is Half.BACKWARD and producer in activations:
                        needed.append((producer, Half.FORWARD))  # its activation is posted first
                    if any(half not in complete for half in needed):
                        break
                    arrivals = [complete[half] + latency * known.remote[row, cell] for half in needed]
                    clock[rank] = max(clock[rank], *arrivals, 0.0)
                elif isinstance(part, Edge):
                    complete[cell, part.half] = clock[rank]
                else:
                    shape = cells[cell].forward if part.half is Half.FORWARD else cells[cell].backward
                    assert shape is not None
                    time, queue = costs.duration(shape, part.half, part.node), (rank, shape.queues[part.node])
                    if part.action is Action.RUN:
                        clock[rank] += time
                    elif part.action is Action.START:
                        due[cell, part.half, part.node] = free[queue] = max(free.get(queue, 0.0), clock[rank]) + time
                    else:
                        clock[rank] = max(clock[rank], due[cell, part.half, part.node])
                todo[rank].pop(0)
        assert sum(map(len, todo.values())) < before
    return end


# Messages and collectives in one line.


@settings(deadline=None, max_examples=12)
@given(
    name=st.sampled_from(["dualpipev", "1f1b_overlap", "zbv", "interleaved_1f1b", "dualpipe"]),
    method=st.sampled_from(["flat", "hierarchical"]),
    seed=st.integers(0, 1 << 20),
)
def test_messages_inside_cells_and_collectives_complete_in_one_line(name: str, method: str, seed: int) -> None:
    program = compile(name, P=2, M=4)
    cells, group = cells_by_row(program, method, seed), ExpertRanks(2, 2)

    def cell_of(rank: int, expert: int, item: Instruction) -> CellOnRank:
        return cells[rank, item.op]

    streams = [
        [
            QueueStep(
                QueueAction.START if one.start else QueueAction.WAIT,
                (expert, one.unit) if isinstance(one, Post) else (rank, *one.collective[:2]),
            )
            for one in stream(program, rank, expert, group, cell_of)
        ]
        for rank in range(program.ranks)
        for expert in range(group.size)
    ]
    assert find_stuck(Streams.of(streams)) is None
    posts = [one for one in stream(program, 0, 0, group, cell_of) if isinstance(one, Post)]
    kinds = program.kind[: program.rank_start[1]]
    in_order = [row for row in range(kinds.size) if kinds[row] in POSTS]
    assert [one.row for one in posts if one.start] == sorted({one.row for one in posts if one.start})
    assert {one.row for one in posts if one.start} <= set(in_order)
    waits = {one.row for one in posts if not one.start}
    assert waits == {row for row in range(kinds.size) if kinds[row] == InstructionKind.WAIT}
    for at, one in enumerate(posts):  # before a post stand no more waits than in the program
        before = {other.row for other in posts[:at] if not other.start}
        assert not one.start or all(row < one.row for row in before)


def cells_by_row(program: Program, method: str, seed: int) -> dict[tuple[int, int], CellOnRank]:
    """[rank, cell of its rank] random programs on stages of one MoE block."""
    known = Dependencies.of(computation(program)[0])
    cells = random_cells(known, [stage_shape(["moe"], method)] * program.stages, Random(seed))
    numbers = np.arange(len(known)) - known.rank_start[known.rank]
    return dict(zip(zip(known.rank.tolist(), numbers.tolist(), strict=True), cells, strict=True))


def test_ranks_that_start_items_in_other_orders_deadlock() -> None:
    """Two pipelines with a message each, two pairs of ranks with a collective each: each pair alone sees no circle."""

    def starting(*items: str) -> list[QueueStep]:
        return [QueueStep(action, item) for action in (QueueAction.START, QueueAction.WAIT) for item in items]

    one, other = starting("m0", "c0"), starting("c0", "m1")
    assert find_stuck(Streams.of([one, other, starting("m0", "c1"), starting("c1", "m1")])) is None
    stuck = find_stuck(Streams.of([one, other, starting("c1", "m0"), starting("m1", "c1")]))
    assert stuck is not None
    assert stuck.positions == (2, 6, 10, 14)
    assert [link.blocked for link in stuck.cycle] == [False] * 4


def test_a_program_whose_messages_hold_up_the_collectives_is_refused() -> None:
    program = compile("1f1b", P=2, M=4)
    late, cells = swapped(program), cells_by_row(program, "flat", 1)

    def cell_of(rank: int, expert: int, item: Instruction) -> CellOnRank:
        cell = cells[rank, item.op]
        return cell._replace(program=replace(cell.program, opens_late=expert == 0))

    assert verify_collectives(program, ExpertRanks(1, 2), cell_of) == []
    (found,) = verify_collectives(late, ExpertRanks(1, 2), cell_of)
    assert found.code == "S322"
    assert "wait for each other for ever" in found.message
    assert found.notes[0].startswith("the shortest circle: replica ")
    assert any("message" in note for note in found.notes)


def swapped(program: Program) -> Program:
    """Rank 0 waits for its first gradient before it sends an activation."""
    kinds = program.kind[: program.rank_start[1]].tolist()
    send = kinds.index(InstructionKind.SEND)
    rows = range(program.rank_start[1])
    receive, wait = (
        next(row for row in rows if kinds[row] == kind and program.channel[row] == Channel.GRADIENT)
        for kind in (InstructionKind.RECV, InstructionKind.WAIT)
    )
    order = [row for row in range(len(program)) if row not in (receive, wait)]
    order[send:send] = [receive, wait]
    columns = {name: getattr(program, name)[order] for name in ("kind", *COLUMNS)}
    return replace(program, **columns)
