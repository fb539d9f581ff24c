"""Measured products of experts: the choice by rows, who takes whose place, gradients, and tables of cost files."""

from __future__ import annotations

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from schedc.diagnostics import DiagnosticError
from schedc.ir.plan import Products
from schedc.source import Source
from schedc.step.costs.costs import Costs, dump_costs, parse_costs
from schedc.step.costs.kernels import KERNEL_PROVIDERS, KernelBucket, KernelFamily
from schedc_runtime.moe import kernels
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.kernels import MeasuredProducts, adding_alike
from schedc_runtime.moe.products import PROVIDERS, Case, RowGroups

CPU = torch.device("cpu")
CASE = Case(CPU, torch.float32, (24, 32, 16), False)
FAMILY = KernelFamily(
    3, 24, 16, "float32", False,
    (
        KernelBucket(1, 2, "loop", (("grouped", 0.2), ("loop", 0.1))),
        KernelBucket(3, 8, "padded", (("grouped", 0.3), ("loop", 0.2), ("padded", 0.1))),
        KernelBucket(20, 40, "grouped"),
    ),
)  # fmt: skip


def chosen(rows: int, case: Case = CASE, experts: int = 3, products: str = "auto") -> str:
    return MeasuredProducts((FAMILY,)).provider(Products(products), case, rows, experts).name


def test_rows_of_an_expert_choose_and_a_bucket_that_nobody_measured_takes_its_neighbour() -> None:
    by_rows = {0: "loop", 1: "loop", 6: "loop", 7: "padded", 24: "padded", 42: "padded", 43: "grouped", 900: "grouped"}
    assert {rows: chosen(rows) for rows in by_rows} == by_rows
    assert chosen(7, products="loop") == "loop"  # a plan that names one
    assert chosen(7, experts=2) == chosen(7, CASE._replace(dtype=torch.bfloat16)) == "grouped"  # as without a table


def test_who_is_not_there_is_replaced_by_the_next_that_was_measured_and_said_once() -> None:
    kernels._say_once.cache_clear()
    with pytest.warns(RuntimeWarning, match="name `padded`, and the next that was measured runs: only the device"):
        assert chosen(9, CASE._replace(counted=False)) == "loop"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert chosen(9, CASE._replace(counted=False)) == "loop"
    odd = replace(FAMILY, width=6, buckets=FAMILY.buckets[2:])
    narrow = CASE._replace(columns=(6, 32, 16))
    with pytest.warns(RuntimeWarning, match="name `grouped`.*6 columns of 4 bytes"):
        assert MeasuredProducts((odd,)).provider(Products(), narrow, 99, 3).name == "loop"


def results(experts: Experts, rows: Tensor, gates: Tensor, groups: RowGroups) -> list[Tensor]:
    experts = copy.deepcopy(experts)
    rows, gates = rows.clone().requires_grad_(), gates.clone().requires_grad_()
    output = experts(rows, groups, gates)
    output[: sum(groups.counts or ())].sin().sum().backward()
    grads = [x.grad for x in (rows, gates, experts.gate_up, experts.down)]
    assert all(grad is not None for grad in grads)
    return [output.detach(), *grads]  # type: ignore[list-item]


