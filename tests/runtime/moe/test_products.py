"""Products of experts: every provider's bits, gates without outputs, rows that belong to nobody, and the choice."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.autograd.graph import get_gradient_edge, saved_tensors_hooks
from torch.utils.flop_counter import FlopCounterMode

from schedc.ir.plan import PRODUCTS, Products
from schedc_runtime.errors import RuntimeFault
from schedc_runtime.kernels.swiglu import gated
from schedc_runtime.moe.experts import Experts
from schedc_runtime.moe.fp8 import as_fp8, fp8_products
from schedc_runtime.moe.products import PROVIDERS, Case, RowGroups, compared_bitwise, passed_over, provider_for
from schedc_runtime.moe.stacked_linear import stacked_linear, weighted_linear
from schedc_runtime.stage.split import SplitBackward

torch.set_num_threads(1)
CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16)


def turned(experts: Experts) -> Experts:
    """The same experts with weights stored by columns, as those of Hugging Face are."""
    for name, weight in list(experts.named_parameters()):
        by_columns = weight.detach().transpose(1, 2).contiguous().transpose(1, 2)
        setattr(experts, name, torch.nn.Parameter(by_columns))
    return experts


def run(experts: Experts, rows: Tensor, gates: Tensor, counts: Any, split: bool = False) -> list[Tensor]:
    """Output, gradients of rows and gates, and gradients of both weights; ``split``: by I and W."""
    experts = copy.deepcopy(experts)
    rows, gates = rows.clone().requires_grad_(), gates.clone().requires_grad_()
    output = experts(rows, counts, gates)
    grad = output.detach().float().sin().to(output.dtype)
    if split:
        works = SplitBackward()
        works.backward(0, [get_gradient_edge(output)], [grad])
        assert experts.gate_up.grad is None
        assert len(works.pending[0].products) == 2  # one per stack
        works.weight(0)
    else:
        output.backward(grad)
    results = [output.detach(), rows.grad, gates.grad, experts.gate_up.grad, experts.down.grad]
    assert all(result is not None for result in results)
    return results  # type: ignore[return-value]


def case(counts: list[int], dtype: torch.dtype, width: int = 24, inner: int = 16) -> tuple[Experts, Tensor, Tensor]:
    torch.manual_seed(sum(counts))
    experts = Experts(len(counts), width, inner).to(dtype)
    rows = torch.randn(sum(counts), width).to(dtype)
    return experts, rows, torch.rand(sum(counts), dtype=torch.promote_types(dtype, torch.float32))


def equal(first: list[Tensor], second: list[Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(first, second, strict=True)]


@settings(max_examples=40)
@given(
    counts=st.lists(st.sampled_from([0, 0, 1, 2, 7, 33]), min_size=1, max_size=6),
    dtype=st.sampled_from(DTYPES),
    by_columns=st.booleans(),
    split=st.booleans(),
)
def test_grouped_products_have_the_bits_of_the_loop(
    counts: list[int], dtype: torch.dtype, by_columns: bool, split: bool
) -> None:
    experts, rows, gates = case(counts, dtype)
    experts = turned(experts) if by_columns else experts
    strides = [weight.stride() for weight in experts.parameters()]
    experts.products = Products("loop")
    expected = run(experts, rows, gates, counts)
    experts.products = Products("grouped")
    results = run(experts, rows, gates, counts, split)
    assert equal(results, expected) == [True] * 5
    assert [grad.stride() for grad in results[3:]] == strides or min(experts.gate_up.shape) == 1


@pytest.mark.parametrize("name", ["grouped", "loop"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("counts", [[3, 0, 5, 2], [0, 0, 0, 0]])
def test_rows_behind_the_last_are_not_read(name: str, dtype: torch.dtype, counts: list[int]) -> None:
    experts, rows, gates = case(counts, dtype)
    experts.products = Products(name)
    expected = run(experts, rows, gates, counts)
    filled = sum(counts)
    nobody = torch.full((6, rows.shape[1]), float("nan"), dtype=dtype)
    longer = torch.cat([rows, nobody]), torch.cat([gates, nobody[:, 0].to(gates.dtype)])
    output, rows_grad, gates_grad, *weights = run(experts, *longer, torch.tensor(counts), split=True)
    assert equal([output[:filled], rows_grad[:filled], gates_grad[:filled], *weights], expected) == [True] * 5


def test_rows_of_nobody_do_not_stop_a_search_for_nan() -> None:
    experts, rows, gates = case([3, 2], torch.float32)
    nan = torch.full((4, rows.shape[1]), float("nan"))
    longer, gates = torch.cat([rows, nan]).requires_grad_(), torch.cat([gates, nan[:, 0]]).requires_grad_()
    with torch.autograd.set_detect_anomaly(True):
        output = experts(longer, torch.tensor([3, 2]), gates)
        output.sum().backward()
    assert torch.equal(output[5:], torch.zeros(4, rows.shape[1]))
    assert output.isfinite().all()
    assert longer.grad is not None
    assert longer.grad.isfinite().all()


@pytest.mark.parametrize("lent", [0, 2])
@pytest.mark.parametrize("device_too", [False, True])
def test_borrowed_experts_behind_the_own(lent: int, device_too: bool) -> None:
    counts = [3, 0, 5, *[2, 4][:lent]]
    experts, rows, gates = case(counts, torch.float32)
    expected = experts(rows, counts, gates).detach()
    borrowed = [weight.detach()[3:].clone().requires_grad_() for weight in experts.parameters()]
    experts.keep(0, 3)
    ends = torch.tensor(counts).cumsum(0, dtype=torch.int32) if device_too else None
    output = experts(rows, RowGroups(tuple(counts), ends), gates, None, *borrowed)
    assert torch.equal(output, expected)
    output.sum().backward()
    assert experts.down.grad is not None
    assert all((slot.grad is not None) == bool(lent) for slot in borrowed)


@pytest.mark.parametrize("name", ["loop", "bmm", "grouped", "padded", "tiles"])
def test_padded_rows(name: str) -> None:
    experts, rows, gates = case([4, 4, 4], torch.float32)
    experts.products = Products(name)
    at_once, split = run(experts, rows, gates, None), run(experts, rows, gates, None, split=True)
    assert equal(at_once, split) == [True] * 5
    experts.products = Products("loop")
    for result, expected in zip(at_once, run(experts, rows, gates, [4, 4, 4]), strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("by_columns", [False, True])
def test_rows_of_tiles_keep_their_bits(dtype: torch.dtype, by_columns: bool) -> None:
    """Outputs and gradients of rows and gates, whatever rows lie beside them; weight gradients are the loop's."""
    experts, rows, gates = case([3, 70, 0, 33], dtype, 96, 48)
    experts = turned(experts) if by_columns else experts
    experts.products = Products("tiles")
    every = run(experts, rows, gates, [3, 70, 0, 33])
    kept = torch.tensor([1, 2, *range(5, 37), 72, *range(73, 106, 3)])
    some = run(experts, rows[kept], gates[kept], [2, 33, 0, 11])
    assert equal(some[:3], [result[kept] for result in every[:3]]) == [True] * 3
    assert equal(every, run(experts, rows, gates, RowGroups((3, 70, 0, 33)), split=True)) == [True] * 5
    experts.products = Products("loop")
    for result, expected in zip(every, run(experts, rows, gates, [3, 70, 0, 33]), strict=True):
        torch.testing.assert_close(result, expected)


