"""The sections of `make gpu`: their code runs on a CPU, at small sizes, and tells why the rest is not measured."""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path
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
from gpu.page import with_results
from gpu.setting import Setting, setting_of

CPU = torch.device("cpu")
TOLD_BY_A_CPU = {"bags", "graphs", "offload", "parity"}
"""The sections of which a CPU tells a claim: bits."""


@pytest.fixture(scope="module")
def command() -> dict[str, Any]:
    """What `benchmarks/gpu.py` defines: a command beside the package of the same name."""
    namespace: dict[str, Any] = {"__name__": "command"}
    exec((ROOT / "benchmarks" / "gpu.py").read_text(encoding="utf-8"), namespace)
    return namespace


@pytest.fixture(scope="module")
def claims(command: dict[str, Any]) -> dict[str, tuple[Claim, ...]]:
    return {name: import_module(module).CLAIMS for name, module in command["SECTIONS"].items()}


@pytest.mark.slow
def test_every_section_runs_on_a_cpu(
    command: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, page = tmp_path / "made" / "gpu.json", tmp_path / "gpu.md"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--smoke", "--out", str(out), "--page", str(page)])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)
    with pytest.raises(SystemExit) as status:
        command["main"]()
    assert status.value.code == 0
    assert not page.exists()  # a run on a CPU is no result
    results = json.loads(out.read_text(encoding="utf-8"))
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [next(iter(line.keys() & results.keys() & command["SECTIONS"].keys())) for line in lines] == list(
        command["SECTIONS"]
    )
    judged = [(name, claim) for name in command["SECTIONS"] for claim in results[name]["claims"]]
    assert {name for name, claim in judged if claim["met"]} == TOLD_BY_A_CPU
    assert [claim for name, claim in judged if claim["met"] is False] == []
    assert all(claim["why"].startswith("not measured: ") for _, claim in judged if claim["met"] is None)
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
    reasons = {"sync_debug": "debug mode", "runahead": "profiler", "copy_engine": "no copy engine"}
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
    told = {"claim": "light", "condition": "toy", "demanded": ["`a.light.memory` <= 0.88", "`a.bits` true"]}
    figures = {"a.light.memory": 0.8, "a.bits": True}
    assert judgement(claim, "a", entries, True) == told | {"measured": figures, "met": True}
    assert judgement(claim, "a", {"a": {"light": {"memory": 0.8}, "bits": False}}, True)["met"] is False
    assert judgement(claim, "a", {"a": {"light": {"memory": 0.9}, "bits": True}}, True)["met"] is False
    unknown = told | {"measured": None, "met": None}
    reason = "not measured: a CPU cannot tell, and the sizes are toys"
    assert judgement(claim, "a", entries, False) == unknown | {"why": reason}
    assert judgement(claim._replace(on_cpu=True), "a", entries, False)["met"] is True
    of_section = {"a": {"result": "not measured: no device"}}
    assert judgement(claim, "a", of_section, True) == unknown | {"why": "not measured: no device"}
    lacking = {"a": {"light": "not measured: none", "bits": True}}
    assert judgement(claim, "a", lacking, True)["why"] == "not measured: none"
    without = judgement(claim, "a", {"a": {"bits": True}}, True)
    assert without["why"] == "not measured: the section has no `a.light.memory`"


def test_a_section_that_fails_or_has_no_memory_leaves_the_others_running(
    command: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_small(setting: Setting) -> dict[str, Any]:
        try:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        except torch.OutOfMemoryError as error:
            raise ValueError("F 0 0 on rank 0 failed") from error

    monkeypatch.setattr("gpu.bags.measure", too_small)
    (entries,) = command["section"]("bags", CPU, 1).values()
    assert entries["claims"][0]["why"] == (
        "not measured: the memory of the device is too small: F 0 0 on rank 0 failed"
    )
    monkeypatch.setattr("gpu.bags.measure", lambda setting: {}["nothing"])
    assert command["section"]("bags", CPU, 1)["bags"]["result"] == "failed: KeyError: 'nothing'"
    assert "--smoke" in command["section"]("bags", None, 1)["bags"]["result"]


def test_the_page_has_every_claim_and_takes_results(claims: dict[str, tuple[Claim, ...]]) -> None:
    page = (ROOT / "docs" / "gpu.md").read_text(encoding="utf-8")
    for section, each in claims.items():
        for claim in each:
            assert f"| `{section}` | {claim.text} | {claim.condition} | {', '.join(map(str, claim.bounds))} | " in page
    figures = {"a.time": 1.0123, "a.bits": True}
    judged: list[dict[str, Any]] = [{"met": False, "measured": figures}, {"met": None, "why": "not measured: a | b"}]
    claim = Claim("fast", "always", (Bound("a.time", "<=", 1.0),))
    results = {"date": "2026-01-02", "device": "H100", "torch": "2", "a": {"claims": judged}}
    text = with_results(page, {"a": (claim, claim)}, results)
    row = "| `a` | fast | always | `a.time` <= 1 |"
    assert f"{row} not met: 1.012, true |\n{row} not measured: a / b |\n" in text
    assert "Last result: 2026-01-02, H100, torch 2.\n" in text
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
