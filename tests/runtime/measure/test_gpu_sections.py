"""The sections of `make gpu`: their code runs on a CPU, at small sizes, and tells why it leaves out the rest."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))

import gpu.runahead as runahead
from gpu.bags import in_order
from gpu.setting import Setting, setting_of

CPU = torch.device("cpu")


@pytest.mark.slow
def test_every_section_runs_on_a_cpu() -> None:
    # `benchmarks/gpu.py` is a command beside the package of the same name.
    namespace: dict[str, Any] = {"__name__": "command"}
    exec((Path(__file__).parents[3] / "benchmarks" / "gpu.py").read_text(encoding="utf-8"), namespace)
    results: dict[str, Any] = {}
    for name in namespace["SECTIONS"]:
        results |= namespace["section"](name, CPU, 1)
    assert results["products"]["useful_throughput"] > 0
    assert results["fp8"]["not"]["scaled_grouped"].startswith("float32 on cpu")
    assert results["fp8"]["error"]["quantized"] < 0.1
    assert results["recompute"]["light"]["memory"] < 0.9
    assert results["bags_in_order"] is True
    assert "captures no graph" in results["routes"]["ms_64_ranks"]["skipped"]
    assert "debug mode" in results["sync_debug"]["skipped"]
    assert "profiler" in results["runahead"]["skipped"]
    assert results["graphs"]["same_bits"] is True
    assert results["symmetric"]["skipped"] == "cpu has no symmetric memory; the fallback's rows are in order"
    assert results["parity"]["bitwise"] is True


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
