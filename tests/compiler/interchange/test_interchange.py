"""Orders out of and into other tools: lowered CSV, wrong files, configurations, trace and graph."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from click.testing import CliRunner, Result
from hypothesis import given, settings
from hypothesis import strategies as st

from schedc.cli import main
from schedc.compiler import analyse, legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.inputs import open_input
from schedc.interchange.check_lowered import check_lowered
from schedc.interchange.torch_cells import read_cells
from schedc.interchange.torch_csv import schedule_of, to_torch_csv
from schedc.interchange.torch_lowered import to_lowered_csv
from schedc.interchange.trace import to_trace
from schedc.ir.schedule import Schedule
from schedc.load.library import open_schedule
from schedc.source import Source
from schedc.step.costs.costs import Costs
from schedc.step.dependencies import Dependencies
from schedc.step.legality import check_schedule
from schedc.step.memory import measure_memory
from schedc.step.program.insert_communication import insert_communication
from schedc.step.timeline import simulate
from support.needs import needed
from support.orders import orders
from support.sweeps import swept

TWO = "0F0,0F1,0B0,0B1\n1F0,1B0,1F1,1B1\n"
"""1F1B on two ranks, compute level."""

LOWERED = (
    "0UNSHARD,0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1,0REDUCE_GRAD,0RESHARD\n"
    "1UNSHARD,1RECV_F0,1F0,1RECV_F1,1B0,1SEND_B0,1F1,1B1,1SEND_B1,1REDUCE_GRAD,1RESHARD\n"
)


REDUCED = TWO.replace("\n", "{}REDUCE_GRAD\n").format(",0", ",1")
"""The order with reductions of gradients and no messages, as torch writes it."""
UNSENT = re.sub(r",\dSEND_\w\d", "", LOWERED)


def lowered(old: str, new: str) -> str:
    return LOWERED.replace(old, new)


def schedc(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


def at(name: str, **sizes: int) -> Schedule:
    return legal_schedule(open_schedule(name), sizes)


def read(text: str, folder: Path) -> Schedule:
    path = folder / "order.csv"
    path.write_text(text)
    order = open_input(path)
    return legal_schedule(order, {})


def findings(text: str, folder: Path) -> list[tuple[str, int, int]]:
    with pytest.raises(DiagnosticError) as error:
        read(text, folder)
    return [diagnostic.position for diagnostic in error.value.diagnostics]


# The lowered level.

LIBRARY = [
    ("1f1b", {"P": 4, "M": 8}),
    ("gpipe", {"P": 1, "M": 2}),
    ("interleaved_1f1b", {"P": 2, "M": 4, "v": 5}),
    ("zbh1", {"P": 5, "M": 3}),
    ("zbv", {"P": 3, "M": 7}),
    ("dualpipev", {"P": 4, "M": 11}),
]


@pytest.mark.parametrize(("name", "sizes"), LIBRARY, ids=[name for name, _ in LIBRARY])
def test_what_is_lowered_is_read_without_a_finding(name: str, sizes: dict[str, int], tmp_path: Path) -> None:
    schedule = at(name, **sizes)
    back = read(to_lowered_csv(insert_communication(schedule)), tmp_path)
    assert to_torch_csv(back) == to_torch_csv(schedule)
    assert np.array_equal(back.placement.rank_of_stage, schedule.placement.rank_of_stage)


@pytest.mark.slow
@settings(max_examples=40)
@given(orders(legal=True))
def test_any_legal_order_is_lowered_and_read_again_if_it_has_one_pipe(schedule: Schedule) -> None:
    home = schedule.placement.rank_of_stage
    if (home != home[0]).any():
        with pytest.raises(DiagnosticError, match="S603"):
            to_lowered_csv(insert_communication(schedule))
        return
    cells = read_cells(Source("order.csv", to_lowered_csv(insert_communication(schedule))))
    assert to_torch_csv(schedule_of(cells)) == to_torch_csv(schedule)
    assert check_lowered(cells, schedule_of(cells)) == []


@pytest.mark.parametrize(("name", "sizes"), LIBRARY, ids=[name for name, _ in LIBRARY])
def test_gathers_and_reductions_are_those_of_torch(name: str, sizes: dict[str, int]) -> None:
    torch = needed("torch.distributed.pipelining.schedules")
    schedule = at(name, **sizes)
    lines = to_lowered_csv(insert_communication(schedule)).splitlines()
    for ours, compute in zip(lines, to_torch_csv(schedule).splitlines(), strict=True):
        actions = [torch._Action.from_str(cell) for cell in compute.split(",")]
        theirs = torch._add_reduce_grad(torch._add_unshard_reshard(actions), schedule.microbatches)
        own = [cell for cell in ours.split(",") if "SEND" not in cell and "RECV" not in cell]
        assert _by_compute(own) == _by_compute([str(action) for action in theirs])


def _by_compute(cells: list[str]) -> list[frozenset[str] | str]:
    """The cells, with neighbours that concern whole stages as sets: torch evicts in the order of a Python set, and
    reduces behind the gathers for the next op."""
    found: list[frozenset[str] | str] = []
    for cell in cells:
        if not re.search(r"SHARD|REDUCE", cell):
            found.append(cell)
        elif found and isinstance(found[-1], frozenset):
            found[-1] |= {cell}
        else:
            found.append(frozenset({cell}))
    return found


@pytest.mark.parametrize("name", ["1f1b", "interleaved_1f1b", "zbv", "dualpipev"])
def test_what_torch_lowers_is_found_right(name: str, tmp_path: Path) -> None:
    torch = needed("torch.distributed.pipelining.schedules")
    schedule = at(name)
    home = schedule.placement.rank_of_stage[0].tolist()
    actions = {
        rank: torch._add_reduce_grad(
            torch._add_unshard_reshard([torch._Action.from_str(cell) for cell in line.split(",")]),
            schedule.microbatches,
        )
        for rank, line in enumerate(to_torch_csv(schedule).splitlines())
    }
    lowered = torch._add_send_recv(actions, stage_to_rank=lambda s: home[s], num_stages=schedule.stages)
    text = "\r\n".join(",".join(map(str, lowered[rank])) for rank in sorted(lowered)) + "\r\n"
    assert to_torch_csv(read(text, tmp_path)) == to_torch_csv(schedule)


# Files that today's loaders take although they are wrong. Each line: what is wrong, the file, the findings.

WRONG = {
    "duplicate forward": ("0F0,0F0,0B0\n1F0,1B0\n", [("S205", 1, 5)]),
    "duplicate backward": ("0F0,0B0,0B0\n1F0,1B0\n", [("S205", 1, 9)]),
    "microbatch out of range": (TWO.replace("0F1", "0F7"), [("S602", 1, 5)]),
    "stage out of range": (TWO.replace("1F1", "9F1"), [("S602", 2, 9)]),
    "junk behind an op": (TWO.replace("0F0", "0F0junk"), [("S601", 1, 1)]),
    "garbled cell": (TWO.replace("1B0", "1?0"), [("S601", 2, 5)]),
    "truncated cell": (TWO.rstrip("\n")[:-1], [("S601", 2, 13)]),
    "truncated row": ("0F0,0F1,0B0\n1F0,1B0,1F1,1B1\n", [("S203", 1, 5)]),
    "missing row": (TWO.splitlines()[1] + "\n", [("S602", 1, 1)]),
    "empty row": (TWO.replace("\n", "\n\n", 1), [("S601", 2, 1)]),
    "misordered": ("0F0,0F1,0B0,0B1\n1B0,1F0,1F1,1B1\n", [("S204", 2, 1)]),
    "op on a wrong rank": ("0F0,0F1,0B0,1B0\n1F0,0B1,1F1,1B1\n", [("S202", 1, 13), ("S202", 2, 5)]),
    "stage on two ranks": ("0F0,0F1,0B0,0B1,1F0,1B0\n1F1,1B1\n", [("S602", 2, 1)]),
    "pair of dependent ops": ("(0F0;0B0)OVERLAP_F_B\n", [("S204", 1, 1)]),
    "weight gradient without its input gradient": ("0F0,0B0,0W0\n", [("S207", 1, 9)]),
    "compute order deadlocks": ("0F0,0B0,0F1,0B1\n1F0,1F1,1B0,1B1\n", [("S301", 1, 5)]),
    "lowered without sends": (UNSENT, [("S604", 1, 10), ("S604", 1, 14), ("S604", 2, 32)]),
    "lowered without a receive": (lowered("1RECV_F1,", ""), [("S604", 2, 36)]),
    "lowered, received twice": (lowered("1RECV_F1", "1RECV_F0,1RECV_F1"), [("S604", 2, 23)]),
    "lowered, sent to nobody": (lowered("1B1,", "1B1,1SEND_F1,"), [("S604", 2, 53)]),
    "lowered, sent too early": (lowered("0F0,0SEND_F0", "0SEND_F0,0F0"), [("S604", 1, 10)]),
    "lowered, received too late": (lowered("1RECV_F0,1F0", "1F0,1RECV_F0"), [("S604", 2, 10)]),
    "reduced too early": (lowered("1B1,1SEND_B1,1REDUCE_GRAD", "1REDUCE_GRAD,1B1,1SEND_B1"), [("S605", 2, 49)]),
    "never reduced": (lowered("0REDUCE_GRAD,", ""), [("S605", 1, 58)]),
    "reduced twice": (lowered("0REDUCE_GRAD", "0REDUCE_GRAD,0REDUCE_GRAD"), [("S605", 1, 75)]),
    "order, reduced too early": (REDUCED.replace("1B1,1REDUCE_GRAD", "1REDUCE_GRAD,1B1"), [("S605", 2, 13)]),
    "order, one stage never reduced": (REDUCED.replace(",0REDUCE_GRAD", ""), [("S605", 1, 13)]),
    "order, reduced twice": (REDUCED.replace("1REDUCE_GRAD", "1REDUCE_GRAD,1REDUCE_GRAD"), [("S605", 2, 30)]),
    "order, reduced elsewhere": (REDUCED.replace("0REDUCE_GRAD", "0REDUCE_GRAD,1REDUCE_GRAD"), [("S605", 1, 30)]),
    "order with reductions, one message": (REDUCED.replace("0F0", "0F0,0SEND_F0"), [("S604", 1, 14), ("S604", 2, 5)]),
    "computes before its weights are there": (lowered("0UNSHARD,0F0", "0F0,0UNSHARD"), [("S605", 1, 1)]),
    "gathered twice": (lowered("1UNSHARD", "1UNSHARD,1UNSHARD"), [("S605", 2, 10)]),
    "given up twice": (lowered("1RESHARD", "1RESHARD,1RESHARD"), [("S605", 2, 84)]),
    "lowered, deadlocks": (lowered("0F1,0SEND_F1,0RECV_B0,0B0", "0F1,0RECV_B0,0B0,0SEND_F1"), [("S310", 1, 27)]),
    "lowered, waits crosswise": (lowered("1RECV_F1,1B0,1SEND_B0", "1B0,1SEND_B0,1RECV_F1"), [("S310", 2, 27)]),
    "lowered, messages cross": (lowered("0SEND_F0,0F1,0SEND_F1", "0F1,0SEND_F1,0SEND_F0"), [("S313", 1, 18)]),
    "word misspelt": (lowered("0SEND_F0", "0SENDF0"), [("S601", 1, 14)]),
    "nothing computes": ("0SEND_F0\n", [("S602", 1, 1)]),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_a_wrong_file_is_refused_at_its_cell(what: str, tmp_path: Path) -> None:
    text, expected = WRONG[what]
    assert findings(text, tmp_path)[: len(expected)] == expected


@pytest.mark.parametrize(("ranks", "microbatches"), [(1, 2), (2, 1), (3, 5)])
def test_torch_s_own_order_ends_with_reductions(ranks: int, microbatches: int, tmp_path: Path) -> None:
    torch = needed("torch.distributed.pipelining.schedules")
    sizes = SimpleNamespace(_num_stages=ranks, _n_microbatches=microbatches)
    order = torch.ScheduleGPipe._get_pipeline_order(sizes)
    text = "".join(",".join(str(cell or "") for cell in order[rank]) + "\n" for rank in range(ranks))
    assert text.count("REDUCE_GRAD\n") == ranks
    assert to_torch_csv(read(text, tmp_path)) == to_torch_csv(at("gpipe", P=ranks, M=microbatches))


def test_the_right_files_are_right(tmp_path: Path) -> None:
    assert to_torch_csv(read(LOWERED, tmp_path)) == TWO
    assert to_torch_csv(read(re.sub(r"\d(UN|RE)SHARD,?", "", LOWERED).replace(",\n", "\n"), tmp_path)) == TWO


def test_a_deadlock_of_a_lowered_file_shows_its_circle(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text(WRONG["lowered, deadlocks"][0])
    with pytest.raises(DiagnosticError) as error:
        open_input(path)
    (diagnostic,) = error.value.diagnostics
    assert diagnostic.notes[0] == "the shortest circle: rank 0 waits <- rank 1 waits <- rank 0 waits"
    assert "order.csv:1:" in "".join(diagnostic.notes)


@st.composite
def garbled(draw: st.DrawFn) -> str:
    """A good file of either level with some of its cells exchanged, lost, doubled, moved or overwritten."""
    text = draw(st.sampled_from([TWO, LOWERED, to_lowered_csv(insert_communication(at("dualpipev", P=2, M=4)))]))
    rows = [line.split(",") for line in text.splitlines()]
    for _ in range(draw(st.integers(1, 3))):
        row, other = draw(st.sampled_from(rows)), draw(st.sampled_from(rows))
        place = draw(st.integers(0, max(0, len(row) - 1)))
        cell = draw(
            st.sampled_from(["", "0F0", "1SEND_B0", "0REDUCE_GRAD", "9", "(0F1;1B0)OVERLAP_F_B", "é", "65535F9"])
        )
        match draw(st.sampled_from(["put", "lose", "double", "move", "cut"])):
            case "put":
                row[place : place + 1] = [cell]
            case "lose":
                del row[place : place + 1]
            case "double":
                row[place:place] = row[place : place + 1]
            case "move":
                other[:0], row[place : place + 1] = row[place : place + 1], []
            case "cut":
                del row[place:]
    return "\n".join(map(",".join, rows))


@pytest.mark.slow
@pytest.mark.sweep
@settings(max_examples=swept(200, 80))
@given(garbled())
def test_a_garbled_file_is_refused_at_a_place_of_it_or_legal(text: str) -> None:
    source = Source("order.csv", text)
    try:
        cells = read_cells(source)
        schedule = schedule_of(cells)
        found = check_schedule(schedule) or check_lowered(cells, schedule)
    except DiagnosticError as error:
        found = list(error.diagnostics)
    for finding in found:
        assert finding.source is source
        assert 1 <= finding.primary.span.line <= len(source.lines)
        assert 1 <= finding.primary.span.column <= len(source.line(finding.primary.span.line)) + 1
    if not found:
        insert_communication(schedule)  # complete and free of deadlock: it can be compiled


# Orders stand wherever a schedule does.


def test_a_csv_can_be_checked_shown_compared_and_compiled(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(to_torch_csv(at("zbh1")))
    result = schedc("check", str(path), "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["sizes"] == {"P": 4, "M": 8}
    assert facts["schedule"] == "mine"
    assert facts["makespan"] == analyse("zbh1", {}).timeline.makespan
    assert schedc("show", str(path)).exit_code == 0
    assert schedc("diff", str(path), "zbh1").exit_code == 0
    assert schedc("diff", str(path), "1f1b").exit_code == 1
    for arguments in (["check", "-D", "P=8"], ["check", "--sweep", "P<=4"], ["report"]):
        result = schedc(*arguments, str(path))
        assert result.exit_code == 2
        assert "error[S606]" in result.stderr


def test_import_writes_a_text_form_that_is_the_same_schedule(tmp_path: Path) -> None:
    source, target = tmp_path / "mine.csv", tmp_path / "mine.schedule"
    source.write_text(to_lowered_csv(insert_communication(at("dualpipev"))))
    assert schedc("import", str(source), "-o", str(target)).exit_code == 0
    order = legal_schedule(open_input(target), {})
    assert order.name == "mine"
    assert to_torch_csv(order) == to_torch_csv(at("dualpipev"))
    renamed = tmp_path / "mine.txt"
    renamed.write_text("# by its first line\n" + target.read_text())
    assert legal_schedule(open_input(renamed), {}) == order
    assert schedc("diff", str(target), "dualpipev").exit_code == 0


def test_a_broken_text_form_is_refused_and_an_illegal_one_too(tmp_path: Path) -> None:
    path = tmp_path / "broken.schedule"
    path.write_text('schedule 1\nname "x"\nnonsense\n')
    assert schedc("check", str(path)).exit_code == 1
    text = schedc("export", "1f1b", "-D", "P=2", "-D", "M=2", "--to", "text").stdout
    path.write_text(re.sub(r"0B0\S*", "", text))
    result = schedc("check", str(path))
    assert "error[S203]" in result.stderr
    assert "broken.schedule" in result.stderr


@pytest.mark.parametrize("content", [None, b"\xff\xfe"])
def test_a_file_that_cannot_be_read(content: bytes | None, tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    if content is not None:
        path.write_bytes(content)
    assert "error[S122]" in schedc("check", str(path)).stderr


# Targets.


@pytest.mark.parametrize(
    ("name", "target", "code", "why"),
    [
        ("dualpipe", "csv-lowered", "S603", "stage 0 would live on ranks 0 and 7"),
        ("dualpipe", "megatron", "S603", "a stage lives on one"),
        ("zbv", "megatron", "S607", "Megatron puts stage s on rank s mod P"),
        ("zbh1", "megatron", "S607", "op 4 of rank 0 is 0I0, where Megatron runs 0B0"),
        ("gpipe", "megatron", "S607", "op 4 of rank 0 is 0F4, where Megatron runs 0B0"),
        ("seq1f1b", "csv-lowered", "S607", "`1f1b` is the nearest"),
    ],
)
def test_what_a_target_cannot_express_is_refused(name: str, target: str, code: str, why: str) -> None:
    result = schedc("export", name, "--to", target)
    assert result.exit_code == 1
    assert result.stdout == ""
    assert f"error[{code}]" in result.stderr
    assert why in result.stderr


def test_a_placement_that_torchtitan_lacks(tmp_path: Path) -> None:
    path = tmp_path / "order.csv"
    path.write_text("1F0,1B0\n0F0,0B0\n")
    result = schedc("export", str(path), "--to", "torchtitan")
    assert "error[S607]" in result.stderr


def test_the_trace_is_the_timeline() -> None:
    schedule = at("dualpipev", P=2, M=5)
    costs = Costs(FB=1.5, p2p=0.25)
    known = Dependencies.of(schedule)
    timeline, memory = simulate(schedule, costs, known), measure_memory(schedule, costs, known)
    document = json.loads(to_trace(schedule, timeline, memory))
    events = document["traceEvents"]
    ops = [event for event in events if event["ph"] == "X"]
    assert len(ops) == len(schedule)
    assert max(op["ts"] + op["dur"] for op in ops) == timeline.makespan * 1000
    for track in {(op["pid"], op["tid"]) for op in ops}:  # ops of one track never overlap
        mine = sorted((op["ts"], op["ts"] + op["dur"]) for op in ops if (op["pid"], op["tid"]) == track)
        assert all(end <= start for (_, end), (start, _) in pairwise(mine))
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {(tracks[op["pid"], op["tid"]], op["cat"]) for op in ops} == {
        ("forward", "F"), ("backward", "B"), ("backward", "I"), ("backward", "W")
    }  # fmt: skip
    assert {(tracks[e["pid"], e["tid"]], e["name"]) for e in events if e["ph"] in "sf"} == {
        ("forward", "forward"), ("backward", "backward")
    }  # fmt: skip
    pairs = [op for op in ops if op["args"].get("overlapped")]
    assert {op["tid"] for op in pairs} == {0, 1}
    assert len(pairs) == int((schedule.pair >= 0).sum())
    counters = [event for event in events if event["ph"] == "C"]
    for rank in range(2):
        held = [sum(event["args"].values()) for event in counters if event["pid"] == rank]
        assert max(held) == memory.peak_activations[rank]
        assert held[-1] == 0
    assert sum(event["ph"] == "s" for event in events) == int(known.remote.sum())
    assert document["otherData"]["schedule"] == "dualpipev"
