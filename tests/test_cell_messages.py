"""Messages in and out of cells: sent when they are complete, waited for where they are needed, priced, proven."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.analysis.dependencies import Dependencies
from schedc.analysis.inside import price, simulate_messages
from schedc.cell import Action, CellCosts, Half, StageShape, Step, Times, stage_shape
from schedc.cell.collectives import Cell
from schedc.cell.program import MESSAGED, CellProgram, Edge
from schedc.cell.response import delays, least
from schedc.cell.tasks import tasks_of
from schedc.compiler import analyse
from schedc.ir.ops import LETTERS

RUN = Step(Action.RUN, Half.FORWARD, 0)
BACK = Step(Action.RUN, Half.BACKWARD, 0)
WEIGHT = Step(Action.RUN, Half.WEIGHT, 0)


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
def test_halves_open_before_their_first_step(program: CellProgram, parts: list[Step | Edge]) -> None:
    assert list(program.parts) == parts


def test_messages_halve_the_idle_time_of_dualpipev_where_nothing_is_exchanged() -> None:
    known = Dependencies.of(analyse("dualpipev", {"P": 8, "M": 16}).schedule)
    inside = price(known, [stage_shape(["dense"])] * 16, CellCosts.of({"dense": Times(1, 1, 1)}))
    assert inside.idle == {"overlapped": 14.0, "early": 7.0, "inside": 7.0}
    assert inside.timeline.makespan == inside.floor == 103


SMALL = st.integers(0, 6)


def random_program(kind: str, forward: StageShape | None, backward: StageShape | None, choose: Random) -> CellProgram:
    """Any order in which nothing comes before what it needs; exchanges are waited for right before their first use."""
    tasks = tasks_of(kind, forward, backward)
    steps: list[Step] = []
    left, waiting = list(range(len(tasks))), set()

    def settle(wanted: Iterable[int]) -> None:
        for at in sorted(waiting & set(wanted)):
            waiting.remove(at)
            steps.append(Step(Action.WAIT, tasks.all[at].half, tasks.all[at].node))

    while left:
        at = choose.choice([at for at in left if not set(tasks.all[at].after) & set(left)])
        task = tasks.all[at]
        left.remove(at)
        settle(task.after)
        steps.append(Step(Action.START if task.exchange else Action.RUN, task.half, task.node))
        if task.exchange:
            waiting.add(at)
    settle(range(len(tasks)))
    done = [steps.index(Step(Action.WAIT if task.exchange else Action.RUN, task.half, task.node)) for task in tasks.all]
    ends = [-1 if wanted is None else max((done[at] + 1 for at in wanted), default=0) for wanted in tasks.leaving]
    return CellProgram(tuple(steps), *ends, kind, choose.random() < 0.8)


def random_cells(known: Dependencies, shapes: Sequence[StageShape], choose: Random) -> list[Cell]:
    """[cells] a program for each kind of cell on each stage."""
    schedule = known.schedule
    made: dict[tuple[str, int, int], Cell] = {}
    cells = []
    for first, second in zip(known.first.tolist(), known.second.tolist(), strict=True):
        last = second if second >= 0 else first
        kind = "".join(LETTERS[schedule.kind[op]] for op in dict.fromkeys((first, last)))
        key = kind, int(schedule.stage[first]), int(schedule.stage[last])
        if key not in made:
            forward = shapes[key[1]] if kind[0] == "F" else None
            backward = shapes[key[2]] if kind != "F" else None
            made[key] = Cell(forward, backward, random_program(kind, forward, backward, choose))
        cells.append(made[key])
    return cells


@settings(deadline=None, max_examples=60)
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
    delay = np.array([delays(cell.program, cell.forward, cell.backward, costs) for cell in cells])
    found = simulate_messages(known, delay[:, 0, 0], delay, latency)
    assert found.end.tolist() == run_step_by_step(known, cells, costs, latency)
    assert (found.end - found.start == delay[:, 0, 0]).all()
    floor = np.array([least(cell.program.kind, cell.forward, cell.backward, costs) for cell in cells])
    assert (floor <= delay).all()
    assert simulate_messages(known, floor[:, 0, 0], floor, latency).makespan <= found.makespan


def random_costs(times: list[int]) -> CellCosts:
    roles = ("attention", "experts", "shared", "dense")
    rows = ("dispatch.rail", "dispatch.node", "combine.rail", "combine.node")
    segments = {role: Times(*times[3 * at : 3 * at + 3]) for at, role in enumerate(roles)}
    return CellCosts.of(segments, {row: Times(*times[12 + 2 * at :][:2]) for at, row in enumerate(rows)})


def run_step_by_step(known: Dependencies, cells: list[Cell], costs: CellCosts, latency: float) -> list[float]:
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
    sent, end = {}, [0.0] * len(cells)
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
                    if producer >= 0 and (producer, part.half) not in sent:
                        break
                    there = sent[producer, part.half] + latency * known.remote[row, cell] if producer >= 0 else 0.0
                    clock[rank] = max(clock[rank], there)
                elif isinstance(part, Edge):
                    sent[cell, part.half] = clock[rank]
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
