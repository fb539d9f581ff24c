"""The sections of benchmarks/planner.py on small inputs: their figures are there, and belong to what is measured."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

from schedc.planner.presets.library import open_cluster, open_model
from schedc.planner.space.conditions import read_condition
from schedc.planner.space.space import PlanSpace

FILE = Path(__file__).parents[4] / "benchmarks" / "planner.py"


def benchmark() -> ModuleType:
    sys.path.insert(0, str(FILE.parent))  # for what benchmarks share
    spec = importlib.util.spec_from_file_location("planner_benchmark", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_bounds_are_counted_per_second() -> None:
    required = [read_condition(text) for text in ("pp == 4", "tp == 1")]
    space = PlanSpace.of(open_model("qwen3-30b-a3b"), open_cluster("h100", 16), 64, 4096, "standard", required)
    row = benchmark().bounds_of(space)
    assert row["bounded"] == sum(len(block) for block in space.blocks())
    assert row["raw"] == space.raw > row["bounded"] > row["fit"] > 0
    assert row["legal_plans_per_s"] == row["bounded"] / row["seconds"]


@pytest.mark.slow
def test_simulations_are_counted_and_orders_differ(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = benchmark()
    monkeypatch.setattr(module, "sizes_of_orders", lambda: [(name, {"P": 4, "M": 8}) for name in ("1f1b", "vhalf")])
    arguments = ["planner.py", "--json", "--only", "simulations", "--orders", "2", "--simulations", "10"]
    monkeypatch.setattr(sys, "argv", arguments)
    module.main()
    facts = json.loads(capsys.readouterr().out)
    assert facts["simulations"]["orders"] == facts["simulations"]["distinct_orders"] == 2
    spent = sum(facts["simulations"][f"{part}_s"] for part in ("elaboration", "dependencies", "simulations"))
    assert facts["million_simulations_s"] == pytest.approx(spent * 1e5)