@pytest.mark.parametrize("counts", [[3, 0, 5, 2], None])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_gates_need_no_outputs(counts: list[int] | None, dtype: torch.dtype) -> None:
    experts, rows, gates = case([3, 0, 5, 2] if counts else [3, 3, 3, 3], dtype)
    output, *grads = run(experts, rows, gates, counts)
    experts, rows, gates = copy.deepcopy(experts), rows.requires_grad_(), gates.requires_grad_()
    expected = (experts(rows, counts) * gates.unsqueeze(-1)).to(dtype)
    assert torch.equal(output, expected)
    expected.backward(output.float().sin().to(dtype))
    for grad, leaf in zip(grads, (rows, gates, experts.gate_up, experts.down), strict=True):
        tolerance = {"rtol": 1e-12, "atol": 1e-14} if dtype == torch.float64 else {"rtol": 0.05, "atol": 0.02}
        torch.testing.assert_close(grad, leaf.grad, **tolerance)


def test_gates_in_a_narrower_type_are_summed_in_the_wider() -> None:
    experts, rows, _ = case([3, 4], torch.float64)
    gates = torch.rand(7)
    assert run(experts, rows, gates, [3, 4])[2].dtype == torch.float32
    wide = run(experts, rows, gates.double(), [3, 4])[2]
    assert torch.equal(run(experts, rows, gates, [3, 4])[2], wide.float())


