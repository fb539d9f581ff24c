"""Operations follow the rules of a device: right programs keep their bits, and faults that a CPU hides are found."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

import schedc
from schedc.ir.json import program_to_json
from schedc_runtime.commands.run import main
from schedc_runtime.device.choice import device_for
from schedc_runtime.device.order import OrderFault
from schedc_runtime.device.rule_calls import DeviceFault
from schedc_runtime.device.rules import RULES
from schedc_runtime.testing import simulated_device
from support.rule_cases import NOT_A_CPU, SAME, RuleCase, changed, gradients_of, under
from support.rule_faults import FAULTS, RuleFault, blocks_that_grow, missed, waits_for_pageable
from support.sweeps import halved

pytestmark = pytest.mark.slow

QUICK = ("bounded", "chunked loss in 16 bits", "offload and snapshots")
"""Runs that meet different rules. `benchmarks/device.py rules` has all."""


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_rule_finds_its_fault_and_nothing_else(fault: RuleFault) -> None:
    assert missed([fault]) == []


def test_every_rule_of_operations_has_a_fault() -> None:
    assert {fault.rule for fault in FAULTS} == {rule.name for rule in RULES if rule.apply is not None}


@pytest.mark.sweep
@pytest.mark.parametrize("case", halved([case for case in SAME if case.name in QUICK]), ids=lambda case: case.name)
def test_a_step_keeps_its_bits(case: RuleCase) -> None:
    wrong, _ = changed(case)
    assert wrong == []


def test_what_is_not_the_bits_of_a_cpu_is_that_of_the_serial_reference() -> None:
    differing, met = under(partial(gradients_of, "zbh1", torch.bfloat16, compared=True), NOT_A_CPU)
    assert list(differing) == []
    assert min(met.values()) > 0


def test_pinned_memory_is_made_once() -> None:
    assert blocks_that_grow() == []


def test_pageable_memory_keeps_the_bits() -> None:
    wrong, met = waits_for_pageable()
    assert wrong == []
    assert met["pageable"] > 10


def test_a_rule_that_nothing_meets_fails() -> None:
    with pytest.raises(OrderFault, match="no operation met the rule bags"), simulated_device(rules=["bags", "fresh"]):
        torch.empty(3)
    with pytest.raises(OrderFault, match="pageable"), simulated_device(rules="pageable"):
        assert device_for(torch.device("cpu")).supports("pinned memory") == "there is no pinned memory"
    with pytest.raises(ValueError, match="possible: every, ranges"), simulated_device(rules="wings"):
        pass


def test_what_a_device_refuses_is_refused_by_file_and_line() -> None:
    rows, index = torch.ones(3, 2), torch.tensor([0, 3])
    with pytest.raises(DeviceFault, match=r"index_select at test_rules.py:\d+: index 3 of 3") as fault:  # noqa: SIM117
        with simulated_device(rules="ranges"):
            rows.index_select(0, index)
    assert fault.value.place.startswith("test_rules.py:")
    assert "remedy: cut or clamp" in str(fault.value)
    with pytest.raises(DeviceFault, match="does not fit into torch"), simulated_device(rules="whole"):
        torch.tensor([30_000], dtype=torch.int16).add_(30_000)
    with pytest.raises(DeviceFault, match="a bag ends before it begins"), simulated_device(rules="bags"):
        torch.nn.functional.embedding_bag(torch.tensor([0, 1]), rows, torch.tensor([0, 2, 1]), mode="sum")


def test_entries_are_turned_in_every_form() -> None:
    """The first duplicate stays, in each operation that writes by an index."""
    index, values = torch.tensor([1, 1, 0]), torch.tensor([1.0, 2.0, 3.0])
    with simulated_device(rules=("duplicates", "sums")):
        assert torch.zeros(2).scatter(0, index, values).tolist() == [3, 1]
        assert torch.zeros(2).index_copy(0, index, values).tolist() == [3, 1]
        assert torch.zeros(2).index_put((index,), values).tolist() == [3, 1]
        assert torch.zeros(2, 2).index_put((index, index), values).diagonal().tolist() == [3, 1]
        assert torch.zeros(2).index_put((index,), values, accumulate=True).tolist() == [3, 3]
        wide = torch.zeros(1).index_add(0, torch.zeros(3, dtype=torch.int64), torch.tensor([2.0**24, 1.0, 1.0]))
        assert torch.zeros(2).scatter(0, index, 4.0).tolist() == [4, 4]
    assert wide.item() == 2**24 + 2  # in the order of the entries both ones are lost


@pytest.fixture
def tf32() -> Iterator[None]:
    """Products may round their operands."""
    matmul = torch.backends.cuda.matmul
    before, matmul.allow_tf32 = matmul.allow_tf32, True
    yield
    matmul.allow_tf32 = before


@pytest.mark.usefixtures("tf32")
def test_the_check_of_bits_lets_no_product_be_rounded(tmp_path: Path) -> None:
    path = tmp_path / "program.json"
    path.write_text(program_to_json(schedc.compile("1f1b", P=1, M=1)))
    options = ["--program", str(path), "--in-process", "--steps", "1", "--rows", "1"]
    with simulated_device(rules="narrow"):
        assert main(options) == 0
    with pytest.raises(OrderFault, match="no operation met the rule narrow"), simulated_device(rules="narrow"):
        assert main([*options, "--check", "bitwise"]) == 0
    assert torch.backends.cuda.matmul.allow_tf32
