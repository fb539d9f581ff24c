"""How many operations a MoE layer and its block launch, by the instrument of `benchmarks/device.py launches`."""

from __future__ import annotations

import importlib.util
from itertools import product
from pathlib import Path
from types import ModuleType

import pytest

FILE = Path(__file__).parents[3] / "benchmarks" / "device_launches.py"


def instrument() -> ModuleType:
    spec = importlib.util.spec_from_file_location("device_launches", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_layer_keeps_within_its_launches() -> None:
    launches = instrument()
    for sizes, (name, router) in product(launches.SIZES, launches.ROUTERS.items()):
        forward, backward = launches.of_layer(launches.SIZES[sizes], router)
        assert 30 < forward + backward <= launches.LAYER[name], (sizes, name)


@pytest.mark.slow
def test_a_block_with_a_capacity_keeps_within_its_launches() -> None:
    """The router with the most of them. What attention launches on a GPU behind one operation is counted."""
    launches = instrument()
    block = launches.of_block(launches.SIZES["capacity"] + launches.FUSED, launches.ROUTERS["balanced"])
    row = block.row("block fused", "capacity", "balanced")
    assert 80 < row["launches"] <= launches.BLOCK["balanced"]
    assert not block.uploads
    counted = {launch.name: number for launch, number in block.seen.items()}
    assert counted["_scaled_dot_product_flash_attention_for_cpu_backward"] == 3