def test_outputs_are_not_held() -> None:
    experts, rows, gates = case([3, 0, 5, 2], torch.float32)
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        output = experts(rows.requires_grad_(), [3, 0, 5, 2], gates.requires_grad_())
    weights = sum(weight.nbytes for weight in experts.parameters())
    width, inner = 24, 16
    assert output.shape == (10, width)
    assert sum(saved.values()) - weights == 10 * 4 * (width + 3 * inner + 1)  # rows, both products' results, gates


@pytest.mark.parametrize("frozen", ["rows", "gates", "gate_up", "down"])
def test_what_is_frozen_gets_nothing_and_changes_nothing_else(frozen: str) -> None:
    experts, rows, gates = case([3, 0, 5, 2], torch.float32)
    names = "output", "rows", "gates", "gate_up", "down"
    expected = dict(zip(names, run(experts, rows, gates, [3, 0, 5, 2]), strict=True))
    leaves = {"rows": rows, "gates": gates, **dict(experts.named_parameters())}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    output = experts(rows, [3, 0, 5, 2], gates)
    output.backward(expected["output"].sin())
    assert leaves[frozen].grad is None
    grads = {name: leaf.grad for name, leaf in leaves.items() if name != frozen}
    assert all(torch.equal(grad, expected[name]) for name, grad in grads.items())  # type: ignore[arg-type]


def test_expanded_gradients_and_narrowed_rows() -> None:
    weight = torch.randn(2, 8, 12, requires_grad=True)
    wide = torch.randn(5, 11)
    for rows in (wide[:, :8], torch.randn(8, 5).t(), torch.randn(8).expand(5, 8)):
        grads = []
        for name in ("loop", "grouped"):
            leaf = rows.detach().requires_grad_()
            result = stacked_linear(leaf, weight, RowGroups((2, 3)), PROVIDERS[name])
            grads.append([*torch.autograd.grad(result.sum(), [leaf, weight]), result.detach()])
        assert equal(*grads) == [True] * 3


def test_meta_tensors_ask_for_nothing() -> None:
    experts, rows, gates = case([3, 2], torch.float32)
    experts, rows, gates = experts.to("meta"), rows.to("meta").requires_grad_(), gates.to("meta").requires_grad_()
    for counts in (torch.tensor([3, 2], device="meta"), None):
        rows_here, gates_here = (rows, gates) if counts is not None else (rows[:4], gates[:4])
        experts(rows_here, counts, gates_here).sum().backward()
    assert experts.down.grad is not None
    assert experts.down.grad.shape == experts.down.shape


def test_flops_of_grouped_products_are_counted() -> None:
    weight = torch.randn(2, 8, 12, requires_grad=True)
    with FlopCounterMode(display=False) as flops:
        rows = torch.randn(5, 8, requires_grad=True)
        stacked_linear(rows, weight, RowGroups((2, 3)), PROVIDERS["grouped"]).sum().backward()
    assert flops.get_total_flops() == 3 * 2 * 5 * 8 * 12


