"""What a MoE layer asks the host for, by the instrument of benchmarks/host_asks.py."""

from __future__ import annotations

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest
import torch

from schedc.ir.plan import Balance, Method, Plan
from schedc.step.costs.kernels import KernelBucket, KernelFamily
from schedc_runtime.moe.counts import METHODS
from schedc_runtime.moe.kernels import MeasuredProducts, _say_once
from schedc_runtime.moe.products import PROVIDERS
from support.sweeps import swept

FILE = Path(__file__).parents[3] / "benchmarks" / "host_asks.py"

pytestmark = pytest.mark.usefixtures("watched")


def instrument() -> ModuleType:
    spec = importlib.util.spec_from_file_location("host_asks", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_a_layer_asks_once_and_not_at_all_with_constant_sizes() -> None:
    host_asks = instrument()
    for method in METHODS:
        for mode in ("exact", "adaptive", "host_lane"):
            assert host_asks.asks(method, mode) == (1, 0)
        for mode in ("padded", "bounded"):
            assert host_asks.asks(method, mode) == (0, 0)
            host_asks.run(host_asks.layer_of(method, mode, "meta"), "meta")


@pytest.mark.slow
@pytest.mark.sweep
def test_copies_of_a_step_ask_once_and_not_at_all_in_buffers_of_one_size() -> None:
    host_asks, balance, held = instrument(), Balance(by="step", over="group"), [[], [0, 1]]
    if swept(True, False):
        assert host_asks.with_copies(Plan(balance=balance), held) == (1, 0)
        assert host_asks.with_copies(Plan(balance=balance, bound=4.0), held) == (0, 0)
    two_hops = Plan(method=Method.HIERARCHICAL, balance=Balance(by="step"), bound=4.0)
    assert host_asks.with_copies(two_hops, held) == (0, 0)


def test_a_measured_choice_asks_nothing_more() -> None:
    """Rows padded on the device, in forward and backward, and buffers whose rows only the device knows."""
    host_asks = instrument()
    families = [KernelFamily(8, 16, 12, "float32", x, (KernelBucket(1, 99, "padded"),)) for x in (False, True)]
    for mode, expected in (("exact", 1), ("bounded", 0), ("padded", 0)):
        layer = host_asks.layer_of("flat", mode)
        layer.experts.measured = MeasuredProducts(tuple(families))
        with warnings.catch_warnings():  # the layer then says it no more
            warnings.simplefilter("ignore")
            _say_once("padded", PROVIDERS["padded"].why_not(layer.experts.case(counted=False)))
        with host_asks.counting() as counted:
            host_asks.run(layer)
        assert sum(counted.asks.values()) == expected
        assert counted.uploads == 0


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
