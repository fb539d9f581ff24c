"""The doctor: what it says of ranks that do not fit together, and of a real job."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import schedc
from schedc.cli import main
from schedc.ir.parallel import Parallel
from schedc.ir.plan import Plan, Topology
from schedc_runtime.commands.doctor import DoctorCheck, MeasuredLink, NeededMesh, RankFacts, checks
from support.outputs import faults
from support.warm_command import run_python, run_torchrun

VERSIONS = {"schedc": "0.1.0", "torch": "2.13.0"}
HEALTHY = [RankFacts(f"node{rank // 2}", rank % 2, VERSIONS, "cpu", "ab12", NeededMesh(2)) for rank in range(4)]
LINKS = [MeasuredLink(0, 1e-5, 4e9), MeasuredLink(1, 3e-5, 1e9), MeasuredLink(2, 1e-5, 4.2e9)]


def answers(facts: list[RankFacts], links: list[MeasuredLink] = LINKS) -> dict[str, DoctorCheck]:
    return {each.what: each for each in checks(facts, links)}


def test_ranks_that_fit_together() -> None:
    found = answers(HEALTHY)
    assert all(each.right for each in found.values())
    assert {what: each.says for what, each in found.items()} == {
        "versions": "schedc 0.1.0, torch 2.13.0",
        "device": "cpu",
        "program": "ab12",
        "mesh": "2 pipeline ranks x 2 replicas",
        "order": "2 nodes of 2 ranks in a row",
        "links": "4.1 GB/s, 10 us inside nodes; 1 GB/s, 30 us between nodes",
    }
    assert list(answers(HEALTHY[:1], [])) == ["versions", "device", "program", "mesh"]


@pytest.mark.parametrize(
    ("rank", "change", "what", "said"),
    [
        (2, {"versions": VERSIONS | {"torch": "2.12.1"}}, "versions", "torch 2.13.0 but rank 2 has 2.12.1"),
        (3, {"device": "H200"}, "device", "cpu but rank 3 has H200"),
        (1, {"program": "cd34"}, "program", "ab12 but rank 1 has cd34"),
        (1, {"program": ""}, "program", "rank 1 has no program"),
        (1, {"host": "node1"}, "order", "nodes have 1 to 3 ranks"),
        (0, {"needs": NeededMesh(3)}, "mesh", "4 processes; 3 pipeline ranks take a multiple of 3"),
        (0, {"needs": NeededMesh(2, 1, True, 1, "tp 1")}, "mesh", "4 processes; 2 pipeline ranks x tp 1 take 2"),
        (0, {"needs": NeededMesh(2, 2, True, 4)}, "order", "nodes have 2 ranks, and the plan is for 4 in each"),
    ],
)  # fmt: skip
def test_a_rank_that_does_not_fit_is_named(rank: int, change: dict[str, object], what: str, said: str) -> None:
    facts = [each._replace(**change) if number == rank else each for number, each in enumerate(HEALTHY)]  # type: ignore[arg-type]
    links = [each._replace(speed=1e9) for each in LINKS]
    wrong = [each for each in answers(facts, links).values() if not each.right]
    assert [each.what for each in wrong] == [what]
    assert said in wrong[0].says


def test_what_a_plan_needs_of_a_job() -> None:
    plan = Plan(parallel=Parallel(tp=2, of="attention", cp=2, ep=4, dp=1, devices=8, node=8))
    program = schedc.compile("1f1b", P=2, M=2)
    assert NeededMesh.of(program) == NeededMesh(2)
    assert NeededMesh.of(replace(program, plan=Plan(topology=Topology(2, 4)))) == NeededMesh(
        2, 8, False, 4, "8 expert ranks"
    )
    needs = NeededMesh.of(replace(program, plan=plan))
    assert needs == NeededMesh(2, 4, True, 8, "4 processes: tp 2, cp 2, ep 4, dp 1")
    facts = [HEALTHY[0]._replace(needs=needs)]
    assert answers(facts, [])["mesh"] == DoctorCheck(
        "mesh", True, "the program has 2 pipeline ranks x 4 processes: tp 2, cp 2, ep 4, dp 1; start 8 by torchrun"
    )
    assert answers(facts * 8, [])["mesh"].right
    assert [answers(facts * count, [])["mesh"].right for count in (2, 4, 6, 16)] == [False] * 4


def test_alternating_nodes_and_a_slow_link_are_named() -> None:
    crossed = answers([HEALTHY[rank] for rank in (0, 2, 1, 3)])["order"]
    assert (crossed.right, crossed.says.endswith("for rank 0, 1, 2")) == (False, True)
    slow = answers(HEALTHY, [LINKS[0]._replace(speed=1.5e9), *LINKS[1:]])["links"]
    assert (slow.right, slow.says.endswith("; 0 to 1 has 1.5 GB/s")) == (True, False)
    one = [HEALTHY[0]] * 4
    found = answers(one, [MeasuredLink(0, 1e-5, 4e9), MeasuredLink(1, 1e-5, 1e9), MeasuredLink(2, 1e-5, 4e9)])["links"]
    assert (found.right, found.says) == (False, "4 GB/s, 10 us inside nodes; 1 to 2 has 1 GB/s")


@pytest.mark.slow
@pytest.mark.processes
def test_a_job_is_told_what_its_links_take(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.chdir(tmp_path)
    main(["compile", "1f1b", "-D", "P=2", "-D", "M=4", "-o", "."], standalone_mode=False)
    asked = ["-m", "schedc_runtime.commands.doctor", "program.json", "--json"]
    result = run_torchrun(["--nproc-per-node", "2", *asked], tmp_path)
    assert result.returncode == 0, result.stderr
    facts = json.loads(result.stdout)
    assert faults(facts) == []
    assert [(each["what"], each["right"]) for each in facts["checks"]][2:] == [
        ("program", True), ("mesh", True), ("order", True), ("links", True)
    ]  # fmt: skip
    (link,) = facts["links"]
    assert link["latency"] > 0
    assert 1e6 < link["speed"] < 1e12
    (tmp_path / "other.json").write_text("{}")
    alone = run_python(["-m", "schedc_runtime.commands.doctor", "other.json"], tmp_path)
    assert alone.returncode == 1
    assert alone.stdout.startswith("WRONG  program: rank 0: ")
    assert "other.json" in alone.stdout
    assert len(alone.stdout.splitlines()) == 1