def test_the_nodes_of_a_weighted_product_are_not_differentiable_twice() -> None:
    leaf = torch.randn(4, 8, requires_grad=True)
    gates, weight = torch.rand(4, requires_grad=True), torch.randn(1, 8, 8, requires_grad=True)
    result = weighted_linear(gated(leaf, leaf), weight, gates, RowGroups((4,)), PROVIDERS["loop"])
    with pytest.raises(RuntimeFault, match="gradient of a gradient"):
        torch.autograd.grad(result.sum(), [leaf], create_graph=True)


COLUMNS = (24, 32, 16)


@pytest.mark.parametrize(
    ("setting", "wanted", "provider"),
    [
        (Case(CPU, torch.float32, COLUMNS, False), "auto", "grouped"),
        (Case(CPU, torch.bfloat16, COLUMNS, False), "auto", "grouped"),
        (Case(CPU, torch.float64, COLUMNS, False), "auto", "loop"),
        (Case(CPU, torch.float32, (6, 10, 5), False), "auto", "loop"),
        (Case(CPU, torch.float32, COLUMNS, True), "auto", "bmm"),
        (Case(CPU, torch.float32, COLUMNS, True), "grouped", "grouped"),
        (Case(CPU, torch.float32, COLUMNS, False), "loop", "loop"),
        (Case(torch.device("cuda"), torch.float32, COLUMNS, False), "auto", "loop"),
    ],
)
def test_the_choice(setting: Case, wanted: str, provider: str) -> None:
    assert provider_for(Products(wanted), setting).name == provider


@pytest.mark.parametrize(
    ("setting", "wanted", "reason", "fallback"),
    [
        (Case(CPU, torch.float64, COLUMNS, False), "grouped", "float64 on cpu: .* take float32, bfloat16", "loop"),
        (Case(CPU, torch.bfloat16, (24, 20, 10), False), "grouped", "20 columns of 2 bytes", "loop"),
        (Case(CPU, torch.float32, COLUMNS, False), "bmm", "different numbers of rows", "grouped"),
        (Case(torch.device("mps"), torch.float32, COLUMNS, False), "grouped", "float32 on mps", "loop"),
        (
            Case(CPU, torch.bfloat16, COLUMNS, False),
            "scaled_grouped",
            "bfloat16 on cpu: fp8 products take",
            "quantized",
        ),
    ],
)
def test_a_provider_that_is_not_there(setting: Case, wanted: str, reason: str, fallback: str) -> None:
    assert not PROVIDERS[wanted].available(setting)
    with pytest.raises(RuntimeFault, match=reason):
        provider_for(Products(wanted), setting)
    assert provider_for(Products(wanted, or_fallback=True), setting).name == fallback


