"""The sections of `make gpu`: their code runs on a CPU, at small sizes, and tells why the rest is not measured."""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from schedc.source import Source
from schedc.step.costs.costs import parse_costs
from support.paths import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import gpu.runahead as runahead
from gpu.bags import in_order
from gpu.claims import Bound, Claim, judgement
from gpu.copy_engine import lanes_of
from gpu.page import with_results, written
from gpu.parts import PARTS, claims_of, part_of, run_section, sections
from gpu.setting import Setting, setting_of

from support.sweeps import in_sweeps

CPU = torch.device("cpu")
HERE = [*PARTS["fast"], "parity", "bags", "sync_debug", "deepep"]
"""The sections that need no process of their own. Other tests run the rest."""
TOLD_BY_A_CPU = {"bags", "capture", "graphs", "offload", "parity", "sync_debug"}
"""Those of them of which a CPU tells a claim: bits and counts."""


@in_sweeps(
    "test_a_section_that_fails_or_has_no_memory_leaves_the_others_running",
    "runtime/measure/test_gpu_parts.py::test_the_workflow_runs_the_command",
)
@pytest.mark.slow
def test_sections_run_on_a_cpu() -> None:
    threads = torch.get_num_threads()
    results: dict[str, Any] = {}
    for name in HERE:
        results |= run_section(name, CPU, 1)
    assert torch.get_num_threads() == threads
    judged = [(name, claim) for name in HERE for claim in results[name]["claims"]]
    assert {name for name, claim in judged if claim["met"]} == TOLD_BY_A_CPU
    assert [claim for name, claim in judged if claim["met"] is False] == []
    assert {claim["how"] for _, claim in judged if claim["met"]} == {"simulated"}
    assert all(claim["how"].startswith("not measured: ") for _, claim in judged if claim["met"] is None)
    assert results["products"]["useful_throughput"] > 0
    tables = "\n".join(['schema = "schedc.costs/1"', *results["products"]["kernels"]])
    assert parse_costs(Source("costs.toml", tables)).kernels[0].shape == (4, 64, 32, "float32", False)
    assert results["fp8"]["over_grouped"]["scaled_grouped"].startswith("not measured: float32 on cpu")
    assert results["fp8"]["error"]["quantized"] < 0.1
    assert results["recompute"]["light"]["memory"] < 0.9
    assert results["loss"]["early"]["peak"] < 0.3
    assert results["fusion"]["block"]["chains"] == {"rope": 2, "gated": 1, "dropout_add": 2, "gqa": 1}
    assert results["offload"]["bytes_per_activation"] > 0
    assert results["swap"]["swapped"]["bytes_moved"] > results["swap"]["kept"]["bytes_moved"] == 0
    assert results["routes"]["ms_64_ranks"] == "not measured: a CPU captures no graph of launches"
    reasons = {"runahead": "profiler", "copy_engine": "no copy engine", "deepep": "deep_ep is not installed"}
    assert all(reason in results[name]["result"] for name, reason in reasons.items())
    assert results["symmetric"]["result"].endswith("cpu has no symmetric memory; the fallback's rows are in order")


def test_slowdowns_by_copy_engines_are_lanes_of_a_cost_file() -> None:
    lines = lanes_of({"d2h": {"product": 1.0123}, "h2d": {"product": 0.998}})
    lanes = parse_costs(Source("costs.toml", "\n".join(['schema = "schedc.costs/1"', *lines]))).lanes
    assert [(lane.lane, lane.engine, lane.slowdown) for lane in lanes] == [
        ("d2h", "copy", 0.0123),
        ("h2d", "copy", 0.0),
    ]
    assert lanes_of({"d2h": {"product": 1.0}, "h2d": {"product": "not measured: x"}}) == "not measured: x"


