"""The library's orders are those of the schedules' authors, op for op, at every size tried; its claims hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from project.plain_orders import PLAIN, plain_hanayo, plain_interleaved_overlap, plain_seq1f1b
from schedc.claims.check import check_claims
from schedc.compiler import legal_schedule
from schedc.diagnostics import DiagnosticError
from schedc.elaborate import elaborate
from schedc.elaborate.sizes import meets_requirements
from schedc.ir.ops import OpKind
from schedc.ir.schedule import Schedule
from schedc.load.library import load, names, open_schedule
from schedc.step.timeline import simulate
from schedc.syntax.tree import ScheduleTree
from support import orders
from support.needs import needed
from support.sweeps import swept, thinned

TREES: dict[str, ScheduleTree] = {name: open_schedule(name) for name in names()}


def lines(schedule: Schedule) -> list[list[str]]:
    """The cells of each rank: ``0F3``, and a pair as ``0F3&7B1``."""
    ranks = []
    for rank in range(schedule.ranks):
        cells: list[str] = []
        open_pair = -1
        for op in schedule.ops(rank):
            joined = op.pair >= 0 and op.pair == open_pair
            cells[-1:] = [f"{cells[-1]}&{op}"] if joined else [*cells[-1:], str(op)]
            open_pair = op.pair
        ranks.append(cells)
    return ranks


RENAMED = {
    "eager1f1b": "eager_1f1b",
    "interleaved_overlap_v2": "interleaved_overlap",
    "interleaved_v2": "interleaved_1f1b",
    "loopedbfs_v2": "looped_bfs",
    "seq1f1b_k2": "seq1f1b",
    "torch_zbv": "zbv",
    "zbh1_quickstart": "zbh1_late",
}
"""Published orders whose file has another name than their schedule in the library."""

ANOTHER_ORDER = ("vhalf", "vmin", "zbv")
"""Orders that a paper draws and the library does not have: it follows the generator of torch or of the authors."""


def published_orders() -> Iterator[tuple[str, str]]:
    """Library name and file of every published order: ``published_orders/NAME_P4_M8.csv``."""
    for path in sorted(orders.FOLDER.glob("*.csv")):
        prefix = path.stem.split("_P")[0]
        if (name := RENAMED.get(prefix, prefix)) in TREES and prefix not in ANOTHER_ORDER:
            yield name, path.stem


@pytest.mark.parametrize(("name", "file"), list(published_orders()))
def test_the_published_order(name: str, file: str) -> None:
    assert set(RENAMED.values()) <= TREES.keys()
    ranks, microbatches = map(int, file.split("_P")[1].split("_M"))
    built = elaborate(TREES[name], {"P": ranks, "M": microbatches})
    texts = orders.FOLDER.joinpath(f"{file}.csv").read_text().split()
    assert lines(built) == lines(orders.schedule(texts, built.placement))


# Against torch's generators, and where torch has none or a wrong one, against the published rule in plain Python.


def torch_lines(schedule_class: Any, P: int, M: int, local: int) -> list[list[str]]:
    """What a schedule class of torch computes for every rank, without its process group."""
    made = object.__new__(schedule_class)
    rounds = max(1, M // P)
    made.__dict__.update(pp_group_size=P, _n_microbatches=M, n_local_stages=local, num_stages=local * P)
    made.__dict__.update(
        _stages=[None] * local, _num_stages=local * P, number_of_rounds=rounds, microbatches_per_round=M // rounds
    )

    def cell(action: Any) -> str:
        if action.sub_actions:
            return "&".join(cell(part) for part in action.sub_actions)
        return f"{action.stage_index}{action.computation_type.value}{action.microbatch_index}"

    ops = (made._calculate_single_rank_operations(rank) for rank in range(P))
    return [[cell(action) for action in rank if action is not None] for rank in ops]


def sizes_of_torch() -> Iterator[tuple[str, str, int, dict[str, int]]]:
    """Library name, torch's name, stages per rank, sizes."""
    for P in (1, 2, 3, 4, 5, 8):
        for M in {1, P, 2 * P - 2, 2 * P - 1, 2 * P, 2 * P + 1, 3 * P + 2, 5 * P} - {0}:
            yield "zbv", "ScheduleZBVZeroBubble", 2, {"P": P, "M": M}
            if M >= 2 * P:
                yield "dualpipev", "ScheduleDualPipeV", 2, {"P": P, "M": M}
        for M in (m for m in {1, P - 1, P, P + 1, 2 * P, 2 * P + 2, 3 * P, 3 * P + 3} - {0} if m % max(1, m // P) == 0):
            yield "zbh1", "ScheduleInterleavedZeroBubble", 1, {"P": P, "M": M}
            for v in (1, 2, 3):
                yield "looped_bfs", "ScheduleLoopedBFS", v, {"P": P, "M": M, "v": v}
                yield "interleaved_1f1b", "ScheduleInterleaved1F1B", v, {"P": P, "M": M, "v": v}


@pytest.mark.slow
def test_torchs_orders() -> None:
    schedules = needed("torch.distributed.pipelining.schedules")
    compared = Counter[str]()
    for name, torch_name, local, sizes in sizes_of_torch():
        expected = torch_lines(getattr(schedules, torch_name), sizes["P"], sizes["M"], local)
        assert lines(elaborate(TREES[name], sizes)) == expected, (name, sizes)
        compared[name] += 1
    assert min(compared.values()) >= 18
    assert len(compared) == 5


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", PLAIN)
def test_the_rule_in_plain_python(name: str) -> None:
    ranks = swept(range(1, 17), (1, 2, 3, 4, 5, 8))
    if name in ("dualpipe", "chimera"):
        ranks = swept(range(2, 17, 2), (2, 4, 6, 8, 10))
    for P in ranks:
        least = 2 * P if name.startswith("dualpipe") else P if name == "chimera" else 1
        step = {"dualpipe": 2, "chimera": P}.get(name, 1)
        for M in (least, least + step, least + 2 * step, least + 7 * step, 4 * P):
            expected = [PLAIN[name](P, M, rank) for rank in range(P)]
            assert lines(elaborate(TREES[name], {"P": P, "M": M})) == expected, (name, P, M)


@pytest.mark.slow
@pytest.mark.parametrize("third", [1, 2, 3, 4])
def test_rules_with_a_third_size(third: int) -> None:
    for P in (1, 2, 3, 4, 5, 8):
        for M in (P, 2 * P, 3 * P, 4 * P):
            expected = [plain_interleaved_overlap(P, M, third, rank) for rank in range(P)]
            assert lines(elaborate(TREES["interleaved_overlap"], {"P": P, "M": M, "v": third})) == expected, (P, M)
            expected = [plain_hanayo(P, M, third, rank) for rank in range(P)]
            assert lines(elaborate(TREES["hanayo"], {"P": P, "M": M, "w": third})) == expected, (P, M)
        for M in (1, 2, P, 3 * P + 1):
            expected = [plain_seq1f1b(P, M, third, rank) for rank in range(P)]
            assert lines(elaborate(TREES["seq1f1b"], {"P": P, "M": M, "k": third})) == expected, (P, M)


@pytest.mark.parametrize(("name", "chunks"), [("zb_wave", (2, 4, 6)), ("zb_wave_odd", (3, 5))])
def test_a_zero_bubble_wave_starts_no_op_behind_its_slot(name: str, chunks: tuple[int, ...]) -> None:
    """A stage takes a microbatch every two slots, a unit of P microbatches every 3*P*v; W may let ops start early."""
    for P, v, units in product((1, 2, 3, 4, 5, 8), chunks, (1, 2, 3)):
        schedule = elaborate(TREES[name], {"P": P, "M": units * P, "w": v // 2})
        start = simulate(schedule).start
        begin = 3 * P * v * (schedule.microbatch // P) + 2 * (schedule.microbatch % P)
        forward, backward = schedule.kind == OpKind.F, schedule.kind == OpKind.I
        assert (start <= begin + schedule.stage)[forward].all(), (P, v, units)
        assert (start <= begin + 2 * P * v - 1 - schedule.stage)[backward].all(), (P, v, units)
        assert simulate(schedule).makespan == 3 * v * units * P + P - 1


# Completeness, order, deadlock and claims at every legal size in a range.


MICROBATCHES = swept(list(range(1, 33)), [1, 2, 3, 4, 5, 7, 8, 10, 15, 16])


def legal_sizes(name: str) -> Iterator[tuple[dict[str, int], Schedule]]:
    """Sizes that meet the schedule's `require` lines, at few numbers of ranks where all of 1 to 16 are legal."""
    third = next((p.name for p in TREES[name].parameters if p.role in ("chunks", "segments", "count")), "")
    values = (lambda P: (P, P + P // 2, 2 * P)) if third == "limit" else lambda P: (1, 2, 3)
    sizes = {
        P: [
            {"P": P, "M": M, **({third: value} if third else {})}
            for M in sorted({*MICROBATCHES, P})
            for value in (values(P) if third else (0,))
        ]
        for P in range(1, 17)
    }
    defaults = {parameter.name: parameter.default or 0 for parameter in TREES[name].parameters}
    legal = [P for P in sizes if any(meets_requirements(TREES[name], defaults | size) for size in sizes[P])]
    for P in legal if len(legal) < 16 else swept(legal, [1, 2, 3, 4, 8]):
        for size in sizes[P]:
            if (schedule := unless_refused(name, size)) is not None:
                yield size, schedule


def unless_refused(name: str, sizes: dict[str, int]) -> Schedule | None:
    """The verified schedule; None where the file itself says that it is not made for these sizes."""
    try:
        return legal_schedule(TREES[name], sizes)
    except DiagnosticError as error:
        if {d.code for d in error.diagnostics} != {"S114"}:
            raise
        return None


@pytest.mark.slow
@pytest.mark.sweep
@pytest.mark.parametrize("name", thinned(names(), 3))
def test_every_legal_size_is_complete_and_its_claims_hold(name: str) -> None:
    tried = Counter[str]()
    for sizes, schedule in legal_sizes(name):
        for result in check_claims(TREES[name].claims, schedule):
            assert result.holds is not False, (name, sizes, result.claim, result.counterexample)
            tried[result.claim] += result.holds is True
    assert len(tried) == len(TREES[name].claims) >= 2
    assert min(tried.values()) >= 8


@pytest.mark.parametrize("name", names())
def test_a_schedule_says_what_it_is_and_where_it_is_from(name: str) -> None:
    tree = TREES[name]
    assert tree.name == name
    assert "Source:" in tree.doc
    assert all(parameter.default is not None for parameter in tree.parameters)
    assert load(name).name == f"{name}.sched"


# Finding schedules.


def code_of(name: str) -> SimpleNamespace:
    with pytest.raises(DiagnosticError) as caught:
        open_schedule(name)
    (finding,) = caught.value.diagnostics
    return SimpleNamespace(code=finding.code, help=finding.help, text=str(caught.value))


def test_unknown_schedules_and_files(tmp_path: Path) -> None:
    assert code_of("dualpipe_v").code == "S121"
    assert "dualpipev" in code_of("dualpipe_v").help
    assert code_of("no/such.sched").code == "S122"
    assert code_of("dualpipev.sched" + "\0").code == "S121"
    binary = tmp_path / "binary.sched"
    binary.write_bytes(b"sched 1 \xff\xfe")
    assert code_of(str(binary)).code == "S122"
    assert code_of(str(tmp_path)).code == "S121"
    large = tmp_path / "large.sched"
    large.write_bytes(b" " * (1 << 21))
    assert code_of(str(large)).code == "S004"


def test_a_file_goes_before_the_shipped_schedule_of_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert open_schedule("gpipe.sched") == TREES["gpipe"]
    Path("gpipe.sched").write_text(load("1f1b").text)
    assert open_schedule("gpipe.sched").name == "1f1b"
    assert open_schedule(Path("gpipe")).name == "gpipe"
    assert "alone" in code_of("sub/gpipe.sched").help


def test_one_of_several_schedules_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "two.sched"
    body = "(P: ranks = 2, M: microbatches = 2) { place linear rank r { repeat M { F B } } }\n"
    path.write_text(f"schedule one{body}schedule two{body}")
    assert open_schedule(f"{path}:two").name == "two"
    assert "two.sched:one" in code_of(str(path)).help
    assert code_of(f"{path}:too").help == "did you mean `two`?"


def test_elaborating_twice_gives_equal_schedules() -> None:
    again, once = (elaborate(TREES["dualpipe"], {"P": 4, "M": 8}) for _ in range(2))
    assert again == once
    assert once != elaborate(TREES["dualpipe"], {"P": 4, "M": 10})
    assert np.array_equal(once.rank_start, again.rank_start)