@pytest.mark.parametrize(
    ("capability", "hip", "reason"),
    [
        ((9, 0), None, ""),
        ((10, 3), None, ""),
        ((8, 0), None, "a GPU of compute capability 8.0, and grouped products need 9 or 10"),
        ((8, 9), None, "a GPU of compute capability 8.9, and grouped products need 9 or 10"),
        ((11, 0), None, "a GPU of compute capability 11.0, and grouped products need 9 or 10"),
        ((12, 0), None, "a GPU of compute capability 12.0, and grouped products need 9 or 10"),
        ((9, 4), "6.4", "a GPU of ROCm"),
    ],
)
def test_grouped_products_need_a_gpu_on_which_torch_does_not_ask_the_host(
    capability: tuple[int, int], hip: str | None, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of torch 2.13, `_grouped_mm_cuda`: elsewhere it copies the ends to the host and loops."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    setting = Case(torch.device("cuda", 0), torch.bfloat16, (32, 64, 32), False, counted=False)
    provider_for.cache_clear()
    try:
        for name, fallback in (("grouped", "loop"), ("scaled_grouped", "quantized")):
            assert PROVIDERS[name].why_not(setting).startswith(reason)
            assert PROVIDERS[name].available(setting) == (not reason)
            assert provider_for(Products(name, or_fallback=True), setting).name == (fallback if reason else name)
        assert provider_for(Products(), setting).name == ("loop" if reason else "grouped")
        assert ("copy the ends to the host" in passed_over(Products(), setting).get("grouped", "")) == bool(reason)
    finally:
        provider_for.cache_clear()


def test_a_name_that_is_none() -> None:
    with pytest.raises(RuntimeFault, match="products `cutlass`"):
        provider_for(Products("cutlass"), Case(CPU, torch.float32, COLUMNS, False))
    assert {"auto", *PROVIDERS} == set(PRODUCTS)


def test_who_may_be_compared_bit_by_bit() -> None:
    gpu = torch.device("cuda")
    for name in ("auto", "loop", "bmm", "grouped", "tiles"):
        assert compared_bitwise(Products(name), CPU) == Products(name)
    assert compared_bitwise(Products(), gpu) == Products("loop")
    assert compared_bitwise(Products("bmm", True), gpu) == Products("bmm", True)
    for name in ("scaled_grouped", "quantized"):
        with pytest.raises(RuntimeFault, match=f"products {name}: it rounds to fp8, and bits are to be compared"):
            compared_bitwise(Products(name, or_fallback=True), CPU)
    with pytest.raises(RuntimeFault, match="products tiles: it adds in an order of its own on cuda"):
        compared_bitwise(Products("tiles"), gpu)
    with pytest.raises(RuntimeFault, match="products grouped: it adds in an order of its own on cuda") as caught:
        compared_bitwise(Products("grouped"), gpu)
    assert "write `products bmm` or `products loop`, or leave `--check bitwise` out" in str(caught.value)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64])
@pytest.mark.parametrize("split", [False, True])
def test_products_in_fp8_are_rounded_and_their_weight_gradients_are_not(dtype: torch.dtype, split: bool) -> None:
    counts = [33, 0, 7, 21]
    experts, rows, gates = case(counts, dtype)
    experts.products = Products("loop")
    expected = run(experts, rows, gates, counts)
    experts.products = Products("scaled_grouped", or_fallback=True)
    results = run(experts, rows, gates, counts, split)
    for result, exact in zip(results, expected, strict=True):
        error = (result.double() - exact.double()).norm() / exact.double().norm()
        assert 0.001 < error < 0.1  # fp8 has three bits behind the first
    nobody = torch.full((3, rows.shape[1]), float("nan"), dtype=dtype)
    if dtype is not torch.float64:
        output, *_ = run(experts, torch.cat([rows, nobody]), torch.ones(len(rows) + 3), torch.tensor(counts))
        assert output[: len(rows)].isfinite().all()


def test_rounding_to_fp8_keeps_the_largest_number_of_each_row() -> None:
    matrix = torch.randn(2, 5, 16) * torch.logspace(-20, 8, 5)[:, None]
    matrix[1, 3] = 0
    result = as_fp8(matrix)
    largest = matrix.abs().argmax(-1, keepdim=True)
    torch.testing.assert_close(result.gather(-1, largest), matrix.gather(-1, largest), rtol=1e-6, atol=0)
    assert (result - matrix).abs().le(matrix.abs() / 16 + matrix.abs().amax(-1, keepdim=True) / 448 / 2).all()
    assert torch.equal(as_fp8(result), result)


def test_the_call_for_fp8_products_fits_what_torch_checks() -> None:
    """The meta device checks dtypes, strides and shapes of scales as a GPU does."""
    rows = torch.empty(40, 32, device="meta", dtype=torch.bfloat16)
    weights = torch.empty(4, 48, 32, device="meta", dtype=torch.bfloat16)
    ends = torch.empty(4, device="meta", dtype=torch.int32)
    assert fp8_products(rows, weights.transpose(1, 2), ends).shape == (40, 48)
    assert fp8_products(rows, torch.empty(4, 32, 48, device="meta"), ends).dtype is torch.bfloat16
