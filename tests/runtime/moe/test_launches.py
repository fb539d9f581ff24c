"""How many operations a MoE layer launches, by the instrument of `benchmarks/device.py launches`."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

FILE = Path(__file__).parents[3] / "benchmarks" / "device_launches.py"


def instrument() -> ModuleType:
    spec = importlib.util.spec_from_file_location("device_launches", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_layer_with_a_capacity_keeps_within_its_launches() -> None:
    launches = instrument()
    for name, router in launches.ROUTERS.items():
        forward, backward = launches.of_layer(launches.SIZES["capacity"], router)
        assert 30 < forward + backward <= launches.LAYER[name]