def test_claims_are_met_not_met_or_not_measured() -> None:
    claim = Claim("light", "toy", (Bound("a.light.memory", "<=", 0.88), Bound("a.bits", "==", True)))
    entries: dict[str, Any] = {"a": {"light": {"memory": 0.8}, "bits": True}}
    demanded = ["`a.light.memory` <= 0.88", "`a.bits` true"]
    told = {"claim": "light", "condition": "toy", "must": False, "demanded": demanded}
    figures = {"a.light.memory": 0.8, "a.bits": True}
    met = {"measured": figures, "met": True}
    assert judgement(claim, "a", entries, True) == told | met | {"how": "measured"}
    assert judgement(claim, "a", {"a": {"light": {"memory": 0.8}, "bits": False}}, True)["met"] is False
    assert judgement(claim, "a", {"a": {"light": {"memory": 0.9}, "bits": True}}, True)["met"] is False
    unknown = told | {"measured": None, "met": None}
    reason = "not measured: a CPU cannot tell, and the sizes are toys"
    assert judgement(claim, "a", entries, False) == unknown | {"why": reason, "how": reason}
    assert judgement(claim._replace(on_cpu=True), "a", entries, False) == told | met | {"how": "simulated"}
    of_section = {"a": {"result": "not measured: no device"}}
    why = "not measured: no device"
    assert judgement(claim, "a", of_section, True) == unknown | {"why": why, "how": why}
    lacking = {"a": {"light": "not measured: none", "bits": True}}
    assert judgement(claim, "a", lacking, True)["why"] == "not measured: none"
    without = judgement(claim, "a", {"a": {"bits": True}}, True)
    assert without["why"] == "not measured: the section has no `a.light.memory`"


@pytest.mark.slow
def test_a_section_that_fails_or_has_no_memory_leaves_the_others_running(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_small(setting: Setting) -> dict[str, Any]:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except torch.OutOfMemoryError as error:
            raise ValueError("F 0 0 on rank 0 failed") from error

    monkeypatch.setattr("gpu.bags.measure", too_small)
    (entries,) = run_section("bags", CPU, 1).values()
    assert entries["claims"][0]["why"] == (
        "not measured: the memory of the device is too small: F 0 0 on rank 0 failed"
    )
    monkeypatch.setattr("gpu.bags.measure", lambda setting: {}["nothing"])
    assert run_section("bags", CPU, 1)["bags"]["result"] == "failed: KeyError: 'nothing'"


def test_the_page_has_every_claim_and_takes_results() -> None:
    claims = {name: claims_of(name) for name in sections()}
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    for section, each in claims.items():
        for claim in each:
            told = f"{claim.text} | {claim.condition} | {', '.join(map(str, claim.bounds))}"
            assert f"| {part_of(section)} | `{section}` | {told} | " in page
    figures = {"bags.time": 1.0123, "bags.bits": True}
    judged: list[dict[str, Any]] = [
        {"met": False, "measured": figures, "how": "measured"}, {"met": None, "why": "not measured: a | b"},
    ]  # fmt: skip
    claim = Claim("fast", "always", (Bound("bags.time", "<=", 1.0),))
    results = {"date": "2026-01-02", "device": "H100", "torch": "2", "bags": {"claims": judged}}
    text = with_results(page, {"bags": (claim, claim), "kill": (claim,)}, results)
    row = "`bags` | fast | always | `bags.time` <= 1 |"
    assert f"| right | {row} measured: not met: 1.012, true |\n| right | {row} not measured: a / b |\n" in text
    assert "| many | `kill` | fast | always | `bags.time` <= 1 | none |" in text
    assert "Last result: 2026-01-02, H100, torch 2.\n" in text
    whole = written({"bags": (claim, claim)}, results | {"fault": "no wait"})
    assert "* `right`: 0 met, 1 not met, 1 not measured, not run: parity, families, device_tests" in whole
    assert "torch 2, with a planted fault: no wait." in whole
    assert with_results(text, claims, None) == with_results(page, claims, None)
    assert text.endswith(page.partition("<!-- end of the results -->")[2])


def test_a_launch_that_comes_when_the_device_is_idle_is_a_stall() -> None:
    ran = [(0, 10, -5), (10, 30, 2), (31, 40, 29), (50, 60, 45), (60, 70, 61), (80, 90, 69)]
    kernels = [runahead.Kernel(str(number), *times) for number, times in enumerate(ran)]
    assert [kernel.name for kernel in runahead.stalls(kernels)] == ["3", "4"]
    summary = runahead.summary(kernels)
    assert (summary["stalls"], summary["launches"], summary["idle_ms"]) == (2, 6, 10 / 1e6)
    assert runahead.summary([])["stalls"] == 0


def test_bags_that_add_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    setting: Setting = setting_of(CPU, 1)
    assert in_order(setting, torch.float32, 33)
    monkeypatch.setattr("gpu.bags.added", lambda summands, at, counts: reversed_sums(summands, at, counts))
    assert not in_order(setting, torch.float32, 33)


def reversed_sums(summands: torch.Tensor, at: torch.Tensor, counts: list[int]) -> torch.Tensor:
    sums = summands.new_zeros(len(counts), summands.shape[1])
    for bag, entries in enumerate(at.split(counts)):
        for entry in entries.flip(0):
            sums[bag] += summands[entry]
    return sums
