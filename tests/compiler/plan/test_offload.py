"""`host` and `offload`: meaning and refusals of the lines, works of the program, and printed facts."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from schedc.cell.costs import CellCosts, SegmentTimes
from schedc.cell.table import CellTable
from schedc.compiler import analyse, compile
from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import Host, Offload, Plan, Recompute
from schedc.ir.verify_program import verify_program
from schedc.ir.works import WorkKind
from schedc.plan import plan_of
from schedc.plan.writer import read_plan, write_plan
from schedc.report.check import to_json, to_text
from schedc.step.costs.costs import Costs


def plan(tmp_path: Path, body: str, schedule: str = "1f1b(P = 4, M = 8)") -> str:
    file = tmp_path / "a.sched"
    file.write_text(f"sched 1\nplan a = {schedule} {{\n  layers 8\n  {body}\n}}\n", encoding="utf-8")
    return str(file)


HOST = Host(2e11, 5e10, 5e10)


@pytest.mark.parametrize(
    ("text", "host", "rules"),
    [
        ("host 200 GB at 50 GB/s  offload all", HOST, (Offload("all"),)),
        ("host 200 GB at 50 GB/s  offload chunk 1 keep 2", HOST, (Offload("chunk", (1,), 2),)),
        (
            "host 10 at 8  offload stage 0 of experts, dense keep 1",
            Host(10.0, 8.0, 8.0, False),
            (Offload("stage", (0,), 1, ("experts", "dense")),),
        ),
        ("host 10 d2h 2 h2d 0.5  offload auto", Host(10.0, 2.0, 0.5, False), (Offload("auto"),)),
        ("host 10 at 8 shared by 4  offload auto", Host(10.0, 8.0, 8.0, False, 4), (Offload("auto"),)),
        (
            "host 200 GB at 50 GB/s  offload stage [0, 1]  offload all keep 3",
            HOST,
            (Offload("stage", (0, 1)), Offload("all", (), 3)),
        ),
    ],
)
def test_lines_are_values_and_back(text: str, host: Host, rules: tuple[Offload, ...]) -> None:
    assert write_plan(Plan(host=host, offload=rules)) == text
    assert read_plan(text, 4) == Plan(host=host, offload=rules)


@pytest.mark.parametrize(
    ("body", "code", "message"),
    [
        ("offload all", "S155", "activations leave, and the plan says nothing of host memory"),
        ("host 5 GB   offload all", "S146", "host memory without the speeds of its lanes"),
        ("host 5 GB at 2   offload all", "S146", "`at` without a speed"),
        ("host 5 GB at 2 GB/s d2h 3 GB/s", "S144", "the speed of a lane is said twice"),
        ("host 5 GB at 2 GB/s shared by 0", "S146", "ranks that share the lanes"),
        ("host 5 GB at 2 GB/s shared of 8", "S146", "ranks that share the lanes"),
        ("host 5 at 2 shared 8", "S146", "ranks that share the lanes"),
        ("host 5 at 2 shred by 8", "S144", "`shred`"),
        ("host 5 GB shared by 8", "S146", "host memory without the speeds of its lanes"),
        ("host 0 at 2", "S146", "host memory, or a speed of its lanes, that is not above 0"),
        (
            "memory 4   host 5 GB at 2 GB/s",
            "S146",
            "the host's memory has a unit",
        ),
        ("host 5 at 1   offload auto", "S155", "`offload auto` without a memory"),
        ("memory 8 host 9 at 1 offload auto  offload all", "S155", "`offload auto` beside another line"),
        ("host 5 at 1   offload keep 2", "S155", "an offload without a part of the model"),
        ("host 5 at 1   offload stage", "S001", ""),
        ("host 5 at 1   offload all of", "S155", "an offload that cannot be read"),
        ("host 5 at 1   offload all of expert", "S144", "`expert` is no role"),
        ("host 5 at 1   offload all of dense, dense", "S155", "`dense` is said twice"),
        ("host 5 at 1   offload all, dense", "S155", "an offload that cannot be read"),
        ("host 5 at 1   offload auto of dense", "S155", "an offload that cannot be read"),
        ("host 5 at 1   offload stage 0 of experts", "S155", "no layer has the role experts on what `offload stage`"),
        (
            "host 5 at 1   experts 8 top 2   offload all of shared",
            "S155",
            "stage 0 has layers whose sizes are not known",
        ),
        ("host 5 at 1   offload stage 4", "S155", "there is no stage 4"),
        ("host 5 at 1   offload stage 1   offload stage [0, 1]", "S155", "two lines for the same stage"),
        ("host 5 at 1   offload stage 3", "S155", "stage 3 reads its forward's activations at once"),
        ("host 7 at 1   offload all", "S155", "rank 0 has 8 on the host in front of 0B0, and the plan says 7"),
        ("memory 1   host 5 at 1   offload auto", "S406", "rank 0 holds 2 at 0F0, and the plan allows 1"),
    ],
)
def test_what_is_wrong_is_said_at_its_place(tmp_path: Path, body: str, code: str, message: str) -> None:
    with pytest.raises(DiagnosticError) as error:
        compile(plan(tmp_path, body))
    finding = error.value.diagnostics[0]
    assert finding.code == code
    assert message in finding.message
    assert finding.primary.span.line == 4


def test_a_cap_holds_in_every_cell_and_the_step_stays_as_short(tmp_path: Path) -> None:
    text = plan(tmp_path, "memory 4   host 100 at 2   offload auto", "1f1b(P = 8, M = 32)")
    analysis = analyse(text, {})
    assert analysis.memory.peak_memory.max() <= 4
    facts = to_json(analysis)["offload"]
    assert facts["makespan_over_uncapped"] <= 1.01
    assert facts["moved"] > 0
    assert [row["lane"] for row in facts["lanes"][:2]] == ["d2h", "h2d"]
    program = compile(text)
    assert verify_program(program) == []
    assert write_plan(program.plan) == "host 100 at 2  offload auto"
    assert plan_of(program).host == Host(100.0, 2.0, 2.0, False)
    moved = program.works.kind == WorkKind.OFFLOAD
    assert facts["moved"] == moved.sum()
    assert np.array_equal(np.bincount(program.works.kind), [moved.sum(), moved.sum()])


def test_lanes_that_ranks_share_have_their_part_of_the_speed(tmp_path: Path) -> None:
    lines = "memory 4   host 100 at {}   offload auto"
    alone, shared = (analyse(plan(tmp_path, lines.format(x)), {}) for x in ("0.5", "2 shared by 4"))
    facts = to_json(alone), to_json(shared)
    assert facts[0]["offload"] == facts[1]["offload"]
    assert facts[0]["makespan"] == facts[1]["makespan"]
    assert compile(plan(tmp_path, lines.format("2 shared by 4"))).plan.host == Host(100.0, 2.0, 2.0, False, 4)


def test_the_two_newest_stay(tmp_path: Path) -> None:
    analysis = analyse(plan(tmp_path, "host 100 at 1000   offload stage 0 keep 1"), {})
    assert analysis.memory.peak_activations.tolist() == [3, 3, 2, 1]
    text = to_text(to_json(analysis), every_rank=True)
    assert "offload: 5 activations move to the host and back; the step is 0.00% longer than without" in text
    assert "the claims below speak of the schedule alone, without what the plan adds" in text
    nothing = analyse(plan(tmp_path, "host 100 at 1   offload stage 0 keep 9"), {})
    assert "offload: nothing moves" in to_text(to_json(nothing), every_rank=True)


@pytest.mark.slow
def test_levels_and_offloads_are_chosen_together(tmp_path: Path) -> None:
    """Neither alone is shorter, and where the host is fast nothing is recomputed."""
    sizes = "experts 64 top 8 shared 1 width 512 hidden 1024   tokens 4096 dtype bf16   parameters moe 0 MB"
    lines = f"{sizes}   memory 1.9 GB   recompute auto   offload auto"
    for speed, recomputes in (("1 GB/s", True), ("4000 GB/s", False)):
        analysis = analyse(plan(tmp_path, f"{lines}   host 90 GB at {speed}"), {}, Costs(F=3.0, I=3.0, W=3.0))
        facts = to_json(analysis)
        assert analysis.memory.peak_memory.max() <= 1.9e9
        alone = facts["recompute_auto"]["alone"]
        assert facts["makespan_over_uncapped"] <= min(x for x in alone.values() if x is not None) * (1 + 1e-12)
        levels = plan_of(analysis.schedule).recompute
        assert any(level != Recompute() for level in levels) == recomputes
        assert "recompute auto with offload auto: makespan" in to_text(facts, every_rank=True)
        assert verify_program(compile(plan(tmp_path, f"{lines}   host 90 GB at {speed}"))) == []


def test_the_step_from_inside_has_the_moves(tmp_path: Path) -> None:
    """Cells of dense layers have no exchanges. Where cells send at their ends, the step equals the ops' step."""
    table = CellTable(CellCosts.of({"dense": SegmentTimes(1.0, 1.0, 1.0)}, {}))
    facts = to_json(analyse(plan(tmp_path, "host 100 at 0.2   offload all"), {}, Costs(cell=table)))
    spans = facts["cells"]["makespan"]
    assert spans["atomic"] == pytest.approx(facts["makespan"])
    assert facts["offload"]["makespan_uncapped"] < spans["inside"] < spans["atomic"]
    busy = {
        lane: sum(row["busy"] for row in facts["offload"]["lanes"] if row["lane"] == lane) for lane in ("d2h", "h2d")
    }
    assert {lane: use["busy"] for lane, use in facts["cells"]["works"].items()} == pytest.approx(busy)
    assert facts["cells"]["works"]["d2h"]["exposed"] > 0
    assert "d2h, beside the cells: busy" in to_text(facts, every_rank=True)