@pytest.mark.parametrize("name", ["grouped", "loop", "padded"])
@pytest.mark.parametrize("counts", [(3, 0, 5), (0, 0, 0), (1, 1, 30)])
def test_gradients_are_those_of_the_loop(name: str, counts: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    experts = Experts(3, 24, 16).double()
    for weight in experts.parameters():
        weight.data = weight.data.transpose(1, 2).contiguous().transpose(1, 2) if counts[1] else weight.data
    experts.products = Products(name, or_fallback=True)  # a CPU has no grouped products in float64
    rows, gates = torch.randn(sum(counts) + 2, 24).double(), torch.rand(sum(counts) + 2).double()
    groups = RowGroups(counts, torch.tensor(counts).cumsum(0, dtype=torch.int32))
    with torch.no_grad():  # rows behind the last belong to nobody
        assert PROVIDERS[name].multiply(rows.float(), experts.gate_up.float(), groups, experts.gate_up).shape[1] == 32
    rows, gates = rows[: sum(counts)], gates[: sum(counts)]
    measured = results(experts, rows, gates, groups)
    experts.products = Products("loop")
    for result, expected in zip(measured, results(experts, rows, gates, groups), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-13)


def test_a_layer_takes_the_choice_and_a_comparison_of_bits_takes_only_providers_with_the_bits_of_the_loop() -> None:
    experts = Experts(3, 24, 16)
    rows, gates, groups = torch.randn(15, 24), torch.rand(15), RowGroups((2, 9, 4))
    plain = results(experts, rows, gates, groups)
    experts.products = Products("padded")
    padded = results(experts, rows, gates, groups)
    experts.products, experts.measured = Products(), MeasuredProducts((FAMILY,))
    assert all(map(torch.equal, results(experts, rows, gates, groups), padded))
    experts.measured = MeasuredProducts(adding_alike((FAMILY,), CPU))
    assert all(map(torch.equal, results(experts, rows, gates, groups), plain))
    (alike,) = adding_alike((FAMILY,), CPU)
    assert [bucket.provider for bucket in alike.buckets] == ["loop", "loop", "grouped"]
    (on_gpu,) = adding_alike((FAMILY,), torch.device("cuda"))
    assert {bucket.provider for bucket in on_gpu.buckets} == {"loop"}


TABLE = """schema = "schedc.costs/1"
[[kernels]]
experts = 3
width = 24
inner = 16
dtype = "float32"
buckets = [
  {rows = [1, 2], provider = "loop", ms = {grouped = 0.2, loop = 0.1}},
  {rows = [3, 8], provider = "padded", ms = {grouped = 0.3, loop = 0.2, padded = 0.1}},
  {rows = [20, 40], provider = "grouped"},
]
"""


def costs_of(text: str) -> Costs:
    return parse_costs(Source("costs.toml", text))


def test_tables_of_a_cost_file_are_written_and_read() -> None:
    costs = costs_of(TABLE)
    assert costs.kernels == (FAMILY,)
    assert costs_of(dump_costs(costs)) == costs
    two = Costs(kernels=(FAMILY, replace(FAMILY, padded=True)))
    assert costs_of(dump_costs(two)) == two
    fast = {name for name, provider in PROVIDERS.items() if not provider.rounds and not provider.rows_keep_on}
    assert set(KERNEL_PROVIDERS) == fast, "tiles are for bits, and never the fastest way"


@pytest.mark.parametrize(
    ("old", "new", "code", "line", "message"),
    [
        ('"padded", ms', '"cutlass", ms', "S402", 9, "`cutlass` multiplies no rows: known here are bmm, grouped"),
        ("padded = 0.1", "cutlas = 0.1", "S402", 9, "`cutlas` multiplies no rows"),
        ("padded = 0.1", "padded = -0.1", "S402", 9, "`padded` took -0.1 ms"),
        ("[3, 8]", "[2, 8]", "S402", 9, "a bucket of 2 to 8 rows behind one of 1 to 2"),
        ("[20, 40]", "[4, 7]", "S402", 10, "a bucket of 4 to 7 rows behind one of 3 to 8"),
        ("[3, 8]", "[8, 3]", "S402", 9, "`rows` of a bucket is [8, 3], not [least, most]"),
        ("[3, 8]", "3", "S402", 9, "`rows` of a bucket is 3"),
        ("rows = [3", "row = [3", "S401", 9, "a bucket has no `row`"),
        ("experts = 3", "experts = 0", "S402", 3, "`experts` of `kernels` is 0"),
        ("width = 24\n", "", "S402", 2, "`kernels` says no `width`"),
        ('"float32"', '"int8"', "S402", 6, "`dtype` of `kernels` is 'int8'"),
        ("inner", "inside", "S401", 5, "`kernels` has no `inside`"),
        ("[[kernels]]", "[kernels]", "S402", 2, "`kernels` is no list of tables"),
        ("]\n", "]\n" + TABLE.partition("\n")[2], "S402", 13, "two tables of `kernels` have one shape"),
    ],
)
def test_wrong_tables_are_said_at_their_places(old: str, new: str, code: str, line: int, message: str) -> None:
    text = TABLE.removesuffix("]\n") + new if old == "]\n" else TABLE.replace(old, new)
    with pytest.raises(DiagnosticError) as caught:
        costs_of(text)
    (finding,) = caught.value.diagnostics
    assert (finding.code, finding.primary.span.line) == (code, line)
    assert message in finding.message
