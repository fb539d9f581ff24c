"""What a MoE layer asks the host for, by the instrument of benchmarks/host_asks.py."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from schedc_runtime.moe.layer import METHODS

FILE = Path(__file__).parents[3] / "benchmarks" / "host_asks.py"


def instrument() -> ModuleType:
    spec = importlib.util.spec_from_file_location("host_asks", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_layer_asks_once_and_not_at_all_with_constant_sizes() -> None:
    host_asks = instrument()
    for method in METHODS:
        for mode in ("exact", "adaptive", "host_lane"):
            assert host_asks.asks(method, mode) == (1, 0)
        for mode in ("padded", "bounded"):
            assert host_asks.asks(method, mode) == (0, 0)
            assert host_asks.on_meta(method, mode)


def test_the_instrument_sees_what_asks() -> None:
    host_asks = instrument()
    values, mask = torch.arange(4), torch.tensor([True, False, True, False])
    with host_asks.counting() as counted:
        values.tolist()
        int(values[0])
        values[mask]
        values.repeat_interleave(values)
        torch.tensor([1, 2])
    assert sum(counted.asks.values()) == 4
    assert counted.uploads == 1
    with pytest.raises((RuntimeError, NotImplementedError)):
        values.to("meta").tolist()