def test_a_part_of_what_a_stage_holds_leaves(tmp_path: Path) -> None:
    """A MoE layer without recomputation holds 2 (k H + 3 k F) bytes for experts, and 6 s F for shared ones."""
    k, s, H, F, E, T = 2, 1, 64, 32, 8, 100
    sizes = f"experts {E} top {k} shared {s} width {F} hidden {H}   tokens {T} dtype bf16   parameters moe 0 MB"
    lines = f"{sizes}   memory 1 GB   host 1 GB at 1 GB/s"
    layer = 2 * (8 * H + 3 * s * F + k * H + 3 * k * F) + 4 * E
    for roles, size in (("experts", 2 * k * (H + 3 * F)), ("shared", 6 * s * F), ("attention", 16 * H + 4 * E)):
        text = plan(tmp_path, f"{lines}   offload stage 0 of {roles} keep 1")
        program, facts = compile(text), analyse(text, {})
        assert program.works.bytes.tolist() == pytest.approx([2 * T * size] * len(program.works))
        assert len(program.works) == 2 * 5
        assert facts.memory.peak_activations[0] == 4
        assert facts.memory.peak_memory[0] == pytest.approx(2 * T * (4 * layer - size))
        assert verify_program(program) == []
        recomputed = plan(tmp_path, f"{lines}   recompute act   offload stage 0 of {roles} keep 1")
        less = {"experts": 2 * k * F, "shared": 2 * s * F, "attention": 4 * H}[roles]
        assert compile(recomputed).works.bytes[0] == pytest.approx(2 * T * (size - less))
    together = plan(tmp_path, f"{lines}   offload stage 0 of experts, shared, attention keep 1")
    assert compile(together).works.bytes[0] == pytest.approx(2 * T * layer)


def test_roles_of_a_stage_with_rs_are_not_known(tmp_path: Path) -> None:
    sizes = "experts 8 top 2 width 32 hidden 64   tokens 100 dtype bf16   parameters moe 0 MB   memory 1 GB"
    text = plan(tmp_path, f"{sizes}   recompute full in bubbles   host 1 GB at 1 GB/s   offload stage 0 of experts")
    with pytest.raises(DiagnosticError, match="stage 0 has Rs: how much its roles hold is not known"):
        compile(text)
