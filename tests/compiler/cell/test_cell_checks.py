"""Whether a cell program is whole, and whether the collectives of a program are those of all its ranks."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.cell import (
    Action,
    CellCosts,
    CellStep,
    Half,
    Lane,
    Node,
    StageShape,
    cell_program,
    stage_shape,
)
from schedc.cell.bounds import lower_bound
from schedc.cell.collectives import verify_collectives
from schedc.cell.issue_order import CellOf, CellOnRank, ExpertRanks, events
from schedc.cell.predict import predict
from schedc.cell.tasks import tasks_of
from schedc.cell.verify import verify_cell
from schedc.compiler import compile
from schedc.inputs import open_input
from schedc.ir.program import Instruction, InstructionKind, Program
from support.cell_cases import REFERENCE, cells, shapes_of

# One cell.


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(cells())
def test_every_program_is_whole_and_no_shorter_than_its_bound(
    cell: tuple[str, StageShape, StageShape, CellCosts, tuple[int, ...]],
) -> None:
    kind, forward, backward, costs, again = cell
    halves = shapes_of(kind, forward, backward)
    program = cell_program(kind, *halves, costs, recomputed=again)
    assert verify_cell(program, *halves) == []
    tasks = tasks_of(kind, *halves, again)
    found = predict(program, *halves, costs)
    spent = tasks.durations(costs, costs)
    assert lower_bound(tasks, spent) <= found.duration + 1e-9
    assert found.duration <= sum(spent) + 1e-9
    assert found.duration == pytest.approx(found.compute + found.exposed)
    assert all(0 <= lane.exposed <= lane.busy + 1e-9 for lane in found.lanes)
    for leaves in (found.activation_at, found.gradient_at):
        assert leaves is None or leaves <= found.duration
    assert (found.activation_at is not None) == ("F" in kind)


def test_an_exchange_that_takes_no_time_starts_behind_the_one_that_it_needs() -> None:
    own = Node("0.attention", Lane.COMPUTE, (), True, False)
    first, second = Node("0.out", Lane.RAIL, (0,), False, False), Node("0.in", Lane.NODE, (1,), False, False)
    shape = StageShape((own, first, second), (0,))
    assert verify_cell(cell_program("F", shape, None, CellCosts()), shape, None) == []


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(cells(), st.data())
def test_a_program_that_is_not_whole_is_refused(
    cell: tuple[str, StageShape, StageShape, CellCosts, tuple[int, ...]], data: st.DataObject
) -> None:
    kind, forward, backward, costs, _ = cell
    halves = shapes_of(kind, forward, backward)
    program = cell_program(kind, *halves, costs)
    if not program.steps:
        return
    steps = list(program.steps)
    at = data.draw(st.integers(0, len(steps) - 1))
    change = data.draw(st.sampled_from(["drop", "repeat", "stranger"]))
    changed = {
        "drop": steps[:at] + steps[at + 1 :],
        "repeat": steps[: at + 1] + steps[at:],
        "stranger": [
            *steps,
            CellStep(Action.RUN, data.draw(st.sampled_from(Half)), data.draw(st.sampled_from((-1, 99)))),
        ],
    }[change]
    found = verify_cell(replace(program, steps=tuple(changed)), *halves)
    assert found
    assert {finding.code for finding in found} == {"S320"}


def test_what_is_wrong_with_a_program_is_said_by_name() -> None:
    shape = stage_shape(["moe"], shared=False)
    program = cell_program("F", shape, None, CellCosts())
    dispatch = program.steps.index(CellStep(Action.START, Half.FORWARD, 3))
    swapped = list(program.steps)
    swapped[dispatch - 1], swapped[dispatch] = swapped[dispatch], swapped[dispatch - 1]
    texts = [finding.message for finding in verify_cell(replace(program, steps=tuple(swapped)), shape, None)]
    assert any("start of F.0.dispatch.rail before F.0.permute is complete" in text for text in texts)
    texts = [finding.message for finding in verify_cell(replace(program, activation_at=2), shape, None)]
    assert texts == [
        f"the program of a cell F cannot run: the activation leaves after step 2, and is complete after step "
        f"{program.activation_at}"
    ]
    late = replace(program, activation_at=len(program.steps) + 1)
    assert [finding.code for finding in verify_cell(late, shape, None)] == ["S320"]


# Collectives of a whole program.


def whole(method: str, name: str = "dualpipev", balance: bool = False) -> tuple[Program, CellOf]:
    program = compile(name, P=2, M=4)
    shapes = [stage_shape(["moe"], method, balance=balance)] * program.stages
    costs = CellCosts.of(REFERENCE, {f"{label}.{lane}": 10 for label in ("dispatch", "combine") for lane in Lane})

    def cell_of(rank: int, expert: int, item: Instruction) -> CellOnRank:
        kind = item.kind_name
        forward, backward = shapes_of(kind, shapes[item.stage], shapes[item.last_slot[0]])
        return CellOnRank(forward, backward, cell_program(kind, forward, backward, costs))

    return program, cell_of


@pytest.mark.parametrize("method", ["flat", "hierarchical"])
@pytest.mark.parametrize("name", ["dualpipev", "1f1b"])
def test_all_ranks_of_every_communicator_issue_the_same_collectives(name: str, method: str) -> None:
    program, cell_of = whole(method, name)
    group = ExpertRanks(2, 2)
    assert verify_collectives(program, group, cell_of) == []
    one = [event.collective for event in events(program, 0, 3, group, cell_of) if event.start]
    names = {"expert"} if method == "flat" else {"expert", "rail 1", "node 1"}
    assert {collective.communicator for collective in one} == names
    for communicator in names:
        numbers = [collective.number for collective in one if collective.communicator == communicator]
        assert numbers == list(range(len(numbers)))
        assert 3 in group.members(communicator)
    # Each microbatch of each stage: counts once, and both ways out and back, in forward and in backward.
    hops = 1 if method == "flat" else 2
    own = int((program.placement.rank_of_stage == 0).sum())
    assert len(one) == own * 4 * (1 + 4 * hops)


def test_the_balance_meets_on_all_replicas() -> None:
    """Two groups of expert ranks of two nodes: rows stay in a group, the balance does not."""
    program, cell_of = whole("hierarchical", balance=True)
    group = ExpertRanks(2, 2, data=2)
    assert verify_collectives(program, group, cell_of) == []
    own = {event.collective.communicator for event in events(program, 0, 6, group, cell_of)}
    assert {name: list(group.members(name)) for name in own} == {
        "expert of group 1": [4, 5, 6, 7],
        "rail 0 of group 1": [4, 6],
        "node 1 of group 1": [6, 7],
        "replicas": list(range(8)),
    }
    for replica in (1, 7):
        found = verify_collectives(program, group, mutated(cell_of, "balance", (replica,)))
        assert {finding.code for finding in found} == {"S321"}
        assert f"replicas 0 and {replica} do not agree" in found[0].message
        assert "communicator `replicas`" in found[0].message


def mutated(cell_of: CellOf, change: str, experts: tuple[int, ...]) -> CellOf:
    """Some replicas run other programs for the overlapped pairs of pipeline rank 1."""

    def changed(rank: int, expert: int, item: Instruction) -> CellOnRank:
        cell = cell_of(rank, expert, item)
        if rank != 1 or expert not in experts or item.kind is not InstructionKind.CELL:
            return cell
        return cell._replace(program=replace(cell.program, steps=_mutation(cell, change)))

    return changed


def _mutation(cell: CellOnRank, change: str) -> tuple[CellStep, ...]:
    steps = list(cell.program.steps)
    starts = [at for at, step in enumerate(steps) if step.action is Action.START]
    if change == "balance":
        assert cell.forward is not None
        told = cell.forward.names.index("0.balance.rail")
        return tuple(step for step in steps if (step.half, step.node) != (Half.FORWARD, told))
    if change == "missing":
        gone = steps[starts[1]]
        return tuple(step for step in steps if step[1:] != gone[1:])
    one, two = starts[1], starts[2]
    if change == "crossed":  # two neighbours of two communicators: each alone sees one order
        assert cell.forward == cell.backward is not None
        nodes = {at: cell.forward.nodes[steps[at].node] for at in starts}  # type: ignore[union-attr]
        one, two = next(
            (first, second)
            for first, second in pairwise(starts)
            if nodes[first].lane != nodes[second].lane and "routing" not in (nodes[first].role, nodes[second].role)
        )
    steps[one], steps[two] = steps[two], steps[one]
    return tuple(steps)


@pytest.mark.parametrize(
    ("method", "change", "experts", "code", "says"),
    [
        ("flat", "swapped", (2,), "S321", "replicas 0 and 2 do not agree on collective"),
        ("flat", "missing", (2,), "S321", "replicas 0 and 2 do not agree on collective"),
        ("hierarchical", "crossed", (0, 3), "S322", "replicas 0, 1, 2, 3 wait for each other for ever"),
    ],
)
def test_a_rank_that_differs_is_named_with_its_cell(
    method: str, change: str, experts: tuple[int, ...], code: str, says: str
) -> None:
    program, cell_of = whole(method)
    found = verify_collectives(program, ExpertRanks(2, 2), mutated(cell_of, change, experts))
    assert found
    assert {finding.code for finding in found} == {code}
    text = " ".join((found[0].message, *found[0].notes))
    assert "pipeline rank 1" in text
    assert says in text
    assert "instruction" in text
    assert "replica 2" in text
    assert found[0].primary.span.line > 0
    assert found[0].source is not None
    assert open_input("dualpipev").source.name == found[0].source.name  # type: ignore[union-attr]
